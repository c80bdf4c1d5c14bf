from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fakedist.errors import RunDirectoryError
from fakedist.launcher.executors.task import Task, TaskResult
from fakedist.launcher.ranks import RanksTogether
from fakedist.options import Job
from fakedist.rundir.directory import TAPE_NAME, JournalWriter, new_manifest
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.tape import GroupRecord, Tape

JOB = Job(world_size=16, rank=0, target="train.py")


class Executor:
    """Begins all tasks that are ready, then ends the last of them: ``LocalExecutor`` with enough cores.

    ``slow`` ranks begin their tape only after a task was asked for twice; ``broken`` ones cannot start. ``log`` has its
    actions, and the times that no task was ready.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.slow: dict[str, int] = {}
        self.broken: set[str] = set()
        self.tapes: dict[str, list[str]] = {}
        self.is_closed = False

    def run(self, tasks: Iterable[Task | None]) -> Iterator[TaskResult]:
        coming, running = iter(tasks), []
        while True:
            while (task := next(coming, None)) is not None:
                self.log.append(f"start {task.key}")
                self.tapes[task.key] = [Path(path).name for path in task.job.tapes]
                running.append(task)
                self._begin(task)
            if not running:
                return
            if slow := [each for each in running if self.slow.get(each.key)]:
                self.log.append("wait")
                for each in slow:
                    self.slow[each.key] -= 1
                    self._begin(each)
                continue
            ended = running.pop()
            self.log.append(f"end {ended.key}")
            yield TaskResult(
                key=ended.key,
                outcome=Outcome.ERROR if ended.key in self.broken else Outcome.STOPPED,
                code=0,
                failure="",
                output="",
                directory=ended.directory,
                host="",
                worker="",
                wall_s=0.0,
                peak_rss_bytes=0,
            )

    def close(self) -> None:
        self.is_closed = True

    def _begin(self, task: Task) -> None:
        if self.slow.get(task.key) or task.key in self.broken:
            return
        task.directory.mkdir(parents=True)
        new_manifest(task.directory, task.job)
        JournalWriter(task.directory / TAPE_NAME).append(GroupRecord(0, (0, 1), 0))


@pytest.fixture
def executor() -> Executor:
    return Executor()


def test_each_rank_has_the_tapes_of_those_before_it_though_they_still_run(executor: Executor, tmp_path: Path) -> None:
    given = {9: Tape(tmp_path / "given", 9)}
    together = RanksTogether(JOB, tmp_path, (4, 0, 1), given, executor=executor)
    assert [together.result(rank).key for rank in (4, 0, 1)] == ["4", "0", "1"]
    assert executor.log == ["start 4", "start 0", "start 1", "end 1", "end 0", "end 4"]
    assert executor.tapes == {"4": ["given"], "0": ["given", "rank4"], "1": ["given", "rank4", "rank0"]}


def test_a_rank_starts_when_the_one_before_it_has_begun_its_tape_or_cannot_start(
    executor: Executor, tmp_path: Path
) -> None:
    executor.slow = {"0": 2}
    together = RanksTogether(JOB, tmp_path / "slow", (0, 1), {}, executor=executor)
    together.result(0)
    assert executor.log == ["start 0", "wait", "wait", "start 1", "end 1", "end 0"]
    executor.broken = {"0"}
    together = RanksTogether(JOB, tmp_path, (0, 1), {}, executor=executor)
    assert together.result(0).outcome is Outcome.ERROR
    assert 1 in together
    together.result(1)
    assert 1 not in together
    assert executor.tapes["1"] == []
    together.close()
    assert executor.is_closed


def test_the_tape_of_an_earlier_run_is_not_followed(executor: Executor, tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir(parents=True)
    new_manifest(tmp_path / "rank0", JOB)
    JournalWriter(tmp_path / "rank0" / TAPE_NAME).append(GroupRecord(0, (0, 1), 0))
    RanksTogether(JOB, tmp_path, (0,), {}, executor=executor)
    assert not (tmp_path / "rank0").exists()


def test_a_directory_of_something_else_is_refused_before_any_rank_starts(executor: Executor, tmp_path: Path) -> None:
    (tmp_path / "rank1").mkdir()
    (tmp_path / "rank1" / "thesis.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="neither empty nor a run directory"):
        RanksTogether(JOB, tmp_path, (0, 1), {}, executor=executor)
    assert executor.log == []
