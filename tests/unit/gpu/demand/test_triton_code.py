"""FLOPs of Triton's kernels from what Triton compiled."""

from __future__ import annotations

import pytest
import torch

from fakedist.gpu.demand.triton_code import TritonIr
from fakedist.gpu.demand.triton_demand import TritonKernel

#: As Triton 3.9 compiles a tiled product whose sizes are called rows, cols and depth, without the address arithmetic.
PRODUCT = """
module {
  tt.func public @k_rows(%a: !tt.ptr<bf16> {tt.divisibility = 16 : i32} loc("a"(#loc)), %rows: i32, %depth: i32) attributes {noinline = false} {
    %c64_i32 = arith.constant 64 : i32 loc(#loc1)
    %c0_i32 = arith.constant 0 : i32 loc(#loc1)
    %cst = arith.constant dense<0.000000e+00> : tensor<128x128xf32> loc(#loc2)
    %rm = tt.get_program_id x : i32 loc(#loc28)
    %acc = scf.for %k = %c0_i32 to %depth step %c64_i32 iter_args(%acc_7 = %cst) -> (tensor<128x128xf32>)  : i32 {
      %x = "tt.reduce"(%rm) <{axis = 1 : i32}> ({
      ^bb0(%p: f32 loc(unknown), %q: f32 loc(unknown)):
        %s = arith.addf %p, %q : f32 loc(#loc102)
        tt.reduce.return %s : f32 loc(#loc97)
      }) : (tensor<128x64xf32>) -> tensor<128xf32> loc(#loc97)
      %acc_30 = tt.dot %acc_19, %acc_29, %acc_7, inputPrecision = tf32 : tensor<128x64xbf16> * tensor<64x128xbf16> -> tensor<128x128xf32> loc(#loc42)
      scf.yield %acc_30 : tensor<128x128xf32> loc(#loc1)
    } loc(#loc31)
    tt.return loc(#loc27)
  } loc(#loc)
} loc(#loc)
"""  # noqa: E501
#: A loop that ends with the program's own rows, as in causal attention, with two products.
CAUSAL = """
module {
  tt.func public @attn(%q: !tt.ptr<bf16>, %N: i32) attributes {noinline = false} {
    %c0_i32 = arith.constant 0 : i32
    %c1_i32 = arith.constant 1 : i32
    %c64_i32 = arith.constant 64 : i32
    %c128_i32 = arith.constant 128 : i32
    %m = tt.get_program_id x : i32
    %hi = arith.addi %m, %c1_i32 : i32
    %hi_1 = arith.muli %hi, %c128_i32 : i32
    %li:2 = scf.for %s = %c0_i32 to %hi_1 step %c64_i32 iter_args(%acc = %a, %b = %c) -> (tensor<128x64xf32>, tensor<128xf32>)  : i32 {
      %S = tt.dot %Q, %K, %z, inputPrecision = tf32 : tensor<128x64xbf16> * tensor<64x64xbf16> -> tensor<128x64xf32>
      %O = tt.dot %P, %V, %acc, inputPrecision = tf32 : tensor<128x64xbf16> * tensor<64x64xbf16> -> tensor<128x64xf32>
      scf.yield %O, %b : tensor<128x64xf32>, tensor<128xf32>
    }
    tt.return
  }
}
"""  # noqa: E501
#: Returns early in programs beyond a number that is loaded; multiplies as often as its own row of a table says.
VARIABLE = """
module {
  tt.func public @grouped(%ends: !tt.ptr<i64>, %limit: !tt.ptr<i32>, %x: !tt.ptr<f32>) attributes {noinline = false} {
    %c0_i32 = arith.constant 0 : i32
    %c1_i32 = arith.constant 1 : i32
    %c16_i32 = arith.constant 16 : i32
    %p = tt.get_program_id x : i32
    %most = tt.load %limit : !tt.ptr<i32>
    %beyond = arith.cmpi sge, %p, %most : i32
    cf.cond_br %beyond, ^bb1, ^bb2
  ^bb1:  // pred: ^bb0
    tt.return
  ^bb2:  // pred: ^bb0
    %place = tt.addptr %ends, %p : !tt.ptr<i64>, i32
    %end = tt.load %place : !tt.ptr<i64>
    %end_0 = arith.trunci %end : i64 to i32
    scf.for %tile = %c0_i32 to %end_0 step %c1_i32  : i32 {
      %odd = arith.remsi %tile, %c16_i32 : i32
      %is = arith.cmpi eq, %odd, %c0_i32 : i32
      scf.if %is {
        %d = tt.dot %a, %b, %c : tensor<16x16xf32> * tensor<16x16xf32> -> tensor<16x16xf32>
      } else {
        %e = arith.addi %odd, %odd : i32
      }
    }
    tt.return
  }
}
"""
ON_META = torch.empty(4, device="meta")


