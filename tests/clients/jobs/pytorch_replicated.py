"""DistributedDataParallel and what belongs to it, by the name of the feature: python pytorch_replicated.py FEATURE."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WIDTH = 64


def model() -> nn.Module:
    """A small network with a normalisation that SyncBatchNorm can stand for."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(layers[0], nn.BatchNorm1d(WIDTH), nn.ReLU(), *layers[1:]).cuda()


class Alternating(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers[self.calls % 2](x)


def replicated(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model(), device_ids=[torch.cuda.current_device()], **options)


def step(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ddp(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.AdamW(ddp.parameters())
    for _ in range(3):
        step(ddp, optimizer)


def hooks() -> None:
    """Gradients by communication hooks: bf16, and PowerSGD."""
    ddp = replicated(bucket_cap_mb=1)
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    train(ddp)


def power_sgd() -> None:
    ddp = replicated()
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(ddp)


def static_graph() -> None:
    """A static graph, gradients as views of the buckets."""
    train(replicated(static_graph=True, gradient_as_bucket_view=True))


def unused_parameters() -> None:
    """Parameters that a step does not use."""
    device = torch.cuda.current_device()
    train(DistributedDataParallel(Alternating().cuda(), device_ids=[device], find_unused_parameters=True))


def no_sync() -> None:
    """Two micro-batches a step, reduced once."""
    ddp = replicated()
    optimizer = torch.optim.AdamW(ddp.parameters())
    for _ in range(3):
        for number in range(2):
            with ddp.no_sync() if number == 0 else contextlib.nullcontext():
                ddp(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def join() -> None:
    """Uneven inputs."""
    ddp = replicated()
    optimizer = torch.optim.AdamW(ddp.parameters())
    with Join([ddp]):
        for _ in range(2 + dist.get_rank() % 2):
            step(ddp, optimizer)


def zero() -> None:
    """Optimizer states over all ranks, and consolidated on the last rank."""
    ddp = replicated()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)
    for _ in range(2):
        step(ddp, optimizer)


def zero_overlapped() -> None:
    """As one flat bucket of parameters."""
    ddp = replicated()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3)
    train(ddp, optimizer)


def sync_batch_norm() -> None:
    """Statistics over all ranks."""
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(model())
    train(DistributedDataParallel(synchronised, device_ids=[torch.cuda.current_device()]))


def functional() -> None:
    """Collectives with gradients: torch.distributed.nn."""
    layer = model()
    optimizer = torch.optim.AdamW(layer.parameters())
    num_ranks = dist.get_world_size()
    for _ in range(3):
        out = layer(torch.randn(8, WIDTH, device="cuda"))
        gathered = torch.cat(dist_functional.all_gather(out))
        reduced = dist_functional.all_reduce(out)
        part = dist_functional.reduce_scatter(torch.empty_like(out[0]), [out[0] for _ in range(num_ranks)])
        swapped = torch.cat(
            dist_functional.all_to_all([torch.empty_like(out[0]) for _ in range(num_ranks)], [out[1]] * num_ranks)
        )
        broadcast = dist_functional.broadcast(out.clone(), src=0)
        everything = (gathered, reduced, part, swapped, broadcast)
        sum(one.square().mean() for one in everything).backward()
        optimizer.step()
        optimizer.zero_grad()


FEATURES: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        hooks,
        power_sgd,
        static_graph,
        unused_parameters,
        no_sync,
        join,
        zero,
        zero_overlapped,
        sync_batch_norm,
        functional,
    )
}


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    FEATURES[sys.argv[1]]()
    dist.destroy_process_group()
    print(sys.argv[1], "done")


main()
