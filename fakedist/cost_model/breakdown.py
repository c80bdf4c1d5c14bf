"""The step's time by activity, family, kernel, layer, range and group; critical path; widest estimates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.memory_tables import Fold, fold_sums, with_children
from fakedist.analysis.recording import Array
from fakedist.analysis.topology import read_groups
from fakedist.analysis.typed_tables import rows_of, table_of
from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.host_times import (
    host_parts,
    host_table,
    host_waits,
    late_launches,
    layers_host_us,
)
from fakedist.cost_model.model_flops import COUNTED, ModelFlops, flops_of_kernels, flops_of_launches
from fakedist.cost_model.overlap import union, union_us
from fakedist.cost_model.step import PricedStep, find_limits
from fakedist.cost_model.timeline import IDLE, ON_GPU, ON_HOST
from fakedist.rundir.families import kernel_family
from fakedist.rundir.launch_records import RangeRow
from fakedist.rundir.schema import BOUNDS, COMPUTE_FAMILIES, FAMILIES, KINDS
from fakedist.rundir.step_time import (
    FamilyTime,
    GroupTime,
    HostWait,
    KernelSource,
    KernelTime,
    LateLaunches,
    LayerTime,
    PathKind,
    PathPart,
    Peaks,
    RangeTime,
    StepBreakdown,
    UncertainPart,
)
from fakedist.rundir.table_rows import TABLES


def indices(values: pd.Series, known: tuple[str, ...]) -> Array:
    """Texts as indices into ``known``; ValueError if one is not in it."""
    categories = values.astype("category")
    of_category = np.array([known.index(str(name)) for name in categories.cat.categories], "i8")
    return of_category[categories.cat.codes.to_numpy()] if len(values) else np.zeros(0, "i8")


def timed(kernels: pd.DataFrame) -> pd.DataFrame:
    """The table ``kernels`` with the columns that all tables of times need.

    ``kind`` and ``family`` (indices into ``KINDS`` and ``FAMILIES``); ``is_compute``; ``is_call`` (a collective's only
    or first kernel); ``is_known``; ``known_us`` (0 if unknown); ``lacks_flops`` (a product or attention without a
    count).
    """
    phase = kernels["phase"].astype(str)
    kind = phase.where(phase.isin(KINDS), "other").where(~kernels["recompute"].astype(bool), "recompute")
    family = indices(kernels["family"], FAMILIES)
    duration = kernels["duration_us"].to_numpy("f8")
    is_known = np.isfinite(duration)
    is_compute = family != FAMILIES.index("communication")
    call = kernels["call"]
    counted = np.isin(family, [FAMILIES.index(name) for name in COUNTED])
    return kernels.assign(
        kind=indices(kind, KINDS),
        family=family,
        is_compute=is_compute,
        is_call=~is_compute & ((call < 0) | ~call.duplicated()).to_numpy(bool),
        is_known=is_known,
        known_us=np.where(is_known, duration, 0.0),
        lacks_flops=counted & ~np.isfinite(kernels["flops"].to_numpy("f8")),
    )


def kind_family_us(kernels: pd.DataFrame) -> Array:
    """Known compute time in microseconds, shape (number of ``KINDS``, number of ``FAMILIES``)."""
    compute = kernels[kernels["is_compute"]]
    sums = np.zeros((len(KINDS), len(FAMILIES)))
    np.add.at(sums, (compute["kind"].to_numpy("i8"), compute["family"].to_numpy("i8")), compute["known_us"].to_numpy())
    return sums


def generation_us(kernels: pd.DataFrame) -> float:
    """Microseconds from the first to the last kernel of each generation, unless training separates them."""
    generation, other = KINDS.index("generation"), KINDS.index("other")
    relevant = kernels[kernels["kind"] != other].sort_values("start_us", kind="stable")
    is_one = (relevant["kind"] == generation).to_numpy(bool)
    number = np.cumsum(~is_one)[is_one]  # of the stretch between others
    rows = relevant[is_one]
    stretches = rows.assign(end_us=rows["start_us"] + rows["known_us"]).groupby(number)
    return float((stretches["end_us"].max() - stretches["start_us"].min()).sum())


_ROUNDING_US = 1e-3


@dataclass(frozen=True)
class Busy:
    """A step's time in four parts that add up to it.

    Attributes:
        step_us: To the end of everything that the step launched.
        busy_us: At least one stream computes.
        communication_us: Nothing computes, and a collective of known duration runs.
        launch_gap_us: Nothing runs, and the next kernel was launched after the gap began: the host is late.
        wait_us: Nothing runs for any other reason; for any reason at all if launches are unknown.
        of_kernel_us: For each kernel, the launch gap that it ended. The gap at the step's end belongs to no kernel.
    """

    step_us: float
    busy_us: float
    communication_us: float
    launch_gap_us: float
    wait_us: float
    of_kernel_us: Array


def find_busy(kernels: pd.DataFrame, step_us: float) -> Busy:
    """Divide a step's time into its parts. Kernels that end after ``step_us`` make it longer."""
    known = kernels["is_known"].to_numpy(bool)
    start = np.maximum(kernels["start_us"].to_numpy("f8")[known], 0.0)
    end = np.maximum(kernels["start_us"].to_numpy("f8")[known] + kernels["known_us"].to_numpy()[known], start)
    step_us = max(float(step_us), float(end.max(initial=0.0)))
    compute = kernels["is_compute"].to_numpy(bool)[known]
    busy = union_us(start[compute], end[compute])
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    launch = kernels["launch_us"].to_numpy("f8")[known][order]
    free = np.concatenate([[0.0], np.maximum.accumulate(end)])  # before each kernel, when the GPU had run out of work
    gap = np.maximum(start - free[:-1], 0.0)
    is_late = launch > free[:-1]  # never true if the launch is unknown
    late = np.where(is_late, gap, 0.0)
    of_kernel = np.zeros(len(kernels))
    of_kernel[np.flatnonzero(known)[order]] = late
    tail = step_us - float(free[-1])  # after the last kernel only the host works
    waits = float(gap.sum() - late.sum())
    late_us = float(late.sum()) + (tail if np.isfinite(launch).any() else 0.0)
    waits += 0.0 if np.isfinite(launch).any() else tail
    rest = step_us - busy - late_us - waits
    rest = rest if rest > _ROUNDING_US else 0.0
    return Busy(step_us, busy, rest, late_us, waits, of_kernel)


