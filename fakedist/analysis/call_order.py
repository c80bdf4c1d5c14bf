"""Whether the calls that a job's ranks recorded match, and whether the job would hang.

The calls of all ranks are played against each other by the rules of their backends. A communicator of NCCL runs one
rank's calls in the order in which that rank makes them. A collective is over when all its ranks are in it, a send when
its receive has begun, and coalesced calls, which begin together, when all of them are. A call of NCCL and the wait for
one hold up what follows on their stream, not the host. The host waits in barriers, and where a communicator is made
for the hosts of its ranks.
Gloo's calls are the host's, which waits in them or for them; its sends and receives match by their tags.

A rank that has no inputs left in a ``Join`` makes the calls of the others there, until they have none either.

Of an asynchronous call, the wait by ``Work.wait`` is recorded, and one for a future or an event is not: there it never
waits here. So a hang that is found is one, and some that depend on such waits are not found.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fakedist.rundir.tape import Channel

#: Operations that NCCL runs as one.
_SAME = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "gather_into_tensor": "gather",
    "send_object_list": "send",
    "recv_object_list": "recv",
}
#: Calls whose sizes are not compared.
_BARRIERS = ("barrier", "monitored_barrier")
#: Stands for a dtype that a dump does not have, as torch 2.3 wrote none: bytes are then numbers of elements.
ELEMENTS = "elements"
OBJECT_CALLS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
#: Calls by which ranks can tell each other sizes have no more bytes.
_TELLING_BYTES = 1 << 16


class RankCall(NamedTuple):
    """A call of one rank. Fields as in the tables ``calls`` and ``call_terms``, if not described here.

    Attributes:
        group: Its group, named alike by all of its ranks.
        members: Ranks of the job in it.
        peer: Rank of the job that it sends to or receives from; -1 for collectives.
        sequence: Number of the call in its rank's run.
        awaited: Number of the first call after the wait for it; -1 where no wait was seen.
    """

    group: Channel
    members: Sequence[int]
    peer: int
    sequence: int
    operation: str
    bytes_in: int
    bytes_out: int
    dtype: str
    asynchronous: bool
    stream: int
    step: int
    reduction: str
    root: int
    tag: int
    batch: int
    sent_parts: Sequence[int]
    received_parts: Sequence[int]
    on_host: bool
    own_pair: bool
    waits: bool
    parts: str
    join: str
    awaited: int
    awaited_on: int

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Dtype and bytes of each of its ``parts``."""
        rows = [part.split() for part in self.parts.splitlines()]
        return [(dtype, int(size)) for dtype, size in rows]

    @property
    def has_unknown_wait(self) -> bool:
        """Whether it returns before it is over, and no wait for it was seen."""
        returns_early = self.asynchronous or (self.is_pair and "object" not in self.operation)
        return returns_early and self.kind in _PLAYED and not (self.waits or self.awaited >= 0)

    @property
    def kind(self) -> str:
        """The operation, by one name for all that NCCL runs as one."""
        name = self.operation.removesuffix("_coalesced")
        return _SAME.get(name, name)

    @property
    def is_pair(self) -> bool:
        """Whether it is of two ranks."""
        return self.kind in ("send", "recv")

    @property
    def is_uneven(self) -> bool:
        """Whether its parts for or from other ranks are not equal."""
        return len(self.sent_parts) > 0 or len(self.received_parts) > 0

    @property
    def agreed_bytes(self) -> tuple[int, ...]:
        """Bytes that all ranks have alike which make it as this one does."""
        if self.is_uneven or self.kind in OBJECT_CALLS:
            return ()
        return (_EQUAL[self.kind](self),) if self.kind in _EQUAL else (self.bytes_in, self.bytes_out)


#: Bytes that all ranks of a collective have alike.
_EQUAL: dict[str, Callable[[RankCall], int]] = {
    "all_reduce": lambda call: call.bytes_in,
    "reduce": lambda call: call.bytes_in,
    "broadcast": lambda call: max(call.bytes_in, call.bytes_out),
    "all_gather": lambda call: call.bytes_in,
    "reduce_scatter": lambda call: call.bytes_out,
    "gather": lambda call: call.bytes_in,
    "scatter": lambda call: call.bytes_out,
}


@dataclass(frozen=True)
class RankCalls:
    """The calls of one rank, and where they end.

    Attributes:
        calls: In order.
        last_step: The last step that it was recorded to the end of; 0 without one.
        is_over: Whether the script ended: it makes no further call.
        is_copied: Whether these are the calls of an alike rank, so that uneven parts are not its own.
        is_traced: Whether they are of a hang's dump: a group makes each together, whatever the operation.
    """

    rank: int
    calls: Iterable[RankCall]
    last_step: int
    is_over: bool
    is_copied: bool = False
    is_traced: bool = False


