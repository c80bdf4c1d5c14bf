"""Kernels of Transformer Engine 2.20.2's user buffers, by their mangled names and arguments."""

from __future__ import annotations

import pytest

from fakedist.world.symmetric import BufferCall, read_kernel

_LINES = 1 << 16  # of 16 bytes


def read(name: str, arguments: dict[int, int], copied: int = 0, blocks: int = 16) -> BufferCall | None:
    def rank_of(counter: int) -> int:
        return (counter - 0x7000) // 4

    return read_kernel(name, lambda position, _: arguments[position], blocks, copied, rank_of)


def test_a_send_has_its_bytes_and_its_peer() -> None:
    sent = read("_Z21kuserbuffers_pushsendPiS_P4int4S1_i", {0: 0x7000 + 4 * 12, 4: _LINES}, blocks=4)
    assert sent == BufferCall("userbuffers_send_4sms", 1 << 20, 12)


def test_a_signal_ends_the_copies_before_it() -> None:
    sent = read("_Z21kuserbuffers_pushsendPiS_P4int4S1_i", {0: 0x7000 + 4 * 3, 4: 0}, copied=5 << 20, blocks=1)
    assert sent == BufferCall("put", 5 << 20, 3)


def test_a_wait_names_the_peer_it_waits_for() -> None:
    assert read("_Z21kuserbuffers_pushrecviiiiPiS_imS_S_", {1: 9}) == BufferCall("userbuffers_wait", 0, 9)


def test_a_send_of_many_chunks_sends_all_but_its_own() -> None:
    name = "_Z37kuserbuffers_pushsendrecv_multiatomicPiS_P4int4S1_iiiS_S_iPviiibmii"
    assert read(name, {0: 0x7000, 4: _LINES, 11: 8}) == BufferCall("userbuffers_send_16sms", 7 << 20, 0)


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("_Z38userbuffers_fp16_sum_inplace_gpu_rr_agILi8EEviiiiiiiPPvim", "all_gather"),
        ("_Z38userbuffers_fp16_sum_inplace_gpu_mc_agILi8EEviiiiiiiPPviP5uint4m", "multimem_all_gather"),
        ("_Z38userbuffers_fp16_sum_inplace_gpu_rr_rsILi8EEviiiiiiiPPvim", "reduce_scatter"),
        ("_Z42userbuffers_fp16_sum_inplace_gpu_mc_rs_oopILi8EEviiiiiiiiiPPviS0_P6float4m", "multimem_reduce_scatter"),
        (
            "_Z46userbuffers_fp16_sum_inplace_gpu_rr_rs_oop_fp8ILi8E13__nv_fp8_e4m3EviiiiiiiiiPPviS1_Pfm",
            "reduce_scatter",
        ),
    ],
)
def test_a_collective_moves_a_line_of_each_rank(name: str, operation: str) -> None:
    assert read(name, {6: _LINES}) == BufferCall(f"userbuffers_{operation}_16sms", 8 << 20, num_ranks=8)


def test_a_collective_that_takes_its_chunks_as_they_come_has_all_of_them() -> None:
    name = "_Z61userbuffers_fp16_sum_inplace_gpu_rr_rs_oop_stride_multiatomicILi4EEviiiiiiiiiiPPviS0_S0_m"
    call = BufferCall("userbuffers_reduce_scatter_16sms", 3 * (4 << 20), num_ranks=4)
    assert read(name, {6: _LINES, 9: 3}) == call


@pytest.mark.parametrize("name", ["_Z16kuserbuffers_incPi", "_Z18kuserbuffers_dummyv", "kuserbuffers_pushsend"])
def test_kernels_that_move_nothing_are_kernels(name: str) -> None:
    assert read(name, {}) is None
