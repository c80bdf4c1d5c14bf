"""Turns the journal into the tables and the summary. The parent does this after the rank has ended."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from fakedist.analysis import memory_tables
from fakedist.analysis.blocks import Blocks, action_names, build_blocks, event_places
from fakedist.analysis.calls import call_table, collective_table, group_table
from fakedist.analysis.collector import no_collector
from fakedist.analysis.coverage import coverage_notes
from fakedist.analysis.layer_table import layer_table
from fakedist.analysis.recording import Recording, read_recording
from fakedist.analysis.segments import segment_table
from fakedist.analysis.snapshot_writing import build_snapshot
from fakedist.analysis.summing_up import summarize
from fakedist.analysis.times.estimated import estimate_times, network_of, prices_of
from fakedist.analysis.times.kernel_kinds import kernel_table
from fakedist.analysis.times.launch_tables import launch_table, work_table
from fakedist.analysis.times.range_times import recorded_ranges
from fakedist.analysis.times.totals import find_times
from fakedist.analysis.times.trace import write_trace
from fakedist.errors import FakedistError
from fakedist.gpu_models.spec import GpuSpec
from fakedist.job import Job
from fakedist.run import notes, time_notes
from fakedist.run.manifest import load_manifest, write_manifest
from fakedist.run.notes import Note
from fakedist.run.outcome import Outcome
from fakedist.run.records import GpuRecord
from fakedist.run.rows import FrameRow, InventedRow
from fakedist.run.step_time import KernelSource, Peaks
from fakedist.run.summary import Summary
from fakedist.run.tables import check_tables, new_tables, write_table
from fakedist.time.step import Prices


def build_tables(run_directory: Path, *, may_be_empty: bool = True) -> None:
    """Make the tables, the snapshot and the manifest's summary of a run that has ended, however it ended.

    Args:
        run_directory: The run directory.
        may_be_empty: Whether a rank that was killed before its first record gets empty tables. If not, an empty journal
            counts as damaged.

    Raises:
        RunDirectoryError: The directory is not a run directory, its journal is missing, damaged or not fakedist's, or
            its tables are a symbolic link. Nothing has been written then.
    """
    manifest = load_manifest(run_directory)
    check_tables(run_directory)
    recording = read_recording(run_directory, may_be_empty=may_be_empty)
    gpu = recording.gpu or GpuRecord()
    blocks = build_blocks(recording)
    places = event_places(recording)
    tables = make_tables(recording, blocks, places)
    source = recording.kernel_source
    if source is None and len(tables["launches"]) and gpu.model is not None:
        prices, told = _prices(gpu.model, manifest.job)
        nccl = recording.nccl.environment if recording.nccl is not None else {}
        estimated = estimate_times(tables, gpu.model, prices, network_of(gpu.model, manifest.job, nccl=nccl))
        tables["kernels"], times, source = estimated.kernels, estimated.times, estimated.source
        recording.notes += told
    else:
        peaks = _peaks(recording.gpu, source)
        times = find_times(tables["kernels"], tables["layers"], source, peaks, ranges=tables["ranges"])
    tables |= {"layer_times": times.layers, "kernel_names": times.names, "ranges": times.ranges}
    with new_tables(run_directory) as directory:
        for name, table in tables.items():
            write_table(directory, name, {column: table[column] for column in table.columns})
    summary = summarize(recording, manifest, tables, memory_tables.find_peak(recording, blocks, places))
    with no_collector():
        build_snapshot(run_directory, recording, blocks)
        cut = write_trace(run_directory, tables, summary, source)
    dropped = _dropped(recording)
    told = [*_notes(recording, blocks, manifest.job, summary), *dropped, *cut]
    timed = {"time": _time_source(source)} if source and times.summary else {}
    finished = replace(
        manifest,
        provenance={**manifest.provenance, **timed},
        exit=summary.exit,
        gpu_model=gpu.model,
        versions={"python": gpu.python, "torch": gpu.torch, "cuda": gpu.cuda},
        dropped=dropped,
        notes=told,
        summary=replace(summary, kernels=source, time=times.summary, notes=told),
    )
    write_manifest(run_directory, finished)


def _prices(gpu: GpuSpec, job: Job | None) -> tuple[Prices, list[Note]]:
    """The prices of kernels, with the job's own times before them. If their file has gone, a note tells it."""
    if job is None or not job.times:
        return prices_of(gpu), []
    try:
        return prices_of(gpu, job.times), []
    except FakedistError as error:
        return prices_of(gpu), [time_notes.own_times_not_used(error.message)]


