"""Estimates a step's time on a GPU: prices the work of its launches, and places the launches in time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.topology import read_groups
from fakedist.cost_model.accuracy import variances
from fakedist.cost_model.busiest_rank import ExpertsLoad, own_work
from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.hosts import HostCosts, scaled
from fakedist.cost_model.overlap import SharedLinks, settle
from fakedist.cost_model.timeline import ON_GPU, PARTS_APART, Array, CriticalPath, Placed, Timeline, find_critical_path
from fakedist.rundir import time_notes
from fakedist.rundir.launch_records import LAUNCH_KINDS
from fakedist.rundir.notes import Note
from fakedist.rundir.step_time import Calibration, StepLimit
from fakedist.rundir.table_rows import TABLES

_COLLECTIVE = LAUNCH_KINDS.index("collective")
#: Families of kernels that arithmetic limits.
_ARITHMETIC = ("gemm", "attention", "convolution")
#: The interval of a sum over kernels, from all their prices.
_KernelInterval = Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class PlacedStep:
    """A step in time; ``time_us`` has the time of each row of ``launches``, NaN if unknown."""

    placed: Placed
    time_us: Array


class StepInterval(NamedTuple):
    """The 90 % interval of a step, in microseconds; None if unknown.

    ``kernels_us`` is by how much longer the step may be because of its kernels alone.
    """

    low_us: float | None = None
    high_us: float | None = None
    kernels_us: float = 0.0
    calls_us: float = 0.0
    host_us: float = 0.0
    allocator_us: float = 0.0
    cpu_us: float = 0.0


class StepLaunches:
    """The launches of a step with the prices of their work: time_us, bound, filled.

    A measured time replaces a price. Without ``communication``, collectives take no time.

    Raises:
        RunDirectoryError: The tables are damaged.
    """

    def __init__(
        self, launches: pd.DataFrame, work: pd.DataFrame, priced: pd.DataFrame, communication: Communication | None
    ) -> None:
        self._call = launches["call"].to_numpy("i8")
        queues = None if communication is None else communication.queues(self._call)
        self.timeline = timeline = Timeline(launches, queues)
        self._work, self._priced, self._communication = work, priced, communication
        self._of_work = launches["work"].to_numpy("i8")
        self._is_call = timeline.has_work & (timeline.what == _COLLECTIVE)
        is_kernel = timeline.has_work & ~self._is_call
        self._alone_us = np.where(is_kernel, priced["time_us"].to_numpy("f8")[self._of_work], np.nan)
        filled = priced["filled"].to_numpy("f8") if "filled" in priced else np.zeros(len(priced))
        self._filled = np.where(is_kernel, filled[self._of_work], 0.0)
        if "measured_us" in launches:
            measured = launches["measured_us"].to_numpy("f8")
            is_measured = is_kernel & np.isfinite(measured)
            self._alone_us = np.where(is_measured, measured, self._alone_us)
            self._filled[is_measured] = 0.0  # measured next to whatever ran on other streams
        if communication is not None:
            self._alone_us[self._is_call] = communication.of_rows(self._call[self._is_call], "time_us")

    @property
    def kernels_us(self) -> float:
        """The sum of what the kernels take, each alone."""
        return float(np.nansum(np.where(self._is_call, 0.0, self._alone_us)))

    @property
    def least_us(self) -> float:
        """The least that the step can take, whatever runs next to its kernels: their sum on the busiest stream."""
        streams, _ = self.timeline.streams_and_queues()
        rows = self.timeline.has_work
        alone_us = np.nan_to_num(np.where(self._is_call, 0.0, self._alone_us)[rows])
        return float(np.bincount(np.unique(streams, return_inverse=True)[1], alone_us).max(initial=0.0))

    def place(self, host: HostCosts, kept: npt.NDArray[np.bool_] | None = None) -> PlacedStep:
        """Place the launches. Where kernels and collectives overlap, they take as long as they leave each other.

        With ``kept``, flags of the rows of ``launches``, only those take time on the GPU.
        """
        durations = np.nan_to_num(self._alone_us)
        rows = np.flatnonzero(self.timeline.has_work)
        durations = durations if kept is None else np.where(kept, durations, 0.0)
        last: list[Placed] = []

        def starts(of_rows: Array) -> Array:
            durations[rows] = of_rows
            last[:] = [self.timeline.place(durations, host)]
            return last[0].start_us

        settle(starts, durations[rows], *self._shared(rows, durations[rows] > 0))
        return PlacedStep(last[0], np.where(np.isnan(self._alone_us), np.nan, durations))

    def interval(self, step: PlacedStep, host: HostCosts, of_kernels: _KernelInterval) -> StepInterval:
        """The step's 90 % interval, from that of the sum of all kernels."""
        varied = self.varied(step, of_kernels)
        if varied is None:
            return StepInterval()
        end = step.placed.end_us
        ends = [[self.timeline.place(durations, host).end_us for durations in side] for side in varied]
        kernels_us, calls_us = ([abs(other - end) for other in ends[1]] + [0.0])[:2]
        durations = np.nan_to_num(step.time_us)
        for side, factor in zip(ends, host.range, strict=True):
            side.append(self.timeline.place(durations, scaled(host, factor)).end_us)
        host_us = abs(ends[1][-1] - end)
        parts_us = []
        for part in PARTS_APART:
            bounds = self.timeline.bounds(part)
            for side, timeline in zip(ends, bounds, strict=bool(bounds)):
                side.append(timeline.place(durations, host).end_us)
            parts_us.append(abs(ends[1][-1] - end) if bounds else 0.0)
        return StepInterval(*interval_of(end, ends), kernels_us, calls_us, host_us, *parts_us)

    def varied(self, step: PlacedStep, of_kernels: _KernelInterval) -> list[list[Array]] | None:
        """Durations of the rows at both ends of their 90 % intervals; None if those are unknown.

        Kernels vary together, by the interval of their sum; so do collectives. Each side has kernels, then any
        collectives.
        """
        durations = np.nan_to_num(step.time_us)
        whole = self.kernels_us
        bounds = of_kernels()
        if not whole or any(math.isnan(bound) for bound in bounds):
            return None
        sides = []
        for bound, column in zip(bounds, ("low_us", "high_us"), strict=True):
            side = [durations * np.where(self._is_call, 1.0, bound / whole)]
            if self._communication is not None and self._is_call.any():
                factors = np.ones(len(durations))
                bound_us = self._communication.of_rows(self._call[self._is_call], column)
                with np.errstate(divide="ignore", invalid="ignore"):
                    ratios = bound_us / self._alone_us[self._is_call]
                factors[self._is_call] = np.nan_to_num(ratios, nan=1.0, posinf=1.0)
                side.append(durations * factors)
            sides.append(side)
        return sides

    def _memory_bound(self) -> Array:
        """The rows of work that memory limits: as the price says, else (of a measured kernel) by family."""
        bound = self._priced["bound"].astype(str)
        if (bound != "").any() or "family" not in self._work:
            return (bound == "memory").to_numpy(bool)
        return (~self._work["family"].isin(_ARITHMETIC)).to_numpy(bool)

    def _shared(self, rows: Array, takes_time: Array) -> tuple[list[SharedLinks], Array | None]:
        """The links and the SMs that rows with work share, as :func:`settle` takes them, where they take time."""
        communication = self._communication
        if communication is not None and not communication.interferes:
            return [], None
        if communication is not None and (takes_time & self._is_call[rows]).any():
            groups = self._shared_links(rows, communication)
        else:
            groups = []
        streams, _ = self.timeline.streams_and_queues()
        filled = np.where(takes_time, self._filled[rows], 0.0)
        return groups, filled if len(np.unique(streams[filled > 0])) > 1 else None

    def _shared_links(self, rows: Array, communication: Communication) -> list[SharedLinks]:
        work = self._of_work[rows]
        memory_bound = self._memory_bound().astype("f8")
        over_nodes = np.zeros(len(rows), bool)
        is_call = self._is_call[rows]
        over_nodes[is_call] = communication.of_rows(self._call[rows][is_call], "num_nodes") > 1
        shares = np.zeros(len(rows))
        shares[is_call] = np.nan_to_num(communication.of_rows(self._call[rows][is_call], "link_share"))
        groups = []
        for members, across in ((is_call & ~over_nodes, False), (is_call & over_nodes, True)):
            if members.any():
                rates = communication.slowed(self._work, memory_bound, over_nodes=across)[work]
                groups.append(SharedLinks(members, rates, shares))
        return groups


