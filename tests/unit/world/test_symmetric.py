"""Kernels of Transformer Engine 2.20.2's user buffers, by their mangled names and arguments."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import _SymmetricMemory

from fakedist.errors import WorldError
from fakedist.world.reroute import RankStore
from fakedist.world.symmetric import BufferCall, Peers, read_kernel, symmetric_memory

_KEY = "0//CUDASymmetricMemory/{}/{}"
REQUEST = struct.pack("iiQQ", 3, 4711, 8 << 20, 6 << 20) + b"host"


def test_other_ranks_have_memory_like_mine_on_other_devices() -> None:
    store = RankStore(8)
    store.set(_KEY.format(0, 2), REQUEST)
    others = [_KEY.format(0, rank) for rank in range(8) if rank != 2]
    store.wait(others)
    answers = [store.get(key) for key in others]
    assert {answer[4:] for answer in answers} == {REQUEST[4:]}
    devices = [struct.unpack_from("i", answer)[0] for answer in answers]
    assert sorted([*devices, 3]) == list(range(8))


def test_what_ranks_exchange_afterwards_is_mine() -> None:
    peers, values = Peers(), {_KEY.format(1, 0): b"\x01"}
    assert peers.expects(_KEY.format(1, 5), values)
    assert peers.answer(_KEY.format(1, 5), values) == b"\x01"


def test_an_exchange_that_this_rank_has_not_begun_is_not_answered() -> None:
    peers = Peers()
    for key in (_KEY.format(2, 5), "other/2/5"):
        assert not peers.expects(key, {_KEY.format(1, 0): b"1", "other/2/0": b"1"})
        assert peers.answer(key, {_KEY.format(1, 0): b"1", "other/2/0": b"1"}) is None


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    monkeypatch.setattr(_SymmetricMemory, "get_backend", lambda device: name)
    return name


@pytest.fixture
def entered() -> Iterator[None]:
    with symmetric_memory(is_virtual=True, others=lambda num_bytes: 0):
        yield


@pytest.mark.parametrize("backend", ["NVSHMEM", "NCCL"], indirect=True)
def test_a_backend_that_waits_for_other_ranks_is_refused(backend: str, entered: None) -> None:
    with pytest.raises(WorldError, match=f"{backend} backend waits for the other ranks"):
        _SymmetricMemory.empty_strided_p2p((1,), [1], torch.uint8, torch.device("cuda"), "group")


@pytest.mark.usefixtures("entered")
def test_nvshmem4py_is_refused_where_it_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvshmem" / "core").mkdir(parents=True)
    (tmp_path / "nvshmem" / "core" / "__init__.py").write_text("from nvshmem.core.init_fini import *")
    (tmp_path / "nvshmem" / "core" / "init_fini.py").write_text("def init(**_): pass")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("nvshmem", "nvshmem.core", "nvshmem.core.init_fini"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    core: Any = import_module("nvshmem.core")
    with pytest.raises(WorldError, match="NVSHMEM waits for the other ranks"):
        core.init(uid=None, rank=0, nranks=8)


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
