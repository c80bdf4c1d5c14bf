"""Symmetric memory and asynchronous tensor parallelism in a world of eight, of which one rank runs."""

from __future__ import annotations

import pytest

from tests.support.runs import Profiled, ProfileOnce

MIB = 1 << 20
ROWS, WIDTH = 512, 1024
_BEGIN = """
import os
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
name = dist.group.WORLD.group_name
"""
EXCHANGED = f"""{_BEGIN}
def left():
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()

before, made = left(), []
for numel in (3 << 20, 1000):
    tensor = symmetric.empty(numel, dtype=torch.bfloat16, device="cuda")
    handle = symmetric.rendezvous(tensor, dist.group.WORLD)
    made.append(before - left())
print("FOUND", handle.rank, handle.world_size, len(set(handle.buffer_ptrs)), handle.multicast_ptr != 0, made)
tensor.fill_(3)
once = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", name)
torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", name)
print("VALUES", once[:2].tolist(), tensor[:2].tolist())
handle.barrier()
torch.empty(16, dtype=torch.bfloat16, device="cuda").copy_(handle.get_buffer(5, (16,), torch.bfloat16))
handle.get_buffer(6, (16,), torch.bfloat16).copy_(once[:16])
del tensor, handle
print("LEFT", before - left())
"""
POOLED = f"""{_BEGIN}
backend = dist.group.WORLD._get_backend(torch.device("cuda"))
pool = torch.cuda.MemPool(backend.mem_allocator)
with torch.cuda.use_mem_pool(pool):
    tensor = torch.zeros(5 << 20, dtype=torch.uint8, device="cuda")
backend.register_mem_pool(pool)
dist.all_reduce(tensor[:16])
own = backend.allocate_tensor(1 << 20, dtype=torch.float32, device=torch.device("cuda"))
print("POOLED", backend.supports_tensor_allocation(own.device), own.numel(), torch.cuda.memory_reserved())
"""
OVERLAPPED = f"""{_BEGIN}
model = torch.nn.Linear({WIDTH}, {WIDTH}, bias=False, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
matrix = torch.randn({ROWS}, {WIDTH}, device="cuda", dtype=torch.bfloat16)
for _ in range(3):
    loss = model(matrix).sum()
    with torch.no_grad():
        torch.ops.symm_mem.fused_all_gather_matmul(matrix, [model.weight], 0, name)
        torch.ops.symm_mem.fused_matmul_reduce_scatter(matrix.view(2, -1, {WIDTH}), model.weight, "sum", 1, name)
    loss.backward()
    optimizer.step()
"""


def _blocks(num_bytes: int) -> int:
    """Bytes that a symmetric tensor takes: its signal pad (less than 64 KiB) before it, in whole granules of 2 MiB."""
    return (num_bytes + (64 << 10)) // (2 * MIB) * 2 * MIB + 2 * MIB


@pytest.fixture(scope="module")
def exchanged(profile_once: ProfileOnce, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    script = tmp_path_factory.mktemp("job") / "exchanged.py"
    script.write_text(EXCHANGED)
    return profile_once(script, rank=3, options=("--json", "--no-kernels"))


@pytest.fixture(scope="module")
def overlapped(profile_once: ProfileOnce, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    script = tmp_path_factory.mktemp("job") / "overlapped.py"
    script.write_text(OVERLAPPED)
    return profile_once(script, rank=3)


def test_memory_is_exchanged_with_peers_that_do_not_exist(exchanged: Profiled) -> None:
    first, second = _blocks(3 * 2 * MIB), _blocks(2000)
    said = exchanged.finished.stderr
    assert f"FOUND 3 8 8 True [{first}, {second}]" in said
    assert "VALUES [24.0, 24.0] [24.0, 24.0]" in said
    assert "LEFT 0" in said
    assert exchanged.summary["estimated_outside"]["taken"] == {"user buffers": first + second}
    assert exchanged.summary["estimated_outside"]["low_bytes"] == first + second


def test_kernels_copies_and_barriers_are_calls_of_the_group(exchanged: Profiled) -> None:
    calls = exchanged.table("calls")
    rows = calls[["operation", "bytes_in", "bytes_out", "peer"]].astype({"operation": str}).to_numpy().tolist()
    assert rows == [
        ["symm_mem_one_shot_all_reduce", 2000, 2000, -1],
        ["symm_mem_two_shot_all_reduce_", 2000, 2000, -1],
        ["symm_mem_barrier", 0, 0, -1],
        ["get", 0, 32, 5],
        ["put", 32, 0, 6],
    ]


def test_overlapped_products_move_their_parts_over_the_links(overlapped: Profiled) -> None:
    calls = overlapped.table("calls")
    of_step = calls[(calls["step"] == 2) & (calls["operation"] == "get")]
    part = ROWS * WIDTH * 2
    for num_bytes, moved in ((part, of_step.iloc[:7]), (part // 8, of_step.iloc[7:])):
        assert sorted(moved["peer"]) == [0, 1, 2, 4, 5, 6, 7]
        assert set(moved["bytes_out"]) == {num_bytes}
    taken = overlapped.summary["estimated_outside"]["taken"]
    assert taken == {"user buffers": _blocks(part)}


def test_the_step_has_their_time(overlapped: Profiled) -> None:
    rows = overlapped.table("kernels")
    copies = rows[rows["name"].astype(str).str.startswith("get")].iloc[:7]
    part = ROWS * WIDTH * 2
    # At most the 450 GB/s of an H100's links one way, and at least half of that and 5 us.
    assert len(copies) == 7
    assert copies["duration_us"].between(part / 450e3, 5 + part / 225e3).all()


def test_the_sum_of_what_the_ranks_send_has_its_bytes(overlapped: Profiled) -> None:
    launches, work = overlapped.table("launches"), overlapped.table("work")
    ran = work.iloc[launches.loc[launches["what"] == "kernel", "work"].unique()]
    assert ran["moved_bytes"].notna().all(), "no kernel is without an estimate"
    added = ran[ran["name"].astype(str).str.contains("sum_functor") & (ran["width"] == 8)]
    assert added["moved_bytes"].tolist() == pytest.approx([9 * ROWS // 8 * WIDTH * 2], rel=0.001)


def test_a_pool_with_nccls_allocator_is_inside_the_caching_allocator(
    profile_once: ProfileOnce, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = tmp_path_factory.mktemp("job") / "pooled.py"
    script.write_text(POOLED)
    pooled = profile_once(script, options=("--json", "--no-kernels"))
    # Requests of 1 to 10 MiB take a segment of 20 MiB (kLargeBuffer), in the script's pool and in the backend's.
    assert f"POOLED True {1 << 20} {40 * MIB}" in pooled.finished.stderr, pooled.finished.stderr
    assert pooled.summary["peak_reserved_bytes"] == 40 * MIB
    assert pooled.summary["estimated_outside"]["taken"] == {}
