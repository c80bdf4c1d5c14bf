"""What each launch of the timed step demands of the GPU: each operation's demand, divided among its launches.

Nothing here depends on the GPU model. :mod:`fakedist.gpu.pricing` turns a demand into a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fakedist.gpu.demand import NAN, UNKNOWN, Demand
from fakedist.gpu.launch_log import TO_DEVICE, TO_HOST, Launch, LaunchKind
from fakedist.run.families import kernel_family
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
        demand: The operation's demand.
        counts: Whether it is an operation, which takes host time.
    """

    op: int
    operation: str
    place: Place
    demand: Demand = UNKNOWN
    counts: bool = True


class ProductSize(NamedTuple):
    """A product of matrices: (m, k) x (k, n), ``batch`` times."""

    m: int
    n: int
    k: int
    batch: int


@dataclass(frozen=True, slots=True)
class LaunchDemand:
    """What one launch demands.

    Attributes:
        family: One of ``run.schema.FAMILIES``.
        flops: Floating-point operations; NaN if unknown.
        moved_bytes: The fewest bytes it must read and write; NaN if unknown.
        dtype: The type it computes in, a key of ``GpuSpec.peak_flops``.
        attention: "forward" or "backward" for an attention, followed by ".cudnn" if cuDNN computes it; else empty.
        keys: Number of keys in the attention's sequence.
        product: Size of the product that a library got; None for other launches.
        over_host_link: Whether the bytes cross the link between host and GPU.
        name: The kernel's name, as CUPTI reports it.
    """

    family: str
    flops: float = 0.0
    moved_bytes: float = 0.0
    dtype: str = "bf16"
    attention: str = ""
    keys: float = 0.0
    product: ProductSize | None = None
    over_host_link: bool = False
    name: str = ""


class LaunchDemands:
    """Divides each operation's demand among its launches.

    Args:
        launches: The log of a step.
        tags: What its tags refer to.
        name: Returns the name of a launch.
    """

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

    def of(self, number: int, tag: Tagged) -> LaunchDemand:
        """The demand of a launch, by its position in the log."""
        launch, name = self._launches[number], self._names[number]
        if launch.kind == LaunchKind.COLLECTIVE:
            return LaunchDemand("communication", NAN, NAN, name=tag.operation)
        if launch.kind == LaunchKind.PRODUCT and launch.k:
            return _product(launch, name)
        if launch.kind in (LaunchKind.COPY, LaunchKind.FILL):
            over_link = launch.kind == LaunchKind.COPY and launch.direction in (TO_DEVICE, TO_HOST)
            return LaunchDemand("copy", 0.0, _moved(launch), over_host_link=over_link, name=name)
        if launch.kind == LaunchKind.HOST_READS:
            return _read(launch, tag)
        family = kernel_family(name, tag.operation, tag.place.phase)
        flops, moved = self._share(number, tag.demand)
        return _kernel(name, family, tag.demand._replace(flops=flops, moved_bytes=moved))

    def _share(self, number: int, demand: Demand) -> tuple[float, float]:
        """A launch's FLOPs and bytes of its operation's."""
        launch = self._launches[number]
        key = (launch.graph, launch.tag)
        memory, arithmetic = self._memory[key], self._arithmetic[key]
        moved = NAN
        if demand.moved_bytes == demand.moved_bytes:
            moved = max(demand.moved_bytes - self._moved[key], 0.0)
        moved *= self._weight(number) / memory if memory else 1.0
        flops = demand.flops
        if key in self._by_product and flops == flops:
            flops = 0.0  # the product has them; the other kernels copy operands, or what is added, into place
        if arithmetic:
            flops *= self._weight(number) / arithmetic if self._computes(number) else 0.0
        elif memory:
            flops *= self._weight(number) / memory
        return flops, moved

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


def product_demand(
    size: ProductSize, dtype: str, element_bytes: tuple[float, float, float], name: str = ""
) -> LaunchDemand:
    """The demand of a matrix product.

    Args:
        size: The size of its operands.
        dtype: The type it computes in.
        element_bytes: Bytes per element of the two operands and the result.
        name: The kernel's name.
    """
    m, n, k, batch = size
    a, b, d = element_bytes
    moved = batch * (m * k * a + k * n * b + m * n * d)
    return LaunchDemand("gemm", 2.0 * m * n * k * batch, moved, dtype, product=size, name=name)


def _moved(launch: Launch) -> float:
    """Bytes that a copy or fill moves. A copy within the device both reads and writes them."""
    both = launch.kind == LaunchKind.COPY and launch.direction not in (TO_DEVICE, TO_HOST)
    return float(launch.bytes * (2 if both else 1))


def _read(launch: Launch, tag: Tagged) -> LaunchDemand:
    """What a real GPU would have launched for values that the host already knew: a copy, or all kernels as one."""
    if "copy" in tag.operation or "_local_scalar_dense" in tag.operation:
        return LaunchDemand("copy", 0.0, float(launch.bytes), over_host_link=True, name="Memcpy DtoH")
    return _kernel(tag.operation, kernel_family(tag.operation, tag.operation, tag.place.phase), tag.demand)


def _kernel(name: str, family: str, demand: Demand) -> LaunchDemand:
    flops, moved = demand.flops, demand.moved_bytes
    if not flops > 0:  # bytes alone cannot estimate a product or an attention of unknown FLOPs
        unknown = flops != flops and family in ("gemm", "attention")
        return LaunchDemand(family, flops, NAN if unknown else moved, name=name)
    if demand.attention:
        return LaunchDemand(
            "attention", flops, moved, demand.dtype, attention=demand.attention, keys=demand.keys, name=name
        )
    return LaunchDemand("gemm" if family == "other" else family, flops, moved, demand.dtype, name=name)


def _product(launch: Launch, name: str) -> LaunchDemand:
    size = ProductSize(launch.m, launch.n, launch.k, launch.batch)
    types = [_TYPES.get(each, ("", NAN)) for each in (launch.a_type, launch.b_type, launch.d_type)]
    dtype = types[0][0]
    if dtype == "fp32" and launch.compute in _FAST:
        dtype = _FAST[launch.compute]
    demand = product_demand(size, dtype, (types[0][1], types[1][1], types[2][1]), name)
    return replace(demand, flops=4 * demand.flops) if launch.a_type in _COMPLEX else demand


def _launch_name(launch: Launch, name: Callable[[Launch], str]) -> str:
    """The name that CUPTI gives a launch: a kernel's own name, or the direction of a copy or fill."""
    if launch.kind == LaunchKind.COPY:
        return {TO_DEVICE: "Memcpy HtoD", TO_HOST: "Memcpy DtoH"}.get(launch.direction, "Memcpy DtoD")
    return "Memset (Device)" if launch.kind == LaunchKind.FILL else name(launch)
