"""The memory peak: when it was, what it consisted of, and the course of memory by phase and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from fakedist.analysis.blocks import Blocks
from fakedist.analysis.recording import Array, Recording
from fakedist.analysis.typed_tables import table_of
from fakedist.rundir import notes
from fakedist.rundir.notes import Note
from fakedist.rundir.records import EngineRecord
from fakedist.rundir.rows import LayerRow
from fakedist.rundir.schema import CATEGORIES

_BYTES = [f"peak_{name}_bytes" for name in CATEGORIES]


def layer_table(recording: Recording, blocks: Blocks, window: tuple[int, int]) -> pd.DataFrame:
    """The table ``layers``, parents before children; columns ``most_...`` cover the events of ``window``."""
    rows = recording.layers or [LayerRow(0, "", "", -1)]
    table = pd.DataFrame(rows, columns=LayerRow._fields)[["name", "class_name", "parent"]]
    parts = _parts(blocks)
    alive = parts[parts["at_peak"]]
    at_peak = alive.pivot_table(index="layer", columns="category", values="bytes", aggfunc="sum", observed=False)
    for name in CATEGORIES:
        own = at_peak[name] if name in at_peak.columns else pd.Series(dtype="int64")
        table[f"peak_{name}_bytes"] = own.reindex(table.index).fillna(0).astype("int64")
    table["peak_own_bytes"] = table[_BYTES].sum(axis=1)
    for prefix, of in (("most_", parts), ("most_total_", _for_ancestors(parts, table, window))):
        most = _most(of, window, ["layer", "category"])
        for name in CATEGORIES:
            table[f"{prefix}{name}_bytes"] = _per_layer(most[most["category"] == name], table)
        table[f"{prefix}bytes"] = _per_layer(_most(of, window, ["layer"]), table)
    table["peak_total_bytes"] = with_children(table, table["peak_own_bytes"].to_numpy())
    return table.rename(columns={"most_bytes": "most_own_bytes"})


def with_children(table: pd.DataFrame, own: Array) -> Array:
    """Each layer's own value plus those of all layers below it."""
    total = own.astype("float64" if own.dtype.kind == "f" else "int64")
    parents = table["parent"].to_numpy()
    for layer in range(len(table) - 1, 0, -1):  # children come after their parents
        if parents[layer] > 0:
            total[parents[layer]] += total[layer]
    return total


def _per_layer(most: pd.DataFrame, table: pd.DataFrame) -> pd.Series:
    by_layer = most.set_index("layer")["most"] if len(most) else pd.Series(dtype="int64")
    return by_layer.reindex(table.index).fillna(0).astype("int64")


def _parts(blocks: Blocks) -> pd.DataFrame:
    """One row per layer's part of a block: layer, category, bytes, alloc_event, free_event, at_peak."""
    frame = blocks.frame[["layer", "category", "bytes", "alloc_event", "free_event"]].assign(at_peak=blocks.at_peak)
    if not len(blocks.shares):
        return frame
    divided = frame.loc[blocks.shares["block"]].reset_index(drop=True)
    divided["layer"], divided["bytes"] = blocks.shares["layer"], blocks.shares["bytes"]
    return pd.concat([frame[~frame.index.isin(blocks.shares["block"])], divided], ignore_index=True)


def owner_names(shares: pd.DataFrame, names: list[str], parents: list[int]) -> dict[int, str]:
    """Owners of blocks that several layers own: how many, and their common parent ("12 layers of layers.3").

    ``shares`` may be some rows of that table; ``names`` and ``parents`` are columns of ``layers``.
    """
    owners: dict[int, list[int]] = {}
    for block, layer in zip(shares["block"].tolist(), shares["layer"].tolist(), strict=True):
        if layer > 0:
            owners.setdefault(int(block), []).append(int(layer))
    texts = {group: _owners_text(group, names, parents) for group in set(map(tuple, owners.values()))}
    return {block: texts[tuple(group)] for block, group in owners.items()}


