"""Makes a calibration table from a run and a GPU's trace of its job, and prices the step with it.

The result of `fakedist calibrate`.
"""

from __future__ import annotations

import datetime
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from fakedist.cost_model.estimated import Models, network_of, price_tables, prices_of
from fakedist.cost_model.kernels.calibration_table import (
    CalibratedPrices,
    CalibrationOrigin,
    CalibrationTable,
    made_table,
)
from fakedist.cost_model.nccl.settings import Nccl
from fakedist.errors import ReportError
from fakedist.extras.calibration.matching import (
    MOST_CELLS,
    Floats,
    Matched,
    RecordedLaunches,
    Sequence,
    Traced,
    match,
    recorded_step,
    traced_kernels,
)
from fakedist.gpu.models.catalogue import GPUS
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options import Job
from fakedist.report.content.report_blocks import Block, Items, Remark, Report, Verdict
from fakedist.report.content.wording import short_kernel
from fakedist.results.opening import open_run_directory
from fakedist.results.repricing import gpu_of, nccl_of, tables_to_price
from fakedist.results.verdict import span_us
from fakedist.rundir.collector import no_collector
from fakedist.rundir.launch_records import WorkRow
from fakedist.rundir.notes import counted, share_text
from fakedist.rundir.plain import to_plain
from fakedist.traces.one_step import StepChoice
from fakedist.traces.step_trace import Ints, ProcessTrace
from fakedist.traces.trace_files import read_trace_file
from fakedist.units import format_us

#: At least this fraction of the recorded launches must be in the trace, and of the pairs this fraction be certain.
_LEAST_MATCHED, _LEAST_STRONG = 0.5, 0.5
#: Names of the virtual GPU's library calls, which no GPU has kernels of.
_LIBRARY_CALL = re.compile(r"cu(?:blas|dnn|blasLt)[A-Z]\w+$")
#: A product that is faster than the peak by more than this was not measured, or is not the recorded one.
_FASTER_THAN_PEAK = 1.1


@dataclass(frozen=True)
class Unmatched:
    """Launches of one kernel or library function that were not matched; ``time_us`` is 0 for a recorded step's."""

    name: str
    family: str
    count: int
    time_us: float


@dataclass(frozen=True)
class Calibrated:
    """A calibration table, and how much of the trace and of the recorded step it is made from.

    Attributes:
        num_launches: Launches of the recorded step that a trace can contain.
        num_measured: Those that were matched at least once.
        num_steps: Repetitions of the step in the trace.
        num_kernels: The trace's kernels, without communication.
        num_unread: Those that were not looked at, because the trace is very long.
        num_matched: Those that were matched and used.
        num_extra: Those that are nothing recorded.
        num_conflicts: Those that do other work: their grid or bytes differ.
        num_ambiguous: Those that may be one of several launches.
        num_too_fast: Those faster than the GPU's peak allows.
        num_elsewhere: Activities of other processes and GPUs.
        missing: Recorded launches that the trace lacks, most first.
        extra: The trace's kernels that are nothing recorded, most time first.
    """

    table: CalibrationTable
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
    missing: list[Unmatched]
    extra: list[Unmatched]


