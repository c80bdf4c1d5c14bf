"""Random schedules of calls, with faults planted in them: match agrees with a plain execution of what they mean.

A schedule begins as a list of events that all of their ranks make in this order, so that it is legal. Then calls of a
rank are dropped, swapped, changed or waited for sooner, and a naive executor decides whether it still ends.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fakedist.analysis.call_order import RankCall, RankCalls, match_calls
from tests.unit.analysis.test_call_order import call

hypothesis = pytest.importorskip("hypothesis", reason="not installed: make setup")
st = pytest.importorskip("hypothesis.strategies")

NUM_RANKS = 4
STREAMS = (0, 0, 0, 1)
GROUPS = ((0, 1, 2, 3), (0, 1), (1, 2))
#: Schedules of each test; make nightly has more.
NUM_CASES = int(os.environ.get("FAKEDIST_FUZZ", "120"))
BOUNDED = hypothesis.settings(max_examples=NUM_CASES, deadline=None, derandomize=True, database=None)


@dataclass(eq=False)
class Deed:
    """One deed of a rank: a call, or the wait of ``stream`` or of the host for an earlier one.

    Attributes:
        holds: Whether its stream waits for it; the host, if it is the host's.
        blocks: Whether the host waits for those of the communicator's other ranks, with which it makes it.
        batch: Those of one batch, which are in a row, begin together.
        join: Number of a Join: of an iteration, or of the call in which the rank waits for the others.
        has_joined: Whether it is that call.
    """

    operation: str
    group: int = 0
    peer: int = -1
    on_host: bool = False
    own_pair: bool = False
    holds: bool = False
    blocks: bool = False
    stream: int = 0
    size: int = 8
    tag: int = 0
    batch: int = 0
    parts: str = ""
    join: int = 0
    has_joined: bool = False
    waits_for: Deed | None = None


Programs = list[list[Deed]]


# ---- making schedules


def schedules(chance: random.Random, num_faults: int) -> Programs:
    programs: Programs = [[] for _ in range(NUM_RANKS)]
    for number in range(1, chance.randint(4, 12)):
        chance.choice((collective, collective, pair, pair, ring, uneven_inputs))(chance, programs, number)
        for program in programs:
            if chance.random() < 0.5:
                await_one(chance, program)
    for _ in range(num_faults):
        plant(chance, programs)
    return [tidy(program) for program in programs]


def await_one(chance: random.Random, program: list[Deed]) -> None:
    awaited = {id(deed.waits_for) for deed in program}
    left = [deed for deed in program if deed.waits_for is None and not deed.holds and id(deed) not in awaited]
    if left:
        target = chance.choice(left)
        program.append(Deed("wait", stream=chance.choice(STREAMS), waits_for=target))


def members_of(chance: random.Random) -> tuple[int, tuple[int, ...]]:
    group = chance.randint(0, len(GROUPS) - 1)
    return group, GROUPS[group]


def collective(chance: random.Random, programs: Programs, number: int) -> None:
    group, members = members_of(chance)
    on_host = chance.randint(0, 3) == 0
    parts = chance.choice(("", "", "float32 3\nfloat32 5"))
    for rank in members:
        holds, stream = chance.random() < 0.5, chance.choice(STREAMS)
        blocks = not on_host and chance.randint(0, 7) == 0
        deed = Deed("all_reduce", group, on_host=on_host, holds=holds, blocks=blocks, stream=stream, parts=parts)
        programs[rank].append(deed)


def pair(chance: random.Random, programs: Programs, number: int) -> None:
    group, members = members_of(chance)
    sender, receiver = chance.sample(members, 2)
    on_host, own_pair = chance.choice(((True, False), (False, True), (False, False)))
    tag = chance.randint(0, 1) if on_host else 0
    for rank, peer, operation in ((sender, receiver, "send"), (receiver, sender, "recv")):
        stream = chance.choice(STREAMS)
        deed = Deed(operation, group, peer, on_host=on_host, own_pair=own_pair, stream=stream, tag=tag)
        programs[rank].append(deed)
        if chance.random() < 0.7:  # dist.send, not dist.isend
            programs[rank].append(Deed("wait", stream=stream, waits_for=deed))


def ring(chance: random.Random, programs: Programs, number: int) -> None:
    """Every rank of a group sends to the next, in a batch, perhaps with a collective in it."""
    group, members = members_of(chance)
    has_collective = chance.random() < 0.5
    for at, rank in enumerate(members):
        where: dict[str, Any] = {"group": group, "stream": chance.choice(STREAMS), "batch": number}
        deeds = [
            Deed("send", peer=members[(at + 1) % len(members)], **where),
            *([Deed("all_reduce", **where)] if has_collective else []),
            Deed("recv", peer=members[at - 1], **where),
        ]
        programs[rank] += deeds[::-1] if chance.random() < 0.5 else deeds


def uneven_inputs(chance: random.Random, programs: Programs, number: int) -> None:
    """A Join: as many iterations as each rank has inputs for, and the call in which it waits for the others."""
    group, members = members_of(chance)
    for rank in members:
        for _ in range(chance.randint(0, 2)):
            programs[rank].append(Deed("all_reduce", group, holds=chance.random() < 0.5, size=4, join=number))
        programs[rank].append(Deed("all_reduce", group, holds=True, size=4, join=number, has_joined=True))


def plant(chance: random.Random, programs: Programs) -> None:
    """Put a fault into the calls of one rank. Some do no harm."""
    program = chance.choice(programs)
    places = [at for at, deed in enumerate(program) if not deed.has_joined]
    if not places:
        return
    at = chance.choice(places)
    deed = program[at]
    match chance.choice(("drop", "move", "move", "move", "change", "wait")):
        case "drop":
            del program[at]
        case "move" if not deed.join:
            moved = program[at : at + 1 + (at + 1 < len(program) and program[at + 1].waits_for is deed)]
            del program[at : at + len(moved)]
            to = chance.choice([place for place in places if place <= len(program)])
            program[to:to] = moved
        case "change" if deed.waits_for is None:
            changes: list[dict[str, Any]] = [{"size": 16}]
            if deed.peer < 0 and not deed.batch:
                changes += [{"holds": not deed.holds}, {"blocks": True}]
            if deed.parts:
                changes.append({"parts": "float32 5\nfloat32 3"})
            if deed.peer >= 0 and not deed.on_host and not deed.batch:
                changes.append({"own_pair": not deed.own_pair})
            program[at] = replace(deed, **chance.choice(changes))
            for other in program:
                other.waits_for = program[at] if other.waits_for is deed else other.waits_for
        case "wait" if deed.waits_for is None:
            program.insert(at + 1, Deed("wait", stream=0, waits_for=deed))
        case _:
            pass


def tidy(program: list[Deed]) -> list[Deed]:
    """Without waits for what was not called before, or was waited for. A wait amid a batch comes after it."""
    calls = [deed for deed in program if deed.waits_for is None]
    after: defaultdict[int, list[Deed]] = defaultdict(list)
    awaited: set[int] = set()
    made = -1
    for deed in program:
        if deed.waits_for is None:
            made += 1
            continue
        target = deed.waits_for
        if target.holds or id(target) in awaited or not any(target is call for call in calls[: made + 1]):
            continue
        awaited.add(id(target))
        at = made
        while at + 1 < len(calls) and calls[at].batch and calls[at + 1].batch == calls[at].batch:
            at += 1
        after[at].append(deed)
    return [deed for at, call in enumerate(calls) for deed in (call, *after[at])]


# ---- what they mean


@dataclass(eq=False)
class Part:
    """A call while it is executed: the ``number``-th of what it meets ``where``."""

    deed: Deed
    rank: int
    where: tuple[object, ...]
    number: int
    has_inputs: bool = True
    has_begun: bool = False
    is_over: bool = False


@dataclass(eq=False)
class Item:
    """One thing that a host does at once: a call, a batch, or a wait, which has no parts."""

    parts: list[Part]
    wait: Deed | None = None
    is_made: bool = False

    @property
    def is_over(self) -> bool:
        return all(part.is_over for part in self.parts)


class Execution:
    """Repeats until nothing changes: hosts make what they can, what may begin begins, and what meets is over."""

    def __init__(self, programs: Programs) -> None:
        most: Counter[int] = Counter()
        for program in programs:
            for join, number in Counter(deed.join for deed in program if not deed.has_joined).items():
                most[join] = max(most[join], number)
        self.items = [list(_items(rank, with_others_calls(program, most))) for rank, program in enumerate(programs)]
        self.meetings: defaultdict[tuple[object, ...], list[Part]] = defaultdict(list)
        for part in (part for items in self.items for item in items for part in item.parts):
            self.meetings[*part.where, part.number].append(part)
        self.is_wrong = False
        while self._goes_on():
            pass

    @property
    def is_legal(self) -> bool:
        return not self.is_wrong and all(item.is_over for items in self.items for item in items)

    def _goes_on(self) -> bool:
        changed = False
        for items in self.items:
            for at, item in enumerate(items):
                if not item.is_made and not any(
                    self._stops_host(items[:before], one) for before, one in enumerate(items[:at])
                ):
                    item.is_made = changed = True
                if item.is_made and item.parts and not item.parts[0].has_begun and _may_begin(items[:at], item):
                    changed = True
                    for part in item.parts:
                        part.has_begun = True
        for meeting in self.meetings.values():
            expected = 2 if meeting[0].deed.peer >= 0 else len(GROUPS[meeting[0].deed.group])
            if len(meeting) == expected and all(part.has_begun and not part.is_over for part in meeting):
                self.is_wrong |= not _agree(meeting)
                changed = True
                for part in meeting:
                    part.is_over = True
        return changed

    def _stops_host(self, before: Sequence[Item], item: Item) -> bool:
        if not item.is_made:
            return True
        if item.wait is not None:
            target = _target(before, item.wait)
            return target.parts[0].deed.on_host and not target.is_over
        if item.parts[0].deed.on_host:
            return any(part.deed.holds for part in item.parts) and not item.is_over
        return any(part.deed.blocks and not self._have_all_come(part) for part in item.parts)

    def _have_all_come(self, part: Part) -> bool:
        """Whether the hosts of a communicator's ranks have made a call on it."""
        parts = [other for items in self.items for item in items if item.is_made for other in item.parts]
        come = {other.rank for other in parts if not other.deed.on_host and _between(other) == _between(part)}
        return come >= _between(part)[1]


