"""Train a GPT with tensor, pipeline and data parallelism, on nothing but torch.distributed.

    torchrun --nproc-per-node 8 examples/three_d.py --tp 2 --pp 2 --dp 2
    torchrun --nproc-per-node 8 examples/three_d.py --tp 2 --pp 2 --dp 2 --hidden 64 --heads 4 --layers 4   # on CPUs

Three kinds of groups, tensor parallel ranks next to each other:

* TP: each rank holds a part of every matrix; an all_reduce after each row-parallel one, and one in backward before each
  column-parallel one.
* PP: each rank holds some of the layers; activations are sent to the next stage, their gradients back (GPipe: all
  micro-batches forward, then all backward).
* DP: each replica reads its own part of the batch; gradients are averaged after the last backward.

Every layout starts from the same weights and reads the same batches, so all print the same losses.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """This rank's place on the three axes and its group on each.

    Attributes:
        tp, pp, dp: Its place on each axis.
        num_tp, num_pp, num_dp: Ranks on each axis.
        groups: Its process groups by axis, "TP", "PP" and "DP".
    """

    tp: int
    pp: int
    dp: int
    num_tp: int
    num_pp: int
    num_dp: int
    groups: dict[str, Any]

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embeddings."""
        return self.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp == self.num_pp - 1


def build_layout(num_tp: int, num_pp: int, num_dp: int) -> Layout:
    """Make every group of the job; each rank has to take part in the making of all of them."""
    if num_tp * num_pp * num_dp != dist.get_world_size():
        raise SystemExit(f"--tp {num_tp} x --pp {num_pp} x --dp {num_dp} are not {dist.get_world_size()} ranks")
    grid = torch.arange(dist.get_world_size()).view(num_dp, num_pp, num_tp)
    dp, pp, tp = (int(place) for place in (grid == dist.get_rank()).nonzero()[0])
    groups = {}
    for axis, rows in (
        ("TP", grid.flatten(0, 1)),
        ("PP", grid.transpose(1, 2).flatten(0, 1)),
        ("DP", grid.flatten(1).t()),
    ):
        for ranks in rows.tolist():
            group = dist.new_group(ranks, group_desc=axis)
            if dist.get_rank() in ranks:
                groups[axis] = group
    return Layout(tp, pp, dp, num_tp, num_pp, num_dp, groups)


class CopyToParallel(torch.autograd.Function):
    """A value that every tensor parallel rank reads: the same forward; the sum of all ranks' gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """As it is."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """all_reduce."""
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class ReduceFromParallel(torch.autograd.Function):
    """A value of which every tensor parallel rank has a part: the sum forward; the same gradient for all backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """all_reduce."""
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """As it is."""
        return gradient, None


class ColumnParallelLinear(nn.Module):
    """This rank's rows of the weight: the whole input to this rank's part of the output.

    Args:
        num_in: Features of the input.
        num_out: Features of the output of all ranks together.
        layout: Where this rank is.
        num_blocks: Matrices that lie one below the other in the weight (3 for queries, keys and values).
    """

    def __init__(self, num_in: int, num_out: int, layout: Layout, num_blocks: int = 1) -> None:
        super().__init__()
        whole = nn.init.normal_(torch.empty(num_blocks, num_out // num_blocks, num_in), std=0.02)
        part = whole.chunk(layout.num_tp, dim=1)[layout.tp]
        self.weight = nn.Parameter(part.flatten(0, 1).clone())
        self.group = layout.groups["TP"]

    def forward(self, x: Tensor) -> Tensor:
        """[..., num_in] to [..., num_out / tp]."""
        return F.linear(CopyToParallel.apply(x, self.group), self.weight)


class RowParallelLinear(nn.Module):
    """This rank's columns of the weight: this rank's part of the input to the whole output."""

    def __init__(self, num_in: int, num_out: int, layout: Layout) -> None:
        super().__init__()
        whole = nn.init.normal_(torch.empty(num_out, num_in), std=0.02)
        self.weight = nn.Parameter(whole.chunk(layout.num_tp, dim=1)[layout.tp].clone())
        self.group = layout.groups["TP"]

    def forward(self, x: Tensor) -> Tensor:
        """[..., num_in / tp] to [..., num_out]."""
        return ReduceFromParallel.apply(F.linear(x, self.weight), self.group)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm with a residual connection; each rank has its own heads."""

    def __init__(self, args: argparse.Namespace, layout: Layout) -> None:
        super().__init__()
        self.head_dim = args.hidden // args.heads
        self.attention_norm = nn.LayerNorm(args.hidden)
        self.qkv = ColumnParallelLinear(args.hidden, 3 * args.hidden, layout, num_blocks=3)
        self.projection = RowParallelLinear(args.hidden, args.hidden, layout)
        self.ffn_norm = nn.LayerNorm(args.hidden)
        self.up = ColumnParallelLinear(args.hidden, 4 * args.hidden, layout)
        self.down = RowParallelLinear(4 * args.hidden, args.hidden, layout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same."""
        batch_size, seq_len, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch_size, seq_len, 3, -1, self.head_dim)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.projection(out.transpose(1, 2).reshape(batch_size, seq_len, -1))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


class Stage(nn.Module):
    """This rank's layers: a part of the blocks, the embeddings before the first, norm and output after the last."""

    def __init__(self, args: argparse.Namespace, layout: Layout) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for index in range(-1, args.layers + 1):
            torch.manual_seed(args.seed + 1 + index)  # a layer starts alike wherever it is
            if index == -1 and layout.is_first_stage:
                self.embedding = nn.Embedding(args.vocab, args.hidden)
                self.positions = nn.Embedding(args.seq_len, args.hidden)
            elif index == args.layers and layout.is_last_stage:
                self.norm = nn.LayerNorm(args.hidden)
                self.output = nn.Linear(args.hidden, args.vocab, bias=False)
            elif 0 <= index < args.layers and index * layout.num_pp // args.layers == layout.pp:
                self.layers[str(index)] = Block(args, layout)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or the last stage's activations to activations or logits."""
        if hasattr(self, "embedding"):
            x = self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x)) if hasattr(self, "output") else x


