"""From a run's journal to its tables and summary. The parent does this once the rank has written its last record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from fakedist import extras
from fakedist.analysis import memory_tables
from fakedist.analysis.blocks import Blocks, action_names, build_blocks, event_places, host_tables
from fakedist.analysis.launches import launch_tables
from fakedist.analysis.memory_tables import Fold, Peak, find_peak, fold_layers, layer_table
from fakedist.analysis.recording import JournalReading, Recording, read_recording, recorded_so_far, trained_first
from fakedist.analysis.routed_blocks import routed_table
from fakedist.analysis.segments import build_snapshot, segment_table
from fakedist.analysis.stack_lines import stack_lines
from fakedist.analysis.topology import call_table, collective_table, group_table, other_group_table, term_table
from fakedist.analysis.typed_tables import table_of
from fakedist.cost_model.busiest_rank import ExpertsLoad, at_pace
from fakedist.cost_model.estimated import (
    StepTimes,
    estimate_times,
    find_gains,
    recorded_gpu,
    recorded_models,
    recorded_times,
    where_from,
)
from fakedist.cost_model.job.job_times import rank_throughput
from fakedist.cost_model.step import PriceList
from fakedist.cost_model.step_axis import write_trace
from fakedist.options import Job
from fakedist.results.run import Run, RunTables
from fakedist.results.summing_up import (
    dropped_notes,
    estimate_or_note,
    left_during_init,
    run_ending,
    run_notes,
    summarize,
)
from fakedist.rundir.collector import no_collector
from fakedist.rundir.directory import (
    JOURNAL_NAME,
    JournalWriter,
    Manifest,
    import_manifest,
    imported_manifest,
    load_manifest,
    write_manifest,
)
from fakedist.rundir.notes import Note
from fakedist.rundir.records import GpuRecord
from fakedist.rundir.sources import ROUTED
from fakedist.rundir.step_time import StepBreakdown, StepTime
from fakedist.rundir.tables import check_tables, new_tables, write_table
from fakedist.traces.one_step import StepChoice
from fakedist.traces.trace_files import read_step
from fakedist.traces.traced_step import ImportedStep


@dataclass(frozen=True)
class Computed:
    """A run's journal, and everything computed from it before any of it is written.

    ``so_far`` is the state of the files that it was read from (:func:`fakedist.analysis.recording.recorded_so_far`).
    """

    recording: Recording
    so_far: tuple[object, ...]
    blocks: Blocks
    peak: Peak
    tables: dict[str, pd.DataFrame]
    folds: list[Fold]
    times: StepTimes
    notes: list[Note]


def compute_tables(run_directory: Path, *, may_be_empty: bool = True) -> Computed:
    """Compute the tables of a run: from its records, through the prices of its launches, to the parts of its step.

    Nothing is written, and the rank's process need not have ended. Arguments and errors are :func:`build_tables`'s.
    """
    job = load_manifest(run_directory).job
    so_far = recorded_so_far(run_directory)
    return compute_recording(read_recording(run_directory, may_be_empty=may_be_empty), job, so_far)


def compute_recording(recording: Recording, job: Job | None, so_far: tuple[object, ...]) -> Computed:
    """Compute the tables of a recording; ``so_far`` as :class:`Computed` has it."""
    blocks, positions, tables = _untimed(recording, job)
    tables |= host_tables(recording, job)
    folds = fold_layers(tables["layers"])
    times, notes = _step_times(recording, at_pace(tables, ExpertsLoad()), folds, job)
    peak = find_peak(blocks, positions)
    return Computed(recording, so_far, blocks, peak, tables | times.tables, folds=folds, times=times, notes=notes)


def _untimed(recording: Recording, job: Job | None) -> tuple[Blocks, pd.DataFrame, dict[str, pd.DataFrame]]:
    """The blocks of a recording, their ``event_places``, and its tables before its step is timed."""
    trained_first(recording)
    blocks, positions = build_blocks(recording), event_places(recording)
    tables = make_tables(recording, blocks, positions)
    return blocks, positions, tables | {"routed": routed_table(recording, blocks, tables, job)}


def _step_times(
    recording: Recording, tables: dict[str, pd.DataFrame], folds: list[Fold], job: Job | None
) -> tuple[StepTimes, list[Note]]:
    """The times of the timed step, with notes on them. A step that cannot be priced keeps what a tool measured."""
    notes: list[Note] = []
    source = recording.kernel_source

    def estimate() -> StepTimes | None:
        models, on_models = recorded_models(recording, tables["launches"], job)
        notes.extend(on_models)
        if models is None:
            return None

        def whole(breakdown: StepBreakdown, prices: PriceList) -> StepTime:
            clock = recording.host_clock
            scale = models.host.costs.dispatch
            tokens, samples, gains = None, None, None
            if job is not None:
                what = "tokens per second"
                speed = partial(rank_throughput, tables, breakdown, job.rank, job.world_size)
                tokens, samples = estimate_or_note(what, speed, notes) or (None, None)
            if job is not None and source is None:
                what = "what would shorten the step"
                gains = estimate_or_note(what, partial(find_gains, tables, models, job, breakdown, prices), notes)
            return StepTime(
                **vars(breakdown),
                loading_us=0.0 if clock is None else clock.loading_us * scale,
                collector_us=0.0 if clock is None else clock.collector_us * scale,
                throughput=tokens,
                sample_throughput=samples,
                gains=gains or [],
            )

        return estimate_times(tables, folds, models, traced=source, whole=whole)

    times = estimate_or_note("the step's time", estimate, notes)
    return times or recorded_times(recording, tables, folds), notes


def build_tables(
    run_directory: Path,
    *,
    may_be_empty: bool = True,
    computed: Computed | None = None,
    manifest: Manifest | None = None,
) -> None:
    """Make the tables, the snapshot and the manifest's summary of a run that has ended, however it ended.

    Args:
        may_be_empty: A rank that was killed before its first record gets empty tables; else its journal counts as
            damaged.
        computed: The tables from before the process ended, computed anew if more was recorded since.
        manifest: None loads it.

    Raises:
        RunDirectoryError: The directory is not a run directory, its journal is missing, damaged or not fakedist's, or
            its tables are a symbolic link. Nothing has been written then.
    """
    manifest = manifest or load_manifest(run_directory)
    check_tables(run_directory)
    if computed is None or computed.so_far != recorded_so_far(run_directory):
        computed = compute_tables(run_directory, may_be_empty=may_be_empty)
    with new_tables(run_directory) as directory:
        for name, table in computed.tables.items():
            write_table(directory, name, {column: table[column] for column in table.columns})
    with no_collector():
        build_snapshot(run_directory, computed.recording, computed.blocks)
        left_out = write_trace(run_directory, computed.tables, computed.times.source, manifest.job)
    write_manifest(run_directory, summarized(manifest, computed, left_out))


def summarized(manifest: Manifest, computed: Computed, left_out: Sequence[Note] = ()) -> Manifest:
    """The manifest of a run that has ended, with its summary.

    Args:
        manifest: As it was while the rank ran.
        computed: The run's tables.
        left_out: Notes on what its trace leaves out.
    """
    recording, job = computed.recording, manifest.job
    tables, times = computed.tables, computed.times
    ending = run_ending(recording, manifest.exit)
    left = left_during_init(recording, ending)
    dropped = dropped_notes(recording)
    own_notes = run_notes(recording, computed.blocks, job, ending=ending, left=left, of_times=computed.notes)
    notes = [*own_notes, *dropped, *left_out]
    summary = summarize(
        recording, job, tables, computed.folds, ending=ending, left=left, peak=computed.peak, times=times, notes=notes
    )
    gpu = recording.gpu or GpuRecord()
    timed = {"time": where_from(times.source)} if times.source and times.summary else {}
    for part in extras.parts("summary_parts"):
        summary = part.summarize(summary, recording, tables)
    return replace(
        manifest,
        provenance={**manifest.provenance, **timed},
        exit=ending,
        gpu_model=recorded_gpu(recording),
        versions={"python": gpu.python, "torch": gpu.torch, "cuda": gpu.cuda},
        dropped=dropped,
        notes=summary.notes,
        summary=summary,
    )


def make_tables(recording: Recording, blocks: Blocks, positions: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Every table of ``rundir.table_rows.TABLES`` before its step is timed, by the ``event_places`` of its blocks."""
    lines = stack_lines(recording.frames, recording.stacks)
    calls = call_table(recording)
    is_recorded = calls["step"] != recording.timed_step  # the timed step only repeats the others
    launched = launch_tables(recording, calls)
    return {
        "phases": memory_tables.phase_table(recording, blocks, positions),
        "named_phases": memory_tables.named_phase_table(recording, blocks),
        "device_use": memory_tables.device_use_table(recording),
        "asleep": memory_tables.asleep_table(recording, blocks),
        "spans": memory_tables.span_table(positions),
        "steps": memory_tables.step_table(recording, blocks, positions),
        "layers": layer_table(recording, blocks, steady_window(positions, recording)),
        "largest": memory_tables.largest_blocks(recording, blocks, lines),
        "segments": segment_table(recording, blocks),
        "groups": group_table(recording),
        "other_groups": other_group_table(recording),
        "calls": calls,
        "call_terms": term_table(recording),
        "collectives": collective_table(calls[is_recorded]),
        **launched,
        "invented": _invented(recording),
        "unanswered": table_of("unanswered", sorted(recording.unanswered.items())),
        "blocks": blocks.frame.assign(at_peak=blocks.at_peak),
        "shares": blocks.shares,
        "events": _event_table(recording, blocks),
        "frames": table_of("frames", recording.frames),
        "stacks": pd.DataFrame({"frames": [list(stack) for stack in recording.stacks], "line": lines}),
        "operation_stacks": _operation_stacks(recording, launched["launches"]),
    }


