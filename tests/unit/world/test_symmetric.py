from __future__ import annotations

import struct

from fakedist.world.store import RankStore
from fakedist.world.symmetric import Peers

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
