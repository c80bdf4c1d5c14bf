"""Imports one step of a report: as the kernels of the run it was recorded with, or as a new run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fakedist.analysis.recording import read_recording
from fakedist.analysis.traces.step_trace import STEP, Activity, Intervals, Ints, ProcessTrace, Ranges, find_rows, taken
from fakedist.analysis.traces.traced_step import LayerNumbers, Tool, Trace, host_record, kernel_record
from fakedist.errors import ReportError
from fakedist.results.building import build_tables
from fakedist.results.nsys.activity import THREAD_BITS, Database, open_database, read_activity, read_ranges, read_waits
from fakedist.rundir import time_notes
from fakedist.rundir.collector import no_collector
from fakedist.rundir.directory import JOURNAL_NAME
from fakedist.rundir.journal import JournalWriter
from fakedist.rundir.manifest import import_manifest
from fakedist.rundir.notes import Note
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.records import GpuRecord, LayersRecord, OutcomeRecord
from fakedist.rundir.rows import LayerRow
from fakedist.rundir.trace_records import HostRecord, KernelsRecord


@dataclass(frozen=True)
class StepChoice:
    """The part of a report to read: by default the last complete step of the process that ran the most kernels."""

    step: int | None = None
    process: int | None = None


def read_trace(database: Database, choice: StepChoice) -> Trace:
    """One step of one process of a report; ReportError if it lacks kernels, the process, or the step."""
    activity = _activity(database)
    notes: list[Note] = []
    process = _process(database, activity, choice, notes)
    activity = activity.where(activity.columns["globalPid"] >> THREAD_BITS == process)
    ranges = read_ranges(database, process).with_functions().preferring_ours()
    thread, launch = _launches(database, activity)
    begin, end, step = _window(ranges, activity, thread, choice, notes)
    inside = (launch >= begin) & (launch <= end)
    chosen = activity.where(inside)
    if not len(chosen):
        raise ReportError(f"no kernel of {database.called} was launched in step {step}", "--step chooses another")
    made_in, made_at = _captures(database, chosen, process)
    return Trace(
        ranges=ranges.where((ranges.end >= begin) & (ranges.start <= end)) if made_in.max() < 0 else ranges,
        activity=chosen,
        thread=thread[inside],
        launch=launch[inside],
        made_in=made_in,
        made_at=made_at,
        begin=begin,
        step=step,
        notes=notes,
        waits=read_waits(database, process, (begin, end)),
    )


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


def read_process(database: Database, process: int | None = None) -> ProcessTrace:
    """One process on one GPU, by default the one with the most kernels; ReportError without kernels or the process."""
    everything = _activity(database)
    chosen = _process(database, everything, StepChoice(process=process), [])
    activity = everything.where(everything.columns["globalPid"] >> THREAD_BITS == chosen)
    gpus, counts = np.unique(activity.columns["deviceId"], return_counts=True)
    activity = activity.where(activity.columns["deviceId"] == gpus[counts.argmax()])
    thread, launch = _launches(database, activity)
    order = np.lexsort((activity.columns["start"], launch))
    activity, thread, launch = activity.where(order), thread[order], launch[order]
    made_in, made_at = _captures(database, activity, chosen)
    ranges = read_ranges(database, chosen).with_functions()
    return ProcessTrace(
        tool="nsys",
        gpu=gpu_name(database, int(gpus[counts.argmax()])),
        ranges=ranges,
        activity=activity,
        thread=thread,
        launch=launch,
        linked=np.full(len(thread), -1, np.int64),
        made_in=made_in,
        made_at=made_at,
        inputs=np.full(len(ranges.meaning), -1, np.int64),
        tool_version=tool_version(database),
        num_elsewhere=len(everything) - len(activity),
    )


def _activity(database: Database) -> Activity:
    activity = read_activity(database)
    if not len(activity):
        raise ReportError(
            f"{database.called} has no kernels: no GPU was used, or nsys ran without --trace=cuda",
            "nsys profile --trace=cuda,nvtx ...   traces both",
        )
    return activity


def _process(database: Database, activity: Activity, choice: StepChoice, notes: list[Note]) -> int:
    """The chosen process, as the upper bits of ``globalPid``."""
    processes, counts = np.unique(activity.columns["globalPid"] >> THREAD_BITS, return_counts=True)
    numbers = {int(process) & 0xFFFFFF: int(process) for process in processes}
    if choice.process is None:
        chosen = int(processes[counts.argmax()])
        if len(processes) > 1:
            others = [number for number in numbers if numbers[number] != chosen]
            notes.append(time_notes.several_processes(len(processes), chosen & 0xFFFFFF, others))
        return chosen
    if choice.process not in numbers:
        there = ", ".join(map(str, numbers))
        raise ReportError(f"{database.called} has no kernels of process {choice.process}", f"it has those of {there}")
    return numbers[choice.process]


def _launches(database: Database, activity: Activity) -> tuple[Ints, Ints]:
    """For each activity, the thread and time of its launch; -1 and its own start if the launch was not traced."""
    calls = database.integers("CUPTI_ACTIVITY_KIND_RUNTIME", ("correlationId", "globalTid", "start"))
    process = int(activity.columns["globalPid"][0]) >> THREAD_BITS if len(activity) else -1
    mine = (calls["globalTid"] >> THREAD_BITS == process) & (calls["correlationId"] > 0)
    correlation, thread, start = (calls[name][mine] for name in ("correlationId", "globalTid", "start"))
    row = find_rows(correlation, activity.columns["correlationId"])
    return taken(thread, row), np.where(row >= 0, taken(start, row), activity.columns["start"])


def _captures(database: Database, activity: Activity, process: int) -> tuple[Ints, Ints]:
    """For nodes of CUDA graphs, the thread that captured them and when; -1 if the report does not contain it."""
    nodes = activity.columns["graphNodeId"]
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


def _window(
    ranges: Ranges, activity: Activity, thread: Ints, choice: StepChoice, notes: list[Note]
) -> tuple[int, int, int]:
    steps = ranges.where(ranges.kind == STEP)
    if not len(steps.start):
        if choice.step is not None:
            raise ReportError(
                "no range of the report names a step", "omit --step: the whole report then counts as one step"
            )
        notes.append(time_notes.no_steps_traced())
        first = min(int(activity.columns["start"].min()), int(ranges.start.min(initial=np.iinfo(np.int64).max)))
        return first, int(activity.columns["end"].max()), 1
    launching = np.bincount(np.searchsorted(*_grouped(steps.thread, thread))) if len(thread) else np.zeros(0)
    if launching.any():  # data loaders count batches too; the steps are in the thread that launches
        steps = steps.where(steps.thread == np.unique(steps.thread)[launching.argmax()])
    lanes = np.unique(steps.thread, return_inverse=True)[1]
    steps = steps.where(Intervals(lanes, steps.start, steps.end).parents() < 0)
    numbers = np.array([steps.meanings[meaning].number for meaning in steps.meaning], np.int64)
    if choice.step is not None:
        having = np.flatnonzero(numbers == choice.step)
        if not len(having):
            there = ", ".join(map(str, sorted(set(numbers.tolist()))[:12]))
            raise ReportError(f"the report has no step {choice.step}", f"--step is one of {there}")
        row = int(having[-1])
    else:
        whole = np.flatnonzero(steps.end < int(ranges.end.max()))
        row = int(whole[-1]) if len(whole) else -1
    return int(steps.start[row]), int(steps.end[row]), int(numbers[row])


def _grouped(threads: Ints, launching: Ints) -> tuple[Ints, Ints]:
    having = np.unique(threads)
    return having, launching[np.isin(launching, having)]


def recorded_step(run_directory: Path, exported: Path, report: Path) -> tuple[KernelsRecord, HostRecord]:
    """The journal's records of a recorded run's timed step, from its report as SQLite (``exported``).

    Raises:
        ReportError: The report cannot be read, or has no kernels.
    """
    layers = LayerNumbers(read_recording(run_directory).layers)
    with no_collector(), open_database(exported, report) as database:
        trace = read_trace(database, StepChoice())
        return kernel_record(trace, layers, _tool(database, report.name)), host_record(trace)


@dataclass(frozen=True)
class ImportedReport:
    """A report that does not belong to a recorded run, with the journal's rows of the layers that its ranges name."""

    report: Path
    kernels: KernelsRecord
    layers: list[LayerRow]


def read_report(report: Path, exported: Path, choice: StepChoice) -> ImportedReport:
    """Read a report, exported as SQLite; ReportError if it cannot be read, or has no such kernels."""
    layers = LayerNumbers()
    with no_collector(), open_database(exported, report) as database:
        kernels = kernel_record(read_trace(database, choice), layers, _tool(database, str(report.resolve())))
    return ImportedReport(report, kernels, layers.rows)


def write_run(imported: ImportedReport, run_directory: Path) -> None:
    """Write a report as a run, into a new run directory."""
    import_manifest(run_directory, imported.report, "nsys")
    journal = JournalWriter(run_directory / JOURNAL_NAME)
    source = imported.kernels.source
    journal.append(GpuRecord(gpu_name=source.gpu))
    journal.append(LayersRecord(imported.layers))
    journal.append(imported.kernels)
    journal.append(OutcomeRecord(Outcome.FINISHED, 0, last_phase="other", last_step=source.step))
    journal.close()
    build_tables(run_directory)


def _tool(database: Database, report: str) -> Tool:
    return Tool("nsys", gpu_name(database), version=tool_version(database), report=report)
