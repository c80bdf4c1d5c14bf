"""The demand of Inductor's Triton templates, from their source and arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fakedist.gpu.demand.operation_demand import Demand
from fakedist.gpu.demand.triton_demand import template_of
from fakedist.gpu.demand.work_shapes import AttentionShape, ProductShape

PRODUCT = """
def triton_tem_fused_mm_0(arg_A, arg_B, out_ptr0, ks0):
    EVEN_K : tl.constexpr = True
    BLOCK_M : tl.constexpr = 128
    M = 2048
    N = 768
    K = ks0
    if M * N == 0:
        return
    stride_am = 256
"""
CONVOLUTION = """
    KERNEL_H : tl.constexpr = 3
    KERNEL_W : tl.constexpr = 5
    GROUPS : tl.constexpr = 2
    BATCH = 4
    IN_C = 16
    IN_H = 32
    IN_W = 32
    OUT_C = 8
    OUT_H = 30
    OUT_W = 28
    GROUP_IN_C = IN_C // GROUPS
"""
FLEX = """
    QK_HEAD_DIM : tl.constexpr = 64
    V_HEAD_DIM : tl.constexpr = 32
    SPARSE_KV_BLOCK_SIZE : tl.constexpr = 128
    ZQ = 2
    HQ = 8
    Q_LEN = 1024
    KV_LEN = 1024
"""


def demand_of(source: str, arguments: dict[str, Any], *, known: bool = True) -> Demand:
    template = template_of("triton_tem_fused_x_0", source)
    assert template is not None
    return template.demand(arguments, 100.0, lambda tensor: tensor if known else None)


def mask(**more: torch.Tensor) -> dict[str, Any]:
    """Of 8 blocks of keys each of 8 rows of queries meets 1 in part and 2 in full."""
    counts = {"arg_KV_NUM_BLKS": torch.ones(1, 1, 8, dtype=torch.int32)}
    counts["arg_FULL_KV_NUM_BLKS"] = torch.full((1, 1, 8), 2, dtype=torch.int32)
    return {"arg_Q": torch.empty(2, 8, 1024, 64, dtype=torch.bfloat16), **counts, **more}


def test_a_product_is_counted_by_its_sizes_also_those_that_are_arguments() -> None:
    a = torch.empty(2048, 256, dtype=torch.float8_e4m3fn)
    demand = demand_of(PRODUCT, {"arg_A": a, "ks0": 256})
    assert (demand.flops, demand.moved_bytes, demand.dtype) == (2.0 * 2048 * 768 * 256, 100.0, "fp8")
    assert demand.product == ProductShape(2048, 768, 256, a_bytes=1, b_bytes=1, d_bytes=1)
    batched = demand_of(PRODUCT + "    BATCH = 6\n", {"arg_A": a, "ks0": 256})
    assert batched.flops == 6 * demand.flops
    twice = demand_of(PRODUCT.replace("    K = ks0", "    K1 = 256"), {"arg_A": a, "arg_D": a})
    assert twice.flops == 2 * demand.flops


def test_a_convolution_is_counted_by_its_output_and_its_groups_input() -> None:
    demand = demand_of(CONVOLUTION, {"arg_X": torch.empty(1)})
    assert demand.flops == 2.0 * (4 * 8 * 30 * 28) * (16 / 2) * (3 * 5)
    assert demand.product == ProductShape(4 * 30 * 28, 8, 8 * 3 * 5, a_bytes=4, b_bytes=4, d_bytes=4)


def test_flex_attention_meets_the_blocks_of_its_mask() -> None:
    forward = demand_of(FLEX, mask())
    assert forward.flops == 2.0 * (2 * 8 * 1024) * (3 * 128) * (64 + 32)
    assert forward.attention == AttentionShape("forward", "flex", 2, 8, 8, 1024, 1024, 64, 32, window=384)
    assert not forward.is_dense
    backward = demand_of(FLEX + "    HKV = 2\n", mask(arg_DO=torch.empty(1)))
    assert backward.flops == 2.0 * (2 * 8 * 1024) * (3 * 128) * (3 * 64 + 2 * 32)
    assert backward.attention is not None
    assert (backward.attention.direction, backward.attention.kv_heads) == ("backward", 2)


def test_a_mask_whose_values_are_not_known_is_taken_for_dense_and_counted() -> None:
    demand = demand_of(FLEX, mask(), known=False)
    assert (demand.flops, demand.is_dense) == (2.0 * (2 * 8 * 1024) * 1024 * (64 + 32), True)


def test_documents_of_several_lengths_cost_their_mean() -> None:
    counts = {"arg_KV_NUM_BLKS": torch.ones(1, 1, 8, dtype=torch.int32)}
    counts["arg_FULL_KV_NUM_BLKS"] = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0], dtype=torch.int32).reshape(1, 1, 8)
    demand = demand_of(FLEX, mask(**counts))
    assert demand.attention is not None
    met = 128 * 23 / 8
    assert (demand.attention.causal, demand.attention.window) == (False, met)
    assert demand.flops == 2.0 * (2 * 8 * 1024) * met * (64 + 32)


def test_a_causal_mask_is_known_by_its_blocks() -> None:
    counts = {"arg_KV_NUM_BLKS": torch.ones(1, 1, 8, dtype=torch.int32)}
    counts["arg_FULL_KV_NUM_BLKS"] = torch.arange(8, dtype=torch.int32).reshape(1, 1, 8)
    demand = demand_of(FLEX, mask(**counts))
    assert demand.attention is not None
    assert (demand.attention.causal, demand.attention.window) == (True, 0)
    assert demand.flops == 2.0 * (2 * 8 * 1024) * (4.5 * 128) * (64 + 32)


@pytest.mark.parametrize(
    "source", [PRODUCT.replace("K = ks0", "K = ks9"), PRODUCT + "    G = 8\n", "    BLOCK_M = 64\n"]
)
def test_what_the_sizes_do_not_tell_is_not_known(source: str) -> None:
    demand = demand_of(source, {"arg_A": torch.empty(1)})
    assert math.isnan(demand.flops)


def test_other_kernels_are_no_templates() -> None:
    assert template_of("triton_poi_fused_add_0", PRODUCT) is None
    assert template_of("triton_tem_fused_mm_0", "") is None
