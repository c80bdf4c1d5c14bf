"""Why a figure changed, in one line: the category and the layers that account for it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pandas as pd

from fakedist.analysis.compare.changed_memory import OUTSIDE

#: A part accounts for the whole if its change is between these multiples of the whole's change.
_STANDS_FOR = (0.8, 1.25)


@dataclass(frozen=True)
class Cause:
    """What accounts for most of a change: of the peak in bytes, of a step's kernels in microseconds.

    Attributes:
        change: The change of the figure.
        category: The category (for kernels, the family) that changed most in the same direction.
        path: The layers responsible, with numbers as ``*``; empty if no part of the model is prominent.
        part: The change of these layers.
        layer: The layer's name if there is only one, else the path.
    """

    change: float
    category: str
    path: str
    part: float
    layer: str


def find_cause(parts: pd.DataFrame, column: str = "change_bytes") -> Cause | None:
    """The category that changed most in the figure's direction, and the deepest layer that accounts for its change.

    Args:
        parts: Columns path, name, category and ``column``: the layers' own changes, which add up to the figure's.
        column: The column with the changes.

    Returns:
        The cause; None if the figure did not change.
    """
    total = float(parts[column].sum())
    if not total:
        return None
    way = 1 if total > 0 else -1
    sums = parts.groupby("category", observed=True)[column].sum() * way
    category = str(sums.idxmax())
    chosen = parts[parts["category"] == category]
    path, part = _descend(chosen["path"], chosen[column])
    inside = chosen[is_below(chosen["path"], path) & (chosen[column] != 0)]
    depth = len(_steps(path))
    alone = {".".join(_steps(str(name))[:depth]) for name in inside["name"]}
    return Cause(total, category, path, part, alone.pop() if path and len(alone) == 1 else path)


def is_below(paths: pd.Series, path: str) -> pd.Series:
    """Which paths are ``path`` or below it; all of them if it is empty."""
    return (paths == path) | paths.str.startswith(path + ".") | (not path)


def _descend(paths: pd.Series, changes: pd.Series) -> tuple[str, float]:
    """Descend the tree of names for as long as one branch accounts for the change above it."""
    change = float(changes.sum())
    sums: dict[tuple[str, ...], float] = defaultdict(int)
    for path, part in zip(paths, changes.tolist(), strict=True):
        steps = _steps(str(path))
        for depth in range(1, len(steps) + 1):
            sums[steps[:depth]] += part
    below: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
    for steps in sums:
        below[steps[:-1]].append(steps)
    at: tuple[str, ...] = ()
    while branches := below[at]:
        best = max(branches, key=lambda branch: sums[branch] / change)
        if not _STANDS_FOR[0] <= sums[best] / change <= _STANDS_FOR[1]:
            break
        at, change = best, sums[best]
    return ".".join(at), change


def _steps(path: str) -> tuple[str, ...]:
    return (path,) if path.startswith("(") else tuple(path.split("."))


@dataclass(frozen=True)
class Origin:
    """What allocates the blocks of a cause.

    Attributes:
        line: The job's line, ``file:line (function)``; empty if unknown, as in most of backward.
        operation: The operation; empty if unknown.
        phase: The phase it runs in.
    """

    line: str = ""
    operation: str = ""
    phase: str = ""

    def phrase(self, verb: str) -> str:
        """The verb and the place after a comma: ", made at model.py:212 (forward)"; empty if the place is unknown."""
        if self.line:
            return f", {verb} at {self.line}"
        return f", {verb} in {self.operation.removeprefix('aten.')} ({self.phase})" if self.operation else ""


def origin_of(cause: Cause, blocks: pd.DataFrame) -> Origin:
    """Where most of a cause comes from.

    Args:
        cause: The cause.
        blocks: Columns path, category, line, operation, phase, change_bytes of blocks at the peak.
    """
    way = 1 if cause.part > 0 else -1
    found = blocks[is_below(blocks["path"], cause.path) & (blocks["category"] == cause.category)]
    found = found[found["change_bytes"] * way > 0]
    if not len(found):
        return Origin()
    # A line is more useful than an operation, unless it accounts for next to nothing.
    told = found[found["line"] != ""]
    if len(told) and told["change_bytes"].abs().max() * 2 >= found["change_bytes"].abs().max():
        found = told
    most = found.iloc[int(found["change_bytes"].abs().argmax())]
    return Origin(str(most["line"]), str(most["operation"]), str(most["phase"]))


def of_layers(layer: str) -> str:
    """The layers in words: "of layers.*.mlp", "outside of modules", or "all over the model" without a layer."""
    if layer == OUTSIDE:
        return "outside of modules"
    return f"of {layer}" if layer else "all over the model"
