"""Reads an Nsight Systems report: one process on one GPU, or one step of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fakedist.analysis.recording import read_recording
from fakedist.errors import ReportError
from fakedist.rundir.collector import no_collector
from fakedist.rundir.trace_records import HostRecord, KernelsRecord
from fakedist.traces.nsys_database import (
    THREAD_BITS,
    Database,
    open_database,
    read_activity,
    read_calls,
    read_ranges,
    read_waits,
)
from fakedist.traces.one_step import StepChoice, choose_process, one_step
from fakedist.traces.step_path import find_path
from fakedist.traces.step_trace import Activity, Ints, ProcessTrace, Waits, find_launches
from fakedist.traces.traced_step import ImportedStep, LayerNumbers, Tool, Trace, host_record, kernel_record


def read_trace(database: Database, choice: StepChoice) -> Trace:
    """One step of one process of a report; ReportError if it lacks kernels, the process, or the step."""
    process = read_process(database, choice)
    trace = one_step(process, choice, database.called)
    syncs, recorded = read_waits(database, process.process, trace.host)
    trace = replace(trace, syncs=syncs, waits=Waits.of(syncs, recorded) if syncs else None)
    return replace(trace, path=find_path(trace))


def gpu_name(database: Database, number: int = 0) -> str:
    """Name of a GPU of the machine, or of its first one; empty if the report does not contain it."""
    columns = database.columns("TARGET_INFO_GPU")
    if "name" not in columns:
        return ""
    order = f"ORDER BY id != {number}" if "id" in columns else ""
    rows = database.rows(f"SELECT name FROM TARGET_INFO_GPU {order} LIMIT 1")
    return str(rows[0][0]) if rows else ""


def tool_version(database: Database) -> str:
    """Version of the nsys that exported the report."""
    return database.pairs("META_DATA_EXPORT", "EXPORT_META_DATA").get("EXPORT_PRODUCT_VERSION", "")


def read_process(database: Database, choice: StepChoice = StepChoice()) -> ProcessTrace:  # noqa: B008
    """One process on one GPU, by default that with the most kernels; ReportError without kernels, or without it."""
    everything = read_activity(database)
    if not len(everything):
        raise ReportError(
            f"{database.called} has no kernels: no GPU was used, or nsys ran without --trace=cuda",
            "nsys profile --trace=cuda,nvtx ...   traces both",
        )
    by = everything.columns["process"] >> THREAD_BITS
    gpus = everything.columns["device"]
    _, key = np.unique(np.stack([by, gpus]), axis=1, return_inverse=True)
    key = key.ravel()

    def described(number: int) -> tuple[int, int, str]:
        row = int(np.flatnonzero(key == number)[0])
        device = int(gpus[row])
        process = int(by[row]) & _PROCESS if by[row] >= 0 else -1
        return process, device, gpu_name(database, device)

    chosen, processes = choose_process(everything, key, described, database.called, choice)
    is_own = key == chosen
    whole = int(by[is_own][0])
    activity = everything.where(is_own)
    calls = read_calls(database, whole)
    none = np.full(len(activity), -1, np.int64)
    thread, launch = find_launches(calls, activity, none, activity.columns["start"])
    made_in, made_at = _captures(database, activity, whole)
    ranges = read_ranges(database, whole).with_functions()
    return ProcessTrace(
        tool="nsys",
        gpu=described(chosen)[-1],
        ranges=ranges,
        activity=activity,
        calls=calls,
        thread=thread,
        launch=launch,
        linked=none,
        made_in=made_in,
        made_at=made_at,
        inputs=np.full(len(ranges.meaning), -1, np.int64),
        tool_version=tool_version(database),
        num_elsewhere=len(everything) - len(activity),
        process=whole,
        processes=processes,
    ).by_launch()


#: The bits of ``globalPid`` that are the system's own number of a process.
_PROCESS = (1 << 24) - 1


def _captures(database: Database, activity: Activity, process: int) -> tuple[Ints, Ints]:
    """For nodes of CUDA graphs, the thread that captured them and when; -1 if the report does not contain it."""
    nodes = activity.columns["node"]
    thread, time = np.full(len(nodes), -1, np.int64), np.full(len(nodes), -1, np.int64)
    table = next((name for name in ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS") if name in database.tables), "")
    if not table or not bool((nodes > 0).any()):
        return thread, time
    made = database.integers(table, ("graphNodeId", "originalGraphNodeId", "globalTid", "start"))
    mine = made["globalTid"] >> THREAD_BITS == process
    node, original, by, at = (made[name][mine] for name in ("graphNodeId", "originalGraphNodeId", "globalTid", "start"))
    captured = dict(zip(node.tolist(), zip(original.tolist(), by.tolist(), at.tolist(), strict=True), strict=True))
    for row in np.flatnonzero(nodes > 0).tolist():
        number = int(nodes[row])
        for _ in range(8):  # an instance is a clone of a graph, which may itself be a clone
            if number not in captured:
                break
            number, thread[row], time[row] = captured[number]
    return thread, time


def recorded_step(run_directory: Path, exported: Path, report: Path) -> tuple[KernelsRecord, HostRecord]:
    """The journal's records of a recorded run's timed step, from its report as SQLite (``exported``).

    Raises:
        ReportError: The report cannot be read, or has no kernels.
    """
    layers = LayerNumbers(read_recording(run_directory).layers)
    with no_collector(), open_database(exported, report) as database:
        trace = read_trace(database, StepChoice())
        return kernel_record(trace, layers, _tool(database, report.name)), host_record(trace)


def read_report(exported: Path, report: Path, choice: StepChoice) -> ImportedStep:
    """Read a report, exported as SQLite; ReportError if it cannot be read, or has no such kernels."""
    with no_collector(), open_database(exported, report) as database:
        return ImportedStep.of(report, read_trace(database, choice), _tool(database, str(report.resolve())))


def _tool(database: Database, report: str) -> Tool:
    return Tool("nsys", version=tool_version(database), report=report)
