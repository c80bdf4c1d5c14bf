"""The demand of functions of Transformer Engine, from calls with the signatures of its extension, version 2.20."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest
import torch

from fakedist.gpu.demand import extension_demand, operation_demand
from fakedist.gpu.demand.extension_demand import extension_demand as demand_of_call
from fakedist.gpu.demand.extension_demand import watched_calls
from fakedist.gpu.demand.operation_demand import Demand
from fakedist.gpu.demand.work_shapes import AttentionShape, ProductShape

TOKENS, HIDDEN, INNER = 64, 128, 256


class Quantized:
    """As a ``Float8BlockwiseQTensorStorage``: no tensor, but with two forms of the data and their scales."""

    def __init__(self, rows: int, columns: int, *, by_columns: bool = True) -> None:
        self._rowwise_data = torch.zeros(rows, columns, dtype=torch.uint8)
        self._columnwise_data = torch.zeros(columns, rows, dtype=torch.uint8) if by_columns else None
        self._rowwise_scale_inv = torch.zeros(rows, columns // 128)
        self._columnwise_scale_inv = torch.zeros(columns, max(rows // 128, 1)) if by_columns else None
        self._shape = (rows, columns)

    def size(self) -> tuple[int, int]:
        return self._shape


class Named:
    """As a member of an enumeration of the extension."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture(autouse=True)
def _host_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (operation_demand, extension_demand):
        monkeypatch.setattr(module, "memory_bytes", lambda tensor: tensor.nbytes)


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def demand_of(name: str, *args: Any, result: Any = None, known: Any = None, **kwargs: Any) -> Demand:
    return demand_of_call(name, args, kwargs, result, known or (lambda tensor: None))


