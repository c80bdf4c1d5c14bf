"""Places the steps of several ranks together: a receive ends when the rank that sends has sent.

Each rank's launches are walked in their own order (:class:`fakedist.cost_model.timeline.Timeline`). Sends and receives
of two ranks on one group meet in the order in which each rank made them. A send does not wait for the receiver, as
today's pipeline schedules post receives early. A collective begins when the last of its placed ranks reaches it. So
warm-up, bubble and cool-down follow from the schedule that ran, not from a formula.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from fakedist.cost_model.hosts import HostCosts
from fakedist.cost_model.timeline import EVENTS, Array, Placed, Rendezvous, Timeline
from fakedist.rundir.launch_records import LAUNCH_KINDS
from fakedist.units import parse_rank_list


class Transfer(NamedTuple):
    """A send, receive or collective of one rank.

    Attributes:
        row: Index in the rank's launches.
        peer: The other rank of a send or receive; -1 of a collective.
        group: The name, the same on all of the group's ranks.
        time_us: Its time once all are ready.
        members: Ranks of a collective; none of a send or receive.
    """

    row: int
    is_send: bool
    peer: int
    group: str
    time_us: float
    members: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RankStep:
    """The step of one rank.

    Attributes:
        duration_us: By row; those of ``transfers`` are ignored.
        transfers: Sends, receives, and collectives with other placed ranks; those that run at once in one list.
    """

    rank: int
    timeline: Timeline
    duration_us: Array
    transfers: Sequence[Sequence[Transfer]] = ()

    def with_durations(self, duration_us: Array) -> RankStep:
        """Replace the durations of the step, its transfers' included."""
        transfers = [
            [call._replace(time_us=float(duration_us[call.row])) for call in calls] for calls in self.transfers
        ]
        return replace(self, duration_us=duration_us, transfers=transfers)


@dataclass(frozen=True)
class PlacedTogether:
    """The launches of several ranks, placed, by rank.

    ``num_unmatched`` counts transfers whose other side was never reached: they did not wait. ``num_lacking`` counts
    receives that a step lacks, for what the others send.
    """

    placed: dict[int, Placed]
    num_unmatched: dict[int, int]
    num_lacking: Mapping[int, int]


#: What tells the calls of one rank that another may wait for: sender, receiver (-1 of a collective), group.
_Channel = tuple[int, int, str]
_Walk = Generator[Rendezvous, "Sequence[float] | None", Placed]


class _Met(NamedTuple):
    """A rendezvous that has begun; ``needs`` has the channels that transfers wait for, and positions in each."""

    start_us: float
    transfers: Sequence[Transfer]
    needs: list[list[tuple[_Channel, int]]]


@dataclass
class _Walker:
    """A rank on its way through its launches."""

    rank: int
    walk: _Walk
    transfers: dict[int, Sequence[Transfer]]
    num_calls: dict[_Channel, int] = field(default_factory=lambda: defaultdict(int))
    met: dict[int, _Met] = field(default_factory=dict)
    due: _Met | None = None


def place_together(steps: Sequence[RankStep], host: HostCosts) -> PlacedTogether:
    """Place the steps of several ranks; transfers with ranks not among them take their own time.

    Where a rank receives less often than the other sends to it, its first receives are those that lack: a later stage
    makes the first one before its step's first forward, in the step before.
    """
    ranks = {step.rank for step in steps}
    pairs = [(step.rank, call) for step in steps for calls in step.transfers for call in calls if not call.members]
    sent = Counter((rank, call.peer, call.group) for rank, call in pairs if call.is_send)
    received = Counter((call.peer, rank, call.group) for rank, call in pairs if not call.is_send)
    together = _Together(ranks, {channel: n for channel, n in (sent - received).items() if channel[1] in ranks})
    for step in steps:
        transfers = {rows[0].row: rows for rows in step.transfers}
        rendezvous = {first: [transfer.row for transfer in rows] for first, rows in transfers.items()}
        walk = step.timeline.walk(step.duration_us, host, rendezvous)
        together.begin(_Walker(step.rank, walk, transfers))
    return together.run()


