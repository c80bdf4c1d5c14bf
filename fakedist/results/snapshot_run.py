"""A torch memory snapshot as a run for the reports: memory only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from fakedist._version import __version__
from fakedist.analysis import memory_tables
from fakedist.analysis.blocks import build_blocks, event_places
from fakedist.analysis.building import make_tables, no_collector
from fakedist.analysis.foreign import read_foreign
from fakedist.analysis.summing_up import summarize
from fakedist.results.run import Run
from fakedist.run.schema import SCHEMA_VERSION
from fakedist.run.snapshot import read_snapshot

_UNKNOWN = ("spans", "phases")  # tables without a meaning if steps are unknown


class SnapshotRun(Run):
    """A snapshot as a run with unknown steps.

    Args:
        path: The pickle.

    Raises:
        RunDirectoryError: It is not a snapshot, or tries to run code.
    """

    is_snapshot = True

    def __init__(self, path: Path) -> None:
        with no_collector():
            found = read_foreign(read_snapshot(path))
        self.path = path.resolve()
        self.device = found.recording.device
        blocks, places = build_blocks(found.recording), event_places(found.recording)
        self._tables = make_tables(found.recording, blocks, places)
        self.manifest = _manifest(self.path)
        peak = memory_tables.find_peak(found.recording, blocks, places)
        summary = summarize(found.recording, self.manifest, self._tables, peak)
        self.manifest["notes"] = found.notes
        self.summary = replace(
            summary, peak_phase="", by_phase=[], layers=[], estimated_outside=None, notes=found.notes
        )

    def has(self, name: str) -> bool:
        """Whether a snapshot has anything for a table."""
        return name in self._tables and name not in _UNKNOWN

    def num_rows(self, name: str) -> int:
        """Number of rows of a table."""
        return len(self._tables[name])

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One table, or some of its columns, whose strings are then categoricals."""
        if columns is None:
            return self._tables[name]
        frame = self._tables[name][list(columns)].copy()
        for column in frame.select_dtypes(["object", "string"]).columns:
            frame[column] = frame[column].astype("category")
        return frame

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What is known: the file and the device."""
        events = self.num_rows("events")
        return [
            ("file", str(self.path)),
            ("device", f"cuda:{self.device}"),
            ("history", f"{events:,} events"),
        ]


def _manifest(path: Path) -> dict[str, Any]:
    """A run.json for a snapshot, which has none."""
    job: dict[str, Any] = {"world_size": None, "rank": None, "target": path.name, "is_module": False, "arguments": []}
    return {
        "schema_version": SCHEMA_VERSION,
        "fakedist": __version__,
        "command": [],
        "cwd": "",
        "git_commit": "",
        "created": "",
        "job": {**job, "gpus_per_node": 1, "device": "cuda", "gpu_memory_bytes": None},
        "exit": {"outcome": "finished", "code": 0, "message": ""},
        "versions": {},
        "provenance": {"memory": "measured: the caching allocator's own history"},
        "dropped": [],
    }
