"""Whether the calls that a job's ranks recorded match, and whether the job would hang.

The calls of all ranks are played against each other by NCCL's rules. A communicator runs one rank's calls in the order
in which that rank makes them. A collective is over when all its ranks are in it, a send when its receive has begun, and
a batch of them when all its parts are. What follows a call that is not asynchronous on the same stream waits for it;
the host waits in barriers, in calls of its own tensors, and where a communicator is made. The calls of a tagged group
on the host match by their tags.

What a stream or the host waits for later, of an asynchronous call, is not recorded: it never waits here. So a hang that
is found is one, and some that depend on such waits are not found.
"""

from __future__ import annotations

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
}
#: Calls whose sizes are not compared.
_BARRIERS = ("barrier", "monitored_barrier")
OBJECT_CALLS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


class RankCall(NamedTuple):
    """A call of one rank. Fields as in the tables ``calls`` and ``call_terms``, if not described here.

    Attributes:
        group: Its group, named alike by all of its ranks.
        members: Ranks of the job in it.
        peer: Rank of the job that it sends to or receives from; -1 for collectives.
        sequence: Number of the call in its rank's run.
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

    @property
    def kind(self) -> str:
        """The operation, by one name for all that NCCL runs as one."""
        name = self.operation.removesuffix("_coalesced")
        return _SAME.get(name, name)

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
    """

    rank: int
    calls: Iterable[RankCall]
    last_step: int
    is_over: bool
    is_copied: bool = False


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
    """

    num_calls: int
    difference: Disagreement | None
    waiting: list[Waiting]
    unproved: list[Disagreement]

    @property
    def is_matched(self) -> bool:
        """Whether no fault was found."""
        return self.difference is None and not self.waiting


#: Calls that are played. Others are of one side, such as a copy to a peer's memory, or of several parts.
_PLAYED = {*_EQUAL, "all_to_all", "send", "recv", *_BARRIERS, *OBJECT_CALLS}


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
    """Calls that begin together: one, or a batch of sends and receives."""

    rank: int
    calls: list[RankCall]
    after: _Unit | None = None  # on its stream
    followers: list[_Unit] = field(default_factory=list)
    num_open: int = 0
    has_begun: bool = False
    is_over: bool = False

    @property
    def communicator(self) -> Hashable:
        call = self.calls[0]
        if call.peer >= 0 and call.on_host:
            return call.group, call.operation, call.peer, call.tag
        return call.group, call.peer if call.own_pair else -1

    @property
    def is_synchronous(self) -> bool:
        return not self.calls[0].asynchronous and self.calls[0].peer < 0


@dataclass(eq=False)
class _Rank:
    units: Iterator[_Unit]
    queues: dict[Hashable, deque[_Unit]] = field(default_factory=dict)
    last_on_stream: dict[int, _Unit] = field(default_factory=dict)
    blocked: _Unit | None = None


class _Play:
    def __init__(self, programs: Sequence[RankCalls]) -> None:
        self._ranks = {program.rank: _Rank(_units(program)) for program in programs}
        stopped = [program.last_step - 1 for program in programs if not program.is_over]
        self._last_required = min(stopped, default=None)
        self._copied = {program.rank for program in programs if program.is_copied}
        self._num_members: dict[Channel, int] = {}
        self._from_any = {
            (call.group, program.rank, call.tag)
            for program in programs
            for call in program.calls
            if call.kind == "recv" and call.peer < 0
        }
        self._ready: list[_Unit] = []
        self._num_collectives: dict[tuple[Channel, int], int] = {}
        self._slots: dict[tuple[Channel, int], dict[int, tuple[_Unit, RankCall]]] = {}
        self._peers: dict[Hashable, tuple[deque[tuple[_Unit, RankCall]], deque[tuple[_Unit, RankCall]]]] = {}
        self._num_over = 0
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
        has_issued = False
        for unit in itertools.islice(rank.units, 0 if rank.blocked else _ISSUED_AT_ONCE):
            has_issued = True
            call = unit.calls[0]
            before = rank.last_on_stream.get(call.stream)
            if before is not None and not before.is_over:
                unit.after = before
                before.followers.append(unit)
            if unit.is_synchronous:
                rank.last_on_stream[call.stream] = unit
            rank.queues.setdefault(unit.communicator, deque()).append(unit)
            self._ready.append(unit)
            if any(call.waits for call in unit.calls):
                rank.blocked = unit
                break
        return has_issued

    def _begin(self, unit: _Unit) -> None:
        queue = self._ranks[unit.rank].queues[unit.communicator]
        if unit.has_begun or queue[0] is not unit or (unit.after is not None and not unit.after.is_over):
            return
        unit.has_begun = True
        unit.num_open = len(unit.calls)
        for call in unit.calls:
            if call.peer >= 0:
                self._meet(unit, call)
            else:
                self._join(unit, call)

    def _join(self, unit: _Unit, call: RankCall) -> None:
        number = self._num_collectives[call.group, unit.rank] = (
            self._num_collectives.get((call.group, unit.rank), -1) + 1
        )
        slot = self._slots.setdefault((call.group, number), {})
        slot[unit.rank] = unit, call
        if call.group not in self._num_members:
            self._num_members[call.group] = sum(member in self._ranks for member in call.members)
        if len(slot) < self._num_members[call.group]:
            return
        del self._slots[call.group, number]
        self._compare([Made(rank, each) for rank, (_, each) in sorted(slot.items())])
        for other, _ in slot.values():
            self._end(other)

    def _meet(self, unit: _Unit, call: RankCall) -> None:
        is_send = call.kind == "send"
        pair = (unit.rank, call.peer) if is_send else (call.peer, unit.rank)
        is_from_any = (call.group, pair[1], call.tag) in self._from_any
        if call.peer not in self._ranks or call.peer == unit.rank or is_from_any:
            self._end(unit)
            return
        sends, receives = self._peers.setdefault((call.group, *pair, call.tag * call.on_host), (deque(), deque()))
        (sends if is_send else receives).append((unit, call))
        if sends and receives:
            (sender, sent), (receiver, received) = sends.popleft(), receives.popleft()
            made = [Made(sender.rank, sent), Made(receiver.rank, received)]
            if sent.dtype != received.dtype:
                self._differ("dtype", made)
            elif sent.bytes_in != received.bytes_out:
                self._differ("bytes", made)
            self._end(sender)
            self._end(receiver)

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
        self._ready += unit.followers
        if rank.blocked is unit:
            rank.blocked = None

    # ---- agreement

    def _differ(self, what: str, made: list[Made]) -> None:
        self._difference = self._difference or Disagreement(what, made)

    def _compare(self, made: list[Made]) -> None:
        calls = [each.call for each in made]
        if len({call.kind for call in calls}) > 1:
            return self._differ("operation", made)
        kind = calls[0].kind
        if kind in (*_BARRIERS, *OBJECT_CALLS):
            return None
        if len({call.dtype for call in calls if call.dtype}) > 1:
            return self._differ("dtype", made)
        if len({call.reduction for call in calls}) > 1:
            return self._differ("reduction", made)
        if len({call.root for call in calls}) > 1:
            return self._differ("root", made)
        if kind == "all_to_all":
            return self._compare_exchange(made)
        return self._compare_bytes(made)

    def _compare_bytes(self, made: list[Made]) -> None:
        calls = {each.rank: each.call for each in made}
        kind = made[0].call.kind
        if any(call.is_uneven for call in calls.values()):
            is_sent = kind == "reduce_scatter"
            own = {rank: call.bytes_out if is_sent else call.bytes_in for rank, call in calls.items()}
            if any(_part(call, rank, is_sent=is_sent) != own[rank] for call in calls.values() for rank in calls):
                self._differ("bytes", made)
        elif kind in _EQUAL and len({_EQUAL[kind](call) for call in calls.values()}) > 1:
            self._differ("bytes", made)

    def _compare_exchange(self, made: list[Made]) -> None:
        is_uneven = any(each.call.is_uneven for each in made)
        if not is_uneven and len({(each.call.bytes_in, each.call.bytes_out) for each in made}) == 1:
            return
        if is_uneven:
            made = [each for each in made if each.rank not in self._copied]
        for sender in made:
            for receiver in made:
                sent = _part(sender.call, receiver.rank, is_sent=True)
                if sent != _part(receiver.call, sender.rank, is_sent=False):
                    if is_uneven:
                        self._unproved.append(Disagreement("bytes", [sender, receiver]))
                    else:
                        self._differ("bytes", [sender, receiver])
                    return

    # ---- what is left

    def _waiting(self) -> list[Waiting]:
        stuck, is_required = [], False
        for rank in self._ranks.values():
            left = [unit for queue in rank.queues.values() for unit in queue]
            if begun := [unit for unit in left if unit.has_begun]:
                stuck.append(min(begun, key=lambda unit: unit.calls[0].sequence))
                is_required |= any(self._is_required(unit) for unit in (*left, *rank.units))
        return [Waiting(Made(unit.rank, unit.calls[0]), self._missing(unit)) for unit in stuck] if is_required else []

    def _is_required(self, unit: _Unit) -> bool:
        return self._last_required is None or unit.calls[0].step <= self._last_required

    def _missing(self, unit: _Unit) -> tuple[int, ...]:
        call = unit.calls[0]
        if call.peer >= 0:
            return (call.peer,)
        number = self._num_collectives[call.group, unit.rank]
        joined = self._slots.get((call.group, number), {})
        return tuple(rank for rank in call.members if rank in self._ranks and rank not in joined)


def _part(call: RankCall, rank: int, *, is_sent: bool) -> int:
    """Bytes that a call sends to a rank or receives from it."""
    parts, whole = (call.sent_parts, call.bytes_in) if is_sent else (call.received_parts, call.bytes_out)
    return int(parts[call.members.index(rank)]) if len(parts) else whole // len(call.members)


def _units(program: RankCalls) -> Iterator[_Unit]:
    unit: _Unit | None = None
    for call in program.calls:
        if call.kind not in _PLAYED or (call.kind == "recv" and call.peer < 0):
            continue
        before = unit.calls[-1] if unit else None
        if unit and before and call.batch and (before.group, before.batch) == (call.group, call.batch):
            unit.calls.append(call)
            continue
        if unit:
            yield unit
        unit = _Unit(program.rank, [call])
    if unit:
        yield unit
