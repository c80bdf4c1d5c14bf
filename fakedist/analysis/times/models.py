"""The models that a step is priced with."""

from __future__ import annotations

from dataclasses import dataclass

from fakedist.analysis.times.estimated import Network
from fakedist.gpu_models.spec import GpuSpec
from fakedist.time.step import Prices


@dataclass(frozen=True)
class Models:
    """The models that a step is priced with.

    Attributes:
        gpu: The GPU model.
        prices: Its kernel times.
        network: What connects the GPUs, and a change of it to price.
    """

    gpu: GpuSpec
    prices: Prices
    network: Network
