"""From a run and a trace of its job to a table of own times, and what the table changes in the step's estimate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fakedist.analysis.calibration.calibrating import Calibrated, calibrate, with_gpu
from fakedist.analysis.calibration.recorded_step import recorded_step
from fakedist.analysis.collector import no_collector
from fakedist.analysis.nsys.database import open_database
from fakedist.analysis.nsys.tracing import read_process
from fakedist.analysis.recording import read_recording
from fakedist.analysis.times.estimated import prices_of
from fakedist.analysis.times.launch_tables import launch_table, work_table
from fakedist.analysis.traces.chrome_trace import read_chrome_trace
from fakedist.analysis.traces.process_trace import ProcessTrace
from fakedist.errors import ReportError
from fakedist.gpu_models.known import GPUS
from fakedist.gpu_models.spec import GpuSpec
from fakedist.time.own import OwnPrices
from fakedist.time.own_table import OwnTable
from fakedist.time.step import price_step


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
    run_directory: Path, exported: Path, trace_file: Path, process: int | None = None, *, is_rehearsal: bool = False
) -> OwnTimesFound:
    """Measure the work of a run's step in a trace.

    Args:
        run_directory: The run, profiled on the virtual GPU.
        exported: The trace: a Chrome trace, or an SQLite export of Nsight Systems.
        trace_file: The file that the user gave, which messages name.
        process: The process in the trace; None for the one with most kernels.
        is_rehearsal: Whether the trace may be of the virtual GPU. Its table is marked and cannot be used.

    Raises:
        ReportError: The trace cannot be read, or too little of it matches.
        RunDirectoryError: The run cannot be read.
    """
    recording = read_recording(run_directory)
    model = recording.gpu.model if recording.gpu is not None else None
    if recording.launches is None or model is None:
        raise ReportError(
            f"{run_directory} has no launches of a step on the virtual GPU",
            "fakedist profile --device virtual ...   records them",
        )
    launches, work = launch_table(recording.launches), work_table(recording.launches)
    with no_collector():
        trace = read_trace_file(exported, trace_file, process)
        gpu = _gpu(trace, model)
        peaks = gpu.peak_flops if gpu is not None and not is_rehearsal else {}
        step = recorded_step(launches, work)
        calibrated = calibrate(step, with_gpu(trace, model.product), trace_file, peaks, is_rehearsal=is_rehearsal)
    change = None
    if gpu is not None:
        name = "" if gpu.product == model.product else gpu.name
        change = step_change(launches, work, gpu, calibrated.table, name)
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
        with path.open("rb") as file:
            return file.read(16).startswith(b"SQLite format 3\0")
    except OSError:
        return False


def step_change(
    launches: pd.DataFrame, work: pd.DataFrame, gpu: GpuSpec, table: OwnTable, model_name: str = ""
) -> StepChange:
    """Price a step with and without own times."""
    model = prices_of(gpu)
    before = price_step(launches, work, model).source
    prices = OwnPrices(model, table)
    after = price_step(launches, work, prices).source
    return StepChange(
        gpu.product,
        model_name,
        before.step_us,
        after.step_us,
        after.step_low_us,
        after.step_high_us,
        prices.shares.measured,
        prices.shares.scaled,
    )


def _gpu(trace: ProcessTrace, model: GpuSpec) -> GpuSpec | None:
    """The model of the trace's GPU: the run's own, or one of this name."""
    if not trace.gpu or trace.gpu.casefold() == model.product.casefold():
        return model
    return next((each for each in GPUS.values() if each.product.casefold() == trace.gpu.casefold()), None)
