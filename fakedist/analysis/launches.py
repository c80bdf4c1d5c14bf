"""The launches of a recorded step: as the virtual GPU recorded them, or made of what a tool traced.

A traced step has one launch for each call instead of the copies that stand for it, so that it can be priced and placed.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import pandas as pd

from fakedist.analysis.recording import NUMPY_TYPES, Array, Recording, empty_columns
from fakedist.analysis.typed_tables import table_of
from fakedist.rundir.encoding import columns_of
from fakedist.rundir.launch_records import LAUNCH_KINDS, HostClockRecord, LaunchesRecord, RangeRow, WorkRow
from fakedist.rundir.schema import BOUNDS, FAMILIES, PHASES
from fakedist.rundir.table_rows import TABLES
from fakedist.rundir.trace_records import HostCalls, HostRanges, HostRecord, HostWaits, KernelsRecord


def launch_tables(recording: Recording, calls: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The tables kernels, launches, work and ranges of the timed step, before anything is priced."""
    kernels = kernel_table(recording)
    if recording.kernel_source is not None and recording.host is not None:
        return traced_tables(kernels, recording.host, calls)
    record = recording.launches
    tables = {
        "launches": launch_table(record, recording.host_clock),
        "work": work_table(record),
        "ranges": recorded_ranges(record),
    }
    return {"kernels": kernels, **tables}


def launch_table(record: LaunchesRecord | None, clock: HostClockRecord | None = None) -> pd.DataFrame:
    """The table ``launches``: a row for each launch, event and wait, in the host's order. Texts are categorical.

    A clock of another step, or of another number of launches, is none of these launches.
    """
    columns: dict[str, Array]
    if record is None:
        columns = empty_columns(LaunchesRecord)
    else:
        codes = columns_of(LaunchesRecord)
        columns = {name: np.frombuffer(getattr(record, name), NUMPY_TYPES[code]) for name, code in codes.items()}
    threads = columns["thread"].astype("f8")
    columns["thread"] = threads if len(threads) else np.full(len(columns["what"]), np.nan)
    for name in ("allocator", "host_work"):
        if not len(columns[name]):
            columns[name] = np.zeros(len(columns["what"]), "u4")  # of an earlier version: the text ""
    texts = [""] if record is None else record.texts
    known = {"what": list(LAUNCH_KINDS), "phase": list(PHASES)}
    known |= dict.fromkeys(("grid", "block", "allocator", "host_work"), texts)
    categories = {
        name: pd.Categorical.from_codes(columns[name].astype(np.int32), pd.Index(known[name])) for name in known
    }
    step = np.full(len(columns["what"]), 0 if record is None else record.step, "i4")
    table = pd.DataFrame({**columns, **categories, "recompute": columns["recompute"].astype(bool), "step": step})
    table = table.assign(measured_us=np.nan, host_us=np.nan, dispatch_us=np.nan)
    if record is not None and clock is not None and clock.step == record.step:
        times_us = np.frombuffer(clock.dispatch_us, "f8")
        if len(times_us) == len(table):
            table = table.assign(dispatch_us=times_us)
    return table[TABLES["launches"].names]


def work_table(record: LaunchesRecord | None) -> pd.DataFrame:
    """The table ``work``: a row for each distinct piece of work."""
    return table_of("work", [] if record is None else record.work_rows)


_RANGE_COLUMNS = list(RangeRow._fields)


def recorded_ranges(record: LaunchesRecord | None) -> pd.DataFrame:
    """The columns of the table ``ranges`` that need no times."""
    rows = pd.DataFrame([] if record is None else record.ranges, columns=_RANGE_COLUMNS)
    return rows.astype({"name": object} | dict.fromkeys(_RANGE_COLUMNS[1:], "int64"))


