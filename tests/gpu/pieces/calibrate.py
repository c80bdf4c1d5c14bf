"""What kernels achieve on this GPU: the data of the estimates."""

from __future__ import annotations

import subprocess
import sys

from tests.gpu.record import ROOT
from tests.gpu.session import Session


def run(session: Session) -> bool:
    """Measure it into ``efficiency.json`` in the folder of results; whether that worked."""
    path = (session.others / "efficiency.json").resolve()
    command = [sys.executable, "-m", "tests.gpu.calibrate", "--out", str(path)]
    command += ["--rehearse"] if session.rehearsal else []
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=session.timeout_s())
    except subprocess.TimeoutExpired:
        session.say("calibrate: it did not end in time")
        return False
    session.say(*(done.stdout + done.stderr).strip().splitlines()[-5:])
    if done.returncode == 0 and not session.rehearsal:
        session.say(f"{path}: what `make calibrate` writes into fakedist/gpu/efficiency.json")
    return done.returncode == 0
