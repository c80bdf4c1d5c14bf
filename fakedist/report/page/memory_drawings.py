"""The data behind the page's drawings: the memory timeline, the layers at the peak, the calls over the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.analysis.layer_table import Fold
from fakedist.analysis.recording import Array
from fakedist.analysis.topology import read_groups
from fakedist.report.page.pack import Pack
from fakedist.report.page.peak_blocks import block_owners
from fakedist.report.text.wording import short_operation
from fakedist.results.run import Run
from fakedist.run.schema import CATEGORIES


@dataclass(frozen=True)
class Moves:
    """Events that change how much is allocated, numbered in order.

    Attributes:
        of_event: For each event, the last move up to it; -1 before the first.
        num: Number of moves.
    """

    of_event: Array
    num: int


@dataclass(frozen=True)
class Colouring:
    """What the colours of the timeline mean.

    Attributes:
        of_block: For each block, the index of its name.
        names: The names in the legend.
        colours: For each name, the category whose colour it uses.
    """

    of_block: Array
    names: tuple[str, ...]
    colours: tuple[str, ...]


def by_category(blocks: pd.DataFrame) -> Colouring:
    """Colour blocks by category."""
    spoken = tuple(name.replace("_", " ") for name in CATEGORIES)
    return Colouring(_codes(blocks["category"], CATEGORIES), spoken, CATEGORIES)


def by_largest_lines(blocks: pd.DataFrame, lines: list[str]) -> Colouring:
    """Colour blocks by the lines that hold most at the peak, for runs without categories."""
    line = pd.Series([*lines, ""]).iloc[blocks["stack"].to_numpy()].reset_index(drop=True)
    held = blocks["bytes"].reset_index(drop=True)[blocks["at_peak"].to_numpy()].groupby(line).sum()
    most = held.sort_values(ascending=False, kind="stable").index.drop("", errors="ignore")[: len(CATEGORIES) - 1]
    names = [*map(str, most), "everything else"]
    places = {name: at for at, name in enumerate(most)}
    return Colouring(line.map(places).fillna(len(names) - 1).to_numpy("i8"), tuple(names), CATEGORIES[: len(names)])


def add_timeline(pack: Pack, run: Run, blocks: pd.DataFrame, lines: list[str], colouring: Colouring) -> Moves:
    """Add every block that was allocated: its kind, and after how many moves it was freed.

    A move is an allocation or a free. Blocks are in order of allocation, so the moves that free no block are the
    blocks' allocations in order, and two numbers per block are enough. Blocks of a kind have the same bytes, category,
    layer, operation and line.

    Args:
        pack: Where the data go.
        run: The run.
        blocks: Its table ``blocks``.
        lines: The job's line of each stack.
        colouring: What the colours mean.
    """
    num_events = run.num_rows("events")
    made, freed = blocks["alloc_event"].to_numpy(), blocks["free_event"].to_numpy()
    is_move = np.zeros(num_events + 1, bool)
    is_move[made] = True
    is_move[freed] = True
    is_move[num_events] = False  # for blocks that were never freed
    of_event = np.cumsum(is_move[:num_events]) - 1
    lives = np.zeros(len(blocks), "i8")
    ended = freed < num_events
    lives[ended] = of_event[freed[ended]] - of_event[made[ended]]
    moves = Moves(of_event, int(is_move.sum()))
    line, line_names = pd.factorize(pd.Series([*lines, ""]))
    names, owners = block_owners(run)
    owner, owner_texts = pd.factorize(pd.Series(owners, dtype="object"))
    layer = blocks["layer"].to_numpy().copy()
    layer[np.fromiter(owners, "i8", len(owners))] = len(names) + owner
    keys = {
        "bytes": blocks["bytes"].to_numpy(),
        "category": colouring.of_block,
        "layer": layer,
        "operation": blocks["operation"].cat.codes.to_numpy(),
        "line": line[blocks["stack"].to_numpy()],  # stack -1 (none) indexes the empty line at the end
    }
    kind, first = kinds_of_rows(keys)
    pack.add("block_kind", kind)
    pack.add("block_life", lives)
    for name, values in keys.items():
        pack.add(f"kind_{name}", values[first])
    pack.meta["owners"] = [str(text) for text in owner_texts]
    pack.meta["names"] = colouring.names
    pack.meta["colours"] = colouring.colours
    pack.meta["operations"] = [short_operation(str(name)) for name in blocks["operation"].cat.categories]
    pack.meta["lines"] = [str(name) for name in line_names]
    pack.meta["num_moves"] = moves.num
    pack.meta["num_events"] = num_events
    return moves


def _codes(values: pd.Series, names: tuple[str, ...]) -> Array:
    """Categories as indices into ``names``."""
    places = np.array([names.index(str(name)) for name in values.cat.categories], "i8")
    return places[values.cat.codes.to_numpy()] if len(places) else np.zeros(0, "i8")


def kinds_of_rows(columns: dict[str, Array]) -> tuple[Array, Array]:
    """Group equal rows: for each row the number of its kind, and for each kind its first row."""
    num_rows = len(next(iter(columns.values())))
    kind = np.zeros(num_rows, "i8")
    for values in columns.values():
        code, names = pd.factorize(values)
        kind = pd.factorize(kind * len(names) + code)[0]  # below rows times names, so it never overflows
    first = np.unique(kind, return_index=True)[1]
    return kind, first


def add_reserved(pack: Pack, run: Run, moves: Moves) -> None:
    """Add reserved bytes at each change."""
    reserved = run.table("events", ["reserved_bytes"])["reserved_bytes"].to_numpy()
    changed = np.flatnonzero(np.diff(reserved, prepend=0))
    # A segment is for the next move. Of several changes before one move, the largest is kept.
    move = np.minimum(moves.of_event[changed] + 1, max(moves.num - 1, 0))
    found = pd.DataFrame({"move": move, "bytes": reserved[changed]}).groupby("move")["bytes"].max()
    pack.add("reserved_move", found.index.to_numpy())
    pack.add("reserved_bytes", found.to_numpy())


def add_spans(pack: Pack, run: Run, moves: Moves) -> None:
    """Add where phases begin, in moves."""
    if not run.has("spans"):
        return
    spans = run.table("spans")
    first = np.concatenate([[-1], moves.of_event])[spans["first_event"].to_numpy()] + 1
    names, phase = np.unique(spans["phase"].astype(str), return_inverse=True)
    pack.meta["phases"] = names.tolist()
    pack.add("span_phase", phase)
    pack.add("span_step", spans["step"].to_numpy())
    pack.add("span_move", first)


def add_layers(pack: Pack, layers: pd.DataFrame, folds: list[Fold]) -> None:
    """Add own bytes of every layer at the peak, and the layers in each folded row of the table."""
    pack.meta["categories"] = CATEGORIES
    pack.meta["layers"] = layers["name"].astype(str).tolist()
    pack.meta["classes"] = layers["class_name"].astype(str).tolist()
    pack.add("layer_parent", layers["parent"].to_numpy() + 1)
    for name in CATEGORIES:
        pack.add(f"layer_{name}", layers[f"peak_{name}_bytes"].to_numpy())
    pack.add("layer_most", layers["most_total_bytes"].to_numpy())
    add_folds(pack, folds)


def add_folds(pack: Pack, folds: list[Fold]) -> None:
    """Add the layers in each folded row of a table."""
    pack.add("fold_size", [len(fold.layers) for fold in folds])
    pack.add("fold_layers", [layer for fold in folds for layer in fold.layers])


def add_calls(pack: Pack, run: Run, moves: Moves) -> None:
    """Add collective calls by group and operation, each at the next move after it."""
    calls = run.table("calls", ["op", "operation", "group", "bytes_in", "bytes_out"])
    if not len(calls):
        return
    op = run.table("events", ["op"])["op"].to_numpy()
    event = np.searchsorted(np.maximum.accumulate(op) if len(op) else op, calls["op"].to_numpy())
    before = np.concatenate([[-1], moves.of_event])
    pack.add("call_move", np.minimum(before[event] + 1, max(moves.num - 1, 0)))
    pack.add("call_group", calls["group"].to_numpy())
    pack.add("call_operation", calls["operation"].cat.codes.to_numpy())
    pack.add("call_bytes", calls[["bytes_in", "bytes_out"]].max(axis=1).to_numpy())
    pack.meta["call_operations"] = [str(name) for name in calls["operation"].cat.categories]


def group_objects(groups: pd.DataFrame) -> list[dict[str, str]]:
    """The groups that this rank is in, by row."""
    return [{"name": group.label} for group in read_groups(groups)]
