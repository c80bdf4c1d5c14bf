"""Runs the points of a sweep in their order: asks an executor for the ranks of each, and makes rows of the results."""

from __future__ import annotations

import dataclasses
import enum
import random
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fakedist.launcher.executors.task import Executor, Task, TaskResult
from fakedist.rundir.directory import MANIFEST_NAME
from fakedist.rundir.outcome import Outcome
from fakedist.sweep.command import PointRun
from fakedist.sweep.outcomes import RankKind, RankResult, Row, Status
from fakedist.sweep.plan import Ground, SweepPlan, id_of, key_of
from fakedist.sweep.point_rows import judge, make_row
from fakedist.sweep.ranking import rank_rows
from fakedist.sweep.space import Point, Scalar, Space
from fakedist.sweep.sweep_directory import RUNS_NAME, SweepJournal, files_directory, rank_directory

#: One skipped point in this many runs, to check that the axis is monotone.
_ONE_CHECKED_OF = 10


class Wait(enum.Enum):
    """What a source says if it has no point to run now."""

    #: The next point depends on a row that is still to come.
    FOR_A_ROW = "for a row"
    #: There are no more points.
    NO_MORE = "no more"


class Source(Protocol):
    """Where points come from."""

    def next(self) -> PointRun | Wait:
        """The next point to run."""
        ...

    def done(self, run: PointRun, row: Row) -> None:
        """Take in what came of a point."""
        ...


class ListedPoints:
    """Points that all run.

    Args:
        runs: What they run.
    """

    def __init__(self, runs: Sequence[PointRun]) -> None:
        self._left = deque(runs)

    def next(self) -> PointRun | Wait:
        """The next point to run."""
        return self._left.popleft() if self._left else Wait.NO_MORE

    def done(self, run: PointRun, row: Row) -> None:
        """Nothing depends on it."""


class MonotonePoints:
    """The points of a space with monotone axes. A point waits for the one before it on each such axis.

    Points beyond one that did not fit are not run.

    Args:
        space: The space.
        runs: What its points run.

    Attributes:
        skipped: What was not run, each with the point that did not fit.
    """

    def __init__(self, space: Space, runs: Sequence[PointRun]) -> None:
        self._runs = {run.point.values: run for run in runs}
        self._before = {run.point.values: self._neighbours(space, run.point) for run in runs}
        self._after: dict[tuple[tuple[str, Scalar], ...], list[PointRun]] = defaultdict(list)
        for run in runs:
            for values in self._before[run.point.values]:
                self._after[values].append(run)
        self._num_missing = {values: len(before) for values, before in self._before.items()}
        self._ready = deque(run for run in runs if not self._before[run.point.values])
        self._too_large: dict[tuple[tuple[str, Scalar], ...], str] = {}
        self._num_left = len(runs)
        self.skipped: list[tuple[PointRun, str]] = []

    def next(self) -> PointRun | Wait:
        """The next point to run."""
        if self._ready:
            return self._ready.popleft()
        return Wait.FOR_A_ROW if self._num_left else Wait.NO_MORE

    def done(self, run: PointRun, row: Row) -> None:
        """Let the points after it run, or skip them."""
        self._resolve(run, row.label if row.status is Status.DOES_NOT_FIT else "")

    def _resolve(self, run: PointRun, too_large: str) -> None:
        todo = [(run, too_large)]
        while todo:
            one, why = todo.pop()
            self._num_left -= 1
            if why:
                self._too_large[one.point.values] = why
            for after in self._after[one.point.values]:
                self._num_missing[after.point.values] -= 1
                if self._num_missing[after.point.values]:
                    continue
                whys = [self._too_large.get(values, "") for values in self._before[after.point.values]]
                if beyond := next(filter(None, whys), ""):
                    self.skipped.append((after, beyond))
                    todo.append((after, beyond))
                else:
                    self._ready.append(after)

    def _neighbours(self, space: Space, point: Point) -> list[tuple[tuple[str, Scalar], ...]]:
        """The next lower point of the space on each monotone axis."""
        found = []
        for at, axis in enumerate(space.axes):
            if not axis.is_monotone:
                continue
            name, value = point.values[at]
            lower = axis.values[: axis.values.index(value)]
            candidates = ((*point.values[:at], (name, each), *point.values[at + 1 :]) for each in reversed(lower))
            found += [next((each for each in candidates if each in self._runs), ())]
        return [each for each in found if each]


