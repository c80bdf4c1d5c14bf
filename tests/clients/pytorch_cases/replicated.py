"""DistributedDataParallel and ZeroRedundancyOptimizer."""

from __future__ import annotations

from typing import Any

import torch
from cases import Rank, case, same
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

SAME = "all ranks have the same batch"


class Net(nn.Module):
    """Two layers, and one that may stay unused."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 4)
        self.recompute = recompute

    def forward(self, batch: torch.Tensor, all_: bool = False) -> torch.Tensor:
        hidden = checkpoint(self.first, batch, use_reentrant=False) if self.recompute else self.first(batch)
        out: torch.Tensor = self.second(hidden.relu())
        return self.unused(out) if all_ else out


def pair(rank: Rank, **how: Any) -> tuple[Net, DistributedDataParallel]:
    """The model as it is, and replicated."""
    ids = [rank.device] if rank.device.type == "cuda" else None
    return Net().to(rank.device), DistributedDataParallel(Net().to(rank.device), device_ids=ids, **how)


def same_gradients(alone: Net, replicated: DistributedDataParallel, tolerance: float = 0.0) -> None:
    for mine, other in zip(alone.parameters(), replicated.module.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None and other.grad is not None:
            torch.testing.assert_close(
                mine.grad.cpu(), other.grad.cpu(), rtol=max(tolerance, 1e-4), atol=max(tolerance, 1e-5)
            )


@case("distributed_test.py: test_DistributedDataParallel", "gradients are those of one process", SAME)
def gradients(rank: Rank) -> None:
    alone, replicated = pair(rank)
    for net in (alone, replicated):
        net(rank.full(1, 2, 8), all_=True).sum().backward()
    same_gradients(alone, replicated)


@case("test_c10d_nccl.py: test_ddp_comm_hook_allreduce_hook_nccl", "a hook of the user reduces the buckets", SAME)
def hook_of_the_user(rank: Rank) -> None:
    alone, replicated = pair(rank)
    replicated.register_comm_hook(None, default_hooks.allreduce_hook)
    for net in (alone, replicated):
        net(rank.full(1, 2, 8), all_=True).sum().backward()
    same_gradients(alone, replicated)


@case(
    "test_c10d_nccl.py: test_fp16_compress_wrapper_nccl", "gradients that travel in 16 bits are nearly the same", SAME
)
def compressed(rank: Rank) -> None:
    alone, replicated = pair(rank)
    replicated.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for net in (alone, replicated):
        net(rank.full(1, 2, 8), all_=True).sum().backward()
    same_gradients(alone, replicated, 1e-2)


@case(
    "distributed_test.py: test_ddp_control_flow_same_across_ranks", "parameters that are not used get no gradient", SAME
)
def unused_parameters(rank: Rank) -> None:
    alone, replicated = pair(rank, find_unused_parameters=True)
    for _ in range(2):
        for net in (alone, replicated):
            net(rank.full(1, 2, 8)).sum().backward()
    assert replicated.module.unused.weight.grad is None
    same_gradients(alone, replicated)


@case("distributed_test.py: test_ddp_static_graph_nested_types", "a static graph with recomputation trains", SAME)
def static_graph(rank: Rank) -> None:
    alone, replicated = pair(rank, static_graph=True)
    replicated.module.recompute = True
    for _ in range(3):
        for net in (alone, replicated):
            net(rank.full(1, 2, 8), all_=True).sum().backward()
    same_gradients(alone, replicated)


@case("distributed_test.py: test_ddp_grad_accumulation (no_sync)", "gradients add up without a reduction", SAME)
def without_synchronisation(rank: Rank) -> None:
    alone, replicated = pair(rank)
    with replicated.no_sync():
        replicated(rank.full(1, 2, 8), all_=True).sum().backward()
    replicated(rank.full(1, 2, 8), all_=True).sum().backward()
    for _ in range(2):
        alone(rank.full(1, 2, 8), all_=True).sum().backward()
    same_gradients(alone, replicated)


@case(
    "optim/test_zero_redundancy_optimizer.py: test_step", "parameters of this rank's part step as Adam steps them", SAME
)
def zero_optimizer(rank: Rank) -> None:
    alone, sharded = Net().to(rank.device), Net().to(rank.device)
    plain = torch.optim.Adam(alone.parameters(), lr=0.1)
    zero = ZeroRedundancyOptimizer(sharded.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)
    for net, optimizer in ((alone, plain), (sharded, zero)):
        net(rank.full(1, 2, 8), all_=True).sum().backward()
        optimizer.step()
    mine = {id(parameter) for group in zero.optim.param_groups for parameter in group["params"]}
    for wanted, found in zip(alone.parameters(), sharded.parameters(), strict=True):
        if id(found) in mine:
            same(found, wanted)


@case(
    "optim/test_zero_redundancy_optimizer.py: test_state_dict",
    "a consolidated state loads again",
    why="only the other ranks hold the states of their parts; what they would send is made up, and does not unpickle",
)
def zero_state(rank: Rank) -> None:
    net = Net().to(rank.device)
    zero = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)
    net(rank.full(1, 2, 8), all_=True).sum().backward()
    zero.step()
    zero.consolidate_state_dict(to=rank.rank)
    zero.load_state_dict(zero.state_dict())
