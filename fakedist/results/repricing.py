"""Prices a run's step for another GPU or fabric. Nothing runs, and the memory stays that of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypedDict

import pandas as pd

from fakedist.analysis.layer_table import fold_layers
from fakedist.cost_model.estimated import Models, NetworkChoice, StepTimes, estimate_times, network_of, prices_of
from fakedist.cost_model.step import MeasuredPrices
from fakedist.errors import RunDirectoryError
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.models.spec import GpuSpec
from fakedist.rundir.environment import check_variable
from fakedist.rundir.manifest import Manifest
from fakedist.rundir.schema import TABLES
from fakedist.rundir.summary import Summary

#: :meth:`fakedist.Run.table`.
ReadTable = Callable[..., pd.DataFrame]
#: Notes that pricing makes anew.
_PRICING_NOTES = ("only_collectives_are_estimated", "collectives_estimated", "nccl_environment", "experts_load")
#: What to type for a run whose launches can be priced.
_HINT = "fakedist profile --device virtual -o RUN ... makes a run whose step any GPU can be priced for"


def gpu_of(manifest: Manifest, name: str | None, power_watts: float | None) -> GpuSpec:
    """The GPU model to price for.

    Args:
        name: A known model or a GPU file; None for the run's own.
        power_watts: A power limit that replaces the model's own.

    Raises:
        JobError: fakedist has no such model, or the file is not valid.
        RunDirectoryError: The run's own GPU model is not known.
    """
    if name is not None:
        return find_gpu(name, power_watts)
    if manifest.gpu_model is None:
        raise RunDirectoryError("the run's own GPU model is not known", "name a GPU: --gpu h100-80g")
    return manifest.gpu_model if power_watts is None else replace(manifest.gpu_model, watts=power_watts)


def check_measured(summary: Summary, gpu: str | None, power_watts: float | None, times: str | None) -> None:
    """Refuse to price measured kernels for another GPU.

    Raises:
        RunDirectoryError: The run's kernels were measured, and another GPU, power limit or table of times is wanted.
    """
    if is_traced(summary) and any(choice is not None for choice in (gpu, power_watts, times)):
        raise RunDirectoryError(
            "the run's kernels were measured on a GPU, so only its collectives can be priced again",
            "fakedist time RUN --fabric NAME; fakedist profile --device virtual makes a run for any GPU",
        )


def is_traced(summary: Summary) -> bool:
    """Whether a tool traced the kernels of the timed step, so that only collectives are estimated."""
    return summary.kernels is not None and summary.kernels.tool != "model"


def times_of(manifest: Manifest, gpu: GpuSpec, times: str | None) -> str | None:
    """The calibration table to price by: the given one, else the run's own if this is its GPU."""
    job, own = manifest.job, manifest.gpu_model
    if times is not None or job is None or own is None or own.product != gpu.product:
        return times
    return job.times


def price_again(manifest: Manifest, summary: Summary, table: ReadTable, models: Models) -> StepTimes:
    """The times of a run's step on a GPU.

    Raises:
        JobError: The step lacks what a what-if changes.
        RunDirectoryError: The run has no launches to price, or is damaged.
    """
    tables = tables_to_price(manifest, summary, table, measured=True)
    traced = summary.kernels if is_traced(summary) else None
    if traced is not None:
        traced = replace(traced, notes=[note for note in traced.notes if note.code not in _PRICING_NOTES])
        models = replace(models, prices=MeasuredPrices(traced.gpu, tables["launches"]))
    return estimate_times(tables, fold_layers(tables["layers"]), models, traced=traced)


def nccl_of(summary: Summary) -> dict[str, str]:
    """NCCL's variables as the run recorded them."""
    return {} if summary.estimated_outside is None else summary.estimated_outside.nccl_environment


