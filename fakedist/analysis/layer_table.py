"""Memory by layer, own and with children, at the peak and over a step. Repeated layers fold into one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.analysis.blocks import Blocks
from fakedist.analysis.recording import Array, Recording
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
            members = tuple(siblings[position] for position in positions for siblings in below)
            visit(tuple(sorted(members)), prefix + _numbered([_last(names[layer]) for layer in run]), depth + 1)

    for root in children.get(0, []):
        visit((root,), names[root], 0)
    return [Fold("", "", (0,), 0), *folds]


def unfolded(table: pd.DataFrame) -> list[Fold]:
    """Every layer on its own row, parents before children."""
    parents = table["parent"].tolist()
    depths = [0] * len(parents)
    for layer, parent in enumerate(parents):
        depths[layer] = depths[parent] + 1 if parent > 0 else 0
    rows = zip(table["name"], table["class_name"], depths, strict=True)
    return [Fold(str(name), str(of_class), (layer,), depth) for layer, (name, of_class, depth) in enumerate(rows)]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _shapes(names: list[str], classes: list[str], children: dict[int, list[int]]) -> list[int]:
    """A number for each layer. Layers with the same number have the same tree of names and classes below them."""
    known: dict[tuple[object, ...], int] = {}
    shape = [0] * len(names)
    for layer in range(len(names) - 1, -1, -1):
        below = tuple((_last(names[child]), shape[child]) for child in children.get(layer, []))
        shape[layer] = known.setdefault((classes[layer], below), len(known))
    return shape


def _runs(siblings: list[int], names: list[str], shape: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for layer in siblings:
        name = _last(names[layer])
        if runs and name.isdecimal():
            before = runs[-1][-1]
            last = _last(names[before])
            if last.isdecimal() and int(name) == int(last) + 1 and shape[layer] == shape[before]:
                runs[-1].append(layer)
                continue
        runs.append([layer])
    return runs


def _numbered(run: list[str]) -> str:
    return run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}"


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
