"""Times of kernels of a few shapes on this GPU, as a calibration table. `make calibrate` alone measures many."""

from __future__ import annotations

import subprocess
import sys

from fakedist.extras.confirm.recorded_jobs import ROOT, Session


def run(session: Session) -> bool:
    """Measure them into the folder of results; whether that worked."""
    path = (session.others / "own.times.json").resolve()
    command = [sys.executable, "-m", "tests.gpu.calibrate", "--out", str(path), "--short"]
    command += ["--rehearse"] if session.rehearsal else []
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=session.timeout_s())
    except subprocess.TimeoutExpired:
        session.say("calibrate: it did not end in time")
        return False
    session.say(*(done.stdout + done.stderr).strip().splitlines()[-5:])
    if done.returncode == 0 and not session.rehearsal:
        session.say(f"{path}: what `make calibrate` writes; fakedist profile --times uses it")
    return done.returncode == 0
