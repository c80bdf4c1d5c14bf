"""Run kernels of many shapes, step by step: the job of ``make calibrate``.

    python tests/gpu/shapes.py [--trace FILE] [--short]

Products by type, layout and size, attention, norms, losses, elementwise kernels, copies and an optimizer, each forward
and backward. The job runs twice: on the virtual GPU, where fakedist records what each launch has to do, and on the GPU,
where torch.profiler times its kernels. Operands are random: zeros are multiplied at a higher clock. Torch only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, schedule

#: The profiler waits for one step, warms up for one and traces the others.
NUM_STEPS = 5
_SQUARES = (256, 512, 1024, 2048, 4096, 8192)
#: (tokens, out, in) of layers of models from 1B to 70B, some of them sharded.
_LAYERS = (
    (512, 4096, 4096),
    (2048, 8192, 28672),
    (4096, 1024, 8192),
    (4096, 3584, 8192),
    (4096, 4096, 4096),
    (4096, 6144, 4096),
    (8192, 4096, 14336),
    (8192, 14336, 4096),
    (8192, 28672, 4096),
    (8192, 32000, 4096),
    (16384, 2048, 2048),
    (16384, 8192, 2048),
)
_KEYS = (512, 1024, 2048, 4096, 8192, 16384)
_TOKENS = 16384
#: (query heads, key and value heads, width of a head).
_HEADS = ((16, 16, 128), (32, 8, 128), (16, 16, 64))
_NUMBERS = tuple(1 << power for power in range(14, 29, 2))
_WIDTHS = (1024, 4096, 8192)
#: Products of these types are slow: larger ones tell nothing new.
_SLOW, _MOST_SLOW = (torch.float32, torch.float64), 2 * 4096**3


def main() -> None:
    parser = argparse.ArgumentParser(description="Run kernels of many shapes.")
    parser.add_argument("--trace", help="the file for torch.profiler's trace")
    parser.add_argument("--short", action="store_true", help="only a few shapes")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    steps = schedule(wait=1, warmup=1, active=NUM_STEPS - 2)
    tracing = nullcontext(None)
    if options.trace:
        tracing = profile(
            activities=activities,
            schedule=steps,
            record_shapes=True,
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(options.trace),
        )
    with tracing as profiler:
        for _ in range(NUM_STEPS):
            model(torch.randn(64, 64, device="cuda")).sum().backward()
            for run in kernels(options.short):
                run()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            if profiler is not None:
                profiler.step()


def kernels(short: bool) -> Iterator[Callable[[], Any]]:
    """The work of a step. Tensors of one shape are gone before those of the next are made."""
    few = slice(0, 2) if short else slice(None)
    yield from _products(few)
    yield from _attention(few)
    yield from _rows(few)
    yield from _elementwise(few)
    yield from _copies(few)


def _products(few: slice) -> Iterator[Callable[[], Any]]:
    capability = torch.cuda.get_device_capability()
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for tokens, out, width in (*((size,) * 3 for size in _SQUARES[few]), *_LAYERS[few]):
            if dtype in _SLOW and tokens * out * width > _MOST_SLOW:
                continue
            x, weight, grad = (
                torch.randn(shape, device="cuda", dtype=dtype)
                for shape in ((tokens, width), (out, width), (tokens, out))
            )
            yield lambda x=x, weight=weight: x @ weight.t()  # a linear layer's forward
            yield lambda grad=grad, weight=weight: grad @ weight  # its input's gradient
            yield lambda grad=grad, x=x: grad.t() @ x  # its weight's gradient
    if capability >= (8, 9):
        one = torch.ones((), device="cuda")
        for tokens, out, width in _LAYERS[few]:
            x8, weight8 = (
                torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for shape in ((tokens, width), (out, width))
            )
            yield lambda x=x8, w=weight8: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16)
    for size in _SQUARES[few][:4]:
        a, b = (torch.randn(32, size, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        yield lambda a=a, b=b: torch.bmm(a, b.transpose(1, 2))


def _attention(few: slice) -> Iterator[Callable[[], Any]]:
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for heads, kv_heads, width in _HEADS[few]:
            for keys in _KEYS[few]:
                shape = (max(_TOKENS // keys, 1), keys)
                made = [
                    torch.randn(shape[0], number, shape[1], width, device="cuda", dtype=torch.bfloat16)
                    for number in (heads, kv_heads, kv_heads)
                ]
                for each in made:
                    each.requires_grad_()
                yield lambda made=made, backend=backend: _attend(made, backend)


def _attend(made: list[torch.Tensor], backend: SDPBackend) -> None:
    query, key, value = made
    try:
        with sdpa_kernel(backend):
            is_grouped = query.shape[1] != key.shape[1]
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
    except RuntimeError:  # this GPU's architecture has no such kernel
        return
    torch.autograd.grad(out, made, torch.ones_like(out))


def _rows(few: slice) -> Iterator[Callable[[], Any]]:
    """Norms, softmax and losses, forward and backward."""
    for width in _WIDTHS[few]:
        for tokens in (1024, 8192, 32768)[few]:
            x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            weight = torch.ones(width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            yield lambda x=x, w=weight: _through(F.rms_norm(x, (x.shape[1],), w), x, w)
            yield lambda x=x, w=weight: _through(F.layer_norm(x, (x.shape[1],), w, w), x, w)
            yield lambda x=x: _through(torch.softmax(x, 1), x)
            yield lambda x=x: torch.sum(x, 1)
    for tokens, words in ((2048, 32000), (8192, 32000), (4096, 128256))[few]:
        scores = torch.randn(tokens, words, device="cuda", requires_grad=True)
        wanted = torch.zeros(tokens, device="cuda", dtype=torch.int64)
        yield lambda scores=scores, wanted=wanted: _through(F.cross_entropy(scores, wanted), scores)


def _elementwise(few: slice) -> Iterator[Callable[[], Any]]:
    for count in _NUMBERS[few]:
        x, y = (torch.randn(count, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        yield lambda x=x, y=y: x + y
        yield lambda x=x, y=y: x.mul(y)
        leaf = x.clone().requires_grad_()
        yield lambda leaf=leaf: _through(F.silu(leaf), leaf)
        yield lambda leaf=leaf: _through(F.gelu(leaf), leaf)
        lists = [[torch.zeros(max(count // 4, 1024), device="cuda")] for _ in range(4)]
        yield lambda lists=lists: _adam(lists)
        yield lambda lists=lists: torch._foreach_mul_(lists[0], 0.5)


def _adam(lists: list[list[torch.Tensor]]) -> None:
    step = [torch.ones((), device="cuda")]
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
    torch._fused_adamw_(*lists, [], step, maximize=False, **settings)


def _copies(few: slice) -> Iterator[Callable[[], Any]]:
    for count in _NUMBERS[few]:
        x, y = (torch.zeros(count, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        yield lambda x=x, y=y: y.copy_(x)
        yield lambda x=x: x.float()
        yield lambda x=x, y=y: torch.cat([x, y])
        yield lambda x=x: x.view(-1, 128).t().contiguous()
        yield lambda x=x: x.zero_()
        host = torch.zeros(count, dtype=torch.bfloat16, pin_memory=True)
        yield lambda x=x, host=host: x.copy_(host, non_blocking=True)
        yield lambda x=x, host=host: host.copy_(x, non_blocking=True)
    for tokens, words, width in ((8192, 32000, 4096), (16384, 128256, 4096))[few]:
        table = torch.randn(words, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        chosen = torch.zeros(tokens, device="cuda", dtype=torch.int64)
        yield lambda table=table, chosen=chosen: _through(F.embedding(chosen, table), table)


def _through(out: torch.Tensor, *inputs: torch.Tensor) -> None:
    """The backward of what was computed."""
    torch.autograd.grad(out, inputs, torch.ones_like(out))


if __name__ == "__main__":
    main()
