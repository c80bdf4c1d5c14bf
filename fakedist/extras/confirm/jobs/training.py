"""Jobs that train: transformers with each attention backend and precision, checkpoints, compilation; experts; and a
generation. The models are in plain torch.

A job says where it reads values that its sizes or decisions depend on. On a real GPU kernels computed them. On the
virtual one fakedist has to, and must not do it around the rest of the job: under a dispatch mode, torch itself
allocates differently in places (``at::isTensorSubclassLike``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

#: ``torch.nn.functional``; arguments are unpacked in ways that its annotations do not follow.
F: Any = torch.nn.functional

_compute: Callable[[], AbstractContextManager[object]] = nullcontext


def computed_by(compute: Callable[[], AbstractContextManager[object]]) -> None:
    """From now on ``reading()`` is ``compute()``."""
    global _compute
    _compute = compute


def reading() -> AbstractContextManager[object]:
    """Within it, small tensors hold values on every device."""
    return _compute()


class Block(nn.Module):
    """Attention and feed-forward of four times the width, each behind a LayerNorm with a residual connection."""

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        # Heads by size of a head, so that a tensor-parallel rank with a part of qkv's columns has a part of the heads.
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (-1, 3, self.head_dim))
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(-2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.dropout)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + added

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.qkv.in_features // self.num_heads


class Transformer(nn.Module):
    """An embedding, blocks, a norm and a product with the vocabulary."""

    def __init__(
        self, num_layers: int = 4, dim: int = 1024, num_heads: int = 16, vocab_size: int = 32_000, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length] to [batch, length, vocabulary]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


class ConvNet(nn.Module):
    """A residual network of bottlenecks, as ResNet has them."""

    def __init__(self, width: int = 64, depth: tuple[int, ...] = (2, 2, 2, 2)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        stages: list[nn.Module] = []
        channels = width
        for stage, number in enumerate(depth):
            for block in range(number):
                stride = 2 if block == 0 and stage > 0 else 1
                stages.append(Bottleneck(channels, width << stage, stride))
                channels = (width << stage) * 4
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 3, height, width] to [batch, classes]."""
        scores: Tensor = self.head(self.stages(self.stem(images)))
        return scores


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with a residual connection; the middle one is grouped in odd stages."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.Conv2d(width, width, 3, stride, 1, groups=4 if width == 128 else 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        same = stride == 1 and channels == 4 * width
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] to the same."""
        return torch.relu(self.body(x) + self.skip(x))


def random_tokens(batch: int, length: int, vocab_size: int = 32_000) -> Tensor:
    """Tokens [batch, length] on the GPU, drawn on the host, so that they are the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (batch, length), generator=generator).cuda()


def language_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean cross entropy of the next token."""
    loss: Tensor = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    return loss


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


DIM, HIDDEN, NUM_EXPERTS, TOP = 1024, 2048, 8, 2


def _train_experts(layer: nn.Module, tokens: Tensor) -> None:
    embedding, output = nn.Embedding(4_000, DIM).cuda(), nn.Linear(DIM, 4_000).cuda()
    modules = nn.ModuleList((embedding, layer, output))
    optimizer = torch.optim.AdamW(modules.parameters())
    for _ in range(STEPS):
        with torch.autocast("cuda", torch.bfloat16):
            logits = output(layer(embedding(tokens), tokens))
        F.cross_entropy(logits.float(), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


class _Capacity(nn.Module):
    """A router of its own; every expert takes equally many tokens, so no size depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, NUM_EXPERTS)
        self.up = nn.Parameter(torch.zeros(NUM_EXPERTS, DIM, HIDDEN))
        self.down = nn.Parameter(torch.zeros(NUM_EXPERTS, HIDDEN, DIM))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        capacity = x.shape[0] * TOP // NUM_EXPERTS
        scores = self.router(x).softmax(-1)
        weights, chosen = scores.t().topk(capacity)  # every expert chooses its tokens
        inputs = x.index_select(0, chosen.flatten()).view(NUM_EXPERTS, capacity, DIM)
        outputs = torch.bmm(F.silu(torch.bmm(inputs, self.up)), self.down)
        outputs = outputs * weights.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, chosen.flatten(), outputs.flatten(0, 1).to(x.dtype))


def capacity() -> None:
    """Experts that choose their tokens."""
    _train_experts(_Capacity().cuda(), random_tokens(4, 1024, 4_000).flatten())


class _Dropless(nn.Module):
    """A token's number says its experts, so that routes are the same whatever the weights are; sizes follow them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(NUM_EXPERTS, DIM, HIDDEN))
        self.down = nn.Parameter(torch.zeros(NUM_EXPERTS, HIDDEN, DIM))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        with reading():
            experts = tokens % NUM_EXPERTS
            order = experts.argsort(stable=True)
            counts = (experts[:, None] == torch.arange(NUM_EXPERTS, device="cuda")).sum(0)
            ends = counts.cumsum(0).to(torch.int32)
            sizes = counts.tolist()
        rows = x.index_select(0, order).to(torch.bfloat16)
        hidden = F.silu(torch._grouped_mm(rows, self.up.to(torch.bfloat16), offs=ends))
        grouped = torch._grouped_mm(hidden, self.down.to(torch.bfloat16), offs=ends)
        parts = [part * 2 for part in grouped.split(sizes)]
        return torch.zeros_like(x).index_add(0, order, torch.cat(parts).to(x.dtype))


def dropless() -> None:
    """Give each expert a row for every token that takes it: the script reads the counts back."""
    with reading():
        tokens = random_tokens(1, 2048, 4_000).flatten()
    _train_experts(_Dropless().cuda(), tokens)