def sample_to_check(skipped: Sequence[tuple[PointRun, str]], seed: int) -> list[PointRun]:
    """Some of the points that were skipped: one in ten, and at least one."""
    if not skipped:
        return []
    number = -(-len(skipped) // _ONE_CHECKED_OF)
    return [run for run, _ in random.Random(seed).sample(list(skipped), number)]


@dataclass
class _Run:
    """The ranks of one run, which several points may share."""

    key: str
    run: PointRun
    results: dict[int, RankResult]
    every_stage: bool
    points: list[tuple[PointRun, str]] = field(default_factory=list)
    is_running: bool = False
    first_tries: dict[int, str] = field(default_factory=dict)


class SweepRunner:
    """Runs points and writes down what comes of them.

    Args:
        plan: The sweep.
        directory: Its directory, which is locked.
        journal: Its journal.
        ground: What all points have in common.
        executor: Where ranks run.
        finished: Called with each row as it comes, and whether it was known before.
        limit_bytes: Host memory of one rank's processes that ends it; None for no limit.
    """

    def __init__(
        self,
        plan: SweepPlan,
        directory: Path,
        journal: SweepJournal,
        *,
        ground: Ground,
        executor: Executor,
        finished: Callable[[Row, bool], None],
        limit_bytes: int | None = None,
    ) -> None:
        self._plan, self._directory, self._journal = plan, directory, journal
        self._ground, self._executor, self._finished = ground, executor, finished
        self._limit_bytes = limit_bytes
        self._runs: dict[str, _Run] = {}
        self._ready: deque[tuple[_Run, int]] = deque()
        self._in_flight: dict[str, tuple[_Run, int]] = {}
        self._source: Source = ListedPoints([])
        self._checked: set[str] = set()
        self._ids: set[str] = set()
        self._done: set[str] = set()

    @property
    def rows(self) -> list[Row]:
        """The rows of this sweep until now."""
        return [row for row_id, row in self._journal.known.rows.items() if row_id in self._ids]

    def id_of(self, run: PointRun) -> str:
        """The ID of a point's row."""
        return id_of(key_of(run, self._ground), run.pricing, self._plan)

    def run_points(self, runs: Sequence[PointRun]) -> str:
        """Run points, those beyond a point that did not fit left out, and a sample of these to check.

        Returns:
            What the check found wrong, in words; empty if nothing.
        """
        self._ids |= {self.id_of(run) for run in runs}
        if not any(axis.is_monotone for axis in self._plan.space.axes):
            self.run_source(ListedPoints(runs))
            return ""
        source = MonotonePoints(self._plan.space, runs)
        self.run_source(source)
        for run, beyond in source.skipped:
            self._skip(run, beyond)
        sample = sample_to_check(source.skipped, self._plan.seed)
        self._checked |= {self.id_of(run) for run in sample}
        self.run_source(ListedPoints(sample))
        fitting = [row for row in self.rows if row.is_check and row.status in (Status.FITS, Status.MAY_NOT_FIT)]
        if not fitting:
            return ""
        left = [run for run, _ in source.skipped if self.id_of(run) not in self._checked]
        self.run_source(ListedPoints(left))
        names = ", ".join(axis.name for axis in self._plan.space.axes if axis.is_monotone)
        return f"{names} not monotone: {fitting[0].label} fits, beyond a point that does not; every point ran"

    def run_source(self, source: Source) -> None:
        """Run the points of a source to the last.

        Raises:
            FakedistError: The executor cannot run anything, or what a point is priced for is not valid.
            OSError: The disk is full.
        """
        self._source = source
        for result in self._executor.run(self._tasks()):
            self._take(result)

    def run_every_stage(self) -> None:
        """Run every pipeline stage of the best points."""
        if self._plan.ranks.which != "stages":
            return
        best = [each.row for each in rank_rows(self.rows, self._plan.headroom).ranked][: self._plan.ranks.num_best]
        for row in best:
            one = self._runs.get(row.key)
            if row.has_every_stage or one is None:
                continue
            one.every_stage = True
            one.points = [each for each in one.points if each[1] == row.id]
            self._advance(one)
        self.run_source(ListedPoints([]))

    def thin(self) -> None:
        """Delete the run directories of all but the best points, if the plan asks for that."""
        self._thin({folder.name for folder in (self._directory / RUNS_NAME).glob("*")})

    def _thin(self, keys: Set[str]) -> None:
        """Delete those of some runs that are not among the best."""
        if (number := self._plan.num_kept) is None:
            return
        if self._plan.ranks.which == "stages":
            number = max(number, self._plan.ranks.num_best or 0)
        kept = {each.row.key for each in rank_rows(self.rows, self._plan.headroom).ranked[:number]}
        kept |= {one.key for one in self._runs.values() if one.is_running}
        for key in keys - kept:
            shutil.rmtree(self._directory / RUNS_NAME / key, ignore_errors=True)

    def _tasks(self) -> Iterator[Task | None]:
        """What the executor runs next. None while the next task depends on a result."""
        while True:
            if self._ready:
                yield self._task(*self._ready.popleft())
                continue
            found = self._source.next()
            if isinstance(found, PointRun):
                self._admit(found)
            elif self._in_flight:
                yield None
            elif found is Wait.NO_MORE:
                return
            else:
                raise AssertionError("points wait for each other")

    def _admit(self, run: PointRun) -> None:
        """Begin a point, unless it is known."""
        key, row_id = key_of(run, self._ground), self.id_of(run)
        self._ids.add(row_id)
        one = self._runs.get(key)
        if one is None:
            all_stages = self._plan.ranks.which == "stages" and self._plan.ranks.num_best is None
            one = self._runs[key] = _Run(key, run, self._known_results(key), all_stages)
        known = self._journal.known.rows.get(row_id)
        if known is not None and _stands(known) and not (one.every_stage and not known.has_every_stage):
            one.points.append((run, row_id))
            self._finished(known, True)
            self._source.done(run, known)
            return
        one.points.append((run, row_id))
        self._advance(one)

    def _known_results(self, key: str) -> dict[int, RankResult]:
        """How ranks ended in an earlier session, if their runs can still be read."""
        return {
            rank: result
            for rank, result in self._journal.known.ranks.get(key, {}).items()
            if result.outcome is not Outcome.ERROR
            and (result.kind is not RankKind.RAN or (self._directory / result.directory / MANIFEST_NAME).exists())
        }

    def _advance(self, one: _Run) -> None:
        """Run the next rank of a run, or make its rows."""
        if one.is_running:
            return
        rank = next_rank(self._plan, one.results, every_stage=one.every_stage)
        if rank is None:
            self._finish(one)
        else:
            one.is_running = True
            self._ready.append((one, rank))

    def _task(self, one: _Run, rank: int) -> Task:
        files = files_directory(self._directory, one.key)
        one.run.write_files(files)
        job = one.run.placed(files)
        before = [str(self._directory / each.directory) for each in one.results.values() if each.directory]
        job = dataclasses.replace(job, rank=rank, tapes=(*job.tapes, *before))
        directory = rank_directory(self._directory, one.key, rank)
        key = f"{one.key}-rank{rank}{'-again' if rank in one.first_tries else ''}"
        self._in_flight[key] = (one, rank)
        return Task(
            key=key,
            job=job,
            directory=directory.parent if job.with_peers else directory,
            memory_limit_bytes=self._limit_bytes,
        )

    def _take(self, result: TaskResult) -> None:
        """Take in how a rank ended."""
        one, rank = self._in_flight.pop(result.key)
        if result.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        if result.is_accident and rank not in one.first_tries:
            one.first_tries[rank] = result.failure
            self._ready.append((one, rank))
            return
        one.is_running = False
        directory = rank_directory(self._directory, one.key, rank)
        judged = judge(result, rank, directory, self._directory, self._plan.context_bytes)
        judged = dataclasses.replace(judged, first_try=one.first_tries.get(rank, ""))
        self._journal.add_rank(one.key, judged)
        one.results[rank] = judged
        self._advance(one)

    def _finish(self, one: _Run) -> None:
        """Make the rows of a run's points that have none, or had one of fewer stages."""
        results = list(one.results.values())
        for run, row_id in one.points:
            known = self._journal.known.rows.get(row_id)
            every = len(results)
            if known is not None and _stands(known) and len(known.ranks) >= every:
                continue
            row = make_row(run, (row_id, one.key), results, self._plan, self._directory)
            row = dataclasses.replace(row, is_check=row_id in self._checked)
            self._journal.add_row(row)
            self._finished(row, False)
            self._source.done(run, row)
        self._done.add(one.key)
        self._thin(self._done)  # an earlier session's other runs may still make rows, priced anew

    def _skip(self, run: PointRun, beyond: str) -> None:
        """Write down that a point was not run, unless it ran before."""
        key, row_id = key_of(run, self._ground), self.id_of(run)
        known = self._journal.known.rows.get(row_id)
        if known is not None and _stands(known):
            return
        reason = f"{beyond} does not fit"
        row = Row(
            id=row_id, key=key, values=run.point.values, pricing=run.pricing, status=Status.SKIPPED, reason=reason
        )
        self._journal.add_row(row)
        self._finished(row, False)


def next_rank(plan: SweepPlan, results: dict[int, RankResult], *, every_stage: bool) -> int | None:
    """The rank of a point that runs next; None if the point is done.

    Args:
        plan: The sweep.
        results: How the ranks that ran ended.
        every_stage: Whether every pipeline stage runs, or only the first and the last.
    """
    if any(each.kind is not RankKind.RAN for each in results.values()):
        return None
    if plan.ranks.which == "listed":
        return next((rank for rank in plan.ranks.ranks if rank not in results), None)
    if 0 not in results:
        return 0
    stages = results[0].pipeline
    wanted = stages if every_stage else stages[-1:]  # in order: a stage may need what the one before it sent
    return next((rank for rank in wanted if rank not in results), None)


def _stands(row: Row) -> bool:
    """Whether a row of an earlier session stands: its point was run, and could start."""
    return row.status is not Status.SKIPPED and not any(each.outcome is Outcome.ERROR for each in row.ranks)
