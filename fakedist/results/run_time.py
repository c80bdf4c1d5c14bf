"""``run.time``: where the time of the timed step goes, as DataFrames for a notebook, in microseconds."""

from __future__ import annotations

from dataclasses import fields

import pandas as pd

from fakedist.analysis.layer_table import fold_layers, unfolded
from fakedist.analysis.times.layer_times import fold_times
from fakedist.results.run_tables import RunTables
from fakedist.run.plain import to_plain
from fakedist.run.step_time import GroupTime, KernelSource, PathPart, StepTime
from fakedist.units import format_us

_PATH_COLUMNS, _GROUP_COLUMNS = ([each.name for each in fields(kind)] for kind in (PathPart, GroupTime))


class RunTime:
    """The times of a run's timed step.

    Args:
        tables: The run's tables.
        step_time: Where the step's time goes.
        source: Where its kernels come from.

    Attributes:
        source: Whether these times are measured, simulated or estimated.
        step: The step that was timed.
    """

    def __init__(self, tables: RunTables, step_time: StepTime, source: KernelSource) -> None:
        self._tables, self._step_time = tables, step_time
        self.source, self.step = source.source, source.step

    def __repr__(self) -> str:
        time = self._step_time
        rows = [("step", f"{self.step}, {format_us(time.step_us)}, {self.source}")]
        if time.num_unknown_calls:
            rows.append(("without", f"{time.num_unknown_calls:,} of {time.num_calls:,} collectives"))
        rows += [(row.family, format_us(row.time_us)) for row in time.by_family if row.share is not None]
        return "\n  ".join([type(self).__name__, *(f"{name}: {text}" for name, text in rows)])

    def summary(self) -> StepTime:
        """The step's time and how it is spent."""
        return self._step_time

    def layers(self, *, fold: bool = True) -> pd.DataFrame:
        """Time by layer, with children. Columns: see ``analysis.times.layer_times.fold_times``.

        Args:
            fold: Whether repeated layers fold into one row.
        """
        layers = self._tables.table("layers")
        return fold_times(self._tables.table("layer_times"), layers, fold_layers(layers) if fold else unfolded(layers))

    def families(self) -> pd.DataFrame:
        """Time by family of kernels, most first. ``share`` does not include communication."""
        return pd.DataFrame(to_plain(self._step_time.by_family))

    def names(self) -> pd.DataFrame:
        """The table ``kernel_names``: time by name, shape and folded layer of kernels, most first."""
        return self._tables.table("kernel_names")

    def ranges(self) -> pd.DataFrame:
        """The table ``ranges``: the script's own ranges, and what was launched in each."""
        return self._tables.table("ranges")

    def critical_path(self) -> pd.DataFrame:
        """What makes the step as long as it is, by layer, group, host and idle time, the longest part first.

        The parts add up to the step. Columns: those of ``fakedist.run.step_time.PathPart``. No rows if the step was
        imported, or if it is not known what its streams wait for.
        """
        return pd.DataFrame(to_plain(self._step_time.critical_path), columns=_PATH_COLUMNS)

    def groups(self) -> pd.DataFrame:
        """Collectives by group and operation, most exposed first. Columns: those of ``run.step_time.GroupTime``."""
        return pd.DataFrame(to_plain(self._step_time.by_group), columns=_GROUP_COLUMNS)

    def kernels(self) -> pd.DataFrame:
        """The table ``kernels``, with the names of the layers as ``layer_name``."""
        kernels, names = self._tables.table("kernels"), self._tables.table("layers")["name"]
        return kernels.assign(layer_name=names.iloc[kernels["layer"]].to_numpy())
