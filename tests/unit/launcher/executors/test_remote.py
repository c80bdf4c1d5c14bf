from __future__ import annotations

import dataclasses
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from fakedist.errors import RunDirectoryError
from fakedist.launcher.executors import ray_cluster
from fakedist.launcher.executors.process import TaskProcesses
from fakedist.launcher.executors.ray_cluster import Handed, SharedMarks, pack, run_there, unpack
from fakedist.launcher.executors.task import Task, TaskResult
from fakedist.options import Job
from fakedist.rundir.outcome import Outcome


def task(directory: Path) -> Task:
    return Task(key="one", job=Job(world_size=8, rank=0, target="train.py"), directory=directory, cwd=directory.parent)


@pytest.fixture
def ran_in(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories in which tasks ran. Each run leaves one file."""
    directories: list[Path] = []

    def run(processes: TaskProcesses, given: Task) -> TaskResult:
        directories.append(given.directory)
        (given.directory / "tables").mkdir(parents=True)
        (given.directory / "tables/peak.parquet").write_bytes(b"peak")
        return dataclasses.replace(ray_cluster.failed(given, ""), outcome=Outcome.STOPPED, code=0)

    monkeypatch.setattr(TaskProcesses, "run", run)
    return directories


def test_a_shared_directory_is_written_in_place(tmp_path: Path, ran_in: list[Path]) -> None:
    given = task(tmp_path / "sweep" / "run")
    with ExitStack() as stack:
        handed = SharedMarks(stack).hand(given)
        assert (given.directory.parent / handed.mark).exists()
        result, packed = run_there(handed, {})
    assert (ran_in, packed, result.directory) == ([given.directory], b"", given.directory)
    assert [path.name for path in given.directory.parent.iterdir()] == ["run"]


def test_a_copy_of_the_mark_is_not_taken_for_a_shared_directory(tmp_path: Path, ran_in: list[Path]) -> None:
    given = task(tmp_path / "here" / "run")
    with ExitStack() as stack:
        handed = SharedMarks(stack).hand(given)
        shutil.copytree(tmp_path / "here", tmp_path / "there")
        there = dataclasses.replace(handed, task=task(tmp_path / "there" / "run"))
        _, packed = run_there(there, {})
    assert packed
    assert ran_in != [there.task.directory]


def test_a_directory_that_is_not_shared_comes_back(tmp_path: Path, ran_in: list[Path]) -> None:
    given = task(tmp_path / "run")
    result, packed = run_there(Handed(given, "no such mark", 1), {})
    assert ran_in != [given.directory]
    assert not ran_in[0].exists()
    assert result.directory == given.directory
    (given.directory / "old").mkdir(parents=True)
    unpack(packed, given.directory)
    assert [path.relative_to(given.directory) for path in given.directory.rglob("*.*")] == [Path("tables/peak.parquet")]
    assert not (given.directory / "old").exists()
    assert list(tmp_path.iterdir()) == [given.directory]


def test_a_run_that_wrote_nothing_packs_to_nothing(tmp_path: Path) -> None:
    assert pack(tmp_path / "run") == b""


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with ExitStack() as stack, pytest.raises(RunDirectoryError, match="file cannot be written: File exists"):
        SharedMarks(stack).hand(task(tmp_path / "file" / "run"))
    with pytest.raises(RunDirectoryError, match="run cannot be written"):
        unpack(pack(tmp_path), tmp_path / "file" / "run")


def test_another_version_of_fakedist_is_refused(tmp_path: Path, ran_in: list[Path]) -> None:
    result, _ = run_there(Handed(task(tmp_path / "run"), "mark", 1, "9.9"), {})
    assert (result.outcome, ran_in) == (Outcome.ERROR, [])
    assert result.failure.endswith("and the tasks come from 9.9")
