"""Turns the journal into the tables and the summary. The parent does this once the rank has written its last record."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from fakedist.analysis import memory_tables
from fakedist.analysis.blocks import Blocks, action_names, build_blocks, event_places
from fakedist.analysis.layer_table import layer_table
from fakedist.analysis.recording import Recording, read_recording, recorded_so_far
from fakedist.analysis.root_order import trained_first
from fakedist.analysis.segments import segment_table
from fakedist.analysis.snapshot_writing import build_snapshot
from fakedist.analysis.topology import call_table, collective_table, group_table
from fakedist.cost_model.breakdown import kernel_table, recorded_ranges
from fakedist.cost_model.recorded_times import RecordedTimes, launch_table, recorded_times, where_from, work_table
from fakedist.cost_model.trace import write_trace
from fakedist.options import Job, Until
from fakedist.results.summing_up import summarize
from fakedist.rundir import notes
from fakedist.rundir.collector import no_collector
from fakedist.rundir.manifest import load_manifest, write_manifest
from fakedist.rundir.notes import Note
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.records import GpuRecord
from fakedist.rundir.rows import FrameRow, InventedRow
from fakedist.rundir.schema import ACTIONS
from fakedist.rundir.sources import EVENT_TIME, ROUTED
from fakedist.rundir.summary import Summary
from fakedist.rundir.tables import check_tables, new_tables, write_table


def coverage_notes(recording: Recording, outcome: Outcome, until: int | Until | None) -> list[Note]:
    """Notes on what the recording does not cover.

    Args:
        recording: The recording.
        outcome: How the run ended.
        until: What was to stop the script; None if nothing but a number of steps was.
    """
    training = None if recording.outcome is None else recording.outcome.training
    if outcome is Outcome.STOPPED:
        missing = [] if training is not None and training.evaluated else ["validation"]
        missing += [] if until == "save" else ["saving"]
        return [notes.stopped_before_the_end(len(recording.steps), str(until), missing)]
    if training is None or training.optimizer_steps or training.counts_itself:
        return []
    if outcome in (Outcome.FINISHED, Outcome.EXIT):
        return [notes.no_optimizer_step()]
    return []


_ALLOC = ACTIONS.index("alloc")


@dataclass(frozen=True)
class Computed:
    """What the journal says, before any of it is written.

    Attributes:
        recording: The recording.
        so_far: What it was read from (:func:`fakedist.analysis.recording.recorded_so_far`).
        blocks: Its blocks.
        places: Step and phase of each event.
        tables: Every table.
        times: The times of its recorded step.
    """

    recording: Recording
    so_far: tuple[object, ...]
    blocks: Blocks
    places: pd.DataFrame
    tables: dict[str, pd.DataFrame]
    times: RecordedTimes


def compute_tables(run_directory: Path, *, may_be_empty: bool = True) -> Computed:
    """Compute the tables of a run. Nothing is written, and the rank's process need not have ended.

    Args:
        run_directory: The run directory.
        may_be_empty: As in :func:`build_tables`.

    Raises:
        RunDirectoryError: As :func:`build_tables`.
    """
    job, so_far = load_manifest(run_directory).job, recorded_so_far(run_directory)
    recording = read_recording(run_directory, may_be_empty=may_be_empty)
    trained_first(recording)
    blocks = build_blocks(recording)
    places = event_places(recording)
    tables = make_tables(recording, blocks, places)
    times = recorded_times(recording, tables, job)
    return Computed(recording, so_far, blocks, places, tables | times.tables, times)


def build_tables(run_directory: Path, *, may_be_empty: bool = True, computed: Computed | None = None) -> None:
    """Make the tables, the snapshot and the manifest's summary of a run that has ended, however it ended.

    Args:
        run_directory: The run directory.
        may_be_empty: Whether a rank that was killed before its first record gets empty tables. If not, an empty journal
            counts as damaged.
        computed: What was computed before the rank's process ended. It is computed again if more was recorded since.

    Raises:
        RunDirectoryError: The directory is not a run directory, its journal is missing, damaged or not fakedist's, or
            its tables are a symbolic link. Nothing has been written then.
    """
    manifest = load_manifest(run_directory)
    check_tables(run_directory)
    if computed is None or computed.so_far != recorded_so_far(run_directory):
        computed = compute_tables(run_directory, may_be_empty=may_be_empty)
    recording, blocks, places = computed.recording, computed.blocks, computed.places
    tables, times = computed.tables, computed.times
    gpu = recording.gpu or GpuRecord()
    with new_tables(run_directory) as directory:
        for name, table in tables.items():
            write_table(directory, name, {column: table[column] for column in table.columns})
    summary = summarize(recording, manifest, tables, memory_tables.find_peak(recording, blocks, places))
    with no_collector():
        build_snapshot(run_directory, recording, blocks)
        cut = write_trace(run_directory, tables, summary, times.source)
    dropped = _dropped(recording)
    told = [*_notes(recording, blocks, manifest.job, summary, times.notes), *dropped, *cut]
    timed = {"time": where_from(times.source)} if times.source and times.summary else {}
    finished = replace(
        manifest,
        provenance={**manifest.provenance, **timed},
        exit=summary.exit,
        gpu_model=times.gpu,
        versions={"python": gpu.python, "torch": gpu.torch, "cuda": gpu.cuda},
        dropped=dropped,
        notes=told,
        summary=replace(summary, kernels=times.source, time=times.summary, notes=told),
    )
    write_manifest(run_directory, finished)


def make_tables(recording: Recording, blocks: Blocks, places: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Every table of ``run.schema.TABLES`` except the tables of times. ``kernels`` has what a tool saw.

    Args:
        recording: The recording.
        blocks: Its blocks.
        places: Step and phase of each event, from :func:`fakedist.analysis.blocks.event_places`.
    """
    lines = memory_tables.stack_lines(recording)
    phases = memory_tables.phase_table(recording, blocks, places)
    tables = {
        "phases": phases,
        "spans": memory_tables.span_table(places),
        "steps": memory_tables.step_table(recording, blocks, places),
        "layers": layer_table(recording, blocks, steady_window(places, recording)),
        "largest": memory_tables.largest_blocks(recording, blocks, lines),
        "segments": segment_table(recording, blocks),
        "groups": group_table(recording),
        "calls": call_table(recording),
        "kernels": kernel_table(recording),
        "launches": launch_table(recording.launches),
        "work": work_table(recording.launches),
        "ranges": recorded_ranges(recording.launches),
        "invented": _invented(recording),
        "unanswered": pd.DataFrame(sorted(recording.unanswered.items()), columns=["function", "num_calls"]),
        "blocks": blocks.frame.assign(at_peak=blocks.at_peak),
        "shares": blocks.shares,
        "events": _event_table(recording, blocks),
        "frames": pd.DataFrame(recording.frames, columns=FrameRow._fields),
        "stacks": pd.DataFrame({"frames": [list(stack) for stack in recording.stacks], "line": lines}),
    }
    recorded = tables["calls"]["step"] != recording.timed_step  # the timed step only repeats what the others did
    tables["collectives"] = collective_table(tables["calls"][recorded])
    return tables