def test_an_activation_reads_its_input_and_writes_what_it_returns() -> None:
    demand = demand_of("swiglu", made(TOKENS, 2 * INNER), None, result=made(TOKENS, INNER))
    assert (demand.flops, demand.moved_bytes) == (0.0, TOKENS * 3 * INNER * 2)
    fused = demand_of("swiglu", made(TOKENS, 2 * INNER), None, result=Quantized(TOKENS, INNER))
    data, scales = 2 * TOKENS * INNER, 4 * (TOKENS * INNER // 128 + INNER)
    assert fused.moved_bytes == TOKENS * 2 * INNER * 2 + data + scales


def test_a_norm_has_the_length_of_its_rows() -> None:
    x, weight, statistics = made(TOKENS, HIDDEN), made(HIDDEN), made(TOKENS, dtype=torch.float32)
    result = [made(TOKENS, HIDDEN), None, statistics]
    forward = demand_of("rmsnorm_fwd", x, weight, 1e-5, None, None, 5, 0, False, result=result)
    assert forward.width == HIDDEN
    assert forward.moved_bytes == 2 * TOKENS * HIDDEN * 2 + HIDDEN * 2 + TOKENS * 4
    gradients = [made(TOKENS, HIDDEN), made(HIDDEN)]
    backward = demand_of("rmsnorm_bwd", x, made(TOKENS, HIDDEN), statistics, weight, 0, False, result=gradients)
    assert (backward.width, backward.parts[0].words) == (HIDDEN, ("finalize",))


def test_what_is_only_written_is_not_read() -> None:
    x, out = made(TOKENS, HIDDEN), made(TOKENS, HIDDEN)
    assert demand_of("fused_multi_row_padding", x, out, [TOKENS], [TOKENS]).moved_bytes == 2 * x.nbytes
    assert demand_of("swap_first_dims", x, out=out, result=out).moved_bytes == 2 * x.nbytes
    changed = demand_of("scaled_softmax_backward", x, out, 1.0, result=x)
    assert (changed.moved_bytes, changed.width) == (3 * x.nbytes, HIDDEN)


def test_a_conversion_to_eight_bits_has_the_sizes_of_its_matrix() -> None:
    x = made(4, TOKENS // 4, HIDDEN)
    demand = demand_of("quantize", x, None, None, None, result=Quantized(TOKENS, HIDDEN, by_columns=False))
    assert (demand.quantized, demand.dtype) == ((TOKENS, HIDDEN), "fp8")
    assert demand.moved_bytes == TOKENS * HIDDEN * 3 + TOKENS * 4
    assert (demand.parts[0].words, demand.parts[0].moved_bytes) == (("amax",), x.nbytes)
    several = demand_of("multi_tensor_quantize", [x, x], [None, None], result=[Quantized(TOKENS, HIDDEN)] * 2)
    assert several.quantized == (2 * TOKENS, HIDDEN)


def test_an_optimizer_reads_four_lists_and_writes_three() -> None:
    lists = [[made(1000, dtype=torch.float32), made(500, dtype=torch.float32)] for _ in range(4)]
    demand = demand_of("multi_tensor_adam", 65536, made(1), lists, 1e-3, 0.9, 0.99, 1e-8, 1, 1, 1, 0.1)
    assert demand.moved_bytes == 7 * 1500 * 4
    assert demand_of("multi_tensor_scale", 65536, made(1), lists[:2], 2.0).moved_bytes == 2 * 1500 * 4
    assert demand_of("multi_tensor_scale", 65536, made(1), [lists[0], lists[0]], 2.0).moved_bytes == 2 * 1500 * 4
    norms = demand_of("multi_tensor_l2norm", 65536, made(1), lists[:1], False, result=(made(1), made(1)))
    assert norms.moved_bytes == 1500 * 4 + 2 * 2


def attended(
    layout: str, mask: str, q: Any, k: Any, *, window: Any = (-1, -1), backward: bool = False, known: Any = None,
    dropout: float = 0.0, deterministic: bool = False,
) -> Demand:  # fmt: skip
    ends, v = made(3, dtype=torch.int32), k
    before = (2048, 2048, True, 0.1, dropout, True) if not backward else (2048, 2048, 0.1, dropout, True)
    formats = [Named("NVTE_SBHD")] * (2 if not backward else 2 + 3)
    kinds = (Named(f"NVTE_{name}") for name in ("NO_BIAS", mask, "VANILLA_SOFTMAX"))
    middle = (Named(f"NVTE_{layout}"), *formats, *kinds)
    after = (window, False) if not backward else (window, False, deterministic)
    name = "fused_attn_bwd" if backward else "fused_attn_fwd"
    return demand_of(name, *before, *middle, *after, ends, ends, q, k, v, torch.bfloat16, result=[q], known=known)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("layout", "query", "key"),
    [
        ("BSHD_BSHD_BSHD", (2, 1024, 16, 128), (2, 512, 4, 128)),
        ("SBHD_SB2HD", (1024, 2, 16, 128), (512, 2, 4, 128)),
        ("SBHD_BSHD_BSHD", (1024, 2, 16, 128), (2, 512, 4, 128)),
    ],
)
def test_fused_attention_has_its_sizes_in_each_layout(layout: str, query: Any, key: Any, backward: bool) -> None:
    demand = attended(layout, "NO_MASK", made(*query), made(*key), backward=backward)
    direction = "backward" if backward else "forward"
    assert demand.attention == AttentionShape(direction, "cudnn", 2, 16, 4, 1024, 512, 128, 128)
    assert demand.flops == (5 if backward else 2) * 2 * 2 * 16 * 1024 * 512 * 128


def test_fused_attention_of_an_older_version_has_its_sizes_too() -> None:
    """Version 2.4 passes fewer formats, and no side of the diagonal."""
    q, ends = made(2, 1024, 16, 128), made(3, dtype=torch.int32)
    kinds = (Named("NVTE_BSHD_BSHD_BSHD"), Named("NVTE_NO_BIAS"), Named("NVTE_CAUSAL_BOTTOM_RIGHT_MASK"))
    args = (1024, 1024, True, 0.1, 0.0, True, *kinds, [-1, 0], ends, ends, q, q, q, torch.bfloat16, None)
    found = demand_of("fused_attn_fwd", *args, result=[q]).attention
    assert found == AttentionShape("forward", "cudnn", 2, 16, 16, 1024, 1024, 128, 128, causal=True)
    assert math.isnan(demand_of("fused_attn_fwd", q, q, q, result=[q]).flops), "arguments that are not understood"


def test_fused_attention_has_dropout_and_its_backward_says_whether_it_is_deterministic() -> None:
    q = made(2, 1024, 16, 128)
    for backward in (False, True):
        plain = attended("BSHD_BSHD_BSHD", "NO_MASK", q, q, backward=backward).attention
        both = attended("BSHD_BSHD_BSHD", "NO_MASK", q, q, backward=backward, dropout=0.1, deterministic=True).attention
        assert plain is not None
        assert not plain.dropout
        assert not plain.deterministic
        assert both == plain._replace(dropout=True, deterministic=backward)


@pytest.mark.parametrize(
    ("window", "shape", "pairs"),
    [((-1, 0), (True, 0), 1024 * (1025 / 2)), ((127, 0), (True, 128), 128 * 129 / 2 + 896 * 128)],
)
def test_fused_attention_has_its_mask(window: Any, shape: tuple[bool, int], pairs: float) -> None:
    q = made(2, 1024, 16, 128)
    causal = attended("BS3HD", "CAUSAL_MASK", q, q, window=window)
    assert causal.attention is not None
    assert (causal.attention.causal, causal.attention.window) == shape
    assert causal.flops == 4 * 2 * 16 * pairs * 128


def test_packed_sequences_have_their_own_lengths_if_they_are_known() -> None:
    q = made(2048, 16, 128)
    ends = torch.tensor([0, 800, 2048], dtype=torch.int32)
    known = attended("THD_THD_THD", "PADDING_CAUSAL_MASK", q, q, known=lambda tensor: ends)
    assert known.flops == 4 * 16 * (800 * 801 / 2 + 1248 * 1249 / 2) * 128
    unknown = attended("T3HD", "PADDING_CAUSAL_MASK", q, q)
    assert unknown.flops == 4 * 16 * 2048 * (2049 / 2) * 128


@pytest.mark.parametrize(
    ("transposed", "a", "b", "shape"),
    [
        ((True, False), (INNER, HIDDEN), (TOKENS, HIDDEN), ProductShape(2 * TOKENS, INNER, HIDDEN, 1, 2, "TN")),
        ((False, False), (INNER, HIDDEN), (TOKENS, INNER), ProductShape(2 * TOKENS, HIDDEN, INNER, 1, 2, "NN")),
        ((False, True), (TOKENS, HIDDEN), (TOKENS, INNER), ProductShape(2 * INNER, HIDDEN, TOKENS, 1, 2, "NT")),
    ],
)
def test_a_grouped_product_has_its_groups_and_layout(transposed: Any, a: Any, b: Any, shape: ProductShape) -> None:
    first, second = ([made(*size), made(*size)] for size in (a, b))
    args = (first, transposed[0], second, transposed[1], None, 5, [TOKENS, TOKENS])
    demand = demand_of("te_general_grouped_gemm", *args)
    assert demand.product == shape._replace(a_bytes=2, b_bytes=2, d_bytes=2)
    assert demand.flops == 2 * 2 * TOKENS * HIDDEN * INNER
    one = types.SimpleNamespace(num_tensors=2, logical_shape=(2 * b[0], b[1]), rowwise_data=made(2 * b[0] * b[1]))
    grouped = demand_of("te_general_grouped_gemm_for_discrete_in", first, transposed[0], one, transposed[1], None)
    assert grouped.product == demand.product


def test_kernels_next_to_a_product_move_scales() -> None:
    weight, x = Quantized(INNER, HIDDEN), Quantized(TOKENS, HIDDEN)
    demand = demand_of("generic_gemm", weight, True, x, False, None)
    assert math.isnan(demand.flops), "the product has its own"
    assert demand.parts[0].words == ("swizzle",)
    in_place = demand_of("swizzle_scales_for_gemm_", x)
    assert in_place.moved_bytes == 2 * (x._rowwise_scale_inv.nbytes + x._columnwise_scale_inv.nbytes)


def scaled(chunk: int, noop: Any, lists: Any, scale: float) -> None:
    """A function of the extension."""


def failed(x: Any) -> None:
    raise RuntimeError("no GPU")


class Watching:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Demand | None]] = []

    def begins(self, operation: str) -> int:
        self.calls.append((operation, None))
        return len(self.calls) - 1

    def ended(self, tag: int, demand: Demand | None) -> None:
        self.calls[tag] = self.calls[tag][0], demand


