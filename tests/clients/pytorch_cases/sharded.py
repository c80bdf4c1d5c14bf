"""FSDP2, DTensor and tensor parallelism."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from cases import Rank, case, raises, same
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

SHARDS = "the parts of other ranks are like this rank's, not the rest of the parameter"


def model(rank: Rank, size: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, size)).to(rank.device)


def sharded(rank: Rank, **how: Any) -> Any:
    net = model(rank)
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=rank.mesh(), **how)
    return fully_shard(net, mesh=rank.mesh(), **how)


@case("fsdp/test_fully_shard_init.py: test_shard_tensor_parameters", "parameters are DTensors, sharded in rows")
def parameters(rank: Rank) -> None:
    whole, net = model(rank), sharded(rank)
    assert isinstance(net, FSDPModule)
    for mine, parameter in zip(net.parameters(), whole.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert mine.placements == (Shard(0),)
        assert mine.shape == parameter.shape
        same(mine.to_local(), parameter.chunk(rank.size)[rank.rank])


@case(
    "fsdp/test_fully_shard_comm.py: test_fully_shard_communication_count", "all_gathers and reduce_scatters of a step"
)
def communication(rank: Rank) -> None:
    net = sharded(rank)
    with CommDebugMode() as forward:
        loss = net(rank.full(1, 2, 16)).sum()
    with CommDebugMode() as backward:
        loss.backward()
    assert forward.get_comm_counts()[torch.ops.c10d._allgather_base_] == 2
    assert backward.get_comm_counts()[torch.ops.c10d._reduce_scatter_base_] == 2


@case(
    "fsdp/test_fully_shard_training.py: test_train_parity_single_group",
    "losses are those of the model as a whole",
    why=SHARDS,
)
def train_parity(rank: Rank) -> None:
    whole, net = model(rank), sharded(rank)
    batch = rank.full(1, 2, 16)
    same(net(batch).sum(), whole(batch).sum())


@case(
    "fsdp/test_fully_shard_training.py: test_gradient_accumulation",
    "no reduction while synchronisation is off; gradients of a part afterwards",
)
def accumulation(rank: Rank) -> None:
    net = sharded(rank)
    net.set_requires_gradient_sync(False)
    with CommDebugMode() as mode:
        net(rank.full(1, 2, 16)).sum().backward()
    assert mode.get_comm_counts()[torch.ops.c10d._reduce_scatter_base_] == 0
    net.set_requires_gradient_sync(True)
    net(rank.full(1, 2, 16)).sum().backward()
    for parameter in net.parameters():
        assert parameter.grad.to_local().shape == parameter.to_local().shape


@case(
    "fsdp/test_fully_shard_mixed_precision.py: test_compute_dtype", "compute in bf16, parameters and gradients in fp32"
)
def mixed_precision(rank: Rank) -> None:
    net = sharded(rank, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    out = net(rank.full(1, 2, 16))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in net.parameters()} == {torch.float32}


@case(
    "fsdp/test_fully_shard_clip_grad_norm_.py: test_clip_grad_norm_1d",
    "the norm of all gradients, at most the limit afterwards",
)
def clipped_norm(rank: Rank) -> None:
    net = sharded(rank)
    net(rank.full(1, 2, 16)).sum().backward()
    mine = sum(parameter.grad.to_local().square().sum() for parameter in net.parameters())
    total = nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    assert isinstance(total, DTensor)
    same(total.full_tensor(), (mine * rank.size).sqrt())
    assert nn.utils.get_total_norm([p.grad for p in net.parameters()]).full_tensor().cpu() <= 0.0101


@case(
    "fsdp/test_fully_shard_training.py: test_train_parity_hsdp",
    "shards in one axis, copies in the other; all_reduces too",
)
def hybrid(rank: Rank) -> None:
    mesh = rank.mesh((rank.size // 2, 2), ("replicate", "shard"))
    net = fully_shard(model(rank), mesh=mesh)
    with CommDebugMode() as mode:
        net(rank.full(1, 2, 16)).sum().backward()
    counts = mode.get_comm_counts()
    assert counts[torch.ops.c10d._reduce_scatter_base_] == 1
    assert counts[torch.ops.c10d.allreduce_] == 1
    assert next(iter(net.parameters())).to_local().shape[0] == 16


@case("checkpoint/test_state_dict.py: test_fsdp2", "the whole state dict is the model's", why=SHARDS)
def whole_state(rank: Rank) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    found = get_model_state_dict(sharded(rank), options=StateDictOptions(full_state_dict=True))
    for name, value in model(rank).state_dict().items():
        same(found[name], value)


@case("checkpoint/test_fsdp_model_state.py: test_fsdp_model_state", "what a rank saves it loads")
def saved_and_loaded(rank: Rank) -> None:
    net = sharded(rank)
    state = get_model_state_dict(net)
    before = {name: value.to_local().clone() for name, value in state.items()}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state, checkpoint_id=folder)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.to_local().zero_()
        dcp.load(state, checkpoint_id=folder)
    for name, value in state.items():
        same(value.to_local(), before[name])


@case(
    "tensor/test_dtensor.py: test_from_local, test_full_tensor",
    "a DTensor of local parts, and the whole of it",
    "all ranks hold the same part",
)
def from_local(rank: Rank) -> None:
    tensor = DTensor.from_local(rank.full(2, 3, 4), rank.mesh(), [Shard(0)])
    assert tensor.shape == (3 * rank.size, 4)
    whole = tensor.redistribute(placements=[Replicate()])
    same(whole.to_local(), 2)
    same(tensor.sum().full_tensor(), 2.0 * 12 * rank.size)


@case(
    "tensor/test_api.py: test_distribute_tensor",
    "each rank gets its rows of what rank 0 holds",
    why="rank 0 alone holds what it scatters: without a tape it is made up on other ranks; rank 0 passes",
)
def distributed(rank: Rank) -> None:
    whole = torch.arange(rank.size * 4.0, device=rank.device).view(rank.size, 4)
    same(distribute_tensor(whole, rank.mesh(), [Shard(0)]).to_local(), whole[rank.rank : rank.rank + 1])


@case("tensor/test_api.py: test_distribute_tensor (src_data_rank=None)", "each rank keeps its own rows")
def distributed_from_here(rank: Rank) -> None:
    whole = torch.arange(rank.size * 4.0, device=rank.device).view(rank.size, 4)
    found = distribute_tensor(whole, rank.mesh(), [Shard(0)], src_data_rank=None)
    same(found.to_local(), whole[rank.rank : rank.rank + 1])


@case(
    "tensor/parallel/test_tp_examples.py: test_mlp_training",
    "shapes of the parts, and the all_reduces of a step",
    "the values are not looked at",
)
def tensor_parallel(rank: Rank) -> None:
    net = parallelize_module(model(rank), rank.mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert net[0].weight.to_local().shape == (32 // rank.size, 16)
    assert net[2].weight.to_local().shape == (16, 32 // rank.size)
    with CommDebugMode() as mode:
        net(rank.full(1, 2, 16)).sum().backward()
    assert mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce] >= 1


@case(
    "tensor/parallel/test_parallelize_api.py: test_parallelize_mlp",
    "outputs are those of the model as a whole",
    why=SHARDS,
)
def tensor_parallel_parity(rank: Rank) -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    net = parallelize_module(model(rank), rank.mesh(), plan, src_data_rank=None)
    batch = rank.full(1, 2, 16)
    same(net(batch), model(rank)(batch))


@case(
    "tensor/parallel/test_tp_style.py: test_sequence_parallel_style",
    "a norm of parts of a sequence needs no collective",
)
def sequence_parallel(rank: Rank) -> None:
    net = parallelize_module(nn.LayerNorm(16).to(rank.device), rank.mesh(), SequenceParallel())
    with CommDebugMode() as mode:
        out = net(rank.full(1, 2, 4, 16))
    assert isinstance(out, DTensor)
    assert out.shape == (2, 4 * rank.size, 16)
    assert mode.get_total_counts() == 0


@case(
    "pipelining/test_schedule.py: test_grad_with_manual",
    "a stage runs each micro-batch forward and backward once",
    "this rank's stage alone; gradients are not compared",
)
def pipeline(rank: Rank) -> None:
    layer = nn.Linear(16, 16).to(rank.device)
    given, out = rank.full(1, 2, 16).requires_grad_(rank.rank > 0), rank.full(1, 2, 16).requires_grad_()
    stage = PipelineStage(layer, rank.rank, rank.size, rank.device, input_args=given, output_args=out)
    last = rank.rank == rank.size - 1
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    losses: list[Any] = []
    batch = (rank.full(1, 8, 16),) if rank.rank == 0 else ()
    schedule.step(*batch, **({"target": rank.full(0, 8, 16), "losses": losses} if last else {}))
    assert len(calls) == 4
    assert len(losses) == (4 if last else 0)
    assert layer.weight.grad is not None


@case("fsdp/test_fully_shard_init.py: test_invalid_mesh_ndim", "a mesh with three axes is refused")
def wrong_mesh(rank: Rank) -> None:
    mesh = rank.mesh((rank.size // 2, 2, 1), ("a", "b", "c"))
    raises(lambda: fully_shard(model(rank), mesh=mesh), "1D", "2D", "mesh")