def steady_window(places: pd.DataFrame, recording: Recording) -> tuple[int, int]:
    """First event of the last completed step and first event after it; the whole run if no step completed."""
    if not recording.steps:
        return 0, len(places)
    step = np.flatnonzero(places["step"].to_numpy() == recording.steps[-1].step)
    return (int(step[0]), int(step[-1]) + 1) if len(step) else (0, len(places))


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


def _invented(recording: Recording) -> pd.DataFrame:
    rows = [
        (row.operation, f"{row.filename}:{row.line}" if row.filename else "", row.num_calls, row.num_values)
        for row in recording.invented
        if row.operation != ROUTED
    ]
    table = pd.DataFrame(rows, columns=["operation", "line", "num_calls", "num_values"])
    sums = table.groupby(["operation", "line"], as_index=False)[["num_calls", "num_values"]].sum()
    return sums.sort_values("num_values", ascending=False, kind="stable").reset_index(drop=True)


def _dropped(recording: Recording) -> list[Note]:
    """What the recording may lack."""
    found = [notes.no_last_record()] if recording.outcome is None else []
    return [*found, *([notes.recording_cut()] if recording.truncated else [])]


def _left_note(recording: Recording) -> Note:
    """The note for a rank that ended before doing any work. The cause may be a flag that only another rank knows."""
    return notes.left_during_init("" if recording.outcome is None else recording.outcome.line)


