"""More than two hundred operations in one step, each in a range of its own with the least that it must do.

    many_operations.py OUT.json [few]

With ``few``, it runs one in eight, and those that once were priced below their roofline. Writes for each operation its
FLOPs by type, and the bytes of the tensors that it reads and writes, as arithmetic has them: nothing here comes from
fakedist.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.profiler import record_function

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
C64, C128, INT8, I64 = torch.complex64, torch.complex128, torch.int8, torch.int64
#: By the operands' type, as in the peaks of a GPU.
PEAKS = {BF16: "bf16", FP16: "bf16", FP32: "fp32", FP64: "fp64", C64: "fp32", C128: "fp64", INT8: "int8"}
M = 1 << 20
_ONCE_WRONG = re.compile(r"tl\.dot|LSTM|(b?mm|addmm) torch.complex|cdist|int4|pad constant|conv2d depthwise|linear")


class Case(NamedTuple):
    """An operation.

    Attributes:
        name: What it is called here.
        run: Runs it on the tensors.
        made: Makes the tensors.
        flops: Its floating-point operations, forward.
        dtype: The type of most of them.
        reads: Whether it reads the whole of its tensors.
        backward: How many times the forward's FLOPs its backward has; 0 without a backward.
    """

    name: str
    run: Callable[..., Any]
    made: Callable[[], list[torch.Tensor]]
    flops: float = 0.0
    dtype: str = "bf16"
    reads: bool = True
    backward: float = 0.0


def some(*shape: int, dtype: torch.dtype = BF16, count: int = 1) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.empty(shape, device="cuda", dtype=dtype) for _ in range(count)]


def several(*made: Callable[[], list[torch.Tensor]]) -> Callable[[], list[torch.Tensor]]:
    return lambda: [tensor for each in made for tensor in each()]


def whole(most: int, *shape: int, dtype: torch.dtype = I64) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.zeros(shape, device="cuda", dtype=dtype) + most // 2]


UNARY = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "deg2rad", "erf", "erfc", "exp", "exp2", "expm1", "floor",
    "frac", "lgamma", "log", "log10", "log1p", "log2", "neg", "rad2deg", "reciprocal", "relu", "round", "rsqrt",
    "sigmoid", "sign", "sin", "sinc", "sinh", "sqrt", "square", "tan", "tanh", "trunc", "digamma", "erfinv", "logit",
    "isnan", "isfinite", "signbit",
)  # fmt: skip
ACTIVATIONS = (
    "gelu", "silu", "mish", "elu", "celu", "selu", "softplus", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu",
    "logsigmoid", "relu6", "softsign", "tanhshrink", "softshrink",
)  # fmt: skip
BINARY = (
    "add", "sub", "mul", "div", "maximum", "minimum", "atan2", "pow", "fmod", "remainder", "eq", "ne", "lt", "gt",
    "le", "ge", "hypot", "copysign", "logaddexp", "fmax", "fmin",
)  # fmt: skip
REDUCTIONS = (
    "sum", "mean", "amax", "amin", "prod", "std", "var", "norm", "logsumexp", "argmax", "any", "all", "nansum",
    "count_nonzero", "median",
)  # fmt: skip


def moving() -> Iterator[Case]:
    """Operations that move much more than they compute."""
    for name in UNARY:
        yield Case(f"torch.{name}", getattr(torch, name), some(64, M, dtype=FP32))
    for name in ACTIVATIONS:
        yield Case(f"F.{name}", getattr(F, name), some(64, M))
    for name in BINARY:
        yield Case(f"torch.{name}", getattr(torch, name), some(64, M, dtype=FP32, count=2))
    for name in REDUCTIONS:
        yield Case(
            f"{name} of rows", lambda x, name=name: getattr(torch, name)(x, dim=-1), some(8192, 8192, dtype=FP32)
        )
    for dtype in (BF16, FP32):
        rows = some(16384, 4096, dtype=dtype)
        yield Case(f"softmax {dtype}", lambda x: F.softmax(x, -1), rows)
        yield Case(f"log_softmax {dtype}", lambda x: F.log_softmax(x, -1), rows)
        yield Case(f"layer_norm {dtype}", lambda x: F.layer_norm(x, (4096,)), rows)
        yield Case(f"rms_norm {dtype}", lambda x: F.rms_norm(x, (4096,)), rows)
        yield Case(f"cumsum {dtype}", lambda x: x.cumsum(-1), rows)
        yield Case(f"sort {dtype}", lambda x: x.sort(-1), rows)
        yield Case(f"topk {dtype}", lambda x: x.topk(8, -1), rows)
        yield Case(f"cast from {dtype}", lambda x: x.to(FP16), rows)
        yield Case(f"transpose {dtype}", lambda x: x.t().contiguous(), rows)
        yield Case(f"cat {dtype}", lambda x: torch.cat((x, x)), rows, reads=False)
        yield Case(f"dropout {dtype}", lambda x: F.dropout(x, 0.5), rows)
        yield Case(f"where {dtype}", lambda x: torch.where(x > 0, x, 0.0), rows)
        yield Case(f"cross_entropy {dtype}", F.cross_entropy, several(rows, whole(4096, 16384)))
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        yield Case(name, getattr(F, name), some(64, M, dtype=FP32, count=2))
    yield Case("bce", F.binary_cross_entropy_with_logits, some(64, M, dtype=FP32, count=2))
    yield Case("group_norm", lambda x: F.group_norm(x, 32), some(32, 256, 64, 64))
    yield Case("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), some(32, 256, 64, 64))


def of_images_and_rows() -> Iterator[Case]:
    """Pooling, padding and resizing; rows that are picked, and rows that are added to others."""
    image = some(32, 128, 128, 128)
    yield Case("max_pool2d", lambda x: F.max_pool2d(x, 2), image)
    yield Case("avg_pool2d", lambda x: F.avg_pool2d(x, 2), image)
    yield Case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 7), image)
    yield Case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), image)
    yield Case("roll", lambda x: torch.roll(x, 3, -1), image)
    yield Case("flip", lambda x: torch.flip(x, (-1,)), image)
    for mode in ("constant", "reflect", "replicate", "circular"):
        yield Case(f"pad {mode}", lambda x, mode=mode: F.pad(x, (3, 3, 3, 3), mode=mode), image)
    for mode in ("nearest", "bilinear", "bicubic"):
        yield Case(f"interpolate {mode}", lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode), image)
    yield Case("unfold", lambda x: F.unfold(x, 3), some(8, 64, 64, 64))
    table, ids = some(50_000, 1024), whole(50_000, 65536)
    yield Case("embedding", lambda w, i: F.embedding(i, w), several(table, ids), reads=False)
    yield Case("index_select", lambda w, i: w.index_select(0, i), several(table, ids), reads=False)
    yield Case("index", lambda w, i: w[i], several(table, ids), reads=False)
    yield Case("gather", lambda w, i: w.gather(0, i), several(table, whole(50_000, 8192, 1024)), reads=False)
    yield Case("scatter_add", lambda w, i, s: w.scatter_add_(0, i, s),
               several(table, whole(50_000, 8192, 1024), some(8192, 1024)), reads=False)  # fmt: skip
    yield Case("index_add", lambda w, i, s: w.index_add_(0, i, s), several(table, ids, some(65536, 1024)), reads=False)
    yield Case("one_hot", lambda i: F.one_hot(i, 64), whole(64, M))
    yield Case("triu", torch.triu, some(8192, 8192))
    yield Case("lerp", lambda a, b: torch.lerp(a, b, 0.5), some(64, M, count=2))
    yield Case("addcmul", torch.addcmul, some(64, M, count=3))
    yield Case("clamp", lambda x: x.clamp(-1, 1), some(64, M))
    yield Case("foreach_add", lambda a, b: torch._foreach_add([a], [b]), some(64, M, count=2))
    yield Case("foreach_norm", lambda a: torch._foreach_norm([a]), some(64, M))
    yield Case("complex product of elements", torch.mul, some(16, M, dtype=C64, count=2))
    for name in ("fft", "ifft", "fft2"):
        yield Case(f"fft.{name}", getattr(torch.fft, name), some(256, 1024, 64, dtype=C64))
    yield Case("fft.rfft", torch.fft.rfft, some(256, 65536, dtype=FP32))


def multiplying() -> Iterator[Case]:
    """Products of matrices."""
    n = 2048
    for dtype in (BF16, FP16, FP32, FP64, C64, C128):
        flops, peak = (8.0 if dtype.is_complex else 2.0) * n**3, PEAKS[dtype]
        pair = some(n, n, dtype=dtype, count=2)
        yield Case(f"mm {dtype}", torch.mm, pair, flops, peak, backward=0 if dtype.is_complex else 2)
        yield Case(f"mm NT {dtype}", lambda a, b: a @ b.t(), pair, flops, peak)
        yield Case(f"mm TN {dtype}", lambda a, b: a.t() @ b, pair, flops, peak)
        yield Case(f"bmm {dtype}", torch.bmm, some(8, n, n, dtype=dtype, count=2), 8 * flops, peak)
        yield Case(f"addmm {dtype}", torch.addmm, some(n, n, dtype=dtype, count=3), flops, peak)
        yield Case(f"baddbmm {dtype}", torch.baddbmm, some(4, n, n, dtype=dtype, count=3), 4 * flops, peak)
        yield Case(f"einsum {dtype}", lambda a, b: torch.einsum("bij,bjk->bik", a, b),
                   some(4, n, n, dtype=dtype, count=2), 4 * flops, peak)  # fmt: skip
        yield Case(f"mv {dtype}", torch.mv, several(some(8192, 8192, dtype=dtype), some(8192, dtype=dtype)))
    for dtype in (BF16, FP32):
        bias = several(some(8192, 2048, dtype=dtype), some(4096, 2048, dtype=dtype), some(4096, dtype=dtype))
        yield Case(f"linear {dtype}", F.linear, bias, 2.0 * 8192 * 2048 * 4096, PEAKS[dtype], backward=2)
        triple = several(some(4096, 256, dtype=dtype), some(4096, 256, dtype=dtype), some(256, 256, 256, dtype=dtype))
        yield Case(f"bilinear {dtype}", F.bilinear, triple, 2.0 * 4096 * 256**3, PEAKS[dtype])
    yield Case("int_mm", torch._int_mm, some(n, n, dtype=INT8, count=2), 2.0 * n**3, "int8")
    eight = several(some(n, n), some(n, n), lambda: [torch.ones((), device="cuda")])

    def scaled(a: torch.Tensor, b: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t(), one, one, out_dtype=BF16)

    yield Case("scaled_mm", scaled, eight, 2.0 * n**3, "fp8")
    groups = several(
        some(8192, n), some(8, n, n), lambda: [torch.arange(1024, 8193, 1024, device="cuda", dtype=torch.int32)]
    )
    yield Case("grouped_mm", lambda a, b, o: torch._grouped_mm(a, b, offs=o), groups, 2.0 * 8192 * n * n)
    yield Case("addr", torch.addr, several(some(8192, 8192), some(8192), some(8192)))
    yield Case("int4pack_mm", int4, some(1024, 4096), 2.0 * 1024 * 4096 * 4096)
    sparse = several(some(8192, 512, dtype=FP32, count=2))
    for p, flops in ((1.0, 3.0), (2.0, 2.0), (3.0, 3.0), (float("inf"), 2.0)):
        yield Case(f"cdist {p}", lambda a, b, p=p: torch.cdist(a, b, p=p), sparse, flops * 8192 * 8192 * 512, "fp32")
    yield Case("pdist", torch.pdist, some(4096, 512, dtype=FP32), 3.0 * 4096 * 4095 / 2 * 512, "fp32")


def int4(a: torch.Tensor) -> torch.Tensor:
    weight = torch._convert_weight_to_int4pack(torch.zeros(4096, 2048, device="cuda", dtype=torch.uint8), 8)
    return torch._weight_int4pack_mm(a, weight, 128, torch.zeros(32, 4096, 2, device="cuda", dtype=BF16))


def convolving() -> Iterator[Case]:
    """Convolutions, recurrent networks and attention."""
    for dtype in (BF16, FP32):
        peak = "bf16" if dtype == BF16 else "tf32"
        image, kernel = some(16, 128, 56, 56, dtype=dtype), some(128, 128, 3, 3, dtype=dtype)
        flops = 2.0 * 16 * 56 * 56 * 128 * 128 * 9
        pair, whole_image = several(image, kernel), partial(F.conv2d, padding=1)
        four, each = some(128, 32, 3, 3, dtype=dtype), some(128, 1, 7, 7, dtype=dtype)
        line = several(some(16, 256, 4096, dtype=dtype), some(256, 256, 3, dtype=dtype))
        cube = several(some(2, 64, 16, 56, 56, dtype=dtype), some(64, 64, 3, 3, 3, dtype=dtype))
        yield Case(f"conv2d {dtype}", whole_image, pair, flops, peak, backward=2)
        yield Case(f"conv2d stride {dtype}", partial(F.conv2d, stride=2, padding=1), pair, flops / 4, peak)
        yield Case(f"conv_transpose2d {dtype}", partial(F.conv_transpose2d, padding=1), pair, flops, peak, backward=2)
        yield Case(f"conv2d groups {dtype}", partial(F.conv2d, padding=1, groups=4), several(image, four), flops / 4,
                   peak, backward=2)  # fmt: skip
        yield Case(f"conv2d depthwise {dtype}", partial(F.conv2d, padding=3, groups=128), several(image, each),
                   flops / 128 / 9 * 49, "fp32", backward=2)  # fmt: skip
        yield Case(f"conv1d {dtype}", partial(F.conv1d, padding=1), line, 2.0 * 16 * 4096 * 256 * 256 * 3, peak)
        yield Case(f"conv3d {dtype}", partial(F.conv3d, padding=1), cube, 2.0 * 32 * 56 * 56 * 64 * 64 * 27, peak)
        for kind, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
            net = getattr(torch.nn, kind)(512, 512, 2, batch_first=True, device="cuda", dtype=dtype)
            yield Case(f"{kind} {dtype}", lambda x, net=net: net(x)[0], some(32, 256, 512, dtype=dtype),
                       2.0 * 32 * 256 * 2 * 2 * gates * 512 * 512, peak, backward=2)  # fmt: skip
    for tokens in (1024, 4096):
        heads = some(4, 16, tokens, 128, count=3)
        pairs = 4.0 * 4 * 16 * tokens * tokens * 128
        for causal in (False, True):
            half = 0.5 if causal else 1.0
            for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
                yield Case(f"sdpa {backend} {tokens} {causal}", attention(backend, causal), heads,
                           pairs * (1.0 if backend == "MATH" else half), backward=2)  # fmt: skip


def attention(backend: str, causal: bool) -> Callable[..., torch.Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def solving() -> Iterator[Case]:
    """Factorisations: the FLOPs of the textbook."""
    n = 1024
    square, cube = some(n, n, dtype=FP32), float(n) ** 3
    for name, flops in (
        ("cholesky_ex", 1 / 3),
        ("lu_factor_ex", 2 / 3),
        ("qr", 4 / 3),
        ("eigh", 4 / 3),
        ("svd", 8 / 3),
    ):
        yield Case(f"linalg.{name}", getattr(torch.linalg, name), square, flops * cube, "fp32")
    yield Case("linalg.inv_ex", torch.linalg.inv_ex, square, cube, "fp32")
    yield Case("linalg.solve_ex", torch.linalg.solve_ex, some(n, n, dtype=FP32, count=2), 2 / 3 * cube, "fp32")
    yield Case("linalg.solve_triangular", lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
               some(n, n, dtype=FP32, count=2), cube, "fp32")  # fmt: skip


def nbytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return min(value.untyped_storage().nbytes(), value.nbytes) if value.is_cuda else 0
    return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0


@triton.jit
def product_kernel(a, b, c, rows, cols, depth, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr):
    row, col = tl.program_id(0) * bm + tl.arange(0, bm), tl.program_id(1) * bn + tl.arange(0, bn)
    total = tl.zeros((bm, bn), tl.float32)
    for k in range(0, depth, bk):
        inner = k + tl.arange(0, bk)
        left = tl.load(a + row[:, None] * depth + inner[None, :])
        total += tl.dot(left, tl.load(b + inner[:, None] * cols + col[None, :]))
    tl.store(c + row[:, None] * cols + col[None, :], total.to(c.dtype.element_ty))


@triton.jit
def ended_by_a_value(a, b, c, ends, cols, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr):
    row, col = tl.program_id(0) * bm + tl.arange(0, bm), tl.program_id(1) * bn + tl.arange(0, bn)
    total = tl.zeros((bm, bn), tl.float32)
    for k in range(0, tl.load(ends + tl.program_id(0)).to(tl.int32), bk):
        inner = k + tl.arange(0, bk)
        left = tl.load(a + row[:, None] * cols + inner[None, :])
        total += tl.dot(left, tl.load(b + inner[:, None] * cols + col[None, :]))
    tl.store(c + row[:, None] * cols + col[None, :], total.to(c.dtype.element_ty))


def in_triton() -> Iterator[Case]:
    """Products in the script's own kernels."""
    n, tile = 4096, {"bm": 128, "bn": 128, "bk": 64}

    def product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        product_kernel[n // 128, n // 128](a, b, c, n, n, n, **tile)
        return c

    def ended(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
        ended_by_a_value[n // 128, n // 128](a, b, c, large.sum(0), n, **tile)
        return c

    for dtype in (BF16, FP32):
        peak = "tf32" if dtype == FP32 else "bf16"
        yield Case(f"tl.dot {dtype}", product, some(n, n, dtype=dtype, count=3), 2.0 * n**3, peak)
    yield Case("tl.dot up to a value", ended, several(some(n, n, count=3), some(M, 64, dtype=FP32)), reads=False)


class Net(torch.nn.Module):
    """Runs the cases in its forward, so that they are in the step."""

    def __init__(self, cases: list[Case]) -> None:
        super().__init__()
        self.cases, self.weight = cases, torch.nn.Parameter(torch.ones(8))
        self.facts: dict[str, dict[str, Any]] = {}

    def forward(self) -> torch.Tensor:
        for case in self.cases:
            self.facts[case.name] = run(case)
        return self.weight.sum()


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    cases = [*moving(), *of_images_and_rows(), *multiplying(), *convolving(), *in_triton(), *solving()]
    if sys.argv[2:] == ["few"]:
        cases = [case for number, case in enumerate(cases) if number % 8 == 0 or _ONCE_WRONG.match(case.name)]
    model = Net(cases).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    with open(sys.argv[1], "w") as file:
        json.dump(model.facts, file)


def run(case: Case) -> dict[str, Any]:
    """Run a case in its range. Return the least that it must do, or why it did not run."""
    tensors = case.made()
    try:
        with record_function(f"case:{case.name}"):
            result = case.run(*tensors)
        facts = {"flops": case.flops, "dtype": case.dtype, "bytes": nbytes(result) + case.reads * nbytes(tensors)}
        if case.backward:
            floats = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point()]
            result = case.run(*tensors)
            grad = torch.empty_like(result)
            with record_function(f"case:{case.name} backward"):
                result.backward(grad)
            facts["backward"] = {"flops": case.flops * case.backward, "dtype": case.dtype, "bytes": nbytes(floats)}
        return facts
    except (RuntimeError, NotImplementedError) as error:
        return {"skipped": str(error)[:200]}


if __name__ == "__main__":
    main()