class _Together:
    """Walks several ranks, each until it must wait for another rank."""

    def __init__(self, ranks: set[int], lacking: Mapping[_Channel, int]) -> None:
        self._ranks, self._lacking = ranks, lacking
        self._reached: dict[_Channel, list[float]] = defaultdict(list)
        self._ready: deque[_Walker] = deque()
        self._waiting: dict[int, _Walker] = {}
        self._placed: dict[int, Placed] = {}
        self._unmatched: dict[int, int] = {}

    def begin(self, walker: _Walker) -> None:
        self._unmatched[walker.rank] = 0
        self._advance(walker, None)

    def run(self) -> PlacedTogether:
        while self._ready or self._waiting:
            if self._ready:
                walker = self._ready.popleft()
            else:  # No rank can go on: let one have what no rank will send, as if it had come at once.
                walker = min(self._waiting.values(), key=lambda walker_of: (_due(walker_of).start_us, walker_of.rank))
                del self._waiting[walker.rank]
            self._advance(walker, self._ends(walker.rank, _due(walker)))
        num_lacking = Counter(receiver for (_, receiver, _), n in self._lacking.items() for _ in range(n))
        return PlacedTogether(self._placed, self._unmatched, num_lacking)

    def _advance(self, walker: _Walker, ends: Sequence[float] | None) -> None:
        while True:
            try:
                rendezvous = walker.walk.send(ends)
            except StopIteration as end:
                self._placed[walker.rank] = end.value
                return
            first = rendezvous.rows[0]
            ends = None
            if not rendezvous.is_due:
                walker.met[first] = self._begun(walker, rendezvous)
            if self._is_over(walker.met[first]):
                ends = self._ends(walker.rank, walker.met[first])
            elif rendezvous.is_due:
                walker.due = walker.met[first]
                self._waiting[walker.rank] = walker
                return

    def _begun(self, walker: _Walker, rendezvous: Rendezvous) -> _Met:
        """Write down what the rank has reached, and let those go on that waited for it."""
        transfers = walker.transfers[rendezvous.rows[0]]
        needs = []
        for transfer in transfers:
            if transfer.members:
                self._reached[walker.rank, -1, transfer.group].append(rendezvous.start_us)
                position = walker.num_calls[walker.rank, -1, transfer.group]
                walker.num_calls[walker.rank, -1, transfer.group] += 1
                others = sorted((transfer.members & self._ranks) - {walker.rank})
                needs.append([((other, -1, transfer.group), position) for other in others])
                continue
            channel = (transfer.peer, walker.rank, transfer.group)
            if transfer.is_send:
                self._reached[walker.rank, transfer.peer, transfer.group].append(rendezvous.start_us)
                needs.append([])
            else:
                position = self._lacking.get(channel, 0) + walker.num_calls[channel]
                needs.append([(channel, position)] if transfer.peer in self._ranks else [])
                walker.num_calls[channel] += 1
        for waiting in list(self._waiting.values()):
            if self._is_over(_due(waiting)):
                self._ready.append(self._waiting.pop(waiting.rank))
        return _Met(rendezvous.start_us, transfers, needs)

    def _is_over(self, met: _Met) -> bool:
        return all(len(self._reached[channel]) > position for needs in met.needs for channel, position in needs)

    def _ends(self, rank: int, met: _Met) -> list[float]:
        """When each transfer of a rendezvous ends. What is never reached counts as if it had been there."""
        ends = []
        for transfer, needs in zip(met.transfers, met.needs, strict=True):
            reached = [
                self._reached[channel][position]
                for channel, position in needs
                if position < len(self._reached[channel])
            ]
            self._unmatched[rank] += len(reached) < len(needs)
            ends.append(max(met.start_us, *reached, 0.0) + transfer.time_us)
        return ends


def _due(walker: _Walker) -> _Met:
    assert walker.due is not None
    return walker.due


def transfers_of(
    launches_call: Sequence[int], kinds: Sequence[int], streams: Sequence[object], known: Mapping[int, Transfer]
) -> list[list[Transfer]]:
    """The sends and receives among a rank's launches, those that run at once together.

    NCCL runs those of a group call at once: consecutive ones of one stream, with nothing but events launched in
    between.

    Args:
        launches_call: The sequence number of each row's call; -1 without one.
        kinds: Indices into LAUNCH_KINDS.
        known: By sequence number; ``row`` is ignored.
    """
    together: list[list[Transfer]] = []
    stream: object = None
    for row, (call, kind) in enumerate(zip(launches_call, kinds, strict=True)):
        transfer = known.get(call) if call >= 0 else None
        if transfer is not None:
            if stream is None or streams[row] != stream:
                together.append([])
            together[-1].append(transfer._replace(row=row))
            stream = streams[row]
        elif kind not in EVENTS:
            stream = None
    return together


_COLLECTIVE = LAUNCH_KINDS.index("collective")


@dataclass(frozen=True)
class Dependencies:
    """The parts of a rank's step that depend on the other placed ranks.

    Attributes:
        transfers: Those that run at once in one list.
        num_exchanged: Sends to and receives from ranks that are placed with it.
        elsewhere: Ranks that are not, and that it sends to or receives from.
    """

    transfers: list[list[Transfer]]
    num_exchanged: int
    elsewhere: tuple[int, ...]