@dataclass(frozen=True)
class Made:
    """A call, by its rank."""

    rank: int
    call: RankCall


@dataclass(frozen=True)
class Disagreement:
    """Calls that meet and do not agree: in ``what``, by rank."""

    what: str
    calls: list[Made]


@dataclass(frozen=True)
class Waiting:
    """A rank that waits forever in a call, for ranks that never make theirs."""

    made: Made
    missing: tuple[int, ...]


@dataclass(frozen=True)
class CallsMatch:
    """The result of playing the calls.

    Attributes:
        num_calls: Calls that were over.
        difference: The first calls that do not agree, with which it ends.
        waiting: Ranks that wait forever; empty if none does.
        unproved: Exchanges of uneven parts that do not agree: what a rank receives there follows from what others sent.
        groups: The first process groups that ranks do not make alike, by rank; empty if all make the same in one order.
    """

    num_calls: int
    difference: Disagreement | None
    waiting: list[Waiting]
    unproved: list[Disagreement]
    groups: dict[int, str] = field(default_factory=dict)

    @property
    def is_matched(self) -> bool:
        """Whether no fault was found."""
        return self.difference is None and not self.waiting and not self.groups


def streams_of(calls: Iterable[RankCall]) -> set[int]:
    """The streams that are held up by calls or hold them up."""
    return {call.stream for call in calls if call.kind in _PLAYED and not call.on_host}


#: Collectives whose dtypes and sizes are compared.
_SIZED = {*_EQUAL, "all_to_all"}
#: Calls that are played. Others are of one side, such as a copy to a peer's memory, or of several parts.
_PLAYED = {*_SIZED, "send", "recv", *_BARRIERS, *OBJECT_CALLS}


def match_calls(programs: Sequence[RankCalls]) -> CallsMatch:
    """Play the ranks' calls. Ranks that are not among them are assumed to make the matching calls.

    A rank that was stopped may make further calls. Of those of its last step, nothing is required: the steps of another
    rank may end elsewhere among them.
    """
    return _Play(programs).run()


#: Calls that a rank makes before the others make theirs.
_ISSUED_AT_ONCE = 256


@dataclass(eq=False)
class _Unit:
    """Calls that begin together: one, or coalesced ones."""

    rank: int
    calls: list[RankCall]
    num_before: int = 0  # units that are not over, which its stream waits for
    followers: list[_Unit] = field(default_factory=list)
    num_open: int = 0
    has_begun: bool = False
    is_over: bool = False

    @property
    def communicator(self) -> Hashable:
        call = self.calls[0]
        if call.is_pair and call.on_host:
            return call.group, call.operation, call.peer, call.tag
        return call.group, call.on_host, call.peer if call.own_pair else -1

    @property
    def made_communicator(self) -> tuple[Hashable, Sequence[int]] | None:
        """The communicator that the host may make here with its ranks, and these; None for calls of the host."""
        call = self.calls[0]
        if call.on_host or call.kind in (*_BARRIERS, *OBJECT_CALLS):
            return None
        members = sorted((self.rank, call.peer)) if call.own_pair else call.members
        return (call.group, *(members if call.own_pair else ())), members

    @property
    def holds_stream(self) -> bool:
        return any(not call.asynchronous and not call.is_pair for call in self.calls)


@dataclass(eq=False)
class _Rank:
    """Attributes:
    next: The unit that it makes next, if it was read from ``units`` already.
    waits: Waits that are to come, as a heap: before which call, a number, the stream, and what is waited for.
    holding: Units by the stream that waits for them.
    host_waits_for: The unit that is over before the host goes on; None while it does not wait.
    """

    units: Iterator[_Unit]
    next: _Unit | None = None
    queues: dict[Hashable, deque[_Unit]] = field(default_factory=dict)
    waits: list[tuple[int, int, int, _Unit]] = field(default_factory=list)
    holding: dict[int, list[_Unit]] = field(default_factory=dict)
    host_waits_for: _Unit | None = None


@dataclass(eq=False)
class _Meeting:
    """The collectives of a group, of the host or of the GPU: a group may have a backend for each.

    Attributes:
        num_members: Its ranks that are played.
        numbers: By rank, how many it is in or through.
        slots: By number, the ranks that are in.
        joined: Ranks without inputs in a ``Join``, which are in every collective of the others.
    """

    num_members: int
    numbers: dict[int, int] = field(default_factory=dict)
    slots: dict[int, dict[int, tuple[_Unit, RankCall]]] = field(default_factory=dict)
    joined: dict[int, tuple[_Unit, RankCall]] = field(default_factory=dict)