def receive(like: Tensor, layout: Layout, step: int) -> Tensor:
    """A tensor of the shape of ``like`` from the stage ``step`` away."""
    received = torch.empty_like(like)
    dist.recv(received, group_src=layout.pp + step, group=layout.groups["PP"])
    return received


def send(tensor: Tensor, layout: Layout, step: int) -> None:
    """Give a tensor to the stage ``step`` away."""
    dist.send(tensor.contiguous(), group_dst=layout.pp + step, group=layout.groups["PP"])


def run_pipeline(stage: Stage, batches: list[Tensor], args: argparse.Namespace, layout: Layout) -> Tensor:
    """All micro-batches forward, then all backward; gives the mean loss on the last stage, zero on the others."""
    device = batches[0].device
    activation = torch.empty(len(batches[0]), args.seq_len, args.hidden, device=device, dtype=DTYPES[args.dtype])
    in_flight = []
    total = torch.zeros((), device=device)
    for tokens in batches:
        inputs = tokens[:, :-1]
        if not layout.is_first_stage:
            inputs = receive(activation, layout, -1).requires_grad_()
        outputs = stage(inputs)
        if layout.is_last_stage:
            outputs = F.cross_entropy(outputs.flatten(0, 1).float(), tokens[:, 1:].flatten()) / len(batches)
            total += outputs.detach()
        else:
            send(outputs.detach(), layout, +1)
        in_flight.append((inputs, outputs))
    for inputs, outputs in in_flight:
        outputs.backward(None if layout.is_last_stage else receive(activation, layout, +1))
        if not layout.is_first_stage:
            send(inputs.grad, layout, -1)
    return total


def average_gradients(stage: Stage, layout: Layout) -> None:
    """Make the gradients of all replicas one."""
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad, group=layout.groups["DP"])
        parameter.grad /= layout.num_dp


def read_batches(args: argparse.Namespace, layout: Layout, step: int, device: torch.device) -> list[Tensor]:
    """This replica's micro-batches, [micro_batch, seq_len + 1] each, of a batch that is the same in every layout."""
    generator = torch.Generator().manual_seed(args.seed + step)
    tokens = torch.randint(args.vocab, (args.batch, args.seq_len + 1), generator=generator)
    return list(tokens.chunk(layout.num_dp)[layout.dp].to(device).split(args.micro_batch))


def train(args: argparse.Namespace, layout: Layout, device: torch.device) -> None:
    """Build this rank's stage and run ``args.steps`` steps."""
    with device:
        stage = Stage(args, layout).to(DTYPES[args.dtype])
    optimizer = torch.optim.AdamW(stage.parameters(), lr=args.lr)
    for step in range(1, args.steps + 1):
        loss = run_pipeline(stage, read_batches(args, layout, step, device), args, layout)
        average_gradients(stage, layout)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss, group=layout.groups["DP"])
        if layout.is_last_stage and layout.tp == layout.dp == 0:
            print(f"step {step}  loss {loss.item() / layout.num_dp:.6f}", flush=True)


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share every matrix")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--dp", type=int, default=1, help="replicas")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4_096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=50_304)
    parser.add_argument("--seq-len", type=int, default=2_048)
    parser.add_argument("--batch", type=int, default=16, help="sequences in one step, of all replicas")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences in one forward pass")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.heads % args.tp or args.hidden % args.heads or args.layers < args.pp:
        parser.error("--tp must divide --heads, --heads must divide --hidden, and each stage needs a layer")
    if args.batch % (args.dp * args.micro_batch):
        parser.error("--dp x --micro-batch must divide --batch")
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
    try:
        train(args, build_layout(args.tp, args.pp, args.dp), device)
        dist.barrier()  # gloo's threads may still hold tensors of the last collective; let them finish
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
