"""``trace.json.gz``: the step on a time axis for Perfetto, in Chrome's trace event format. Times are in microseconds.

Process 1 is the timed step on the GPU: its phases, its layers (nested), the collectives that it waits for, one track
per stream (collectives included), and memory if the step's allocations were recorded. Process 2 is the whole run by
this machine's clock.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.analysis.times.covering import hidden_us
from fakedist.analysis.times.group_times import exposed_parts
from fakedist.analysis.times.kernel_kinds import timed
from fakedist.analysis.times.merging import bars, kind_runs, layer_runs, longest_runs
from fakedist.run import notes
from fakedist.run.directory import TRACE_NAME
from fakedist.run.notes import Note
from fakedist.run.plain import to_plain
from fakedist.run.schema import FAMILIES, KINDS
from fakedist.run.step_time import KernelSource
from fakedist.run.summary import Summary
from fakedist.temporary import replacing

#: Limit for the bars of all streams together, and for the slices of layers. A browser opens this many in seconds.
MOST_BARS = 300_000
#: Limit for the points of the memory counter. Each is the maximum of its interval.
MOST_POINTS = 20_000
_GPU, _HOST = 1, 2
#: Events that are compressed together: a megabyte.
_MOST_TOGETHER = 10_000
_PHASES, _LAYERS, _EXPOSED, _FIRST_STREAM = 1, 2, 3, 10
#: Tracks of the script's ranges: one a thread, behind those of the streams.
_FIRST_THREAD = 1_000_000


def write_trace(
    run_directory: Path, tables: dict[str, pd.DataFrame], summary: Summary, source: KernelSource | None
) -> list[Note]:
    """Write the trace of a run.

    Args:
        run_directory: The run directory.
        tables: The run's tables by name.
        summary: The run's figures: whose trace it is.
        source: Where the kernels come from; None without kernels.

    Returns:
        Notes on what the trace leaves out. The trace contains their texts too.
    """
    left_out: list[Note] = []
    with replacing(run_directory / TRACE_NAME) as path, gzip.open(path, "wb", compresslevel=4) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        events, before = trace_events(tables, source, left_out), ""
        while some := list(islice(events, _MOST_TOGETHER)):
            file.write((before + ",\n".join(some)).encode())
            before = ",\n"
        file.write(f'\n],"otherData":{json.dumps(_about(summary, source, left_out))}}}\n'.encode())
    return left_out


def _about(summary: Summary, source: KernelSource | None, left_out: list[Note]) -> dict[str, str]:
    told = {"made by": "fakedist"}
    if summary.rank is not None:
        told["rank"] = f"rank {summary.rank} of {summary.world_size}"
    told |= {key: str(value) for key, value in to_plain(source).items()} if source else {}
    return told | ({"left out": "; ".join(note.text for note in left_out)} if left_out else {})


def trace_events(tables: dict[str, pd.DataFrame], source: KernelSource | None, left_out: list[Note]) -> Iterator[str]:
    """Every event as JSON.

    Args:
        tables: Tables by name: kernels, ranges, layers, calls, groups, events, spans.
        source: Where the kernels come from; None without kernels.
        left_out: Receives a note for everything that is left out.
    """
    kernels = tables["kernels"]
    if len(kernels):
        ready = timed(kernels)
        told = f"GPU, {source.source} by {source.tool}: step {source.step}" if source else "GPU"
        yield _name("process_name", _GPU, 0, told)
        yield from _slices(_GPU, _PHASES, "phases", kind_runs(ready), [*KINDS])
        names = [str(name) for name in tables["layers"]["name"]]
        all_runs = layer_runs(ready, tables["layers"]["parent"].to_numpy())
        runs = longest_runs(all_runs, MOST_BARS)
        if num := len(all_runs) - len(runs):
            left_out.append(notes.trace_bars_left_out(num, len(all_runs)))
        yield from _slices(_GPU, _LAYERS, "layers", runs.rename(columns={"layer": "row"}), names)
        found = bars(ready, MOST_BARS)
        if len(found) < len(ready):
            left_out.append(notes.trace_kernels_merged(len(ready), len(found)))
        calls = call_texts(tables["calls"], tables["groups"])
        yield from _exposed(ready, calls)
        yield from _streams(ready, found, names, calls)
        yield from _ranges(tables["ranges"])
        yield from _memory(_GPU, *_memory_on_gpu(ready, tables["events"]))
    events = tables["events"]
    if len(events):
        yield _name("process_name", _HOST, 0, "host: the recorded run, wall time of this machine")
        time = np.maximum.accumulate((events["time_us"] - int(events["time_us"].min())).to_numpy("f8"))
        yield from _host_phases(tables["spans"], time)
        yield from _memory(_HOST, time, events)


def _name(what: str, process: int, thread: int, text: str) -> str:
    return json.dumps({"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": text}})


def _slices(process: int, thread: int, track: str, runs: pd.DataFrame, names: list[str]) -> Iterator[str]:
    """A track of slices. Slices on one track nest or are disjoint."""
    yield _name("thread_name", process, thread, track)
    texts = [json.dumps(name) for name in names]
    of_run = runs["row" if "row" in runs else "kind"].to_numpy("i8")
    start, end = runs["start_us"].to_numpy("f8"), runs["end_us"].to_numpy("f8")
    for name, begin, until, kind in zip(of_run.tolist(), start.tolist(), end.tolist(), runs["kind"], strict=True):
        cat = f',"cat":"{KINDS[int(kind)]}"' if isinstance(kind, (int, float)) else ""
        yield _slice(texts[name], process, thread, begin, until, more=cat)


def _slice(name: str, process: int, thread: int, begin_us: float, until_us: float, *, more: str = "") -> str:
    """A slice. Both ends are rounded to nanoseconds the same way, so nested slices stay nested."""
    begin, until = round(begin_us * 1e3), round(until_us * 1e3)
    return (
        f'{{"ph":"X","name":{name},"pid":{process},"tid":{thread},'
        f'"ts":{_us(begin)},"dur":{_us(max(until - begin, 0))}{more}}}'
    )


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def call_texts(calls: pd.DataFrame, groups: pd.DataFrame) -> dict[int, str]:
    """Names of collectives by sequence number: "all_gather_into_tensor on tp"."""
    names = [str(row["description"] or row["name"]) for row in groups.to_dict("records")]
    columns = [calls[name].tolist() for name in ("sequence", "operation", "group")]
    return {
        sequence: f"{operation} on {names[group] if group < len(names) else group}"
        for sequence, operation, group in zip(*columns, strict=True)
    }


def _exposed(kernels: pd.DataFrame, calls: dict[int, str]) -> Iterator[str]:
    """A track of what the step waits for: a collective while nothing computes."""
    parts = exposed_parts(kernels)
    if not len(parts):
        return
    yield _name("thread_name", _GPU, _EXPOSED, "exposed communication: the step waits")
    call = kernels["call"].to_numpy("i8")[parts["row"].to_numpy("i8")].tolist()
    for number, begin, until in zip(call, parts["start_us"].tolist(), parts["end_us"].tolist(), strict=True):
        yield _slice(json.dumps(calls.get(number, "collective")), _GPU, _EXPOSED, begin, until)


def _streams(kernels: pd.DataFrame, found: pd.DataFrame, layers: list[str], calls: dict[int, str]) -> Iterator[str]:
    """One track per stream. A bar of several kernels gives their number and shows the longest."""
    handles = found["stream"].unique().tolist()  # sorted: the default stream is 0
    streams = {stream: _FIRST_STREAM + at for at, stream in enumerate(handles)}
    for at, stream in enumerate(handles):
        yield _name("thread_name", _GPU, _FIRST_STREAM + at, f"stream {at}" + (f" ({stream:#x})" if stream else ""))
    rows = kernels.iloc[found["first"].to_numpy("i8")]
    texts = {name: json.dumps(name) for name in rows["name"].unique()}
    layer_texts = [json.dumps(name) for name in layers]
    operations = {name: json.dumps(name) for name in rows["operation"].unique()}
    columns = [found[name].tolist() for name in ("stream", "start_us", "end_us", "num_kernels", "known")]
    columns += [rows[name].tolist() for name in ("name", "family", "kind", "layer", "operation", "call")]
    columns.append(hidden_us(found, kernels).tolist())
    for stream, begin, until, num, known, name, family, kind, layer, operation, call, hidden in zip(
        *columns, strict=True
    ):
        text = texts[name]
        if num > 1:
            text = json.dumps(f"{num} kernels, the longest {name}")
        elif call >= 0 and call in calls:
            text = json.dumps(calls[call])
        more = f',"cat":"{FAMILIES[family]}","args":{{"phase":"{KINDS[kind]}","layer":{layer_texts[layer]},'
        more += f'"operation":{operations[operation]}'
        if known and FAMILIES[family] == "communication":
            more += f',"hidden, us":{hidden:.3f},"exposed, us":{max(until - begin - hidden, 0.0):.3f}'
        more += "}" if known else ',"duration":"not known"}'
        if known:
            yield _slice(text, _GPU, streams[stream], begin, until, more=more)
        else:
            when = _us(round(begin * 1e3))
            yield f'{{"ph":"i","s":"t","name":{text},"pid":{_GPU},"tid":{streams[stream]},"ts":{when}{more}}}'


def _ranges(ranges: pd.DataFrame) -> Iterator[str]:
    """The script's ranges by thread, from the launch of the first kernel in each to that of the last."""
    known = ranges[ranges["begin_us"].notna()]
    for thread, rows in known.groupby("thread"):
        track = _FIRST_THREAD + int(str(thread))
        yield _name("thread_name", _GPU, track, f"ranges of the script, thread {thread}: launches")
        for name, begin, end, num, us in zip(
            *(rows[each].tolist() for each in ("name", "begin_us", "end_us", "num_kernels", "kernel_us")), strict=True
        ):
            more = f',"args":{{"kernels":{num},"kernel time, us":{us:.3f}}}'
            yield _slice(json.dumps(name), _GPU, track, begin, end, more=more)


