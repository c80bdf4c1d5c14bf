"""A page that follows a run while it goes: what its journal has so far, asked for every second, then the whole report.

Nothing but files is read, and no lock is taken, so following cannot disturb the rank. ``sweep.page`` follows a sweep.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

import numpy as np

from fakedist.analysis.replay import AllocatorSettings, rounded_bytes
from fakedist.errors import FakedistError
from fakedist.report.content.job import runs_report
from fakedist.report.page.run_page import page, template_text
from fakedist.report.page.serve import Answer, PageServer, no_page
from fakedist.report.render.html import report_page
from fakedist.results.job_time import open_job_runs
from fakedist.results.opening import open_run
from fakedist.rundir.directory import JOURNAL_NAME, MANIFEST_NAME, PAGE_NAME, rank_directories
from fakedist.rundir.journal import JournalReader
from fakedist.rundir.manifest import Manifest, load_manifest
from fakedist.rundir.memory_records import EventsRecord
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.records import RECORDS, LayersRecord, OperationsRecord, OutcomeRecord, ScopesRecord, StepRecord
from fakedist.rundir.rows import ScopeRow
from fakedist.rundir.schema import ACTIONS
from fakedist.units import format_bytes, format_us

_ALLOC, _FREE = ACTIONS.index("alloc"), ACTIONS.index("free_requested")
_TAKEN = (ACTIONS.index("segment_alloc"), ACTIONS.index("segment_map"))
_GIVEN = (ACTIONS.index("segment_free"), ACTIONS.index("segment_unmap"))
#: Of the curve: two for each third pixel of a wide screen.
_MOST_POINTS = 1_000


class Follower(ABC):
    """Something that goes on in a directory."""

    @abstractmethod
    def state(self) -> dict[str, object]:
        """Return what there is so far, for ``live.js``; ``done`` once :meth:`report` has all of it.

        Raises:
            FakedistError: The directory is damaged.
        """

    @abstractmethod
    def report(self) -> str:
        """The whole page, at the end."""


class LiveMemory:
    """A device's memory from its events so far.

    Reserved bytes are exact. Allocated ones are the least: a block may be larger than its request, rounded up.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        self.points: list[tuple[int, int, int]] = []  # microseconds, the most of both in an interval
        self._blocks: dict[int, int] = {}
        self._interval_us = 1_000

    def take(self, record: EventsRecord) -> None:
        """Add a record's events."""
        size = np.frombuffer(record.size, "<i8")
        rounded = rounded_bytes(size, AllocatorSettings()).tolist()
        columns = (record.action, np.frombuffer(record.address, "<u8").tolist(), size.tolist(), rounded)
        for at, action, address, bytes_, block in zip(
            np.frombuffer(record.time_us, "<i8").tolist(), *columns, strict=True
        ):
            if action == _ALLOC:
                self.allocated += block - self._blocks.get(address, 0)
                self._blocks[address] = block
            elif action == _FREE:
                self.allocated -= self._blocks.pop(address, 0)
            elif action in _TAKEN:
                self.reserved += bytes_
            elif action in _GIVEN:
                self.reserved -= bytes_
            else:
                continue
            self._point(at)
        self.most_allocated = max([self.most_allocated, *(point[1] for point in self.points)])
        self.most_reserved = max([self.most_reserved, *(point[2] for point in self.points)])

    def _point(self, time_us: int) -> None:
        begin = time_us - time_us % self._interval_us
        if self.points and self.points[-1][0] >= begin:
            last = self.points[-1]
            self.points[-1] = (last[0], max(last[1], self.allocated), max(last[2], self.reserved))
            return
        self.points.append((begin, self.allocated, self.reserved))
        while len(self.points) > _MOST_POINTS:
            self._interval_us *= 2
            merged: dict[int, tuple[int, int]] = {}
            for at, allocated, reserved in self.points:
                begin = at - at % self._interval_us
                before = merged.get(begin, (0, 0))
                merged[begin] = (max(before[0], allocated), max(before[1], reserved))
            self.points = [(at, *most) for at, most in merged.items()]