def interval_of(end_us: float, ends_us: Sequence[Sequence[float]]) -> tuple[float, float]:
    """An interval from the step's end with each part at its least and at its most, which are independent."""
    low, high = (math.hypot(*(end - end_us for end in side)) for side in ends_us)
    return end_us - low, end_us + high


_COLUMNS = (
    *("batch", "m", "n", "k", "groups", "layout", "attention", "heads", "queries", "keys", "width"),
    *("value_width", "causal", "window", "library"),
)


def shape_texts(work: pd.DataFrame) -> list[str]:
    """The shape of each row of the table ``work``; empty where it is not known."""
    rows = zip(*(work[name].tolist() for name in _COLUMNS), strict=True)
    return [_shape(dict(zip(_COLUMNS, row, strict=True))) for row in rows]


def _shape(row: dict[str, int | str]) -> str:
    if row["attention"]:
        return _attention(row)
    if not row["m"]:
        return ""
    if not row["n"] and not row["k"]:
        return f"{row['m']} rows"
    if not row["n"]:  # converted to eight bits
        return f"{row['m']} x {row['k']}"
    product = " ".join(filter(None, (f"{row['m']} x {row['n']} x {row['k']}", str(row["layout"]))))
    if row["groups"]:
        return f"{product}, {row['groups']} groups"
    return f"{row['batch']} x ({product})" if row["batch"] not in (0, 1) else product


