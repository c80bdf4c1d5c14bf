from __future__ import annotations

from fakedist.rundir.outcome import Outcome
from fakedist.sweep.command import PricedFor
from fakedist.sweep.point_rows import RankKind, RankResult, Row, Status, StepEstimate
from fakedist.sweep.space import Scalar
from fakedist.units import GIB

CAPACITY = 80 * GIB


def row(
    speed: float | None = 1000.0,
    memory_gib: float = 40.0,
    *,
    spread: float = 0.01,
    status: Status = Status.FITS,
    **values: Scalar,
) -> Row:
    """A point of one rank that takes this much, with an interval of ``spread`` each way."""
    label = str(sorted(values.items()))
    result = RankResult(
        rank=0,
        kind=RankKind.RAN if status.ran else RankKind.FAILED,
        outcome=Outcome.STOPPED,
        directory=f"runs/{label}/rank0",
        peak_allocated_bytes=int((memory_gib - 2) * GIB),
        peak_reserved_bytes=int((memory_gib - 1) * GIB),
        nccl_low_bytes=GIB // 4,
        nccl_high_bytes=GIB // 2,
        context_bytes=GIB // 2,
        capacity_bytes=CAPACITY,
    )
    return Row(
        id=label,
        key=label,
        values=tuple(values.items()),
        pricing=PricedFor(),
        status=status,
        reason="" if status is Status.FITS else "AssertionError: no",
        line="" if status.ran else "/job/train.py:7 (main)",
        ranks=(result,),
        step=None if speed is None or not status.ran else step(speed, spread),
    )


def step(speed: float, spread: float = 0.01, bubble_from: str = "placed", least: float = 0.0) -> StepEstimate:
    """A step of 8,000 tokens on 8 GPUs, of which the kernels alone take the fraction ``least``."""
    step_us = 1e9 / speed
    return StepEstimate(
        step_us=step_us,
        low_us=step_us * (1 - spread),
        high_us=step_us * (1 + spread),
        bubble_us=step_us / 10,
        bubble_from=bubble_from,
        communication_us=step_us / 5,
        tokens_per_step=8000,
        tokens_per_s_per_gpu=speed,
        samples_per_step=8,
        sample_shape="1000",
        samples_per_s_per_gpu=speed / 1000,
        tflops_per_gpu=400.0,
        mfu=0.4,
        mfu_torchtitan=0.45,
        gpu="NVIDIA H100 80GB HBM3",
        fabric="dgx-h100-ndr",
        least_us=least * step_us,
    )