def unknown(tensor: torch.Tensor) -> torch.Tensor | None:
    return None


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor


def test_a_loops_products_count_as_often_as_it_runs_in_each_program() -> None:
    ir = TritonIr(PRODUCT)
    assert ir.flops({"a": ON_META, "rows": 2048, "depth": 2048}, (16, 16), unknown) == (2.0 * 2048**3, "bf16")
    assert ir.flops({"a": ON_META, "rows": 2048, "depth": 100}, (1,), unknown) == (2 * 2.0 * 128 * 128 * 64, "bf16")
    assert ir.flops({"a": ON_META, "rows": 2048, "depth": 0}, (16,), unknown) == (0.0, "bf16")


def test_without_a_loops_end_they_are_not_known() -> None:
    assert TritonIr(PRODUCT).flops({"a": ON_META, "rows": 2048}, (16, 16), unknown) is None


def test_a_loop_may_end_earlier_in_some_programs() -> None:
    found = TritonIr(CAUSAL).flops({"q": ON_META, "N": 2048}, (16, 4), unknown)
    blocks = sum(2 * (program + 1) for program in range(16))
    assert found == (4 * blocks * 2 * 2.0 * 128 * 64 * 64, "bf16")


def test_of_a_large_grid_some_programs_stand_for_all() -> None:
    found = TritonIr(CAUSAL).flops({"q": ON_META, "N": 2048}, (16, 100_000), unknown)
    assert found is not None
    assert found[0] == pytest.approx(100_000 * 272 * 2 * 2.0 * 128 * 64 * 64, rel=0.02)


def test_what_tensors_of_known_values_hold_decides_loops_and_returns() -> None:
    ends, limit = torch.tensor([16, 33, 1, 64]), torch.tensor([3], dtype=torch.int32)
    arguments = {"ends": ends, "limit": limit, "x": ON_META}
    product = 2.0 * 16**3
    assert TritonIr(VARIABLE).flops(arguments, (4,), known) == ((1 + 3 + 1) * product, "fp32")
    assert TritonIr(VARIABLE).flops(arguments, (4,), unknown) is None
    assert TritonIr(VARIABLE).flops(arguments | {"limit": torch.tensor([9], dtype=torch.int32)}, (5,), known) is None, (
        "beyond the tensor"
    )


@pytest.mark.parametrize(
    ("ends", "found"),
    [
        ("tt.store %x, %zeros : tensor<16x!tt.ptr<f32>>\n    tt.return", 1.0),  # as Mamba's kernels of causal blocks
        ("%d = tt.dot %a, %b, %c : tensor<16x16xf32> * tensor<16x16xf32> -> tensor<16x16xf32>\n    tt.return", None),
        ("cf.br ^bb2", None),
    ],
)
def test_a_program_that_stores_before_it_returns_early_multiplies_nothing(ends: str, found: float | None) -> None:
    text = VARIABLE.replace("^bb1:  // pred: ^bb0\n    tt.return", f"^bb1:  // pred: ^bb0\n    {ends}")
    assert text != VARIABLE
    arguments = {"ends": torch.tensor([16, 99]), "limit": torch.tensor([1], dtype=torch.int32), "x": ON_META}
    counted = TritonIr(text).flops(arguments, (2,), known)
    assert counted == (None if found is None else (found * 2 * 16**3, "fp32"))


