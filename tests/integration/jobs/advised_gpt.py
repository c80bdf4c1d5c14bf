"""A small GPT in bfloat16, replicated or sharded, on which the tests of advice make the changes that it names."""

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
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

DIM, HEADS, LAYERS, SEQ_LEN, VOCAB = 512, 8, 6, 512, 16_384
PIECES = 8
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
        """[batch, SEQ_LEN, DIM] to the same."""
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
        """The loss of tokens [batch, SEQ_LEN]."""
        x = self.embedding(tokens)
        options: dict[str, Any] = {"use_reentrant": False}
        if self.change == "selective-checkpoint":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, KEPT)
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


def of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """The summed loss of some logits."""
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def main() -> None:
    """Train three steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--change", default="")
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    gpt = GPT(args.change).cuda().bfloat16()
    if args.change in ("shard-gradients", "shard-parameters"):
        for module in (*gpt.layers, gpt):
            fully_shard(module, reshard_after_forward=args.change == "shard-parameters")
        model: nn.Module = gpt
    else:
        model = nn.parallel.DistributedDataParallel(gpt)
    optimizer: torch.optim.Optimizer
    if args.change == "shard-optimizer":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    pieces = 2 if args.change == "micro-batch" else 1
    for _ in range(3):
        for _ in range(pieces):
            tokens = torch.randint(VOCAB, (8 // pieces, SEQ_LEN + 1), device="cuda")
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
