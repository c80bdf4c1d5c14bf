"""The timed step on the virtual GPU: turns the log of launches into rows of the table ``kernels``, in virtual time.

A launch begins when its stream is free, the host has launched it, and the events that the stream waits for are done.
Host time is a fixed time for each operation and each launch. All durations come from :mod:`fakedist.gpu.clock`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fakedist.gpu.clock import NAN, Clock, Demand, product_demand
from fakedist.gpu.launches import TO_DEVICE, TO_HOST, Launch, LaunchKind
from fakedist.gpu.work import UNKNOWN, Work
from fakedist.run.families import kernel_family
from fakedist.run.kernels import KernelRow
from fakedist.run.rows import Place

#: cudaDataType_t -> the type it computes in, bytes per element.
_TYPES = {0: ("fp32", 4.0), 1: ("fp64", 8.0), 2: ("bf16", 2.0), 3: ("int8", 1.0), 4: ("fp32", 8.0)} | {
    5: ("fp64", 16.0), 8: ("int8", 1.0), 10: ("int8", 4.0), 14: ("bf16", 2.0), 28: ("fp8", 1.0), 29: ("fp8", 1.0),
}  # fmt: skip
_COMPLEX = (4, 5)
#: cublasComputeType_t values that compute single precision on the TF32 or bf16 units.
_FAST = {77: "tf32", 74: "bf16", 75: "bf16"}
#: Kernels that prepare or finish an attention or a grouped product and do none of its arithmetic.
_BESIDES = ("dot_do_o", "convert_dq", "prepare_grouped", "fill", "direct_copy", "elementwise", "memset")


class Tagged(NamedTuple):
    """What a tag in the log refers to.

    Attributes:
        op: Number of the operation; -1 outside of one.
        operation: Its name; empty outside of one.
        place: Where the rank was.
        work: The operation's work.
        counts: Whether it is an operation, which takes host time.
    """

    op: int
    operation: str
    place: Place
    work: Work = UNKNOWN
    counts: bool = True


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


class Timeline:
    """Estimates a step.

    Args:
        clock: Estimates durations.
        name: Returns the name of a launch.
        place: The place of launches without a tag.
    """

    def __init__(self, clock: Clock, name: Callable[[Launch], str], place: Place) -> None:
        self._clock = clock
        self._name = name
        self._nowhere = Tagged(-1, "", place, counts=False)
        self._time = _Time()
        self._last_tag = -1
        self._last_graph = 0
        self.unknown: dict[str, int] = defaultdict(int)

    @property
    def end_us(self) -> float:
        """When the host and all streams are done."""
        return max(self._time.host, *self._time.streams.values(), 0.0)

    def rows(self, launches: Sequence[Launch], tags: Mapping[int, Tagged]) -> Iterable[KernelRow]:
        """Rows of the table ``kernels``, in launch order. Collectives have no duration."""
        shares = _Shares(launches, tags, self._name)
        for number, launch in enumerate(launches):
            kind = launch.kind
            stream = (launch.device, launch.stream)
            if kind == LaunchKind.HOST_READS:
                if not shares.has_launched(launch):  # the values were known on the host
                    self._host_works(launch, tags)
                    yield self._row(launch, tags[launch.tag], stream, shares.of(number, tags[launch.tag]))
                self._time.follow(LaunchKind.HOST_WAITS, launch, stream)
            elif kind >= LaunchKind.STREAM_RECORDS:
                self._time.follow(kind, launch, stream)
            elif kind == LaunchKind.COLLECTIVE or launch.call < 0:  # else it is part of a collective's stand-in
                tag = tags.get(launch.tag, self._nowhere)
                self._host_works(launch, tags)
                yield self._row(launch, tag, stream, shares.of(number, tag))

    def _host_works(self, launch: Launch, tags: Mapping[int, Tagged]) -> None:
        """Add the host time of the operations since the last launch, and of this launch."""
        fixed = self._clock.fixed
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

    def _row(self, launch: Launch, tag: Tagged, stream: tuple[int, int], share: _Share) -> KernelRow:
        start = max(self._time.streams[stream], self._time.host)
        duration, bound = (NAN, "")
        if launch.kind != LaunchKind.COLLECTIVE:
            duration, bound = self._clock.duration(share.demand)
            if duration != duration:
                self.unknown[share.name] += 1
        self._time.streams[stream] = start + (duration if duration == duration else 0.0)
        return KernelRow(
            share.name,
            share.demand.family,
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
            flops=share.flops,
            moved_bytes=share.demand.moved_bytes,
            bound=bound,
        )


class _Share(NamedTuple):
    """A launch's share of its operation's work."""

    name: str
    demand: Demand
    flops: float


class _Shares:
    """Divides each operation's work among its launches."""

    def __init__(self, launches: Sequence[Launch], tags: Mapping[int, Tagged], name: Callable[[Launch], str]) -> None:
        self._names = [_launch_name(launch, name) for launch in launches]
        self._launches = launches
        self._arithmetic: dict[tuple[int, int], float] = defaultdict(float)
        self._memory: dict[tuple[int, int], float] = defaultdict(float)
        self._moved: dict[tuple[int, int], float] = defaultdict(float)
        self._by_library: set[tuple[int, int]] = set()
        self._by_product: set[tuple[int, int]] = set()
        for launch in launches:
            if launch.kind == LaunchKind.LIBRARY and launch.call < 0:
                self._by_library.add((launch.graph, launch.tag))
            if launch.kind == LaunchKind.PRODUCT and launch.k and launch.call < 0:
                self._by_product.add((launch.graph, launch.tag))
        for number, launch in enumerate(launches):
            if launch.tag in tags and launch.call < 0 and launch.kind < LaunchKind.COLLECTIVE:
                key = (launch.graph, launch.tag)
                self._moved[key] += _moved(launch) if launch.kind in (LaunchKind.COPY, LaunchKind.FILL) else 0.0
                self._memory[key] += self._weight(number)
                self._arithmetic[key] += self._weight(number) if self._computes(number) else 0.0

    def has_launched(self, launch: Launch) -> bool:
        """Whether a launch's operation launched any work on the GPU."""
        return (launch.graph, launch.tag) in self._memory

    def of(self, number: int, tag: Tagged) -> _Share:
        """The share of a launch."""
        launch, name = self._launches[number], self._names[number]
        family = kernel_family(name, tag.operation, tag.place.phase)
        if launch.kind == LaunchKind.COLLECTIVE:
            return _Share(tag.operation, Demand("communication", NAN, NAN), NAN)
        if launch.kind == LaunchKind.PRODUCT and launch.k:
            return _product(launch, name)
        if launch.kind in (LaunchKind.COPY, LaunchKind.FILL):
            over_link = launch.kind == LaunchKind.COPY and launch.direction in (TO_DEVICE, TO_HOST)
            return _Share(name, Demand("copy", 0.0, _moved(launch), over_host_link=over_link), 0.0)
        if launch.kind == LaunchKind.HOST_READS:
            return _read(launch, tag)
        work, key = tag.work, (launch.graph, launch.tag)
        memory = self._memory[key]
        moved = max(work.moved_bytes - self._moved[key], 0.0) if work.moved_bytes == work.moved_bytes else NAN
        moved *= self._weight(number) / memory if memory else 1.0
        arithmetic = self._arithmetic[key]
        flops = work.flops
        if key in self._by_product and flops == flops:
            flops = 0.0  # the product has them; the other kernels copy operands, or what is added, into place
        if arithmetic:
            flops *= self._weight(number) / arithmetic if self._computes(number) else 0.0
        elif memory:
            flops *= self._weight(number) / memory
        return _Share(name, _demand(family, flops, moved, work), flops)

    def _weight(self, number: int) -> float:
        """A kernel's number of threads. If the operation calls a library, the library call has all the weight."""
        launch = self._launches[number]
        if launch.kind == LaunchKind.LIBRARY:
            return 1.0
        if launch.kind != LaunchKind.KERNEL or (launch.graph, launch.tag) in self._by_library:
            return 0.0
        threads = 1.0
        for size in (*launch.grid, *launch.block):
            threads *= size
        return threads

    def _computes(self, number: int) -> bool:
        return not any(word in self._names[number] for word in _BESIDES)


