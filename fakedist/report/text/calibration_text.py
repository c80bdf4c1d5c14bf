"""The result of `fakedist calibrate` in words and as an object."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fakedist.report.text.wording import short_kernel
from fakedist.results.calibration.calibrating import Calibrated, CalibrationResult, StepChange, Unmatched
from fakedist.rundir.notes import counted, share_text
from fakedist.rundir.plain import to_plain
from fakedist.units import format_us

_MOST_NAMED = 3


def calibration_lines(result: CalibrationResult, run_rank: int, trace_file: Path) -> list[str]:
    """The result, line by line."""
    return list(_lines(result, run_rank, trace_file))


def calibration_object(result: CalibrationResult, table_file: Path) -> dict[str, object]:
    """The result for ``--json``: without the table's rows, which are in the file."""
    plain = to_plain(result.calibrated)
    table = result.calibrated.table
    return {
        "table": str(table_file),
        "origin": to_plain(table.origin),
        "num_rows": len(table.rows),
        "gpu_is_named": result.gpu_is_named,
        "trace_rank": result.trace_rank if result.trace_rank >= 0 else None,
        **{name: value for name, value in plain.items() if name != "table"},
        "change": to_plain(result.change),
    }


def _lines(result: CalibrationResult, run_rank: int, trace_file: Path) -> Iterator[str]:
    made, origin = result.calibrated, result.calibrated.table.origin
    yield (
        f"{made.num_measured:,} of the step's {counted(made.num_launches, 'launch', 'launches')} were measured, by "
        f"{made.num_matched:,} of {counted(made.num_kernels - made.num_unread, 'kernel')} in {trace_file.name} "
        f"({counted(made.num_steps, 'step')}, {origin.gpu})"
    )
    yield from (f"  {line}" for line in _limits(made))
    if not result.gpu_is_named:
        yield f"  the trace does not name its GPU: it is taken to be the run's, {origin.gpu}"
    if result.trace_rank not in (-1, run_rank):
        yield f"  the trace is of rank {result.trace_rank}, the run of rank {run_rank}"
    if result.change is None:
        yield f'  fakedist does not know {origin.gpu}: a GPU file with product = "{origin.gpu}" makes the table usable'
    else:
        yield from _change(result.change)


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


def _change(change: StepChange) -> Iterator[str]:
    yield (
        f"measured on your GPU: {share_text(change.measured)} of kernel time; {share_text(change.scaled)} is estimated "
        "and scaled by similar kernels"
    )
    interval = ""
    if change.step_low_us is not None and change.step_high_us is not None:
        interval = f" ({format_us(change.step_low_us)} to {format_us(change.step_high_us)})"
    before = format_us(change.estimated_us)
    yield f"the step on {change.gpu}: {format_us(change.step_us)}{interval}; without the table {before}"
