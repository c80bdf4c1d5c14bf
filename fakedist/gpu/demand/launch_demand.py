"""The demand of each launch of the timed step: each operation's, divided among its launches, for any GPU model."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fakedist.gpu.demand.formulas import KernelPart
from fakedist.gpu.demand.operation_demand import NAN, UNKNOWN, Demand
from fakedist.gpu.demand.work_shapes import ProductShape
from fakedist.gpu.launch_log import SCALINGS, TO_DEVICE, TO_HOST, Launch, LaunchKind
from fakedist.rundir.families import kernel_family
from fakedist.rundir.launch_records import LAUNCH_KINDS, WorkRow
from fakedist.rundir.rows import Location

#: How the names of the functions begin that factorise one matrix or solve one system.
_SOLVER_PARTS = ("cusolverDn", "cublas")


class Division:
    """The division of an operation's demand, without copies, fills and products, among its launches.

    ``weights`` are threads by position in the log. ``computing`` launches divide the arithmetic; the one with the most
    threads does all that is of one kernel, such as an attention, and all dependent steps.
    """

    def __init__(
        self, demand: Demand, weights: Mapping[int, float], names: Mapping[int, str], computing: Sequence[int]
    ) -> None:
        self._demand, self._weights = demand, weights
        self._parts = {number: _part_of(name, demand.parts) for number, name in names.items()}
        own = [number for number, part in self._parts.items() if part is not None and part.arithmetic]
        sharing = own or [number for number in computing if self._parts[number] is None] or list(computing)
        self._main = max(sharing, key=lambda number: weights[number], default=-1)
        #: The launches that do the arithmetic: the main one; several alike if nothing says which it is.
        self._computing = {self._main} if demand.is_of_one_kernel else set(sharing)
        #: The launches that do all steps: a solver that is called for each matrix of a batch does them each time.
        self._stepping = {self._main}
        if names.get(self._main, "").startswith(_SOLVER_PARTS):
            self._stepping |= {number for number in self._computing if names[number] == names[self._main]}
        self._computing_weight = sum(weights[number] for number in self._computing)
        self._totals: dict[KernelPart | None, float] = {}
        for number, part in self._parts.items():
            self._totals[part] = self._totals.get(part, 0.0) + weights[number]

    def of(self, number: int) -> Demand:
        """The demand of one launch."""
        demand, part = self._demand, self._parts[number]
        total, weight = self._totals[part], self._weights[number]
        if total:
            fraction = weight / total
        else:  # kernels next to a library's, which has all of the weight
            fraction = 0.0 if part is None else 1.0 / sum(1 for other in self._parts.values() if other == part)
        moved = (demand.moved_bytes if part is None else part.moved_bytes) * fraction
        if not total and part is None and demand.moved_bytes != demand.moved_bytes:
            moved = NAN
        if number in self._computing:
            flops = demand.flops * (
                weight / self._computing_weight if self._computing_weight else 1.0 / len(self._computing)
            )
            if part is not None and part.arithmetic:
                flops = demand.flops * part.arithmetic * fraction
            steps = demand.steps if number in self._stepping else 0
            return demand._replace(flops=flops, moved_bytes=moved, steps=steps)
        flops = 0.0 if demand.flops == demand.flops else NAN
        alone = demand._replace(flops=flops, moved_bytes=moved, attention=None, product=None, quantized=(0, 0))
        return alone._replace(steps=0, is_bounded=demand.is_bounded and part is not None)


def _part_of(name: str, parts: Sequence[KernelPart]) -> KernelPart | None:
    return next((part for part in parts if any(word in name for word in part.words)), None)


#: cudaDataType_t -> the type it computes in, bytes per element.
_TYPES = {0: ("fp32", 4.0), 1: ("fp64", 8.0), 2: ("bf16", 2.0), 3: ("int8", 1.0), 4: ("fp32", 8.0)} | {
    5: ("fp64", 16.0), 8: ("int8", 1.0), 10: ("int8", 4.0), 14: ("bf16", 2.0), 28: ("fp8", 1.0), 29: ("fp8", 1.0),
}  # fmt: skip
_COMPLEX = (4, 5)
#: cublasComputeType_t values that compute single precision on the TF32 or bf16 units.
_FAST = {77: "tf32", 74: "bf16", 75: "bf16", 78: "bf16x9"}
#: Kernels that prepare or finish an attention or a grouped product and do none of its arithmetic.
_BESIDES = ("dot_do_o", "convert_dq", "prepare_grouped", "fill", "memset")


#: Torch's own kernels move data and sum it up next to a library's; words in the names of those that compute much.
_TORCHS_OWN = re.compile(r"\bat::native::|\bat_cuda_detail::")
#: Functions of libraries that compute much.
_SOLVERS = re.compile(r"cusolverDn|cusparse(Sp|SDD|.bsr)|cublas\w*(ge|trsm|matinv)|magma")
_COMPUTES = re.compile(
    r"[cp]dist|depthwise|int[48]|ctc|lstm|gru_|spmm|gemm|_mm\b|conv(?!ert)|flash|fmha|attention", re.IGNORECASE
)


class Tagged(NamedTuple):
    """The meaning of a tag in the log; outside of an operation, ``op`` is -1 and ``operation`` empty.

    ``counts``: it is an operation, which takes host time. ``location`` is the rank's.
    """

    op: int
    operation: str
    location: Location
    demand: Demand = UNKNOWN
    counts: bool = True


class LaunchDemands:
    """Divides each operation's demand among its launches, given the step's log and the operations by tag."""

    def __init__(self, launches: Sequence[Launch], tags: Mapping[int, Tagged], name: Callable[[Launch], str]) -> None:
        self._names = [_launch_name(launch, name) for launch in launches]
        self._launches = launches
        self._arithmetic: dict[tuple[int, int], float] = defaultdict(float)
        self._memory: dict[tuple[int, int], float] = defaultdict(float)
        self._moved: dict[tuple[int, int], float] = defaultdict(float)
        self._by_library: set[tuple[int, int]] = set()
        self._by_product: dict[tuple[int, int], float] = defaultdict(float)  # bytes of the results
        self._members: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._divided: dict[tuple[int, int], Division] = {}
        self._families: dict[tuple[str, str, str], str] = {}
        self._besides: dict[str, bool] = {}
        for launch in launches:
            if _is_library(launch) and launch.call < 0:
                self._by_library.add((launch.graph, launch.tag))
            if launch.kind == LaunchKind.PRODUCT and launch.k and launch.call < 0:
                result_bytes = launch.batch * launch.m * launch.n * _TYPES.get(launch.d_type, ("", NAN))[1]
                self._by_product[launch.graph, launch.tag] += result_bytes
        self._threads = [_threads(launch) for launch in launches]
        self._weights = [self._weight(launch, threads) for launch, threads in zip(launches, self._threads, strict=True)]
        self._products: dict[tuple[object, ...], WorkRow] = {}
        for number, launch in enumerate(launches):
            if launch.tag in tags and launch.call < 0 and launch.kind < LaunchKind.COLLECTIVE:
                key = (launch.graph, launch.tag)
                self._moved[key] += _moved(launch) if launch.kind in (LaunchKind.COPY, LaunchKind.FILL) else 0.0
                if tags[launch.tag].demand.is_divided:
                    self._members[key].append(number)
                self._memory[key] += self._weights[number]
                self._arithmetic[key] += self._weights[number] if self._computes(number) else 0.0

    def has_launched(self, launch: Launch) -> bool:
        """Return whether a launch's operation launched any work on the GPU."""
        return (launch.graph, launch.tag) in self._memory

    def of(self, number: int, tag: Tagged) -> WorkRow:
        """The work of a launch, by its position in the log."""
        launch, name = self._launches[number], self._names[number]
        kind, operation = launch.kind, tag.operation
        if kind == LaunchKind.COLLECTIVE:
            return WorkRow(operation, LAUNCH_KINDS[kind], "communication", operation, NAN, NAN)
        if kind == LaunchKind.PRODUCT and launch.k:
            return self._product(launch, name, operation)
        if kind in (LaunchKind.COPY, LaunchKind.FILL):
            work = WorkRow(name, LAUNCH_KINDS[kind], "copy", operation, 0.0, _moved(launch))
            over_link = kind == LaunchKind.COPY and launch.direction in (TO_DEVICE, TO_HOST)
            return work._replace(over_host_link=True, pinned=bool(launch.pinned)) if over_link else work
        if kind == LaunchKind.HOST_READS:
            return self._read(launch, tag)
        work = WorkRow(name, LAUNCH_KINDS[kind], self._family(name, tag), operation, threads=self._threads[number])
        return _demanding(work, self._demand_of(number, tag.demand))

    def _read(self, launch: Launch, tag: Tagged) -> WorkRow:
        """The launches of a real GPU for values that the host knew here: a copy, or all kernels as one."""
        name, kind = tag.operation, LAUNCH_KINDS[launch.kind]
        if "copy" in name or "_local_scalar_dense" in name:
            return WorkRow("Memcpy DtoH", kind, "copy", name, 0.0, float(launch.bytes), over_host_link=True)
        return _demanding(WorkRow(name, kind, self._family(name, tag), name), tag.demand)

    def _product(self, launch: Launch, name: str, operation: str) -> WorkRow:
        sizes = (launch.m, launch.n, launch.k, launch.batch, launch.compute, launch.accumulates, launch.scaling)
        types = (launch.a_type, launch.b_type, launch.d_type, launch.transposed_a, launch.transposed_b)
        key = (name, operation, *sizes, *types)
        work = self._products.get(key)
        if work is None:
            work = self._products[key] = _product(launch, name)._replace(operation=operation)
        return work

    def _family(self, name: str, tag: Tagged) -> str:
        key = (name, tag.operation, tag.location.phase)
        family = self._families.get(key)
        if family is None:
            family = self._families[key] = kernel_family(*key)
        return family

    def _demand_of(self, number: int, demand: Demand) -> Demand:
        launch, weight = self._launches[number], self._weights[number]
        key = (launch.graph, launch.tag)
        if demand.is_divided and key in self._members:
            return self._divide(key, demand).of(number)
        memory, arithmetic = self._memory[key], self._arithmetic[key]
        moved, flops = self._left(key, demand), demand.flops
        moved *= weight / memory if memory else 1.0
        if key in self._by_product and flops == flops and not self._is_solved(key, demand):
            flops = 0.0  # the product has them; the other kernels copy operands, or what is added, into place
        if arithmetic:
            flops *= weight / arithmetic if self._computes(number) else 0.0
        elif memory:
            flops *= weight / memory
        return demand._replace(flops=flops, moved_bytes=moved)

    def _left(self, key: tuple[int, int], demand: Demand) -> float:
        """Bytes that the operation's copies, fills and products do not move.

        Kernels next to a product copy an operand or the addend, about as much as the result. A library that factorises
        in place copies the matrix first.
        """
        moved = demand.moved_bytes
        if moved != moved:
            return NAN
        if self._is_solved(key, demand):
            return moved
        if key in self._by_product:
            return min(moved, 2 * self._by_product[key])
        return max(moved - self._moved[key], 0.0)

    def _is_solved(self, key: tuple[int, int], demand: Demand) -> bool:
        """A library computes the operation in place; products next to it are not its result."""
        return demand.is_bounded and key in self._by_library

    def _divide(self, key: tuple[int, int], demand: Demand) -> Division:
        division = self._divided.get(key)
        if division is None:
            weights = {number: self._weights[number] for number in self._members[key]}
            names = {number: self._names[number] for number in weights}
            demand = demand._replace(moved_bytes=self._left(key, demand))
            if key in self._by_product and not self._is_solved(key, demand):
                demand = demand._replace(flops=0.0)
            computing = [number for number in weights if weights[number] and self._computes(number)]
            division = self._divided[key] = Division(demand, weights, names, computing or list(weights))
        return division

    def _weight(self, launch: Launch, threads: int) -> float:
        """A kernel's number of threads. If the operation calls a library, the library call has all the weight."""
        if _is_library(launch):
            return 1.0
        if launch.kind != LaunchKind.KERNEL or (launch.graph, launch.tag) in self._by_library:
            return 0.0
        return float(threads)

    def _computes(self, number: int) -> bool:
        name = self._names[number]
        is_beside = self._besides.get(name)
        if is_beside is None:
            is_torchs = _TORCHS_OWN.search(name) is not None and not _COMPUTES.search(name)
            is_beside = self._besides[name] = is_torchs or any(word in name for word in _BESIDES)
        return not is_beside


