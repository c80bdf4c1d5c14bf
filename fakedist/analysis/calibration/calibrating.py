"""Makes a table of own times from a trace of the job that a run recorded."""

from __future__ import annotations

import datetime
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fakedist.analysis.calibration.matching import Matched, Traced, match
from fakedist.analysis.calibration.recorded_step import RecordedStep, traced_kernels
from fakedist.analysis.traces.process_trace import ProcessTrace
from fakedist.errors import ReportError
from fakedist.run.launch_records import WorkRow
from fakedist.time.own_table import Origin, OwnTable, made_table

#: At least this share of the recorded launches must be in the trace, and of the pairs this share be certain.
_LEAST_MATCHED, _LEAST_STRONG = 0.5, 0.5
#: Names of the virtual GPU's library calls, which no GPU has kernels of.
_LIBRARY_CALL = re.compile(r"cu(?:blas|dnn|blasLt)[A-Z]\w+$")
#: A product that is faster than the peak by more than this was not measured, or is not the recorded one.
_FASTER_THAN_PEAK = 1.1


@dataclass(frozen=True)
class Left:
    """Launches of one kind that were not matched.

    Attributes:
        name: The kernel, or the library's function.
        family: Its family.
        count: How many: of a recorded step, or of the trace.
        time_us: How long they took in the trace; 0 for those of a recorded step.
    """

    name: str
    family: str
    count: int
    time_us: float


@dataclass(frozen=True)
class Calibrated:
    """A table of own times, and how much of the trace and of the recorded step it is made from.

    Attributes:
        table: The table.
        num_launches: Launches of the recorded step that a trace can contain.
        num_measured: Those that were matched at least once.
        num_steps: Repetitions of the step in the trace.
        num_kernels: The trace's kernels, without communication.
        num_unread: Those that were not looked at, because the trace is very long.
        num_matched: Those that were matched and used.
        num_extra: Those that are nothing recorded.
        num_conflicts: Those whose grid or bytes differ from the recorded ones, so that they do other work.
        num_ambiguous: Those that may be one of several launches.
        num_too_fast: Those faster than the GPU's peak allows.
        num_elsewhere: Activities of other processes and GPUs.
        num_unreadable: Damaged events.
        missing: Recorded launches that the trace lacks, most first.
        extra: The trace's kernels that are nothing recorded, most time first.
    """

    table: OwnTable
    num_launches: int
    num_measured: int
    num_steps: int
    num_kernels: int
    num_unread: int
    num_matched: int
    num_extra: int
    num_conflicts: int
    num_ambiguous: int
    num_too_fast: int
    num_elsewhere: int
    num_unreadable: int
    missing: list[Left]
    extra: list[Left]


def calibrate(
    step: RecordedStep, trace: ProcessTrace, file: Path, peak_flops: dict[str, float], *, is_rehearsal: bool = False
) -> Calibrated:
    """Measure the work of a recorded step in a trace.

    Args:
        step: The recorded step.
        trace: The trace. ``trace.gpu`` names the GPU.
        file: The trace's file, which messages and the table name.
        peak_flops: Dense peak of the trace's GPU by type, FLOP/s; empty if it is not known.
        is_rehearsal: Whether a trace of the virtual GPU is taken. The table is marked.

    Raises:
        ReportError: Too little matches to trust it, or the trace is of the virtual GPU.
    """
    traced = traced_kernels(trace)
    if not is_rehearsal:
        _refuse_virtual(traced, file)
    found = match(step.launches, step.work, traced)
    _refuse_little(step, traced, found, file)
    fast = _too_fast(step, found, peak_flops)
    samples: dict[WorkRow, list[float]] = defaultdict(list)
    for launch, duration in zip(found.launch[~fast].tolist(), found.duration_us[~fast].tolist(), strict=True):
        samples[step.works[step.work[launch]]].append(duration)
    if not samples:
        raise ReportError(f"every kernel of {file} is faster than {trace.gpu} can be", "is it a trace of this job?")
    origin = Origin(
        gpu=trace.gpu,
        tool=" ".join(filter(None, (trace.tool, trace.tool_version))),
        date=datetime.date.today().isoformat(),
        torch=trace.torch,
        driver=trace.driver,
        file=str(file.resolve()),
        rehearsal=is_rehearsal,
    )
    measured = np.bincount(found.launch[~fast], minlength=len(step.launches)) > 0
    return Calibrated(
        table=made_table(origin, samples),
        num_launches=len(step.launches),
        num_measured=int(measured.sum()),
        num_steps=found.num_repetitions,
        num_kernels=len(traced.launches),
        num_unread=len(traced.launches) - found.num_read,
        num_matched=len(found.launch) - int(fast.sum()),
        num_extra=len(found.unmatched),
        num_conflicts=found.num_conflicts,
        num_ambiguous=found.num_ambiguous,
        num_too_fast=int(fast.sum()),
        num_elsewhere=trace.num_elsewhere,
        num_unreadable=trace.num_unreadable,
        missing=_missing(step, found),
        extra=_extra(traced, found),
    )