def _owners_text(layers: tuple[int, ...], names: list[str], parents: list[int]) -> str:
    if len(layers) == 1:
        return names[layers[0]]
    chains = [_ancestors(layer, parents) for layer in layers]
    common = [group[0] for group in zip(*chains, strict=False) if len(set(group)) == 1]
    return f"{len(layers)} layers" + (f" of {names[common[-1]]}" if common else "")


def _ancestors(layer: int, parents: list[int]) -> list[int]:
    chain = [layer]
    while parents[chain[0]] > 0:
        chain.insert(0, parents[chain[0]])
    return chain


def _for_ancestors(parts: pd.DataFrame, table: pd.DataFrame, window: tuple[int, int]) -> pd.DataFrame:
    """Every part in the window, repeated for its layer and for each layer above it."""
    parents = table["parent"].to_numpy()
    level = parts[(parts["alloc_event"] < window[1]) & (parts["free_event"] >= window[0])]
    levels = []
    while len(level):
        levels.append(level)
        above = parents[level["layer"].to_numpy()]
        level = level[above > 0].assign(layer=above[above > 0])
    return pd.concat(levels, ignore_index=True) if levels else level


def _most(parts: pd.DataFrame, window: tuple[int, int], keys: list[str]) -> pd.DataFrame:
    """The most bytes alive at once in the window by ``keys``: the columns ``keys``, and ``most``."""
    first, end = window
    alive = parts[(parts["alloc_event"] < end) & (parts["free_event"] >= first)]
    starts = alive.assign(event=alive["alloc_event"].clip(lower=first))
    ends = alive[alive["free_event"] < end]
    ends = ends.assign(event=ends["free_event"], bytes=-ends["bytes"])
    moves = pd.concat([starts, ends], ignore_index=True).sort_values("event", kind="stable")
    moves["alive"] = moves.groupby(keys, observed=True)["bytes"].cumsum()
    return moves.groupby(keys, observed=True)["alive"].max().rename("most").reset_index()


# ---- folding


@dataclass(frozen=True)
class Fold:
    """A row of a list of layers: one layer, or several repeated ones, named with ``0-79`` in place of their numbers."""

    name: str
    class_name: str
    layers: tuple[int, ...]
    depth: int


def fold_layers(table: pd.DataFrame) -> list[Fold]:
    """Layers in depth-first order, with runs of repeated layers as one row.

    Repeated are siblings with consecutive numbers as names and equal trees of names and classes below them.
    """
    children: dict[int, list[int]] = {}
    for layer, parent in enumerate(table["parent"].tolist()):
        if layer:
            children.setdefault(parent, []).append(layer)
    names = [str(name) for name in table["name"]]
    classes = [str(name) for name in table["class_name"]]
    shape = _shapes(names, classes, children)
    folds: list[Fold] = []

    def visit(group: tuple[int, ...], name: str, depth: int) -> None:
        folds.append(Fold(name, classes[group[0]], group, depth))
        below = [children.get(layer, []) for layer in group]
        for run in _runs(below[0], names, shape):
            # Children of the first root are named without it, except those that it only calls: "(GPT).(Softmax)".
            is_first = name.startswith("(") and depth == 0 and not names[run[0]].startswith("(")
            prefix = "" if is_first else f"{name}."
            positions = [below[0].index(layer) for layer in run]
            members = [siblings[position] for position in positions for siblings in below]
            own = prefix + _below(names[run[0]], names[group[0]]) + _until(run, names)
            visit(tuple(sorted(members)), own, depth + 1)

    for run in _runs(children.get(0, []), names, shape):
        visit(tuple(run), names[run[0]] + _until(run, names), 0)
    return [Fold("", "", (0,), 0), *folds]


def unfolded(table: pd.DataFrame) -> list[Fold]:
    """Every layer on its own row, parents before children."""
    parents = table["parent"].tolist()
    depths = [0] * len(parents)
    for layer, parent in enumerate(parents):
        depths[layer] = depths[parent] + 1 if parent > 0 else 0
    rows = zip(table["name"], table["class_name"], depths, strict=True)
    return [Fold(str(name), str(of_class), (layer,), depth) for layer, (name, of_class, depth) in enumerate(rows)]


