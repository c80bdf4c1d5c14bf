"""The program's process ends at once, without a visible difference."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RANK = ROOT / "fakedist" / "rank" / "__main__.py"
_TOLD = """
import atexit, json, sys, threading
class Destroyed:
    def __del__(self):
        print("taken down")
json.told = Destroyed()
def work():
    threading.Timer(0.1, print, ["a thread"]).start()
    atexit.register(print, "a handler")
    print("worked", end="; ")
    return 7
"""
_RUN = f"from fakedist.cli.program import Program\nprogram = Program()\n{_TOLD}\nsys.exit(program.run(work))"


def _run(code: str, **streams: int) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)
    streams = streams or {"stdout": subprocess.PIPE}
    return subprocess.run([sys.executable, "-c", code], env=environment, text=True, stderr=subprocess.PIPE, **streams)


def test_output_threads_and_exit_handlers_come_before_the_end() -> None:
    run = _run(_RUN)
    assert (run.returncode, run.stdout, run.stderr) == (7, "worked; a thread\na handler\n", "")


def test_a_handler_that_was_registered_before_still_runs() -> None:
    run = _run(f"import atexit; atexit.register(print, 'sitecustomize')\n{_RUN}")
    assert (run.returncode, run.stdout) == (7, "worked; a thread\na handler\nsitecustomize\ntaken down\n")


def test_an_error_ends_it_as_usual() -> None:
    run = _run(_RUN.replace("return 7", "raise ValueError('a bug')"))
    assert run.returncode == 1
    assert run.stderr.endswith("ValueError: a bug\n")
    assert "taken down" in run.stdout


@pytest.mark.parametrize(
    ("module", "program", "code", "line"),
    [
        (
            "click",
            "from fakedist.__main__ import program\nsys.exit(program())",
            130,
            "fakedist: exit 130: interrupted\n",
        ),
        # The command that started the rank says the line.
        ("fakedist.rank.main", f"import runpy\nrunpy.run_path({str(RANK)!r}, run_name='__main__')", -signal.SIGINT, ""),
    ],
)
def test_ctrl_c_while_a_program_is_imported_has_no_traceback(module: str, program: str, code: int, line: str) -> None:
    run = _run(
        "import os, signal, sys\nfrom types import SimpleNamespace\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"def interrupted(name, *_):\n    if name == {module!r}:\n        os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.meta_path.insert(0, SimpleNamespace(find_spec=interrupted))\n{program}"
    )
    assert (run.returncode, run.stderr) == (code, line)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written_is_told() -> None:
    with open("/dev/full", "w") as full:
        run = _run(_RUN, stdout=full.fileno())
    assert run.returncode == 120  # Python's own code for it
    assert "No space left on device" in run.stderr
