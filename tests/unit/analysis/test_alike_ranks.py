"""Jobs of eight ranks, two tensor parallel and four data parallel, of which as few run as show which are alike."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from fakedist.analysis.alike_ranks import AlikeRanks, CopiedCalls, JobGroups, find_kinds
from fakedist.analysis.call_order import RankCalls
from fakedist.analysis.topology import group_table, other_group_table
from fakedist.results.job_ranks import job_groups
from tests.unit.results.test_job_ranks import Script, program_of, recording_of

WORLD, TP = 8, 2
Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]


def layout(rank: int) -> Groups:
    """The rank's tensor parallel and data parallel group."""
    tensor = [dist.new_group(range(at, at + TP), group_desc="tensor") for at in range(0, WORLD, TP)]
    data = [dist.new_group(range(at, WORLD, TP), group_desc="data") for at in range(TP)]
    return tensor[rank // TP], data[rank % TP]


def run(script: Script, rank: int) -> tuple[RankCalls, JobGroups]:
    recording = recording_of(script, rank, WORLD)
    return program_of(recording, rank), job_groups(group_table(recording), other_group_table(recording))


def explored(script: Script) -> tuple[list[AlikeRanks], list[int]]:
    """The kinds, and the ranks that ran until they were checked."""
    program, groups = run(script, 0)
    programs = {0: program}
    while True:
        kinds, wanted = find_kinds(groups, programs, WORLD, None)
        if not wanted:
            assert all(kind.is_checked for kind in kinds)
            return kinds, sorted(programs)
        assert not programs.keys() & set(wanted)
        programs |= {rank: run(script, rank)[0] for rank in wanted}


def reduce(groups: Sequence[dist.ProcessGroup], number: int = 2) -> None:
    for group in groups:
        dist.all_reduce(torch.ones(number), group=group)


def test_ranks_that_make_the_same_calls_are_one_kind_and_two_of_them_run() -> None:
    kinds, ran = explored(lambda rank: reduce(layout(rank)))
    assert ran == [0, 7]
    assert kinds == [AlikeRanks(tuple(range(8)), (0, 7), None, (), is_checked=True)]


@pytest.mark.parametrize(
    ("differs", "expected"),
    [
        (lambda rank: rank == 0, [[0], [1, 3, 5, 7], [2], [4, 6]]),
        (lambda rank: rank % TP == 1, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (lambda rank: rank // TP == 3, [[0, 1, 2, 3], [4, 5], [6, 7]]),
        (lambda rank: rank // TP >= 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (lambda rank: rank == 7, [[0, 1, 2, 3], [4, 5], [6], [7]]),
    ],
)
def test_ranks_whose_calls_differ_are_divided(differs: Script, expected: list[list[int]]) -> None:
    def script(rank: int) -> None:
        tensor, data = layout(rank)
        reduce([tensor, data], 3 if differs(rank) else 2)

    kinds, _ = explored(script)
    assert sorted(list(kind.ranks) for kind in kinds) == expected
    for kind in kinds:
        assert len({bool(differs(rank)) for rank in kind.ranks}) == 1


def test_the_root_of_a_broadcast_is_no_kind_of_its_own() -> None:
    kinds, _ = explored(lambda rank: dist.broadcast(torch.ones(3), src=0) and None)
    assert [kind.ranks for kind in kinds] == [tuple(range(8))]


def test_where_a_kind_is_names_its_position() -> None:
    def script(rank: int) -> None:
        tensor, data = layout(rank)
        reduce([data, *([tensor] if rank // TP >= 2 else [])])

    kinds, ran = explored(script)
    assert [kind.where for kind in kinds] == [("data 0,1",), ("data 2,3",)]
    assert len(ran) < WORLD


def test_ranks_in_groups_of_another_size_are_another_kind() -> None:
    def script(rank: int) -> None:
        groups = [dist.new_group(ranks, group_desc="tensor") for ranks in ([0, 1, 2], [3, 4, 5], [6, 7])]
        reduce([groups[min(rank // 3, 2)]])

    kinds, _ = explored(script)
    assert [kind.ranks for kind in kinds] == [(0, 1, 2, 3, 4, 5), (6, 7)]


def test_a_copy_makes_the_calls_that_the_rank_itself_makes() -> None:
    def script(rank: int) -> None:
        tensor, data = layout(rank)
        ring = dist.get_process_group_ranks(data)
        at = ring.index(rank)
        dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(2), ring[(at + 1) % 4], data),
                dist.P2POp(dist.irecv, torch.ones(2), ring[at - 1], data),
            ]
        )
        reduce([tensor])

    program, groups = run(script, 0)
    for rank in range(1, WORLD):
        copied = list(CopiedCalls(list(program.calls), groups, 0, rank))
        own = list(run(script, rank)[0].calls)
        assert [call._replace(sent_parts=(), received_parts=()) for call in copied] == [
            call._replace(sent_parts=(), received_parts=()) for call in own
        ]
        assert {call.peer for call in own} > {-1}


def test_a_stage_is_the_position_in_the_pipeline() -> None:
    program, groups = run(lambda rank: reduce(layout(rank)), 0)
    pipeline = groups.of(0)[2]
    assert (pipeline.description, tuple(pipeline.members)) == ("data", (0, 2, 4, 6))
    kinds, wanted = find_kinds(groups, {0: program}, WORLD, pipeline)
    assert [(kind.stage, kind.ranks) for kind in kinds] == [(at, (2 * at, 2 * at + 1)) for at in range(4)]
    assert wanted == [1, 2, 3, 4, 5, 6, 7]


def test_groups_that_only_their_members_make_are_not_known() -> None:
    def script(rank: int) -> None:
        at = rank - rank % TP
        reduce([dist.new_group(range(at, at + TP), use_local_synchronization=True, group_desc="tensor")])

    kinds, _ = find_kinds(run(script, 0)[1], {}, WORLD, None)
    assert [kind.ranks for kind in kinds] == [(0, 1), (2, 3, 4, 5, 6, 7)]


def test_parts_of_a_split_are_groups_of_the_other_ranks_too() -> None:
    def script(rank: int) -> None:
        del rank
        reduce([dist.split_group(split_ranks=[[0, 1, 2, 3], [4, 5, 6, 7]], group_desc="half")])

    groups = run(script, 5)[1]
    assert [(group.description, group.members) for group in groups.of(1)][1:] == [("half", (0, 1, 2, 3))]
    assert [(group.description, group.members) for group in groups.of(5)][1:] == [("half", (4, 5, 6, 7))]