def _not_sent_notes(recording: Recording, *, is_cause: bool) -> list[Note]:
    """The note on values that another rank should have sent. Those on the host count only if they may be a cause."""
    read = [record for record in recording.not_sent if record.is_read or is_cause]
    if not read:
        return []
    return [notes.not_sent([record.text for record in read], read[0].command, is_cause=is_cause)]


def _failure_notes(recording: Recording) -> list[Note]:
    """Notes on requests that the allocator could not serve but that did not end the script."""
    failed, ended = recording.failed_request, recording.outcome
    if failed is None or (ended is not None and ended.outcome is Outcome.OUT_OF_MEMORY):
        return []
    statistics = recording.statistics.get(recording.device)
    times = 1 if statistics is None else statistics.num_ooms or 1
    return [notes.went_on_without_memory(times, failed.requested_bytes, failed.line)]


#: Operations that pick indices, such as those of a router (gpu/values/routing.py).
_CHOOSES = re.compile(r"\.(topk|sort|argsort|argmax|argmin)\b")


def _invention_notes(rows: list[InventedRow]) -> list[Note]:
    """Notes on made-up values: how many, and where the first one was read."""
    times = [row for row in rows if row.operation == EVENT_TIME]
    found = [notes.event_times_made_up(sum(row.num_values for row in times), _first_place(times))] if times else []
    routed = [row for row in rows if row.operation == ROUTED]
    rows = [row for row in rows if row.operation not in (EVENT_TIME, ROUTED)]
    invented = sum(row.num_values for row in rows)
    if not invented:
        return found
    found.append(notes.values_made_up(invented, _first_place(rows)))
    chosen = [row for row in rows if _CHOOSES.search(row.operation)]
    if chosen:
        operation, place = chosen[0].operation, _first_place(chosen)
        found.append(
            notes.experts_made_up(operation, place, _first_place(routed))
            if routed
            else notes.indices_made_up(operation, place)
        )
    return found


def _first_place(rows: list[InventedRow]) -> str:
    """The first line of the script; empty if all rows are of a backward."""
    return next((f"{row.filename}:{row.line}" for row in rows if row.filename), "")


def _notes(recording: Recording, blocks: Blocks, job: Job | None, summary: Summary, of_times: list[Note]) -> list[Note]:
    left, outcome = summary.left_during_init, summary.exit.outcome
    found = [*recording.notes, *of_times, *memory_tables.differences(recording, blocks)]
    if left is not None and job is not None:
        found.append(_left_note(recording))
    is_before_forward = not any(scope.phase in ("forward", "generation") for scope in recording.scopes)
    if is_before_forward and len(blocks.frame) and not (blocks.frame["category"] == "parameter").any():
        found.append(notes.no_forward())
    # A call for all devices, such as torch.cuda.empty_cache(), leaves events where nothing was ever allocated.
    used = [device for device, events in recording.events.items() if (events["action"] == _ALLOC).any()]
    if others := sorted(set(used) - {recording.device}):
        found.append(notes.used_other_devices(others, recording.device))
    elif recording.events and recording.gpu is not None and recording.device != recording.gpu.device_index:
        found.append(notes.used_another_device(recording.device))
    found += _failure_notes(recording)
    found += _invention_notes(recording.invented)
    found += _not_sent_notes(recording, is_cause=left is not None)
    found += [notes.not_answered(name, calls) for name, calls in sorted(recording.unanswered.items())]
    if job is not None and job.collectives == "noop":
        found.append(notes.collectives_off())
    if left is None:
        found += coverage_notes(recording, outcome, None if job is None else job.until)
    return found