def kernel_table(recording: Recording) -> pd.DataFrame:
    """The table ``kernels`` as a tool saw them: one row per kernel, copy, fill or collective, in order of start."""
    columns = recording.kernels
    texts = {"family": FAMILIES, "phase": PHASES, "bound": BOUNDS}
    texts |= dict.fromkeys(("name", "grid", "block", "operation"), tuple(recording.kernel_texts))
    frame = pd.DataFrame({name: columns[name] for name in columns_of(KernelsRecord) if name != "path_us"})
    frame = frame.assign(
        **{name: np.array(known or ("",), object)[columns[name]] for name, known in texts.items()},
        recompute=frame["recompute"].astype(bool),
        low_us=np.nan,
        high_us=np.nan,
        shape="",
        basis="",
        launch=-1,
        path_us=columns["path_us"] if len(columns["path_us"]) else np.nan,
    )
    return frame.sort_values(["start_us", "stream"], kind="stable").reset_index(drop=True)


_COLLECTIVE, _READS = LAUNCH_KINDS.index("collective"), LAUNCH_KINDS.index("host_reads")
#: What a kernel's launch is, by the beginning of its name, else by its family.
_COPY, _FILL = "Memcpy", "Memset"
#: The host goes on once such a copy is done.
_TO_PAGEABLE = "-> Pageable"
_UNKNOWN_STREAM = 1 << 32
_HELD_UP = 1 << 61  # no correlation of a call is this large
_WORK = ["name", "kind", "family", "operation", "flops", "moved_bytes"]


