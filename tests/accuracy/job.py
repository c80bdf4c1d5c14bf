"""A job of several ranks, written as for torchrun, over gloo: ``python job.py NAME BACKEND``.

Gloo takes CUDA tensors and carries them through host memory, so it runs if several ranks share a GPU, and if the GPU is
virtual. Everything that is sent arrives: the ranks' tensors really meet.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))
from fakedist.extras.confirm.jobs.training import Transformer, language_loss

STEPS, BATCH, LENGTH, VOCAB, DIM = 3, 2, 256, 2_000, 256
_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(4, DIM, 8, VOCAB).cuda()


def _tokens(rank: int, batch: int = BATCH) -> Tensor:
    """Tokens [batch, length] of one data-parallel rank: every rank has its own."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(VOCAB, (batch, LENGTH), generator=generator).cuda()


def _train(model: nn.Module, tokens: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f}", flush=True)


def ddp() -> None:
    """Buckets of 4 MiB."""
    _train(DistributedDataParallel(_model(), bucket_cap_mb=4), _tokens(dist.get_rank()))


def ddp_bucket_view() -> None:
    """Gradients are views of the buckets; the third step accumulates without communication first."""
    model = DistributedDataParallel(_model(), gradient_as_bucket_view=True, bucket_cap_mb=4)
    tokens = _tokens(dist.get_rank())
    with model.no_sync():
        language_loss(model(tokens), tokens).backward()
    _train(model, tokens)


def fsdp2() -> None:
    """Every block sharded; bf16 parameters, fp32 gradients."""
    model = _model()
    for block in model.blocks:
        fully_shard(block, mp_policy=_BF16)
    fully_shard(model, mp_policy=_BF16)
    _train(model, _tokens(dist.get_rank()))


def tensor_sequence() -> None:
    """Tensor and sequence parallelism over all ranks."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model: nn.Module = _model()
    plan = {
        "embedding": ColwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        block_plan = {
            "norm_1": SequenceParallel(),
            "norm_2": SequenceParallel(),
            "qkv": ColwiseParallel(input_layouts=Shard(1)),
            "out": RowwiseParallel(output_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, block_plan)
    _train(model, _tokens(0))


class _Stage(nn.Module):
    """A stage of the transformer: embedding on the first, norm and output on the last."""

    def __init__(self, whole: Transformer, stage: int, num_stages: int) -> None:
        super().__init__()
        self.embedding = whole.embedding if stage == 0 else None
        self.blocks = whole.blocks[stage * 4 // num_stages : (stage + 1) * 4 // num_stages]
        self.head = nn.Sequential(whole.norm, whole.output) if stage == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, or what the stage before gave, to what the next one takes, or logits."""
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def pipeline_1f1b() -> None:
    """One stage a rank, eight microbatches, one forward and one backward in turn."""
    rank, num_stages, num_microbatches = dist.get_rank(), dist.get_world_size(), 8
    module = _Stage(_model(), rank, num_stages)
    tokens = _tokens(0, num_microbatches)
    device = tokens.device
    inside = torch.zeros(1, LENGTH, DIM, device=device, requires_grad=True)
    logits = torch.zeros(1, LENGTH, VOCAB, device=device, requires_grad=True)
    stage = PipelineStage(
        module, rank, num_stages, device,
        input_args=(tokens[:1] if rank == 0 else inside,), output_args=(logits if rank == num_stages - 1 else inside,),
    )  # fmt: skip
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=language_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    for _ in range(STEPS):
        inputs = (tokens,) if rank == 0 else ()
        schedule.step(*inputs, target=tokens if rank == num_stages - 1 else None)
        optimizer.step()
        optimizer.zero_grad()


class _Experts(nn.Module):
    """A mixture of experts, spread over the ranks: tokens go to their expert by all-to-all and come back.

    Args:
        capacity: Tokens that each rank sends to each expert; None for as many as the router chose.
    """

    def __init__(self, capacity: int | None) -> None:
        super().__init__()
        self.ranks, self.capacity = dist.get_world_size(), capacity
        self.router = nn.Linear(DIM, self.ranks)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, dim] to the same; one expert a token."""
        scores = self.router(x).softmax(-1)
        if self.capacity is not None:
            weights, chosen = scores.t().topk(self.capacity)
            order, sent = chosen.flatten(), [self.capacity] * self.ranks
            received = sent
        else:
            weights, expert = scores.max(-1)
            order = expert.argsort(stable=True)
            weights = weights[order]
            counts = F.one_hot(expert, self.ranks).sum(0)
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts)
            sent, received = counts.tolist(), arriving.tolist()
        rows = _AllToAll.apply(x.index_select(0, order), sent, received)
        rows = self.down(F.silu(self.up(rows)))
        rows = _AllToAll.apply(rows, received, sent) * weights.reshape(-1, 1)
        return torch.zeros_like(x).index_add(0, order, rows)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, sent: list[int], received: list[int]) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.splits = sent, received
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def,override]
        sent, received = ctx.splits
        return _AllToAll.apply(grad, received, sent), None, None


class _ExpertModel(nn.Module):
    def __init__(self, capacity: int | None) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(_Experts(capacity) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, length] to logits [batch, length, vocab]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x.flatten(0, 1)).view_as(x)
        return self.output(x)


def _experts(capacity: int | None) -> None:
    torch.manual_seed(dist.get_rank())
    _train(_ExpertModel(capacity).cuda(), _tokens(dist.get_rank()))


def experts_capacity() -> None:
    """Every rank sends equally many tokens to every expert."""
    _experts(BATCH * LENGTH // dist.get_world_size())


def experts_dropless() -> None:
    """As many as the router chose: each rank gets what the others' routers send, which no faked rank can know."""
    _experts(None)


JOBS = (ddp, ddp_bucket_view, fsdp2, tensor_sequence, pipeline_1f1b, experts_capacity, experts_dropless)


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(sys.argv[2])
    next(job for job in JOBS if job.__name__ == sys.argv[1])()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