def calibrate(
    step: RecordedLaunches,
    trace: ProcessTrace,
    file: Path,
    peak_flops: dict[str, float],
    *,
    is_rehearsal: bool = False,
    most_cells: int = MOST_CELLS,
) -> Calibrated:
    """Measure the work of a recorded step in a trace, whose file messages and the table name.

    Args:
        peak_flops: Dense peak of the trace's GPU by type, FLOP/s; empty if unknown.
        is_rehearsal: Take a trace of the virtual GPU, and mark the table.
        most_cells: Of a longer trace the first steps are read, see :func:`~.matching.align`.

    Raises:
        ReportError: Too little matches to trust it, or the trace is of the virtual GPU.
    """
    traced = traced_kernels(trace)
    if not is_rehearsal:
        _refuse_virtual(traced, file)
    matched = match(step.launches, step.work, traced, most_cells)
    _refuse_little(step, traced, matched, file)
    fast = _too_fast(step, matched, peak_flops)
    samples: dict[WorkRow, list[float]] = defaultdict(list)
    for launch, duration in zip(matched.launch[~fast].tolist(), matched.duration_us[~fast].tolist(), strict=True):
        samples[step.works[step.work[launch]]].append(duration)
    if not samples:
        raise ReportError(f"every kernel of {file} is faster than {trace.gpu} can be", "is it a trace of this job?")
    origin = CalibrationOrigin(
        gpu=trace.gpu,
        tool=" ".join(filter(None, (trace.tool, trace.tool_version))),
        date=datetime.date.today().isoformat(),
        torch=trace.torch,
        driver=trace.driver,
        file=str(file.resolve()),
        rehearsal=is_rehearsal,
    )
    measured = np.bincount(matched.launch[~fast], minlength=len(step.launches)) > 0
    return Calibrated(
        table=made_table(origin, samples),
        num_launches=len(step.launches),
        num_measured=int(measured.sum()),
        num_steps=matched.num_repetitions,
        num_kernels=len(traced.launches),
        num_unread=len(traced.launches) - matched.num_read,
        num_matched=len(matched.launch) - int(fast.sum()),
        num_extra=len(matched.unmatched),
        num_conflicts=matched.num_conflicts,
        num_ambiguous=matched.num_ambiguous,
        num_too_fast=int(fast.sum()),
        num_elsewhere=trace.num_elsewhere,
        num_unreadable=trace.num_unreadable,
        missing=_unmatched(step.launches, np.flatnonzero(matched.of_launch == 0)),
        extra=_unmatched(traced.launches, matched.unmatched, traced.duration_us),
    )


def _refuse_virtual(traced: Traced, file: Path) -> None:
    kernels = [signature for signature in traced.launches.signatures if signature.kind == "kernel"]
    if any(_LIBRARY_CALL.match(kernel.name) and kernel.grid == "1,1,1" for kernel in kernels):
        raise ReportError(
            f"{file} is a trace of the virtual GPU, where each kernel takes 1 us: nothing was measured",
            "trace the job on a GPU",
        )