_INTERVAL = ("low_us", "high_us")
_SUMS = ("num_kernels", "num_unknown", "time_us", "flops", "flops_us", "moved_bytes", "moved_us")


def family_table(kernels: pd.DataFrame) -> pd.DataFrame:
    """Every family that ran, most time first: columns of ``_SUMS``; compute_us, memory_us, launch_us (by bound)."""
    rows = _counted(kernels)
    bound = rows["bound"].astype(str).to_numpy()
    for name in filter(None, BOUNDS):
        rows[f"{name}_us"] = np.where(bound == name, rows["time_us"], 0.0)
    columns = [*_SUMS, *(f"{name}_us" for name in BOUNDS if name)]
    table = rows.groupby("family", sort=True)[columns].sum().reset_index()
    table["family"] = [FAMILIES[at] for at in table["family"]]
    return table.sort_values("time_us", ascending=False, kind="stable").reset_index(drop=True)


def name_table(kernels: pd.DataFrame, folds: list[Fold]) -> pd.DataFrame:
    """The table ``kernel_names``: a row for each name, shape and folded layer of kernels, most time first."""
    rows = _counted(kernels).assign(
        name=lambda table: table["name"].astype("category"),
        shape=_shapes(kernels),
        layer_name=_folded_names(kernels["layer"].to_numpy("i8"), folds),
    )
    keys = ["name", "family", "shape", "layer_name"]
    groups = rows.groupby(keys, sort=False, observed=True)
    duration = groups["duration_us"]
    table = groups[list(_SUMS)].sum()
    table = table.assign(
        **{name: groups[name].sum(min_count=1) for name in _INTERVAL},
        least_us=duration.min(),
        median_us=duration.median(),
        largest_us=duration.max(),
        num_layers=groups["layer"].nunique(),
        bound=_main_bound(rows, keys).reindex(table.index).fillna(""),
    )
    table = table.reset_index().rename(columns={"layer_name": "layer"})
    table = table.astype({"name": str, "shape": str, "layer": str})
    table["family"] = [FAMILIES[at] for at in table["family"]]
    order = table.sort_values(["time_us", "num_kernels"], ascending=False, kind="stable").index
    return table.loc[order, TABLES["kernel_names"].names]


def name_rows(kernels: pd.DataFrame, names: pd.DataFrame, folds: list[Fold]) -> Array:
    """For each kernel its row in a table ``kernel_names``, or in the first rows of one; -1 for a row beyond them."""
    keys = ["name", "family", "shape", "layer"]
    wanted = names[keys].astype(str).assign(row=np.arange(len(names)))
    layer = _folded_names(kernels["layer"].to_numpy("i8"), folds)
    family = np.array(FAMILIES, object)[kernels["family"].to_numpy("i8")]
    columns = dict(zip(keys, (kernels["name"].astype(str), family, _shapes(kernels), layer), strict=True))
    own = pd.DataFrame({name: np.asarray(column, object) for name, column in columns.items()}).astype(str)
    rows: Array = own.merge(wanted, how="left", on=keys)["row"].fillna(-1).to_numpy("i8")
    return rows


def by_name(names: pd.DataFrame) -> pd.DataFrame:
    """The columns that can be added up of a table ``kernel_names``, by name and family, in the order of the table."""
    return names.groupby(["name", "family"], sort=False)[list(_SUMS)].sum().reset_index()


