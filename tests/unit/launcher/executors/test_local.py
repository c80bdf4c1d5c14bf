from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakedist.errors import FakedistError
from fakedist.launcher.executors import ray_cluster
from fakedist.launcher.executors.choosing import make_executor
from fakedist.launcher.executors.local import LocalExecutor
from fakedist.launcher.executors.process import TaskProcesses
from fakedist.launcher.executors.task import ASSUMED_MEMORY_BYTES, Need, Task, TaskResult
from fakedist.options import Job
from fakedist.rundir.outcome import Outcome
from fakedist.units import GIB


class Processes(TaskProcesses):
    """Stands in for the processes: a task ends once as many run as the gate takes, "stays" only when cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.running: set[str] = set()
        self.most = 0
        self.over = threading.Event()
        self.peak_bytes = 0
        self.gate = threading.Barrier(1)

    def run(self, task: Task) -> TaskResult:
        self.running.add(task.key)
        self.most = max(self.most, len(self.running))
        self.gate.wait()
        if task.key == "stays":
            self.over.wait()
        self.running.discard(task.key)
        return result(task, self.peak_bytes)

    def cancel(self) -> None:
        self.over.set()


def result(task: Task, peak_bytes: int = 0) -> TaskResult:
    return TaskResult(
        key=task.key,
        outcome=Outcome.STOPPED,
        code=0,
        failure="",
        output="",
        directory=task.directory,
        host="",
        worker="",
        wall_s=0.0,
        peak_rss_bytes=peak_bytes,
    )


@pytest.fixture
def processes() -> Processes:
    return Processes()


def task(key: object, need: Need | None = None, device: str = "virtual") -> Task:
    job = Job.from_dict({"world_size": 8, "rank": 0, "target": "train.py", "device": device})
    return Task(key=str(key), job=job, directory=Path(str(key)), need=need or Need())


def executor(processes: Processes, jobs: int | None = None) -> LocalExecutor:
    """On a machine with 4 cores and 16 GiB free."""
    return LocalExecutor(jobs, processes=processes, cores=4, free_memory=lambda: 16 * GIB)


def run(executor: LocalExecutor, tasks: list[Task]) -> list[str]:
    return [each.key for each in executor.run(tasks)]


def test_every_task_has_one_result_and_tasks_on_a_real_gpu_run_one_by_one(processes: Processes) -> None:
    assert sorted(run(executor(processes, 8), [task(number, device="cuda") for number in range(3)])) == list("012")
    assert processes.most == 1
    assert sorted(run(executor(processes), [task(number) for number in range(9)])) == list("012345678")
    assert not processes.over.is_set()


@pytest.mark.parametrize(
    ("jobs", "need", "expected"),
    [
        (None, Need(), 4),
        (None, Need(memory_bytes=5 * GIB), 3),
        (None, Need(cpus=2), 2),
        (None, Need(memory_bytes=64 * GIB), 1),  # alone, it may have what there is
        (6, Need(memory_bytes=64 * GIB), 6),
    ],
)
def test_as_many_run_at_once_as_fit(processes: Processes, jobs: int | None, need: Need, expected: int) -> None:
    processes.gate = threading.Barrier(expected)
    assert len(run(executor(processes, jobs), [task(number, need) for number in range(2 * expected)])) == 2 * expected
    assert processes.most == expected


def test_what_earlier_tasks_held_says_how_many_fit(processes: Processes) -> None:
    together = executor(processes)
    processes.peak_bytes = int(6.6 * GIB)  # 7.9 with the margin
    assert ASSUMED_MEMORY_BYTES * 4 <= 16 * GIB
    run(together, [task("first")])
    processes.gate = threading.Barrier(2)
    run(together, [task(number) for number in range(4)])
    assert processes.most == 2


def test_a_task_is_asked_for_when_there_is_room_and_after_the_results_before_it(processes: Processes) -> None:
    seen: list[str] = []

    def tasks() -> Iterator[Task | None]:
        yield task("a")
        while "a" not in seen:
            yield None
        assert seen == ["a"]
        yield task("b")

    seen.extend(each.key for each in executor(processes).run(tasks()))
    assert seen == ["a", "b"]


def test_leaving_early_ends_what_still_runs(processes: Processes) -> None:
    with contextlib.closing(executor(processes, 2).run([task("stays"), *map(task, range(8))])) as results:  # type: ignore[type-var]
        assert next(results).key == "0"
        assert not processes.over.is_set()
    assert processes.over.is_set()
    assert processes.most == 2


@pytest.mark.parametrize(("on", "address"), [("ray", None), ("ray://head:10001", "ray://head:10001")])
def test_a_cluster_is_named_by_its_address(on: str, address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(ray_cluster, "RayExecutor", lambda *given: asked.append(given))
    make_executor(on, None, print)
    assert isinstance(make_executor("local", 3, print), LocalExecutor)
    assert asked == [(address, print)]


@pytest.mark.parametrize(
    ("on", "jobs", "told", "hint"),
    [
        ("slurm", None, "--on slurm: there is no such place", "--on local, --on ray or --on ray://HOST:10001"),
        ("ray", 2, "--jobs is for this machine, and the cluster runs as many as fit it", "leave out --jobs"),
    ],
)
def test_what_cannot_be_is_one_line(on: str, jobs: int | None, told: str, hint: str) -> None:
    with pytest.raises(FakedistError) as caught:
        make_executor(on, jobs, print)
    assert (caught.value.message, caught.value.hint, caught.value.exit_code) == (told, hint, 2)
