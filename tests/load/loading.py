"""Runs fakedist where the machine is short of something, and measures what it takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import clean_environment

#: These tests take minutes and gigabytes: ``make nightly`` sets the variable.
needs_time = pytest.mark.skipif("FAKEDIST_LOAD" not in os.environ, reason="it takes minutes: make nightly runs it")
FAKEDIST = (sys.executable, "-m", "fakedist")
TRAIN = """
import sys, time
import torch
torch.distributed.init_process_group()
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[1])):
    for _ in range(int(sys.argv[2])):
        torch.empty(512, device="cuda")
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    torch.distributed.all_reduce(model.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(float(sys.argv[3]))
"""


@dataclass(frozen=True)
class Ended:
    """A command that has ended.

    Attributes:
        code: Its exit code.
        out: What it printed.
        err: What it printed on stderr.
        peak_bytes: The most resident memory of one of its processes.
        seconds: How long it took.
    """

    code: int
    out: str
    err: str
    peak_bytes: int
    seconds: float

    def tells_one_error(self) -> str:
        """Check that it failed with one line, and hints below it. Returns the line."""
        said = f"exit {self.code}\n{self.out[-2000:]}\n{self.err[-4000:]}"
        errors = [line for line in self.err.splitlines() if line.startswith("fakedist: error: ")]
        assert self.code in (1, 2), said
        assert len(errors) == 1, said
        assert "Traceback" not in self.err, said
        return errors[0]


def started(command: Sequence[str | Path], cwd: Path, environment: Mapping[str, str] | None = None) -> Running:
    return Running(command, cwd, clean_environment() | dict(environment or {}))


def ran(command: Sequence[str | Path], cwd: Path, environment: Mapping[str, str] | None = None) -> Ended:
    """Run a command to its end, and print what it took."""
    return started(command, cwd, environment).ended()


class Running:
    """A command that runs, with what it prints in files next to its directory."""

    def __init__(self, command: Sequence[str | Path], cwd: Path, environment: Mapping[str, str]) -> None:
        self._began = time.monotonic()
        self._name = f"{len(command)} words"
        self._logs = [Path("/dev/shm") / f"fakedist-load-{os.getpid()}-{id(self)}-{name}" for name in ("out", "err")]
        with self._logs[0].open("wb") as out, self._logs[1].open("wb") as err:
            self._process = subprocess.Popen(list(map(str, command)), cwd=cwd, env=environment, stdout=out, stderr=err)

    def ended(self) -> Ended:
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        out, err = (log.read_text(errors="replace") for log in self._logs)
        for log in self._logs:
            log.unlink()
        seconds = time.monotonic() - self._began
        found = Ended(self._process.returncode, out, err, usage.ru_maxrss * 1024, seconds)
        print(f"exit {found.code}, {found.peak_bytes / 1e9:.2f} GB, {seconds:.0f} s")
        return found


def profile(*more: str | Path, ranks: str = "0", steps: int = 2, allocations: int = 1, pause: float = 0) -> list[str]:
    """The command of a small profile of ``train.py``, which the caller has written."""
    options = ("--world-size", "32", "--rank", ranks, "--gpu", "h100-80g", "--device", "virtual", "--no-page")
    return [*FAKEDIST, "profile", *options, *map(str, more), "train.py", f"{steps}", f"{allocations}", f"{pause}"]


def mounted(mounts: Sequence[str], command: Sequence[str]) -> list[str]:
    """A shell command in a mount namespace of its own, where these mounts were made. Skips where none can be made."""
    if not _can_mount():
        pytest.skip("this machine refuses mounts (unshare --mount)")
    return [*_unshared(), "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh", *command]


def full(folder: Path, kilobytes: int) -> str:
    """The mount of a disk with so much room."""
    return f"mount -t tmpfs -o size={kilobytes}k none {folder}"


def read_only(folder: Path) -> str:
    """The mount after which nothing in a directory can be written, by root either."""
    return f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}"


def _unshared() -> list[str]:
    return ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


@cache
def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = [*_unshared(), "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


def figures_of(run: Path, cwd: Path) -> str:
    """The output of ``fakedist report`` on a run directory that must be readable."""
    shown = ran([*FAKEDIST, "report", run], cwd)
    assert shown.code in (0, 4), shown.err
    assert re.search(r"GiB|MiB|nothing", shown.out), shown.out
    return shown.out
