"""Finds the ranks of a job that run alike, and checks them by the calls of some.

Ranks can be alike that are in the same stage of the pipeline and in groups of the same descriptions and sizes. They are
taken for alike if the first and the last of them ran and made the same calls, each on its own groups. If those differ,
they are divided along the group in which position makes a difference, and each part is checked by itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from fakedist.analysis.call_order import RankCall, RankCalls
from fakedist.rundir.tape import Channel, ranks_key
from fakedist.units import format_rank_list


class JobGroup(NamedTuple):
    """A process group of a job: what the code that made it calls it, and the ranks in it."""

    description: str
    members: Sequence[int]
    channel: Channel


class JobGroups:
    """The groups of all ranks of a job, from (description, ranks) in order of creation."""

    def __init__(self, made: Sequence[tuple[str, Sequence[int]]]) -> None:
        self._of: defaultdict[int, list[JobGroup]] = defaultdict(list)
        self.sizes: Counter[tuple[str, int]] = Counter((description, len(members)) for description, members in made)
        for (description, members), channel in zip(made, channels_of([ranks for _, ranks in made]), strict=True):
            for rank in members:
                self._of[rank].append(JobGroup(description, members, channel))

    def of(self, rank: int) -> list[JobGroup]:
        """A rank's groups, in order of creation."""
        return self._of[rank]


def channels_of(groups: Iterable[Sequence[int]]) -> list[Channel]:
    """Each group's ranks, and how many groups of the same ranks come before it, by which all ranks know it."""
    seen: Counter[tuple[str | int, ...]] = Counter()
    found = []
    for ranks in groups:
        key = ranks_key(ranks)
        found.append((key, seen[key]))
        seen[key] += 1
    return found


@dataclass(frozen=True)
class CopiedCalls:
    """The calls of a rank as an alike one makes them: on its own groups, with the peers in the same direction."""

    calls: Iterable[RankCall]
    groups: JobGroups
    rank: int
    copy: int

    def __iter__(self) -> Iterator[RankCall]:
        pairs = zip(self.groups.of(self.rank), self.groups.of(self.copy), strict=True)
        by_channel = {mine.channel: (mine.members, its) for mine, its in pairs}
        peers: dict[tuple[Channel, int], int] = {}
        for call in self.calls:
            members, its = by_channel[call.group]
            peer = call.peer
            if peer >= 0:
                key = call.group, peer
                if key not in peers:
                    ahead = members.index(peer) - members.index(self.rank) + its.members.index(self.copy)
                    peers[key] = its.members[ahead % len(members)]
                peer = peers[key]
            yield RankCall._make((its.channel, its.members, peer, *call[3:]))


@dataclass(frozen=True)
class AlikeRanks:
    """Ranks of a job that run alike.

    Attributes:
        ran: Those that were recorded.
        stage: Their stage of the pipeline; None without one.
        where: Where they are in groups in which position makes a difference: "tensor 0", "data 4-7".
        is_checked: Whether the first and the last of them ran, and all that ran made the same calls.
    """

    ranks: tuple[int, ...]
    ran: tuple[int, ...]
    stage: int | None
    where: tuple[str, ...]
    is_checked: bool


def find_kinds(
    groups: JobGroups, programs: Mapping[int, RankCalls], world_size: int, pipeline: JobGroup | None
) -> tuple[list[AlikeRanks], list[int]]:
    """The kinds of a job's ranks, by stage and first rank, and the ranks that have to run to check or divide them.

    Args:
        programs: The calls of the ranks that ran.
        pipeline: One pipeline of the job, if it has any.
    """
    possible: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank in range(world_size):
        shape = tuple((group.description, len(group.members)) for group in groups.of(rank))
        possible[_stage(groups.of(rank), rank, pipeline), shape].append(rank)
    search = _Search(groups, programs)
    for (stage, _), ranks in possible.items():
        search.divide(ranks, stage if isinstance(stage, int) else None, {})
    return sorted(search.kinds, key=lambda kind: (kind.stage or 0, kind.ranks)), sorted(search.wanted)