def _below(name: str, above: str) -> str:
    """A layer's name within the layer above it: a trace's "GPT.Block.0" is "Block.0" of "GPT"."""
    return name[len(above) + 1 :] if above and name.startswith(f"{above}.") else name.rpartition(".")[2]


def _shapes(names: list[str], classes: list[str], children: dict[int, list[int]]) -> list[int]:
    """A number for each layer. Layers with the same number have the same tree of names and classes below them."""
    known: dict[tuple[object, ...], int] = {}
    shape = [0] * len(names)
    for layer in range(len(names) - 1, -1, -1):
        below = tuple((_below(names[child], names[layer]), shape[child]) for child in children.get(layer, []))
        shape[layer] = known.setdefault((classes[layer], below), len(known))
    return shape


def _runs(siblings: list[int], names: list[str], shape: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for layer in siblings:
        above, dot, last = names[layer].rpartition(".")
        if runs and last.isdecimal():
            before = runs[-1][-1]
            if names[before] == f"{above}{dot}{int(last) - 1}" and shape[layer] == shape[before]:
                runs[-1].append(layer)
                continue
        runs.append([layer])
    return runs


def _until(run: list[int], names: list[str]) -> str:
    return f"-{names[run[-1]].rpartition('.')[2]}" if len(run) > 1 else ""


def fold_sums(folds: list[Fold], sums: Mapping[str, Array], whole: tuple[str, Array], unit: str) -> pd.DataFrame:
    """Figures of folds: one row per fold, in their order.

    Args:
        sums: By column, a value for each layer, summed over the repeats.
        whole: The column that is also compared between repeats, and its values.
        unit: The end of ``least_``, ``median_`` and ``largest_``, the figures of one repeat.
    """
    column, values = whole
    rows = []
    for fold in folds:
        repeats = list(fold.layers)
        ordered = np.sort(values[repeats])
        rows.append(
            {
                "name": fold.name,
                "class_name": fold.class_name,
                "depth": fold.depth,
                "num_repeats": len(repeats),
                **{name: of_layer[repeats].sum().item() for name, of_layer in sums.items()},
                column: ordered.sum().item(),
                f"least_{unit}": ordered[0].item(),
                f"median_{unit}": ordered[len(ordered) // 2].item(),
                f"largest_{unit}": ordered[-1].item(),
            }
        )
    return pd.DataFrame(rows)


def fold_table(table: pd.DataFrame, folds: list[Fold]) -> pd.DataFrame:
    """The memory of folds: one row per fold, in their order.

    Columns: name, class_name, depth, num_repeats; sums over the repeats: ``peak_<category>_bytes`` and
    ``peak_total_bytes`` with children, ``peak_own_bytes``; of one repeat with children: ``least_peak_bytes``,
    ``median_peak_bytes``, ``largest_peak_bytes``; ``most_...``: the largest of any repeat.
    """
    sums = {name: with_children(table, table[name].to_numpy()) for name in _BYTES}
    sums["peak_own_bytes"] = table["peak_own_bytes"].to_numpy()
    peak = table["peak_total_bytes"].to_numpy()
    folded = fold_sums(folds, sums, ("peak_total_bytes", peak), "peak_bytes")
    for name in table.columns[table.columns.str.startswith("most_")]:
        of_layer = table[name].to_numpy()
        folded[name] = [of_layer[list(fold.layers)].max() for fold in folds]
    return folded


_GRANULE = 2 << 20  # of the GPU's memory, and of torch's large segments (kRoundLarge)
_MIN_LARGE, _LARGE = 10 << 20, 20 << 20  # a smaller request has a segment of 20 MiB (kMinLargeAlloc, kLargeBuffer)


LARGEST = 20


def phase_table(recording: Recording, blocks: Blocks, positions: pd.DataFrame) -> pd.DataFrame:
    """The table ``phases``: one row per phase of a step, in the order in which they began.

    A phase that neither allocated nor freed anything has the memory that was held while it ran.
    """
    curve = positions.assign(allocated=blocks.replay.allocated_bytes, reserved=blocks.replay.reserved_bytes)
    curve["event"] = np.arange(len(curve))
    groups = curve.groupby(["step", "phase"], sort=False, observed=True)
    table = groups.agg(
        peak_allocated_bytes=("allocated", "max"),
        peak_reserved_bytes=("reserved", "max"),
        end_allocated_bytes=("allocated", "last"),
        first=("event", "first"),
    ).reset_index()
    if len(others := _without_events(recording, blocks, table)):  # pandas 2 warns of empty ones
        table = pd.concat([table, others], ignore_index=True)
    table = table.astype({"step": "int32", "phase": pd.CategoricalDtype()})
    return table.sort_values("first", kind="stable").drop(columns="first").reset_index(drop=True)


def _without_events(recording: Recording, blocks: Blocks, table: pd.DataFrame) -> pd.DataFrame:
    """Rows for phases that ran operations without changing the device's memory; before training, ``init``."""
    last = np.inf if recording.outcome is None else recording.outcome.last_step
    known = set(zip(table["step"].tolist(), table["phase"].astype(str).tolist(), strict=True))
    missing: dict[tuple[int, str], list[int]] = {}
    for number, scope in enumerate(recording.scopes):
        when = (scope.step, scope.phase if scope.step else "init")
        if when not in known and scope.step <= last:
            missing.setdefault(when, []).append(number)
    allocated, reserved = (
        np.append(0, curve) for curve in (blocks.replay.allocated_bytes, blocks.replay.reserved_bytes)
    )
    event_op = recording.event_ops
    rows = []
    for (step, phase), scopes in missing.items():
        op = np.flatnonzero(np.isin(recording.op_scope, scopes))
        if not len(op):
            continue
        event = np.searchsorted(event_op, op, side="right")  # how many events came before
        rows.append(
            (step, phase, allocated[event].max(), reserved[event].max(), allocated[event[-1]], event[0] - 0.5, op[0])
        )
    rows.sort(key=lambda row: row[-1])
    return pd.DataFrame([row[:-1] for row in rows], columns=list(table.columns)).astype(
        dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "end_allocated_bytes"), "int64")
    )