def dependencies_of(
    tables: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame],
    timeline: Timeline,
    duration_us: Array,
    rank: int,
    ranks: Set[int],
) -> Dependencies:
    """Find what depends on the other placed ``ranks``, from the tables ``launches``, ``calls`` and ``groups``."""
    launches, calls, groups = tables
    call_of = launches["call"].to_numpy("i8")
    is_call = timeline.has_work & (timeline.what == _COLLECTIVE) & (call_of >= 0)
    known = _known(calls[calls["sequence"].isin(call_of[is_call])], groups, rank, ranks)
    rows = call_of.copy()
    rows[~is_call] = -1
    pairs = {sequence: transfer for sequence, transfer in known.items() if not transfer.members}
    sequences = rows.tolist()
    transfers = transfers_of(sequences, timeline.what.tolist(), launches["stream"].tolist(), pairs)
    for row in is_call.nonzero()[0].tolist():
        if (transfer := known.get(sequences[row])) is not None and transfer.members:
            transfers.append([transfer._replace(row=row)])
    timed = [[call._replace(time_us=float(duration_us[call.row])) for call in together] for together in transfers]
    own = [call for together in timed for call in together if not call.members]
    elsewhere = {call.peer for call in own if call.peer not in ranks}
    return Dependencies(timed, sum(call.peer in ranks for call in own), tuple(sorted(elsewhere)))


def _known(calls: pd.DataFrame, groups: pd.DataFrame, rank: int, ranks: Set[int]) -> dict[int, Transfer]:
    members = [parse_rank_list(str(text)) if text else () for text in groups["ranks"]]
    names = _names(groups)
    columns = [calls[name].tolist() for name in ("sequence", "operation", "group", "peer")]
    known = {}
    for sequence, operation, group, peer in zip(*columns, strict=True):
        others, name = members[group], names[group]
        if str(operation).startswith(("send", "recv")):
            if 0 <= peer < len(others) and others[peer] != rank:
                known[sequence] = Transfer(-1, str(operation).startswith("send"), others[peer], name, 0.0)
        elif len(ranks & set(others)) > 1:
            known[sequence] = Transfer(-1, False, -1, f"{name} {operation}", 0.0, frozenset(others))
    return known


def _names(groups: pd.DataFrame) -> list[str]:
    """Names of groups that are the same on all their ranks: ranks, description, and number among those alike."""
    seen: dict[str, int] = {}
    names = []
    for ranks, description in zip(groups["ranks"], groups["description"], strict=True):
        key = f"{ranks} {description}"
        seen[key] = seen.get(key, -1) + 1
        names.append(f"{key} {seen[key]}")
    return names


def from_first_transfer(launches: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """The launches of a step, beginning with those that begin an iteration.

    A later stage's timed step ends with the next iteration's first receive. So everything from the first transfer after
    the optimizer is put in front.
    """
    in_optimizer = np.flatnonzero((launches["phase"].astype(str) == "optimizer").to_numpy(bool))
    pairs = calls[calls["operation"].astype(str).str.startswith(("send", "recv"))]
    rows = np.flatnonzero(launches["call"].isin(pairs["sequence"]).to_numpy(bool))
    after = rows[rows > in_optimizer[-1]] if len(in_optimizer) else rows[:0]
    if not len(after):
        return launches
    first = int(after[0])
    is_event = launches["what"].astype(str).isin([LAUNCH_KINDS[kind] for kind in EVENTS]).to_numpy(bool)
    while first and is_event[first - 1]:
        first -= 1
    order = np.roll(np.arange(len(launches)), len(launches) - first)
    return launches.iloc[order].reset_index(drop=True)


def num_stages_of(launches: pd.DataFrame, calls: pd.DataFrame, groups: pd.DataFrame) -> int:
    """Stages of the pipeline that a step belongs to: the size of the group that it sends on; 1 if it sends nothing."""
    pairs = calls[calls["operation"].astype(str).str.startswith(("send", "recv"))]
    own = pairs[pairs["sequence"].isin(launches["call"])]["group"].unique()
    return int(groups["size"].to_numpy("i8")[own].max(initial=1))


def only_exchanges(launches: pd.DataFrame, calls: pd.DataFrame) -> Array:
    """True for rows on streams that only send and receive."""
    pairs = calls[calls["operation"].astype(str).str.startswith(("send", "recv"))]["sequence"]
    is_pair = launches["call"].isin(pairs).to_numpy(bool)
    has_work = (launches["work"] >= 0).to_numpy(bool)
    stream = launches["stream"].to_numpy("u8")
    return np.isin(stream, stream[is_pair]) & ~np.isin(stream, stream[has_work & ~is_pair])