def with_gpu(trace: ProcessTrace, gpu: str) -> ProcessTrace:
    """The trace, with the GPU's name where it does not give one."""
    return trace if trace.gpu else replace(trace, gpu=gpu)


def _refuse_virtual(traced: Traced, file: Path) -> None:
    names = [each for each in traced.launches.signatures if each.kind == "kernel"]
    if any(_LIBRARY_CALL.match(each.name) and each.grid == "1,1,1" for each in names):
        raise ReportError(
            f"{file} is a trace of the virtual GPU, where each kernel takes 1 us: nothing was measured",
            "trace the job on a GPU",
        )


def _refuse_little(step: RecordedStep, traced: Traced, found: Matched, file: Path) -> None:
    launches = len(step.launches)
    if not launches:
        raise ReportError("the run recorded no launches", "profile it on the virtual GPU, without --no-kernels")
    matched = int((found.of_launch > 0).sum())
    if not len(traced.launches):
        raise ReportError(f"{file} has no kernels but communication", "trace a whole step of the job")
    if found.num_strong < _LEAST_STRONG * found.num_telling:
        raise ReportError(
            f"{file} looks like another job's: only {found.num_strong:,} of {found.num_telling:,} kernels that could "
            "be the run's have its names, grids and sizes",
            "trace the job that the run recorded, with the same model, batch and options",
        )
    if matched < _LEAST_MATCHED * launches:
        raise ReportError(
            f"too little of {file} matches the run: {matched:,} of its {launches:,} launches "
            f"({matched / launches:.0%}; at least {_LEAST_MATCHED:.0%} are needed)",
            "trace at least one whole step of the job that the run recorded, of the same rank",
        )


def _too_fast(
    step: RecordedStep, found: Matched, peak_flops: dict[str, float]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Pairs whose kernel took less than its arithmetic takes at the GPU's peak."""
    least = np.array(
        [work.flops / peak_flops[work.dtype] * 1e6 if work.dtype in peak_flops else 0.0 for work in step.works] or [0.0]
    )
    least = np.where(np.isfinite(least), least, 0.0) / _FASTER_THAN_PEAK
    return np.asarray(found.duration_us < least[step.work[found.launch]])


def _missing(step: RecordedStep, found: Matched) -> list[Left]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for launch in np.flatnonzero(found.of_launch == 0).tolist():
        each = step.launches.signatures[step.launches.signature[launch]]
        counts[each.name, each.family] += 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [Left(name, family, count, 0.0) for (name, family), count in ordered]


def _extra(traced: Traced, found: Matched) -> list[Left]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    times: dict[tuple[str, str], float] = defaultdict(float)
    for kernel in found.unmatched.tolist():
        each = traced.launches.signatures[traced.launches.signature[kernel]]
        counts[each.name, each.family] += 1
        times[each.name, each.family] += float(traced.duration_us[kernel])
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return [Left(name, family, counts[name, family], time) for (name, family), time in ordered]