def _shapes(kernels: pd.DataFrame) -> pd.Series:
    """The shape of each kernel's work, or the grid of a traced one, which follows the size."""
    shape, grid = (kernels[name].astype("category") for name in ("shape", "grid"))
    grid = grid.cat.rename_categories({text: f"grid {text}" for text in grid.cat.categories if text})
    known = sorted({*map(str, shape.cat.categories), *map(str, grid.cat.categories)})
    both = pd.CategoricalDtype(known)
    return shape.astype(both).where(np.asarray(shape.astype(str) != ""), grid.astype(both))


def _folded_names(layer: npt.NDArray[np.int64], folds: list[Fold]) -> pd.Categorical[str]:
    """The name of each kernel's layer, the same for repeated layers: layers.0-79.attention."""
    of_layer = np.zeros(max((max(fold.layers) for fold in folds), default=0) + 1, "i8")
    for number, fold in enumerate(folds):
        of_layer[list(fold.layers)] = number
    texts = pd.Index([fold.name for fold in folds] or [""])
    numbers = pd.factorize(texts)[0]  # two folds may have one name
    return pd.Categorical.from_codes(numbers[of_layer[layer]], categories=texts.unique())


def _main_bound(rows: pd.DataFrame, keys: list[str]) -> pd.Series:
    bounded = rows[rows["bound"].astype(str) != ""]
    sums = bounded.astype({"bound": str}).groupby([*keys, "bound"], sort=False, observed=True)["time_us"].sum()
    most = sums.reset_index().sort_values("time_us", ascending=False, kind="stable").drop_duplicates(keys)
    return most.set_index(keys)["bound"]


def _counted(kernels: pd.DataFrame) -> pd.DataFrame:
    """One row per kernel with the columns to sum. NaN counts as 0, and so does the time that goes with it."""
    flops, moved = kernels["flops"].to_numpy("f8"), kernels["moved_bytes"].to_numpy("f8")
    known_us = kernels["known_us"].to_numpy()
    counts = {
        "num_kernels": np.ones(len(kernels), "i8"),
        "num_unknown": (~kernels["is_known"].to_numpy(bool)).astype("i8"),
        "time_us": known_us,
        "flops": np.nan_to_num(flops),
        "flops_us": np.where(np.isfinite(flops), known_us, 0.0),
        "moved_bytes": np.nan_to_num(moved),
        "moved_us": np.where(np.isfinite(moved), known_us, 0.0),
    }
    return kernels[["name", "family", "layer", "bound", "duration_us", *_INTERVAL]].assign(**counts)


_KIND_COLUMNS = [f"{kind}_us" for kind in KINDS]
_BOUND_COLUMNS = [f"bound_{name}_us" for name in BOUNDS if name]
_SUMMED = [
    *(*_KIND_COLUMNS, *_BOUND_COLUMNS, "num_kernels", "flops", "moved_bytes", "num_lacking_flops", "launch_gap_us"),
    "host_us",
]
_CALLS = ["num_calls", "num_unknown_calls", "communication_us"]


def layer_time_table(kernels: pd.DataFrame, layers: pd.DataFrame, gap_us: Array, host_us: Array) -> pd.DataFrame:
    """The table ``layer_times``, one row per layer; each kernel, with its launch gap, counts in exactly one.

    ``host_us`` is the host's own time by layer.
    """
    num = len(layers)
    layer = kernels["layer"].to_numpy("i8")
    compute = kernels["is_compute"].to_numpy(bool)
    known_us = kernels["known_us"].to_numpy()

    def summed(chosen: Array, weights: Array | None = None) -> Array:
        values = None if weights is None else weights[chosen]
        return np.bincount(layer[chosen], values, num)

    kind, family = kernels["kind"].to_numpy(), kernels["family"].to_numpy()
    bound = kernels["bound"].astype(str).to_numpy()
    is_call = kernels["is_call"].to_numpy(bool)
    kinds = {column: summed(compute & (kind == at), known_us) for at, column in enumerate(_KIND_COLUMNS)}
    own_us = pd.DataFrame(kinds).sum(axis=1).to_numpy()
    families = {f"family_{name}_us": summed(family == FAMILIES.index(name), known_us) for name in COMPUTE_FAMILIES}
    bounds = {f"bound_{name}_us": summed(compute & (bound == name), known_us) for name in filter(None, BOUNDS)}
    work = {name: summed(compute, np.nan_to_num(kernels[name].to_numpy("f8"))) for name in ("flops", "moved_bytes")}
    return pd.DataFrame({"name": layers["name"].astype(str)}).assign(
        num_kernels=summed(compute).astype("i8"),
        **kinds,
        own_us=own_us,
        total_us=with_children(layers, own_us),
        **families,
        **bounds,
        **work,
        num_lacking_flops=summed(kernels["lacks_flops"].to_numpy(bool)).astype("i8"),
        launch_gap_us=summed(np.ones(len(kernels), bool), gap_us),
        num_calls=summed(is_call).astype("i8"),
        num_unknown_calls=summed(is_call & ~kernels["is_known"].to_numpy(bool)).astype("i8"),
        communication_us=summed(~compute, known_us),
        host_us=host_us,
    )


