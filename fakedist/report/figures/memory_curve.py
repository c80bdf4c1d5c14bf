"""A run's memory as its charts need it: what is held after each allocation and free, and what the colours mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.report.text.wording import short_line
from fakedist.results.run import Run
from fakedist.run.schema import CATEGORIES

BLOCK_COLUMNS = (
    *("bytes", "alloc_event", "free_event", "category", "layer", "operation", "stack", "step", "phase", "at_peak"),
)


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


@dataclass(frozen=True)
class MemoryCurve:
    """What is held after each move. A move is an allocation or a free, numbered in order.

    Attributes:
        blocks: Columns BLOCK_COLUMNS of the table ``blocks``.
        lines: For each stack, the job's line.
        colouring: What the colours mean.
        events: For each move, its row in the table ``events``.
        of_event: For each row of ``events``, the last move up to it; -1 before the first.
        made: For each block, the move that allocates it.
        freed: For each block, the move that frees it; of one that is never freed, the number of moves.
        allocated: Bytes after each move.
        reserved: Bytes that the allocator has taken from the GPU at each row of ``events``.
        time_us: When each row of ``events`` was recorded.
    """

    blocks: pd.DataFrame
    lines: list[str]
    colouring: Colouring
    events: Array
    of_event: Array
    made: Array
    freed: Array
    allocated: Array
    reserved: Array
    time_us: Array

    @property
    def num_moves(self) -> int:
        """How many allocations and frees there are."""
        return len(self.events)

    def move_at(self, events: Array) -> Array:
        """For each row of ``events``, the first move that is not before it."""
        return np.concatenate([[-1], self.of_event])[events] + 1


def read_curve(run: Run) -> MemoryCurve:
    """Read a run's memory.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    blocks = run.table("blocks", BLOCK_COLUMNS)
    lines = job_lines(run, run.manifest.cwd)
    table = run.table("events", ["allocated_bytes", "reserved_bytes", "time_us"])
    num = len(table)
    made, freed = blocks["alloc_event"].to_numpy(), blocks["free_event"].to_numpy()
    is_move = np.zeros(num + 1, bool)
    is_move[made] = True
    is_move[freed] = True
    is_move[num] = False  # for blocks that were never freed
    events = np.flatnonzero(is_move[:num])
    of_event = np.cumsum(is_move[:num]) - 1
    return MemoryCurve(
        blocks=blocks,
        lines=lines,
        colouring=by_largest_lines(blocks, lines) if run.by_category is None else by_category(blocks),
        events=events,
        of_event=of_event,
        made=of_event[made],
        freed=np.append(of_event, len(events))[freed],
        allocated=table["allocated_bytes"].to_numpy("i8")[events],
        reserved=table["reserved_bytes"].to_numpy("i8"),
        time_us=table["time_us"].to_numpy("i8"),
    )


def job_lines(run: Run, cwd: str) -> list[str]:
    """For each stack, the innermost line outside of torch, relative to the working directory."""
    return [short_line(line, cwd) for line in run.table("stacks")["line"].astype(str)]


def by_category(blocks: pd.DataFrame) -> Colouring:
    """Colour blocks by category."""
    values = blocks["category"]
    places = np.array([CATEGORIES.index(str(name)) for name in values.cat.categories], "i8")
    codes = places[values.cat.codes.to_numpy()] if len(places) else np.zeros(0, "i8")
    return Colouring(codes, tuple(name.replace("_", " ") for name in CATEGORIES), CATEGORIES)


def by_largest_lines(blocks: pd.DataFrame, lines: list[str]) -> Colouring:
    """Colour blocks by the lines that hold most at the peak, for runs without categories."""
    line = pd.Series([*lines, ""]).iloc[blocks["stack"].to_numpy()].reset_index(drop=True)
    held = blocks["bytes"].reset_index(drop=True)[blocks["at_peak"].to_numpy()].groupby(line).sum()
    most = held.sort_values(ascending=False, kind="stable").index.drop("", errors="ignore")[: len(CATEGORIES) - 1]
    names = [*map(str, most), "everything else"]
    places = {name: at for at, name in enumerate(most)}
    return Colouring(line.map(places).fillna(len(names) - 1).to_numpy("i8"), tuple(names), CATEGORIES[: len(names)])


def highest_moves(allocated: Array, num_points: int) -> Array:
    """The move with the most memory of each of ``num_points`` stretches, and the first and last move."""
    if len(allocated) <= num_points:
        return np.arange(len(allocated))
    first = _edges(len(allocated), num_points)[:-1]
    most = np.maximum.reduceat(allocated, first)
    reached = np.flatnonzero(allocated == np.repeat(most, np.diff(first, append=len(allocated))))
    highest = reached[np.searchsorted(reached, first)]
    return np.unique(np.concatenate([[0], highest, [len(allocated) - 1]]))


def least_between(allocated: Array, chosen: Array) -> Array:
    """The least that is held from each chosen move up to the next."""
    return np.minimum.reduceat(allocated, chosen) if len(chosen) else allocated[:0]


def held_by_colour(curve: MemoryCurve, chosen: Array) -> Array:
    """Bytes by colour after each chosen move: one row per name of the colouring, one column per chosen move."""
    num, width = len(curve.colouring.names), len(chosen) + 1
    size = curve.blocks["bytes"].to_numpy("i8")
    row = curve.colouring.of_block * width
    change = np.zeros(num * width, "i8")
    np.add.at(change, row + np.searchsorted(chosen, curve.made), size)
    np.subtract.at(change, row + np.searchsorted(chosen, curve.freed), size)
    held: Array = np.cumsum(change.reshape(num, width), axis=1)[:, :-1]
    return held


def most_reserved(curve: MemoryCurve, chosen: Array) -> Array:
    """The most that is reserved from each chosen move up to the next."""
    if not len(chosen):
        return curve.reserved[:0]
    return np.maximum.reduceat(curve.reserved, np.concatenate([[0], curve.events[chosen[1:]]]))


def _edges(num: int, parts: int) -> Array:
    return np.linspace(0, num, parts + 1).astype("i8")
