"""Sharded and split models, by the name of the feature: python pytorch_sharded.py FEATURE."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

WIDTH, HEADS, WORDS, TOKENS = 64, 4, 256, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in self.qkv)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(model: nn.Module, foreach: bool | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    for _ in range(3):
        tokens = torch.randint(WORDS, (2, TOKENS), device="cuda")
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def mesh(**axes: int) -> DeviceMesh:
    return init_device_mesh("cuda", tuple(axes.values()), mesh_dim_names=tuple(axes))


def fsdp1() -> None:
    """FullyShardedDataParallel, its own clipping, a state dict of all ranks."""
    model = FullyShardedDataParallel(
        Model().cuda(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, sync_module_states=True
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        tokens = torch.randint(WORDS, (2, TOKENS), device="cuda")
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not optimizer.state_dict():
            FullyShardedDataParallel.optim_state_dict(model, optimizer)


def hsdp1() -> None:
    """Sharded inside of a node, replicated over nodes."""
    ranks = mesh(replicate=dist.get_world_size() // 4, shard=4)
    model = FullyShardedDataParallel(
        Model().cuda(),
        device_mesh=ranks,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
    )
    train(model)


def _shard(model: nn.Module, ranks: DeviceMesh, **options: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=ranks, **options)
    return fully_shard(model, mesh=ranks, **options)


def fsdp2() -> None:
    """fully_shard in mixed precision."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train(_shard(Model().cuda(), mesh(shard=dist.get_world_size()), mp_policy=precision))


def fsdp2_offload() -> None:
    """fully_shard with parameters and states on the host."""
    model = _shard(Model(), mesh(shard=dist.get_world_size()), offload_policy=CPUOffloadPolicy())
    train(model)


def fsdp2_meta() -> None:
    """fully_shard of a model without memory, filled from rank 0's full state dict."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    full = Model().state_dict() if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = Model()
    _shard(model, mesh(shard=dist.get_world_size()))
    model.to_empty(device="cuda")
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    train(model)


def hsdp() -> None:
    """fully_shard on a mesh of two axes."""
    train(_shard(Model().cuda(), mesh(replicate=dist.get_world_size() // 4, shard=4)))


def _plan(sequence: bool) -> dict[str, object]:
    if not sequence:
        return {f"qkv.{one}": ColwiseParallel() for one in range(3)} | {
            "out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
    return {
        "norm": SequenceParallel(),
        **{f"qkv.{one}": ColwiseParallel(input_layouts=Shard(1)) for one in range(3)},
        "out": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }


def _split(ranks: DeviceMesh, sequence: bool) -> nn.Module:
    model = Model().cuda()
    rows = Shard(1) if sequence else Replicate()
    parallelize_module(
        model,
        ranks,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
            **({"norm": SequenceParallel()} if sequence else {}),
            "head": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.blocks:
        parallelize_module(block, ranks, _plan(sequence))
    return model


def _train_split(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(3):
        tokens = torch.randint(WORDS, (2, TOKENS), device="cuda")
        with loss_parallel():
            logits = model(tokens)
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def tensor_parallel() -> None:
    """Columns and rows, the loss in parallel."""
    _train_split(_split(mesh(dp=dist.get_world_size() // 4, tp=4)["tp"], sequence=False))


def sequence_parallel() -> None:
    """Norms in parallel, too."""
    _train_split(_split(mesh(dp=dist.get_world_size() // 4, tp=4)["tp"], sequence=True))


def tensor_and_sharded() -> None:
    """Both axes of a mesh."""
    ranks = mesh(dp=dist.get_world_size() // 4, tp=4)
    _train_split(_shard(_split(ranks["tp"], sequence=True), ranks["dp"]))


def context_parallel() -> None:
    """The sequence over ranks: ring attention."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ranks = mesh(cp=dist.get_world_size())
    model = Model().cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        tokens = torch.randint(WORDS, (2, 16 * dist.get_world_size()), device="cuda")
        targets = tokens.clone()
        buffers = [tokens, targets]
        with (
            sdpa_kernel([SDPBackend.FLASH_ATTENTION]),
            context_parallel(ranks, buffers=buffers, buffer_seq_dims=[1, 1], no_restore_buffers=set(buffers)),
        ):
            logits = model(tokens)
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def distributed_tensors() -> None:
    """DTensor by itself: distribute, redistribute, compute, gather."""
    ranks = mesh(a=dist.get_world_size() // 4, b=4)
    whole = torch.randn(64, 64, device="cuda")
    tensor = distribute_tensor(whole, ranks, [Shard(0), Shard(1)])
    weight = nn.Parameter(distribute_tensor(torch.randn(64, 64, device="cuda"), ranks, [Replicate(), Shard(0)]))
    optimizer = torch.optim.AdamW([weight], foreach=False)
    for _ in range(3):
        out = tensor.redistribute(ranks, [Shard(0), Replicate()]) @ weight.t()
        assert isinstance(out, DTensor)
        out.full_tensor().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


FEATURES: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        fsdp1,
        hsdp1,
        fsdp2,
        fsdp2_offload,
        fsdp2_meta,
        hsdp,
        tensor_parallel,
        sequence_parallel,
        tensor_and_sharded,
        context_parallel,
        distributed_tensors,
    )
}


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # The norm of gradients on the host is all-reduced there.
    dist.init_process_group("cpu:gloo,cuda:nccl" if sys.argv[1] == "fsdp2_offload" else "nccl")
    torch.manual_seed(0)
    FEATURES[sys.argv[1]]()
    dist.destroy_process_group()
    print(sys.argv[1], "done")


main()