def named_phase_table(recording: Recording, blocks: Blocks) -> pd.DataFrame:
    """The table ``named_phases``: the phases that the script named, in the order in which they ended."""
    event_op = recording.event_ops
    allocated, reserved = blocks.replay.allocated_bytes, blocks.replay.reserved_bytes
    spans = [(row.first_op, row.end_op) for row in recording.named_phases]
    rows = []
    for at, row in enumerate(recording.named_phases):
        others = [op for span in (*spans[:at], *spans[at + 1 :]) for op in span if op <= row.first_op]
        before, first, end = np.searchsorted(event_op, (max(others, default=0), row.first_op, row.end_op)).tolist()
        handover = slice(max(before - 1, 0), first)  # what is held when it begins counts
        inside = slice(max(first - 1, 0), end)
        most = [int(curve[part].max(initial=0)) for part in (handover, inside) for curve in (allocated, reserved)]
        used = (row.peak_used_bytes, row.backed_bytes, row.outside_bytes, row.others_bytes)
        changes = [np.nan if number < 0 else number for number in (row.first_change, row.end_change)]
        rows.append((row.name, row.step, row.end_step, first, end, *most, *used, *changes))
    return table_of("named_phases", rows)


def asleep_table(recording: Recording, blocks: Blocks) -> pd.DataFrame:
    """The table ``asleep``."""
    event_op = recording.event_ops
    bounds = np.append(np.searchsorted(event_op, [each.op for each in recording.asleep]), len(event_op)).astype("i8")
    frame = blocks.frame
    address, made, freed = (frame[name].to_numpy() for name in ("address", "alloc_event", "free_event"))
    stretches = []
    for each, (first, end) in zip(recording.asleep, pairwise(bounds), strict=True):
        starts, sizes = (np.frombuffer(column, "u8") for column in (each.address, each.size))
        order = np.argsort(starts)
        ends = np.append(np.uint64(0), (starts + sizes)[order])
        is_within = address < ends[np.searchsorted(starts[order], address, side="right")]  # the last to begin before it
        inside = is_within & (made < end) & (freed > first)
        number = np.flatnonzero(inside)
        stretches.append(np.stack([number, np.maximum(made[inside], first), np.minimum(freed[inside], end)]))
    rows = np.concatenate([np.zeros((3, 0), "i8"), *stretches], axis=1)
    return table_of("asleep", rows.T)