def _stage(groups: Sequence[JobGroup], rank: int, pipeline: JobGroup | None) -> int | None:
    if pipeline is None:
        return None
    wanted = (pipeline.description, len(pipeline.members))
    found = (group for group in groups if (group.description, len(group.members)) == wanted)
    return next((group.members.index(rank) for group in found), None)


class _Search:
    def __init__(self, groups: JobGroups, programs: Mapping[int, RankCalls]) -> None:
        self._groups = groups
        self._programs = programs
        self.kinds: list[AlikeRanks] = []
        self.wanted: set[int] = set()
        self._agree = cache(self._compare)

    def divide(self, ranks: Sequence[int], stage: int | None, where: Mapping[str, str]) -> None:
        """Find the kinds of ranks that can be alike."""
        first = ranks[0]
        missing = {ranks[0], ranks[-1]} - self._programs.keys()
        ran = tuple(rank for rank in ranks if rank in self._programs)
        if not missing:
            if all(self._agree(first, rank) for rank in ran):
                self.kinds.append(AlikeRanks(tuple(ranks), ran, stage, tuple(where.values()), is_checked=True))
                return
            for inside, number in self._axes(ranks):
                if inside[-1] not in self._programs:
                    missing = {inside[-1]}
                    break
                if not self._agree(first, inside[-1]):
                    self._divide_by_position(ranks, number, stage, where)
                    return
            else:
                self.divide(ranks[: len(ranks) // 2], stage, where)
                self.divide(ranks[len(ranks) // 2 :], stage, where)
                return
        self.wanted |= missing
        self.kinds.append(AlikeRanks(tuple(ranks), ran, stage, tuple(where.values()), is_checked=False))

    def _axes(self, ranks: Sequence[int]) -> list[tuple[list[int], int]]:
        """The groups of the first rank that divide the ranks, small ones first: their ranks among these, and number."""
        among = set(ranks)
        found: dict[tuple[int, ...], int] = {}
        for number, group in enumerate(self._groups.of(ranks[0])):
            inside = tuple(rank for rank in group.members if rank in among)
            if 1 < len(inside) < len(ranks):
                found.setdefault(inside, number)
        return [(list(inside), found[inside]) for inside in sorted(found, key=len)]

    def _divide_by_position(
        self, ranks: Sequence[int], number: int, stage: int | None, where: Mapping[str, str]
    ) -> None:
        positions = {rank: self._groups.of(rank)[number].members.index(rank) for rank in ranks}
        known = sorted(set(positions.values()))
        name = self._groups.of(ranks[0])[number].description
        for part in (known[: len(known) // 2], known[len(known) // 2 :]):
            shown = f"{name} {format_rank_list(part)}"
            self.divide([rank for rank in ranks if positions[rank] in part], stage, {**where, name: shown})

    def _compare(self, rank: int, other: int) -> bool:
        if rank == other:
            return True
        own, its = self._programs[rank], self._programs[other]
        until = None if own.is_over and its.is_over else min(own.last_step, its.last_step)
        copied = iter(CopiedCalls(own.calls, self._groups, rank, other))
        return _are_alike(_until(copied, until), _until(iter(its.calls), until))


def _until(calls: Iterator[RankCall], step: int | None) -> Iterator[RankCall]:
    return calls if step is None else (call for call in calls if call.step <= step)


def _are_alike(calls: Iterator[RankCall], others: Iterator[RankCall]) -> bool:
    while (call := next(calls, None)) is not None:
        other = next(others, None)
        if other is None or _terms(call) != _terms(other):
            return False
        if not (call.is_uneven or other.is_uneven) and call.agreed_bytes != other.agreed_bytes:
            return False
    return next(others, None) is None


def _terms(call: RankCall) -> tuple[object, ...]:
    return (
        call.group,
        call.peer,
        call.operation,
        call.dtype,
        call.asynchronous,
        call.step,
        call.reduction,
        call.root,
        call.on_host,
        call.own_pair,
        call.waits,
        call.parts,
        call.join,
    )