@pytest.mark.parametrize(
    ("line", "dtype", "factor"),
    [
        ("tt.dot %a, %b, %c, inputPrecision = tf32 : tensor<16x32xf32> * tensor<32x16xf32>", "tf32", 1),
        ("tt.dot %a, %b, %c : tensor<16x32xf32> * tensor<32x16xf32>", "fp32", 1),
        ("tt.dot %a, %b, %c, inputPrecision = tf32x3 : tensor<16x32xf32> * tensor<32x16xf32>", "tf32x3", 1),
        ("tt.dot %a, %b, %c : tensor<16x32xf8E4M3FN> * tensor<32x16xf8E4M3FN>", "fp8", 1),
        ("tt.dot %a, %b, %c : tensor<16x32xi8> * tensor<32x16xi8>", "int8", 1),
        ("tt.dot %a, %b, %c : tensor<4x16x32xf16> * tensor<4x32x16xf16>", "bf16", 4),
        ("tt.dot_scaled %a, %b, %c lhs = e2m1 rhs = e5m2 {} : tensor<16x32xi8> * tensor<64x16xi8>", "fp8", 2),
    ],
)  # fmt: skip
def test_products_have_the_type_and_the_precision_of_their_operands(line: str, dtype: str, factor: int) -> None:
    result = "tensor<4x16x16xf32>" if factor == 4 else "tensor<16x16xf32>"
    text = f"module {{\ntt.func public @k(%x: i32) {{\n%r = {line} -> {result}\ntt.return\n}}\n}}"
    assert TritonIr(text).flops({}, (1,), unknown) == (factor * 2.0 * 16 * 16 * 32, dtype)


def test_a_function_that_was_not_inlined_makes_products_unknown() -> None:
    called = PRODUCT.replace("%acc_30 =", "tt.call @helper(%rm) : (i32) -> ()\n%acc_30 =")
    assert TritonIr(called).flops({"rows": 1, "depth": 64}, (1,), unknown) is None


class Compiled:
    def __init__(self, text: str) -> None:
        self.asm, self.hash = {"ttir": text}, text


def test_a_kernels_demand_has_the_products_of_its_helper_functions() -> None:
    """The kernel's own source does not multiply: a helper function does."""
    kernel = TritonKernel("attn", "def attn(q, N):\n    helper(q, N)\n    tl.store(q, 1)\n")
    arguments = {"q": torch.empty(1024, dtype=torch.bfloat16, device="meta"), "N": 2048}
    alone = kernel.demand(arguments, unknown)
    assert alone.flops == 0
    found = kernel.launched(alone, arguments, Compiled(CAUSAL), (16, 4), unknown)
    assert (found.flops, found.product) == (4 * 272 * 2 * 2.0 * 128 * 64 * 64, None)


def test_sizes_called_m_n_and_k_are_a_products_only_if_its_arithmetic_agrees() -> None:
    kernel = TritonKernel("k_rows", "def k_rows(a, M, N, K, rows, depth):\n    x = tl.dot(tl.load(a), tl.load(a))\n")
    arguments = {"a": ON_META, "M": 2048, "N": 2048, "K": 2048, "rows": 2048, "depth": 2048}
    agrees = kernel.launched(kernel.demand(arguments, unknown), arguments, Compiled(PRODUCT), (16, 16), unknown)
    assert agrees.product is not None
    twice = kernel.launched(kernel.demand(arguments, unknown), arguments, Compiled(PRODUCT), (16, 16, 4), unknown)
    assert (twice.product, twice.flops) == (None, 4 * 2.0 * 2048**3)
    assert kernel.launched(agrees, arguments, None, (16, 16), unknown) == agrees
