"""A script of tests/gpu that runs by itself: once on the real GPU, once on the virtual one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu.jobs.catalogue import GpuJob
from tests.gpu.record import ROOT, Way, job_environment
from tests.gpu.session import Session

_PLAIN = GpuJob("", "", "")


class ScriptFailedError(Exception):
    """It left no result; its last words."""


def run_script(session: Session, way: Way, name: str, *arguments: str, job: GpuJob = _PLAIN) -> Any:
    """Run ``tests/gpu/<name>.py ... RESULT.json`` and read its result, also that of one that failed after writing it.

    Raises:
        ScriptFailedError: It wrote none.
    """
    device = [] if way.device == "real" else ["--device", "virtual", "--gpu", way.gpu]
    device += [] if way.device == "real" else ["--gpu-memory", str(way.memory_bytes)]
    with tempfile.TemporaryDirectory(prefix=f"gpu-{name}-") as text:
        result = Path(text) / "result.json"
        command = [sys.executable, os.fspath(ROOT / "tests" / "gpu" / f"{name}.py"), *arguments, str(result), *device]
        try:
            done = subprocess.run(
                command, cwd=text, env=job_environment(job, profiled=False), capture_output=True, text=True,
                timeout=session.timeout_s(240.0),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            said = "it did not end in time"
        else:
            said = ""
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            if done.returncode:
                said = f"exit code {done.returncode}: {lines[-1] if lines else 'it said nothing'}"
        if not result.exists():
            raise ScriptFailedError(said or "it left no result")
        if said:
            session.say(f"{name}.py did not come to its end: {said}")
        return json.loads(result.read_text())