def _between(part: Part) -> tuple[int, set[int]]:
    """A group, and its ranks on a communicator."""
    deed = part.deed
    return deed.group, {part.rank, deed.peer} if deed.own_pair else {*GROUPS[deed.group]}


def with_others_calls(program: Sequence[Deed], most: Counter[int]) -> Iterator[tuple[Deed, bool]]:
    """The calls of a rank, and whether it has inputs for each: in a Join, it makes those of the others."""
    own = Counter(deed.join for deed in program if not deed.has_joined)
    for deed in program:
        if deed.has_joined:
            yield from ((replace(deed, has_joined=False), False) for _ in range(most[deed.join] - own[deed.join]))
        yield deed, True


def _items(rank: int, deeds: Iterator[tuple[Deed, bool]]) -> Iterator[Item]:
    numbers: Counter[tuple[object, ...]] = Counter()
    batch: Item | None = None
    for deed, has_inputs in deeds:
        if deed.waits_for is not None:
            yield Item([], deed)
            continue
        where: tuple[object, ...] = (deed.group, deed.on_host)
        if deed.peer >= 0:
            ends = (rank, deed.peer) if deed.operation == "send" else (deed.peer, rank)
            where = (deed.group, *ends, deed.own_pair, deed.on_host, deed.tag)
        part = Part(deed, rank, where, numbers[where, deed.operation if deed.peer >= 0 else ""], has_inputs)
        numbers[where, deed.operation if deed.peer >= 0 else ""] += 1
        if batch is not None and deed.batch and batch.parts[-1].deed.batch == deed.batch:
            batch.parts.append(part)
            continue
        batch = Item([part])
        yield batch