def fold_times(times: pd.DataFrame, layers: pd.DataFrame, folds: list[Fold]) -> pd.DataFrame:
    """Times of folds (of ``fold_layers`` or ``unfolded``): one row per fold, in their order.

    Columns: name, class_name, depth, num_repeats; sums over the repeats with children: forward_us, recompute_us,
    backward_us, optimizer_us, other_us, total_us, bound_compute_us, bound_memory_us, bound_launch_us, num_kernels,
    flops, moved_bytes, num_lacking_flops, launch_gap_us, host_us, num_calls, num_unknown_calls, communication_us;
    own_us without children; least_us, median_us, largest_us: total of one repeat, with children.
    """
    sums = {name: with_children(layers, times[name].to_numpy()) for name in (*_SUMMED, *_CALLS)}
    sums["own_us"] = times["own_us"].to_numpy()
    return fold_sums(folds, sums, ("total_us", times["total_us"].to_numpy()), "us")


def range_table(ranges: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """The table ``ranges``, of columns ``RangeRow._fields``."""
    ordered = kernels[kernels["launch"] >= 0].sort_values("launch", kind="stable")
    launch = ordered["launch"].to_numpy()
    first, end = (np.searchsorted(launch, ranges[name].to_numpy()) for name in ("first_launch", "end_launch"))
    sums = {
        "num_kernels": ordered["is_compute"].to_numpy(bool),
        "kernel_us": np.where(ordered["is_compute"], ordered["known_us"], 0.0),
        "num_unknown": (ordered["is_compute"] & ~ordered["is_known"]).to_numpy(bool),
        "num_calls": ordered["is_call"].to_numpy(bool),
    }
    table = ranges[list(RangeRow._fields)].copy()
    for name, values in sums.items():
        whole = np.concatenate([[0], np.cumsum(values)])
        table[name] = (whole[end] - whole[first]).astype("f8" if name == "kernel_us" else "i8")
    host, start = ordered["launch_us"].to_numpy("f8"), ordered["start_us"].to_numpy("f8")
    until = start + ordered["known_us"].to_numpy("f8")
    inside = list(zip(first.tolist(), end.tolist(), strict=True))
    nothing = float("nan")
    table = table.assign(
        begin_us=[host[a] if a < b else nothing for a, b in inside],
        end_us=[host[b - 1] if a < b else nothing for a, b in inside],
        gpu_begin_us=[start[a:b].min() if a < b else nothing for a, b in inside],
        gpu_end_us=[until[a:b].max() if a < b else nothing for a, b in inside],
    )
    return table[TABLES["ranges"].names].astype(dict.fromkeys(("begin_us", "end_us"), "f8"))


def range_lanes(ranges: pd.DataFrame, most: int) -> pd.DataFrame:
    """The longest ``most`` ranges with kernels as bars on the GPU, outer ones above those that they contain.

    Columns name, lane, start_us, end_us, num_kernels, kernel_us, num_calls, by start.
    """
    table = ranges.assign(start_us=ranges["gpu_begin_us"], end_us=ranges["gpu_end_us"])
    table["long_us"] = table["end_us"] - table["start_us"]
    longest = table[table["long_us"] > 0].nlargest(most, "long_us").sort_index()
    longest = longest.sort_values(["start_us", "long_us"], ascending=[True, False], kind="stable")
    reached: list[float] = []
    lanes = []
    for start, end in zip(longest["start_us"].tolist(), longest["end_us"].tolist(), strict=True):
        lane = next((at for at, until in enumerate(reached) if until <= start), len(reached))
        reached[lane : lane + 1] = [end]
        lanes.append(lane)
    columns = ["name", "lane", "start_us", "end_us", "num_kernels", "kernel_us", "num_calls"]
    return longest.assign(lane=np.array(lanes, "i8"))[columns].reset_index(drop=True)


def by_range(ranges: pd.DataFrame) -> list[RangeTime]:
    """Ranges of one name together, most kernel time first."""
    rows = ranges.assign(gpu_us=ranges["gpu_end_us"] - ranges["gpu_begin_us"])
    times = [
        RangeTime(
            name=str(name),
            num_ranges=len(part),
            depth=int(part["depth"].min()),
            num_kernels=int(part["num_kernels"].sum()),
            num_unknown=int(part["num_unknown"].sum()),
            kernel_us=float(part["kernel_us"].sum()),
            gpu_us=float(part["gpu_us"].sum()),
            num_calls=int(part["num_calls"].sum()),
        )
        for name, part in rows.groupby("name", sort=False)
    ]
    return sorted(times, key=lambda row: -row.kernel_us)


#: A kernel that begins this soon after a call's end waited for it.
_SAME_US = 1e-3


def group_times(
    kernels: pd.DataFrame, tables: Mapping[str, pd.DataFrame], communication: Communication | None
) -> list[GroupTime]:
    """The step's communication by group and operation, most exposed first; ``tables`` has ``calls`` and ``groups``."""
    if communication is None:
        return []
    calls = tables["calls"]
    own = kernels[kernels["is_call"] & kernels["call"].isin(calls["sequence"])]
    if not len(own):
        return []
    made_by = calls.set_index("sequence").loc[own["call"].to_numpy("i8"), ["operation", "group"]]
    of_call = communication.calls.reindex(own["call"].to_numpy("i8"))
    rows = pd.DataFrame(
        {
            "group": made_by["group"].to_numpy(),
            "operation": made_by["operation"].to_numpy(),
            "num_nodes": of_call["num_nodes"].to_numpy(),
            "moved_bytes": of_call["moved_bytes"].to_numpy("f8"),
            "num_unknown": ~own["is_known"].to_numpy(bool),
            "time_us": own["known_us"].to_numpy("f8"),
            "exposed_us": exposed_calls_us(own, kernels[kernels["is_compute"]]),
        }
    )
    labels = [(group.label, group.size) for group in read_groups(tables["groups"])]
    made = []
    for (group, operation), part in rows.groupby(["group", "operation"], observed=True):
        label, size = labels[int(str(group))]
        exposed, whole = float(part["exposed_us"].sum()), float(part["time_us"].sum())
        made.append(
            GroupTime(
                group=label,
                group_size=size,
                num_nodes=int(part["num_nodes"].max()),
                operation=str(operation),
                num_calls=len(part),
                num_unknown=int(part["num_unknown"].sum()),
                moved_bytes=float(part["moved_bytes"].sum()),
                time_us=whole,
                hidden_us=max(whole - exposed, 0.0),
                exposed_us=exposed,
            )
        )
    return sorted(made, key=lambda row: (-row.exposed_us, -row.time_us, row.group, row.operation))


def measured_group_times(kernels: pd.DataFrame) -> list[GroupTime]:
    """The collectives' own kernels that a tool traced, by operation where it is known, most exposed first."""
    own = kernels[kernels["is_call"]]
    rows = own.assign(label=_call_labels(own), exposed_us=exposed_calls_us(own, kernels[kernels["is_compute"]]))
    made = []
    for label, part in rows.groupby("label"):
        exposed, whole = float(part["exposed_us"].sum()), float(part["known_us"].sum())
        hidden = max(whole - exposed, 0.0)
        moved = float(np.nan_to_num(part["moved_bytes"].to_numpy("f8")).sum())
        made.append(GroupTime("", 0, 0, str(label), len(part), 0, moved, whole, hidden, exposed))
    return sorted(made, key=lambda row: (-row.exposed_us, -row.time_us, row.operation))


def _call_labels(kernels: pd.DataFrame) -> pd.Series:
    """The collective's name as torch.profiler has it; around NCCL's own kernels others know at most an operation."""
    named = kernels["operation"].astype(str)
    return named.where(named.str.contains(" ranks", regex=False), kernels["name"].astype(str).str.partition("(")[0])


def exposed_calls_us(calls: pd.DataFrame, compute: pd.DataFrame) -> Array:
    """Microseconds for which nothing computes and the step waits for each call.

    Of several calls in a gap between kernels, it is the last to end before the gap does, or else the first that began.
    The parts add up to the time in which nothing computes and a call runs.
    """
    start = calls["start_us"].to_numpy("f8")
    end = start + calls["known_us"].to_numpy("f8")
    kernel = compute["start_us"].to_numpy("f8")
    busy_starts, busy_ends = union(kernel, kernel + compute["known_us"].to_numpy("f8"))
    exposed_us = np.zeros(len(start))
    for number, begin, until in _exposed(start, end, busy_starts, busy_ends):
        exposed_us[number] += until - begin
    return exposed_us


def exposed_parts(kernels: pd.DataFrame) -> pd.DataFrame:
    """Disjoint waits for calls while nothing computes: columns row (of ``kernels``), start_us, end_us, by time."""
    rows = np.flatnonzero((kernels["is_call"] & kernels["is_known"]).to_numpy(bool))
    calls = kernels.iloc[rows]
    compute = kernels[kernels["is_compute"]]
    start, kernel = calls["start_us"].to_numpy("f8"), compute["start_us"].to_numpy("f8")
    busy = union(kernel, kernel + compute["known_us"].to_numpy("f8"))
    parts = list(_exposed(start, start + calls["known_us"].to_numpy("f8"), *busy))
    table = pd.DataFrame(parts, columns=["row", "start_us", "end_us"])
    return table.assign(row=rows[table["row"].to_numpy("i8")])


def _exposed(start: Array, end: Array, busy_starts: Array, busy_ends: Array) -> Iterator[tuple[int, float, float]]:
    """The call that the step waits for, from when and until when; calls without a time are waited for by nothing."""
    takes_time = np.flatnonzero(end > start).tolist()
    changes = sorted(
        [(float(start[number]), 1, number) for number in takes_time]
        + [(float(end[number]), 0, number) for number in takes_time]
        + [(at, 2, -1) for at in (*busy_starts.tolist(), *busy_ends.tolist())]
    )
    running: set[int] = set()
    before = 0.0
    for at, kind, number in changes:
        if running and at > before:
            index = int(np.searchsorted(busy_starts, before, side="right"))
            if not index or busy_ends[index - 1] <= before:
                gap_end = busy_starts[index] if index < len(busy_starts) else np.inf
                yield _waited_for(running, start, end, float(gap_end)), before, at
        before = at
        if kind == 1:
            running.add(number)
        elif kind == 0:
            running.discard(number)


def _waited_for(running: set[int], start: Array, end: Array, gap_end: float) -> int:
    in_time = [number for number in running if end[number] <= gap_end + _SAME_US]
    if in_time:
        return max(in_time, key=lambda number: (end[number], -start[number]))
    return min(running, key=lambda number: (start[number], number))


def traced_path(kernels: pd.DataFrame, source: KernelSource, folds: list[Fold]) -> list[PathPart]:
    """The parts of a traced step's critical path, the longest first. They add up to the step."""
    rows = kernels[kernels["path_us"] > 0]
    if not len(rows):
        return []
    numbers = {layer: number for number, fold in enumerate(folds) for layer in fold.layers}
    has_layers = bool((kernels["layer"] > 0).any())
    is_call = rows["is_call"]
    operation = _call_labels(rows).where(is_call, "" if has_layers else rows["operation"].astype(str))
    fold_number = rows["layer"].map(numbers).where(~is_call & has_layers, -1)
    parts = []
    keys = [operation, fold_number, is_call, rows["stream"]]
    for (label, number, called, stream), part in rows["path_us"].groupby(keys):
        fold = folds[int(str(number))] if number != -1 else None
        name, count = ("", 0) if fold is None else (fold.name, len(fold.layers))
        kind: PathKind = "collectives" if called else "kernels"
        parts.append(PathPart(kind, name, "", str(label), count, len(part), float(part.sum()), f"stream {stream}"))
    return sorted([*parts, *source.path], key=lambda part: -part.time_us)


def path_parts(step: PricedStep, tables: Mapping[str, pd.DataFrame], folds: list[Fold]) -> list[PathPart]:
    """The parts of a critical path, the longest first. They add up to the step."""
    launches = step.launches
    path = step.path
    call = launches["call"].to_numpy("i8")[path.row] if len(launches) else path.row
    layer = launches["layer"].to_numpy("i8")[path.row] if len(launches) else path.row
    is_call = (path.what == ON_GPU) & (call >= 0)
    parts = _of_layers("kernels", layer, path.us, (path.what == ON_GPU) & ~is_call, folds)
    parts += _of_layers("host", layer, path.us, path.what == ON_HOST, folds)
    parts += _of_groups(call, path.us, is_call, tables)
    if (idle := path.what == IDLE).any():
        parts.append(PathPart("idle", "", "", "", 0, 0, float(path.us[idle].sum())))
    return sorted(parts, key=lambda part: -part.time_us)


def _of_layers(kind: PathKind, layer: Array, us: Array, chosen: Array, folds: list[Fold]) -> list[PathPart]:
    num = max(max(fold.layers) for fold in folds) + 1
    sums = np.bincount(layer[chosen], us[chosen], num)
    counts = np.bincount(layer[chosen], minlength=num)
    parts = []
    for fold in folds:
        rows = list(fold.layers)
        if counts[rows].any():
            amount, number = float(sums[rows].sum()), int(counts[rows].sum())
            parts.append(PathPart(kind, fold.name, "", "", len(rows), number, amount))
    return parts


def _of_groups(call: Array, us: Array, chosen: Array, tables: Mapping[str, pd.DataFrame]) -> list[PathPart]:
    if not chosen.any():
        return []
    labels = [group.label for group in read_groups(tables["groups"])]
    made = tables["calls"].set_index("sequence").loc[call[chosen], ["group", "operation"]]
    rows = pd.DataFrame({"group": made["group"].to_numpy(), "operation": made["operation"].astype(str).to_numpy()})
    sums = rows.assign(us=us[chosen]).groupby(["group", "operation"])["us"].agg(["sum", "count"])
    return [
        PathPart("collectives", "", labels[int(group)], str(operation), 0, int(count), float(amount))
        for (group, operation), amount, count in zip(sums.index, sums["sum"], sums["count"], strict=True)
    ]


_NUM_PARTS = 3


def call_spreads(
    calls: pd.DataFrame, groups: pd.DataFrame, communication: Communication
) -> dict[tuple[str, str], float]:
    """How much longer than estimated collectives may take, relative to their time, by group and operation."""
    labels = [group.label for group in read_groups(groups)]
    own = calls[calls["sequence"].isin(communication.calls.index)]
    prices = communication.calls.loc[own["sequence"].to_numpy("i8"), ["time_us", "high_us"]].set_axis(own.index)
    keys = [own["group"].map(lambda number: labels[int(number)]).astype(str), own["operation"].astype(str)]
    sums = prices.groupby(keys, observed=True).sum()
    return {
        (str(label), str(operation)): float(high_us / time_us - 1) if time_us else 0.0
        for (label, operation), time_us, high_us in zip(sums.index, sums["time_us"], sums["high_us"], strict=True)
    }


def uncertain_parts(
    priced: PricedStep, by_group: Sequence[GroupTime], tables: Mapping[str, pd.DataFrame]
) -> list[UncertainPart]:
    """The largest parts of a step's variance.

    Kernels divide theirs as the families' errors do. Collectives, whose errors go together, divide theirs by what each
    group and operation could add to the exposed time. ``tables`` then has ``calls`` and ``groups``.
    """
    spreads = {}
    if by_group and priced.communication is not None:
        spreads = call_spreads(tables["calls"], tables["groups"], priced.communication)
    interval = priced.interval
    whole = sum(us**2 for us in interval[2:])
    if interval.high_us is None or not whole:
        return []
    parts = [
        UncertainPart("host", "the host", "", 0, interval.host_us, interval.host_us**2 / whole),
        UncertainPart(
            "allocator", "the allocator's calls", "", 0, interval.allocator_us, interval.allocator_us**2 / whole
        ),
        UncertainPart("cpu", "operations on large CPU tensors", "", 0, interval.cpu_us, interval.cpu_us**2 / whole),
    ]
    of_kernels = sum(priced.variances.values())
    for family, variance in priced.variances.items():
        share = variance / of_kernels if of_kernels else 0.0
        part = interval.kernels_us**2 * share
        parts.append(UncertainPart("kernels", family, "", 0, part**0.5, part / whole))
    weights = [row.exposed_us * spreads.get((row.group, row.operation), 0.0) for row in by_group]
    for row, weight in zip(by_group, weights, strict=True):
        share = weight / sum(weights) if weight else 0.0
        part = interval.calls_us**2 * share
        half_us = interval.calls_us * share
        parts.append(UncertainPart("collectives", row.operation, row.group, row.num_nodes, half_us, part / whole))
    parts = [part for part in parts if part.half_width_us > 0]
    return sorted(parts, key=lambda part: -part.share)[:_NUM_PARTS]


NUM_TOP = 20
#: The peak rate that utilisation refers to: by convention dense bf16, whatever dtype the job uses.
PEAK_DTYPE = "bf16"


def break_down(
    kernels: pd.DataFrame,
    tables: Mapping[str, pd.DataFrame],
    folds: list[Fold],
    step: PricedStep | KernelSource | None,
    peaks: Peaks | None,
    *,
    is_slowed: bool = False,
) -> tuple[dict[str, pd.DataFrame], StepBreakdown | None]:
    """The tables layer_times, host, kernel_names and ranges of a step, and where its time goes (None without kernels).

    Args:
        tables: layers, ranges (without times), and of a priced step calls, groups and work, and with lines
            operation_stacks and stacks.
        step: The priced step, or the source of traced kernels; None without kernels.
        is_slowed: A tool slowed the host, so launches are later than without it, and the step may be shorter by that:
            GPT-2's step of 44.6 ms on an H200 took 74.6 ms under CUPTI, its kernels the same 40.4 ms.
    """
    layers, ready = tables["layers"], timed(kernels)
    busy = find_busy(ready, 0.0 if step is None else step.step_us)
    host, launches = _host(step, ready, busy)
    made = {
        "layer_times": layer_time_table(ready, layers, busy.of_kernel_us, layers_host_us(host, launches, len(layers))),
        "host": host,
        "kernel_names": name_table(ready, folds),
        "ranges": range_table(tables["ranges"], ready),
    }
    if step is None or not len(kernels):
        return {**made, "layer_times": made["layer_times"].iloc[:0], "host": host.iloc[:0]}, None
    models = _model_flops(step, kernels, tables)
    peak = peaks.flops.get(PEAK_DTYPE) if peaks else None
    low_us, high_us = step.step_low_us, step.step_high_us
    if is_slowed:
        low_us = (busy.step_us if low_us is None else low_us) - busy.launch_gap_us
        high_us = busy.step_us if high_us is None else high_us
    with_causes = partial(
        _with_sums(ready),
        step_us=busy.step_us,
        step_low_us=low_us,
        step_high_us=high_us,
        busy_us=busy.busy_us,
        communication_us=busy.communication_us,
        launch_gap_us=busy.launch_gap_us,
        wait_us=busy.wait_us,
        model_flops=models.flops,
        num_lacking_flops=models.num_lacking,
        peaks=peaks,
        model_flops_utilisation=_utilisation(models, busy.busy_us, peak),
        top_kernels=rows_of(KernelTime, made["kernel_names"].query("family != 'communication'").head(NUM_TOP)),
        layers=layer_times(made["layer_times"], layers, folds),
        ranges=by_range(made["ranges"]),
        step_flops_utilisation=_utilisation(models, busy.step_us, peak if ready["is_known"].all() else None),
    )
    if isinstance(step, PricedStep):
        return made, _with_placed(with_causes, ready, step, {**tables, "host": host}, folds)
    return made, _with_traced(with_causes, ready, step, folds)


def _with_sums(kernels: pd.DataFrame) -> partial[StepBreakdown]:
    """A breakdown with the sums over a step's kernels and calls, which lacks the rest."""
    compute = kernels[kernels["is_compute"]]
    known_us = compute["known_us"].to_numpy()
    kind = compute["kind"].to_numpy()
    bound = compute["bound"].astype(str).to_numpy()
    return partial(
        StepBreakdown,
        generation_us=generation_us(kernels),
        num_kernels=len(compute),
        num_unknown_kernels=int((~compute["is_known"]).sum()),
        kernel_us=float(known_us.sum()),
        by_kind={name: float(known_us[kind == at].sum()) for at, name in enumerate(KINDS)},
        by_bound={name: float(known_us[bound == name].sum()) for name in BOUNDS if name and (bound == name).any()},
        num_calls=int(kernels["is_call"].sum()),
        num_unknown_calls=int((kernels["is_call"] & ~kernels["is_known"]).sum()),
        flops=float(np.nan_to_num(compute["flops"].to_numpy("f8")).sum()),
        moved_bytes=float(np.nan_to_num(compute["moved_bytes"].to_numpy("f8")).sum()),
        by_family=_families(kernels),
    )


def _with_traced(
    with_causes: partial[StepBreakdown], kernels: pd.DataFrame, source: KernelSource, folds: list[Fold]
) -> StepBreakdown:
    """The breakdown with what only a tool that traced the kernels has."""
    compute = kernels[kernels["is_compute"]]
    start, us = compute["start_us"].to_numpy("f8"), compute["known_us"].to_numpy("f8")
    others = ~compute["name"].astype(str).str.startswith(("Memcpy", "Memset")).to_numpy(bool)
    alone_us = union_us(start, start + us) - union_us(start[others], (start + us)[others])
    has_real = _are_real(kernels.loc[~kernels["is_compute"], "name"])
    return with_causes(
        by_group=measured_group_times(kernels) if has_real else [],
        copies_alone_us=alone_us,
        num_copies=int((~others).sum()),
        has_real_collectives=has_real,
        critical_path=traced_path(kernels, source, folds),
        host_waits=source.host_waits[:NUM_TOP],
    )


def _utilisation(models: ModelFlops, time_us: float, peak: float | None) -> float | None:
    return models.flops / (time_us * 1e-6 * peak) if peak and time_us else None


def _model_flops(
    step: PricedStep | KernelSource, kernels: pd.DataFrame, tables: Mapping[str, pd.DataFrame]
) -> ModelFlops:
    if isinstance(step, PricedStep):
        return flops_of_launches(step.launches, tables["work"])
    return flops_of_kernels(kernels)


def _are_real(names: pd.Series) -> bool:
    """Return whether kernels of these names communicate, and there are any. A copy that stands for a call does not."""
    return len(names) > 0 and all(kernel_family(str(name)) == "communication" for name in names.unique())


def _with_placed(
    with_causes: partial[StepBreakdown],
    kernels: pd.DataFrame,
    step: PricedStep,
    tables: Mapping[str, pd.DataFrame],
    folds: list[Fold],
) -> StepBreakdown:
    """The breakdown with the parts of a step that was placed in time; ``tables`` has its ``host``, too."""
    host = tables["host"]
    placed = {**tables, "launches": step.launches}
    return with_causes(
        by_group=group_times(kernels, tables, step.communication),
        critical_path=path_parts(step, tables, folds),
        limits=find_limits(step, tables),
        host=host_parts(host, step.launches),
        host_waits=rows_of(HostWait, host_waits(host, placed, folds).head(NUM_TOP)),
        late_launches=rows_of(LateLaunches, late_launches(host, placed, folds).head(NUM_TOP)),
    )


def _host(
    step: PricedStep | KernelSource | None, kernels: pd.DataFrame, busy: Busy
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The table ``host`` of a step, and the launches that its rows belong to."""
    if not isinstance(step, PricedStep):
        return table_of("host"), pd.DataFrame()
    late_us = np.bincount(kernels["launch"].to_numpy("i8"), busy.of_kernel_us, len(step.launches))
    tail_us = busy.launch_gap_us - float(busy.of_kernel_us.sum())
    return host_table(step.placed, step.launches, late_us, tail_us), step.launches


def _families(kernels: pd.DataFrame) -> list[FamilyTime]:
    families = family_table(kernels)
    whole = float(kernels["known_us"][kernels["is_compute"]].sum())
    is_compute = families["family"] != "communication"
    families["share"] = np.where(is_compute, families["time_us"] / (whole or 1.0), np.nan)
    return rows_of(FamilyTime, families)


def layer_times(times: pd.DataFrame, layers: pd.DataFrame, folds: list[Fold]) -> list[LayerTime]:
    """Folded layers that ran any kernel or collective."""
    folded = fold_times(times, layers, folds)
    return rows_of(LayerTime, folded[(folded["num_kernels"] > 0) | (folded["num_calls"] > 0)])
