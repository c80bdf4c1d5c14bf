"""A sweep on a Ray cluster of two nodes, both on this machine: workers and nodes that die lose no point of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakedist.errors import SetupError
from fakedist.launcher.executors import ray_cluster
from fakedist.launcher.executors.local import LocalExecutor
from fakedist.launcher.executors.ray_cluster import RayExecutor
from fakedist.launcher.executors.task import Executor, Need, Task
from fakedist.options import Job
from fakedist.rundir.outcome import Outcome
from fakedist.sweep.plan import CommandLineSettings, sweep_of_file
from fakedist.sweep.point_rows import Row, Status
from fakedist.sweep.sweeping import SweepListener, run_sweep

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="not installed: ray: make frameworks")

#: What each script leaves running, in a session of its own. No other process of this machine sleeps that long.
LEFT = str(100_000 + os.getpid())
SCRIPT = f"""
import os, signal, subprocess, sys, time
subprocess.Popen(["setsid", "sleep", "{LEFT}"])
print("point", *sys.argv[1:], flush=True)
match sys.argv[1]:
    case "trained" if len(sys.argv) > 2:
        import torch
        import torch.distributed as dist
        dist.init_process_group("nccl")
        weight = torch.ones(1024, 1024, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            (weight @ weight).sum().backward()
            dist.all_reduce(weight.grad)
            optimizer.step()
    case "refused": assert False, "tp does not divide the heads"
    case "left": sys.exit(3)
    case "killed": os.kill(os.getpid(), signal.SIGSEGV)
    case "endless": time.sleep(600)
    case "eats": held = b"x" * (2 << 30); time.sleep(600)
"""
#: How a point of each kind ends: its outcome, code and failure.
KINDS = {
    "trained": (Outcome.FINISHED, 0, ""),
    "refused": (Outcome.EXCEPTION, 1, "AssertionError: tp does not divide the heads"),
    "left": (Outcome.EXIT, 3, "it ended with exit code 3"),
    "killed": (Outcome.KILLED, 139, "killed by SIGSEGV"),
    "endless": (Outcome.TIMEOUT, 124, "it did not end within 5 s"),
    "eats": (Outcome.HOST_MEMORY, 137, "of host memory, and 2.00 GiB is the limit"),
}
#: 25 points, of which two train.
SWEEP = """
script = "train.py"
arguments = "{kind} {seed}"
world_size = 8
ranks = "0"
where = "seed < 2 or (kind != 'trained' and kind != 'eats')"

[axes]
kind = ["refused", "trained", "left", "killed", "eats"]
seed = SEEDS
"""
MEMORY_LIMIT_BYTES = 2 << 30


NODE = {"num_cpus": 1, "memory": 5 << 30, "object_store_memory": 80 << 20, "include_log_monitor": False}


@contextlib.contextmanager
def handlers_as_before() -> Iterator[None]:
    """Ray handles SIGTERM in a process that starts a node."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with one core. One test adds a second node."""
    with handlers_as_before():
        made = cluster_utils.Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def tasks(script: Path, directory: Path, kinds: list[str]) -> list[Task]:
    return [
        Task(
            key=f"{number}-{kind}",
            job=Job(world_size=8, rank=0, target=str(script), arguments=(kind,), device="virtual"),
            directory=directory / f"{number}-{kind}",
            cwd=script.parent,
            need=Need(memory_bytes=1 << 30),
            memory_limit_bytes=MEMORY_LIMIT_BYTES,
            timeout_s=5.0 if kind == "endless" else None,
        )
        for number, kind in enumerate(kinds)
    ]


def swept(directory: Path, executor: Executor, seeds: int, at: dict[int, Callable[[], None]]) -> list[Row]:
    """The rows of a sweep over this many seeds. ``at`` says what happens once so many have come."""
    (directory / "sweep.toml").write_text(SWEEP.replace("SEEDS", str(list(range(seeds)))))
    plan = sweep_of_file(directory / "sweep.toml", CommandLineSettings())
    known: list[Row] = []

    def finished(row: Row, was_known: bool) -> None:
        known.append(row)
        at.get(len(known), lambda: None)()

    listener = SweepListener(begins=lambda number: None, finished=finished, say=lambda text: None)
    place = directory / f"sweep-{type(executor).__name__}"
    return run_sweep(plan, place, executor, listener, limit_bytes=MEMORY_LIMIT_BYTES).rows


def without_machine(row: Row) -> Row:
    """The row without what depends on where it ran, and without the memory that a limit's error names."""
    left_out = {"host": "", "worker": "", "wall_s": 0.0, "peak_rss_bytes": 0}
    ranks = tuple(dataclasses.replace(each, **left_out, reason=_HELD.sub("", each.reason)) for each in row.ranks)
    return dataclasses.replace(row, ranks=ranks, reason=_HELD.sub("", row.reason))


_HELD = re.compile(r"held \S+ GiB")


def pids(what: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if what in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(path.parent.name))
    return found


def busy_worker() -> int:
    """The process of a Ray worker that runs something: Ray names it after the task, and idle ones "ray::IDLE"."""
    while not (found := [pid for pid in pids("ray::") if not _NOT_BUSY.search(_command(pid))]):
        time.sleep(0.05)
    return found[0]


_NOT_BUSY = re.compile("ray::(IDLE|.*Agent)|^(?!ray::)")


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def test_no_point_of_a_sweep_is_lost_with_a_worker_or_a_node(cluster: Any, script: Path, tmp_path: Path) -> None:
    with handlers_as_before():
        second = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    events = {
        4: lambda: os.kill(busy_worker(), signal.SIGKILL),
        10: lambda: cluster.remove_node(second, allow_graceful=False),
    }
    said: list[str] = []
    there = swept(tmp_path, RayExecutor(cluster.address, said.append), 7, events)
    assert "Ray: Task _run_on_worker failed. There are 5 retries remaining, so the task will be retried." in said
    assert pids(f"sleep {LEFT}") == []
    status = {"trained": Status.FITS, "refused": Status.INVALID}
    assert len({row.id for row in there}) == len(there) == 25
    for row in there:
        kind = str(dict(row.values)["kind"])
        assert row.status is status.get(kind, Status.FAILED), row
        assert [rank.outcome for rank in row.ranks] == [Outcome.STOPPED if kind == "trained" else KINDS[kind][0]]
    here = swept(tmp_path, LocalExecutor(), 1, {})
    assert pids(f"sleep {LEFT}") == []
    same = {row.id: without_machine(row) for row in there}
    assert [same[row.id] for row in here] == [without_machine(row) for row in here]


def test_however_a_task_ends_it_has_a_result(cluster: Any, script: Path, tmp_path: Path) -> None:
    with contextlib.closing(RayExecutor(cluster.address)) as executor:
        results = list(executor.run(iter(tasks(script, tmp_path / "runs", ["trained", "endless", "left"]))))
    assert pids(f"sleep {LEFT}") == []
    assert len(results) == 3
    for result in results:
        kind = result.key.partition("-")[2]
        assert (result.outcome, result.code, result.failure) == KINDS[kind]
        assert result.host == os.uname().nodename


def test_run_directories_come_back_where_no_path_is_shared(
    cluster: Any, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_marked", lambda mark: contextlib.nullcontext(0))
    given = tasks(script, tmp_path / "runs", ["trained", "refused"])
    (given[0].directory / "old").mkdir(parents=True)
    with contextlib.closing(RayExecutor(cluster.address)) as executor:
        results = {result.key: result for result in executor.run(iter(given))}
    names = {path.name for path in given[0].directory.iterdir()}
    assert {"run.json", "report.html", "tables"} <= names
    assert "old" not in names
    assert (given[1].directory / "run.json").exists()
    assert {key: result.directory for key, result in results.items()} == {task.key: task.directory for task in given}


def test_an_interrupt_ends_what_runs_on_the_cluster(cluster: Any, script: Path, tmp_path: Path) -> None:
    given = [dataclasses.replace(task, timeout_s=None) for task in tasks(script, tmp_path / "runs", ["endless"] * 2)]
    with contextlib.closing(RayExecutor(cluster.address)) as executor:
        results = executor.run(iter(given))
        watcher = threading.Thread(target=_interrupt_when_it_runs, daemon=True)
        watcher.start()
        with pytest.raises(KeyboardInterrupt):
            next(results)
        watcher.join()
        assert pids(f"sleep {LEFT}") == []


def _interrupt_when_it_runs() -> None:
    while not pids(f"sleep {LEFT}"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize("listens", [False, True])
def test_an_address_that_does_not_answer_is_one_line(
    listens: bool, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fakedist.launcher.executors.ray_cluster.ANSWER_S", 1.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        address = f"{scheme}127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(SetupError) as caught:
            RayExecutor(address)
    why = "what listens there is not Ray" if listens else "Connection refused"
    assert caught.value.message == f"no Ray cluster answers at {address}: {why}"
    assert "RAY_ADDRESS" in caught.value.hint


def test_an_address_that_is_none_is_one_line() -> None:
    with pytest.raises(SetupError, match="'head' is not the address of a Ray cluster"):
        RayExecutor("head")
