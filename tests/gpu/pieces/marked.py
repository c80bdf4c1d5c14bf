"""The tests marked ``gpu``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from fakedist.extras.confirm.pieces import ROOT, Session

_TOOK_TOO_LONG = 124


def run(session: Session) -> bool:
    """Whether they passed; where there is no GPU they skip themselves."""
    if importlib.util.find_spec("pytest") is None:
        session.say("pytest is not installed here: the tests marked gpu were not run")
        return False
    # Whatever plugins this Python has, these tests need none but their own timeout, and that is optional.
    options = ["-m", "gpu", "-q", "-ra", "-p", "no:cacheprovider", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu"]
    path = session.others / "tests.txt"
    with path.open("w") as file:
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=session.timeout_s())
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = _TOOK_TOO_LONG
    session.say("", "== tests marked gpu", *path.read_text().splitlines()[-12:])
    return code == 0