class MultiTensorApply:
    """As Transformer Engine's, which optimizers give the functions that they hold."""

    def __call__(self, function: Any, noop: Any, lists: Any, *args: Any) -> Any:
        return function(65536, noop, lists, *args)


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Any:
    modules = {name: types.ModuleType(name) for name in ("transformer_engine_torch", "transformer_engine.held")}
    apply = "transformer_engine.pytorch.optimizers.multi_tensor_apply"
    modules[apply] = types.ModuleType(apply)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    made_extension: Any = modules["transformer_engine_torch"]
    made_extension.multi_tensor_scale, made_extension.swap_first_dims = scaled, failed
    made_extension.get_cudnn_version = lambda: 92600
    vars(modules["transformer_engine.held"])["imported"] = scaled
    vars(modules[apply])["MultiTensorApply"] = MultiTensorApply
    return made_extension


def test_calls_are_seen_wherever_the_function_is_held(extension: Any) -> None:
    watching, lists = Watching(), [[made(10)], [made(10)]]
    with watched_calls(watching.begins, watching.ended, lambda tensor: None):
        extension.multi_tensor_scale(1, None, lists, 1.0)
        vars(sys.modules["transformer_engine.held"])["imported"](1, None, lists, 1.0)
        MultiTensorApply()(scaled, None, lists, 1.0)
        assert extension.get_cudnn_version() == 92600
    assert [name for name, _ in watching.calls] == ["transformer_engine.multi_tensor_scale"] * 3
    assert all(demand is not None and demand.moved_bytes == 40 for _, demand in watching.calls)
    assert extension.multi_tensor_scale is scaled
    extension.multi_tensor_scale(1, None, lists, 1.0)
    MultiTensorApply()(scaled, None, lists, 1.0)
    assert len(watching.calls) == 3


def test_a_call_that_fails_or_has_other_arguments_has_no_demand(extension: Any) -> None:
    extension.quantize = lambda: None
    watching = Watching()
    with watched_calls(watching.begins, watching.ended, lambda tensor: None):
        with pytest.raises(RuntimeError, match="no GPU"):
            extension.swap_first_dims(made(1))
        extension.quantize()
    assert watching.calls == [("transformer_engine.swap_first_dims", None), ("transformer_engine.quantize", None)]
