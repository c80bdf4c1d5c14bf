"""The timed step on the virtual GPU: when each launch begins and how long it takes, in virtual time.

A launch begins when its stream is free, the host has launched it, and the events that the stream waits for are done.
Host time is a fixed time for each operation and each launch. All durations come from :mod:`fakedist.gpu.pricing`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fakedist.gpu.demand import NAN
from fakedist.gpu.launch_demand import LaunchDemand, LaunchDemands, Tagged
from fakedist.gpu.launch_log import Launch, LaunchKind
from fakedist.gpu.pricing import Roofline
from fakedist.run.kernel_rows import KernelRow
from fakedist.run.rows import Place


@dataclass
class _Time:
    """When the host and the streams are next free, in microseconds from the beginning of the step."""

    host: float = 0.0
    streams: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    events: dict[int, float] = field(default_factory=dict)

    def follow(self, kind: int, launch: Launch, stream: tuple[int, int]) -> None:
        """Apply a record of an event, or a wait of a stream or the host."""
        if kind == LaunchKind.STREAM_RECORDS:
            self.events[launch.event] = max(self.streams[stream], self.host)
        elif kind == LaunchKind.STREAM_WAITS:
            self.streams[stream] = max(self.streams[stream], self.events.get(launch.event, 0.0))
        elif kind == LaunchKind.HOST_WAITS_FOR_DEVICE:
            self.host = max(self.host, *self.streams.values(), 0.0)
        else:
            until = self.events.get(launch.event, 0.0) if launch.event else self.streams[stream]
            self.host = max(self.host, until)


class Schedule:
    """Schedules a step's launches.

    Args:
        roofline: Estimates durations.
        place: The place of launches without a tag.

    Attributes:
        unknown: Number of launches without an estimate, by name.
    """

    def __init__(self, roofline: Roofline, place: Place) -> None:
        self._roofline = roofline
        self._nowhere = Tagged(-1, "", place, counts=False)
        self._time = _Time()
        self._last_tag = -1
        self._last_graph = 0
        self.unknown: dict[str, int] = defaultdict(int)

    @property
    def end_us(self) -> float:
        """When the host and all streams are done."""
        return max(self._time.host, *self._time.streams.values(), 0.0)

    def rows(
        self, launches: Sequence[Launch], tags: Mapping[int, Tagged], demands: LaunchDemands
    ) -> Iterable[KernelRow]:
        """Rows of the table ``kernels``, in launch order. Collectives have no duration."""
        for number, launch in enumerate(launches):
            kind = launch.kind
            stream = (launch.device, launch.stream)
            if kind == LaunchKind.HOST_READS:
                if not demands.has_launched(launch):  # the values were known on the host
                    self._host_works(launch, tags)
                    yield self._row(launch, tags[launch.tag], stream, demands.of(number, tags[launch.tag]))
                self._time.follow(LaunchKind.HOST_WAITS, launch, stream)
            elif kind >= LaunchKind.STREAM_RECORDS:
                self._time.follow(kind, launch, stream)
            elif kind == LaunchKind.COLLECTIVE or launch.call < 0:  # else it is part of a collective's stand-in
                tag = tags.get(launch.tag, self._nowhere)
                self._host_works(launch, tags)
                yield self._row(launch, tag, stream, demands.of(number, tag))

    def _host_works(self, launch: Launch, tags: Mapping[int, Tagged]) -> None:
        """Add the host time of the operations since the last launch, and of this launch."""
        fixed = self._roofline.fixed
        if launch.graph:
            if launch.graph != self._last_graph:
                self._last_graph = launch.graph
                self._time.host += fixed.graph
            return
        if launch.tag > self._last_tag:
            between = range(self._last_tag + 1, launch.tag + 1)
            self._time.host += fixed.operation * sum(1 for tag in between if tag in tags and tags[tag].counts)
            self._last_tag = launch.tag
        if launch.kind != LaunchKind.COLLECTIVE:
            self._time.host += fixed.launch

    def _row(self, launch: Launch, tag: Tagged, stream: tuple[int, int], demand: LaunchDemand) -> KernelRow:
        start = max(self._time.streams[stream], self._time.host)
        duration, bound = (NAN, "")
        if launch.kind != LaunchKind.COLLECTIVE:
            duration, bound = self._roofline.duration(demand)
            if duration != duration:
                self.unknown[demand.name] += 1
        self._time.streams[stream] = start + (duration if duration == duration else 0.0)
        return KernelRow(
            demand.name,
            demand.family,
            launch.stream,
            start_us=start,
            duration_us=duration,
            launch_us=self._time.host,
            grid=_text(launch.grid),
            block=_text(launch.block),
            operation=tag.operation,
            op=tag.op,
            **tag.place._asdict(),
            call=launch.call if launch.kind == LaunchKind.COLLECTIVE else -1,
            flops=demand.flops,
            moved_bytes=demand.moved_bytes,
            bound=bound,
        )


def _text(sizes: Iterable[int]) -> str:
    found = list(sizes)
    return ",".join(map(str, found)) if any(found) else ""
