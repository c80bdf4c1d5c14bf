"""What recorded runs are priced for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from fakedist.analysis.times.estimated import NetworkChoice, network_of, prices_of
from fakedist.analysis.times.models import Models
from fakedist.results.repricing import check_measured, gpu_of, nccl_of, times_of
from fakedist.run.manifest import Manifest
from fakedist.run.nccl import check_variable
from fakedist.run.summary import Summary


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
    """What runs are priced for.

    Attributes:
        gpu: A known GPU model, such as "b200", or a GPU file; None for the run's own.
        power_watts: A power limit that replaces the model's own.
        times: A file that ``fakedist calibrate`` wrote on that GPU; None for the run's own, if it is for this GPU.
        fabric: A preset such as "p5-efa", or a fabric file; None for the run's own, or the GPU's usual one.
        gpus_per_node: GPUs in one NVLink domain; None for the run's own number, or the fabric's.
        interference: Whether kernels and collectives that run at once slow each other.
        nccl_env: NCCL's variables, which go before those that the run had.
        moe_imbalance: How much more than its even share the busiest rank gets of an all_to_all and of grouped products.
        what_if: A change of the job's communication, such as "merge=dp,tp" (``fakedist.time.what_if``).
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
            SetupError: The file of own times cannot be read, or is of another GPU.
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
