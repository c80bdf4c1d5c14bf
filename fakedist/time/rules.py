"""What rules that price work have in common."""

from __future__ import annotations

from dataclasses import dataclass

from fakedist.gpu_models.spec import GpuSpec
from fakedist.time.gpus import NearestTable
from fakedist.time.intervals import Intervals


@dataclass(frozen=True)
class Rules:
    """Rules that price one kind of work on one GPU.

    Attributes:
        gpu: The GPU.
        table: Whose measurements estimate it.
        intervals: Their errors.
    """

    gpu: GpuSpec
    table: NearestTable
    intervals: Intervals