def device_use_table(recording: Recording) -> pd.DataFrame:
    """The table ``device_use``: for each change its parts, this process's first."""
    use = recording.device_use
    if use is None:
        return table_of("device_use")
    names = _numbered_names(use.processes)
    of_engine = _engine_of(recording)
    rows = []
    for row in use.rows:
        held = [("", "allocator", row.backed_bytes), ("", "outside", row.outside_bytes)]
        held += [(name, "all", bytes_) for name, bytes_ in zip(names, row.others_bytes, strict=True)]
        for process, part, bytes_ in held:
            cache = 0
            if (process, part) == of_engine:
                cache = _kv_cache_bytes(recording, row.change)
                cache = cache if cache <= bytes_ else 0  # the engine goes to sleep piece by piece
                rows.append((row.change, process, "KV cache", cache))
            rows.append((row.change, process, part, bytes_ - cache))
    return table_of("device_use", rows)


def _engine_of(recording: Recording) -> tuple[str, str] | None:
    """The process and the part, as in ``device_use``, that have the KV cache of vLLM's engine; None without one, or if
    there were several engines.
    """
    if len(recording.engines) != 1 or not recording.engine_caches:
        return None
    process = recording.engines[0].process
    return process, "all" if process else "allocator"


def _kv_cache_bytes(recording: Recording, change: int) -> int:
    """Memory behind the KV cache of vLLM's engine after a change."""
    ends: dict[int, int] = {}
    for each in recording.engine_caches:  # the end of each comes after its begin
        ends[each.first_change] = each.end_change
    if not any(first <= change and (end < 0 or change < end) for first, end in ends.items()):
        return 0
    return cache_bytes(recording.engines[0], recording.engines[0].num_blocks)