def _target(before: Sequence[Item], wait: Deed) -> Item:
    return next(item for item in before if any(part.deed is wait.waits_for for part in item.parts))


def _communicator(item: Item) -> object:
    deed = item.parts[0].deed
    if deed.peer >= 0 and deed.on_host:
        return deed.group, deed.operation, deed.peer, deed.tag
    return deed.group, deed.on_host, deed.peer if deed.own_pair else None


def _may_begin(before: Sequence[Item], item: Item) -> bool:
    deed = item.parts[0].deed
    for at, other in enumerate(before):
        if other.wait is not None:
            target = _target(before[:at], other.wait)
            is_on_its_stream = not target.parts[0].deed.on_host and other.wait.stream == deed.stream
            if not deed.on_host and is_on_its_stream and not target.is_over:
                return False
            continue
        first = other.parts[0].deed
        holds = not first.on_host and not deed.on_host and first.holds and first.stream == deed.stream
        if not other.is_over and (holds or _communicator(other) == _communicator(item)):
            return False
    return True


def _agree(meeting: Sequence[Part]) -> bool:
    if not all(part.has_inputs for part in meeting):  # others' calls in a Join, which are then inside of it
        meeting = [part for part in meeting if part.has_inputs]
        if not all(part.deed.join and not part.deed.has_joined for part in meeting):
            return False
    return len({(part.deed.size, part.deed.parts, part.deed.has_joined) for part in meeting}) < 2


