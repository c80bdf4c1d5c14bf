"""Jobs: transformers with each attention backend, precision, checkpointing, compilation, generation."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from fakedist.extras.confirm.jobs.models import Transformer, language_loss, random_tokens

F: Any = torch.nn.functional

STEPS = 3
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def train(model: nn.Module, tokens: Tensor, dtype: torch.dtype | None = torch.bfloat16) -> None:
    """Some steps of AdamW with clipped gradients, with autocast to ``dtype`` where there is one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        with torch.autocast("cuda", dtype) if dtype is not None else nullcontext():
            loss = language_loss(model(tokens), tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def transformer(attention: str) -> None:
    """bf16 autocast; dropout within attention where its backend has one."""
    model = Transformer(dropout=0.1 if attention in ("flash", "efficient") else 0.0).cuda()
    with sdpa_kernel(_BACKENDS[attention]) if attention in _BACKENDS else nullcontext():
        train(model, random_tokens(4, 1024))


def transformer_fp32() -> None:
    """Without autocast, at the default precision of fp32 products."""
    train(Transformer(num_layers=2).cuda(), random_tokens(2, 768), None)


class _Checkpointed(Transformer):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=index % 2 == 0)
        logits: Tensor = self.output(self.norm(x))
        return logits


def transformer_checkpoint() -> None:
    """Activation checkpointing, reentrant and not, in turns."""
    train(_Checkpointed(num_layers=6).cuda(), random_tokens(4, 1024))


def generation() -> None:
    """A prompt and then one token after the other, with a cache that grows."""
    dim, num_heads, num_layers = 1024, 16, 4
    with torch.no_grad(), torch.device("cuda"):
        layers = [(nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)) for _ in range(num_layers)]
        layers = [(qkv.bfloat16(), out.bfloat16()) for qkv, out in layers]
        cache: list[tuple[Tensor, Tensor]] = []
        x = torch.zeros(8, 512, dim, dtype=torch.bfloat16)
        for step in range(24):
            for number, (qkv, out) in enumerate(layers):
                query, key, value = qkv(x).unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
                if step:
                    key = torch.cat((cache[number][0], key), dim=2)
                    value = torch.cat((cache[number][1], value), dim=2)
                    cache[number] = (key, value)
                else:
                    cache.append((key, value))
                attended = F.scaled_dot_product_attention(query, key, value, is_causal=step == 0)
                x = x + out(attended.transpose(1, 2).flatten(2))
            x = x[:, -1:]


def amp_fp16() -> None:
    """Half precision with a gradient scaler whose scale is low enough never to overflow."""
    model = Transformer(num_layers=2).cuda()
    tokens = random_tokens(2, 512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
    for _ in range(STEPS):
        with torch.autocast("cuda", torch.float16):
            loss = language_loss(model(tokens), tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class _Fp8Matmul(torch.autograd.Function):
    """A linear layer with float8 operands, one scale a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        one = torch.ones((), device="cuda")
        x8, weight8 = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        ctx.save_for_backward(x8, weight8)
        return torch._scaled_mm(x8, weight8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x8, weight8 = ctx.saved_tensors
        one = torch.ones((), device="cuda")
        grad8 = grads[0].to(torch.float8_e5m2)
        # Hopper's float8 takes rows by columns alone: the second operand lies transposed.
        to_x = torch._scaled_mm(grad8, weight8.t().contiguous().t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        to_weight = torch._scaled_mm(
            grad8.t().contiguous(), x8.t().contiguous().t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )
        return to_x, to_weight


def fp8() -> None:
    """Linear layers in float8, forward and backward, and one with a scale a row."""
    sizes = (2048, 8192, 2048)
    weights = [
        nn.Parameter(torch.zeros(out, into, device="cuda", dtype=torch.bfloat16)) for into, out in pairwise(sizes)
    ]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        x = torch.zeros(4096, sizes[0], device="cuda", dtype=torch.bfloat16)
        for weight in weights:
            x = F.gelu(_Fp8Matmul.apply(x, weight))
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = torch.ones(4096, 1, device="cuda"), torch.ones(1, 2048, device="cuda")
    left = torch.zeros(4096, 8192, device="cuda").to(torch.float8_e4m3fn)
    right = weights[1].detach().to(torch.float8_e4m3fn).t()
    torch._scaled_mm(left, right, scale_a=rows[0], scale_b=rows[1], out_dtype=torch.bfloat16)


def compiled() -> None:
    """torch.compile of the whole model: inductor's own buffers and Triton's kernels."""
    model = Transformer(num_layers=2).cuda()
    compiled_model: Any = torch.compile(model)
    train(compiled_model, random_tokens(4, 512))