def product_work(shape: ProductShape, dtype: str, name: str = "") -> WorkRow:
    """The work of a matrix product that a library computes, in the type ``dtype``, by the kernel ``name``."""
    m, n, k = shape.m, shape.n, shape.k
    moved = _known(shape.batch * (m * k * shape.a_bytes + k * n * shape.b_bytes + m * n * shape.d_bytes))
    work = WorkRow(name, "product", "gemm", flops=shape.flops, moved_bytes=moved, dtype=dtype)
    return work._replace(**shape._asdict())


def _moved(launch: Launch) -> float:
    """Bytes that a copy or fill moves. A copy within the device both reads and writes them."""
    both = launch.kind == LaunchKind.COPY and launch.direction not in (TO_DEVICE, TO_HOST)
    return float(launch.bytes * (2 if both else 1))


def _is_library(launch: Launch) -> bool:
    """A library that does not report its work: grouped products keep their sizes on the device."""
    return launch.kind == LaunchKind.LIBRARY or (launch.kind == LaunchKind.PRODUCT and not launch.k)


def _threads(launch: Launch) -> int:
    return math.prod((*launch.grid, *launch.block)) if launch.kind == LaunchKind.KERNEL else 0


def _known(number: float) -> float:
    """The number; NAN itself for any NaN, so that rows of work can be compared."""
    return number if number == number else NAN


