"""Each launch's part of its operation's work, on hand-made logs."""

from __future__ import annotations

import math

import pytest

from fakedist.gpu.demand.formulas import KernelPart
from fakedist.gpu.demand.launch_demand import LaunchDemands, Tagged
from fakedist.gpu.demand.operation_demand import Demand
from fakedist.gpu.demand.work_shapes import AttentionShape, ProductShape
from fakedist.gpu.launch_log import Launch, LaunchKind
from fakedist.rundir.launch_records import WorkRow
from fakedist.rundir.rows import Location

BF16, FP32, FP8 = 14, 0, 28
PLACE = Location(1, "forward", 0, False)


def kernel(name: str, threads: int = 128, tag: int = 0) -> tuple[str, Launch]:
    launch = Launch(kind=LaunchKind.KERNEL, tag=tag, call=-1)
    launch.grid[:], launch.block[:] = (threads, 1, 1), (1, 1, 1)
    return name, launch


def library(name: str) -> tuple[str, Launch]:
    return name, Launch(kind=LaunchKind.LIBRARY, tag=0, call=-1)


def product(m: int, n: int, k: int, **more: int) -> tuple[str, Launch]:
    types = {"a_type": BF16, "b_type": BF16, "d_type": BF16, "compute": 68}
    return "cublasGemmEx", Launch(kind=LaunchKind.PRODUCT, call=-1, m=m, n=n, k=k, batch=1, **types | more)


def worked(demand: Demand, *launches: tuple[str, Launch], operation: str = "aten.x.default") -> list[WorkRow]:
    log = [launch for _, launch in launches]
    names = {id(launch): name for name, launch in launches}
    tag = Tagged(0, operation, PLACE, demand)
    demands = LaunchDemands(log, {0: tag}, lambda launch: names[id(launch)])
    return [demands.of(number, tag) for number in range(len(log))]


def test_a_product_is_that_of_torchs_rows_though_the_library_counts_columns() -> None:
    """y = x w^T of 64 rows, 256 outputs and 128 inputs: cuBLAS gets m = 256, n = 64 and the weight as A."""
    (row,) = worked(Demand(), product(256, 64, 128, transposed_a=1, a_type=FP8, d_type=FP32, scaling=2))
    assert (row.m, row.n, row.k, row.batch, row.layout, row.kind) == (64, 256, 128, 1, "TN", "product")
    assert (row.a_bytes, row.b_bytes, row.d_bytes, row.scaling) == (2, 1, 4, "row")
    assert row.moved_bytes == 64 * 128 * 2 + 256 * 128 + 64 * 256 * 4
    assert row.flops == 2 * 64 * 256 * 128


def test_a_product_that_is_added_reads_what_is_there() -> None:
    (plain,), (added,) = (worked(Demand(), product(64, 32, 16, accumulates=value)) for value in (0, 1))
    assert (plain.accumulates, added.accumulates) == (False, True)
    assert added.moved_bytes - plain.moved_bytes == 64 * 32 * 2


def test_kernels_share_an_operations_bytes_by_their_threads() -> None:
    first, second = worked(Demand(0.0, 400.0), kernel("a", 30), kernel("b", 10))
    assert (first.moved_bytes, second.moved_bytes) == (300.0, 100.0)


def test_a_kernel_with_its_own_bytes_leaves_the_operations_to_the_others() -> None:
    parts = (KernelPart(("sort",), 8.0), KernelPart(("scatter", "gather"), 90.0))
    rows = worked(
        Demand(0.0, 400.0, parts=parts),
        kernel("radix_sort", 30),
        kernel("gather", 10),
        kernel("scatter", 20),
        kernel("a", 10),
        kernel("b", 10),
    )
    assert [row.moved_bytes for row in rows] == [8.0, 30.0, 60.0, 200.0, 200.0]
    (alone,) = worked(Demand(0.0, 400.0, parts=parts), kernel("a", 10))
    assert alone.moved_bytes == 400.0


def test_a_kernel_with_its_own_arithmetic_has_it_whatever_its_threads() -> None:
    parts = (KernelPart(("sum",), 5.0), KernelPart(("of_data",), 8.0, 0.5), KernelPart(("of_weight",), 90.0, 0.5))
    rows = worked(
        Demand(100.0, 400.0, parts=parts),
        kernel("sum", 9),
        kernel("of_data", 30),
        kernel("of_weight", 1),
        kernel("copy", 7),
    )
    assert [(row.flops, row.moved_bytes) for row in rows] == [(0.0, 5.0), (50.0, 8.0), (50.0, 90.0), (0.0, 400.0)]


def test_one_kernel_of_an_attention_computes_it() -> None:
    shape = AttentionShape("backward", "flash2", 2, 8, 4, 1024, 512, 64, 32, causal=True, window=9)
    before, main, after = worked(
        Demand(1e9, 1e6, attention=shape),
        kernel("flash_bwd_dot_do_o_kernel", 1000),
        kernel("flash_bwd_dq_dk_dv_loop", 500),
        kernel("flash_bwd_convert_dq_kernel", 500),
    )
    assert (before.flops, main.flops, after.flops) == (0.0, 1e9, 0.0)
    assert (main.attention, main.library, main.batch, main.heads, main.kv_heads) == ("backward", "flash2", 2, 8, 4)
    assert (main.queries, main.keys, main.width, main.value_width) == (1024, 512, 64, 32)
    assert (main.causal, main.window, main.family) == (True, 9, "attention")
    assert (before.attention, before.heads) == ("", 0)
    assert before.moved_bytes + main.moved_bytes + after.moved_bytes == pytest.approx(1e6)


