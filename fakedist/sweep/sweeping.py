"""Runs a sweep from its plan to its table. A sweep that was ended goes on where it stopped."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fakedist.errors import SetupError, SweepError
from fakedist.launcher import launching
from fakedist.launcher.executors.task import Executor
from fakedist.launcher.interrupts import ended_like_interrupted
from fakedist.sweep.command import PointRun
from fakedist.sweep.opened import Sweep, open_sweep
from fakedist.sweep.outcomes import Row
from fakedist.sweep.plan import Ground, SweepPlan, find_ground
from fakedist.sweep.points import SweepRunner
from fakedist.sweep.space import Point, all_points
from fakedist.sweep.sweep_directory import (
    ABOUT_NAME,
    FILES_NAME,
    JOURNAL_NAME,
    RUNS_NAME,
    STORAGE_NAME,
    TABLE_NAME,
    About,
    SweepJournal,
    earlier_ground,
    locked_directory,
    write_about,
)

_NAMED = 4


@dataclass(frozen=True)
class Listener:
    """What is told while a sweep runs.

    Attributes:
        begins: The number of points.
        finished: Each row, and whether it was known before.
        say: Remarks.
    """

    begins: Callable[[int], None]
    finished: Callable[[Row, bool], None]
    say: Callable[[str], None]


def run_sweep(
    plan: SweepPlan,
    directory: Path,
    executor: Executor,
    listener: Listener,
    *,
    fresh: bool = False,
    limit_bytes: int | None = None,
) -> Sweep:
    """Run a sweep.

    Args:
        plan: The sweep.
        directory: Its directory. It is created if it does not exist.
        executor: Where its ranks run. It is closed in the end.
        listener: What is told while it runs.
        fresh: Whether points that ran before run again.
        limit_bytes: Host memory of one rank's processes that ends it; None for no limit.

    Raises:
        FakedistError: The sweep cannot run: a point is not valid, the directory is in use, the machine lacks something.
        KeyboardInterrupt: It was interrupted. The table has what was known by then.
        OSError: The disk is full.
    """
    with closing(executor):
        if plan.num_trials is not None:
            see_that_optuna_is_installed()
        runs = [plan.command.at(plan.space, point) for point in first_points(plan)]
        launching.check(runs[0].job)
        with locked_directory(directory) as place:
            if fresh:
                _empty(place)
            ground = find_ground(runs[0].job)
            journal = SweepJournal(place / JOURNAL_NAME)
            try:
                with ended_like_interrupted():
                    _run(plan, place, runs, (journal, ground, executor), listener=listener, limit_bytes=limit_bytes)
            finally:
                executor.close()  # before the table is made, which takes a while
                journal.close()
                if (place / ABOUT_NAME).exists():
                    write_results(place)
            return open_sweep(place)


def _run(
    plan: SweepPlan,
    directory: Path,
    runs: Sequence[PointRun],
    parts: tuple[SweepJournal, Ground, Executor],
    *,
    listener: Listener,
    limit_bytes: int | None,
) -> None:
    journal, ground, executor = parts
    _say_what_changed(journal, ground, directory, listener)
    runner = SweepRunner(
        plan,
        directory,
        journal,
        ground=ground,
        executor=executor,
        finished=listener.finished,
        limit_bytes=limit_bytes,
    )
    if plan.num_trials is not None:
        from fakedist.sweep.sampling import SampledPoints  # needs Optuna

        write_about(directory, _about(plan, None, ground))
        listener.begins(plan.num_trials)
        runner.run_source(SampledPoints(plan, directory))
    else:
        write_about(directory, _about(plan, [runner.id_of(run) for run in runs], ground))
        listener.begins(len(runs))
        if wrong := runner.run_points(runs):
            listener.say(wrong)
    runner.run_every_stage()
    runner.thin()


def first_points(plan: SweepPlan) -> list[Point]:
    """All points of the space; the first alone, if a sampler chooses them.

    Raises:
        SweepError: No point meets the conditions, or there are too many.
    """
    if plan.num_trials is None:
        return all_points(plan.space)
    first = next(plan.space.points(), None)
    if first is None:
        raise SweepError("no point meets the conditions", "change or leave out a condition")
    return [first]


def see_that_optuna_is_installed() -> None:
    """Check that a sampler can be used.

    Raises:
        SetupError: Optuna is not installed.
    """
    if importlib.util.find_spec("optuna") is None:
        raise SetupError("a sampler needs Optuna, which is not installed", "pip install fakedist[optuna]")


def write_results(directory: Path) -> Sweep:
    """Write the table and the page of a sweep from its journal, and return it."""
    from fakedist.sweep.page import write_sweep_page  # plotly takes a while to import

    sweep = open_sweep(directory)
    sweep.write_table()
    write_sweep_page(sweep)
    return sweep


def _about(plan: SweepPlan, points: list[str] | None, ground: Ground) -> About:
    program = plan.command.program
    return About(
        command=list(sys.argv),
        program=shlex.join([*(["-m"] if program.is_module else []), program.target, *program.arguments]),
        axes={axis.name: list(axis.values) for axis in plan.space.axes},
        ranks=plan.ranks.text,
        headroom=plan.headroom,
        points=points,
        ground=dict(ground.parts),
    )


def _say_what_changed(journal: SweepJournal, ground: Ground, directory: Path, listener: Listener) -> None:
    """Name what makes every point run again."""
    if not journal.known.rows or not (changed := ground.differences(earlier_ground(directory))):
        return
    named = ", ".join(changed[:_NAMED]) + (f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else "")
    listener.say(f"every point runs again, as these changed: {named}")


def _empty(directory: Path) -> None:
    for name in (RUNS_NAME, FILES_NAME):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in (JOURNAL_NAME, TABLE_NAME, STORAGE_NAME):
        (directory / name).unlink(missing_ok=True)
