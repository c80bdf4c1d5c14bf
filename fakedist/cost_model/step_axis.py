"""The step on a time axis: as a trace for Perfetto, and as bars for drawings. Times are in microseconds.

Process 1 is the timed step on the GPU: phases, layers (nested), collectives that it waits for, the host with its layers
and operations, a track per stream with an arrow from each launch, and memory if its allocations were recorded.
Process 2 is the whole run by this machine's clock.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.cost_model.breakdown import exposed_parts, timed
from fakedist.cost_model.host_times import host_bars, host_threads, thread_titles
from fakedist.cost_model.overlap import shared_us, union
from fakedist.options import Job
from fakedist.rundir import notes
from fakedist.rundir.directory import TRACE_NAME
from fakedist.rundir.notes import Note
from fakedist.rundir.plain import to_plain
from fakedist.rundir.schema import FAMILIES, KINDS
from fakedist.rundir.step_time import KernelSource
from fakedist.temporary import replacing


def hidden_us(bars: pd.DataFrame, kernels: pd.DataFrame) -> Array:
    """Microseconds for which something computes during each of some bars."""
    starts, ends = _computing(kernels)
    return shared_us(bars["start_us"].to_numpy("f8"), bars["end_us"].to_numpy("f8"), starts, ends)


def hidden_parts(kernels: pd.DataFrame, least_us: float) -> pd.DataFrame:
    """Parts of collectives under compute: stream, start_us, end_us. Parts and pauses below ``least_us`` are ignored."""
    begins, until = union(*_computing(kernels))
    if len(begins):
        apart = np.concatenate([[True], begins[1:] - until[:-1] > least_us])
        begins = begins[apart]
        until = until[np.concatenate([apart[1:], [True]])]
    calls = kernels[~kernels["is_compute"] & kernels["is_known"]].sort_values(["stream", "start_us"], kind="stable")
    start = calls["start_us"].to_numpy("f8")
    end = start + calls["known_us"].to_numpy("f8")
    first = np.searchsorted(until, start, side="right")
    num = np.maximum(np.searchsorted(begins, end, side="left") - first, 0)
    call = np.repeat(np.arange(len(calls)), num)
    index = np.arange(len(call)) - np.repeat(np.cumsum(num) - num, num) + first[call]
    parts = pd.DataFrame(
        {
            "stream": calls["stream"].to_numpy()[call],
            "start_us": np.maximum(begins[index], start[call]),
            "end_us": np.minimum(until[index], end[call]),
        }
    )
    return parts[parts["end_us"] - parts["start_us"] >= least_us].reset_index(drop=True)


def _computing(kernels: pd.DataFrame) -> tuple[Array, Array]:
    compute = kernels[kernels["is_compute"]]
    start = compute["start_us"].to_numpy("f8")
    return start, start + compute["known_us"].to_numpy("f8")


_KIND_FROM_DEPTH = 2  # depth 0 is the model, 1 the list of its layers, 2 a layer


def bars(kernels: pd.DataFrame, most: int) -> pd.DataFrame:
    """At most about ``most`` bars, by stream and start.

    Of more kernels, neighbours on a stream merge that are less than a 4,000th of the step apart, of the same layer and
    kind, and all compute or all communication; then any that begin in the same short interval.

    Returns:
        Columns stream, start_us, end_us, first (row in ``kernels`` of the bar's longest kernel), num_kernels, and known
        (the duration is known; collectives of unknown duration are never merged).
    """
    start = kernels["start_us"].to_numpy("f8")
    stream = kernels["stream"].to_numpy("u8")
    order = np.lexsort((start, stream))
    stream, start = stream[order], start[order]
    end = start + kernels["known_us"].to_numpy()[order]
    known = kernels["is_known"].to_numpy(bool)[order]
    new_stream = np.concatenate([[True], stream[1:] != stream[:-1]])[: len(order)]
    begins = np.ones(len(order), bool)
    span = float(end.max(initial=0.0)) or 1.0
    if len(order) > most:
        like = [kernels[name].to_numpy()[order] for name in ("layer", "kind", "is_compute")]
        reached = _reached(end, new_stream)
        apart = np.concatenate([[True], start[1:] - reached[:-1] > span / 4_000])
        begins = _different(like) | apart | new_stream | ~known | _after(~known)
    if begins.sum() > most:
        width = span / max(most // max(int(new_stream.sum()), 1), 1)
        begins = _different([(start // width).astype("i8")]) | new_stream | ~known | _after(~known)
    return _merged(order, np.flatnonzero(begins), stream=stream, start=start, end=end, known=known)


def _merged(order: Array, first: Array, *, stream: Array, start: Array, end: Array, known: Array) -> pd.DataFrame:
    bar = np.repeat(np.arange(len(first)), np.diff(first, append=len(order)))
    until = np.maximum.reduceat(end, first) if len(order) else end
    if len(first) > 1:  # kernels on a stream can overlap (one may start early), bars must not
        same = stream[first[1:]] == stream[first[:-1]]
        until[:-1] = np.where(same, np.minimum(until[:-1], start[first[1:]]), until[:-1])
    longest = np.lexsort((-(end - start), bar))[first] if len(order) else order
    return pd.DataFrame(
        {
            "stream": stream[first],
            "start_us": start[first],
            "end_us": until,
            "first": order[longest],
            "num_kernels": np.diff(first, append=len(order)),
            "known": known[first],
        }
    )


def _different(columns: list[Array]) -> Array:
    differs = np.ones(len(columns[0]), bool)
    differs[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return differs


def _after(rows: Array) -> Array:
    return np.concatenate([[False], rows[:-1]])


def _reached(end: Array, new_stream: Array) -> Array:
    group = np.cumsum(new_stream) - 1
    reached: Array = pd.Series(end).groupby(group).cummax().to_numpy()
    return reached


def layer_runs(kernels: pd.DataFrame, parents: Array) -> pd.DataFrame:
    """The intervals of each layer on the stream that computes most, parents first, nested like the tree of layers.

    Columns layer, kind, depth, start_us, end_us. Rows of the same depth do not overlap.
    """
    return runs_of(main_stream(kernels), parents)


def runs_of(rows: pd.DataFrame, parents: Array) -> pd.DataFrame:
    """The intervals of each layer as of :func:`layer_runs`, of rows that do not overlap, in order of start."""
    columns = ["layer", "kind", "depth", "start_us", "end_us"]
    if not len(rows):
        return pd.DataFrame({name: [] for name in columns})
    chains = _chains(parents)
    start = rows["start_us"].to_numpy("f8")
    kind = rows["kind"].to_numpy()
    end = np.maximum.accumulate(start + rows["known_us"].to_numpy())
    path = chains[rows["layer"].to_numpy("i8")]
    # A recomputed forward is an interval of its own within a layer, but does not split the model above it.
    backward = [KINDS.index(name) for name in ("recompute", "backward")]
    part = np.where(np.isin(kind, backward), backward[1], kind)
    changed = _different([part])
    pieces = []
    for depth in range(path.shape[1]):
        at = path[:, depth]
        if depth == _KIND_FROM_DEPTH:
            changed = changed | _different([kind])
            part = kind
        changed = changed | _different([at])
        first = np.flatnonzero(changed)
        last = np.append(first[1:], len(rows)) - 1
        until = np.minimum(end[last], np.append(start[first[1:]], np.inf))
        kept = at[first] > 0
        piece = {"layer": at[first], "kind": part[first], "depth": depth, "start_us": start[first], "end_us": until}
        pieces.append(pd.DataFrame(piece)[kept])
    runs: pd.DataFrame = pd.concat(pieces).sort_values(["start_us", "depth"], kind="stable")[columns]
    return runs.reset_index(drop=True)


def longest_runs(runs: pd.DataFrame, most: int) -> pd.DataFrame:
    """The ``most`` longest rows of :func:`layer_runs`, in their order. They still nest."""
    if len(runs) <= most:
        return runs
    kept: pd.DataFrame = runs.loc[(runs["end_us"] - runs["start_us"]).nlargest(most).index.sort_values()]
    return kept


def kind_runs(kernels: pd.DataFrame) -> pd.DataFrame:
    """When forward, backward and so on ran, on the stream that computes most: kind, start_us, end_us."""
    rows = main_stream(kernels)
    kind = rows["kind"].to_numpy()
    start = rows["start_us"].to_numpy("f8")
    end = np.maximum.accumulate(start + rows["known_us"].to_numpy()) if len(rows) else start
    first = np.flatnonzero(_different([kind])) if len(rows) else np.zeros(0, "i8")
    last = np.append(first[1:], len(rows))[: len(first)] - 1
    until = np.minimum(end[last], np.append(start[first[1:]], np.inf)[: len(first)])
    return pd.DataFrame({"kind": kind[first], "start_us": start[first], "end_us": until})


def main_stream(kernels: pd.DataFrame) -> pd.DataFrame:
    """The compute kernels of the stream with the most compute time, in order of start."""
    compute = kernels[kernels["is_compute"] & kernels["is_known"]]
    if not len(compute):
        return compute
    most = compute.groupby("stream")["known_us"].sum().idxmax()
    rows: pd.DataFrame = compute[compute["stream"] == most].sort_values("start_us", kind="stable")
    return rows


def _chains(parents: Array) -> Array:
    """For each layer, the path from the root down to itself, padded with 0 (outside of modules)."""
    chains: list[list[int]] = []
    for layer, parent in enumerate(parents.tolist()):
        chains.append([*(chains[parent] if parent > 0 else []), layer] if layer else [0])
    padded = np.zeros((len(chains), max(map(len, chains), default=1)), "i8")
    for layer, chain in enumerate(chains):
        padded[layer, : len(chain)] = chain
    return padded


#: Limit for the bars of all streams together, and for the slices of layers. A browser opens this many in seconds.
MOST_BARS = 300_000
#: Limit for the points of the memory counter. Each is the maximum of its interval.
MOST_POINTS = 20_000
_GPU, _HOST = 1, 2
#: Events that are compressed together: a megabyte.
_MOST_TOGETHER = 10_000
_PHASES, _LAYERS, _EXPOSED, _HOST_LAYERS, _FIRST_HOST, _FIRST_STREAM = 1, 2, 3, 4, 5, 1_000
#: Limit for the arrows from launches to kernels: beyond it, none is drawn.
_MOST_ARROWS = 50_000
#: Tracks of the script's ranges: one a thread, behind those of the streams.
_FIRST_THREAD = 1_000_000


def write_trace(
    run_directory: Path, tables: dict[str, pd.DataFrame], source: KernelSource | None, job: Job | None
) -> list[Note]:
    """Write the trace of a run or an imported report (no job); return notes on what it leaves out."""
    left_out: list[Note] = []
    with replacing(run_directory / TRACE_NAME) as path, gzip.open(path, "wb", compresslevel=4) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        events = trace_events(tables, source, left_out)
        before = ""
        while some := list(islice(events, _MOST_TOGETHER)):
            file.write((before + ",\n".join(some)).encode())
            before = ",\n"
        file.write(f'\n],"otherData":{json.dumps(_about(job, source, left_out))}}}\n'.encode())
    return left_out


def _about(job: Job | None, source: KernelSource | None, left_out: list[Note]) -> dict[str, str]:
    facts = {"made by": "fakedist"}
    if job is not None:
        facts["rank"] = f"rank {job.rank} of {job.world_size}"
    facts |= {key: str(value) for key, value in to_plain(source).items()} if source else {}
    return facts | ({"left out": "; ".join(note.text for note in left_out)} if left_out else {})


def trace_events(
    tables: dict[str, pd.DataFrame], source: KernelSource | None, left_out: list[Note], most_bars: int = MOST_BARS
) -> Iterator[str]:
    """Every event of the run's tables as JSON; ``left_out`` receives a note for everything that is left out."""
    kernels = tables["kernels"]
    if len(kernels):
        ready = timed(kernels)
        title = f"GPU, {source.source} by {source.tool}: step {source.step}" if source else "GPU"
        yield _name("process_name", _GPU, 0, title)
        yield from _slices(_GPU, _PHASES, "phases", kind_runs(ready), [*KINDS])
        names = [str(name) for name in tables["layers"]["name"]]
        all_runs = layer_runs(ready, tables["layers"]["parent"].to_numpy())
        runs = longest_runs(all_runs, most_bars)
        if num := len(all_runs) - len(runs):
            left_out.append(notes.trace_bars_left_out(num, len(all_runs)))
        yield from _slices(_GPU, _LAYERS, "layers", runs.rename(columns={"layer": "row"}), names)
        merged_bars = bars(ready, most_bars)
        if len(merged_bars) < len(ready):
            left_out.append(notes.trace_kernels_merged(len(ready), len(merged_bars)))
        calls = call_texts(tables["calls"], tables["groups"])
        yield from _host_lanes(tables, names, most_bars)
        yield from _exposed(ready, calls)
        yield from _streams(ready, merged_bars, names, calls)
        if len(merged_bars) == len(ready):
            yield from _arrows(tables["host"], host_threads(tables["launches"]), ready)
        yield from range_events(tables["ranges"])
        yield from _memory(_GPU, *_memory_on_gpu(ready, tables["events"]))
    events = tables["events"]
    if len(events):
        yield _name("process_name", _HOST, 0, "host: the recorded run, wall time of this machine")
        time = np.maximum.accumulate((events["time_us"] - int(events["time_us"].min())).to_numpy("f8"))
        yield from _host_phases(tables["spans"], time)
        yield from _memory(_HOST, time, events)


def _name(kind: str, process: int, thread: int, text: str) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": text}})


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
    """Names of collectives by sequence number, as the tables have them: "tp all_gather_into_tensor"."""
    names = [str(row["description"] or row["name"]) for row in groups.to_dict("records")]
    columns = [calls[name].tolist() for name in ("sequence", "operation", "group")]
    return {
        sequence: f"{names[group] if group < len(names) else group} {operation}"
        for sequence, operation, group in zip(*columns, strict=True)
    }


def stream_titles(kernels: pd.DataFrame, calls: Mapping[int, str]) -> list[str]:
    """A title for each stream of a step, by handle: "stream 0" where something computes, else after its calls.

    A stream of one kind of call has its name, "tp all_gather"; of several, the one that takes longest comes first:
    "tp all_gather, tp reduce_scatter". Of more than two, "and 3 more". Equal titles add the stream's number.
    """
    titles = []
    for at, (_, rows) in enumerate(kernels.groupby("stream", sort=True)):
        number = f"stream {at}"
        names = rows["call"].map(calls)
        if rows["is_compute"].any() or names.isna().any():
            titles.append(number)
            continue
        longest = rows["known_us"].groupby(names).sum().sort_values(ascending=False, kind="stable").index.tolist()
        more = f" and {len(longest) - 2} more" if len(longest) > 2 else ""
        titles.append(", ".join(longest[:2]) + more)
    return [f"{title} (stream {at})" if titles.count(title) > 1 else title for at, title in enumerate(titles)]


def _exposed(kernels: pd.DataFrame, calls: dict[int, str]) -> Iterator[str]:
    parts = exposed_parts(kernels)
    if not len(parts):
        return
    yield _name("thread_name", _GPU, _EXPOSED, "exposed communication: the step waits")
    call = kernels["call"].to_numpy("i8")[parts["row"].to_numpy("i8")].tolist()
    for number, begin, until in zip(call, parts["start_us"].tolist(), parts["end_us"].tolist(), strict=True):
        yield _slice(json.dumps(calls.get(number, "collective")), _GPU, _EXPOSED, begin, until)


def _host_lanes(tables: dict[str, pd.DataFrame], layers: list[str], most: int) -> Iterator[str]:
    """The host: the layers that it launches for, its operations with their launches, and its waits."""
    if not len(tables["host"]):
        return
    done = host_bars(tables["host"], tables["launches"], tables["work"])
    runs = runs_of(done[done["is_compute"]], tables["layers"]["parent"].to_numpy())
    runs = longest_runs(runs, most).rename(columns={"layer": "row"})
    yield from _slices(_GPU, _HOST_LAYERS, "host: layers that it launches for", runs, layers)
    for thread, title in thread_titles(done["stream"].to_numpy("u8")).items():
        yield _name("thread_name", _GPU, _FIRST_HOST + thread, f"{title}: operations and waits")
    shown = bars(done, most)
    rows = done.iloc[shown["first"].to_numpy("i8")]
    texts, layer_texts = {name: json.dumps(name) for name in rows["name"].unique()}, [*map(json.dumps, layers)]
    columns = [rows[name].tolist() for name in ("name", "layer", "kind", "num_launches")]
    columns += [shown[name].tolist() for name in ("start_us", "end_us", "num_kernels", "stream")]
    for name, layer, kind, launches, begin, until, num, thread in zip(*columns, strict=True):
        text = texts[name] if num == 1 else json.dumps(f"{num} operations, the longest {name}")
        more = f',"cat":"host","args":{{"phase":"{KINDS[kind]}","layer":{layer_texts[layer]},"launches":{launches}}}'
        yield _slice(text, _GPU, _FIRST_HOST + thread, begin, until, more=more)


def _arrows(host: pd.DataFrame, threads: Array, kernels: pd.DataFrame) -> Iterator[str]:
    """An arrow from each launch to what it launched."""
    known = kernels[kernels["is_known"]]
    if not len(host) or len(known) > _MOST_ARROWS:
        return
    streams = {stream: _FIRST_STREAM + at for at, stream in enumerate(sorted(kernels["stream"].unique().tolist()))}
    launch = known["launch"].to_numpy("i8")
    begin, reached = (host[name].to_numpy("f8")[launch] for name in ("begin_us", "reached_us"))
    # An arrow belongs to the slice around its end, so it leaves a nanosecond before the slice of the launch is over.
    leaves = np.round(np.maximum(reached * 1e3 - 1, begin * 1e3)).astype("i8")
    arrives = np.round(known["start_us"].to_numpy("f8") * 1e3).astype("i8")
    rows = (leaves.tolist(), arrives.tolist(), known["stream"].tolist(), threads[launch].tolist())
    for number, (leave, arrive, stream, thread) in enumerate(zip(*rows, strict=True)):
        more = f'"name":"launch","cat":"launch","id":{number},"pid":{_GPU}'
        yield f'{{"ph":"s",{more},"tid":{_FIRST_HOST + thread},"ts":{_us(leave)}}}'
        yield f'{{"ph":"f","bp":"e",{more},"tid":{streams[stream]},"ts":{_us(arrive)}}}'


def _streams(kernels: pd.DataFrame, shown: pd.DataFrame, layers: list[str], calls: dict[int, str]) -> Iterator[str]:
    """One track per stream. A bar of several kernels gives their number and shows the longest."""
    handles = shown["stream"].unique().tolist()  # sorted: the default stream is 0
    streams = {stream: _FIRST_STREAM + at for at, stream in enumerate(handles)}
    for at, (stream, title) in enumerate(zip(handles, stream_titles(kernels, calls), strict=True)):
        yield _name("thread_name", _GPU, _FIRST_STREAM + at, title + (f" ({stream:#x})" if stream else ""))
    rows = kernels.iloc[shown["first"].to_numpy("i8")]
    texts = {name: json.dumps(name) for name in rows["name"].unique()}
    layer_texts = [json.dumps(name) for name in layers]
    operations = {name: json.dumps(name) for name in rows["operation"].unique()}
    columns = [shown[name].tolist() for name in ("stream", "start_us", "end_us", "num_kernels", "known")]
    columns += [rows[name].tolist() for name in ("name", "family", "kind", "layer", "operation", "call")]
    columns.append(hidden_us(shown, kernels).tolist())
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


def range_events(ranges: pd.DataFrame) -> Iterator[str]:
    """The script's ranges by thread, from the launch of the first kernel in each to that of the last."""
    known = ranges[ranges["begin_us"].notna()]
    for thread, rows in known.groupby("thread"):
        track = _FIRST_THREAD + int(str(thread))
        yield _name("thread_name", _GPU, track, f"ranges of the script, thread {thread}: launches")
        for name, begin, end, num, us in zip(
            *(rows[column].tolist() for column in ("name", "begin_us", "end_us", "num_kernels", "kernel_us")),
            strict=True,
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
    op = numbered["op"].to_numpy("i8")[order]
    launch = np.maximum.accumulate(launch[order])
    inside = events[(events["op"] >= op[0]) & (events["op"] <= op[-1])]
    index = np.searchsorted(op, inside["op"].to_numpy("i8"))
    return launch[np.minimum(index, len(op) - 1)], inside


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