def make_tables(recording: Recording, blocks: Blocks, places: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Every table of ``run.schema.TABLES`` except the tables of times. ``kernels`` has what a tool saw.

    Args:
        recording: The recording.
        blocks: Its blocks.
        places: Step and phase of each event, from :func:`fakedist.analysis.blocks.event_places`.
    """
    lines = memory_tables.stack_lines(recording)
    phases = memory_tables.phase_table(blocks, places)
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


def _peaks(gpu: GpuRecord | None, source: KernelSource | None) -> Peaks | None:
    """The GPU's peak rates; None for simulated times, which cannot be compared with them."""
    return None if gpu is None or (source is not None and source.source == "simulated") else gpu.peaks


def _time_source(source: KernelSource) -> str:
    """Where the times of the timed step come from."""
    if source.source == "estimated":
        return f"estimated: kernels by a model of the GPU, collectives for the fabric {source.fabric}"
    if source.source == "simulated":
        return "simulated: the virtual GPU as CUPTI saw it, where each kernel takes 1 µs; copies stand for collectives"
    tool = {"cupti": "CUPTI", "nsys": "Nsight Systems"}.get(source.tool, source.tool)
    return f"measured: {tool} on this GPU; copies stand for collectives"


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
    ]
    table = pd.DataFrame(rows, columns=["operation", "line", "num_calls", "num_values"])
    sums = table.groupby(["operation", "line"], as_index=False)[["num_calls", "num_values"]].sum()
    return sums.sort_values("num_values", ascending=False, kind="stable").reset_index(drop=True)


def _dropped(recording: Recording) -> list[Note]:
    """What the recording may lack."""
    found = [notes.no_last_record()] if recording.outcome is None else []
    return [*found, *([notes.recording_cut()] if recording.truncated else [])]


def _left_note(recording: Recording, job: Job) -> Note:
    """The note for a rank that ended before doing any work. The cause may be a flag that only another rank knows.

    In Megatron-LM, ranks that load no data learn from a broadcast whether there is any, and train only then.
    """
    line = "" if recording.outcome is None else recording.outcome.line
    calls = call_table(recording)
    received = 0 if job.tapes else int(((calls["operation"] == "broadcast") & (calls["bytes_in"] == 0)).sum())
    return notes.left_during_init(line, received, job.rank)


def _failure_notes(recording: Recording) -> list[Note]:
    """Notes on requests that the allocator could not serve but that did not end the script."""
    failed, ended = recording.failed_request, recording.outcome
    if failed is None or (ended is not None and ended.outcome is Outcome.OUT_OF_MEMORY):
        return []
    statistics = recording.statistics.get(recording.device)
    times = 1 if statistics is None else statistics.num_ooms or 1
    return [notes.went_on_without_memory(times, failed.requested_bytes, failed.line)]


#: Operations that pick indices, such as those of a router (gpu/values/choices.py).
_CHOOSES = re.compile(r"\.(topk|sort|argsort|argmax|argmin)\b")


def _invention_notes(rows: list[InventedRow]) -> list[Note]:
    """Notes on made-up values: how many, and where the first one was read."""
    invented = sum(row.num_values for row in rows)
    if not invented:
        return []
    found = [notes.values_made_up(invented, _first_place(rows))]
    chosen = [row for row in rows if _CHOOSES.search(row.operation)]
    return [*found, *([notes.indices_made_up(chosen[0].operation, _first_place(chosen))] if chosen else [])]


def _first_place(rows: list[InventedRow]) -> str:
    """The first line of the script; empty if all rows are of a backward."""
    return next((f"{row.filename}:{row.line}" for row in rows if row.filename), "")


def _notes(recording: Recording, blocks: Blocks, job: Job | None, summary: Summary) -> list[Note]:
    left, outcome = summary.left_during_init, summary.exit.outcome
    found = [*recording.notes, *memory_tables.differences(recording, blocks)]
    if left is not None and job is not None:
        found.append(_left_note(recording, job))
    is_before_forward = not any(scope.phase == "forward" for scope in recording.scopes)
    if is_before_forward and len(blocks.frame) and not (blocks.frame["category"] == "parameter").any():
        found.append(notes.no_forward())
    if len(recording.events) > 1:
        others = sorted(set(recording.events) - {recording.device})
        found.append(notes.used_other_devices(others, recording.device))
    elif recording.events and recording.gpu is not None and recording.device != recording.gpu.device_index:
        found.append(notes.used_another_device(recording.device))
    found += _failure_notes(recording)
    found += _invention_notes(recording.invented)
    found += [notes.not_answered(name, calls) for name, calls in sorted(recording.unanswered.items())]
    if job is not None and job.collectives == "noop":
        found.append(notes.collectives_off())
    if left is None:
        found += coverage_notes(recording, outcome, None if job is None else job.until)
    return found
