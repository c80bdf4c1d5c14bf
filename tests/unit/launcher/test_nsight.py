from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fakedist.errors import ReportError, SetupError
from fakedist.launcher import launching, nsight
from fakedist.launcher.launching import Streams
from fakedist.launcher.nsight import export_sqlite, find_nsys, finished_report, profile_command, traces_events
from fakedist.options import Job
from fakedist.rundir.directory import read_journal
from fakedist.rundir.records import NoteRecord


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A program called nsys on PATH, which does as ``script`` says."""
    program = directory / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def test_without_nsys_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="neither on PATH") as raised:
        find_nsys(places=())
    assert "nsight-systems" in raised.value.hint
    program = tmp_path / "opt" / "nsys"
    program.parent.mkdir()
    program.touch()
    assert find_nsys(places=(f"{tmp_path}/*/nsys",)) == program


def test_the_users_arguments_come_last() -> None:
    command = profile_command(Path("nsys"), Path("run/nsight"), traces_cuda=True, arguments=["--trace=osrt"])
    assert command[:3] == ["nsys", "profile", "--trace=cuda,nvtx"]
    assert command[-2:] == ["--output=run/nsight", "--trace=osrt"]
    assert "--capture-range=nvtx" in command
    assert "--sample=none" in command


@pytest.mark.parametrize(
    ("told", "can"), [("--cuda-event-trace=\n   Possible values", True), ("--cuda-um-cpu=", False)]
)
def test_events_are_traced_where_nsys_can(
    told: str, can: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nsys = install(tmp_path, monkeypatch, f"printf -- '{told}'")
    assert traces_events(nsys) is can
    command = profile_command(nsys, tmp_path, traces_cuda=True, arguments=[], has_events=can)
    assert ("--cuda-event-trace=true" in command) is can


def test_an_export_that_hangs_is_ended_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, monkeypatch, f"touch {tmp_path}/out.sqlite; exec sleep 600")
    with pytest.raises(ReportError, match="did not end within 1 s"):
        export_sqlite(tmp_path / "a.nsys-rep", tmp_path / "out.sqlite", 1.0)
    assert not (tmp_path / "out.sqlite").exists()


def test_an_export_that_fails_is_said_in_nsyss_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, monkeypatch, r"printf 'Exporting [1%%]\rmagic number mismatch\n'; exit 2")
    with pytest.raises(ReportError, match="failed with exit code 2: magic number mismatch"):
        export_sqlite(tmp_path / "a.nsys-rep", tmp_path / "out.sqlite", 600.0)


def test_a_capture_that_never_began_leaves_no_report(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="the timed step was never captured"):
        finished_report(Path("nsys"), tmp_path / "nsight", 1.0)


def test_a_stream_without_its_importer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "nsight.qdstrm").touch()
    program = tmp_path / "a" / "b" / "c" / "nsys"
    with pytest.raises(ReportError, match=r"QdstrmImporter|failed"):
        finished_report(program, tmp_path / "nsight", 1.0)


#: Runs what stands behind its options in a session of its own, as nsys does, and then does as told.
_AROUND = 'shift; while [ "${1#-}" != "$1" ]; do shift; done\nsetsid "$@" & wait $!; code=$?\n'
_RANK = """
import json, os, sys
pipe = int(os.environ['FAKEDIST_PROGRESS_FD'])
for message in ({{'Started': {{'pid': os.getpid()}}}}, {{'Ended': {{'outcome': {outcome!r}, 'code': {code}}}}}):
    os.write(pipe, json.dumps(message).encode() + b'\\n')
sys.exit({code})
"""


@pytest.mark.parametrize(("then", "outcome", "code"), [("exit 1", "exit", 7), ("exec sleep 321", "finished", 0)])
def test_the_ranks_exit_code_is_given_back_whatever_nsys_says_and_if_it_never_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, then: str, outcome: str, code: int
) -> None:
    install(tmp_path, monkeypatch, f"{_AROUND}{then}")
    monkeypatch.setattr(nsight, "FINISH_S", 0.5)
    (tmp_path / "run").mkdir()
    streams = Streams(program=(sys.executable, "-c", _RANK.format(outcome=outcome, code=code)))
    ending = launching.run_child(Job(world_size=8, rank=0, target="train.py", nsys=True), tmp_path / "run", streams)
    assert (ending.outcome, ending.code) == (outcome, code)
    assert "sleep 321" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.split("\n")


def test_a_join_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, monkeypatch, "exit 3")
    (tmp_path / "nsight.nsys-rep").write_bytes(b"report")
    nsight.join_report(tmp_path)
    (record,) = read_journal(tmp_path / "kernels.bin")
    assert isinstance(record, NoteRecord)
    assert "nsys export" in record.note.text
    assert "nsight.nsys-rep is kept" in record.note.text