def _memory_on_gpu(kernels: pd.DataFrame, events: pd.DataFrame) -> tuple[Array, pd.DataFrame]:
    """Allocator events of the timed step, each at the time when its operation launched its kernels."""
    numbered = kernels[kernels["op"] >= 0]
    launched = numbered["launch_us"].notna()
    numbered = numbered[launched] if launched.any() else numbered
    if not len(numbered) or not len(events):
        return np.zeros(0), events.iloc[:0]
    launch = numbered["launch_us" if launched.any() else "start_us"].to_numpy("f8")
    order = np.argsort(numbered["op"].to_numpy("i8"), kind="stable")
    op, launch = numbered["op"].to_numpy("i8")[order], np.maximum.accumulate(launch[order])
    inside = events[(events["op"] >= op[0]) & (events["op"] <= op[-1])]
    place = np.searchsorted(op, inside["op"].to_numpy("i8"))
    return launch[np.minimum(place, len(op) - 1)], inside


def _memory(process: int, time: Array, events: pd.DataFrame) -> Iterator[str]:
    """The counter of allocated and reserved memory. Of many events, the largest in each interval is kept."""
    if not len(events):
        return
    columns = events[["allocated_bytes", "reserved_bytes"]].to_numpy("i8")
    rows = np.arange(len(events))
    if len(rows) > MOST_POINTS:
        stretch = rows * MOST_POINTS // len(rows)
        rows = np.lexsort((-columns[:, 0], stretch))[np.unique(stretch, return_index=True)[1]]
    for at, (allocated, reserved) in zip(time[rows].tolist(), columns[rows].tolist(), strict=True):
        values = f'{{"allocated":{allocated},"reserved":{reserved}}}'
        yield f'{{"ph":"C","name":"memory, bytes","pid":{process},"ts":{_us(round(at * 1e3))},"args":{values}}}'


def _host_phases(spans: pd.DataFrame, time: Array) -> Iterator[str]:
    """Steps with their phases, by the wall-clock times of the allocator's events."""
    yield _name("thread_name", _HOST, _PHASES, "steps")
    first = spans["first_event"].to_numpy("i8")
    begins = time[np.minimum(first, len(time) - 1)]
    ends = np.append(begins[1:], time[-1])
    step = spans["step"].to_numpy("i8")
    starts = np.flatnonzero(np.diff(step, prepend=step[:1] - 1))
    for at, end in zip(starts.tolist(), np.append(starts[1:], len(step)).tolist(), strict=True):
        yield _slice(json.dumps(f"step {step[at]}"), _HOST, _PHASES, begins[at], ends[end - 1])
        for row in range(at, end):
            yield _slice(json.dumps(str(spans["phase"].iloc[row])), _HOST, _PHASES, begins[row], ends[row])
