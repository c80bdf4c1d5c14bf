"""``run.time``: where the time of the timed step goes, as DataFrames for a notebook, in microseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from fakedist.analysis.layer_table import fold_layers, unfolded
from fakedist.analysis.times.layer_times import fold_times
from fakedist.errors import RunDirectoryError
from fakedist.run.plain import to_plain
from fakedist.run.step_time import StepTime

if TYPE_CHECKING:
    from fakedist.results.run import Run


class RunTime:
    """The times of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def source(self) -> str:
        """Whether these times are measured or estimated; empty if no step was timed."""
        return self._run.summary.kernels.source if self._run.summary.kernels else ""

    def summary(self) -> StepTime:
        """The step's time and how it is spent.

        Raises:
            RunDirectoryError: No step of this run was timed.
        """
        found = self._run.summary.time
        if found is None:
            raise RunDirectoryError(
                f"no step of {self._run.path} was timed", "fakedist profile again, without --no-kernels"
            )
        return found

    def layers(self, *, fold: bool = True) -> pd.DataFrame:
        """Time by layer, with children. Columns: see ``analysis.times.layer_times.fold_times``.

        Args:
            fold: Whether repeated layers fold into one row.

        Raises:
            RunDirectoryError: No step of this run was timed.
        """
        self.summary()
        layers = self._run.table("layers")
        return fold_times(self._run.table("layer_times"), layers, fold_layers(layers) if fold else unfolded(layers))

    def families(self) -> pd.DataFrame:
        """Time by family of kernels, most first. ``share`` does not include communication."""
        return pd.DataFrame(to_plain(self.summary().by_family))

    def names(self) -> pd.DataFrame:
        """The table ``kernel_names``: time by name of kernel, most first."""
        self.summary()
        return self._run.table("kernel_names")

    def kernels(self) -> pd.DataFrame:
        """The table ``kernels``, with the names of the layers as ``layer_name``."""
        self.summary()
        kernels, names = self._run.table("kernels"), self._run.table("layers")["name"]
        return kernels.assign(layer_name=names.iloc[kernels["layer"]].to_numpy())
