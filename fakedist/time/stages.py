"""Places the steps of several ranks together: a receive ends when the rank that sends has sent.

Each rank's launches are walked in their own order (:class:`fakedist.time.timeline.Timeline`). Sends and receives of two
ranks on one group meet in the order in which each rank made them. A send begins when its rank reaches it and does not
wait for the receiver, as the pipeline schedules of today post their receives early. So warm-up, bubble and cool-down
come out of the schedule that the ranks ran, not out of a formula.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fakedist.time.timeline import EVENTS, Array, HostTimes, Meeting, Placed, Timeline


class Transfer(NamedTuple):
    """A send or receive of one rank.

    Attributes:
        row: Its place in the rank's launches.
        is_send: Whether it is a send.
        peer: The other rank.
        group: The name of the group, the same on both ranks.
        time_us: What it takes once both ranks are ready.
    """

    row: int
    is_send: bool
    peer: int
    group: str
    time_us: float


@dataclass(frozen=True)
class RankStep:
    """The step of one rank.

    Attributes:
        rank: The rank.
        timeline: Its launches.
        duration_us: What each row takes. Those of transfers with a rank that is placed too are ignored.
        transfers: Its sends and receives, those that run at once in one list.
    """

    rank: int
    timeline: Timeline
    duration_us: Array
    transfers: Sequence[Sequence[Transfer]] = ()


@dataclass(frozen=True)
class PlacedTogether:
    """Where the launches of several ranks are.

    Attributes:
        placed: By rank.
        num_unmatched: Transfers whose other side was never reached, by rank: they took their own time alone.
    """

    placed: dict[int, Placed]
    num_unmatched: dict[int, int]


#: What tells the two ends of one transfer: sender, receiver, group.
_Channel = tuple[int, int, str]
_Walk = Generator[Meeting, Sequence[float], Placed]


@dataclass
class _Walker:
    """A rank on its way through its launches."""

    rank: int
    walk: _Walk
    transfers: dict[int, Sequence[Transfer]]
    num_received: dict[_Channel, int] = field(default_factory=lambda: defaultdict(int))
    meeting: Meeting | None = None


def place_together(steps: Sequence[RankStep], host: HostTimes) -> PlacedTogether:
    """Place the steps of several ranks that send to each other.

    Args:
        steps: One of each rank. Transfers with other ranks take their own time.
        host: What the host takes.
    """
    together = _Together({step.rank for step in steps})
    for step in steps:
        transfers = {rows[0].row: rows for rows in step.transfers}
        meetings = {first: [each.row for each in rows] for first, rows in transfers.items()}
        walk = step.timeline.walk(step.duration_us, host, meetings)
        together.begin(_Walker(step.rank, walk, transfers))
    return together.run()


class _Together:
    """Walks several ranks, each until it must wait for another rank."""

    def __init__(self, ranks: set[int]) -> None:
        self._ranks = ranks
        self._sent: dict[_Channel, list[float]] = defaultdict(list)
        self._ready: deque[_Walker] = deque()
        self._waiting: dict[int, _Walker] = {}
        self._placed: dict[int, Placed] = {}
        self._unmatched: dict[int, int] = {}

    def begin(self, walker: _Walker) -> None:
        self._unmatched[walker.rank] = 0
        self._advance(walker, None)

    def run(self) -> PlacedTogether:
        while self._ready or self._waiting:
            if not self._ready:
                self._give_up(min(self._waiting.values(), key=lambda each: (_begin(each), each.rank)))
                continue
            walker = self._ready.popleft()
            self._advance(walker, self._ends(walker, unmatched=False))
        return PlacedTogether(self._placed, self._unmatched)

    def _advance(self, walker: _Walker, ends: Sequence[float] | None) -> None:
        """Walk on to the rank's next meeting, or to its end."""
        try:
            walker.meeting = next(walker.walk) if ends is None else walker.walk.send(ends)
        except StopIteration as end:
            self._placed[walker.rank] = end.value
            return
        begin = walker.meeting.start_us
        for transfer in self._transfers(walker):
            if transfer.is_send and transfer.peer in self._ranks:
                self._sent[walker.rank, transfer.peer, transfer.group].append(begin)
        self._waiting[walker.rank] = walker
        for each in list(self._waiting.values()):
            if self._can_go_on(each):
                self._ready.append(self._waiting.pop(each.rank))

    def _can_go_on(self, walker: _Walker) -> bool:
        """Whether everything that the rank receives now has been sent."""
        wanted: dict[_Channel, int] = defaultdict(int)
        for transfer in self._transfers(walker):
            if not transfer.is_send and transfer.peer in self._ranks:
                channel = (transfer.peer, walker.rank, transfer.group)
                wanted[channel] += 1
        return all(len(self._sent[each]) >= walker.num_received[each] + number for each, number in wanted.items())

    def _ends(self, walker: _Walker, *, unmatched: bool) -> list[float]:
        """When each transfer of the meeting ends."""
        begin, found = _begin(walker), []
        for transfer in self._transfers(walker):
            start = begin
            if not transfer.is_send and transfer.peer in self._ranks:
                channel = (transfer.peer, walker.rank, transfer.group)
                place, sent = walker.num_received[channel], self._sent[channel]
                walker.num_received[channel] += 1
                if place < len(sent):
                    start = max(start, sent[place])
                elif unmatched:
                    self._unmatched[walker.rank] += 1
            found.append(start + transfer.time_us)
        return found

    def _give_up(self, walker: _Walker) -> None:
        """No rank can go on: let one have what no rank will send, as if it had come at once."""
        del self._waiting[walker.rank]
        self._advance(walker, self._ends(walker, unmatched=True))

    def _transfers(self, walker: _Walker) -> Sequence[Transfer]:
        assert walker.meeting is not None
        return walker.transfers[walker.meeting.rows[0]]


def _begin(walker: _Walker) -> float:
    assert walker.meeting is not None
    return walker.meeting.start_us


def transfers_of(
    launches_call: Sequence[int], what: Sequence[int], streams: Sequence[object], known: Mapping[int, Transfer]
) -> list[list[Transfer]]:
    """The sends and receives among a rank's launches, those that run at once together.

    Consecutive sends and receives of one stream run at once, as NCCL runs those of a group call, if the host launched
    nothing but events in between.

    Args:
        launches_call: The sequence number of each row's call; -1 if it is none.
        what: What each row is, a place in LAUNCH_KINDS.
        streams: The stream of each row.
        known: The transfers by sequence number; their ``row`` is ignored.
    """
    found: list[list[Transfer]] = []
    stream: object = None
    for row, (call, kind) in enumerate(zip(launches_call, what, strict=True)):
        transfer = known.get(call) if call >= 0 else None
        if transfer is not None:
            if stream is None or streams[row] != stream:
                found.append([])
            found[-1].append(transfer._replace(row=row))
            stream = streams[row]
        elif kind not in EVENTS:
            stream = None
    return found
