"""Chooses what of a file is reported: one process on one GPU, and one step of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fakedist.errors import ReportError
from fakedist.rundir import time_notes
from fakedist.rundir.families import kernel_family
from fakedist.rundir.notes import Note
from fakedist.rundir.step_time import TracedProcess, TracedStep
from fakedist.traces.step_trace import STEP, Activity, Intervals, Ints, ProcessTrace, Ranges
from fakedist.traces.traced_step import Trace


@dataclass(frozen=True)
class StepChoice:
    """The part of a file to read: by default the last complete step of the process that ran most kernels on a GPU."""

    step: int | None = None
    process: int | None = None
    device: int | None = None


def choose_process(
    activity: Activity,
    key: Ints,
    described: Callable[[int], tuple[int, int, str]],
    called: Path,
    choice: StepChoice,
) -> tuple[int, list[TracedProcess]]:
    """Choose what one process ran on one GPU: its number in ``key``, and a row for each.

    Args:
        key: For each activity, a number of its process and GPU.
        described: The process, the device and the GPU's name of such a number.

    Raises:
        ReportError: The file has no kernels of such a process or GPU.
    """
    is_collective = np.array([kernel_family(name) == "communication" for name in activity.names] or [False])
    is_fill = np.array([name.startswith("Memset") for name in activity.names] or [False])[activity.name]
    is_collective = is_collective[activity.name] & ~activity.is_copy
    us = (activity.columns["end"] - activity.columns["start"]) / 1000
    rows: dict[int, TracedProcess] = {}
    for number in np.unique(key).tolist():
        own = key == number
        process, device, gpu = described(number)
        kernels, collectives = own & ~activity.is_copy, own & is_collective
        rows[number] = TracedProcess(
            process=process,
            device=device,
            gpu=gpu,
            is_shown=False,
            num_kernels=int(kernels.sum()),
            kernel_us=float(us[kernels].sum()),
            num_copies=int((own & activity.is_copy & ~is_fill).sum()),
            num_fills=int((own & is_fill).sum()),
            num_streams=len(np.unique(activity.columns["stream"][own])),
            num_collectives=int(collectives.sum()),
            collective_us=float(us[collectives].sum()),
        )
    numbers = sorted(rows, key=lambda number: (-rows[number].num_kernels, rows[number].device))
    matching = [number for number in numbers if choice.process in (None, rows[number].process)]
    if not matching:
        there = ", ".join(map(str, sorted({row.process for row in rows.values()})))
        raise ReportError(f"{called} has no kernels of process {choice.process}", f"it has those of {there}")
    matching = [number for number in matching if choice.device in (None, rows[number].device)]
    if not matching:
        there = ", ".join(map(str, sorted({row.device for row in rows.values()})))
        raise ReportError(f"{called} has no kernels of GPU {choice.device}", f"it has those of {there}")
    rows[matching[0]] = replace(rows[matching[0]], is_shown=True)
    return matching[0], [rows[number] for number in numbers]


def one_step(process: ProcessTrace, choice: StepChoice, called: Path) -> Trace:
    """One step of a process, or everything if no range marks a step; ReportError if there is no such step."""
    ranges = process.ranges.preferring_ours()
    notes: list[Note] = []
    shown = next((row for row in process.processes if row.is_shown), None)
    if shown is not None and len(process.processes) > 1:
        others = [(row.process, row.device) for row in process.processes if not row.is_shown]
        notes.append(time_notes.several_processes(len(process.processes), (shown.process, shown.device), others))
    marked = marked_steps(ranges, process.thread)
    if not len(marked.start) and choice.step is not None:
        raise ReportError("no range of the file names a step", "omit --step: the whole file then counts as one step")
    if len(marked.start):
        row = _chosen_row(marked, int(ranges.end.max()), process.launch, choice.step)
        begin, end, step = int(marked.start[row]), int(marked.end[row]), _number(marked, row)
    else:
        row, step = -1, 1
        notes.append(time_notes.no_steps_traced())
        begin = min(int(process.activity.columns["start"].min()), int(ranges.start.min(initial=np.iinfo(np.int64).max)))
        begin, end = min(begin, int(process.launch.min())), int(process.activity.columns["end"].max())
    memory = process.memory
    if len(memory.get("time", ())):
        during = (memory["time"] >= begin) & (memory["time"] <= end) if row >= 0 else memory["time"] >= 0
        allocated, reserved = (int(memory[name][during].max(initial=0)) for name in ("allocated", "reserved"))
        notes.append(time_notes.memory_traced(allocated, reserved, step if row >= 0 else -1))
    if process.num_unreadable:
        notes.append(time_notes.events_not_read(process.num_unreadable))
    if process.cut_off_after >= 0:
        notes.append(time_notes.trace_cut_off(process.cut_off_after))
    inside = (process.launch >= begin) & (process.launch <= end)
    if not inside.any():
        raise ReportError(f"no kernel of {called} was launched in step {step}", "--step chooses another")
    if process.activity.is_copy[inside].all():
        notes.append(time_notes.no_kernels_traced())
    host = begin, end
    if row >= 0:
        begin = _free_at(process, begin, inside)
    chosen = np.flatnonzero(inside)[np.argsort(process.activity.columns["start"][inside], kind="stable")]
    is_captured = bool((process.made_in[chosen] >= 0).any())
    return Trace(
        ranges=ranges if is_captured else ranges.where((ranges.end >= host[0]) & (ranges.start <= host[1])),
        activity=process.activity.where(chosen),
        thread=process.thread[chosen],
        launch=process.launch[chosen],
        made_in=process.made_in[chosen],
        made_at=process.made_at[chosen],
        begin=begin,
        host=host,
        step=step,
        gpu=process.gpu,
        notes=notes,
        processes=process.processes,
        calls=process.calls,
        syncs=process.syncs,
        steps=[_step_row(process, marked, number, number == row) for number in range(len(marked.start))],
    )


def marked_steps(ranges: Ranges, thread: Ints) -> Ranges:
    """The outermost ranges of steps, in order, of the thread that launches most: data loaders count batches, too."""
    steps = ranges.where(ranges.kind == STEP)
    having = np.unique(steps.thread)
    launching = np.bincount(np.searchsorted(having, thread[np.isin(thread, having)])) if len(having) else having
    if launching.any():
        steps = steps.where(steps.thread == having[launching.argmax()])
    lanes = np.unique(steps.thread, return_inverse=True)[1]
    steps = steps.where(Intervals(lanes, steps.start, steps.end).parents() < 0)
    order = np.argsort(steps.start, kind="stable")
    return replace(steps, **{name: getattr(steps, name)[order] for name in ("meaning", "thread", "start", "end")})


def _number(steps: Ranges, row: int) -> int:
    return steps.meanings[int(steps.meaning[row])].number


def _chosen_row(steps: Ranges, end: int, launch: Ints, step: int | None) -> int:
    """The row of a step: of those with kernels, by default the last that is over before the file ends."""
    numbers = [_number(steps, row) for row in range(len(steps.start))]
    if step is None:
        order = np.sort(launch)
        has_kernels = np.searchsorted(order, steps.end, "right") > np.searchsorted(order, steps.start)
        whole = np.flatnonzero(has_kernels & (steps.end < end))
        return int([len(numbers) - 1, *np.flatnonzero(has_kernels), *whole][-1])
    if step not in numbers:
        there = ", ".join(map(str, sorted(set(numbers))[:12]))
        raise ReportError(f"the file has no step {step}", f"--step is one of {there}")
    return len(numbers) - 1 - numbers[::-1].index(step)


def _free_at(process: ProcessTrace, begin: int, inside: npt.NDArray[np.bool_]) -> int:
    """When the GPU begins a step: it may still be at work on what was launched before the range did."""
    before, first = process.activity.columns["end"][process.launch < begin], process.activity.columns["start"][inside]
    free = int(before.max(initial=begin))
    return max(begin, min(free, int(first.min(initial=free))))


def _step_row(process: ProcessTrace, steps: Ranges, row: int, is_shown: bool) -> TracedStep:
    begin, end = int(steps.start[row]), int(steps.end[row])
    inside = (process.launch >= begin) & (process.launch <= end)
    free = _free_at(process, begin, inside)
    start, until = (process.activity.columns[name][inside] for name in ("start", "end"))
    order = np.argsort(start, kind="stable")
    start, until = start[order], np.maximum.accumulate(until[order])
    before = np.concatenate([start[:1], until[:-1]])
    return TracedStep(
        step=_number(steps, row),
        is_shown=is_shown,
        range_us=(end - begin) / 1000,
        step_us=(max(int(until.max(initial=begin)), free) - free) / 1000,
        num_kernels=int(inside.sum()),
        busy_us=float(np.maximum(until - np.maximum(start, before), 0).sum()) / 1000,
    )