class RunFollower(Follower):
    """A run, from the directory that it is written into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._restart()

    def _restart(self, inode: int = -1) -> None:
        self._inode, self._position = inode, 0
        self._memory: dict[int, LiveMemory] = {}
        self._steps: list[StepRecord] = []
        self._layers: dict[int, str] = {}
        self._scopes: dict[int, ScopeRow] = {}
        self._scope = -1
        self._ended = ""

    def state(self) -> dict[str, object]:
        """See :meth:`Follower.state`."""
        run = self.path
        journal = run / JOURNAL_NAME
        if not (run / MANIFEST_NAME).is_file() or not journal.is_file():
            return {"title": f"waiting for {self.path}", "rows": [], "points": [], "done": False}
        about, manifest = journal.stat(), load_manifest(run)
        if about.st_ino != self._inode or about.st_size < self._position:
            self._restart(about.st_ino)  # another run took its place
        self._read(journal)
        done = manifest.exit.outcome is not Outcome.RUNNING and manifest.summary is not None
        memory = max(self._memory.values(), key=lambda each: each.most_reserved, default=LiveMemory())
        return {
            "title": run.name,
            "rows": [(name, text) for name, text in self._rows(manifest, about.st_mtime, memory) if text],
            "points": [[at / 1e6, allocated, reserved] for at, allocated, reserved in memory.points],
            "done": done,
        }

    def report(self) -> str:
        """See :meth:`Follower.report`."""
        return page(open_run(self.path))

    def _read(self, journal: Path) -> None:
        reader = JournalReader(journal, RECORDS, self._position)
        for record in reader:
            match record:
                case EventsRecord():
                    self._memory.setdefault(record.device, LiveMemory()).take(record)
                case StepRecord():
                    self._steps.append(record)
                case LayersRecord():
                    self._layers |= {row.layer: row.name for row in record.rows}
                case ScopesRecord():
                    self._scopes |= {row.scope: row for row in record.rows}
                case OperationsRecord() if record.scope:
                    self._scope = int(np.frombuffer(record.scope, "<u4")[-1])
                case OutcomeRecord():
                    self._ended = str(record.outcome)
        self._position = reader.position

    def _rows(self, manifest: Manifest, written: float, memory: LiveMemory) -> list[tuple[str, str]]:
        job, scope = manifest.job, self._scopes.get(self._scope)
        doing = "" if scope is None else ", ".join(filter(None, (scope.phase, self._layers.get(scope.layer, ""))))
        is_over = self._ended or manifest.exit.outcome is not Outcome.RUNNING
        began = _moment(manifest.created)
        until = written if is_over else time.time()
        last = self._steps[-1] if self._steps else None
        return [
            ("rank", "" if job is None else f"{job.rank:,} of {job.world_size:,}"),
            ("script", "" if job is None else job.target),
            ("elapsed", "" if began is None else format_us(max(until - began, 0.0) * 1e6)),
            ("steps that ended", f"{len(self._steps):,}"),
            ("last step", "" if last is None else f"step {last.step} in {format_us(last.wall_us)}"),
            ("at", f"the script has ended ({self._ended}); its report is being made" if self._ended else doing),
            ("step", "" if scope is None or is_over else str(scope.step)),
            ("allocated, at least", format_bytes(memory.allocated)),
            ("its most", format_bytes(memory.most_allocated)),
            ("reserved", format_bytes(memory.reserved)),
            ("its most, reserved", format_bytes(memory.most_reserved)),
            ("last written", f"{format_us(max(time.time() - written, 0.0) * 1e6)} ago"),
        ]


def _moment(created: str) -> float | None:
    from datetime import datetime

    try:
        return datetime.fromisoformat(created).timestamp()
    except ValueError:
        return None


class RanksFollower(Follower):
    """The runs of several ranks of a job: the one written last while it goes, and how each ended.

    They are done once the page of all of them is written, which is after the last one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shown = RunFollower(path)

    def state(self) -> dict[str, object]:
        """See :meth:`Follower.state`."""
        runs = rank_directories(self._path)
        manifests = [run / MANIFEST_NAME for run in runs]
        last = max(manifests, key=_written, default=None)
        if last is not None and last.parent != self._shown.path:
            self._shown = RunFollower(last.parent)
        shown = self._shown.state()
        done = bool(runs) and _written(self._path / PAGE_NAME) >= max(map(_written, manifests))
        rows = [_rank_row(run.name, load_manifest(run)) for run in runs]
        links = [
            [["page", f"{run.name}/{PAGE_NAME}"]] if ended else [] for run, (_, ended) in zip(runs, rows, strict=True)
        ]
        return shown | {
            "title": f"{self._path.name}: {shown['title']}" if runs else f"waiting for {self._path}",
            "heading": "Ranks so far",
            "columns": ["rank", "outcome", "steps", "peak reserved"],
            "table": [row for row, _ in rows],
            "links": links,
            "done": done,
        }

    def report(self) -> str:
        """See :meth:`Follower.report`."""
        return report_page(runs_report(open_job_runs(self._path), folder=self._path))


def _rank_row(name: str, manifest: Manifest) -> tuple[list[str], bool]:
    """A rank's cells, and whether its report is complete."""
    summary, outcome = manifest.summary, manifest.exit.outcome
    done = summary is not None and outcome is not Outcome.RUNNING
    cells = [name.removeprefix("rank"), str(outcome), "", ""]
    if summary is not None and done:
        cells[2:] = [f"{len(summary.steps):,}", format_bytes(summary.peak_reserved_bytes)]
    return cells, done


def follower_of(path: Path) -> Follower | None:
    """Return the follower of a directory of a run or of several ranks' runs; None while there is nothing in it."""
    if (path / MANIFEST_NAME).is_file():
        return RunFollower(path)
    return RanksFollower(path) if rank_directories(path) else None


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


class LiveServer(PageServer):
    """Serves the live page, what it asks for, and in its place the whole report once there is one.

    ``find`` names what to follow; None while the directory does not exist.
    """

    def __init__(
        self,
        find: Callable[[], Follower | None],
        title: str,
        port: int,
        linked: Callable[[str], str | None] = no_page,
    ) -> None:
        super().__init__(template_text("live.html.j2", "live", {"title": title}, asks=True), port, linked)
        self._find, self._title = find, title
        self._follower: Follower | None = None
        self._lock = threading.Lock()
        self._is_done = False

    def answer(self, path: str) -> Answer | None:
        """See :meth:`PageServer.answer`."""
        if self.is_at(path, self.path + "state"):
            return HTTPStatus.OK, "application/json", json.dumps(self._state()).encode()
        return super().answer(path)

    def _state(self) -> dict[str, object]:
        with self._lock:
            if self._is_done:
                return {"done": True}
            try:
                self._follower = self._follower or self._find()
                if self._follower is None:
                    return {"title": f"waiting for {self._title}", "rows": [], "points": [], "done": False}
                state = self._follower.state()
                if state["done"]:
                    self.body, self._is_done = self._follower.report().encode(), True
                return state
            except (FakedistError, OSError) as error:  # it may be in the midst of being replaced: ask again
                return {"trouble": str(error), "done": False}
