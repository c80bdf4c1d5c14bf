"""A process that leaves at once, against one that Python takes down."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from fakedist.rank import leaving
from tests.conftest import ROOT

_SCRIPT = """
import atexit, ctypes, gzip, json, tempfile
import helper

class Told:
    def __init__(self, name, file=None):
        self.name, self.file, self.own = name, file, None
    def __del__(self):
        print(json.dumps(["destroyed", described(self.name)]))

def described(name):
    return NOTE + name

NOTE = "with its imports: "
held = Told("held by the main module")
circle = Told("in a cycle")
circle.own = circle
del circle
_private = Told("private")
log = open("log.txt", "w")
log.write("a line without an end")
packed = gzip.open("packed.gz", "wb")
packed.write(b"packed bytes")
temporary = tempfile.NamedTemporaryFile(prefix="temporary", dir=".")
closed = open("closed.txt", "w"); closed.close()
json.kept = open("kept.txt", "w")  # an installed module keeps it
json.kept.write("kept by another module")
json.told = Told("held by an installed module")
atexit.register(print, "atexit")
ctypes.CDLL(None).printf(b"printed by C\\n")
"""
_HELPER = """
file = open("helper.txt", "w")
file.write("helper")
class Told:
    def __del__(self):
        print("destroyed by the helper")
told = Told()
"""
_AT_ONCE = """
import atexit, sys
from fakedist.rank.leaving import leave_at_once
atexit.register(leave_at_once, 7)
sys.path.insert(0, ".")
main = sys.modules["__main__"]
main.__file__ = "script.py"
exec(compile(open("script.py").read(), "script.py", "exec"), main.__dict__)
"""


def _run(
    directory: Path, program: list[str], script: str = _SCRIPT, **streams: int
) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    (directory / "script.py").write_text(script)
    (directory / "helper.py").write_text(_HELPER)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONUNBUFFERED", None)
    streams = streams or {"stdout": subprocess.PIPE}
    return subprocess.run(
        [sys.executable, *program], cwd=directory, env=environment, text=True, stderr=subprocess.PIPE, **streams
    )


def test_a_script_notices_no_difference(tmp_path: Path) -> None:
    usual = _run(tmp_path / "usual", ["script.py"])
    at_once = _run(tmp_path / "at_once", ["-c", _AT_ONCE])
    assert (usual.returncode, at_once.returncode) == (0, 7), at_once.stderr
    assert usual.stderr == at_once.stderr == ""
    told = '["destroyed", "with its imports: held by an installed module"]'
    assert told in usual.stdout
    assert told not in at_once.stdout  # that would take a whole teardown
    assert sorted(at_once.stdout.splitlines()) == sorted(set(usual.stdout.splitlines()) - {told})
    assert "printed by C" in at_once.stdout
    files = [{p.name: p.read_bytes() for p in (tmp_path / each).glob("*.txt")} for each in ("usual", "at_once")]
    assert files[0] == files[1]
    assert files[1]["kept.txt"] == b"kept by another module"
    assert gzip.decompress((tmp_path / "at_once" / "packed.gz").read_bytes()) == b"packed bytes"
    assert not list((tmp_path / "at_once").glob("temporary*"))


#: Objects that only the collector destroys, as each is part of a cycle.
_IN_CYCLES = {
    "a generator that waits": """
def waits(held):
    try:
        yield
    finally:
        print("finally")
held = []
held.append(waits(held))
next(held[0])
""",
    "a compressed file": """
import gzip
class Holder: pass
holder = Holder()
holder.own, holder.file = holder, gzip.open("packed.gz", "wb")
holder.file.write(b"packed bytes")
print("written")
""",
    "a file with a destructor": """
import io
class Told(io.StringIO):
    def __del__(self):
        print("destroyed")
told = Told()
told.own = told
""",
}


@pytest.mark.parametrize("what", _IN_CYCLES)
def test_what_a_cycle_holds_is_destroyed(tmp_path: Path, what: str) -> None:
    usual = _run(tmp_path / "usual", ["script.py"], script=_IN_CYCLES[what])
    at_once = _run(tmp_path / "at_once", ["-c", _AT_ONCE], script=_IN_CYCLES[what])
    assert at_once.returncode == 7
    assert usual.stdout == at_once.stdout != ""
    packed = [gzip.decompress(path.read_bytes()) for path in tmp_path.glob("*/packed.gz")]
    assert packed == [b"packed bytes"] * len(packed)


def test_without_destructors_nothing_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quiet:
        pass

    ours = {id(globals())}
    held: list[object] = [Quiet(), weakref.ref(Quiet), io.StringIO(), os.walk(".")]
    monkeypatch.setattr(leaving, "alive", lambda wanted: [each for each in held if wanted(type(each))])
    assert not leaving._any_end_is_noticed(ours)
    for more in ((each for each in ours), weakref.ref(Quiet, lambda gone: None), gzip.GzipFile(fileobj=io.BytesIO())):
        held.append(more)
        assert leaving._any_end_is_noticed(ours)
        held.pop()
    held.append(each for each in ours)
    assert not leaving._any_end_is_noticed({1})


_THREADED = """
import json, threading, time
class Told:
    def __del__(self):
        print("taken down", flush=True)
json.told = Told()
def poll():
    while True:
        time.sleep(0.001)
        assert poll is not None
"""


@pytest.mark.parametrize(("target", "by_teardown"), [("poll", True), ("time.sleep, args=(600,)", False)])
def test_only_a_thread_that_runs_the_scripts_code_needs_a_teardown(
    tmp_path: Path, target: str, by_teardown: bool
) -> None:
    code = f"{_THREADED}threading.Thread(target={target}, daemon=True).start()\ntime.sleep(0.1)\n"
    run = _run(tmp_path / "threaded", ["-c", _AT_ONCE], script=code)
    assert (run.returncode, run.stderr) == (0 if by_teardown else 7, "")
    assert ("taken down" in run.stdout) == by_teardown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written_is_told_by_the_teardown(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        run = _run(tmp_path / "full", ["-c", _AT_ONCE], stdout=full.fileno())
    assert run.returncode == 120  # Python's own code for it
    assert "No space left on device" in run.stderr
