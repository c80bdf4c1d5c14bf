"""Keep training when GPUs fail: replicas of different tensor parallel degree (nonuniform tensor parallelism).

    torchrun --nproc-per-node 8 examples/nonuniform_tp.py --tp 4 --dp 2 --reduced-tp 2
    torchrun --nproc-per-node 8 examples/nonuniform_tp.py --tp 4 --dp 2 --reduced-tp 2 --hidden 64 --heads 8 --layers 2

Each replica owns ``--tp`` ranks. In the last ``--num-reduced`` replicas, some of them failed: the model runs on
``--reduced-tp`` ranks, each with a larger part of every matrix, and the spare ranks leave the job during setup.

Replicas of different degree split a matrix at different places. So a healthy replica first moves its gradients to the
split of the reduced ones (its first ``--reduced-tp`` ranks then hold the whole matrix). Gradients are averaged over the
replicas, and the result moves back. Every layout starts from the same weights and reads the same batches, so all
print the same losses.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """This rank's replica and its part of it.

    Attributes:
        replica: Which replica it belongs to.
        num_replicas: How many there are.
        place: Which part of every matrix it holds.
        degree: Parts of this replica: its tensor parallel ranks.
        least_degree: Parts of the smallest replica.
        tp_group: The ranks of this replica.
        dp_group: Those that hold the same part after resharding, one in each replica; None where it holds none then.
    """

    replica: int
    num_replicas: int
    place: int
    degree: int
    least_degree: int
    tp_group: Any
    dp_group: Any


def build_layout(args: argparse.Namespace) -> Layout:
    """Make the groups. Each rank takes part in the making of all of them, also one that leaves then."""
    if args.tp * args.dp != dist.get_world_size():
        raise SystemExit(f"--tp {args.tp} x --dp {args.dp} are not {dist.get_world_size()} ranks")
    replica, place = divmod(dist.get_rank(), args.tp)
    degrees = [args.tp] * (args.dp - args.num_reduced) + [args.reduced_tp] * args.num_reduced
    tp_groups = [
        dist.new_group([each * args.tp + part for part in range(degree)], group_desc="TP")
        for each, degree in enumerate(degrees)
    ]
    least = min(degrees)
    dp_groups = [
        dist.new_group([each * args.tp + part for each in range(args.dp)], group_desc="DP") for part in range(least)
    ]
    if place >= degrees[replica]:
        print(f"rank {dist.get_rank()} is not needed: its replica runs on {degrees[replica]} ranks", flush=True)
        sys.exit(0)
    dp_group = dp_groups[place] if place < least else None
    return Layout(replica, args.dp, place, degrees[replica], least, tp_groups[replica], dp_group)


def bounds(size: int, num_parts: int) -> list[int]:
    """Where ``size`` rows are cut into ``num_parts`` parts: num_parts + 1 places."""
    return [size * part // num_parts for part in range(num_parts + 1)]


def overlaps(start: int, end: int, cuts: list[int], num_ranks: int) -> list[int]:
    """How many of the rows start ... end lie in each part; none for ranks that have no part."""
    sizes = [max(0, min(end, cuts[part + 1]) - max(start, cuts[part])) for part in range(len(cuts) - 1)]
    return sizes + [0] * (num_ranks - len(sizes))


def reshard(rows: Tensor, size: int, degrees: tuple[int, int], layout: Layout) -> Tensor:
    """Move rows inside a replica from one cut to another.

    Args:
        rows: This rank's part of the rows, [rows, ...].
        size: Rows of all ranks together.
        degrees: Number of parts before and after.
        layout: Where this rank is.
    """
    before, after = (bounds(size, degree) for degree in degrees)
    spans = [
        (cuts[layout.place], cuts[layout.place + 1]) if layout.place < len(cuts) - 1 else (0, 0)
        for cuts in (before, after)
    ]
    to_ranks = overlaps(*spans[0], after, layout.degree)
    from_ranks = overlaps(*spans[1], before, layout.degree)
    moved = rows.new_empty(spans[1][1] - spans[1][0], *rows.shape[1:])
    dist.all_to_all_single(moved, rows.contiguous(), from_ranks, to_ranks, group=layout.tp_group)
    return moved


class AllReduce(torch.autograd.Function):
    """Sum over the replica's ranks in forward, in backward, or in both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, is_forward: bool) -> Tensor:
        """The sum if ``is_forward``, else as it is."""
        ctx.group = None if is_forward else group
        x = x.clone()
        if is_forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The other way round."""
        gradient = gradient.contiguous()
        if ctx.group is not None:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


class ParallelMlp(nn.Module):
    """Two matrices, cut along the features between them.

    A part is a number of whole units (heads in attention), so that any degree up to their number will do.
    """

    def __init__(self, hidden: int, num_units: int, unit: int, layout: Layout) -> None:
        super().__init__()
        first, last = bounds(num_units, layout.degree)[layout.place : layout.place + 2]
        # All ranks draw the whole and keep their part: every layout starts from the same weights.
        up, down = (nn.init.normal_(torch.empty(num_units, unit, hidden), std=0.02) for _ in range(2))
        self.up = nn.Parameter(up[first:last].clone())
        self.down = nn.Parameter(down[first:last].clone())
        self.num_units = num_units
        self.group = layout.tp_group

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same."""
        x = AllReduce.apply(x, self.group, False)
        inner = F.gelu(F.linear(x, self.up.flatten(0, 1)))
        return AllReduce.apply(F.linear(inner, self.down.flatten(0, 1).t()), self.group, True)