def cache_bytes(engine: EngineRecord, blocks: int) -> int:
    """Memory of the GPU behind a KV cache, which is one segment."""
    size = blocks * engine.block_bytes
    return _LARGE if 0 < size < _MIN_LARGE else -(-size // _GRANULE) * _GRANULE


def _numbered_names(names: Sequence[str]) -> list[str]:
    """Names with a number behind those that repeat an earlier one: "worker.py", "worker.py (2)"."""
    earlier = [names[:at].count(name) for at, name in enumerate(names)]
    return [f"{name} ({count + 1})" if count else name for name, count in zip(names, earlier, strict=True)]


def span_table(positions: pd.DataFrame) -> pd.DataFrame:
    """The table ``spans``: one row per run of consecutive events in one phase of a step."""
    step = positions["step"].to_numpy()
    phase = pd.factorize(positions["phase"])[0]
    begins = np.ones(len(positions), bool)
    begins[1:] = (step[1:] != step[:-1]) | (phase[1:] != phase[:-1])
    table = positions[begins].reset_index(drop=True)
    table["first_event"] = np.flatnonzero(begins)
    return table


def step_table(recording: Recording, blocks: Blocks, positions: pd.DataFrame) -> pd.DataFrame:
    """The table ``steps``: one row per step that ended, in order.

    A step that allocated nothing (it only replayed CUDA graphs) has the memory that was held when it began.
    """
    table = pd.DataFrame(
        [(row.step, row.start_us, row.wall_us) for row in recording.steps], columns=["step", "start_us", "wall_us"]
    ).astype("int64")
    having, which = np.unique(positions["step"].to_numpy(), return_inverse=True)
    last = np.zeros(len(having), "int64")
    last[which] = np.arange(len(which))
    index = np.searchsorted(having, table["step"], side="right") - 1
    has_events = (index >= 0) & (np.append(having, -1)[index] == table["step"])
    for name, curve in (("allocated", blocks.replay.allocated_bytes), ("reserved", blocks.replay.reserved_bytes)):
        peaks = np.zeros(len(having) + 1, "int64")  # the last is for steps before every event
        np.maximum.at(peaks, which, curve)
        held = np.append(curve[np.maximum.accumulate(last)], 0)[index]
        table[f"peak_{name}_bytes"] = np.where(has_events, peaks[index], held)
    texts = ("sample_shape", "name")
    return table.assign(
        samples=np.array([row.samples for row in recording.steps], "int64"),
        **{name: pd.Series([getattr(row, name) for row in recording.steps], dtype="object") for name in texts},
        elements=np.array([row.elements for row in recording.steps], "float64"),
    )


def by_category(blocks: Blocks) -> dict[str, int]:
    """Bytes at the peak by category. They add up to the peak."""
    alive = blocks.frame[blocks.at_peak]
    sums = alive.groupby("category", observed=False)["bytes"].sum()
    return {name: int(sums.get(name, 0)) for name in CATEGORIES}


@dataclass(frozen=True)
class Peak:
    """The peaks of a run. ``by_category`` has the bytes at the allocated peak, which they add up to."""

    allocated_bytes: int
    reserved_bytes: int
    step: int
    phase: str
    by_category: dict[str, int]


def find_peak(blocks: Blocks, positions: pd.DataFrame) -> Peak:
    """The peaks of the run, with the position and the categories of the allocated peak."""
    allocated, reserved = blocks.replay.allocated_bytes, blocks.replay.reserved_bytes
    step, phase = positions[["step", "phase"]].iloc[blocks.peak_event] if blocks.peak_event >= 0 else (0, "init")
    return Peak(
        int(allocated.max(initial=0)),
        int(reserved.max(initial=0)),
        step=int(step),
        phase=str(phase),
        by_category=by_category(blocks),
    )


def differences(recording: Recording, blocks: Blocks) -> list[Note]:
    """Where the replay disagrees with the allocator's own statistics. Empty if it is exact."""
    statistics = recording.statistics.get(recording.device)
    notes_made = [notes.allocated_before(unknown)] if (unknown := blocks.replay.unknown_frees) else []
    if statistics is None:
        return notes_made
    for name, curve, own in (
        ("allocated", blocks.replay.allocated_bytes, statistics.allocated_peak_bytes),
        ("reserved", blocks.replay.reserved_bytes, statistics.reserved_peak_bytes),
    ):
        bytes_ = int(curve.max(initial=0))
        if bytes_ < own or (bytes_ > own and not statistics.peaks_were_reset):
            notes_made.append(notes.peak_differs(name, bytes_, own))
    return notes_made


def largest_blocks(recording: Recording, blocks: Blocks, lines: list[str]) -> pd.DataFrame:
    """The table ``largest``: the largest blocks at the peak, largest first."""
    alive = blocks.frame[blocks.at_peak].sort_values(["bytes", "alloc_event"], ascending=[False, True]).head(LARGEST)
    parents = [row.parent for row in recording.layers] or [-1]
    return described_blocks(alive, blocks.shares, [row.name for row in recording.layers] or [""], parents, lines=lines)


def described_blocks(
    chosen: pd.DataFrame, shares: pd.DataFrame, names: list[str], parents: list[int], *, lines: list[str]
) -> pd.DataFrame:
    """Blocks in words, with the columns of the table ``largest``.

    ``chosen`` are of the table ``blocks``; ``names`` and ``parents`` columns of ``layers``; ``lines`` of ``stacks``.
    """
    table = chosen[["bytes", "category", "phase", "step", "operation"]]
    owners = owner_names(shares[shares["block"].isin(chosen.index)], names, parents)
    numbered = zip(chosen.index.tolist(), chosen["layer"].tolist(), strict=True)
    table = table.astype(dict.fromkeys(("category", "phase", "operation"), str)).assign(
        layer=[owners.get(block, names[layer]) for block, layer in numbered],
        line=[lines[stack] if stack >= 0 else "" for stack in chosen["stack"]],
    )
    order = ["bytes", "category", "layer", "phase", "step", "operation", "line"]
    return table[order].reset_index(drop=True)
