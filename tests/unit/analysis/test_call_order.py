"""The rules by which calls of ranks meet, on calls made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fakedist.analysis.call_order import CallsMatch, RankCall, RankCalls, match_calls

WORLD, PAIR = (0, 1, 2), (0, 1)


def call(operation: str, members: Sequence[int] = PAIR, *, size: int = 8, **others: Any) -> RankCall:
    """A call of NCCL that is not asynchronous, on the group of these ranks."""
    return RankCall(
        **{
            "group": (tuple(members), 0),
            "members": members,
            "peer": -1,
            "sequence": 0,
            "operation": operation,
            "bytes_in": 0 if operation == "recv" else size,
            "bytes_out": 0 if operation == "send" else size,
            "dtype": "float32",
            "asynchronous": False,
            "stream": 0,
            "step": 1,
            "reduction": "",
            "root": -1,
            "tag": 0,
            "batch": 0,
            "sent_parts": (),
            "received_parts": (),
            "on_host": False,
            "own_pair": False,
            "waits": False,
            "parts": "",
            "join": "",
            "awaited": -1,
            "awaited_on": -1,
            **others,
        }
    )


def played(*ranks: Sequence[RankCall], last_step: int = 0, stopped: bool = False) -> CallsMatch:
    """The result of these calls of ranks 0, 1, ..."""
    programs = [
        RankCalls(rank, [each._replace(sequence=number) for number, each in enumerate(calls)], last_step, not stopped)
        for rank, calls in enumerate(ranks)
    ]
    return match_calls(programs)


def sends(peer: int, **others: Any) -> RankCall:
    return call("send", peer=peer, **others)


def receives(peer: int, **others: Any) -> RankCall:
    return call("recv", peer=peer, **others)


@pytest.mark.parametrize("batch", [0, 1])
def test_ranks_that_send_to_each_other_need_a_batch(batch: int) -> None:
    found = played([sends(1, batch=batch), receives(1, batch=batch)], [sends(0, batch=batch), receives(0, batch=batch)])
    assert found.is_matched == bool(batch)
    assert [(wait.made.rank, wait.missing) for wait in found.waiting] == ([] if batch else [(0, (1,)), (1, (0,))])


def test_a_send_on_a_communicator_of_two_ranks_passes_a_collective_and_not_one_on_the_groups_own() -> None:
    def ranks(**where: Any) -> list[list[RankCall]]:
        collective = call("all_reduce", asynchronous=True)
        return [[sends(1, **where), collective], [collective, receives(0, **where)]]

    assert played(*ranks(own_pair=True)).is_matched
    assert not played(*ranks()).is_matched


@pytest.mark.parametrize(("second", "is_matched"), [({}, False), ({"stream": 7}, True), ({"asynchronous": True}, True)])
def test_calls_of_two_groups_wait_for_each_other_on_one_stream(second: dict[str, Any], is_matched: bool) -> None:
    """Both ranks begin with another group; either asynchronous, or on two streams, both of them run at once."""
    own, other = call("all_reduce"), call("all_reduce", WORLD)
    found = played([own._replace(**second), other._replace(stream=0)], [other, own._replace(**second)], [other])
    assert found.is_matched == is_matched


def test_the_host_waits_where_a_communicator_is_made() -> None:
    own, other = call("all_reduce", asynchronous=True), call("all_reduce", WORLD, asynchronous=True)
    assert played([own, other], [other, own], [other]).is_matched
    waits = [each._replace(waits=True) for each in (own, other)]
    assert not played([waits[0], waits[1]], [waits[1], waits[0]], [other]).is_matched


def test_the_host_waits_for_those_that_make_a_communicator_and_not_for_its_first_call() -> None:
    """Rank 0's send waits on its stream for the collective that rank 1 makes after its receive."""
    everyone, pair = call("all_reduce"), {"own_pair": True, "waits": True}
    assert played([everyone, sends(1, **pair)], [receives(0, **pair), everyone]).is_matched
    held = receives(0, **pair, awaited=1, awaited_on=0)
    assert not played([everyone, sends(1, **pair)], [held, everyone]).is_matched


