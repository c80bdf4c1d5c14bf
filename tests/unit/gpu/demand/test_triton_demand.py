"""Bytes that Triton's kernels load and store, from their source and arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fakedist.gpu.demand import operation_demand, triton_demand
from fakedist.gpu.demand.operation_demand import Demand
from fakedist.gpu.demand.triton_code import Access, read_source
from fakedist.gpu.demand.triton_demand import TritonKernel

POINTWISE = """
def triton_poi_fused_add_0(in_out_ptr0, in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 4096
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    tmp0 = tl.load(in_out_ptr0 + (xindex), None)
    tmp1 = tl.load(in_ptr0 + (xindex % 64), None, eviction_policy='evict_last')
    tmp2 = tmp0 + tmp1
    tl.store(in_out_ptr0 + (xindex), tmp2, None)
    tl.store(out_ptr0 + (xindex), tmp2, None)
"""
EMBEDDING = """
def triton_poi_fused_embedding_0(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 4096
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    tmp0 = tl.load(in_ptr0 + (xindex // 64), None)
    tmp5 = tl.where(tmp0 < 0, tmp0 + 50000, tmp0)
    tmp6 = tl.load(in_ptr1 + (xindex % 64 + 64*tmp5), None)
    tl.store(out_ptr0 + (xindex), tmp6, None)
"""
ADDED = """
def triton_poi_fused_embedding_dense_backward_0(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 4096
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    tmp0 = tl.load(in_ptr0 + (xindex // 64), None)
    tmp1 = tl.load(in_ptr1 + (xindex), None)
    tl.atomic_add(out_ptr0 + (xindex % 64 + 64*tmp0), tmp1, None, sem='relaxed')
"""
SOFTMAX = """
def triton_red_fused__log_softmax_0(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK, R0_BLOCK : tl.constexpr):
    r0_base = tl.arange(0, R0_BLOCK)[None, :]
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0_base + r0_offset + r0_numel*x0), None, eviction_policy='evict_last')
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp5 = tl.load(in_ptr0 + (r0_base + r0_offset + r0_numel*x0), None, eviction_policy='evict_first')
        tl.store(out_ptr0 + (r0_base + r0_offset + r0_numel*x0), tmp5, None)
"""
CROSS_ENTROPY = """
def liger_cross_entropy_kernel(X_ptr, X_stride, Y_ptr, loss_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    program_id = tl.program_id(0).to(tl.int64)
    Y_ptr += program_id
    if n_cols == 0:
        for i in range(0, n_cols, BLOCK_SIZE):
            tl.store(X_ptr + i + tl.arange(0, BLOCK_SIZE), 0.0)
        return
    y = tl.load(Y_ptr)
    X_ptr += program_id * X_stride
    ori_X_y = tl.load(X_ptr + y)
    for i in range(0, n_cols, BLOCK_SIZE):
        offsets = i + tl.arange(0, BLOCK_SIZE)
        block = tl.load(X_ptr + offsets, mask=offsets < n_cols)
    for i in range(0, n_cols, BLOCK_SIZE):
        offsets = i + tl.arange(0, BLOCK_SIZE)
        block = tl.load(X_ptr + offsets, mask=offsets < n_cols)
        tl.store(X_ptr + offsets, block, mask=offsets < n_cols)
    tl.store(loss_ptr + program_id, ori_X_y)
"""
PRODUCT = """
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    a_ptrs = a_ptr + offs_am
    for k in range(0, K):
        a = tl.load(a_ptrs)
        b = tl.load(b_ptr + offs_bn)
        accumulator = tl.dot(a, b, accumulator)
        a_ptrs += BLOCK
    tl.store(c_ptr + offs_cm, accumulator)
"""
DESCRIPTOR = """
def copy_kernel(source, target, helped, n):
    described = tl.make_tensor_descriptor(source, shape=[n], strides=[1], block_shape=[64])
    out = tl.make_block_ptr(base=target, shape=(n,), strides=(1,), offsets=(0,), block_shape=(64,), order=(0,))
    value = described.load([0]) + _read_helper(helped, 3)
    tl.store(out, value)
"""


@pytest.fixture(autouse=True)
def _host_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (operation_demand, triton_demand):
        monkeypatch.setattr(module, "memory_bytes", lambda tensor: tensor.nbytes)


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def demand_of(source: str, arguments: dict[str, Any]) -> Demand:
    name = source.split("def ")[1].split("(")[0]
    return TritonKernel(name, source).demand(arguments, lambda tensor: None)


def test_a_pointwise_kernel_moves_what_it_loads_and_stores() -> None:
    arguments = {"in_out_ptr0": made(4096), "in_ptr0": made(64), "out_ptr0": made(4096, dtype=torch.float32)}
    found = demand_of(POINTWISE, arguments | {"xnumel": 4096})
    assert found.moved_bytes == 2 * 4096 * 2 + 64 * 2 + 4096 * 4
    assert (found.flops, found.width) == (0.0, 0)
    same = made(4096)  # under several names, read once and written once
    arguments = dict.fromkeys(("in_out_ptr0", "in_ptr0", "out_ptr0"), same)
    assert demand_of(POINTWISE, arguments | {"xnumel": 4096}).moved_bytes == 2 * same.nbytes
    unreadable = demand_of("def broken(: pass", {"a": made(100), "b": made(50)})
    assert unreadable.moved_bytes == 300


@pytest.mark.parametrize(("source", "table", "rows", "moves"), [(EMBEDDING, 1, 0, 2), (ADDED, 2, 0, 3)])
def test_of_rows_that_are_picked_or_added_to_only_those_are_moved(
    source: str, table: int, rows: int, moves: int
) -> None:
    arguments = [made(64, 64)] * 3
    arguments[table], arguments[rows] = made(50_000, 64), made(64, dtype=torch.int64)
    given = dict(zip(("in_ptr0", "in_ptr1", "out_ptr0"), arguments, strict=True))
    assert demand_of(source, given).moved_bytes == 64 * 8 + moves * 4096 * 2


@pytest.mark.parametrize(("columns", "reads"), [(512, 1), (128 * 1024, 2)])
def test_long_rows_are_read_by_each_pass_and_short_ones_once(columns: int, reads: int) -> None:
    rows = made(2, columns)
    arguments = {"in_ptr0": rows, "out_ptr0": made(2, columns), "xnumel": 2, "r0_numel": columns}
    found = demand_of(SOFTMAX, arguments)
    assert (found.moved_bytes, found.width) == ((reads + 1) * rows.nbytes, columns)


def test_what_a_kernel_stores_and_loads_again_is_read_only_if_rows_are_long() -> None:
    second = "        tmp5 = tl.load(in_ptr0 + (r0_base + r0_offset"
    source = SOFTMAX.replace(second, second.replace("in_ptr0", "out_ptr0")).replace(
        "    for r0_offset", "    tl.store(out_ptr0 + (r0_base), r0_base)\n    for r0_offset", 1
    )
    for columns, moves in ((512, 2), (128 * 1024, 3)):
        rows = made(2, columns)
        arguments = {"in_ptr0": rows, "out_ptr0": made(2, columns), "xnumel": 2, "r0_numel": columns}
        assert demand_of(source, arguments).moved_bytes == moves * rows.nbytes


def test_rows_that_are_picked_are_read_once_by_two_passes() -> None:
    source = SOFTMAX.replace("in_ptr0, out_ptr0", "in_ptr0, in_ptr1, out_ptr0").replace("numel*x0", "numel*row", 2)
    source = source.replace("    r0_base =", "    row = tl.load(in_ptr1 + (x0), None)\n    r0_base =", 1)
    table, rows = made(50_000, 512), made(2, dtype=torch.int64)
    arguments = {"in_ptr0": table, "in_ptr1": rows, "out_ptr0": made(2, 512), "xnumel": 2, "r0_numel": 512}
    assert demand_of(source, arguments).moved_bytes == 2 * 2 * 512 * 2 + rows.nbytes


def test_a_value_that_is_picked_from_a_row_is_no_pass_over_it() -> None:
    accesses = read_source("", CROSS_ENTROPY).accesses
    assert accesses["X_ptr"] == Access(passes=2, loads=1, stores=2, gathers=True)
    assert accesses["loss_ptr"] == Access(stores=1)
    long = made(4, 128 * 1024)
    arguments = {"X_ptr": long, "X_stride": 128 * 1024, "Y_ptr": made(4), "loss_ptr": made(4), "n_cols": 128 * 1024}
    assert demand_of(CROSS_ENTROPY, arguments).moved_bytes == 3 * long.nbytes + 4 * 2 + 4 * 2


def test_a_kernel_that_multiplies_has_the_sizes_that_it_is_given() -> None:
    tensors = {"a_ptr": made(64, 32), "b_ptr": made(32, 16), "c_ptr": made(64, 16)}
    found = demand_of(PRODUCT, tensors | {"M": 64, "N": 16, "K": 32})
    assert found.flops == 2 * 64 * 16 * 32
    assert found.moved_bytes == 2 * (64 * 32 + 32 * 16 + 64 * 16)
    assert found.product is not None
    assert found.product[:3] == (64, 16, 32)
    assert math.isnan(demand_of(PRODUCT, tensors).flops)


def test_descriptors_block_pointers_and_helpers_are_followed() -> None:
    accesses = read_source("copy_kernel", DESCRIPTOR).accesses
    assert (accesses["source"].passes, accesses["target"].stores, accesses["helped"].passes) == (1, 1, 1)


def test_a_kernel_that_stores_eight_bits_has_the_sizes_of_its_matrix() -> None:
    arguments = {"in_out_ptr0": made(32, 128), "in_ptr0": made(64), "xnumel": 4096}
    found = demand_of(POINTWISE, arguments | {"out_ptr0": made(32, 128, dtype=torch.float8_e4m3fn)})
    assert (found.quantized, found.dtype) == ((32, 128), "fp8")
    found = demand_of(POINTWISE, arguments | {"out_ptr0": made(32, 128)})
    assert (found.quantized, found.dtype) == ((0, 0), "bf16")
