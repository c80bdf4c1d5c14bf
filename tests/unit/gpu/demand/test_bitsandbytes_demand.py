"""bitsandbytes' operations by the schemas of release 0.50, on tensors without memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fakedist.gpu.demand.operation_demand import Demand, DemandCounter

SCHEMAS = (
    "dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype) -> Tensor",
    "gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str type, Tensor? bias=None) -> Tensor",
    "int8_vectorwise_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor?)",
    "int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats) -> Tensor",
    "optimizer_update_8bit_blockwise(str name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) s1, Tensor(a3!)? s2) -> ()",
    "something_new(Tensor A) -> Tensor",
)
BF16, INT8 = torch.bfloat16, torch.int8


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[torch.library.Library]:
    """The operators, without kernels."""
    made_here = torch.library.Library("bitsandbytes", "FRAGMENT")
    for schema in SCHEMAS:
        made_here.define(schema)
    yield made_here
    made_here._destroy()


def made(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def demand_of(name: str, *args: Any, result: Any) -> Demand:
    return DemandCounter(getattr(torch.ops.bitsandbytes, name).default).demand(args, {}, result)


def test_decoding_moves_the_packed_and_the_decoded_matrix_and_its_least_is_known() -> None:
    packed, scales, out = made(64 * 32, 1, dtype=torch.uint8), made(64, dtype=torch.float32), made(64, 64)
    demand = demand_of("dequantize_4bit", packed, scales, 64, "nf4", [64, 64], BF16, result=out)
    assert (demand.flops, demand.is_bounded) == (0.0, True)
    assert demand.moved_bytes == 64 * 32 + 64 * 4 + 64 * 64 * 2


def test_a_product_with_four_bits_is_one_kernel_or_decodes_the_matrix_first() -> None:
    rows, packed, scales = made(8, 128), made(64 * 64, 1, dtype=torch.uint8), made(128, dtype=torch.float32)
    demand = demand_of("gemm_4bit", rows, packed, [64, 128], scales, 64, "nf4", result=made(8, 64))
    assert (demand.flops, demand.is_bounded) == (2.0 * 8 * 64 * 128, True)
    decoded = 64 * 128 * 2 + 64 * 64 + 128 * 4
    assert [(part.words[0], part.moved_bytes) for part in demand.parts] == [
        ("kDequantizeBlockwise", decoded),
        ("elementwise_kernel", 2 * 128 * 4),
    ]


def test_rows_are_encoded_in_one_pass_and_a_product_of_integers_is_scaled_in_another() -> None:
    rows, encoded, stats = made(8, 128), made(8, 128, dtype=INT8), made(8, dtype=torch.float32)
    encoding = demand_of("int8_vectorwise_quant", rows, 6.0, result=(encoded, stats, None))
    assert [part.moved_bytes for part in encoding.parts] == [8 * 128 * 2 + 8 * 128]
    product = demand_of("int8_scaled_mm", encoded, made(64, 128, dtype=INT8), stats, stats, result=made(8, 64))
    assert [part.moved_bytes for part in product.parts] == [8 * 64 * (4 + 2)]


def test_an_optimizer_reads_the_gradient_and_changes_the_rest_paged_states_too() -> None:
    gradient, parameter = made(1000, dtype=torch.float32), made(1000, dtype=torch.float32)
    first, second = made(1000, dtype=torch.uint8), torch.empty(1000, dtype=torch.uint8)
    update = ("optimizer_update_8bit_blockwise", "adam", gradient, parameter, first, second)
    on_device = 4000 + 2 * 4000 + 2 * 1000
    assert demand_of(*update, result=None).moved_bytes == on_device
    second.is_paged = True  # type: ignore[attr-defined]
    assert demand_of(*update, result=None).moved_bytes == on_device + 2 * 1000


def test_what_a_newer_release_adds_is_unknown() -> None:
    demand = demand_of("something_new", made(8), result=made(8))
    assert demand.flops != demand.flops