def _window(row: dict[str, int | str]) -> str:
    if not row["window"]:
        return ""
    return f"{row['window']} keys a query" if row["library"] == "flex" else f"window of {row['window']}"


def _attention(row: dict[str, int | str]) -> str:
    queries, keys = row["queries"], row["keys"]
    tokens = (
        f"{queries} tokens" if queries == keys else f"{queries} queries, {keys} keys" if queries else f"{keys} keys"
    )
    width, value_width = row["width"], row["value_width"]
    parts = [
        f"{row['batch']} sequences" if row["batch"] not in (0, 1) else "",
        f"{row['heads']} heads" if row["heads"] else "",
        tokens,
        "" if not width else f"{width}" if value_width in (0, width) else f"{width} and {value_width}",
        "causal" if row["causal"] else "",
        _window(row),
    ]
    return ", ".join(filter(None, parts))


#: Columns that a kernel takes over from its launch, its work, and the price of that.
_LAUNCH_COLUMNS = ("stream", "grid", "block", "op", "step", "phase", "recompute", "layer", "call")
_WORK_COLUMNS = ("name", "family", "operation", "flops", "moved_bytes")
_PRICE_COLUMNS = ("low_us", "high_us", "bound", "shape", "basis")


class Prices(Protocol):
    """A model of one GPU's kernel times."""

    @property
    def product(self) -> str:
        """The GPU's name, as CUDA reports it."""

    @property
    def host(self) -> HostCosts:
        """The host's times."""

    @property
    def calibrated_on(self) -> Calibration | None:
        """The GPU that it was calibrated on; None without calibration."""

    def price(self, work: pd.DataFrame, counts: Array) -> pd.DataFrame:
        """Price rows of work: time_us, low_us, high_us, bound, basis (NaN, "" if unknown); models add ``filled``."""

    def step_interval(self, priced: pd.DataFrame, counts: Array) -> tuple[float, float]:
        """The interval of the sum over all launches, as two sums; NaN if it is not known."""

    def notes(self) -> list[Note]:
        """Where the times come from."""


@dataclass(frozen=True)
class PriceList:
    """The prices of a step's work and of its calls (None: they take no time), for all that places the step again."""

    work: pd.DataFrame
    calls: Communication | None


