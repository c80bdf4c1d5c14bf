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
from fakedist.world.symmetric import Peers, symmetric_memory

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
