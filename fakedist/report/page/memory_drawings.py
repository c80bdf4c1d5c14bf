"""The data behind the page's charts that zoom into a run: memory by block, reserved memory, phases, layers, calls."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.layer_table import Fold
from fakedist.analysis.recording import Array
from fakedist.report.figures.call_figures import Calls
from fakedist.report.figures.memory_curve import MemoryCurve
from fakedist.report.page.pack import Pack
from fakedist.report.page.peak_blocks import block_owners
from fakedist.report.text.wording import short_operation
from fakedist.results.run import Run
from fakedist.run.schema import CATEGORIES

_MOST_KNOTS = 4_000  # of an axis of time: about one for each third of a pixel of a wide screen


def add_timeline(pack: Pack, run: Run, curve: MemoryCurve) -> None:
    """Add every block that was allocated: its kind, and after how many moves it was freed.

    Blocks are in order of allocation, so the moves that free no block are the blocks' allocations in order, and two
    numbers per block are enough. Blocks of a kind have the same bytes, category, layer, operation and line.

    Args:
        pack: Where the data go.
        run: The run.
        curve: Its memory.
    """
    blocks = curve.blocks
    lives = np.where(curve.freed < curve.num_moves, curve.freed - curve.made, 0)
    line, line_names = pd.factorize(pd.Series([*curve.lines, ""]))
    names, owners = block_owners(run)
    owner, owner_texts = pd.factorize(pd.Series(owners, dtype="object"))
    layer = blocks["layer"].to_numpy().copy()
    layer[np.fromiter(owners, "i8", len(owners))] = len(names) + owner
    keys = {
        "bytes": blocks["bytes"].to_numpy(),
        "category": curve.colouring.of_block,
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
    pack.meta["names"] = curve.colouring.names
    pack.meta["colours"] = curve.colouring.colours
    pack.meta["operations"] = [short_operation(str(name)) for name in blocks["operation"].cat.categories]
    pack.meta["lines"] = [str(name) for name in line_names]
    pack.meta["num_moves"] = curve.num_moves


def kinds_of_rows(columns: dict[str, Array]) -> tuple[Array, Array]:
    """Group equal rows: for each row the number of its kind, and for each kind its first row."""
    num_rows = len(next(iter(columns.values())))
    kind = np.zeros(num_rows, "i8")
    for values in columns.values():
        code, names = pd.factorize(values)
        kind = pd.factorize(kind * len(names) + code)[0]  # below rows times names, so it never overflows
    first = np.unique(kind, return_index=True)[1]
    return kind, first


def add_reserved(pack: Pack, curve: MemoryCurve) -> None:
    """Add reserved bytes at each change."""
    changed = np.flatnonzero(np.diff(curve.reserved, prepend=0))
    # A segment is for the next move. Of several changes before one move, the largest is kept.
    move = np.minimum(curve.of_event[changed] + 1, max(curve.num_moves - 1, 0))
    found = pd.DataFrame({"move": move, "bytes": curve.reserved[changed]}).groupby("move")["bytes"].max()
    pack.add("reserved_move", found.index.to_numpy())
    pack.add("reserved_bytes", found.to_numpy())


def add_spans(pack: Pack, run: Run, curve: MemoryCurve) -> None:
    """Add where phases begin, in moves."""
    if not run.has("spans"):
        return
    spans = run.table("spans")
    names, phase = np.unique(spans["phase"].astype(str), return_inverse=True)
    pack.meta["phases"] = names.tolist()
    pack.add("span_phase", phase)
    pack.add("span_step", spans["step"].to_numpy())
    pack.add("span_move", curve.move_at(spans["first_event"].to_numpy()))


def add_times(pack: Pack, run: Run, curve: MemoryCurve) -> None:
    """Add the axes of time: when moves happened, at enough of them to draw a straight line between.

    The wall time is the recording's. In the timed step a move also has the time of the next kernel that was launched.
    """
    time_us = np.maximum.accumulate(curve.time_us[curve.events])
    if not len(time_us):
        return
    knots = _knots(len(time_us))
    pack.add("wall_move", knots)
    pack.add("wall_us", time_us[knots] - time_us[0])
    if run.summary.timed is None:
        return
    kernels = run.table("kernels", ["op", "start_us", "duration_us", "stream"])
    kernels = kernels[kernels["op"] > 0]
    if not len(kernels):
        return
    busiest = kernels.groupby("stream")["duration_us"].sum().idxmax()
    kernels = kernels[kernels["stream"] == busiest].sort_values(["op", "start_us"], kind="stable")
    op, start = run.table("events", ["op"])["op"].to_numpy()[curve.events], kernels["start_us"].to_numpy("f8")
    inside = np.flatnonzero((op >= kernels["op"].iloc[0]) & (op <= kernels["op"].iloc[-1]))
    if len(inside) < 2:
        return
    moves = np.arange(inside[0], inside[-1] + 1)
    found = np.searchsorted(kernels["op"].to_numpy(), np.maximum.accumulate(op[moves]))
    knots = _knots(len(moves))
    pack.add("step_move", moves[knots])
    pack.add("step_us", np.maximum.accumulate(start)[np.minimum(found, len(start) - 1)][knots])
    pack.meta["timed"] = {"step": run.summary.timed[1].step, "source": run.summary.timed[1].source}


def _knots(num: int) -> Array:
    """Rows at equal distances, with the first and the last."""
    return np.unique(np.linspace(0, num - 1, min(num, _MOST_KNOTS)).astype("i8"))


def add_layers(pack: Pack, layers: pd.DataFrame, folds: list[Fold]) -> None:
    """Add own bytes of every layer at the peak, and the layers in each folded row of the table."""
    pack.meta["categories"] = CATEGORIES
    pack.meta["layers"] = layers["name"].astype(str).tolist()
    pack.add("layer_parent", layers["parent"].to_numpy() + 1)
    for name in CATEGORIES:
        pack.add(f"layer_{name}", layers[f"peak_{name}_bytes"].to_numpy())
    pack.add("layer_most", layers["most_total_bytes"].to_numpy())
    add_folds(pack, folds)


def add_folds(pack: Pack, folds: list[Fold]) -> None:
    """Add the layers in each folded row of a table."""
    pack.add("fold_size", [len(fold.layers) for fold in folds])
    pack.add("fold_layers", [layer for fold in folds for layer in fold.layers])


def add_calls(pack: Pack, calls: Calls) -> None:
    """Add the calls that have a lane, each at the next move after it."""
    kept = np.flatnonzero(calls.lane >= 0)
    pack.add("call_move", calls.move[kept])
    pack.add("call_lane", calls.lane[kept])
    pack.add("call_bytes", calls.bytes[kept])
    pack.meta["lanes"] = [{"group": name, "operation": operation} for _, name, operation in calls.lanes]