@dataclass(frozen=True)
class PricedStep:
    """A step on a GPU.

    Attributes:
        communication: None if collectives take no time.
        families: Of ``cost_model.accuracy``, most time first.
        variances: The kernels', by family.
        host: The host that it was placed with.
        kernel_bounds_us: The interval of the sum of all kernels; NaN if it is not known.
    """

    kernels: pd.DataFrame
    launches: pd.DataFrame
    communication: Communication | None
    step_us: float
    interval: StepInterval
    notes: list[Note]
    families: list[str]
    variances: dict[str, float]
    path: CriticalPath
    placed: Placed
    price_list: PriceList
    host: HostCosts = field(default_factory=HostCosts)
    kernel_bounds_us: tuple[float, float] = (math.nan, math.nan)

    @property
    def step_low_us(self) -> float | None:
        """The least of its interval; None if that is not known."""
        return self.interval.low_us

    @property
    def step_high_us(self) -> float | None:
        """The most of its interval; None if that is not known."""
        return self.interval.high_us


def price_step(
    launches: pd.DataFrame, work: pd.DataFrame, prices: Prices, communication: Communication | None = None
) -> PricedStep:
    """Price the kernels of ``launches`` (not empty), and place them and the collectives.

    Without communication, collectives take no time. Raises RunDirectoryError for damaged tables.
    """
    of_work = launches["work"].to_numpy("i8")
    counts = np.bincount(of_work[of_work >= 0], minlength=len(work))
    priced = prices.price(work, counts).assign(shape=shape_texts(work))
    step = StepLaunches(launches, work, priced, communication)
    placed_step = step.place(prices.host)
    kernels = _kernels(launches, work, priced, placed_step.placed, placed_step.time_us)
    if communication is not None:
        kernels = _with_calls(kernels, communication)
    path = find_critical_path(step.timeline, placed_step.placed, prices.host)
    bounds = prices.step_interval(priced, counts)
    kernels = kernels.assign(path_us=_path_us(path, len(launches))[kernels["launch"].to_numpy("i8")])
    return PricedStep(
        kernels,
        launches,
        communication,
        placed_step.placed.end_us,
        step.interval(placed_step, prices.host, lambda: bounds),
        [*prices.notes(), *_notes(launches, work, placed_step.time_us, communication)],
        families=_families(priced, counts),
        variances=variances(priced, counts) if "accuracy" in priced else {},
        path=path,
        placed=placed_step.placed,
        price_list=PriceList(priced, communication),
        host=prices.host,
        kernel_bounds_us=bounds,
    )


def _families(priced: pd.DataFrame, counts: Array) -> list[str]:
    if "accuracy" not in priced:
        return []
    sums = (priced["time_us"].fillna(0.0) * counts).groupby(priced["accuracy"]).sum()
    return [str(name) for name in sums[sums > 0].sort_values(ascending=False, kind="stable").index if name]


def _kernels(
    launches: pd.DataFrame, work: pd.DataFrame, priced: pd.DataFrame, placed: Placed, time_us: Array
) -> pd.DataFrame:
    """The table ``kernels``, in order of start. Categorical texts: a million of them take no time."""
    of_work = launches["work"].to_numpy("i8")
    rows = np.flatnonzero(of_work >= 0)
    order = np.lexsort((launches["stream"].to_numpy()[rows], placed.start_us))
    rows = rows[order]
    columns: dict[str, object] = {
        "start_us": placed.start_us[order],
        "launch_us": placed.launch_us[order],
        "duration_us": time_us[rows],
        "launch": rows,
        "path_us": np.zeros(len(rows)),
    }
    for names, table, of_kernel in (
        (_LAUNCH_COLUMNS, launches, rows),
        (_WORK_COLUMNS, work, of_work[rows]),
        (_PRICE_COLUMNS, priced, of_work[rows]),
    ):
        for name in names:
            column = table[name]
            is_text = not pd.api.types.is_numeric_dtype(column.dtype)
            if table is work and not is_text:
                column = pd.Series(own_work(work, name))
            columns[name] = pd.Categorical(column).take(of_kernel) if is_text else column.to_numpy()[of_kernel]
    return pd.DataFrame(columns)[TABLES["kernels"].names]


def _path_us(path: CriticalPath, num_launches: int) -> Array:
    """How much of the critical path the work of each launch is on the GPU."""
    on_gpu = path.what == ON_GPU
    return np.bincount(path.row[on_gpu], path.us[on_gpu], num_launches)