_OpenCalls = deque[tuple[_Unit, RankCall]]


class _Play:
    def __init__(self, programs: Sequence[RankCalls]) -> None:
        self._ranks = {program.rank: _Rank(_units(program)) for program in programs}
        stopped = [program.last_step - 1 for program in programs if not program.is_over]
        self._last_required = min(stopped, default=None)
        self._copied = {program.rank for program in programs if program.is_copied}
        receives = [(program.rank, call) for program in programs for call in program.calls if call.kind == "recv"]
        from_one = {(call.group, rank, call.tag) for rank, call in receives if call.peer >= 0}
        from_any = {(call.group, rank, call.tag): call for rank, call in receives if call.peer < 0}
        self._from_any = from_any.keys()
        #: Which sends these receive is not known.
        self._from_some = {end for end, call in from_any.items() if end in from_one or "object" in call.operation}
        self._ready: list[_Unit] = []
        self._meetings: dict[tuple[Channel, bool], _Meeting] = {}
        self._peers: dict[Hashable, tuple[_OpenCalls, _OpenCalls]] = {}
        #: Ranks whose host has come to a communicator's first call.
        self._come: dict[Hashable, set[int]] = {}
        self._num_over = 0
        self._told = set[int]()
        self._difference: Disagreement | None = None
        self._unproved: list[Disagreement] = []

    def run(self) -> CallsMatch:
        has_issued = True
        while has_issued and self._difference is None:
            has_issued = False
            for rank in self._ranks.values():
                has_issued |= self._issue(rank)
            while self._ready and self._difference is None:
                self._begin(self._ready.pop())
        waiting = [] if self._difference is not None else self._waiting()
        return CallsMatch(self._num_over, self._difference, waiting, self._unproved)

    def _issue(self, rank: _Rank) -> bool:
        """Let a rank make its next calls, not all at once: those of a large job would fill the memory."""
        for number in range(_ISSUED_AT_ONCE):
            unit = rank.next = rank.next or next(rank.units, None)
            if unit is None or self._host_waits(rank, unit):
                return number > 0
            rank.next = None
            if not unit.calls[0].on_host:
                self._put_on_stream(rank, unit)
            for call in unit.calls:
                if call.awaited >= 0:
                    heapq.heappush(rank.waits, (call.awaited, call.sequence, call.awaited_on, unit))
            rank.queues.setdefault(unit.communicator, deque()).append(unit)
            self._ready.append(unit)
            if (made := unit.made_communicator) is not None:
                self._come.setdefault(made[0], set()).add(unit.rank)
            if any(call.waits for call in unit.calls):
                rank.host_waits_for = unit
        return True

    def _host_waits(self, rank: _Rank, unit: _Unit) -> bool:
        """Whether the host is in a wait before it makes a unit. The waits of streams until then take effect."""
        while rank.host_waits_for is None or rank.host_waits_for.is_over or self._is_made(rank.host_waits_for):
            rank.host_waits_for = None
            if not rank.waits or rank.waits[0][0] > unit.calls[0].sequence:
                return False
            _, _, stream, awaited = heapq.heappop(rank.waits)
            if awaited.calls[0].on_host:
                rank.host_waits_for = awaited
            else:
                rank.holding.setdefault(stream, []).append(awaited)
        return True

    def _is_made(self, unit: _Unit) -> bool:
        """Whether all ranks' hosts have come to make the unit's communicator: they need not wait for its calls."""
        if (made := unit.made_communicator) is None:
            return False
        communicator, members = made
        return all(member in self._come[communicator] for member in members if member in self._ranks)

    def _put_on_stream(self, rank: _Rank, unit: _Unit) -> None:
        stream = unit.calls[0].stream
        holding = [before for before in rank.holding.get(stream, ()) if not before.is_over]
        unit.num_before = len(holding)
        for before in holding:
            before.followers.append(unit)
        rank.holding[stream] = [unit] if unit.holds_stream else holding

    def _begin(self, unit: _Unit) -> None:
        queue = self._ranks[unit.rank].queues[unit.communicator]
        if unit.has_begun or unit.num_before or queue[0] is not unit:
            return
        unit.has_begun = True
        unit.num_open = len(unit.calls)
        for call in unit.calls:
            if call.is_pair:
                self._meet(unit, call)
            else:
                self._join(unit, call)

    def _join(self, unit: _Unit, call: RankCall) -> None:
        meeting = self._meetings.get((call.group, call.on_host))
        if meeting is None:
            num_members = sum(member in self._ranks for member in call.members)
            meeting = self._meetings[call.group, call.on_host] = _Meeting(num_members)
        if call.join == "joined":
            meeting.joined[unit.rank] = unit, call
            for number in list(meeting.slots):
                self._end_if_complete(meeting, number)
            self._end_join(meeting)
            return
        number = meeting.numbers.get(unit.rank, 0)
        meeting.numbers[unit.rank] = number + 1
        meeting.slots.setdefault(number, {})[unit.rank] = unit, call
        self._end_if_complete(meeting, number)

    def _end_if_complete(self, meeting: _Meeting, number: int) -> None:
        slot = meeting.slots[number]
        if len(slot) + len(meeting.joined) < meeting.num_members:
            return
        del meeting.slots[number]
        made = [Made(rank, call) for rank, (_, call) in sorted(slot.items())]
        self._compare(made)
        if meeting.joined and not all(each.call.join for each in made):
            made += [Made(rank, call) for rank, (_, call) in meeting.joined.items()]
            self._differ("inputs left", sorted(made, key=lambda each: each.rank))
        for unit, _ in slot.values():
            self._end(unit)

    def _end_join(self, meeting: _Meeting) -> None:
        """If no rank of a Join has inputs left, their next collective is the same one."""
        if len(meeting.joined) < meeting.num_members:
            return
        joined, meeting.joined = meeting.joined, {}
        meeting.numbers = dict.fromkeys(joined, max(meeting.numbers.values(), default=0))
        for unit, _ in joined.values():
            self._end(unit)

    def _meet(self, unit: _Unit, call: RankCall) -> None:
        is_send = call.kind == "send"
        receiver = call.peer if is_send else unit.rank
        end = call.group, receiver, call.tag
        expected = {call.peer} if call.peer >= 0 and end not in self._from_any else {*call.members}
        if receiver < 0 or end in self._from_some or not expected <= self._ranks.keys():
            self._end(unit)
            return
        sends, receives = self._open_between(unit.rank, call)
        (sends if is_send else receives).append((unit, call))
        if sends and receives:
            (sender, sent), (taker, received) = sends.popleft(), receives.popleft()
            made = [Made(sender.rank, sent), Made(taker.rank, received)]
            self._note_telling(made)
            are_objects = ["object" in call.operation for call in (sent, received)]
            if len(set(are_objects)) > 1:
                self._differ("operation", made)
            elif sent.dtype != received.dtype and not all(are_objects):
                self._differ("dtype", made)
            elif sent.bytes_in != received.bytes_out and not all(are_objects):
                self._differ("bytes", made)
            self._end(sender)
            self._end(taker)

    def _open_between(self, rank: int, call: RankCall) -> tuple[_OpenCalls, _OpenCalls]:
        """Sends and receives of two ranks, or of all to one that receives from any, that have begun and not met."""
        sender, receiver = (rank, call.peer) if call.kind == "send" else (call.peer, rank)
        sender = -1 if (call.group, receiver, call.tag) in self._from_any else sender
        key = call.group, sender, receiver, call.own_pair, call.tag if call.on_host else None
        return self._peers.setdefault(key, (deque(), deque()))

    def _end(self, unit: _Unit) -> None:
        unit.num_open -= 1
        if unit.num_open:
            return
        unit.is_over = True
        self._num_over += len(unit.calls)
        rank = self._ranks[unit.rank]
        queue = rank.queues[unit.communicator]
        queue.popleft()
        if queue:
            self._ready.append(queue[0])
        for follower in unit.followers:
            follower.num_before -= 1
        self._ready += unit.followers

    # ---- agreement

    def _differ(self, what: str, made: list[Made]) -> None:
        self._difference = self._difference or Disagreement(what, made)

    def _compare(self, made: list[Made]) -> None:
        calls = [each.call for each in made]
        if len({call.kind for call in calls}) > 1:
            return self._differ("operation", made)
        kind = calls[0].kind
        for what in ("dtype", "reduction", "root", "parts"):
            terms = {getattr(call, what) for call in calls if what != "dtype" or (call.dtype and kind in _SIZED)}
            if len(terms) > 1:
                return self._differ(what, made)
        if kind == "all_to_all":
            self._compare_exchange(made)
        elif kind in _SIZED:
            self._compare_bytes(made)
        return self._note_telling(made)

    def _compare_bytes(self, made: list[Made]) -> None:
        calls = {each.rank: each.call for each in made}
        kind = made[0].call.kind
        if any(call.is_uneven for call in calls.values()):
            is_sent = kind == "reduce_scatter"
            own = {rank: call.bytes_out if is_sent else call.bytes_in for rank, call in calls.items()}
            if any(_part(call, rank, is_sent=is_sent) != own[rank] for call in calls.values() for rank in calls):
                self._differ("bytes", made)
        elif len({_EQUAL[kind](call) for call in calls.values()}) > 1:
            self._differ("bytes", made)

    def _note_telling(self, made: list[Made]) -> None:
        """Remember which ranks may know sizes from others."""
        if made[0].call.dtype and min(made[0].call.bytes_in, made[0].call.bytes_out) <= _TELLING_BYTES:
            self._told.update(each.rank for each in made)

    def _compare_exchange(self, made: list[Made]) -> None:
        is_uneven = any(each.call.is_uneven for each in made)
        if not is_uneven and len({(each.call.bytes_in, each.call.bytes_out) for each in made}) == 1:
            return
        if is_uneven:
            made = [each for each in made if each.rank not in self._copied]
        told = [each for each in made if is_uneven and each.rank in self._told and _may_be_told(each)]
        sure = [pair for each in made for pair in ([(each, each)] if each in told else itertools.product(made, [each]))]
        if (differ := next(itertools.filterfalse(_fit, sure), None)) is not None:
            self._differ("bytes", list(differ))
        elif (unsure := next(itertools.filterfalse(_fit, itertools.product(made, told)), None)) is not None:
            self._unproved.append(Disagreement("bytes", list(unsure)))

    # ---- what is left

    def _waiting(self) -> list[Waiting]:
        stuck = []
        is_required = False
        for rank in self._ranks.values():
            left = [unit for queue in rank.queues.values() for unit in queue]
            if begun := [unit for unit in left if unit.has_begun]:
                stuck.append(min(begun, key=lambda unit: unit.calls[0].sequence))
                to_come = [*left, *([rank.next] if rank.next else ()), *rank.units]
                is_required |= any(
                    self._last_required is None or unit.calls[0].step <= self._last_required for unit in to_come
                )
        return [self._waiting_in(unit) for unit in stuck] if is_required else []

    def _waiting_in(self, unit: _Unit) -> Waiting:
        """The first call of a unit that is not over, and the ranks that it waits for."""
        for call in unit.calls:
            if call.is_pair:
                if any(call is one for _, one in itertools.chain(*self._open_between(unit.rank, call))):
                    peers = (call.peer,) if call.peer >= 0 else call.members
                    return Waiting(Made(unit.rank, call), tuple(rank for rank in peers if rank != unit.rank))
                continue
            meeting = self._meetings[call.group, call.on_host]
            slots = [*meeting.slots.values(), meeting.joined]
            inside = [slot for slot in slots if unit.rank in slot and slot[unit.rank][1] is call]
            if inside:
                present = {*inside[0], *meeting.joined}
                missing = [rank for rank in call.members if rank in self._ranks and rank not in present]
                return Waiting(Made(unit.rank, call), tuple(missing))
        raise AssertionError("a unit that is over waits")


