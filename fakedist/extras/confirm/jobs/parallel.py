"""Jobs: DDP, FSDP2, FSDP2 with tensor and sequence parallelism; written as for torchrun."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from fakedist.extras.confirm.jobs.training import Transformer, random_tokens, reading, train

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _start() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")


def ddp() -> None:
    """Buckets, and gradients as views of them."""
    _start()
    with reading():  # DDP compares the ranks' parameters
        model = DistributedDataParallel(Transformer().cuda(), gradient_as_bucket_view=True, bucket_cap_mb=10)
    train(model, random_tokens(2, 1024))
    dist.destroy_process_group()


def fsdp2() -> None:
    """Every block sharded; bf16 parameters, fp32 gradients."""
    _start()
    torch.manual_seed(0)
    model = Transformer().cuda()
    for block in model.blocks:
        fully_shard(block, mp_policy=_BF16)
    fully_shard(model, mp_policy=_BF16)
    train(model, random_tokens(2, 1024), None)
    dist.destroy_process_group()


def fsdp2_tp() -> None:
    """Two shards of four tensor- and sequence-parallel ranks."""
    _start()
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("shard", "tp"))
    model: nn.Module = Transformer().cuda()
    plan = {
        "embedding": ColwiseParallel(output_layouts=Shard(1)),  # by rows, it would mask tokens by their values
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    blocks: Any = model.blocks
    for block in blocks:
        block_plan = {
            "norm_1": SequenceParallel(),
            "norm_2": SequenceParallel(),
            "qkv": ColwiseParallel(input_layouts=Shard(1)),
            "out": RowwiseParallel(output_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["tp"], block_plan)
        fully_shard(block, mesh=mesh["shard"], mp_policy=_BF16)
    fully_shard(model, mesh=mesh["shard"], mp_policy=_BF16)
    train(model, random_tokens(2, 1024), None)
    dist.destroy_process_group()
