"""Maps ranges to rows of the table ``layers``."""

from __future__ import annotations

import numpy as np

from fakedist.analysis.traces.intervals import Intervals, Ints
from fakedist.analysis.traces.range_meanings import LAYER
from fakedist.analysis.traces.step_trace import Ranges
from fakedist.run.rows import LayerRow

OUTSIDE = 0


class LayerNumbers:
    """Rows of the table ``layers`` by name.

    Args:
        known: A recording's layers, whose ranges have these names. None for a trace without a recording: a layer is
            then named after all the ranges around it.

    Attributes:
        rows: Rows in the journal's format.
    """

    def __init__(self, known: list[LayerRow] | None = None) -> None:
        self.rows = known if known is not None else [LayerRow(OUTSIDE, "", "", -1)]
        self._by_name = {name: number for number, name, *_ in self.rows}
        self._is_recorded = known is not None

    def of(self, ranges: Ranges, rows: Ints) -> Ints:
        """The layer of each of these rows of ``ranges``. Row -1 is outside of modules."""
        if not len(ranges.meaning):
            return np.full(len(rows), OUTSIDE, np.int64)
        asked = rows >= 0
        found = np.full(len(rows), OUTSIDE, np.int64)
        if self._is_recorded:
            of_meaning = np.array([self._by_name.get(each.name, OUTSIDE) for each in ranges.meanings], np.int64)
            found[asked] = of_meaning[ranges.meaning[rows[asked]]]
        else:
            ours = np.array([each.is_ours for each in ranges.meanings])[ranges.meaning[rows[asked]]]
            found[np.flatnonzero(asked)[~ours]] = self._by_path(ranges, rows[asked][~ours])
            found[np.flatnonzero(asked)[ours]] = self._by_own_name(ranges, rows[asked][ours])
        return found

    def _by_own_name(self, ranges: Ranges, rows: Ints) -> Ints:
        """Layers from fakedist's own ranges, whose names are qualified, without the run that the report belongs to."""
        names = [each.name for each in ranges.meanings if each.is_ours and each.kind == LAYER]
        root = next((name for name in names if name.startswith("(") and name.endswith(")")), "")
        said, place = np.unique(ranges.meaning[rows], return_inverse=True)
        return np.array([self._qualified(ranges.meanings[each].name, root) for each in said], np.int64)[place]

    def _qualified(self, name: str, root: str) -> int:
        if name not in self._by_name:
            above = name.rpartition(".")[0] or (root if name != root and not name.startswith("(") else "")
            self._append(name, self._qualified(above, root) if above else OUTSIDE)
        return self._by_name[name]

    def _by_path(self, ranges: Ranges, rows: Ints) -> Ints:
        """Layers named after the ranges around them, outermost first."""
        of_layers = np.flatnonzero(ranges.kind == LAYER)
        lanes = np.unique(ranges.thread[of_layers], return_inverse=True)[1]
        parents = Intervals(lanes, ranges.start[of_layers], ranges.end[of_layers]).parents()
        meaning = ranges.meaning[of_layers]
        wanted = np.searchsorted(of_layers, rows)
        chain, levels = np.unique(wanted), []
        while len(chain):
            levels.append(chain)
            above = parents[chain]
            chain = np.unique(above[above >= 0])
        number = np.full(len(of_layers), OUTSIDE, np.int64)
        needed = np.unique(np.concatenate(levels)) if levels else np.zeros(0, np.int64)
        ready = needed[parents[needed] < 0]
        while len(ready):
            above = np.where(parents[ready] >= 0, number[parents[ready]], OUTSIDE)
            keys, place = np.unique(np.stack([above, meaning[ready]]), axis=1, return_inverse=True)
            numbers = [self._number(parent, ranges.meanings[said].name) for parent, said in keys.T.tolist()]
            number[ready] = np.array(numbers, np.int64)[place.ravel()]
            ready = needed[np.isin(parents[needed], ready)]
        return number[wanted]

    def _number(self, parent: int, name: str) -> int:
        above = self.rows[parent].name
        path = name if not above or name.startswith(above + ".") else f"{above}.{name}"
        if path not in self._by_name:
            self._append(path, parent)
        return self._by_name[path]

    def _append(self, name: str, parent: int) -> None:
        self._by_name[name] = len(self.rows)
        self.rows.append(LayerRow(len(self.rows), name, "", parent))
