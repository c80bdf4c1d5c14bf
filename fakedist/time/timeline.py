"""Places launches in time: a launch begins when its stream is free, the host has launched it and its events are done.

Host time is a fixed time for each operation and each launch. Everything is in microseconds from the beginning of the
step.
"""

from __future__ import annotations

import typing
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.errors import RunDirectoryError
from fakedist.run.directory import DAMAGED
from fakedist.run.launch_records import LAUNCH_KINDS

Array = npt.NDArray[Any]

_COLLECTIVE, _RECORDS, _WAITS, _HOST_WAITS, _HOST_WAITS_FOR_DEVICE, _READS = map(
    LAUNCH_KINDS.index,
    ("collective", "stream_records", "stream_waits", "host_waits", "host_waits_for_device", "host_reads"),
)
#: Rows by which streams wait for each other.
EVENTS = (_RECORDS, _WAITS)


class HostTimes(Protocol):
    """What the host takes for its part, in microseconds."""

    @property
    def operation_us(self) -> float:
        """An operation of torch, without its launches."""

    @property
    def launch_us(self) -> float:
        """A launch."""

    @property
    def graph_us(self) -> float:
        """A launch of a CUDA graph, whatever is in it."""


@dataclass(frozen=True)
class Placed:
    """When the launches that have work began.

    Attributes:
        start_us: When each began, shape (number of launches with work,).
        launch_us: When the host had launched it.
        ends_us: When each ended.
        end_us: When the host and all streams are done.
    """

    start_us: Array
    launch_us: Array
    ends_us: Array
    end_us: float


class Meeting(NamedTuple):
    """Sends and receives of one rank that run at once.

    Attributes:
        rows: Their places in the table ``launches``.
        start_us: When this rank begins them.
    """

    rows: Sequence[int]
    start_us: float


class Timeline:
    """The launches of a step, ready to be placed with any durations.

    Args:
        launches: The table ``launches``.
        queues: The queue of each row, of whose launches one runs at a time whatever their streams; -1 without one.

    Attributes:
        what: What each row is, a place in LAUNCH_KINDS.
        has_work: Which rows have work.

    Raises:
        RunDirectoryError: A row is of a kind that does not exist.
    """

    def __init__(self, launches: pd.DataFrame, queues: Array | None = None) -> None:
        what = pd.Categorical(launches["what"])
        if unknown := set(what.categories) - set(LAUNCH_KINDS):
            raise RunDirectoryError(f"the table launches has a row of the unknown kind {min(unknown)!r}", DAMAGED)
        kinds = np.array([*map(LAUNCH_KINDS.index, what.categories)], "i8")
        self.what: Array = kinds[what.codes] if len(what) else kinds[:0]
        work = launches["work"].to_numpy("i8")
        self.has_work: Array = work >= 0
        self._num_operations = launches["num_operations"].to_numpy("f8")
        self._graph = launches["graph"].to_numpy("i8")
        device, stream = (pd.factorize(launches[name].to_numpy())[0] for name in ("device", "stream"))
        self._streams = device * (int(stream.max(initial=0)) + 1) + stream
        self._num_streams = int(self._streams.max(initial=-1)) + 1
        self._events = launches["event"].to_numpy("u8").tolist()
        self._queues: list[int] = [-1] * len(launches) if queues is None else queues.tolist()

    def place(self, duration_us: Array, host: HostTimes) -> Placed:
        """Place the launches.

        Args:
            duration_us: How long each row takes on its stream, 0 where it takes no time or that is not known.
            host: What the host takes.
        """
        walk = self.walk(duration_us, host)
        try:
            while True:  # without meetings it yields nothing
                next(walk)
        except StopIteration as end:
            placed = end.value
        assert isinstance(placed, Placed)
        return placed

    def walk(
        self, duration_us: Array, host: HostTimes, meetings: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> Generator[Meeting, Sequence[float], Placed]:
        """Place the launches one by one, and stop where this rank meets others.

        Args:
            duration_us: How long each row takes on its stream, 0 where it takes no time or that is not known.
            host: What the host takes.
            meetings: The rows that meet other ranks: by the first row of those that run at once, all of them.

        Yields:
            A meeting as it begins. It must be sent when each of its rows ends.
        """
        now, free, starts, launched, ends = 0.0, [0.0] * self._num_streams, [], [], []
        done: dict[int, float] = {}
        met: dict[int, tuple[float, float]] = {}
        queued: dict[int, float] = {}
        rows = zip(
            self.what.tolist(),
            self._streams.tolist(),
            self._events,
            self._host_us(host).tolist(),
            duration_us.tolist(),
            self._queues,
            self._meets(meetings),
            strict=True,
        )
        for what, stream, event, host_us, took, queue, row in rows:
            if what < _RECORDS or what == _READS:
                now += host_us
                start = free[stream]
                if start < now:
                    start = now
                if queue >= 0 and start < (before := queued.get(queue, 0.0)):
                    start = before
                end = start + took
                if queue >= 0:
                    queued[queue] = end
                if row >= 0:
                    if row in meetings:
                        until = yield Meeting(meetings[row], start)
                        met |= {each: (start, until_us) for each, until_us in zip(meetings[row], until, strict=True)}
                    start, end = met[row]
                    end = max(end, free[stream])
                starts.append(start)
                launched.append(now)
                ends.append(end)
                free[stream] = end
                if what == _READS and now < end:
                    now = end
            elif what == _RECORDS:
                done[event] = max(free[stream], now)
            elif what == _WAITS:
                free[stream] = max(free[stream], done.get(event, 0.0))
            elif what == _HOST_WAITS_FOR_DEVICE:
                now = max(now, *free)
            else:
                now = max(now, done.get(event, 0.0) if event else free[stream])
        return Placed(np.array(starts, "f8"), np.array(launched, "f8"), np.array(ends, "f8"), max(now, *free, 0.0))

    def _meets(self, meetings: Mapping[int, Sequence[int]]) -> Iterable[int]:
        """The place of each row that meets other ranks; -1 for all others."""
        if not meetings:
            return repeat(-1, len(self.what))
        found = np.full(len(self.what), -1)
        rows = [row for together in meetings.values() for row in together]
        found[rows] = rows
        return typing.cast(list[int], found.tolist())

    def _host_us(self, host: HostTimes) -> Array:
        """Host time before each row: of its operations, and of its launch."""
        alone = self.has_work & (self._graph == 0) & (self.what != _COLLECTIVE)
        found: Array = self._num_operations * host.operation_us + alone * host.launch_us
        in_graphs = np.flatnonzero(self.has_work & (self._graph != 0))
        graph = self._graph[in_graphs]
        begins = np.concatenate([[True], graph[1:] != graph[:-1]])[: len(graph)]
        found[in_graphs[begins]] += host.graph_us
        return found
