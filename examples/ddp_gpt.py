"""Train a GPT-2 with DistributedDataParallel, bfloat16 autocast, gradient accumulation and clipping.

    torchrun --nproc-per-node 8 examples/ddp_gpt.py --model gpt2-xl
    torchrun --nproc-per-node 2 examples/ddp_gpt.py --model debug      # on CPUs, without a GPU

Tokens are synthetic.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a GPT-2."""

    num_layers: int
    num_heads: int
    dim: int
    vocab_size: int = 50_257
    context_len: int = 1_024


MODELS = {
    "debug": ModelConfig(num_layers=2, num_heads=4, dim=64, vocab_size=512, context_len=64),
    "gpt2": ModelConfig(num_layers=12, num_heads=12, dim=768),
    "gpt2-xl": ModelConfig(num_layers=48, num_heads=25, dim=1_600),
}


class CausalSelfAttention(nn.Module):
    """Multi-head attention with one fused projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.c_attn = nn.Linear(config.dim, 3 * config.dim)
        self.c_proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        batch_size, length, dim = x.shape
        heads = self.c_attn(x).view(batch_size, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        return self.c_proj(out.transpose(1, 2).reshape(batch_size, length, dim))


class Block(nn.Module):
    """Attention and a feed-forward of four times the width, each behind a LayerNorm with a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.dim)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.dim)
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, 4 * config.dim), nn.GELU(approximate="tanh"), nn.Linear(4 * config.dim, config.dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT-2 whose output layer shares the embedding's weight."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.dim)
        self.wpe = nn.Embedding(config.context_len, config.dim)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of targets [batch, length] after tokens [batch, length]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batches: list[Tensor], max_norm: float
) -> tuple[Tensor, Tensor]:
    """Accumulate gradients over `batches`, reduce them with the last one, clip, update; gives mean loss and norm."""
    device_type = batches[0].device.type
    total = torch.zeros((), device=batches[0].device)
    for index, tokens in enumerate(batches):
        is_last = index == len(batches) - 1
        with nullcontext() if is_last else model.no_sync():
            with torch.autocast(device_type, dtype=torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:]) / len(batches)
            loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Build everything and run `args.steps` steps."""
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    config = MODELS[args.model]
    with device:  # 6 GB of weights, made where they are needed
        model = GPT(config)
    model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(args.seed + rank)
    shape = (args.batch_size, config.context_len + 1)
    for step in range(1, args.steps + 1):
        batches = [
            torch.randint(config.vocab_size, shape, generator=generator).to(device) for _ in range(args.accumulate)
        ]
        loss, norm = train_step(model, optimizer, batches, args.max_norm)
        dist.all_reduce(loss)
        loss_value = loss.item() / dist.get_world_size()
        if not torch.isfinite(norm):
            raise RuntimeError(f"step {step}: the gradients' norm is {norm.item()}")
        if rank == 0:
            print(f"step {step}  loss {loss_value:.4f}  grad norm {norm.item():.4f}", flush=True)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt2-xl")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in one forward pass")
    parser.add_argument("--accumulate", type=int, default=4, help="forward passes for one optimizer step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Join the job, train, leave it."""
    args = parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        train(args, device)
        dist.barrier()  # gloo's threads may still hold tensors of the last collective; let them finish
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