@pytest.mark.parametrize(("third", "is_matched"), [(16, True), (24, False)])
def test_uneven_parts_of_an_all_gather_are_what_each_rank_sends(third: int, is_matched: bool) -> None:
    gathers = call("all_gather", WORLD, received_parts=(8, 8, third), bytes_out=16 + third)
    assert played(*[[gathers._replace(bytes_in=size)] for size in (8, 8, 16)]).is_matched == is_matched


def test_uneven_parts_of_a_reduce_scatter_are_what_each_rank_gets() -> None:
    scatters = call("reduce_scatter", WORLD, sent_parts=(8, 8, 16), bytes_in=32)
    assert played(*[[scatters._replace(bytes_out=size)] for size in (8, 8, 16)]).is_matched
    assert not played(*[[scatters._replace(bytes_out=size)] for size in (8, 16, 8)]).is_matched


def test_nothing_is_required_of_the_last_step_of_a_rank_that_was_stopped() -> None:
    reduces = [call("all_reduce", step=step) for step in (0, 1, 2, 2)]
    assert played(reduces, reduces[:2], last_step=2, stopped=True).is_matched
    assert not played(reduces, reduces[:1], last_step=2, stopped=True).is_matched
    assert not played(reduces, reduces[:2]).is_matched


@pytest.mark.parametrize(("changed", "what"), [({"root": 1}, "root"), ({"parts": "objects 3"}, "parts"), ({}, "")])
def test_objects_may_be_of_any_size_and_not_from_any_rank(changed: dict[str, Any], what: str) -> None:
    objects = call("broadcast_object_list", root=0, parts="objects 2")
    other = objects._replace(bytes_out=99, dtype="", **changed)
    difference = played([objects], [other]).difference
    assert what == ("" if difference is None else difference.what)


def test_a_batch_of_several_peers_goes_around_a_ring() -> None:
    def exchange(rank: int) -> list[RankCall]:
        return [
            sends((rank + 1) % 3, batch=1)._replace(group=(WORLD, 0), members=WORLD),
            receives((rank - 1) % 3, batch=1)._replace(group=(WORLD, 0), members=WORLD),
        ]

    assert played(*map(exchange, WORLD)).num_calls == 6
    assert played(*map(exchange, WORLD)).is_matched


def test_a_receive_from_any_rank_takes_what_is_sent_to_it() -> None:
    hosts = {"on_host": True, "tag": 3}
    assert played([sends(1, **hosts)], [receives(-1, **hosts)]).is_matched
    for wrong in (
        [],
        [receives(-1, **hosts)] * 2,
        [receives(-1, **hosts, size=9)],
        [receives(-1, **{**hosts, "tag": 4})],
    ):
        assert not played([sends(1, **hosts)], wrong).is_matched
    assert played([sends(1, **hosts)] * 2, [receives(-1, **hosts), receives(0, **hosts)]).is_matched


def test_copies_to_a_peers_memory_need_no_call_of_its_own_and_sent_objects_do() -> None:
    sent = call("send_object_list", peer=1)
    assert played([call("put", peer=1), sent._replace(peer=-1), call("userbuffers_send", peer=1)], []).is_matched
    assert not played([sent], []).is_matched
    assert played([sent], [call("recv_object_list", peer=0, size=3, dtype="")]).is_matched
    assert not played([sent], [receives(0)]).is_matched


def test_a_rank_that_sends_to_itself_receives_in_the_same_batch() -> None:
    assert played([sends(0, batch=1), receives(0, batch=1)]).is_matched
    assert not played([sends(0, batch=1)]).is_matched


