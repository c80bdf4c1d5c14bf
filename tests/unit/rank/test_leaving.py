"""A process that leaves at once, against one that Python takes down."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

_AT_ONCE = """
import atexit, sys
from fakedist.rank.leaving import leave_at_once
atexit.register(leave_at_once, 7)
sys.path.insert(0, ".")
main = sys.modules["__main__"]
main.__file__ = "script.py"
exec(compile(open("script.py").read(), "script.py", "exec"), main.__dict__)
"""
_HELPER = "class Ending:\n    def __del__(self):\n        print('destroyed')\n"


def _run(
    directory: Path, program: list[str], script: str, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    (directory / "script.py").write_text(script)
    (directory / "helper.py").write_text(_HELPER)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONUNBUFFERED", None)
    return subprocess.run(
        [sys.executable, *program], cwd=directory, env=environment, text=True, stderr=subprocess.PIPE, stdout=stdout
    )


_UNNOTICED = {
    "nothing": "",
    "a closed file": "file = open('out.txt', 'w')\nfile.write('text')\nfile.close()",
    "a file that is read": "file = open('script.py')\nfile.readline()",
    "text in memory": "import io\nfile = io.StringIO()\nfile.write('text')",
    "a generator of a library": "import os\nwalk = os.walk('.')\nnext(walk)",
    "a weak reference": "import weakref\nclass Held: pass\nheld = Held()\nseen = weakref.ref(held)",
    "a thread that runs no code of the script": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "an object that released itself": "import helper\nending = helper.Ending()\ndel ending",
    "text that C printed": "import ctypes\nctypes.CDLL(None).printf(b'by C\\n')",
}
_NOTICED = {
    "a destructor": "import helper\nending = helper.Ending()",
    "a destructor in a cycle": "import helper\nending = helper.Ending()\nending.own = ending\ndel ending",
    "a destructor that a library holds": "import helper, json\njson.kept = helper.Ending()",
    "a generator": "def waits():\n    try:\n        yield\n    finally:\n        print('over')\n"
    "waiting = waits()\nnext(waiting)",
    "a callback": "import weakref\nclass Held: pass\nheld = Held()\n"
    "seen = weakref.ref(held, lambda gone: print('gone'))",
    "an open file": "file = open('out.txt', 'w')\nfile.write('text')",
    "a compressed file": "import gzip\nfile = gzip.open('out.gz', 'wb')\nfile.write(b'bytes')",
    "a temporary file": "import tempfile\nfile = tempfile.NamedTemporaryFile(prefix='out', dir='.')",
    "a file with a destructor": "import io\nclass Ending(io.StringIO):\n    def __del__(self):\n"
    "        print('destroyed')\nending = Ending()",
    "a thread": "import threading, time\ndef poll():\n    while True:\n        time.sleep(0.001)\n"
    "threading.Thread(target=poll, daemon=True).start()\ntime.sleep(0.05)",
}


@pytest.mark.parametrize("script", [*_UNNOTICED.values(), *_NOTICED.values()], ids=[*_UNNOTICED, *_NOTICED])
def test_a_script_sees_no_difference(tmp_path: Path, script: str) -> None:
    script = f"import atexit\natexit.register(print, 'atexit')\n{script}\n"
    usual = _run(tmp_path / "usual", ["script.py"], script)
    at_once = _run(tmp_path / "at_once", ["-c", _AT_ONCE], script)
    assert (usual.returncode, usual.stderr, at_once.stderr) == (0, "", "")
    is_noticed = script.removeprefix("import atexit\natexit.register(print, 'atexit')\n").rstrip() in _NOTICED.values()
    assert at_once.returncode == (0 if is_noticed else 7)
    assert at_once.stdout == usual.stdout
    files = [{path.name: _content(path) for path in (tmp_path / each).glob("out*")} for each in ("usual", "at_once")]
    assert files[0] == files[1]


def _content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written_is_reported_by_the_teardown(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        run = _run(tmp_path / "full", ["-c", _AT_ONCE], "print('text')", stdout=full.fileno())
    assert run.returncode == 120  # Python's own code for it
    assert "No space left on device" in run.stderr
