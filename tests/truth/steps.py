"""Estimates of recorded steps, by today's model.

The recorded work is checked against arithmetic, and each run is priced for the GPU that the step was published on. The
power model's parameters, ``HEAT`` and ``FP8_HEAT`` of ``fakedist.cost_model.kernels.kernel_times``, are fitted on the
rows marked so, in bf16 and then in fp8: the least squares of the logarithm of estimate over published step. Each of
these rows is also estimated with the parameter of the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.cost_model.busiest_rank import ExpertsLoad
from fakedist.cost_model.collectives.collective_times import find_fabric
from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.estimated import JobNetwork, communication_for
from fakedist.cost_model.hosts import HostModel, host_model
from fakedist.cost_model.job.job_times import JobTimes, Models, job_times
from fakedist.cost_model.kernels.kernel_times import LIQUID_COOLED, KernelTimes
from fakedist.cost_model.nccl.settings import Nccl
from fakedist.cost_model.step import PricedStep, Prices, StepPrices, price_step
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.models.spec import GpuSpec
from fakedist.rundir.directory import load_manifest
from fakedist.rundir.step_time import ClockSteadiness, HostTime
from tests.truth import kept
from tests.truth.catalogue import Made, Results, Row, Step, catalogue
from tests.truth.jobs import Megatron

#: Values of the parameter that are tried.
HEATS = np.round(np.arange(0.5, 4.0, 0.05), 2)
#: Kernels of mamba-ssm whose tiles pad the products.
_SCANS = r"_(bmm_)?chunk_"
Floats = npt.NDArray[np.float64]


class WrongWorkError(Exception):
    """The recorded work is not that which the model asks for."""


class Recording:
    """The recorded ranks of a row.

    Args:
        row: The row.

    Attributes:
        row: The row.
        gpu: The GPU that it is priced for.
        tables: The tables of each rank.
    """

    def __init__(self, row: Row) -> None:
        self.row, self.gpu, self.script = row, find_gpu(row.gpu_model), catalogue().script(row)
        wanted, ranks = set(self.script.ranks), kept.ranks_of(row.recording)
        self.tables = {rank: tables for rank, tables in kept.tables_of(row.recording).items() if rank in wanted}
        self.ranks = [of_rank for rank, of_rank in ranks.items() if rank in wanted]
        self.host = host_of([rank.host for rank in self.ranks if rank.host is not None], self.gpu)

    def estimate(self, heat: float, fp8_heat: float) -> tuple[float, float, float]:
        """Seconds of the step, and its interval."""
        prices = KernelTimes(self.gpu, heat=heat, fp8_heat=fp8_heat)
        network = JobNetwork(find_fabric(self.row.fabric, world_size=self.row.gpus), nccl=Nccl(self.script.nccl))
        scale = 1.0
        if len(self.tables) > 1 or self.row.stages or self.row.micro_batches:
            models = Models(self.gpu, prices, network, self.host)
            ranks, number = frozenset(self.tables), self.row.micro_batches or None
            job = job_times(self.tables.items(), ranks, self.row.gpus, models, micro_batches=number)
            found = (job.step_us, job.low_us, job.high_us)
            scale = self._by_formula(job) / job.step_us if self.row.stages else scale
        else:
            (tables,) = self.tables.values()
            alone = self._alone(prices, communication_for(tables, self.gpu, network))
            found = (alone.step_us or 0.0, alone.step_low_us, alone.step_high_us)
        step_us, low_us, high_us = found
        assert low_us is not None
        assert high_us is not None
        return step_us * scale / 1e6, low_us * scale / 1e6, high_us * scale / 1e6

    def error(self, heat: float, fp8_heat: float) -> float:
        """Logarithm of the estimate over the published step."""
        assert self.row.published_s is not None
        return math.log(self.estimate(heat, fp8_heat)[0] / self.row.published_s)

    def kernels(self, heat: float, fp8_heat: float) -> float | None:
        """Seconds of the step if communication took no time; None for a pipeline, whose ranks wait for each other."""
        if len(self.tables) > 1 or self.row.stages:
            return None
        return (self._alone(KernelTimes(self.gpu, heat=heat, fp8_heat=fp8_heat), None).step_us or 0.0) / 1e6

    def flops(self, family: str) -> float:
        """FLOPs of all kernels of a family, of all recorded ranks, without those of Mamba's scans."""
        found = 0.0
        for tables in self.tables.values():
            of_work, work = tables["launches"]["work"].to_numpy(), tables["work"]
            counts = np.bincount(of_work[of_work >= 0], minlength=len(work))
            own = ((work["family"] == family) & ~work["name"].str.match(_SCANS)).to_numpy()
            found += float((np.nan_to_num(work["flops"].to_numpy()) * counts)[own].sum())
        return found

    def check_work(self) -> None:
        """Raise WrongWorkError if what was recorded is not the work that the model asks for."""
        asked = self.script.flops()
        for name, expected in (("gemm", asked.products), ("attention", asked.attention)):
            recorded = self.flops(name)
            if abs(recorded - expected) > 1e-3 * expected:
                figures = f"{recorded / 1e12:.2f} TFLOP recorded, {expected / 1e12:.2f} expected"
                raise WrongWorkError(f"{self.row.name}: {name}: {figures}")

    def _by_formula(self, job: JobTimes) -> float:
        """Microseconds of a step of which some stages were recorded, as ``fakedist sweep`` has it (docs/sweeps.md)."""
        assert isinstance(self.script, Megatron)
        longest = min(job.ranks, key=lambda rank: rank.parts.bubble_us)
        passes = longest.lanes[longest.lanes["lane"].isin(("forward", "recompute", "backward"))]
        passes_us = float((passes["end_us"] - passes["start_us"]).sum())
        micro_batches = self.row.micro_batches or longest.num_recorded
        bubble_us = (self.script.num_stages - 1) / self.script.num_chunks * passes_us / micro_batches
        return job.step_us - longest.parts.bubble_us + bubble_us

    def _alone(self, prices: Prices, communication: Communication | None) -> PricedStep:
        (tables,) = self.tables.values()
        prices = StepPrices(prices, ExpertsLoad(), self.host.costs)
        return price_step(tables["launches"], tables["work"], prices, communication)


