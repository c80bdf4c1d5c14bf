"""A finished run: its figures, and its tables as DataFrames. Bytes and microseconds throughout."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import pandas as pd

from fakedist.analysis.layer_table import fold_layers, fold_table, unfolded
from fakedist.results.pricing import Pricing, PricingOptions
from fakedist.results.repricing import price_again
from fakedist.results.run_memory import RunMemory
from fakedist.results.run_tables import KeptTables, RunTables
from fakedist.results.run_time import RunTime
from fakedist.run.manifest import Manifest
from fakedist.run.plain import to_plain
from fakedist.run.summary import Summary
from fakedist.units import format_bytes

if TYPE_CHECKING:
    from fakedist.report.figures.run_figures import RunFigures


class Run:
    """One finished run. ``fakedist.open`` and ``fakedist.profile`` return one. A part that it lacks is None.

    Args:
        path: The run directory, or the snapshot.
        manifest: Its run.json.
        summary: Its figures.
        tables: Its tables.
        device: The device of its memory, if that is not the job's.

    Attributes:
        path: The run directory, or the snapshot.
        manifest: Its run.json.
        summary: Its figures.
        device: ``cuda`` or ``virtual``; of a snapshot ``cuda:0`` or another.
        memory: The memory that was held; None if the run was imported from a tool that does not record memory.
        by_category: Bytes at the peak by category, which add up to it; None for a snapshot, which says nothing of
            steps, layers and categories.
        time: Where the time of the timed step goes; None if no step was timed.
    """

    def __init__(
        self, path: Path, manifest: Manifest, summary: Summary, tables: RunTables, *, device: str = ""
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.summary = summary
        self.device = device or summary.device
        self._tables = tables
        self.memory = None if manifest.imported else RunMemory(tables, summary)
        self.by_category = dict(summary.by_category) if tables.has("phases") else None
        self.time = RunTime(tables, *summary.timed) if summary.timed else None

    @property
    def figures(self) -> RunFigures:
        """The run's charts as plotly figures, for a notebook: ``run.figures.timeline()``."""
        from fakedist.report.figures.run_figures import RunFigures  # plotly is imported when a chart is wanted

        return RunFigures(self)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes that tensors held at once."""
        return self.summary.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that the caching allocator held at once."""
        return self.summary.peak_reserved_bytes

    @property
    def capacity_bytes(self) -> int:
        """The GPU's memory."""
        return self.summary.capacity_bytes

    @property
    def headroom_bytes(self) -> int:
        """The part of the GPU's memory that was never reserved; negative if more was reserved than the GPU has."""
        return self.capacity_bytes - self.peak_reserved_bytes

    @property
    def fits(self) -> bool:
        """Whether the rank fits its GPU."""
        return self.summary.fits

    def layers(self, *, fold: bool = True) -> pd.DataFrame:
        """The memory of layers at the peak, with children. Columns: see ``analysis.layer_table.fold_table``.

        Args:
            fold: Whether repeated layers fold into one row.

        Raises:
            RunDirectoryError: The table is missing or damaged.
        """
        table = self.table("layers")
        return fold_table(table, fold_layers(table) if fold else unfolded(table))

    def collectives(self) -> pd.DataFrame:
        """This rank's collective calls: group, group_size, operation, num_calls, bytes_in, bytes_out."""
        return pd.DataFrame(to_plain(self.summary.collectives))

    def priced_for(self, gpu: str | None = None, **options: Unpack[PricingOptions]) -> Run:
        """The same run with the times of another GPU or fabric: its launches are priced again, and nothing runs.

        The memory stays that of the run.

        Args:
            gpu: A known GPU model, such as "b200", or a GPU file; None for the run's own.
            options: What else to price for, see :class:`fakedist.results.pricing.Pricing`.

        Raises:
            SetupError: The file of own times cannot be read, or is of another GPU.
            JobError: fakedist has no such GPU model, fabric or what-if, the file is not valid, or a variable of NCCL's
                makes no difference.
            RunDirectoryError: The run has no launches: it was imported or made with --no-kernels. Or its kernels were
                measured, and another GPU is wanted.
        """
        models = Pricing(gpu, **options).models(self.manifest, self.summary)
        summary, tables = price_again(self.manifest, self.summary, self._tables, models)
        return Run(self.path, self.manifest, summary, tables, device=self.device)

    def keeping_tables(self) -> Run:
        """The same run, which keeps each table that it has read: for a report, which asks for one several times."""
        return Run(self.path, self.manifest, self.summary, KeptTables(self._tables), device=self.device)

    def has(self, name: str) -> bool:
        """Whether the run has a table."""
        return self._tables.has(name)

    def num_rows(self, name: str) -> int:
        """Number of rows of a table, without reading them.

        Raises:
            RunDirectoryError: It is missing or damaged.
        """
        return self._tables.num_rows(name)

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One table, or some of its columns, whose strings are then categoricals.

        Raises:
            RunDirectoryError: It is missing or damaged.
        """
        return self._tables.table(name, columns)

    def __repr__(self) -> str:
        rows = "".join(f"\n  {name}: {text}" for name, text in self._figures())
        return f"{type(self).__name__}({str(self.path)!r}){rows}"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._figures())
        return f"<table>{rows}</table>"

    def _figures(self) -> list[tuple[str, str]]:
        """The figures that fit a few lines, by the names of the attributes that have them."""
        summary = self.summary
        rows = [("device", f"{self.device}: {summary.gpu}" if summary.gpu else self.device)]
        if summary.rank is not None:
            rows = [("rank", f"{summary.rank:,} of {summary.world_size:,}"), *rows]
            rows.append(("outcome", f"{summary.exit.outcome}, {len(summary.steps)} steps"))
        if self.memory is not None:
            amounts = {"peak_allocated": self.peak_allocated_bytes, "peak_reserved": self.peak_reserved_bytes}
            if self.capacity_bytes:
                amounts["headroom"] = self.headroom_bytes
            rows += [(name, format_bytes(bytes_)) for name, bytes_ in amounts.items()]
            rows.append(("fits", "yes" if self.fits else "no"))
        if self.time is not None:
            rows.append(("time", f"{self.time.source}, step {self.time.step}"))
        return rows
