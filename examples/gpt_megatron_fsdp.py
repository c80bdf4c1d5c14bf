"""Train a GPT with Megatron-FSDP (`pip install megatron-fsdp`) on synthetic tokens.

    torchrun --nproc-per-node 8 examples/gpt_megatron_fsdp.py
    torchrun --nproc-per-node 8 examples/gpt_megatron_fsdp.py --separate-groups

Parameters are gathered before each block, and their gradients are reduce-scattered after it. The calls of one group run
in order, so by default a gather waits for the reduce-scatter before it. With ``--separate-groups`` gathers have a group
of their own, with the same ranks, and both can run at once.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same."""
        batch_size, seq_len, hidden = x.shape
        heads = self.qkv(x).view(batch_size, seq_len, 3, self.num_heads, -1)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.projection(out.transpose(1, 2).reshape(batch_size, seq_len, hidden))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm with a residual connection."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = Attention(hidden, num_heads)
        self.ffn_norm = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


class Gpt(nn.Module):
    """A decoder."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.hidden)
        self.layers = nn.ModuleList(Block(args.hidden, args.heads) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.hidden)
        self.output = nn.Linear(args.hidden, args.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, seq_len, vocab] of tokens [batch, seq_len]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def build(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the model on the meta device and shard it; Megatron-FSDP gives it memory and weights, unit by unit."""
    with torch.device("meta"):
        model = Gpt(args).to(torch.bfloat16)
    mesh = init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    gather_group = None
    if args.separate_groups:
        gather_group = dist.new_group(list(range(dist.get_world_size())), group_desc="gather")
    return fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_group_ag=gather_group,
        fsdp_unit_modules=[Block, nn.Embedding],
        zero_dp_strategy=args.strategy,
        device=device,
        init_model_with_meta_device=True,
        mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16),
    )


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Build everything and run ``args.steps`` steps."""
    torch.manual_seed(args.seed)
    model, optimizer = build(args, device)
    generator = torch.Generator().manual_seed(args.seed + dist.get_rank())
    for step in range(1, args.steps + 1):
        tokens = torch.randint(args.vocab, (args.batch, args.seq_len + 1), generator=generator).to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--separate-groups", action="store_true", help="gather parameters on a group of their own")
    parser.add_argument("--strategy", default="optim_grads_params", help="optim, optim_grads or optim_grads_params")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4_096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=50_304)
    parser.add_argument("--seq-len", type=int, default=2_048)
    parser.add_argument("--batch", type=int, default=1, help="sequences of one rank in one step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Join the job, train, leave it."""
    args = parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