def _moved(launch: Launch) -> float:
    """Bytes that a copy or fill moves. A copy within the device both reads and writes them."""
    both = launch.kind == LaunchKind.COPY and launch.direction not in (TO_DEVICE, TO_HOST)
    return float(launch.bytes * (2 if both else 1))


def _read(launch: Launch, tag: Tagged) -> _Share:
    """What a real GPU would have launched for values that the host already knew: a copy, or all kernels as one."""
    if "copy" in tag.operation or "_local_scalar_dense" in tag.operation:
        return _Share("Memcpy DtoH", Demand("copy", 0.0, float(launch.bytes), over_host_link=True), 0.0)
    family = kernel_family(tag.operation, tag.operation, tag.place.phase)
    return _Share(tag.operation, _demand(family, tag.work.flops, tag.work.moved_bytes, tag.work), tag.work.flops)


def _demand(family: str, flops: float, moved: float, work: Work) -> Demand:
    if not flops > 0:  # bytes alone cannot estimate a product or an attention of unknown FLOPs
        return Demand(family, flops, NAN if flops != flops and family in ("gemm", "attention") else moved)
    if work.attention:
        return Demand("attention", flops, moved, work.dtype, f"attention.{work.attention}", work.keys)
    return Demand("gemm" if family == "other" else family, flops, moved, work.dtype, f"gemm.{work.dtype}", flops)


def _product(launch: Launch, name: str) -> _Share:
    shape = (launch.m, launch.n, launch.k, launch.batch)
    types = [_TYPES.get(each, ("", NAN)) for each in (launch.a_type, launch.b_type, launch.d_type)]
    dtype = types[0][0]
    if dtype == "fp32" and launch.compute in _FAST:
        dtype = _FAST[launch.compute]
    demand = product_demand(shape, dtype, (types[0][1], types[1][1], types[2][1]))
    flops = 2.0 * launch.m * launch.n * launch.k * launch.batch * (4 if launch.a_type in _COMPLEX else 1)
    return _Share(name, demand, flops)


def _launch_name(launch: Launch, name: Callable[[Launch], str]) -> str:
    """The name that CUPTI gives a launch: a kernel's own name, or the direction of a copy or fill."""
    if launch.kind == LaunchKind.COPY:
        return {TO_DEVICE: "Memcpy HtoD", TO_HOST: "Memcpy DtoH"}.get(launch.direction, "Memcpy DtoD")
    return "Memset (Device)" if launch.kind == LaunchKind.FILL else name(launch)


def _text(sizes: Iterable[int]) -> str:
    found = list(sizes)
    return ",".join(map(str, found)) if any(found) else ""