def test_a_grouped_product_has_its_sizes_on_the_kernel_that_computes_it() -> None:
    shape = ProductShape(1024, 256, 128, groups=8, layout="TN", a_bytes=2, b_bytes=2, d_bytes=2)
    prepare, main = worked(
        Demand(shape.flops, 1e6, product=shape),
        kernel("prepare_grouped_gemm_data", 1000),
        kernel("cutlass::device_kernel<GemmUniversal>", 100),
        operation="aten._grouped_mm.default",
    )
    assert (prepare.flops, prepare.m, main.flops) == (0.0, 0, shape.flops)
    assert (main.groups, main.m, main.n, main.k, main.batch, main.layout) == (8, 1024, 256, 128, 1, "TN")
    assert (main.family, main.kind) == ("gemm", "kernel")


def test_beside_a_product_a_kernel_moves_no_more_than_the_result_twice() -> None:
    bias, result = worked(Demand(1e9, 1e9), kernel("elementwise_kernel"), product(256, 64, 128))
    assert (bias.flops, bias.moved_bytes) == (0.0, 2 * 256 * 64 * 2)
    assert result.flops == 2 * 256 * 64 * 128


def test_rows_and_converted_matrices_are_told() -> None:
    (row,) = worked(Demand(0.0, 100.0, "fp8", width=4096, quantized=(16, 128)), kernel("convert"))
    assert (row.width, row.m, row.n, row.k, row.dtype) == (4096, 16, 0, 128, "fp8")


def test_what_is_unknown_stays_unknown() -> None:
    unknown, gemm = worked(Demand(), kernel("a")), worked(Demand(math.nan, 1e6), kernel("cutlass_gemm"))
    assert math.isnan(unknown[0].moved_bytes)
    assert math.isnan(gemm[0].flops), "bytes alone tell nothing of a product"


def test_torchs_own_kernels_inside_of_an_unknown_operation_only_move_unless_they_compute() -> None:
    fill, distance = (
        "void at::native::vectorized_elementwise_kernel<4>",
        "void at::native::cdist_kernel_cuda_impl<float>",
    )
    moves, computes, others = worked(Demand(math.nan, 1e6), kernel(fill), kernel(distance), kernel("their_kernel"))
    assert moves.flops == 0
    assert math.isnan(computes.flops)
    assert math.isnan(others.flops)


def test_the_steps_of_an_operation_are_of_one_launch_and_its_arithmetic_of_all() -> None:
    demand = Demand(1e9, 1e6, "bf16", steps=512)
    one, other = worked(demand, library("cudnnRNNBackwardData_v8"), library("cudnnRNNBackwardWeights_v8"))
    assert (one.steps, other.steps) == (512, 0)
    assert (one.flops, other.flops) == (5e8, 5e8)


def test_a_solver_that_is_called_for_each_matrix_of_a_batch_does_all_steps_each_time() -> None:
    demand = Demand(9e8, 3e6, "fp32", steps=64, is_bounded=True)
    looped = worked(demand, *(library("cusolverDnSpotrf") for _ in range(3)))
    assert [(row.steps, row.flops, row.is_bounded) for row in looped] == [(64, 3e8, True)] * 3
    lu, *solving = worked(demand, library("cusolverDnSgetrf"), *(library("cublasStrsm_v2") for _ in range(2)))
    assert (lu.steps, [row.steps for row in solving]) == (64, [0, 0])


def test_a_solver_reads_its_matrix_though_it_is_copied_before_and_products_follow() -> None:
    demand = Demand(9e8, 1e6, "fp32", is_bounded=True)
    copy = "Memcpy DtoD", Launch(kind=LaunchKind.COPY, tag=0, call=-1, bytes=10**6)
    *_, solver, after = worked(demand, copy, library("cusolverDnSgesvdj"), product(64, 64, 64))
    assert (solver.moved_bytes, solver.flops, after.flops) == (1e6, 9e8, 2 * 64**3)


def test_a_solver_of_which_the_operation_counts_nothing_is_unknown() -> None:
    (solver,), (order,) = (
        worked(Demand(0.0, 1e6), library(name)) for name in ("cusolverDnSgesvdj", "cusparseXcoosortByRow")
    )
    assert (math.isnan(solver.flops), order.flops) == (True, 0.0)


def test_next_to_a_kernel_of_which_only_the_least_is_known_torchs_own_are_known() -> None:
    demand = Demand(0.0, 1e6, is_bounded=True, parts=(KernelPart(("kInt8VectorQuant",), 7e5),))
    quant, own = worked(demand, kernel("kInt8VectorQuant<half>"), kernel("void at::native::elementwise_kernel<128>"))
    assert (quant.moved_bytes, quant.is_bounded, own.is_bounded) == (7e5, True, False)