def steady_window(positions: pd.DataFrame, recording: Recording) -> tuple[int, int]:
    """First event of the last completed step and first event after it; the whole run if no step completed."""
    if not recording.steps:
        return 0, len(positions)
    step = np.flatnonzero(positions["step"].to_numpy() == recording.steps[-1].step)
    return (int(step[0]), int(step[-1]) + 1) if len(step) else (0, len(positions))


def _event_table(recording: Recording, blocks: Blocks) -> pd.DataFrame:
    events = recording.device_events
    return pd.DataFrame(
        {
            "action": action_names(recording),
            "address": events["address"],
            "size_bytes": events["size"],
            "stream": events["stream"],
            "time_us": events["time_us"],
            "op": events["op"],
            "stack": events["stack"],
            "allocated_bytes": blocks.replay.allocated_bytes,
            "reserved_bytes": blocks.replay.reserved_bytes,
        }
    )


def _operation_stacks(recording: Recording, launches: pd.DataFrame) -> pd.DataFrame:
    called = pd.DataFrame(recording.operation_stacks, columns=["op", "stack"]).drop_duplicates("op")
    return called[called["op"].isin(launches["op"])].sort_values("op").reset_index(drop=True)


def _invented(recording: Recording) -> pd.DataFrame:
    rows = [
        (row.operation, f"{row.filename}:{row.line}" if row.filename else "", row.num_calls, row.num_values)
        for row in recording.invented
        if row.operation != ROUTED
    ]
    sums = table_of("invented", rows).groupby(["operation", "line"], as_index=False)[["num_calls", "num_values"]].sum()
    return sums.sort_values("num_values", ascending=False, kind="stable").reset_index(drop=True)


def open_imported(path: Path, choice: StepChoice = StepChoice(), exported: Path | None = None) -> Run:  # noqa: B008
    """Open a file of a real GPU as a run, of which only the tables are known that its tool traced.

    Args:
        exported: Of a report of nsys, its SQLite export.

    Raises:
        ReportError: It is not a trace, or lacks what was chosen.
    """
    step = read_step(exported or path, path, choice)
    reading = JournalReading()
    for record in step.records:
        reading.take(record)
    reading.join()
    computed = compute_recording(reading.recording, None, ())
    manifest = imported_manifest(path, step.tool)
    summary = summarize(
        computed.recording,
        None,
        computed.tables,
        computed.folds,
        ending=manifest.exit,
        left=None,
        peak=computed.peak,
        times=computed.times,
        notes=computed.notes,
    )
    return Run(path.resolve(), manifest, summary, RunTables(None, computed.tables))


def write_run(step: ImportedStep, run_directory: Path) -> None:
    """Write a step as a run, into a new run directory."""
    import_manifest(run_directory, step.file, step.tool)
    journal = JournalWriter(run_directory / JOURNAL_NAME)
    for record in step.records:
        journal.append(record)
    journal.close()
    build_tables(run_directory)