def host_of(times: Sequence[HostTime], gpu: GpuSpec) -> HostModel:
    """The GPU's usual host, by the clock of all recorded ranks: of their machine's scores the mean."""
    clocks = [time.clock for time in times if time.clock is not None]
    if not clocks:
        return host_model(gpu)
    worst = ClockSteadiness(
        min(clock.num_repeats for clock in clocks),
        max(clock.spread for clock in clocks),
        max(clock.bound for clock in clocks),
    )
    return host_model(gpu, None, fmean(time.machine_us for time in times if time.machine_us is not None), worst)


def is_recorded(row: Row) -> bool:
    """Whether all ranks are kept."""
    return set(catalogue().script(row).ranks) <= set(kept.ranks_of(row.recording))


def keep(row: Row, rank: int, run: Path, made: Made) -> None:
    """Keep of a rank what pricing needs."""
    summary = load_manifest(run).summary
    host = None if summary is None or summary.kernels is None else summary.kernels.host
    tables = {name: pd.read_parquet(run / "tables" / f"{name}.parquet") for name in kept.TABLES}
    kept.keep(row.recording, rank, tables, kept.Rank(host, made))


def price(found: Results) -> None:
    """Check the work of all recorded rows, fit the parameter and estimate every step, into the results."""
    recordings = [Recording(row) for row in catalogue().rows if row.published_s and is_recorded(row)]
    for recording in recordings:
        recording.check_work()
    others_of: dict[str, tuple[float, float]] = {}
    for is_fp8 in (False, True):
        fitted = [
            each
            for each in recordings
            if each.row.is_fitted
            and (each.row.precision == "fp8") is is_fp8
            and each.row.gpu not in LIQUID_COOLED  # which have a parameter of their own
        ]
        errors = {
            each.row.name: np.array(
                [each.error(found.heat, heat) if is_fp8 else each.error(heat, found.fp8_heat) for heat in HEATS]
            )
            for each in fitted
        }
        for name in errors:
            others = fit([each for other, each in errors.items() if other != name])
            others_of[name] = (found.heat, others) if is_fp8 else (others, found.fp8_heat)
        value = fit(list(errors.values()))
        found.heat, found.fp8_heat = (found.heat, value) if is_fp8 else (value, found.fp8_heat)
    for recording in recordings:
        price_alone(recording, found, others_of)


def price_alone(
    recording: Recording, found: Results, others_of: Mapping[str, tuple[float, float]] = MappingProxyType({})
) -> None:
    """Estimate the step of a row into the results, whose parameters stay; ``others_of`` are those fitted without it."""
    fits, name = (found.heat, found.fp8_heat), recording.row.name
    left_out = recording.estimate(*others_of[name])[0] if name in others_of else None
    before = found.steps.get(recording.row.recording)
    ranks = [rank.made for rank in recording.ranks if rank.made is not None]
    seconds = sum(made.seconds or 0.0 for made in ranks)
    made = replace(ranks[0], seconds=seconds) if ranks else before.made if before else Made("", "", "")
    found.steps[name] = Step(*recording.estimate(*fits), left_out, recording.kernels(*fits), made)


def fit(errors: Sequence[Floats]) -> float:
    """The parameter with the least squared error over some rows, each with its errors for all of ``HEATS``."""
    return float(HEATS[int(np.argmin(sum(np.square(each) for each in errors)))])


def change(row: Row, found: Results) -> str:
    """How the estimate of a row differs from the kept one, in a line; empty if it does not."""
    before, recording = found.steps[row.name], Recording(row)
    fits = found.heat, found.fp8_heat
    today = (*recording.estimate(*fits), recording.kernels(*fits))
    pairs = zip(today, (before.step_s, before.low_s, before.high_s, before.kernels_s), strict=True)
    if all(one == other or (one and other and math.isclose(one, other, rel_tol=1e-6)) for one, other in pairs):
        return ""
    return f"{row.name}: the model says {today[0]:.6f} s, kept is {before.step_s:.6f} s: make truth"
