"""A small GPT in bfloat16, replicated, sharded, tensor-parallel or in stages, which tests of advice change."""

from __future__ import annotations

import argparse
import functools
import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

DIM, HEADS, LAYERS, VOCAB = 512, 8, 6, 16_384
PIECES = 8
SCHEDULES = {"all-forwards-first": ScheduleGPipe, "one-forward-one-backward": Schedule1F1B}
_SHARDED = ("shard-gradients", "shard-parameters")
_TENSOR_PARALLEL = ("gathered-logits", "loss-parallel")
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
KEPT = [
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
]


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, DIM] to the same."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, DIM // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        y: Tensor = x + self.down(F.gelu(self.up(self.ffn_norm(x))))
        return y


class GPT(nn.Module):
    """Blocks between an embedding and a head, with one change to how they save activations."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.change = change

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of tokens [batch, length]."""
        x = self.embedding(tokens)
        options: dict[str, Any] = {"use_reentrant": False}
        if self.change == "selective-checkpoint":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, KEPT)
        elif self.change.endswith("products kept"):
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
        offloads = self.change == "offload"
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if offloads else nullcontext():
            for layer in self.layers:
                x = checkpoint(layer, x, **options) if "checkpoint" in self.change else layer(x)
        return self.loss(x.flatten(0, 1), targets.flatten())

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of hidden states [tokens, DIM], in chunks with the output layer or without it."""
        if self.change == "fuse-loss":
            pieces = zip(x.chunk(PIECES), targets.chunk(PIECES), strict=True)
            loss = sum(checkpoint(self.of_piece, *piece, use_reentrant=False) for piece in pieces)
        elif self.change == "fuse-loss alone":
            pieces = zip(self.head(x).chunk(PIECES), targets.chunk(PIECES), strict=True)
            loss = sum(checkpoint(of_logits, *piece, use_reentrant=False) for piece in pieces)
        else:
            loss = self.of_piece(x, targets)
        assert isinstance(loss, Tensor)
        return loss / targets.numel()

    def of_piece(self, x: Tensor, targets: Tensor) -> Tensor:
        """The summed loss of some tokens."""
        return of_logits(self.head(x), targets)


class Stage(nn.Module):
    """Every stage has as many layers; the first has the embedding, too, and the last the output layer."""

    def __init__(self, number: int, num_stages: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM) if number == 0 else None
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB, bias=False) if number == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, or [batch, length, DIM] from the stage before, to the same for the next one, or logits."""
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def train_in_stages(schedule: str, batch: int, length: int) -> None:
    """Three steps of PIECES micro-batches; each rank is a stage."""
    rank, size = dist.get_rank(), dist.get_world_size()
    is_first, is_last = rank == 0, rank == size - 1
    stage = Stage(rank, size).cuda().bfloat16()
    rows = torch.empty(batch // PIECES, length, dtype=torch.int64, device="cuda")
    hidden, logits = (
        torch.empty(*rows.shape, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for width in (DIM, VOCAB)
    )
    optimizer = torch.optim.AdamW(stage.parameters(), fused=True)
    piped = SCHEDULES[schedule](
        PipelineStage(
            stage,
            rank,
            size,
            torch.device("cuda", torch.cuda.current_device()),
            input_args=(rows if is_first else hidden,),
            output_args=(logits if is_last else hidden,),
        ),
        PIECES,
        loss_fn=lambda logits, targets: of_logits(logits.flatten(0, 1), targets.flatten()) / targets.numel(),
    )
    for _ in range(3):
        tokens = torch.randint(VOCAB, (batch, length + 1), device="cuda")
        piped.step(*[tokens[:, :-1]] * is_first, target=tokens[:, 1:] if is_last else None)
        optimizer.step()
        optimizer.zero_grad()


def of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """The summed loss of some logits."""
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def on_ranks(gpt: GPT, change: str) -> nn.Module:
    """The model as the ranks have it: sharded, tensor-parallel or replicated."""
    if change in _SHARDED:
        for module in (*gpt.layers, gpt):
            fully_shard(module, reshard_after_forward=change == "shard-parameters")
        return gpt
    if change in _TENSOR_PARALLEL:
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        is_whole = change == "gathered-logits"
        head = ColwiseParallel(output_layouts=Replicate() if is_whole else Shard(-1), use_local_output=is_whole)
        halves = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        return parallelize_module(gpt, mesh, {**halves, "head": head})
    replicated = nn.parallel.DistributedDataParallel(gpt)
    if not change.startswith("compiled"):
        return replicated
    compiled: nn.Module = torch.compile(replicated)
    return compiled


def main() -> None:
    """Train three steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--change", default="")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if args.change in SCHEDULES:
        train_in_stages(args.change, args.batch, args.seq_len)
        return
    gpt = GPT(args.change).cuda().bfloat16()
    model = on_ranks(gpt, args.change)
    optimizer: torch.optim.Optimizer
    if args.change == "shard-optimizer":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    else:
        is_split = args.change in _TENSOR_PARALLEL  # the others take no tensors and DTensors in one list
        is_fused = None if is_split or args.change == "unfused" else True
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False if is_split else None, fused=is_fused)
    pieces = 2 if args.change == "micro-batch" else 1
    for step in range(1, 4):
        length = args.seq_len * step // 3 if args.change == "growing" else args.seq_len
        for _ in range(pieces):
            tokens = torch.randint(VOCAB, (args.batch // pieces, length + 1), device="cuda")
            with loss_parallel() if args.change == "loss-parallel" else nullcontext():
                model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=args.change != "kept-gradients")


if __name__ == "__main__":
    main()
