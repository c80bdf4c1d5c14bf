from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from fakedist.launcher.executors import process
from fakedist.launcher.executors.process import Order, Supervised, TaskProcesses, start_supervisor
from fakedist.launcher.executors.task import Task, TaskResult
from fakedist.launcher.machine import descendants
from fakedist.options import Job
from fakedist.rundir.directory import create_run_directory, is_in_use, new_manifest
from fakedist.rundir.outcome import Outcome
from tests.conftest import ROOT

# Stands in for a whole run: the job's arguments are statements, and those after the first are about how it ended.
_RUN = """
import dataclasses, json, os, signal, sys, time
from pathlib import Path
sys.path[0] = "ROOT"
from fakedist.options import Job
from fakedist.rundir.directory import load_manifest, new_manifest, write_manifest
from fakedist.rundir.outcome import Ending, Outcome
handed = json.loads(Path(sys.argv[1]).read_text())
job, directory = Job.from_dict(handed["job"]), Path(handed["directory"])
def end(outcome, code, message=""):
    directory.mkdir(parents=True, exist_ok=True)
    new_manifest(directory, job)
    ending = Ending(Outcome(outcome), code, message)
    write_manifest(directory, dataclasses.replace(load_manifest(directory), exit=ending))
    sys.exit(code)
exec(job.arguments[0])
""".replace("ROOT", str(ROOT))


def processes() -> TaskProcesses:
    return TaskProcesses(program=(sys.executable, "-c", _RUN))


def task(tmp_path: Path, statement: str, **options: object) -> Task:
    job = Job(world_size=8, rank=0, target="train.py", arguments=(statement,))
    return Task(**({"key": "one", "job": job, "directory": tmp_path / "run", "cwd": tmp_path} | options))  # type: ignore[arg-type]


def run(given: Task) -> TaskResult:
    return processes().run(given)


def test_a_result_has_the_runs_own_outcome(tmp_path: Path) -> None:
    given = task(tmp_path, "print(os.getcwd()); end('stopped', 0)")
    result = run(given)
    assert (result.key, result.outcome, result.code, result.failure) == ("one", Outcome.STOPPED, 0, "")
    assert result.ended_well
    assert (result.output, result.directory) == (str(tmp_path), tmp_path / "run")
    assert (result.host, result.worker) == (os.uname().nodename, str(os.getpid()))
    assert result.wall_s > 0
    assert result.peak_rss_bytes > 1 << 20
    assert pickle.loads(pickle.dumps((given, result))) == (given, result)


@pytest.mark.parametrize(
    ("statement", "outcome", "code", "failure"),
    [
        ("end('exception', 1, 'ValueError: tp')", Outcome.EXCEPTION, 1, "ValueError: tp"),
        ("end('out_of_memory', 4, 'tried to allocate')", Outcome.OUT_OF_MEMORY, 4, "tried to allocate"),
        ("end('exit', 3)", Outcome.EXIT, 3, "it ended with exit code 3"),
        ("end('killed', 139, 'by SIGSEGV')", Outcome.KILLED, 139, "killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGBUS)", Outcome.KILLED, 128 + signal.SIGBUS, "killed by SIGBUS"),
        ("print('a'); print('disk is full'); sys.exit(1)", Outcome.ERROR, 1, "disk is full"),
        ("print('fakedist: error: no tape\\n  type this'); sys.exit(2)", Outcome.ERROR, 2, "no tape"),
        ("sys.exit(0)", Outcome.ERROR, 1, "the run could not start"),
    ],
)
def test_a_failure_is_a_result(tmp_path: Path, statement: str, outcome: Outcome, code: int, failure: str) -> None:
    result = run(task(tmp_path, statement))
    assert (result.outcome, result.code, result.failure) == (outcome, code, failure)
    assert not result.ended_well


def test_an_earlier_run_that_could_not_be_replaced_is_not_taken_for_this_one(tmp_path: Path) -> None:
    run(task(tmp_path, "end('stopped', 0)"))
    result = run(task(tmp_path, "print('the disk is full'); sys.exit(1)"))
    assert (result.outcome, result.failure) == (Outcome.ERROR, "the disk is full")


def test_a_task_waits_until_an_earlier_attempt_has_left_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, results = threading.Event(), []
    monkeypatch.setattr(process, "is_in_use", lambda path: is_in_use(path) and not waits.set())
    given = task(
        tmp_path,
        "from fakedist.rundir.directory import *\nwith create_run_directory(directory, True): end('stopped', 0)",
    )
    with create_run_directory(given.directory, force=False) as earlier:
        new_manifest(earlier, given.job)
        later = threading.Thread(target=lambda: results.append(run(given)))
        later.start()
        assert waits.wait(60)
        assert results == []
    later.join()
    assert [result.outcome for result in results] == [Outcome.STOPPED]


def test_limits_are_results(tmp_path: Path) -> None:
    late = run(task(tmp_path, "time.sleep(60)", timeout_s=0.3))
    assert (late.outcome, late.code, late.failure) == (Outcome.TIMEOUT, 124, "it did not end within 0.3 s")
    large = run(task(tmp_path, "held = b'x' * (96 << 20); time.sleep(60)", memory_limit_bytes=64 << 20))
    assert (large.outcome, large.code) == (Outcome.HOST_MEMORY, 137)
    assert large.failure.endswith("of host memory, and 64.00 MiB is the limit")