def _fit(pair: tuple[Made, Made]) -> bool:
    """Whether a sender's part for a receiver is as large as the receiver's part from it."""
    sender, receiver = pair
    sent = _part(sender.call, receiver.rank, is_sent=True)
    return sent == _part(receiver.call, sender.rank, is_sent=False)


def _may_be_told(made: Made) -> bool:
    """Whether others may have sent it its sizes, or those of the way back: all sent it what it would send itself.

    In a run, the other ranks are like this one.
    """
    call = made.call
    sizes = [{_part(call, rank, is_sent=is_sent) for rank in call.members} for is_sent in (True, False)]
    own = [_part(call, made.rank, is_sent=is_sent) for is_sent in (False, True)]
    return sizes[0] == {own[0]} or sizes[1] == {own[1]}


def _part(call: RankCall, rank: int, *, is_sent: bool) -> int:
    """Bytes that a call sends to a rank or receives from it."""
    parts, whole = (call.sent_parts, call.bytes_in) if is_sent else (call.received_parts, call.bytes_out)
    return int(parts[call.members.index(rank)]) if len(parts) else whole // len(call.members)


def _units(program: RankCalls) -> Iterator[_Unit]:
    unit: _Unit | None = None
    for call in program.calls:
        if not (program.is_traced or call.kind in _PLAYED):
            continue
        before = unit.calls[-1] if unit else None
        is_coalesced = call.batch and not call.on_host
        if unit and before and is_coalesced and (before.group, before.batch) == (call.group, call.batch):
            unit.calls.append(call)
            continue
        if unit:
            yield unit
        unit = _Unit(program.rank, [call])
    if unit:
        yield unit
