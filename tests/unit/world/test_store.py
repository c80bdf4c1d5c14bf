from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fakedist.errors import WorldError
from fakedist.world.reroute import RankStore


@pytest.fixture
def store() -> Any:
    return RankStore(8)


def test_what_was_set_can_be_read_waited_for_appended_to_and_deleted(store: Any) -> None:
    store.set("text", "value")
    store.set("bytes", b"\x00\xff")
    assert (store.get("text"), store.get("bytes"), store.num_keys()) == (b"value", b"\x00\xff", 2)
    assert store.check(["text", "bytes"])
    assert not store.check(["text", "other"])
    store.wait(["text"])
    store.wait(["text"], timedelta(seconds=1))
    store.append("log", "a")
    store.append("log", b"b")
    store.multi_set(["x", "y"], ["1", b"2"])
    assert store.multi_get(["log", "x", "y"]) == [b"ab", b"1", b"2"]
    assert store.has_extended_api()
    assert store.delete_key("text")
    assert not store.delete_key("text")
    store.set_timeout(timedelta(seconds=5))
    assert store.timeout == timedelta(seconds=5)


@pytest.mark.parametrize("ask", [lambda store: store.get("other/3"), lambda store: store.wait(["other/3"])])
def test_what_another_rank_would_set_is_an_error_at_once(store: Any, ask: Callable[[Any], object]) -> None:
    with pytest.raises(WorldError, match="'other/3'"):
        ask(store)


def test_counters_count_for_every_rank(store: Any) -> None:
    assert [store.add("arrived", number) for number in (1, 1, 0)] == [8, 16, 16]
    assert store.get("arrived") == b"16"


@pytest.mark.skipif(not hasattr(dist.Store, "barrier"), reason="newer torch has it")
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_barrier_of_some_of_the_ranks_ends(store: Any, num_ranks: int) -> None:
    group = dist.PrefixStore("group", store)
    with pytest.raises(WorldError, match="'group/meet/last_member'"):
        group.wait(["meet/last_member"])
    group.barrier("meet", num_ranks)
    assert store.get("group/meet/num_members") == b"8"


def test_compare_and_set(store: Any) -> None:
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "other", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.compare_set("absent", "expected", "value") == b"expected"
    assert not store.check(["absent"])


def test_torchs_own_prefix_works_on_it(store: Any) -> None:
    prefixed = dist.PrefixStore("group", dist.PrefixStore("deep", store))
    prefixed.set("key", "value")
    prefixed.wait(["key"])
    assert (prefixed.get("key"), prefixed.add("count", 1), store.num_keys()) == (b"value", 8, 2)
    assert prefixed.check(["key"])
    assert prefixed.compare_set("key", "value", "next") == b"next"
    assert prefixed.delete_key("key")


def test_every_group_has_a_part_of_the_jobs_store(enter_world: Callable[..., Any]) -> None:
    enter_world(8, 3)
    job_store: Any = c10d._get_default_store()
    job_store.set("key", "value")
    assert job_store.get("key") == b"value"
    group: Any = dist.new_group([3, 4])
    assert not c10d._get_process_group_store(group).check(["key"])