class ParallelAttention(nn.Module):
    """Causal attention, each rank with heads of its own."""

    def __init__(self, hidden: int, num_heads: int, layout: Layout) -> None:
        super().__init__()
        first, last = bounds(num_heads, layout.degree)[layout.place : layout.place + 2]
        head_dim = hidden // num_heads
        qkv = nn.init.normal_(torch.empty(num_heads, 3 * head_dim, hidden), std=0.02)
        out = nn.init.normal_(torch.empty(num_heads, head_dim, hidden), std=0.02)
        self.qkv = nn.Parameter(qkv[first:last].clone())
        self.out = nn.Parameter(out[first:last].clone())
        self.num_units = num_heads
        self.group = layout.tp_group

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same."""
        x = AllReduce.apply(x, self.group, False)
        heads = torch.einsum("bsh,ndh->bnsd", x, self.qkv)
        out = F.scaled_dot_product_attention(*heads.chunk(3, dim=-1), is_causal=True)
        return AllReduce.apply(torch.einsum("bnsd,ndh->bsh", out, self.out), self.group, True)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm with a residual connection."""

    def __init__(self, args: argparse.Namespace, layout: Layout) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.hidden)
        self.attention = ParallelAttention(args.hidden, args.heads, layout)
        self.mlp_norm = nn.LayerNorm(args.hidden)
        self.mlp = ParallelMlp(args.hidden, args.heads, 4 * args.hidden // args.heads, layout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    """A decoder; embedding, norms and output are whole on every rank."""

    def __init__(self, args: argparse.Namespace, layout: Layout) -> None:
        super().__init__()
        torch.manual_seed(args.seed)
        self.embedding = nn.Embedding(args.vocab, args.hidden)
        self.layers = nn.ModuleList(Block(args, layout) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.hidden)
        self.output = nn.Linear(args.hidden, args.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def average_gradients(model: nn.Module, layout: Layout) -> None:
    """Average over the replicas, at the cut of the smallest one."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, ParallelMlp | ParallelAttention):
                parameter.grad = average_parts(parameter.grad, module.num_units, layout)
            else:
                average_whole(parameter.grad, layout)


def average_parts(gradient: Tensor, num_units: int, layout: Layout) -> Tensor:
    """The average of a matrix of which this rank holds a part."""
    is_cut_alike = layout.degree == layout.least_degree
    there, back = (layout.degree, layout.least_degree), (layout.least_degree, layout.degree)
    part = gradient if is_cut_alike else reshard(gradient, num_units, there, layout)
    if layout.dp_group is not None:
        dist.all_reduce(part, group=layout.dp_group)
        part /= layout.num_replicas
    return part if is_cut_alike else reshard(part, num_units, back, layout)


def average_whole(gradient: Tensor, layout: Layout) -> None:
    """The average of what every rank holds whole: from the ranks that have a peer in each replica to the others."""
    if layout.dp_group is not None:
        dist.all_reduce(gradient, group=layout.dp_group)
        gradient /= layout.num_replicas
    if layout.degree > layout.least_degree:
        dist.broadcast(gradient, group_src=0, group=layout.tp_group)


def train(args: argparse.Namespace, layout: Layout, device: torch.device) -> None:
    """Build this rank's part and run ``args.steps`` steps."""
    with device:
        model = Gpt(args, layout).to(DTYPES[args.dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step in range(1, args.steps + 1):
        generator = torch.Generator().manual_seed(args.seed + step)
        tokens = torch.randint(args.vocab, (args.batch, args.seq_len + 1), generator=generator)
        tokens = tokens.chunk(layout.num_replicas)[layout.replica].to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        average_gradients(model, layout)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if layout.dp_group is not None:
            dist.all_reduce(mean, group=layout.dp_group)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {mean.item() / layout.num_replicas:.6f}", flush=True)


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=4, help="ranks that a replica owns, and a healthy one uses")
    parser.add_argument("--dp", type=int, default=2, help="replicas")
    parser.add_argument("--reduced-tp", type=int, default=2, help="ranks that a replica with failed GPUs uses")
    parser.add_argument("--num-reduced", type=int, default=1, help="replicas with failed GPUs: the last ones")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4_096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=50_304)
    parser.add_argument("--seq-len", type=int, default=2_048)
    parser.add_argument("--batch", type=int, default=4, help="sequences in one step, of all replicas")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not 1 <= args.reduced_tp <= args.tp <= args.heads or not 0 <= args.num_reduced <= args.dp:
        parser.error("needed: 1 <= --reduced-tp <= --tp <= --heads and 0 <= --num-reduced <= --dp")
    if args.batch % args.dp or args.hidden % args.heads:
        parser.error("--dp must divide --batch, and --heads --hidden")
    return args


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
    layout = build_layout(args)
    try:
        train(args, layout, device)
        dist.barrier(layout.tp_group)  # gloo's threads may still hold tensors of the last collective; let them finish
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