def test_a_directory_that_this_machine_lacks_is_named(tmp_path: Path) -> None:
    result = run(task(tmp_path, "end('stopped', 0)", cwd=tmp_path / "elsewhere"))
    assert (result.outcome, result.code) == (Outcome.ERROR, 1)
    assert result.failure == f"{os.uname().nodename} has no directory {tmp_path / 'elsewhere'}"


def test_cancelling_ends_what_runs_and_starts_nothing(tmp_path: Path) -> None:
    running, results = processes(), []
    given = task(tmp_path, "Path('started').write_text(''); time.sleep(60)")
    thread = threading.Thread(target=lambda: results.append(running.run(given)))
    thread.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    running.cancel()
    thread.join()
    results.append(running.run(given))
    assert [(result.outcome, result.failure) for result in results] == [(Outcome.INTERRUPTED, "it was cancelled")] * 2


def order(tmp_path: Path, script: str, memory_limit_bytes: int | None = None, timeout_s: float | None = None) -> Order:
    command = ["/bin/sh", "-c", script]
    environment = {"PATH": os.environ["PATH"], "WHERE": "here"}
    return Order(command, environment, str(tmp_path), str(tmp_path / "out"), memory_limit_bytes, timeout_s)


def started(tmp_path: Path, given: Order) -> subprocess.Popen[bytes]:
    supervisor = start_supervisor(tmp_path)
    assert supervisor.stdin is not None
    supervisor.stdin.write(json.dumps(asdict(given)).encode() + b"\n")
    supervisor.stdin.flush()
    return supervisor


def ended(supervisor: subprocess.Popen[bytes], tmp_path: Path) -> Supervised:
    with supervisor:
        assert supervisor.stdout is not None
        said = supervisor.stdout.readline()
    assert said, (tmp_path / "log").read_text()
    return Supervised(**json.loads(said))


def supervise(tmp_path: Path, given: Order) -> Supervised:
    return ended(started(tmp_path, given), tmp_path)


def wait_for(path: Path) -> str:
    while not (path.exists() and path.read_text().endswith("\n")):
        time.sleep(0.01)
    return path.read_text().strip()


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


@pytest.mark.parametrize(
    ("script", "timeout_s", "ended", "code", "out"),
    [
        ('pwd; echo "$WHERE" >&2; exit 7', None, "itself", 7, ["{cwd}", "here"]),
        ("kill -ABRT $$", None, "itself", -signal.SIGABRT, []),
        ("trap 'echo bye; exit 3' TERM; while :; do sleep 0.02; done", 0.3, "timeout", 3, ["bye"]),
    ],
    ids=["where and as the order says", "a signal", "asked to leave in time"],
)
def test_a_program_runs_to_its_end(
    tmp_path: Path, script: str, timeout_s: float | None, ended: str, code: int, out: list[str]
) -> None:
    found = supervise(tmp_path, order(tmp_path, script, timeout_s=timeout_s))
    assert (found.ended, found.code) == (ended, code)
    assert (tmp_path / "out").read_text().split() == [text.format(cwd=tmp_path) for text in out]
    assert 0 <= found.peak_rss_bytes < 1 << 30


def test_memory_of_all_processes_together_counts(tmp_path: Path) -> None:
    eat = "python3 -S -c \"import time; held = b'x' * (40 << 20); time.sleep(60)\""
    found = supervise(tmp_path, order(tmp_path, f"{eat} & {eat} & wait", memory_limit_bytes=70 << 20))
    assert (found.ended, found.code) == ("memory", -signal.SIGKILL)
    assert found.peak_rss_bytes > 70 << 20


@pytest.mark.parametrize("how", ["", "kill -KILL $$"])
def test_what_a_program_leaves_behind_is_ended(tmp_path: Path, how: str) -> None:
    script = f"setsid sh -c 'echo $$ > left; trap \"\" TERM HUP; while :; do sleep 0.05; done' & sleep 0.3; {how}"
    supervise(tmp_path, order(tmp_path, script))
    assert not is_alive(int(wait_for(tmp_path / "left")))


def test_a_program_ends_when_the_executor_closes_the_pipe(tmp_path: Path) -> None:
    supervisor = started(tmp_path, order(tmp_path, "echo $$ > pid; exec sleep 60"))
    pid = int(wait_for(tmp_path / "pid"))
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    assert ended(supervisor, tmp_path).ended == "cancelled"
    assert not is_alive(pid)


def test_a_program_ends_even_with_a_killed_supervisor(tmp_path: Path) -> None:
    """As Ray kills the children of a worker that leaves: also what the program left behind goes."""
    supervisor = started(tmp_path, order(tmp_path, "setsid sleep 60 & echo $! > left; echo $$ > pid; exec sleep 60"))
    pids = int(wait_for(tmp_path / "left")), int(wait_for(tmp_path / "pid"))
    assert set(pids) <= set(descendants(supervisor.pid))
    with supervisor:
        supervisor.kill()
    while any(map(is_alive, pids)):
        time.sleep(0.01)