def _demanding(work: WorkRow, demand: Demand) -> WorkRow:
    flops, moved = _known(demand.flops), _known(demand.moved_bytes)
    rows, columns = demand.quantized if not demand.num_indices else (demand.num_indices, 0)
    if flops != flops and _TORCHS_OWN.search(work.name) and not _COMPUTES.search(work.name):
        flops = 0.0  # a kernel of torch's that moves data, inside an operation that is not torch's
    if flops == 0.0 and work.kind == "library" and _SOLVERS.match(work.name):
        flops = NAN  # the operation's formula does not count it
    work = work._replace(flops=flops, moved_bytes=moved, dtype=demand.dtype, width=demand.width, m=rows, k=columns)
    only_moves = flops == 0.0 and _TORCHS_OWN.search(work.name) is not None  # next to a kernel of which less is known
    work = work._replace(steps=demand.steps, is_bounded=demand.is_bounded and not only_moves)
    if not flops > 0:
        return work
    if demand.attention is not None:
        sizes = demand.attention._asdict()
        return work._replace(family="attention", attention=sizes.pop("direction"), is_dense=demand.is_dense, **sizes)
    if demand.product is not None:
        return work._replace(family="gemm", **demand.product._asdict())
    return work._replace(family="gemm") if work.family == "other" else work


