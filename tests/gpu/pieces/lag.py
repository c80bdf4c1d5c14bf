"""Reserved memory of jobs whose streams keep blocks."""

from __future__ import annotations

import os
import subprocess
import sys

from fakedist.extras.confirm.recorded_jobs import ROOT, Session


def run(session: Session) -> bool:
    """Whether the real GPU reserves what it may."""
    command = [sys.executable, os.fspath(ROOT / "bench" / "gpu_lag.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=session.timeout_s(140.0))
    except subprocess.TimeoutExpired as error:
        session.say(f"gpu_lag.py did not end in time: {error.stdout!r}")
        return False
    session.say(done.stdout, done.stderr)
    return not done.returncode
