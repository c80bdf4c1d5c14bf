"""One confirmation: where its results go, how long it may take, and whether the machine has a GPU.

What is measured goes to ``<out>/accuracy/<name>.json`` and ``<out>/recordings/<gpu>-torch<version>``, from where
``python -m tests.accuracy.results <out>`` of a clone keeps it. A rehearsal's files lie in ``<out>/rehearsal`` alone,
are called ``rehearsal-<name>.json`` and are marked in their heads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fakedist.extras.confirm.jobs import GpuJob
from fakedist.extras.confirm.recorded_jobs import Way, like

Row = dict[str, Any]
#: Where the results of measurements and recordings go, and what a rehearsal calls its files.
MEASURED, RECORDINGS, REHEARSED = "accuracy", "recordings", "rehearsal-"
#: Seconds that a piece keeps for writing its results.
_RESERVE_S = 15.0


@dataclass
class Session:
    """One confirmation.

    Attributes:
        out: Directory of the results.
        machine: ``gpu``, ``capacity_bytes``, ``driver``, ``torch``, ``python``.
        jobs: Jobs of the accuracy set.
        at_once: Processes at the same time.
        rehearsal: Whether the virtual GPU stands in for a real one.
        command: What was typed.
        told: Gets each line of the summary as it comes.
        ends_at: ``time.monotonic()`` by which the piece that runs is over.
        lines: The summary, as it grows.
    """

    out: Path
    machine: dict[str, Any]
    jobs: Sequence[GpuJob]
    at_once: int
    rehearsal: bool
    command: str
    told: Callable[[str], None]
    ends_at: float = float("inf")
    lines: list[str] = field(default_factory=list)

    @property
    def real(self) -> Way:
        """How a job runs on the real GPU, or on what stands in its place."""
        return self.virtual if self.rehearsal else self._way("real")

    @property
    def virtual(self) -> Way:
        """How a job runs on the virtual GPU: of the real one's model and memory."""
        return self._way("virtual")

    def _way(self, device: str) -> Way:
        gpu, memory_bytes = like(self.machine["gpu"], self.machine["capacity_bytes"])
        return Way(device, False, gpu, memory_bytes, self.at_once, self.timeout_s(150.0), self.ends_at - _RESERVE_S)

    def timeout_s(self, most: float = 600.0) -> float:
        """Seconds that a process that begins now may take."""
        return min(most, max(1.0, self.ends_at - _RESERVE_S - time.monotonic()))

    @property
    def is_over(self) -> bool:
        """Whether no further process should begin."""
        return time.monotonic() > self.ends_at - _RESERVE_S

    @property
    def recordings(self) -> Path:
        """Where recordings of the real GPU go, or those of its stand-in."""
        name = f"{self.machine['gpu'].lower().replace(' ', '-')}-torch{self.machine['torch'].partition('+')[0]}"
        return self.out / "rehearsal" / name if self.rehearsal else self.out / RECORDINGS / name

    @property
    def others(self) -> Path:
        """Where results go that are not kept."""
        directory = self.out / ("rehearsal" if self.rehearsal else "others")
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def say(self, *lines: str) -> None:
        """Add lines to the summary."""
        for line in lines:
            self.told(line)
        self.lines += lines

    def write(self, name: str, rows: Sequence[Row], failed: Sequence[str] = ()) -> None:
        """Write the data of a table of docs/accuracy/results.md, and why rows are missing."""
        head = {"date": datetime.now(UTC).date().isoformat(), **self.machine, "command": self.command}
        head.pop("capacity_bytes")
        head |= {"failed": list(failed)} if failed else {}
        if self.rehearsal:
            path = self.out / "rehearsal" / f"{REHEARSED}{name}.json"
            head["rehearsal"] = True
        else:
            path = self.out / MEASURED / f"{name}.json"
        write_rows(path, head, rows)
        self.say(f"{path.name}: {len(rows)} rows", *(f"  missing: {text}" for text in failed))


def write_rows(path: Path, head: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write a table's data as JSON, a row on each line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"head": {json.dumps(head)},\n"rows": [\n{lines}\n]}}\n')