def tables_to_price(
    manifest: Manifest, summary: Summary, table: ReadTable, *, measured: bool = False
) -> dict[str, pd.DataFrame]:
    """The tables that pricing a run's step needs.

    Args:
        measured: Whether its kernels may be measured.

    Raises:
        RunDirectoryError: The run has no launches to price, or is damaged.
    """
    if why := _why_not(manifest, summary, measured=measured):
        raise RunDirectoryError(f"the run has no launches to price: {why}", _HINT)
    launches = table("launches", [column.name for column in TABLES["launches"].columns])
    if not len(launches):
        reasons = [note.text for note in summary.notes if note.code == "not_timed"]
        raise RunDirectoryError(
            f"the run has no launches to price: {reasons[0] if reasons else 'no step was timed'}", _HINT
        )
    names = ("work", "ranges", "layers", "calls", "groups")
    return {"launches": launches} | {name: table(name) for name in names}


def _why_not(manifest: Manifest, summary: Summary, *, measured: bool) -> str:
    """Why a run has no launches; empty if it has them."""
    if manifest.imported is not None:
        return f"it was imported from {manifest.imported.tool}, which measured its kernels"
    if manifest.job is None:
        return "it is a memory snapshot"
    if is_traced(summary) and not measured:
        return "its kernels were measured on a GPU"
    if is_traced(summary) and summary.kernels is not None and not summary.kernels.fabric:
        reasons = [note.text for note in summary.kernels.notes if note.code == "collectives_not_priced"]
        return reasons[0] if reasons else "its kernels were measured by an older fakedist"
    if not manifest.job.kernels:
        return "it was made with --no-kernels"
    if manifest.job.device == "cuda" and not is_traced(summary):
        return "no step was timed on its GPU"
    return "" if manifest.gpu_model else "it never reached its GPU, or an older fakedist made it, which kept none"


class PricingOptions(TypedDict, total=False):
    """The keywords of :meth:`fakedist.Run.priced_for` and :func:`fakedist.time_job`: those of :class:`Pricing`."""

    power_watts: float | None
    times: str | None
    fabric: str | None
    gpus_per_node: int | None
    interference: bool
    nccl_env: Mapping[str, str]
    moe_imbalance: float
    what_if: str | None


@dataclass(frozen=True)
class Pricing:
    """The GPU, network and changes that runs are priced for.

    Attributes:
        gpu: A known GPU model, such as "b200", or a GPU file; None for the run's own.
        power_watts: A power limit that replaces the model's own.
        times: A file that ``fakedist calibrate`` wrote on that GPU; None for the run's own, if it is for this GPU.
        fabric: A preset such as "p5-efa", or a fabric file; None for the run's own, or the GPU's usual one.
        gpus_per_node: GPUs in one NVLink domain; None for the run's own number, or the fabric's.
        interference: Whether kernels and collectives that run at once slow each other.
        nccl_env: NCCL's variables, which replace those that the run had.
        moe_imbalance: The busiest rank's load of an all_to_all and of grouped products over the even load.
        what_if: A change of the job's communication, such as "merge=dp,tp" (``fakedist.cost_model.what_if``).
    """

    gpu: str | None = None
    power_watts: float | None = None
    times: str | None = None
    fabric: str | None = None
    gpus_per_node: int | None = None
    interference: bool = True
    nccl_env: Mapping[str, str] = field(default_factory=dict)
    moe_imbalance: float = 1.0
    what_if: str | None = None

    def models(self, manifest: Manifest, summary: Summary) -> Models:
        """The models to price a run with.

        Raises:
            JobError: There is no such GPU model, fabric or what-if, a file is not valid, or a variable of NCCL's makes
                no difference.
            SetupError: The calibration table cannot be read, or is of another GPU.
            RunDirectoryError: The run's own GPU model is not known. Or its kernels were measured, and another GPU is
                wanted.
        """
        check_measured(summary, self.gpu, self.power_watts, self.times)
        for name, value in self.nccl_env.items():
            check_variable(name, value)
        gpu = gpu_of(manifest, self.gpu, self.power_watts)
        chosen = NetworkChoice(
            fabric=self.fabric,
            gpus_per_node=self.gpus_per_node,
            interferes=self.interference,
            nccl=self.nccl_env,
            moe_imbalance=self.moe_imbalance,
            what_if=self.what_if,
        )
        prices = prices_of(gpu, times_of(manifest, gpu, self.times))
        return Models(gpu, prices, network_of(gpu, manifest.job, chosen, nccl_of(summary)))
