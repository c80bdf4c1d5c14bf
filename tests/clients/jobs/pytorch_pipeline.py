"""torch.distributed.pipelining: python pytorch_pipeline.py SCHEDULE [static]. One stage a rank, or two."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

WIDTH, ROWS, MICRO_BATCHES = 64, 8, 8
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zero_bubble_v": ScheduleZBVZeroBubble,
    "dual_pipe_v": ScheduleDualPipeV,
}


def stages_of(schedule: str, rank: int, num_ranks: int) -> list[int]:
    """The stages of a rank."""
    if schedule in ("gpipe", "1f1b"):
        return [rank]
    return [rank, 2 * num_ranks - 1 - rank] if schedule.endswith("_v") else [rank, rank + num_ranks]


def build(stage: int, num_stages: int) -> nn.Module:
    """One stage: wider in the middle, so that neighbours must tell each other."""
    widths = [WIDTH * (1 + min(each, num_stages - each)) for each in range(num_stages + 1)]
    return nn.Sequential(nn.Linear(widths[stage], WIDTH), nn.ReLU(), nn.Linear(WIDTH, widths[stage + 1])).cuda()


def static(stage: int, num_stages: int) -> dict[str, Any]:
    """The shapes of inputs and outputs, given beforehand."""
    widths = [WIDTH * (1 + min(each, num_stages - each)) for each in range(num_stages + 1)]
    rows = ROWS // MICRO_BATCHES
    inside = torch.empty(rows, widths[stage], device="cuda", requires_grad=stage > 0)
    return {
        "input_args": (inside,),
        "output_args": (torch.empty(rows, widths[stage + 1], device="cuda", requires_grad=True),),
    }


def main(name: str, is_static: bool) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    mine = stages_of(name, rank, num_ranks)
    num_stages = num_ranks * len(mine)
    device = torch.device("cuda", torch.cuda.current_device())
    modules = [build(stage, num_stages) for stage in mine]
    stages = [
        PipelineStage(module, stage, num_stages, device, **(static(stage, num_stages) if is_static else {}))
        for stage, module in zip(mine, modules, strict=True)
    ]
    schedule = SCHEDULES[name](stages if len(stages) > 1 else stages[0], MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW([parameter for module in modules for parameter in module.parameters()])
    for _ in range(3):
        inputs = (torch.randn(ROWS, WIDTH, device="cuda"),) if 0 in mine else ()
        is_last = num_stages - 1 in mine
        losses: list[torch.Tensor] = []
        schedule.step(
            *inputs,
            target=torch.randn(ROWS, WIDTH, device="cuda") if is_last else None,
            losses=losses if is_last else None,
        )
        optimizer.step()
        optimizer.zero_grad()
        if is_last:
            print("LOSSES", len(losses), all(bool(torch.isfinite(loss)) for loss in losses))
    dist.destroy_process_group()
    print(name, "done")


main(sys.argv[1], "static" in sys.argv[2:])
