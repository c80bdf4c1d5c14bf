"""The rows of the table ``work`` as arrays, and what a family's rule found for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.cost_model.kernels.measurements import Floats, Integers

Flags = npt.NDArray[np.bool_]
Texts = npt.NDArray[np.object_]
Codes = npt.NDArray[np.intp]


class WorkArrays:
    """Some or all rows of work, column by column (``rundir.launch_records.WorkRow`` describes each)."""

    def __init__(self, work: pd.DataFrame, indices: Integers | None = None) -> None:
        self._work, self.indices = work, np.arange(len(work)) if indices is None else indices

    def __len__(self) -> int:
        return len(self.indices)

    def only(self, chosen: Flags) -> WorkArrays:
        """The chosen rows."""
        return WorkArrays(self._work, self.indices[chosen])

    def numbers(self, name: str) -> Floats:
        """A column as floating-point numbers."""
        return self._work[name].to_numpy()[self.indices].astype(np.float64)

    def counts(self, name: str) -> Integers:
        """A column of counts."""
        return np.asarray(self._work[name].to_numpy()[self.indices].astype(np.int64))

    def flags(self, name: str) -> Flags:
        """A column of truths."""
        return np.asarray(self._work[name].to_numpy()[self.indices].astype(bool))

    def texts(self, name: str) -> Texts:
        """A column of texts."""
        return np.asarray(self._work[name].to_numpy()[self.indices].astype(object))

    def combinations(self, *names: str) -> tuple[Codes, list[tuple[str, ...]]]:
        """The combination of some texts in each row, as a number, and the combinations."""
        if not len(self):
            return np.zeros(0, np.intp), []
        frame = self._work[list(names)].iloc[self.indices]
        codes = frame.groupby(list(names), sort=False, observed=True).ngroup().to_numpy()
        _, first = np.unique(codes, return_index=True)
        rows = frame.iloc[first]
        return np.asarray(codes), [tuple(map(str, row)) for row in rows.itertuples(index=False)]


@dataclass
class Estimates:
    """A rule's estimates of some rows.

    Attributes:
        time_us: At burst clocks; NaN if unknown.
        spread: Half the width of the 90 % interval, of the logarithm.
        bound: "compute", "memory" or "launch"; empty if unknown.
        accuracy: The family of ``accuracy.json`` whose errors the interval is from; empty without one.
        basis: The measurement or the rule, in a few words.
        spare: How much less (logarithm) it may take: where an unknown mask may spare work, or where the library that
            runs was not measured.
    """

    time_us: Floats
    spread: Floats
    bound: Texts
    accuracy: Texts
    basis: Texts
    spare: Floats | None = None

    @classmethod
    def unknown(cls, number: int) -> Estimates:
        """Nothing is known."""
        texts = [np.full(number, "", object) for _ in range(3)]
        return cls(np.full(number, np.nan), np.full(number, np.nan), *texts)

    def put(self, chosen: Flags, estimates: Estimates) -> None:
        """Fill in what was found for the chosen rows."""
        for name in ("time_us", "spread", "bound", "accuracy", "basis"):
            getattr(self, name)[chosen] = getattr(estimates, name)
        if estimates.spare is not None:
            self.spare = np.zeros(len(self.time_us)) if self.spare is None else self.spare
            self.spare[chosen] = estimates.spare


@dataclass
class Assumptions:
    """A rule's assumptions about rows: each widens the interval and is named in the basis."""

    number: int
    _found: list[tuple[Flags, Floats | float, str]] = field(default_factory=list)

    def add(self, where: Flags, spread: Floats | float, words: str) -> None:
        """Assume something of these rows: half a width (logarithm) that adds to the others, and why."""
        if where.any():
            self._found.append((where, spread, words))

    def spread(self, measured: Floats) -> Floats:
        """The widths with every assumption: independent, so their squares add."""
        total = np.square(measured)
        for where, spread, _ in self._found:
            total = total + np.where(where, spread**2, 0.0)
        return np.asarray(np.sqrt(total))

    def basis(self, begins: Sequence[str] | Texts) -> Texts:
        """The texts with every assumption's words."""
        texts = np.asarray(begins, object).copy()
        for where, _, words in self._found:
            texts[where] += f"; assumed: {words}"
        return texts


def which_limits(compute_us: Floats, memory_us: Floats, start_us: Floats | float) -> Texts:
    """The limit of each row: "launch" where both are less than a kernel's start."""
    longest = np.maximum(compute_us, memory_us)
    bound = np.where(compute_us > memory_us, "compute", "memory")
    return np.where(longest <= start_us, "launch", bound).astype(object)
