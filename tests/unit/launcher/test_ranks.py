from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakedist.errors import RecordingError, RunDirectoryError
from fakedist.launcher import launching, ranks
from fakedist.launcher.executors.task import Task, TaskResult
from fakedist.launcher.launching import Streams
from fakedist.launcher.ranks import RanksTogether, exit_code, profile_ranks, profile_with_peers
from fakedist.options import Job
from fakedist.rundir.directory import TAPE_NAME, JournalWriter, create_run_directory, new_manifest
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.tape import Awaited, GroupRecord, Guess, SentRecord, Tape

JOB = Job(world_size=16, rank=0, target="train.py")


def made_run(path: Path) -> None:
    with create_run_directory(path, force=False) as made:
        new_manifest(made, JOB)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that were run; rank 2 cannot begin, rank 3 is interrupted."""
    jobs: list[Job] = []

    def profile(job: Job, output: Path, force: bool, streams: Streams) -> tuple[Path, Ending]:
        jobs.append(job)
        if job.rank == 2:
            raise RecordingError("no memory")
        return output, Ending(Outcome.INTERRUPTED, 130) if job.rank == 3 else Ending(Outcome.STOPPED, 0)

    monkeypatch.setattr(launching, "profile", profile)
    return jobs


def test_each_rank_has_the_tapes_of_those_before(asked: list[Job], tmp_path: Path) -> None:
    runs = list(profile_ranks(JOB, (4, 2, 0, 1), tmp_path, False, Streams()))
    assert [run.ending.outcome for run in runs] == ["stopped", "error", "stopped", "stopped"]
    names = [[Path(tape).name for tape in job.tapes] for job in asked]
    assert names == [[], ["rank4"], ["rank4"], ["rank4", "rank0"]]
    assert exit_code(runs) == 1
    asked.clear()
    later = {1: (0, 4), 2: (8,)}
    more = profile_ranks(JOB, (0,), tmp_path / "more", False, Streams(), more=lambda runs: later.get(len(runs), ()))
    assert [run.rank for run in more] == [0, 4, 8]  # the runs say which others run
    assert [len(job.tapes) for job in asked] == [0, 1, 2]


def test_an_interrupt_ends_all(asked: list[Job], tmp_path: Path) -> None:
    runs = list(profile_ranks(JOB, (0, 3, 5), tmp_path, False, Streams()))
    assert [run.rank for run in runs] == [0, 3]
    assert exit_code(runs) == 130


def test_ranks_replace_the_run_of_one_rank_if_they_may(asked: list[Job], tmp_path: Path) -> None:
    made_run(tmp_path / "runs" / "rank5")
    with pytest.raises(RunDirectoryError, match="rank5 holds a run already"):
        list(profile_ranks(JOB, (0, 5), tmp_path / "runs", False, Streams()))
    run = tmp_path / "run"
    made_run(run)
    with pytest.raises(RunDirectoryError, match="run holds a run already") as caught:
        list(profile_ranks(JOB, (0, 5), run, False, Streams()))
    assert caught.value.hint == "add --force to replace it, or choose another -o"
    (run / "thesis.tex").write_text("three years")
    with pytest.raises(RunDirectoryError, match=r"thesis\.tex"):
        list(profile_ranks(JOB, (0, 5), run, True, Streams()))
    assert {path.name for path in run.iterdir()} == {"run.json", "thesis.tex"}
    assert asked == []
    (run / "thesis.tex").unlink()
    assert [each.rank for each in profile_ranks(JOB, (0, 5), run, True, Streams())] == [0, 5]
    assert not (run / "run.json").exists()


class Stages:
    """Two ranks with stages by turns, each of which waits for the one before it: ``launching.profile`` of such a job.

    There are ``num_stages`` of both ranks together. Stages from ``first`` on wait; 0 waits for a message never sent.
    """

    def __init__(self, num_stages: int, first: int) -> None:
        self.order: list[int] = []
        self._num_stages = num_stages
        self._first = first

    def profile(self, job: Job, output: Path, force: bool, streams: Streams) -> tuple[Path, Ending]:
        assert force == (job.rank in self.order)
        self.order.append(job.rank)
        arrived = sum(1 for path in job.tapes for _ in Tape(Path(path), 1 - job.rank).sent_to(job.rank))
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        tape = JournalWriter(output / TAPE_NAME)
        tape.append(GroupRecord(0, (0, 1), 0))
        for stage in range(job.rank, self._num_stages, 2):
            nth = (stage - self._first) // 2 + 1
            if stage >= self._first and arrived < nth:
                tape.append(Awaited("send_object_list", 1 - job.rank, ((0, 1), 0), job.rank, None, nth))
                return output, Ending(Outcome.EXCEPTION, 1, "WorldError: it waits")
            tape.append(SentRecord(0, 1 - job.rank, "send_object_list", 0, 0, tensors=[], objects=[b"shapes"]))
        return output, Ending(Outcome.FINISHED, 0)


def run_stages(stages: Stages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[dict[int, str], list[str]]:
    """The end of each of two ranks, and the messages meanwhile."""
    monkeypatch.setattr(launching, "profile", stages.profile)
    said: list[str] = []
    runs = list(profile_ranks(JOB, (0, 1), tmp_path / "runs", False, Streams(say=said.append)))
    assert sorted(run.rank for run in runs) == [0, 1]
    return {run.rank: run.ending.outcome for run in runs}, said


def test_a_rank_runs_again_when_the_tape_of_a_later_one_has_what_it_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stages = Stages(num_stages=6, first=1)
    outcomes, said = run_stages(stages, monkeypatch, tmp_path)
    assert outcomes == {0: "finished", 1: "finished"}
    assert stages.order == [0, 1, 0, 1, 0, 1]
    assert said[1] == "rank 0 waits for rank 1, and runs again once that tape has what it needs"
    assert said[4] == "rank 0 runs again: the tape of rank 1 has what it waited for"


def test_ranks_that_wait_for_each_other_end_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stages = Stages(num_stages=4, first=0)
    outcomes, _ = run_stages(stages, monkeypatch, tmp_path)
    assert outcomes == {0: "exception", 1: "exception"}
    assert stages.order == [0, 1]


def test_a_rank_that_waits_for_the_same_again_or_by_turns_is_not_run_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stages = Stages(num_stages=4, first=0)
    monkeypatch.setattr(Tape, "has", lambda tape, awaited, rank: True)
    outcomes, _ = run_stages(stages, monkeypatch, tmp_path / "same")
    assert outcomes == {0: "exception", 1: "exception"}
    assert stages.order == [0, 1, 0, 1]
    stages = Stages(num_stages=4, first=0)
    by_turns = (Awaited("send_object_list", 1, ((0, 1), 0), 0, None, nth) for nth in itertools.cycle((1, 2)))
    monkeypatch.setattr(Tape, "has", lambda tape, awaited, rank: len(stages.order) < 50)
    monkeypatch.setattr(Tape, "awaited", lambda tape: next(by_turns) if tape.rank == 0 else None)
    run_stages(stages, monkeypatch, tmp_path / "by turns")
    assert stages.order == [0, 1, 0, 0]


class Pipeline:
    """Stages in a row, each of which waits for the one before: ``launching.profile`` of such a job.

    With ``guesses``, a stage without its input fails after a guess. The rank ``never`` sends nothing.
    """

    def __init__(self, guesses: bool = False, never: int = -1) -> None:
        self.order: list[int] = []
        self._guesses = guesses
        self._never = never

    def profile(self, job: Job, output: Path, force: bool, streams: Streams) -> tuple[Path, Ending]:
        assert force == (job.rank in self.order)
        self.order.append(job.rank)
        have = {int(Path(path).name.removeprefix("rank")): Path(path) for path in job.tapes}
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        tape = JournalWriter(output / TAPE_NAME)
        before = job.rank - 1
        if before >= 0 and not (before in have and list(Tape(have[before], before).sent_to(job.rank))):
            call = Awaited("send_object_list", before, ((before, job.rank), 0), job.rank, None, 1)
            tape.append(Guess(call, "recv_object_list", "train.py:1", "''", True) if self._guesses else call)
            return output, Ending(Outcome.EXCEPTION, 1, "it waits")
        if job.rank != self._never:
            tape.append(GroupRecord(0, (job.rank, job.rank + 1), 0))
            tape.append(SentRecord(0, job.rank + 1, "send_object_list", 0, 0, tensors=[], objects=[b"shapes"]))
        return output, Ending(Outcome.FINISHED, 0)


def run_peers(
    pipeline: Pipeline, rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[Ending, list[str]]:
    """The end of a rank that runs with its peers, and the messages meanwhile."""
    monkeypatch.setattr(launching, "profile", pipeline.profile)
    said: list[str] = []
    job = dataclasses.replace(JOB, rank=rank, with_peers=True)
    found, ending = profile_with_peers(job, tmp_path / "runs", False, Streams(say=said.append))
    assert found == tmp_path / f"runs/rank{rank}"
    return ending, said


@pytest.mark.parametrize("guesses", [False, True])
def test_a_rank_with_peers_runs_those_that_it_waits_for_and_they_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, guesses: bool
) -> None:
    pipeline = Pipeline(guesses)
    ending, said = run_peers(pipeline, 3, monkeypatch, tmp_path)
    assert ending.code == 0
    assert pipeline.order == [3, 2, 1, 0, 1, 2, 3]
    assert said[0] == f"rank 3 waits for rank 2, which runs now, into {tmp_path}/runs/rank2"
    assert said[-1] == "rank 3 runs again: the tape of rank 2 has what it waited for"


@pytest.mark.parametrize(
    ("never", "rank", "code", "order"), [(-1, 0, 0, [0]), (1, 2, 1, [2, 1, 0, 1])], ids=["waits for none", "in vain"]
)
def test_a_rank_runs_alone_if_it_waits_for_no_other_and_is_left_as_it_was_if_a_peer_never_sends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, never: int, rank: int, code: int, order: list[int]
) -> None:
    pipeline = Pipeline(never=never)
    assert run_peers(pipeline, rank, monkeypatch, tmp_path)[0].code == code
    assert pipeline.order == order


def test_peers_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks, "MAX_PEERS", 3)
    pipeline = Pipeline()
    ending, said = run_peers(pipeline, 15, monkeypatch, tmp_path)
    assert ending.code == 1
    assert pipeline.order == [15, 14, 13, 12]
    assert said[-1] == "rank 12 waits for rank 11; 3 peers have run, which is the limit"


def test_a_rank_that_failed_for_itself_has_no_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pipeline = Pipeline(guesses=True)
    profile = pipeline.profile

    def does_not_fit(*how: Any) -> tuple[Path, Ending]:
        return profile(*how)[0], Ending(Outcome.OUT_OF_MEMORY, 4)

    monkeypatch.setattr(pipeline, "profile", does_not_fit)
    assert run_peers(pipeline, 5, monkeypatch, tmp_path)[0].code == 4
    assert pipeline.order == [5]


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
