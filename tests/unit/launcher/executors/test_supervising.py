from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from fakedist.launcher.executors.process import Order, Supervised, start_supervisor
from fakedist.launcher.process_tree import descendants


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