def _with_calls(kernels: pd.DataFrame, communication: Communication) -> pd.DataFrame:
    is_call = (kernels["call"] >= 0).to_numpy(bool)
    call = kernels["call"].to_numpy("i8")[is_call]
    bounds = {name: kernels[name].to_numpy("f8", copy=True) for name in ("low_us", "high_us")}
    for name, column in bounds.items():
        column[is_call] = communication.of_rows(call, name)
    texts = communication.calls["text"].reindex(call).fillna("").to_numpy(str)
    shape = kernels["shape"].to_numpy(object, copy=True)
    shape[is_call] = texts
    return kernels.assign(**bounds, shape=pd.Categorical(shape))


def _notes(
    launches: pd.DataFrame, work: pd.DataFrame, time_us: Array, communication: Communication | None
) -> list[Note]:
    notes = [time_notes.collectives_take_no_time()]
    if communication is not None:
        fabric = communication.fabric
        num_unknown = int(communication.calls["time_us"].isna().sum())
        notes = [time_notes.collectives_estimated(fabric.name, fabric.source, num_unknown)]
        if num_uneven := int(communication.calls["is_uneven"].sum()):
            notes.append(time_notes.uneven_splits(num_uneven))
    of_work = launches["work"].to_numpy("i8")
    counts = np.bincount(of_work[of_work >= 0], minlength=len(work))
    if dense := _by_name(work, np.where(work["is_dense"].to_numpy(bool), counts, 0)):
        notes.append(time_notes.attention_is_dense(dense))
    unknown = of_work[(of_work >= 0) & np.isnan(time_us)]
    counts = np.bincount(unknown, minlength=len(work))
    counts[(work["kind"] == "collective").to_numpy(bool)] = 0
    if names := _by_name(work, counts):
        notes.append(time_notes.not_estimated(names))
    return notes


def _by_name(work: pd.DataFrame, counts: npt.NDArray[np.int64]) -> dict[str, int]:
    launches: dict[str, int] = {}
    for row in np.flatnonzero(counts).tolist():
        name = str(work["name"].iloc[row])
        launches[name] = launches.get(name, 0) + int(counts[row])
    return launches


class StepPrices:
    """Prices for a step: with its host, and a note on the load of its experts.

    It implements :class:`Prices`; ``host`` replaces the host of ``prices``.
    """

    def __init__(self, prices: Prices, experts: ExpertsLoad, host: HostCosts | None = None) -> None:
        self._prices, self._experts = prices, experts
        self._num_grouped = 0
        self.product: str = prices.product
        self.host: HostCosts = prices.host if host is None else host
        self.calibrated_on: Calibration | None = prices.calibrated_on

    def price(self, work: pd.DataFrame, counts: Array) -> pd.DataFrame:
        """How long each row of work takes, see ``Prices.price``."""
        self._num_grouped = int(counts[(work["groups"] > 0).to_numpy(bool)].sum())
        return self._prices.price(work, counts)

    def step_interval(self, priced: pd.DataFrame, counts: Array) -> tuple[float, float]:
        """The interval of the sum over all launches, as the model makes it."""
        return self._prices.step_interval(priced, counts)

    def notes(self) -> list[Note]:
        """Where the times come from, and what load of experts they are for."""
        notes = self._prices.notes()
        if self._num_grouped or self._experts != ExpertsLoad():
            known = self._experts
            notes = [*notes, time_notes.experts_load(known.load, known.busiest, is_recorded=known.is_recorded)]
        return notes


