"""A training job of the shape of the nanoGPT speedruns: compiled, with Muon, FlexAttention and an fp8 head.

speedrun.py [--steps N] [--layers N] [--width N] [--tokens N]    started once per rank, as by torchrun

Muon shares out each matrix's orthogonalization over the ranks, with an asynchronous reduce_scatter before and an
asynchronous all_gather behind it. What is not a matrix inside of a block is AdamW's.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK, VOCABULARY, END = 128, 50304, 50256


@torch.library.custom_op("speedrun::mm", mutates_args=())
def mm_op(x: Tensor, w: Tensor, x_s: float, w_s: float, grad_s: float) -> tuple[Tensor, Tensor, Tensor]:
    x8, w8 = x.div(x_s).to(torch.float8_e4m3fn), w.div(w_s).to(torch.float8_e4m3fn)
    scales = (x.new_tensor(scale, dtype=torch.float32) for scale in (x_s, w_s))
    out = torch._scaled_mm(x8, w8.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    return out, x8, w8


@mm_op.register_fake
def _(x: Tensor, w: Tensor, *_: float) -> tuple[Tensor, Tensor, Tensor]:
    return x @ w.T, x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)


@torch.library.custom_op("speedrun::mm_backward", mutates_args=())
def mm_backward_op(g: Tensor, x8: Tensor, w8: Tensor, x_s: float, w_s: float, grad_s: float) -> tuple[Tensor, Tensor]:
    x_inv, w_inv, g_inv = (g.new_tensor(scale, dtype=torch.float32) for scale in (x_s, w_s, grad_s))
    g8 = g.div(grad_s).to(torch.float8_e5m2)
    grad_x = torch._scaled_mm(g8, w8.T.contiguous().T, g_inv, w_inv, out_dtype=torch.bfloat16)
    grad_w = torch._scaled_mm(x8.T.contiguous(), g8.T.contiguous().T, x_inv, g_inv, out_dtype=torch.float32).T
    return grad_x, grad_w


@mm_backward_op.register_fake
def _(g: Tensor, x8: Tensor, w8: Tensor, *_: float) -> tuple[Tensor, Tensor]:
    return x8.to(torch.bfloat16), w8.T.contiguous().T.to(torch.float32)


def _backward(ctx, grad_out: Tensor, *_: None):
    return (*torch.ops.speedrun.mm_backward(grad_out, *ctx.saved_tensors, *ctx.scales), None, None, None)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.scales = inputs[2:]
    ctx.set_materialize_grads(False)


mm_op.register_autograd(_backward, setup_context=_setup)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Parameter(torch.randn(3 * width, width) * width**-0.5)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = F.linear(x, self.qkv.to(x.dtype)).view(batch, tokens, 3 * self.heads, -1).chunk(3, dim=2)
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        y = flex_attention(*(each.transpose(1, 2) for each in (q, k, v)), block_mask=mask, scale=0.12)
        return F.linear(y.transpose(1, 2).reshape(batch, tokens, width), self.proj.weight.to(x.dtype))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 4 * width, bias=False)
        self.proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.fc.weight.to(x.dtype))).square(), self.proj.weight.to(x.dtype))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(width, heads), MLP(width)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor, x0: Tensor, mask: BlockMask) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        x = x + self.attn(F.rms_norm(x, (x.size(-1),)), mask)
        return x + self.mlp(F.rms_norm(x, (x.size(-1),)))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, width // 128) for _ in range(layers))
        self.head = nn.Parameter(torch.randn(VOCABULARY, width) * 0.005)

    def masks(self, tokens: Tensor, window: Tensor) -> tuple[BlockMask, BlockMask]:
        docs = (tokens == END).cumsum(0)

        def document_causal(b, h, q, kv):
            return (q >= kv) & (docs[q] == docs[kv])

        def ordered(dense: Tensor) -> tuple[Tensor, Tensor]:
            indices = dense.argsort(dim=-1, descending=False, stable=True).flip(-1).to(torch.int32)
            return dense.sum(dim=-1, dtype=torch.int32)[None, None].contiguous(), indices[None, None].contiguous()

        index = torch.arange(len(tokens) // BLOCK, dtype=torch.int32, device=tokens.device)
        low, high = docs.view(-1, BLOCK)[:, 0].contiguous(), docs.view(-1, BLOCK)[:, -1].contiguous()
        some = (index[:, None] >= index) & (low[:, None] <= high) & (high[:, None] >= low)
        every = (index[:, None] > index) & (low[:, None] == high) & (high[:, None] == low)
        partial, partial_indices = ordered(some & ~every)
        full, full_indices = ordered(every)

        def of(blocks: Tensor) -> BlockMask:
            some_of_it = torch.clamp_max(partial, torch.clamp_min(blocks - full, 1))
            return BlockMask.from_kv_blocks(
                some_of_it, partial_indices, torch.clamp_max(full, blocks - 1), full_indices,
                BLOCK_SIZE=BLOCK, mask_mod=document_causal,
            )  # fmt: skip

        return of(window), of(window // 2)

    def forward(self, tokens: Tensor, targets: Tensor, window: Tensor) -> Tensor:
        long, short = self.masks(tokens, window)
        x = x0 = F.rms_norm(self.embed(tokens)[None], (self.embed.weight.size(1),))
        for number, block in enumerate(self.blocks):
            x = block(x, x0, short if number % 2 else long)
        x = F.rms_norm(x, (x.size(-1),)).flatten(0, -2)
        logits = torch.ops.speedrun.mm(x, self.head.bfloat16(), 0.1, 0.01, 1e-5)[0].float()
        return F.cross_entropy(30 * torch.sigmoid(logits / 7.5), targets)


@torch.compile
def orthogonalized(g: Tensor) -> Tensor:
    """Newton and Schulz, five times."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    x = x.mT if g.size(-2) > g.size(-1) else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if g.size(-2) > g.size(-1) else x


