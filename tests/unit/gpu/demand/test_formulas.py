"""FLOPs, dependent steps and kernels of single operations on tensors without memory; bitsandbytes' of 0.50."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fakedist.gpu.demand.formulas import KernelPart
from fakedist.gpu.demand.operation_demand import Demand, DemandCounter

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32


def made(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def demand_of(func: Any, *args: Any, result: Any) -> Demand:
    return DemandCounter(func).demand(args, {}, result)


def convolution(transposed: bool = False, groups: int = 1, weight: tuple[int, ...] = (64, 32, 3, 3)) -> Demand:
    settings = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    return demand_of(aten.convolution.default, made(8, 32, 28, 28), made(*weight), None, *settings,
                     result=made(8, 64, 28, 28))  # fmt: skip


def gradients(groups: int, weight: tuple[int, ...], mask: tuple[bool, bool, bool] = (True, True, True)) -> Demand:
    data, grad = made(8, 32, 28, 28), made(8, 64, 28, 28)
    results = (made(8, 32, 28, 28), made(*weight), made(64))
    result = tuple(each if wanted else None for each, wanted in zip(results, mask, strict=True))
    settings = ([64], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, list(mask))
    return demand_of(aten.convolution_backward.default, grad, data, made(*weight), *settings, result=result)


def test_each_position_of_a_convolutions_result_meets_its_groups_weights() -> None:
    flops = 2.0 * 8 * 28 * 28 * 64 * 32 * 9
    assert convolution().flops == flops
    assert convolution(groups=4, weight=(64, 8, 3, 3)).flops == flops / 4
    assert convolution(transposed=True, weight=(32, 64, 3, 3)).flops == flops


def test_the_gradients_of_a_convolution_take_a_forward_each_and_read_that_of_the_result() -> None:
    flops = 2.0 * 8 * 28 * 28 * 64 * 32 * 9
    data, grad, weight = 8 * 32 * 28 * 28 * 2, 8 * 64 * 28 * 28 * 2, 64 * 32 * 9 * 2
    both = gradients(1, (64, 32, 3, 3))
    assert (both.flops, gradients(4, (64, 8, 3, 3)).flops) == (2 * flops, 2 * flops / 4)
    assert both.moved_bytes == 2 * grad + 2 * data + 2 * weight + 64 * 2
    assert {part.words: part.moved_bytes for part in both.parts} == {("reduce_kernel",): grad + 64 * 2}
    one = gradients(1, (64, 32, 3, 3), (False, True, False))
    assert (one.flops, one.moved_bytes, one.parts) == (flops, grad + data + 2 * weight, ())


def test_a_depthwise_convolution_moves_its_tensors_and_runs_without_tensor_cores() -> None:
    data = made(8, 32, 28, 28)
    args = (data, made(32, 1, 7, 7), None, [1, 1], [3, 3], [1, 1], False, [0, 0], 32)
    demand = demand_of(aten.convolution.default, *args, result=made(8, 32, 28, 28))
    assert demand.flops == 2.0 * 8 * 28 * 28 * 32 * 49
    assert demand.moved_bytes == 2 * data.nbytes + 32 * 49 * 2
    assert (demand.dtype, demand.is_bounded) == ("fp32", True)


def test_each_gradient_of_a_depthwise_convolution_reads_that_of_the_result_and_does_half() -> None:
    data, weight = made(8, 32, 28, 28), made(32, 1, 7, 7)
    settings = ([32], [1, 1], [3, 3], [1, 1], False, [0, 0], 32, [True, True, False])

    def backward(grad: torch.Tensor, result: tuple[torch.Tensor | None, ...]) -> tuple[KernelPart, ...]:
        return demand_of(aten.convolution_backward.default, grad, data, weight, *settings, result=result).parts

    of_data, of_weight = backward(made(8, 32, 28, 28), (data, weight, None))
    assert of_data == (("depthwise2d_backward", "backward_input"), 2 * data.nbytes + weight.nbytes, 0.5)
    assert of_weight == (("depthwise2d_grad_weight", "backward_weight"), 2 * data.nbytes + weight.nbytes, 0.5)
    expanded = made(1).expand(8, 32, 28, 28)
    assert backward(expanded, (None, weight, None)) == (
        of_weight._replace(arithmetic=1.0),
        KernelPart(("elementwise_kernel",), data.nbytes + 2.0),
    )


@pytest.fixture
def precisions() -> Iterator[None]:
    kept = torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision
    yield
    torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision = kept


def test_convolutions_and_recurrent_networks_have_precisions_of_their_own(precisions: None) -> None:
    def types() -> tuple[str, str]:
        image, kernel = made(2, 3, 8, 8, dtype=FP32), made(4, 3, 3, 3, dtype=FP32)
        args = (image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return demand_of(aten.convolution.default, *args, result=made(2, 4, 8, 8, dtype=FP32)).dtype, lstm(FP32).dtype

    assert types() == ("tf32", "tf32")
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # torch.backends.cudnn.allow_tf32 raises an error from now on
    assert types() == ("fp32", "tf32")
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    assert types() == ("fp32", "fp32")


def lstm(
    dtype: torch.dtype = BF16, func: Any = aten._cudnn_rnn.default, batch_sizes: list[int] | None = None
) -> Demand:
    """Two layers of 256 on 16 sequences of 100 tokens of 128."""
    data = made(16, 100, 128, dtype=dtype) if batch_sizes is None else made(sum(batch_sizes), 128, dtype=dtype)
    shapes = ((1024, 128), (1024, 256), (1024,), (1024,), (1024, 256), (1024, 256), (1024,), (1024,))
    weights = [made(*shape, dtype=dtype) for shape in shapes]
    state, out = made(2, 16, 256, dtype=dtype), made(16, 100, 256, dtype=dtype)
    settings = (2, 256, 0, 2, True, 0.0, True, False, batch_sizes or [], None)
    if "backward" in str(func):
        args = (data, weights, 4, made(1), state, state, out, out, None, None, *settings, made(1), [True] * 4)
        return demand_of(func, *args, result=(data, state, state, weights))
    return demand_of(func, data, weights, 4, made(1), state, state, *settings, result=(out, state, state, state, state))


def test_a_recurrent_network_multiplies_each_token_and_waits_for_each_step_of_each_layer() -> None:
    parameters = 1024 * (128 + 3 * 256)
    forward, backward = lstm(), lstm(func=aten._cudnn_rnn_backward.default)
    assert (forward.flops, forward.steps) == (2.0 * 1600 * parameters, 200)
    assert (backward.flops, backward.steps) == (4.0 * 1600 * parameters, 200)
    packed = lstm(batch_sizes=[16, 8, 4])
    assert (packed.flops, packed.steps) == (2.0 * 28 * parameters, 6)


def test_distances_take_three_operations_for_each_pair_and_dimension() -> None:
    rows, others, out = made(64, 16, dtype=FP32), made(32, 16, dtype=FP32), made(64, 32, dtype=FP32)
    demand = demand_of(aten._cdist_forward.default, rows, others, 1.0, None, result=out)
    assert (demand.flops, demand.dtype, demand.is_bounded) == (3.0 * 64 * 32 * 16, "fp32", True)
    back = demand_of(aten._cdist_backward.default, out, rows, others, 1.0, out, result=rows)
    assert back.flops == 4.0 * 64 * 32 * 16
    pairs = made(64 * 63 // 2, dtype=FP32)
    assert demand_of(aten._pdist_forward.default, rows, 1.0, result=pairs).flops == 3.0 * 64 * 63 / 2 * 16


def test_packed_and_sparse_products_and_factorisations_have_their_arithmetic() -> None:
    scales = made(32, 64, 2)
    packed = (made(16, 128), made(8, 8, 32, 4), 32, scales)
    four = demand_of(aten._weight_int4pack_mm.default, *packed, result=made(16, 64))
    assert (four.flops, four.is_bounded) == (2.0 * 16 * 64 * 128, True)
    kept, dense = made(64, 64), made(128, 32)
    sparse = demand_of(aten._sparse_semi_structured_mm.default, kept, kept, dense, result=made(64, 32))
    assert sparse.flops == 1.0 * 64 * 32 * 128, "half of 2 m n k"
    matrix = made(4, 32, 32, dtype=FP32)
    cholesky = demand_of(aten.linalg_cholesky_ex.default, matrix, result=(matrix, made(4)))
    assert (cholesky.flops, cholesky.steps) == (pytest.approx(4 * 32**3 / 3), 4)


def test_columns_of_factorisations_take_as_many_steps_as_published_times_say() -> None:
    """8 us a step. Cholesky of 2048 columns takes 1.95 ms on H100, QR of 32 0.19 ms, eigenvectors of 100 1.8 ms."""
    square = made(2048, 2048, dtype=FP32)
    names = {"linalg_cholesky_ex": 256, "linalg_qr": 1024, "_linalg_eigh": 4096, "_linalg_svd": 65536}
    for name, steps in (names | {"linalg_lstsq": 4096}).items():
        more = (square,) if name == "linalg_lstsq" else ()
        assert demand_of(getattr(aten, name).default, square, *more, result=(square, square)).steps == steps, name


def test_a_pseudo_inverse_takes_its_singular_vectors_or_eigenvectors() -> None:
    square = made(64, 64, dtype=FP32)
    by_svd, by_eigh = (
        demand_of(aten.linalg_pinv.atol_rtol_float, square, 0.0, 0.0, hermitian, result=square)
        for hermitian in (False, True)
    )
    assert (by_svd.flops, by_eigh.flops) == (pytest.approx(8 * 64**3 / 3), pytest.approx(4 * 64**3 / 3))
    assert (by_svd.steps, by_eigh.steps) == (32 * 64, 2 * 64)


def test_a_complex_product_has_four_times_the_arithmetic() -> None:
    a = made(8, 16, dtype=torch.complex64)
    demand = demand_of(aten.mm.default, a, made(16, 4, dtype=torch.complex64), result=made(8, 4, dtype=torch.complex64))
    assert (demand.flops, demand.dtype) == (8.0 * 8 * 16 * 4, "fp32")


def test_a_formula_that_does_not_know_the_arguments_leaves_the_arithmetic_unknown() -> None:
    assert math.isnan(demand_of(aten._cdist_forward.default, None, None, 1.0, None, result=made(4)).flops)


def test_an_operation_of_others_has_the_formula_that_its_author_registered() -> None:
    from torch.utils.flop_counter import flop_registry

    library = torch.library.Library("fakedist_test_formula", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    func = torch.ops.fakedist_test_formula.twice
    rows = made(10)
    assert math.isnan(demand_of(func.default, rows, result=rows).flops)
    flop_registry[func] = lambda x, out_val=None, **_: 7 * x.numel()
    try:
        assert demand_of(func.default, rows, result=rows).flops == 70
    finally:
        del flop_registry[func]


def test_a_padding_fills_its_result_and_copies_what_it_keeps() -> None:
    data, out = made(2, 8, 16, 16), made(2, 8, 22, 12)
    demand = demand_of(aten.constant_pad_nd.default, data, [-2, -2, 3, 3], 0.0, result=out)
    kept = 2 * 8 * 16 * 12 * 2
    assert {part.words[0]: part.moved_bytes for part in demand.parts} == {"FillFunctor": out.nbytes, "copy": 2 * kept}


@pytest.mark.parametrize("name", ["reflection_pad2d", "replication_pad2d", "avg_pool2d"])
def test_the_gradient_of_a_padding_reads_no_input_and_of_a_mirrored_one_is_added_to_zeros(name: str) -> None:
    data, grad = made(2, 8, 16, 16), made(2, 8, 22, 22)
    demand = demand_of(getattr(aten, f"{name}_backward").default, grad, data, [3, 3, 3, 3], result=data)
    moved = grad.nbytes + data.nbytes
    assert demand.moved_bytes == moved
    mirrored = (KernelPart(("reflection_pad", "replication_pad"), moved),)
    assert demand.parts == (() if name == "avg_pool2d" else mirrored)


def test_packed_sequences_of_varlen_attention_count_one_by_one() -> None:
    from fakedist.gpu.demand.work_shapes import AttentionOperator
    from fakedist.gpu.values.operators import Operator

    importlib.import_module("torch.nn.attention.varlen")  # registers the operation

    func = torch.ops.torch_attn._varlen_attn.default
    rows = made(1024, 16, 128)
    names = [argument.name for argument in func._schema.arguments]

    def flops(ends: list[int], *, causal: bool) -> float:
        offsets = torch.tensor(ends, dtype=torch.int32)
        given = {"query": rows, "key": rows, "value": rows, "cu_seq_q": offsets, "cu_seq_k": offsets, "max_q": 1024}
        given |= {"max_k": 1024, "is_causal": causal, "backend": 3}
        read = AttentionOperator(Operator(func), lambda tensor: tensor)
        found = read.demand((), {name: value for name, value in given.items() if name in names})
        assert found is not None
        return found.flops

    assert AttentionOperator.reads(Operator(func))
    whole = 4.0 * 1024 * 1024 * 16 * 128
    assert flops([0, 1024], causal=False) == whole
    assert flops([0, 256, 512, 768, 1024], causal=False) == whole / 4
    assert flops([0, 1024], causal=True) == pytest.approx(whole / 2, rel=0.01)


SCHEMAS = (
    "dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype) -> Tensor",
    "gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str type, Tensor? bias=None) -> Tensor",
    "int8_vectorwise_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor?)",
    "int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats) -> Tensor",
    "optimizer_update_8bit_blockwise(str name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) s1, Tensor(a3!)? s2) -> ()",
    "something_new(Tensor A) -> Tensor",
)
INT8, BNB = torch.int8, torch.ops.bitsandbytes


@pytest.fixture(scope="module", autouse=True)
def bitsandbytes() -> Iterator[torch.library.Library]:
    made_here = torch.library.Library("bitsandbytes", "FRAGMENT")
    for schema in SCHEMAS:
        made_here.define(schema)
    yield made_here
    made_here._destroy()


def test_decoding_moves_the_packed_and_the_decoded_matrix_and_its_least_is_known() -> None:
    packed, scales, out = made(64 * 32, 1, dtype=torch.uint8), made(64, dtype=torch.float32), made(64, 64)
    demand = demand_of(BNB.dequantize_4bit.default, packed, scales, 64, "nf4", [64, 64], BF16, result=out)
    assert (demand.flops, demand.is_bounded) == (0.0, True)
    assert demand.moved_bytes == 64 * 32 + 64 * 4 + 64 * 64 * 2
    unknown = demand_of(BNB.something_new.default, made(8), result=made(8))  # of a newer release
    assert math.isnan(unknown.flops)


def test_a_product_with_four_bits_is_one_kernel_or_decodes_the_matrix_first() -> None:
    rows, packed, scales = made(8, 128), made(64 * 64, 1, dtype=torch.uint8), made(128, dtype=torch.float32)
    demand = demand_of(BNB.gemm_4bit.default, rows, packed, [64, 128], scales, 64, "nf4", result=made(8, 64))
    assert (demand.flops, demand.is_bounded) == (2.0 * 8 * 64 * 128, True)
    decoded = 64 * 128 * 2 + 64 * 64 + 128 * 4
    assert [(part.words[0], part.moved_bytes) for part in demand.parts] == [
        ("kDequantizeBlockwise", decoded),
        ("elementwise_kernel", 2 * 128 * 4),
    ]


def test_rows_are_encoded_in_one_pass_and_a_product_of_integers_is_scaled_in_another() -> None:
    rows, encoded, stats = made(8, 128), made(8, 128, dtype=INT8), made(8, dtype=torch.float32)
    encoding = demand_of(BNB.int8_vectorwise_quant.default, rows, 6.0, result=(encoded, stats, None))
    assert [part.moved_bytes for part in encoding.parts] == [8 * 128 * 2 + 8 * 128]
    weight = made(64, 128, dtype=INT8)
    product = demand_of(BNB.int8_scaled_mm.default, encoded, weight, stats, stats, result=made(8, 64))
    assert [part.moved_bytes for part in product.parts] == [8 * 64 * (4 + 2)]


def test_an_optimizer_reads_the_gradient_and_changes_the_rest_paged_states_too() -> None:
    gradient, parameter = made(1000, dtype=torch.float32), made(1000, dtype=torch.float32)
    first, second = made(1000, dtype=torch.uint8), torch.empty(1000, dtype=torch.uint8)
    update = (BNB.optimizer_update_8bit_blockwise.default, "adam", gradient, parameter, first, second)
    on_device = 4000 + 2 * 4000 + 2 * 1000
    assert demand_of(*update, result=None).moved_bytes == on_device
    second.is_paged = True  # type: ignore[attr-defined]
    assert demand_of(*update, result=None).moved_bytes == on_device + 2 * 1000