class MeasuredPrices:
    """Takes kernel times from ``launches``, and ``host`` where that was not measured. It implements :class:`Prices`."""

    def __init__(self, product: str, launches: pd.DataFrame) -> None:
        self.product = product
        self.host = HostCosts()
        self.calibrated_on: Calibration | None = None
        self._whole_us = float(np.nansum(launches["measured_us"].to_numpy("f8")))

    def price(self, work: pd.DataFrame, counts: Array) -> pd.DataFrame:
        """No times, for every row of work."""
        nothing = np.full(len(work), np.nan)
        texts = pd.Series("", work.index, dtype=object)
        columns = {"time_us": nothing, "low_us": nothing, "high_us": nothing, "bound": texts}
        basis = np.where(work["kind"] == "collective", "", "measured")
        return pd.DataFrame({**columns, "basis": basis}, index=work.index)

    def step_interval(self, priced: pd.DataFrame, counts: Array) -> tuple[float, float]:
        """The sum of what was measured, which has no interval."""
        return self._whole_us, self._whole_us

    def notes(self) -> list[Note]:
        """None: the tool's own notes say where the times come from."""
        return []


#: Groups that have a limit of their own, those that take most, and rows of ``launches`` that they all place: the
#: largest steps have the first group's alone.
_MOST_GROUPS = 4
_MOST_ROWS = 2_000_000
#: What takes less than this share of the step limits nothing.
_LEAST = 1e-3


_Kind = Literal["kernels", "collectives", "nics"]


class _Part(NamedTuple):
    """Rows of ``launches``, and the 90 % interval of their time over the estimate."""

    kind: _Kind
    group: str
    num_nodes: int
    rows: npt.NDArray[np.bool_]
    low: float
    high: float


def find_limits(step: PricedStep, tables: Mapping[str, pd.DataFrame]) -> list[StepLimit]:
    """The limits of a priced step, the longest first; ``tables`` has its ``work``, ``calls`` and ``groups``."""
    prices = step.price_list.work
    communication = step.communication
    own = StepLaunches(step.launches, tables["work"], prices, communication)
    # Without a host: what a tool measured of it is in the launches, the rest follows the host's costs.
    on_gpu = StepLaunches(step.launches.assign(host_us=0.0, host_work=""), tables["work"], prices, communication)
    no_host = scaled(step.host, 0.0)
    nothing = np.zeros(len(step.launches), bool)
    host_us = [own.place(scaled(step.host, factor), nothing).placed.end_us for factor in (1.0, *step.host.range)]
    limits = [StepLimit("host", "", 0, *host_us)]
    for part in _parts(step, tables, own.kernels_us):
        us = on_gpu.place(no_host, part.rows).placed.end_us
        limits.append(StepLimit(part.kind, part.group, part.num_nodes, us, us * part.low, us * part.high))
    return sorted((row for row in limits if row.step_us > _LEAST * step.step_us), key=lambda row: -row.step_us)


def _parts(step: PricedStep, tables: Mapping[str, pd.DataFrame], kernels_us: float) -> Iterator[_Part]:
    is_call = (step.launches["what"].astype(str) == "collective").to_numpy(bool)
    low, high = (bound / kernels_us if kernels_us and np.isfinite(bound) else 1.0 for bound in step.kernel_bounds_us)
    yield _Part("kernels", "", 0, ~is_call, low, high)
    if step.communication is None:
        return
    labels = np.array([group.label for group in read_groups(tables["groups"])], object)
    made_on = tables["calls"].set_index("sequence")["group"]
    calls = step.communication.calls.dropna(subset="time_us")
    calls = calls.assign(label=labels[made_on.reindex(calls.index).to_numpy("i8")])
    over_nodes = calls[calls["num_nodes"] > 1]
    of_nics = over_nodes.groupby("label")["time_us"].sum()
    by_group = sorted(calls.groupby("label", sort=False), key=lambda item: -item[1]["time_us"].sum())
    most = max(min(_MOST_ROWS // len(step.launches), _MOST_GROUPS), 1)
    parts: list[tuple[_Kind, str, pd.DataFrame]]
    parts = [("collectives", str(label), own) for label, own in by_group[:most]]
    if (of_nics > _LEAST * step.step_us).sum() > 1:
        parts.append(("nics", "", over_nodes))
    for kind, label, own in parts:
        if whole := float(own["time_us"].sum()):
            rows = is_call & step.launches["call"].isin(own.index).to_numpy(bool)
            num_nodes = int(own["num_nodes"].max()) if label else 0
            low, high = (float(own[name].sum()) / whole for name in ("low_us", "high_us"))
            yield _Part(kind, label, num_nodes, rows, low, high)