class Muon(torch.optim.Optimizer):
    """One of as many matrices of a shape as there are ranks is each rank's."""

    def __init__(self, params: list[nn.Parameter], lr: float = 0.02, momentum: float = 0.95) -> None:
        groups = [[p for p in params if p.shape == shape] for shape in dict.fromkeys(p.shape for p in params)]
        super().__init__([{"params": group} for group in groups], {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        scattered = []
        for group in self.param_groups:
            params = group["params"]
            padded = params + [torch.empty_like(params[-1])] * (-len(params) % world)
            for first in range(0, len(params), world):
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in padded[first : first + world]]
                mine = torch.empty_like(grads[rank])
                work = dist.reduce_scatter(mine, grads, op=dist.ReduceOp.AVG, async_op=True)
                scattered.append((work, mine, padded[first : first + world], group, first + rank < len(params)))
        gathered = []
        for work, grad, owned, group, is_mine in scattered:
            work.wait()
            p = owned[rank]
            if is_mine:  # else this rank's is padding
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(grad))
                buffer.lerp_(grad, 1 - group["momentum"])
                update = orthogonalized(grad.lerp_(buffer, group["momentum"]))
                p.add_(update.to(p.dtype), alpha=-group["lr"] * max(1, p.size(-2) / p.size(-1)) ** 0.5)
            gathered.append(dist.all_gather(owned, p, async_op=True))
        for work in gathered:
            work.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("steps", 3), ("layers", 4), ("width", 512), ("tokens", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch._inductor.config.coordinate_descent_tuning = True
    model = GPT(args.layers, args.width).cuda()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.bfloat16()
    for p in model.parameters():
        dist.broadcast(p.detach(), 0)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [model.embed.weight, model.head, *(p for p in model.blocks.parameters() if p.ndim < 2)]
    optimizers = [torch.optim.AdamW(rest, lr=0.01, fused=True), Muon(matrices)]
    compiled = torch.compile(model, dynamic=False)
    window = torch.tensor(8, dtype=torch.int32, device="cuda")
    for _ in range(args.steps):
        tokens = torch.randint(VOCABULARY, (args.tokens + 1,), device="cuda")
        compiled(tokens[:-1].int(), tokens[1:], window).backward()
        for p in rest:
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
