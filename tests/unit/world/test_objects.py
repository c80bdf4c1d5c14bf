from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fakedist.errors import WorldError

Enter = Callable[..., Any]
WORLDS = pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1), (8, 5), (1024, 517)])


@WORLDS
def test_every_slot_gathers_mine(enter_world: Enter, size: int, rank: int) -> None:
    notes = enter_world(size, rank)
    slots: list[Any] = [None] * size
    mine = {"loss": [1.0]}
    dist.all_gather_object(slots, mine)
    assert slots == [mine] * size
    assert all(slot is not mine for slot in slots)
    assert len({id(slot) for slot in slots}) == size
    ((operation, group, given, _, _),) = notes.calls
    assert (operation, group) == ("all_gather_object", 0)
    assert given > 10


@WORLDS
def test_the_destination_gathers_mine_and_what_i_broadcast_stays(enter_world: Enter, size: int, rank: int) -> None:
    enter_world(size, rank)
    slots: list[Any] = [None] * size
    dist.gather_object("mine", slots, dst=rank)
    assert slots == ["mine"] * size
    if rank:
        dist.gather_object("mine", dst=0)
    for objects in (["mine", None], [None]):
        dist.broadcast_object_list(given := list(objects), src=rank)
        assert given == objects


def test_objects_of_a_subgroup(enter_world: Enter) -> None:
    notes = enter_world(8, 5)
    group = dist.new_group([1, 5, 7])
    dist.all_gather_object(slots := [None] * 3, "mine", group=group)
    assert slots == ["mine"] * 3
    assert notes.calls[0][1] == 1


def test_an_object_of_mine_stands_in_for_another_ranks(enter_world: Enter) -> None:
    enter_world(8, 5)
    dist.broadcast_object_list(objects := ["mine"], src=0)
    assert objects == ["mine"]
    for source in (5, 0):
        got: list[Any] = [None]
        dist.scatter_object_list(got, [f"for {rank}" for rank in range(8)], src=source)
        assert got == ["for 5"]


@pytest.mark.parametrize(("source", "named"), [({"src": 2}, "rank 2"), ({"group_src": 2}, "rank 5")])
def test_an_object_that_only_another_rank_has_is_an_error(
    enter_world: Enter, source: dict[str, int], named: str
) -> None:
    notes = enter_world(8, 7)
    group = dist.new_group([1, 3, 5, 7]) if "group_src" in source else None
    with pytest.raises(WorldError, match=f"broadcast_object_list .*{named}") as caught:
        dist.broadcast_object_list([None], group=group, **source)
    assert f"--rank {named.split()[1]}" in caught.value.hint
    with pytest.raises(WorldError, match=f"scatter_object_list .*{named}"):
        dist.scatter_object_list([None], None, group=group, **source)
    with pytest.raises(WorldError, match=f"recv_object_list .*{named}"):
        dist.recv_object_list([None], group=group, **source)
    with pytest.raises(WorldError, match="any rank"):
        dist.recv_object_list([None])
    operations = ["broadcast_object_list", "scatter_object_list", "recv_object_list", "recv_object_list"]
    assert [call[0] for call in notes.calls] == operations, "match says what they meet"


def test_sending_reaches_no_rank(enter_world: Enter) -> None:
    notes = enter_world(8, 5)
    dist.send_object_list(["mine"], dst=0)
    got: list[Any] = ["before"]
    assert dist.recv_object_list(got, src=2) == 2
    assert got == ["before"]
    assert [call[0] for call in notes.calls] == ["send_object_list", "recv_object_list"]
    assert notes.calls[0][2] > 0


def test_groups_without_this_rank_warn_as_torch_does_and_do_nothing(enter_world: Enter) -> None:
    notes = enter_world(8, 5)
    group: Any = dist.new_group([0, 1])
    slots: list[Any] = [None] * 2
    with pytest.warns(UserWarning, match="all_gather_object on global rank 5 which does not belong"):
        dist.all_gather_object(slots, "mine", group=group)
    with pytest.warns(UserWarning, match="broadcast_object_list on global rank 5 which does not belong"):
        dist.broadcast_object_list([None], src=0, group=group)
    assert slots == [None, None]
    assert notes.calls == []


def test_a_list_with_too_few_slots_is_torchs_error_and_more_slots_stay(enter_world: Enter) -> None:
    enter_world(2, 1)
    gather: list[Callable[[list[Any]], None]] = [
        lambda slots: dist.all_gather_object(slots, "mine"),
        lambda slots: dist.gather_object("mine", slots, dst=1),
    ]
    for call in gather:
        with pytest.raises(IndexError, match="list assignment index out of range"):
            call([None])
        slots: list[Any] = [None, None, "more"]
        call(slots)
        assert slots == ["mine", "mine", "more"]