# ---- what match says

seeds = st.integers(0, 2**32)


def recorded(rank: int, program: Sequence[Deed]) -> RankCalls:
    calls: list[RankCall] = []
    numbers: dict[int, int] = {}
    for deed in program:
        if deed.waits_for is not None:
            at = numbers[id(deed.waits_for)]
            calls[at] = calls[at]._replace(awaited=len(calls), awaited_on=deed.stream)
            continue
        numbers[id(deed)] = len(calls)
        members = GROUPS[deed.group]
        made = call(deed.operation, members, size=deed.size, peer=deed.peer, sequence=len(calls), stream=deed.stream)
        waits = deed.blocks or (deed.on_host and deed.holds)
        is_async = deed.peer < 0 and not deed.holds
        join = "joined" if deed.has_joined else "inside" if deed.join else ""
        made = made._replace(asynchronous=is_async, waits=waits, on_host=deed.on_host, own_pair=deed.own_pair)
        calls.append(made._replace(tag=deed.tag, batch=deed.batch, parts=deed.parts, join=join))
    return RankCalls(rank, calls, last_step=0, is_over=True)


def is_matched(programs: Programs) -> bool:
    return match_calls([recorded(rank, program) for rank, program in enumerate(programs)]).is_matched


@BOUNDED
@hypothesis.given(seeds)
def test_no_legal_schedule_is_blamed(seed: int) -> None:
    programs = schedules(random.Random(seed), num_faults=0)
    assert Execution(programs).is_legal
    assert is_matched(programs)


@BOUNDED
@hypothesis.given(seeds)
def test_every_fault_is_found_and_harmless_changes_are_not_blamed(seed: int) -> None:
    programs = schedules(random.Random(seed), num_faults=1 + seed % 2)
    assert is_matched(programs) == Execution(programs).is_legal


def test_faults_are_planted() -> None:
    verdicts = [is_matched(schedules(random.Random(seed), num_faults=1)) for seed in range(100)]
    assert 0.2 < sum(verdicts) / len(verdicts) < 0.8
