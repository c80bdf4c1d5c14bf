"""The result of `fakedist calibrate`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from fakedist.extras.calibration.calibrating import Calibrated, CalibrationResult, StepChange, Unmatched
from fakedist.report.content.report_blocks import Block, Items, Remark, Report, Verdict
from fakedist.report.content.wording import short_kernel
from fakedist.results.verdict import span_us
from fakedist.rundir.notes import counted, share_text
from fakedist.rundir.plain import to_plain
from fakedist.units import format_us

_MOST_NAMED = 3


def calibration_report(
    result: CalibrationResult, rank: int, *, run_directory: Path, trace_file: Path, table_file: Path
) -> Report:
    """How much of a run a trace measured, what was left out and why, what that changes, and what to type next.

    ``rank`` is the run's, -1 if it is not known.
    """
    made = result.calibrated
    gpu = made.table.origin.gpu
    remarks = [*_limits(made)]
    if not result.gpu_is_named:
        remarks.append(f"the trace does not name its GPU: it is taken to be the run's, {gpu}")
    if result.trace_rank not in (-1, rank):
        remarks.append(f"the trace is of rank {result.trace_rank}, the run of rank {rank}")
    if result.change is None:
        remarks.append(f'fakedist does not know {gpu}: a GPU file with product = "{gpu}" makes the table usable')
    measured = (
        f"{made.num_measured:,} of the step's {counted(made.num_launches, 'launch', 'launches')} were measured, by "
        f"{made.num_matched:,} of {counted(made.num_kernels - made.num_unread, 'kernel')} in {trace_file.name} "
        f"({counted(made.num_steps, 'step')}, {gpu})"
    )
    model = f" --gpu {result.change.model}" if result.change is not None and result.change.model else ""
    command = f"fakedist time {shlex.quote(str(run_directory))}{model} --times {shlex.quote(str(table_file))}"
    saved = f"{table_file} has {counted(len(made.table.rows), 'measured time')}; to estimate the step with this table:"
    blocks: list[Block] = [Verdict(measured), *(Remark(text) for text in remarks)]
    if result.change is not None:
        blocks += _change(result.change)
    blocks.append(Items(saved, [command], is_code=True))
    return Report("calibrate", blocks, lambda: _object(result, table_file))


def _object(result: CalibrationResult, table_file: Path) -> dict[str, object]:
    """The result without the table's rows, which are in the file."""
    table = result.calibrated.table
    return {
        "table": str(table_file),
        "origin": to_plain(table.origin),
        "num_rows": len(table.rows),
        "gpu_is_named": result.gpu_is_named,
        "trace_rank": result.trace_rank if result.trace_rank >= 0 else None,
        **{name: value for name, value in to_plain(result.calibrated).items() if name != "table"},
        "change": to_plain(result.change),
    }


def _limits(made: Calibrated) -> Iterator[str]:
    if missing := sum(launch.count for launch in made.missing):
        yield f"not in the trace: {counted(missing, 'launch', 'launches')}: {_named(made.missing)}"
    if made.num_extra:
        yield f"not in the run: {counted(made.num_extra, 'kernel')}: {_named(made.extra)}"
    if made.num_conflicts:
        yield f"left out: {counted(made.num_conflicts, 'kernel')} whose grid or bytes are not the run's"
    if made.num_ambiguous:
        yield f"left out: {counted(made.num_ambiguous, 'kernel')} that may be one of several launches"
    if made.num_too_fast:
        yield f"left out: {counted(made.num_too_fast, 'kernel')} faster than the GPU's peak"
    if made.num_unread:
        yield f"not read: the last {counted(made.num_unread, 'kernel')} of a long trace"
    if made.num_elsewhere:
        yield f"not read: {made.num_elsewhere:,} kernels and copies of other processes and GPUs (--process)"
    if made.num_unreadable:
        yield f"not read: {counted(made.num_unreadable, 'damaged event')}"


def _named(left: list[Unmatched]) -> str:
    named = [
        f"{launch.count:,} x {short_kernel(launch.name)}"
        + (f" ({format_us(launch.time_us)})" if launch.time_us else "")
        for launch in left[:_MOST_NAMED]
    ]
    return ", ".join(named) + (", ..." if len(left) > _MOST_NAMED else "")


def _change(change: StepChange) -> list[Block]:
    step = format_us(change.step_us)
    if change.step_low_us is not None and change.step_high_us is not None:
        step = span_us(change.step_us, change.step_low_us, change.step_high_us)
    return [
        Verdict(f"the step on {change.gpu}: {step}; without the table {format_us(change.estimated_us)}"),
        Remark(
            f"measured on your GPU: {share_text(change.measured)} of kernel time; {share_text(change.scaled)} is "
            "estimated and scaled by similar kernels"
        ),
    ]
