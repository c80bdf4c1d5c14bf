"""From a run and a trace of its job to a table of own times, and what the table changes in the step's estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fakedist.analysis.calibration.calibrating import Calibrated, calibrate, with_gpu
from fakedist.analysis.calibration.recorded_step import recorded_step
from fakedist.analysis.nsys.database import open_database
from fakedist.analysis.nsys.tracing import read_process
from fakedist.analysis.times.estimated import estimate_times, network_of, prices_of
from fakedist.analysis.traces.chrome_trace import read_chrome_trace
from fakedist.analysis.traces.process_trace import ProcessTrace
from fakedist.bounded import UnreadableError, open_file
from fakedist.gpu_models.known import GPUS
from fakedist.gpu_models.spec import GpuSpec
from fakedist.job import Job
from fakedist.run.collector import no_collector
from fakedist.time.own import OwnPrices
from fakedist.time.own_table import OwnTable


@dataclass(frozen=True)
class TimedRun:
    """A run whose step can be priced.

    Attributes:
        tables: Its tables ``launches`` (not empty), ``work``, ``ranges``, ``layers``, ``calls`` and ``groups``.
        model: The GPU model that it ran on.
        job: The job.
        nccl: NCCL's variables as the run recorded them.
    """

    tables: Mapping[str, pd.DataFrame]
    model: GpuSpec
    job: Job | None
    nccl: Mapping[str, str]


@dataclass(frozen=True)
class StepChange:
    """What own times change in the estimate of a step.

    Attributes:
        gpu: The GPU that the step is priced for.
        model: The name of its model, as ``--gpu`` takes it; empty if it is the run's own.
        estimated_us: The step without own times.
        step_us: The step with them.
        step_low_us: The least of its 90 % interval; None if it is not known.
        step_high_us: The most of it.
        measured: Share of kernel time that was measured.
        scaled: Share of kernel time that is estimated and scaled by similar kernels.
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
class OwnTimesFound:
    """A table of own times and how it was made.

    Attributes:
        calibrated: The table, and what was matched.
        gpu_is_told: Whether the trace names its GPU; else it was taken to be the run's.
        trace_rank: The rank that the trace names; -1 without one.
        change: What the table changes in the step's estimate; None if the GPU's model is not known.
    """

    calibrated: Calibrated
    gpu_is_told: bool
    trace_rank: int
    change: StepChange | None


def find_own_times(
    run: TimedRun, exported: Path, trace_file: Path, process: int | None = None, *, is_rehearsal: bool = False
) -> OwnTimesFound:
    """Measure the work of a run's step in a trace.

    Args:
        run: The run, profiled on the virtual GPU.
        exported: The trace: a Chrome trace, or an SQLite export of Nsight Systems.
        trace_file: The file that the user gave, which messages name.
        process: The process in the trace; None for the one with most kernels.
        is_rehearsal: Whether the trace may be of the virtual GPU. Its table is marked and cannot be used.

    Raises:
        ReportError: The trace cannot be read, or too little of it matches.
        RunDirectoryError: The run's tables are damaged.
    """
    model = run.model
    with no_collector():
        trace = read_trace_file(exported, trace_file, process)
        gpu = _gpu(trace, model)
        peaks = gpu.peak_flops if gpu is not None and not is_rehearsal else {}
        step = recorded_step(run.tables["launches"], run.tables["work"])
        calibrated = calibrate(step, with_gpu(trace, model.product), trace_file, peaks, is_rehearsal=is_rehearsal)
    change = None if gpu is None else step_change(run, gpu, calibrated.table)
    return OwnTimesFound(calibrated, bool(trace.gpu), trace.rank, change)


def read_trace_file(exported: Path, called: Path, process: int | None = None) -> ProcessTrace:
    """Read a Chrome trace, or an SQLite export of Nsight Systems.

    Raises:
        ReportError: It is neither, is damaged, or has no kernels of that process.
    """
    if is_sqlite(exported):
        with open_database(exported, called) as database:
            return read_process(database, process)
    return read_chrome_trace(exported, process)


def is_sqlite(path: Path) -> bool:
    """Whether a file is an SQLite database; False if it cannot be read, which its reader tells."""
    try:
        with open_file(path) as file:
            return file.read(16).startswith(b"SQLite format 3\0")
    except (OSError, UnreadableError):
        return False


def step_change(run: TimedRun, gpu: GpuSpec, table: OwnTable) -> StepChange:
    """Price a run's step with and without own times, as its report does.

    Args:
        run: The run.
        gpu: The GPU model of the table.
        table: Own times.
    """
    model, network = prices_of(gpu), network_of(gpu, run.job, nccl=run.nccl)
    before = estimate_times(run.tables, gpu, model, network).source
    prices = OwnPrices(model, table)
    after = estimate_times(run.tables, gpu, prices, network).source
    return StepChange(
        gpu=gpu.product,
        model="" if gpu.product == run.model.product else gpu.name,
        estimated_us=before.step_us,
        step_us=after.step_us,
        step_low_us=after.step_low_us,
        step_high_us=after.step_high_us,
        measured=prices.shares.measured,
        scaled=prices.shares.scaled,
    )


def _gpu(trace: ProcessTrace, model: GpuSpec) -> GpuSpec | None:
    """The model of the trace's GPU: the run's own, or one of this name."""
    if not trace.gpu or trace.gpu.casefold() == model.product.casefold():
        return model
    return next((each for each in GPUS.values() if each.product.casefold() == trace.gpu.casefold()), None)
