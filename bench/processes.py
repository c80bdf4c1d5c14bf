"""Runs the commands that the other benchmarks measure."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ended:
    """A process that has ended, with the processes that it waited for.

    Attributes:
        code: Its exit code; negative for a signal.
        wall_s: Seconds from start to end.
        cpu_s: CPU seconds of all of them.
        host_gb: The most host memory that one of them held.
        output: Its standard output.
    """

    code: int
    wall_s: float
    cpu_s: float
    host_gb: float
    output: str


def run_process(command: list[str], *, cwd: Path | None = None, may_fail: bool = False) -> Ended:
    """Run a command that finds this fakedist.

    Raises:
        SystemExit: It failed, and may not.
    """
    with tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
        )
        assert process.stdout is not None
        output = process.stdout.read()
        # wait4 counts the processes that this one waited for too, and keeps the largest.
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode and not may_fail:
            errors.seek(0)
            text = errors.read().decode(errors="replace")
            raise SystemExit(f"exit {process.returncode}: {' '.join(command)}\n{text[-2000:]}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Ended(process.returncode, wall_s, cpu_s, usage.ru_maxrss * 1024 / 1e9, output)
