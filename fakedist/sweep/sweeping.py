"""Runs a sweep from its plan to its table: asks an executor for the ranks of each point, and makes rows of the results.

A sweep that was ended goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from fakedist.launcher import launching
from fakedist.launcher.executors.task import Executor, Task, TaskResult
from fakedist.launcher.machine import ended_like_interrupted
from fakedist.options import Job
from fakedist.rundir.directory import MANIFEST_NAME, SOURCES_NAME
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.sources import read_sources
from fakedist.sweep.command import PointRun
from fakedist.sweep.plan import Ground, SweepPlan, find_ground, id_of, key_of
from fakedist.sweep.point_rows import (
    RankKind,
    RankResult,
    Row,
    Status,
    StepEstimator,
    estimate_step,
    judge,
    make_row,
)
from fakedist.sweep.pruning import Pruning
from fakedist.sweep.ranking import rank_rows
from fakedist.sweep.sweep_directory import (
    ABOUT_NAME,
    FILES_NAME,
    JOURNAL_NAME,
    PAGE_NAME,
    RUNS_NAME,
    TABLE_NAME,
    About,
    Sweep,
    SweepJournal,
    earlier_ground,
    files_directory,
    locked_directory,
    open_sweep,
    rank_directory,
    replace_file,
    write_about,
)

_NAMED = 4
_PRUNED_BY = {Status.PRUNED: "pruned by memory", Status.SLOWER: "pruned by time"}


@dataclass(frozen=True)
class SweepListener:
    """Callbacks while a sweep runs. ``finished`` gets each row, and whether it was known before."""

    begins: Callable[[int], None]
    finished: Callable[[Row, bool], None]
    say: Callable[[str], None]


def run_sweep(
    plan: SweepPlan,
    directory: Path,
    executor: Executor,
    listener: SweepListener,
    *,
    fresh: bool = False,
    limit_bytes: int | None = None,
    check: Callable[[Job], None] | None = None,
    estimate: StepEstimator = estimate_step,
) -> Sweep:
    """Run a sweep. The executor is closed in the end.

    ``limit_bytes`` of host memory end one rank's processes; None for no limit. ``check`` sees the first job before
    anything is written; ``estimate`` prices the step of each point.

    Raises:
        FakedistError: The sweep cannot run: a point is not valid, the directory is in use, the machine lacks something.
        KeyboardInterrupt: It was interrupted. The table has what was known by then.
        OSError: The disk is full.
    """
    with closing(executor):
        runs = [plan.command.at(plan.space, point) for point in plan.points()]
        (check or launching.check)(runs[0].job)
        with locked_directory(directory) as locked:
            if fresh:
                _empty(locked)
            journal = SweepJournal(locked / JOURNAL_NAME)
            runner = SweepRunner(
                plan,
                locked,
                journal,
                ground=find_ground(runs[0].job),
                executor=executor,
                finished=listener.finished,
                limit_bytes=limit_bytes,
                estimate=estimate,
            )
            try:
                with ended_like_interrupted():
                    _say_what_changed(runner, journal, locked, listener)
                    write_about(locked, _about(plan, [runner.id_of(run) for run in runs], runner.ground))
                    listener.begins(len(runs))
                    runner.run_points(runs)
                    for (status, axis), why in runner.pruning.refuted.items():
                        listener.say(f"no point was {_PRUNED_BY[status]} along {axis}: {why}")
                    runner.run_every_stage()
                    if not plan.keeps_runs:
                        shutil.rmtree(locked / RUNS_NAME, ignore_errors=True)
            finally:
                executor.close()  # before the table is made, which takes a while
                journal.close()
                if (locked / ABOUT_NAME).exists():
                    write_results(locked)
            return open_sweep(locked)


def write_results(directory: Path) -> Sweep:
    """Write the table and the page of a sweep from its journal, and return it."""
    from fakedist.report.render.html import report_page  # plotly takes a while to import
    from fakedist.sweep.sheets import sweep_report

    sweep = open_sweep(directory)
    sweep.write_table()
    replace_file(sweep.path / PAGE_NAME, report_page(sweep_report(sweep, folder=sweep.path)))
    return sweep


def _about(plan: SweepPlan, points: list[str], ground: Ground) -> About:
    program = plan.command.program
    return About(
        command=list(sys.argv),
        program=shlex.join([*(["-m"] if program.is_module else []), program.target, *program.arguments]),
        axes={axis.name: list(axis.values) for axis in plan.space.axes},
        ranks=plan.ranks.text,
        headroom=plan.headroom,
        points=points,
        ground=dict(ground.parts),
        files=dict(ground.files),
    )


def _say_what_changed(runner: SweepRunner, journal: SweepJournal, directory: Path, listener: SweepListener) -> None:
    if not journal.known.rows:
        return
    if changed := runner.ground.differences(earlier_ground(directory)):
        listener.say(f"every point runs again, as these changed: {_first(changed)}")
    elif changed := runner.changed_sources():
        listener.say(f"the points that read these files run again, as they changed: {_first(changed)}")


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _empty(directory: Path) -> None:
    for name in (RUNS_NAME, FILES_NAME):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in (JOURNAL_NAME, TABLE_NAME):
        (directory / name).unlink(missing_ok=True)


@dataclass
class _Run:
    key: str
    run: PointRun
    results: dict[int, RankResult]
    every_stage: bool
    points: list[tuple[PointRun, str]] = field(default_factory=list)
    is_running: bool = False
    first_tries: dict[int, str] = field(default_factory=dict)


class SweepRunner:
    """Runs points and writes down their results.

    ``finished`` gets each row as it comes, and whether it was known before. For ``limit_bytes`` and
    ``estimate`` see :func:`run_sweep`.
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
        estimate: StepEstimator = estimate_step,
    ) -> None:
        self._plan, self._directory, self._journal = plan, directory, journal
        self.ground, self._executor, self._finished = ground, executor, finished
        self._limit_bytes, self._estimate = limit_bytes, estimate
        self._runs: dict[str, _Run] = {}
        self._ready: deque[tuple[_Run, int]] = deque()
        self._in_flight: dict[str, tuple[_Run, int]] = {}
        self._left: deque[PointRun] = deque()
        self.pruning = Pruning(plan)
        self._pruned: list[tuple[PointRun, Status]] = []
        self._ids: set[str] = set()
        self._changes: dict[str, list[str]] = {}

    @property
    def rows(self) -> list[Row]:
        """The rows of this sweep until now."""
        return [row for row_id, row in self._journal.known.rows.items() if row_id in self._ids]

    def id_of(self, run: PointRun) -> str:
        """The ID of a point's row."""
        return id_of(key_of(run, self.ground), run.pricing, self._plan)

    def run_points(self, runs: Sequence[PointRun]) -> None:
        """Run points to the last.

        Raises:
            FakedistError: The executor cannot run anything, or what a point is priced for is not valid.
            OSError: The disk is full.
        """
        self._ids |= {self.id_of(run) for run in runs}
        self._left.extend(self.pruning.in_order(runs))
        for result in self._executor.run(self._tasks()):
            self._take(result)

    def run_every_stage(self) -> None:
        """Run every pipeline stage of the best points."""
        if self._plan.ranks.which != "stages":
            return
        best = [entry.row for entry in rank_rows(self.rows, self._plan.headroom).ranked][: self._plan.ranks.num_best]
        for row in best:
            one = self._runs.get(row.key)
            if row.has_every_stage or one is None:
                continue
            one.every_stage = True
            one.points = [point for point in one.points if point[1] == row.id]
            self._advance(one)
        self.run_points([])

    def _tasks(self) -> Iterator[Task | None]:
        """The executor's tasks in order. None while the next one depends on a result."""
        while True:
            if self._ready:
                yield self._task(*self._ready.popleft())
                continue
            if self._left:
                running = [run for one, _ in self._in_flight.values() for run, _ in one.points]
                free = (run for run in self._left if not self.pruning.may_depend(run, running))
                self._left.remove(run := next(free, self._left[0]))
                self._admit(run)
            elif self._in_flight:
                yield None
            else:
                return

    def _admit(self, run: PointRun) -> None:
        key = key_of(run, self.ground)
        row_id = self.id_of(run)
        self._ids.add(row_id)
        one = self._runs.get(key)
        if one is None:
            all_stages = self._plan.ranks.which == "stages" and self._plan.ranks.num_best is None
            one = self._runs[key] = _Run(key, run, self._known_results(key), all_stages)
        known = self._journal.known.rows.get(row_id)
        if self._stands(known) and not (one.every_stage and not known.has_every_stage):
            one.points.append((run, row_id))
            if known.values != run.point.values:  # an axis has another name
                known = dataclasses.replace(known, values=run.point.values)
                self._journal.add_row(known)
            self._end(known, True)
            return
        if pruned := self.pruning.row_without_run(run, row_id=row_id, key=key):
            self._pruned.append((run, pruned.status))
            self._journal.add_row(pruned)
            self._finished(pruned, False)
            return
        one.points.append((run, row_id))
        self._advance(one)

    def _known_results(self, key: str) -> dict[int, RankResult]:
        return {
            rank: result
            for rank, result in self._journal.known.ranks.get(key, {}).items()
            if result.outcome is not Outcome.ERROR
            and not self._changed(result)
            and (result.kind is not RankKind.RAN or result.shares.keys() >= set(self._plan.shares))
            and (result.kind is not RankKind.RAN or (self._directory / result.directory / MANIFEST_NAME).exists())
        }

    def _advance(self, one: _Run) -> None:
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
        before = [str(self._directory / result.directory) for result in one.results.values() if result.directory]
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
        one, rank = self._in_flight.pop(result.key)
        if result.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        if result.is_accident and rank not in one.first_tries:
            one.first_tries[rank] = result.failure
            self._ready.append((one, rank))
            return
        one.is_running = False
        directory = rank_directory(self._directory, one.key, rank)
        judged = judge(result, rank, directory, self._directory, self._plan.context_bytes, shares=self._plan.shares)
        is_listed = judged.kind in (RankKind.RAN, RankKind.OUT_OF_MEMORY) and not one.run.job.with_peers
        listed = read_sources(directory / SOURCES_NAME) if is_listed else None  # else any file may matter
        digest = self._journal.add_sources(self.ground.read(listed))
        judged = dataclasses.replace(judged, first_try=one.first_tries.get(rank, ""), sources=digest)
        self._journal.add_rank(one.key, judged)
        one.results[rank] = judged
        self._advance(one)

    def _finish(self, one: _Run) -> None:
        results = list(one.results.values())
        for run, row_id in one.points:
            known = self._journal.known.rows.get(row_id)
            every = len(results)
            if self._stands(known) and len(known.ranks) >= every:
                continue
            row = make_row(
                run, results, self._plan, self._directory, row_id=row_id, key=one.key, estimate=self._estimate
            )
            command = run.command(files_directory(self._directory, one.key))
            row = dataclasses.replace(row, command=command, world_size=run.job.world_size)
            self._journal.add_row(row)
            self._end(row, False)

    def _end(self, row: Row, was_known: bool) -> None:
        refuted = self.pruning.take(row)
        self._left.extend(run for run, status in self._pruned if status in refuted)
        self._finished(row, was_known)

    def _stands(self, row: Row | None) -> TypeGuard[Row]:
        """True if a row of an earlier session is valid: its point was run, started, and would read the same files."""
        if row is None or row.status in (Status.SKIPPED, Status.PRUNED, Status.SLOWER):
            return False
        return not any(result.outcome is Outcome.ERROR or self._changed(result) for result in row.ranks)

    def changed_sources(self) -> list[str]:
        """The files that changed since a rank of an earlier session read them."""
        results = (result for ranks in self._journal.known.ranks.values() for result in ranks.values())
        return sorted(
            {path for digest in {result.sources for result in results} for path in self._changed_files(digest)}
        )

    def _changed(self, result: RankResult) -> bool:
        return result.sources not in self._journal.known.sources or bool(self._changed_files(result.sources))

    def _changed_files(self, digest: str) -> list[str]:
        if digest not in self._changes:
            read = self._journal.known.sources.get(digest)
            self._changes[digest] = [] if read is None else self.ground.changed(read)
        return self._changes[digest]


def next_rank(plan: SweepPlan, results: dict[int, RankResult], *, every_stage: bool) -> int | None:
    """The rank of a point that runs next; None if the point is done."""
    if any(result.kind is not RankKind.RAN for result in results.values()):
        return None
    if plan.ranks.which == "listed":
        return next((rank for rank in plan.ranks.ranks if rank not in results), None)
    if 0 not in results:
        return 0
    stages = results[0].pipeline
    wanted = stages if every_stage else stages[-1:]  # in order: a stage may need what the one before it sent
    return next((rank for rank in wanted if rank not in results), None)
