"""A run directory as the reports use it: the manifest, and tables that are read on demand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from html import escape
from pathlib import Path

import pandas as pd

from fakedist.analysis.layer_table import fold_layers, fold_table, unfolded
from fakedist.errors import RunDirectoryError
from fakedist.report.text.wording import ending, job_command, peak_place, peaks_text, verdict
from fakedist.results.run_memory import RunMemory
from fakedist.results.run_time import RunTime
from fakedist.run.directory import MANIFEST_NAME, PAGE_NAME, is_in_use
from fakedist.run.manifest import load_manifest
from fakedist.run.plain import PlainValueError, from_plain, to_plain
from fakedist.run.summary import Summary
from fakedist.run.tables import count_rows, has_table, read_table
from fakedist.units import format_bytes


class Run:
    """One finished run.

    Args:
        path: The run directory.

    Raises:
        RunDirectoryError: It is not a run directory, the run has not ended, or its tables cannot be made.
    """

    is_snapshot = False

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.manifest = load_manifest(path)
        if "summary" not in self.manifest:
            if is_in_use(path):
                raise RunDirectoryError(f"{path} is still being written", "wait for the run to end")
            from fakedist.analysis.building import build_tables

            build_tables(path, may_be_empty=False)  # the parent was killed before it could
            self.manifest = load_manifest(path)

    @cached_property
    def summary(self) -> Summary:
        """The run's figures.

        Raises:
            RunDirectoryError: run.json is damaged.
        """
        try:
            return from_plain(Summary, self.manifest["summary"], "summary")
        except PlainValueError as error:
            path = self.path / MANIFEST_NAME
            raise RunDirectoryError(
                f"{path} cannot be read: {error}", "the run directory is damaged; run again"
            ) from error

    @property
    def is_imported(self) -> bool:
        """Whether another program recorded the run. It then has kernels and layers, but nothing about memory."""
        return "imported" in self.manifest

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What ran, as names and texts."""
        summary, job = self.summary, self.manifest["job"]
        gpu, torch = (
            summary.gpu or ("unknown" if self.is_imported else "never reached"),
            summary.torch or "unknown",
        )
        page = self.path / PAGE_NAME
        if self.is_imported:
            return [
                ("report", self.manifest["imported"]["report"]),
                ("device", gpu),
                ("run", str(self.path)),
                *([("page", str(page))] if page.exists() else []),
            ]
        return [
            ("job", job_command(job)),
            ("rank", f"{summary.rank:,} of {summary.world_size:,} ({job['gpus_per_node']} GPUs a node)"),
            ("device", f"{summary.device}: {gpu}, torch {torch}"),
            ("ended", ending(summary, self.manifest["cwd"])),
            ("run", str(self.path)),
            *([("page", str(page))] if page.exists() else []),
        ]

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
    def by_category(self) -> dict[str, int]:
        """Bytes at the peak by category. They add up to it."""
        return dict(self.summary.by_category)

    @property
    def fits(self) -> bool:
        """Whether the rank fits its GPU."""
        return self.summary.fits

    @property
    def memory(self) -> RunMemory:
        """The memory that was held, as DataFrames."""
        return RunMemory(self)

    @property
    def time(self) -> RunTime:
        """Where the time of the timed step goes, as DataFrames."""
        return RunTime(self)

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

    def __repr__(self) -> str:
        rows = "".join(f"\n  {name}: {text}" for name, text in self._told())
        return f"{type(self).__name__}({str(self.path)!r}){rows}"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._told())
        return f"<table>{rows}</table>"

    def _told(self) -> list[tuple[str, str]]:
        """The run in a few lines."""
        summary = self.summary
        found = verdict(summary, self.manifest["cwd"])
        place = f" ({where})" if (where := peak_place(summary)) else ""
        rows = [("peak", peaks_text(summary) + place)]
        if found:
            rows.append(("verdict", found.word + found.more))
        held = sorted(((bytes_, name) for name, bytes_ in summary.by_category.items() if bytes_), reverse=True)
        if not self.is_snapshot:
            rows.append(
                ("held", ", ".join(f"{name.replace('_', ' ')} {format_bytes(bytes_)}" for bytes_, name in held))
            )
        return [*(fact for fact in self.facts if fact[0] not in ("run", "page", "file")), *rows]

    def has(self, name: str) -> bool:
        """Whether the run has a table. An older fakedist wrote fewer."""
        return has_table(self.path, name)

    def num_rows(self, name: str) -> int:
        """Number of rows of a table, without reading them.

        Raises:
            RunDirectoryError: It is missing or damaged.
        """
        return count_rows(self.path, name)

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One table, or some of its columns, whose strings are then categoricals.

        Raises:
            RunDirectoryError: It is missing or damaged.
        """
        frame = read_table(self.path, name, columns).to_pandas(strings_to_categorical=columns is not None)
        assert isinstance(frame, pd.DataFrame)
        return frame


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run directory, or any torch memory snapshot as a run with memory only.

    Args:
        path: The directory that ``fakedist profile`` made, or the file that torch.cuda.memory._dump_snapshot() wrote.

    Raises:
        RunDirectoryError: The path is neither, or cannot be read.
    """
    if not Path(path).is_file():
        return Run(Path(path))
    from fakedist.results.snapshot_run import SnapshotRun

    return SnapshotRun(Path(path))