def traced_tables(kernels: pd.DataFrame, host: HostRecord, calls: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Tables launches, work, ranges and kernels of a traced step; copies have their collective's ``launch``."""
    at_us = kernels["launch_us"].to_numpy("f8")
    at_us = np.where(np.isnan(at_us), kernels["start_us"].to_numpy("f8"), at_us)
    stands_in = (kernels["family"].astype(str) == "communication") & kernels["call"].isin(calls["sequence"])
    own = np.flatnonzero(~stands_in)
    launched = _launched(kernels.iloc[own], at_us[own]).assign(kernel=own)
    waited = _waited(host)
    stand_ins = kernels[stands_in].assign(at_us=at_us[stands_in])
    called = _called(_positions(stand_ins, host, calls, launched, waited), calls)
    rows = pd.concat([launched, _held_up(called, launched), called, waited], ignore_index=True)
    rows = rows.sort_values("at_us", kind="stable").reset_index(drop=True)
    last = np.flatnonzero(rows["kind"] != "").max(initial=-1)  # the tool itself waits for the device after the step
    rows = rows.iloc[: last + 1]
    launch = np.full(len(kernels), -1)
    has_kernel = rows["kernel"].notna().to_numpy(bool)
    launch[rows["kernel"][has_kernel].to_numpy("i8")] = np.flatnonzero(has_kernel)
    of_call = {int(call): row for row, call in enumerate(rows["call"].tolist()) if call >= 0}
    launch[stands_in] = [of_call[call] for call in kernels["call"][stands_in].tolist()]
    launches, work = _tables(rows, host.step)
    ranges = _ranges(host, rows["at_us"].to_numpy())
    return {"launches": launches, "work": work, "ranges": ranges, "kernels": kernels.assign(launch=launch)}


def _launched(kernels: pd.DataFrame, at_us: Array) -> pd.DataFrame:
    names, families = kernels["name"].astype(str), kernels["family"].astype(str)
    kind = np.select(
        [names.str.contains(_TO_PAGEABLE, regex=False), names.str.startswith(_COPY), names.str.startswith(_FILL)],
        ["host_reads", "copy", "fill"],
        default=np.where(families == "gemm", "product", "kernel"),
    )
    ends = kernels["start_us"] + kernels["duration_us"]
    columns = ["stream", "grid", "block", "op", "phase", "recompute", "layer", "name", "family", "operation", "flops"]
    return kernels[[*columns, "moved_bytes"]].assign(
        at_us=at_us,
        until_us=np.where(kind == "host_reads", ends, at_us),
        measured_us=kernels["duration_us"].to_numpy("f8"),
        what=kind,
        kind=kind,
        call=-1,
        event=0,
    )


class _Position(NamedTuple):
    """A collective call: when the host launched it, on which stream, and if it copies anything."""

    at_us: float
    stream: int
    copies: bool


def _positions(
    stand_ins: pd.DataFrame, host: HostRecord, calls: pd.DataFrame, launched: pd.DataFrame, waited: pd.DataFrame
) -> dict[int, _Position]:
    """The position of each call: where the first of the copies that stand for it was launched.

    Sends and others that copy nothing, and asynchronous calls, have a stream of their own: such a call is before the
    event then recorded on it; if nothing waits for that event, where it was made, on the stream of its group's other
    calls. Any other call is on the stream that computes most, where it was made.
    """
    positions: dict[int, _Position] = {}
    for call, rows in stand_ins.groupby("call"):
        stream = int(rows["stream"].mode().iloc[0])
        positions[int(str(call))] = _Position(float(rows["at_us"].min()), stream, copies=True)
    facts = calls[["sequence", "group", "asynchronous", "peer"]].itertuples(index=False, name=None)
    of_call = {int(call): (int(group), bool(own) or peer >= 0) for call, group, own, peer in facts}
    usual = {of_call[call][0]: position.stream for call, position in positions.items() if of_call[call][1]}
    main = _main_stream(launched)
    recorded = waited[(waited["what"] == "stream_records") & (waited["stream"] != main)]
    events = sorted(zip(recorded["at_us"].tolist(), recorded["stream"].tolist(), strict=True))
    marks = _columns(host.calls, HostCalls)
    made = sorted(zip(marks["at_us"].tolist(), marks["call"].tolist(), strict=True))
    for number, (at_us, call) in enumerate(made):
        if call in positions or call not in of_call:
            continue
        group, has_stream = of_call[call]
        until = made[number + 1][0] if number + 1 < len(made) else np.inf
        first = bisect_left(events, (at_us, 0))
        if has_stream and first < len(events) and events[first][0] < until:
            positions[call] = _Position(*events[first], copies=False)
        else:
            stream = usual.get(group, _UNKNOWN_STREAM + group) if has_stream else main
            positions[call] = _Position(at_us, stream, copies=False)
    return positions


def _called(positions: dict[int, _Position], calls: pd.DataFrame) -> pd.DataFrame:
    rows = calls.set_index("sequence").loc[list(positions)]
    at_us = np.array([position.at_us for position in positions.values()], "f8")
    nothing = np.full(len(rows), np.nan)
    return pd.DataFrame(
        {
            "copies": [position.copies for position in positions.values()],
            "stream": np.array([position.stream for position in positions.values()], "u8"),
            "grid": "",
            "block": "",
            "op": -1,
            "phase": rows["phase"].astype(str).to_numpy(),
            "recompute": False,
            "layer": rows["layer"].to_numpy(),
            "name": rows["operation"].astype(str).to_numpy(),
            "family": "communication",
            "operation": rows["operation"].astype(str).to_numpy(),
            "flops": nothing,
            "moved_bytes": nothing,
            "at_us": at_us,
            "until_us": at_us,
            "measured_us": nothing,
            "what": "collective",
            "kind": "collective",
            "call": rows.index.to_numpy("i8"),
            "event": 0,
        }
    )


def _main_stream(launched: pd.DataFrame) -> int:
    sums = launched.groupby("stream")["measured_us"].sum()
    return int(str(sums.idxmax())) if len(sums) else 0


def _held_up(called: pd.DataFrame, launched: pd.DataFrame) -> pd.DataFrame:
    """Events of calls that copy nothing, by the launch before; torch.profiler lacks waits on streams without work."""
    main = _main_stream(launched)
    calls = called[(called["stream"] != main) & ~called["copies"].astype(bool)]
    event = _HELD_UP + calls["call"]
    records = calls.assign(what="stream_records", stream=np.uint64(main), event=event)
    waits = calls.assign(what="stream_waits", event=event)
    rows = pd.concat([records, waits], ignore_index=True).sort_values(["call", "what"], kind="stable")
    return rows.assign(kind="", call=-1, phase="other", name="")


def _waited(host: HostRecord) -> pd.DataFrame:
    waits = _columns(host.waits, HostWaits)
    return pd.DataFrame(
        {
            "stream": waits["stream"],
            "grid": "",
            "block": "",
            "op": -1,
            "phase": "other",
            "recompute": False,
            "layer": 0,
            "name": "",
            "at_us": waits["at_us"],
            "until_us": waits["until_us"],
            "what": np.array(LAUNCH_KINDS, object)[waits["what"]],
            "kind": "",
            "call": -1,
            "event": waits["event"],
        }
    )


def _tables(rows: pd.DataFrame, step: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    has_work = (rows["kind"] != "").to_numpy(bool)
    worked = rows[has_work]
    number = worked.groupby(_WORK, sort=False, dropna=False).ngroup().to_numpy("i8")
    first = worked.iloc[np.unique(number, return_index=True)[1]] if len(worked) else worked
    work_rows = [WorkRow(*values) for values in first[_WORK].itertuples(index=False, name=None)]
    work = table_of("work", work_rows)
    of_row = np.full(len(rows), -1)
    of_row[has_work] = number
    launches = rows.assign(
        work=of_row, host_us=_host_us(rows), dispatch_us=np.nan, thread=np.nan, num_operations=0, graph=0, device=0,
        step=step,
        what=pd.Categorical(rows["what"], categories=list(LAUNCH_KINDS)),
        phase=pd.Categorical(rows["phase"].astype(str), categories=list(PHASES)),
        grid=pd.Categorical(rows["grid"].astype(str)), block=pd.Categorical(rows["block"].astype(str)),
        allocator=pd.Categorical(np.full(len(rows), "")), host_work=pd.Categorical(np.full(len(rows), "")),
        recompute=rows["recompute"].astype(bool),
    )  # fmt: skip
    types = {name: "category" if dtype == "object" else dtype for name, dtype in TABLES["launches"].dtypes.items()}
    return launches.astype(types)[TABLES["launches"].names], work


def _host_us(rows: pd.DataFrame) -> Array:
    at_us, until_us = (np.maximum(rows[name].to_numpy("f8"), 0.0) for name in ("at_us", "until_us"))
    reached = np.maximum.accumulate(np.concatenate([[0.0], np.maximum(at_us, until_us)]))[:-1]
    return np.asarray(np.maximum(at_us - reached, 0.0))


def _ranges(host: HostRecord, at_us: Array) -> pd.DataFrame:
    """The script's ranges: the launches that the host made in each, whatever their thread."""
    columns = _columns(host.ranges, HostRanges)
    first, end = (np.searchsorted(at_us, columns[name]).tolist() for name in ("begin_us", "end_us"))
    threads, ends = columns["thread"].tolist(), columns["end_us"].tolist()
    rows = []
    around = dict[int, list[float]]()
    for row, begin in enumerate(columns["begin_us"].tolist()):
        thread = threads[row]
        around[thread] = [around_end for around_end in around.get(thread, []) if around_end > begin]
        name = host.texts[int(columns["name"][row])]
        rows.append(RangeRow(name, thread, len(around[thread]), first[row], end[row]))
        around[thread].append(ends[row])
    table = pd.DataFrame(rows, columns=list(RangeRow._fields))
    return table.astype({"name": object} | dict.fromkeys(RangeRow._fields[1:], "int64"))


def _columns(table: HostWaits | HostCalls | HostRanges, kind: type) -> dict[str, Array]:
    return {name: np.frombuffer(getattr(table, name), NUMPY_TYPES[code]) for name, code in columns_of(kind).items()}