def test_a_group_of_two_backends_has_the_calls_of_each_in_order() -> None:
    gpus, hosts = call("all_reduce"), call("all_reduce", on_host=True, waits=True)
    assert played([gpus, hosts], [hosts, gpus]).is_matched
    assert not played([gpus], [hosts]).is_matched


def test_a_send_that_its_stream_waits_for_holds_up_that_stream_alone() -> None:
    def ranks(stream: int) -> list[list[RankCall]]:
        reduces, on_pair = call("all_reduce", WORLD), {"own_pair": True, "group": (WORLD, 0), "members": WORLD}
        receives_first = receives(0, **on_pair, awaited=1, awaited_on=stream)
        return [[reduces, sends(1, **on_pair)], [receives_first, reduces], [reduces]]

    assert not played(*ranks(stream=0)).is_matched
    assert played(*ranks(stream=7)).is_matched  # torch.distributed.recv on another stream


def test_the_host_is_in_its_own_receive_until_the_send_whatever_stream_is_current() -> None:
    hosts: dict[str, Any] = {"on_host": True}
    reduces = call("all_reduce", asynchronous=True)
    waits = receives(0, **hosts, awaited=1, awaited_on=7)
    assert not played([reduces._replace(waits=True), sends(1, **hosts)], [waits, reduces]).is_matched
    assert played([reduces, sends(1, **hosts)], [waits, reduces]).is_matched


def test_a_call_of_the_host_waits_for_no_stream() -> None:
    """The first ranks of each pair call NCCL first, the others gloo."""
    nccl, gloo = call("all_reduce"), call("all_reduce", group=(PAIR, 1), on_host=True, waits=True)
    assert played([nccl, gloo], [gloo, nccl]).is_matched


@pytest.mark.parametrize("parts", ["float32 5\nfloat32 3", "float32 3\nint32 5", "float32 8", ""])
def test_parts_of_a_coalesced_call_agree_one_by_one(parts: str) -> None:
    coalesced = call("all_reduce_coalesced", parts="float32 3\nfloat32 5")
    assert played([coalesced], [coalesced]).is_matched
    difference = played([coalesced], [coalesced._replace(parts=parts)]).difference
    assert difference is not None
    assert difference.what == "parts"


def test_a_batch_may_have_a_collective_between_a_send_and_a_receive() -> None:
    def exchange(rank: int, batch: int) -> list[RankCall]:
        return [sends(1 - rank, batch=batch), call("all_reduce", batch=batch), receives(1 - rank, batch=batch)]

    assert played(exchange(0, 1), exchange(1, 1)).is_matched
    assert not played(exchange(0, 0), exchange(1, 0)).is_matched


def test_a_send_of_a_batch_meets_no_receive_outside_of_one() -> None:
    """They are on two communicators: the group's, and that of the two ranks."""
    assert not played([sends(1, batch=1)], [receives(0, own_pair=True)]).is_matched


def test_a_rank_without_inputs_takes_part_in_the_calls_of_a_join_until_none_has_any() -> None:
    inside, joined = call("all_reduce", WORLD, join="inside"), call("all_reduce", WORLD, join="joined")
    after = call("broadcast", WORLD, root=0)
    ranks = [[*[inside] * number, joined, after] for number in (0, 1, 3)]
    assert played(*ranks).num_calls == 10
    assert played(*ranks).is_matched
    assert not played(ranks[0], ranks[1], ranks[2][:-2]).is_matched  # it never leaves
    own = call("all_reduce", WORLD)  # the script's own, which a rank without inputs does not make
    difference = played(ranks[0], [joined, after], [inside, own, joined, after]).difference
    assert difference is not None
    assert difference.what == "inputs left"
    assert [made.rank for made in difference.calls] == [0, 1, 2]


def test_a_wait_that_was_not_seen_is_known_to_be_missing() -> None:
    calls = [sends(1), sends(1, awaited=1), call("all_reduce", asynchronous=True), call("all_reduce"), call("put")]
    assert [each.has_unknown_wait for each in calls] == [True, False, True, False, False]