def _refuse_little(step: RecordedLaunches, traced: Traced, pairs: Matched, file: Path) -> None:
    launches = len(step.launches)
    if not launches:
        raise ReportError("the run recorded no launches", "profile it on the virtual GPU, without --no-kernels")
    matched = int((pairs.of_launch > 0).sum())
    if not len(traced.launches):
        raise ReportError(f"{file} has no kernels but communication", "trace a whole step of the job")
    if pairs.num_strong < _LEAST_STRONG * pairs.num_telling:
        raise ReportError(
            f"{file} looks like another job's: only {pairs.num_strong:,} of {pairs.num_telling:,} kernels that could "
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
    step: RecordedLaunches, matched: Matched, peak_flops: dict[str, float]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    least = np.array(
        [work.flops / peak_flops[work.dtype] * 1e6 if work.dtype in peak_flops else 0.0 for work in step.works] or [0.0]
    )
    least = np.where(np.isfinite(least), least, 0.0) / _FASTER_THAN_PEAK
    return np.asarray(matched.duration_us < least[step.work[matched.launch]])


def _unmatched(sequence: Sequence, rows: Ints, duration_us: Floats | None = None) -> list[Unmatched]:
    """Launches by name and family: most time first, or without times, most launches first."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    times: dict[tuple[str, str], float] = defaultdict(float)
    for row in rows.tolist():
        signature = sequence.signatures[sequence.signature[row]]
        counts[signature.name, signature.family] += 1
        times[signature.name, signature.family] += 0.0 if duration_us is None else float(duration_us[row])
    ordered = sorted(counts, key=lambda key: -(counts[key] if duration_us is None else times[key]))
    return [Unmatched(*key, counts[key], times[key]) for key in ordered]


@dataclass(frozen=True)
class TimedRun:
    """A run whose step can be priced: launches (not empty), work, ranges, layers, calls, groups."""

    tables: Mapping[str, pd.DataFrame]
    model: GpuSpec
    job: Job | None
    nccl: Nccl


def open_timed_run(path: Path) -> TimedRun:
    """Open a run for calibration; RunDirectoryError if it is not a run, damaged, or has no launches to price."""
    run = open_run_directory(path)
    tables = tables_to_price(run.manifest, run.summary, run.table)
    return TimedRun(tables, gpu_of(run.manifest, None, None), run.manifest.job, nccl_of(run.summary))


@dataclass(frozen=True)
class StepChange:
    """The estimate of a step without and with a calibration table.

    Attributes:
        model: As ``--gpu`` takes it; empty if it is the run's own.
        estimated_us: Without the table.
        step_low_us: The least of the 90 % interval; None if unknown.
        measured: Fraction of kernel time that was measured.
        scaled: Fraction of kernel time that is estimated and scaled by similar kernels.
    """

    gpu: str
    model: str
    estimated_us: float
    step_us: float
    step_low_us: float | None
    step_high_us: float | None
    measured: float
    scaled: float


@dataclass(frozen=True)
class CalibrationResult:
    """A calibration table and how it was made.

    Attributes:
        gpu_is_named: The trace names its GPU; else it was taken to be the run's.
        trace_rank: -1 if the trace names none.
        change: None if the GPU's model is unknown.
    """

    calibrated: Calibrated
    gpu_is_named: bool
    trace_rank: int
    change: StepChange | None


def calibrate_run(
    run: TimedRun, exported: Path, trace_file: Path, process: int | None = None, *, is_rehearsal: bool = False
) -> CalibrationResult:
    """Measure the work of a run's step in a trace: a Chrome trace, or an SQLite export of Nsight Systems.

    Args:
        trace_file: The file that the user gave, which messages name.
        process: None for the one with most kernels.
        is_rehearsal: Take a trace of the virtual GPU. Its table is marked and cannot be used.

    Raises:
        ReportError: The trace cannot be read, or too little of it matches.
        RunDirectoryError: The run's tables are damaged.
    """
    model = run.model
    with no_collector():
        trace = read_trace_file(exported, trace_file, StepChoice(process=process))
        gpu = _gpu(trace, model)
        peaks = gpu.peak_flops if gpu is not None and not is_rehearsal else {}
        step = recorded_step(run.tables["launches"], run.tables["work"])
        named = replace(trace, gpu=trace.gpu or model.product)
        calibrated = calibrate(step, named, trace_file, peaks, is_rehearsal=is_rehearsal)
    change = None if gpu is None else step_change(run, gpu, calibrated.table)
    return CalibrationResult(calibrated, bool(trace.gpu), trace.rank, change)


def step_change(run: TimedRun, gpu: GpuSpec, table: CalibrationTable) -> StepChange:
    """Price a run's step with and without a calibration table, as its report does."""
    model, network = prices_of(gpu), network_of(gpu, run.job, nccl=run.nccl)
    before = price_tables(run.tables, Models(gpu, model, network))
    prices = CalibratedPrices(model, table)
    after = price_tables(run.tables, Models(gpu, prices, network))
    return StepChange(
        gpu=gpu.product,
        model="" if gpu.product == run.model.product else gpu.name,
        estimated_us=before.step_us,
        step_us=after.step_us,
        step_low_us=after.step_low_us,
        step_high_us=after.step_high_us,
        measured=prices.fractions.measured,
        scaled=prices.fractions.scaled,
    )


def _gpu(trace: ProcessTrace, model: GpuSpec) -> GpuSpec | None:
    """The model of the trace's GPU: the run's own, or one of this name."""
    if not trace.gpu or trace.gpu.casefold() == model.product.casefold():
        return model
    return next((gpu for gpu in GPUS.values() if gpu.product.casefold() == trace.gpu.casefold()), None)


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