def _product(launch: Launch, name: str) -> WorkRow:
    """A library's product as torch has it, by rows: cuBLAS stores by columns, and so computes the transpose."""
    types = [_TYPES.get(code, ("", NAN)) for code in (launch.b_type, launch.a_type, launch.d_type)]
    dtype = types[0][0]
    if dtype == "fp32" and launch.compute in _FAST:
        dtype = _FAST[launch.compute]
    shape = ProductShape(
        launch.n,
        launch.m,
        launch.k,
        launch.batch,
        layout="NT"[launch.transposed_a] + "NT"[launch.transposed_b],
        a_bytes=types[0][1],
        b_bytes=types[1][1],
        d_bytes=types[2][1],
        scaling=SCALINGS[launch.scaling],
    )
    work = product_work(shape, dtype, name)
    if launch.accumulates:  # it reads what it is added to
        read = _known(float(shape.batch * shape.m * shape.n * shape.d_bytes))
        work = work._replace(accumulates=True, moved_bytes=_known(work.moved_bytes + read))
    return work._replace(flops=4 * work.flops) if launch.b_type in _COMPLEX else work


def _launch_name(launch: Launch, name: Callable[[Launch], str]) -> str:
    if launch.kind == LaunchKind.COPY:
        return {TO_DEVICE: "Memcpy HtoD", TO_HOST: "Memcpy DtoH"}.get(launch.direction, "Memcpy DtoD")
    return "Memset (Device)" if launch.kind == LaunchKind.FILL else name(launch)
