"""A call of ``make gpu``: a rehearsal's files lie and are called otherwise; a piece that breaks ends no other."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fakedist.confirm.session import Session
from tests.accuracy.results import NotMeasuredError, keep
from tests.gpu import confirm
from tests.gpu.confirm import Piece, run_piece

MACHINE = {"gpu": "NVIDIA H200", "capacity_bytes": 150 << 30, "driver": "580.1", "torch": "2.11.0+cu130", "python": "3"}


def session(out: Path, *, rehearsal: bool) -> Session:
    return Session(out, MACHINE, [], 4, rehearsal, "make gpu")


def test_what_was_measured_is_where_it_is_kept_from(tmp_path: Path) -> None:
    session(tmp_path, rehearsal=False).write("gpu-outside", [{"after": "context"}], ["NCCL"])
    head = json.loads((tmp_path / "accuracy" / "gpu-outside.json").read_text())["head"]
    assert (head["gpu"], head["driver"], head["torch"]) == ("NVIDIA H200", "580.1", "2.11.0+cu130")
    assert head["failed"] == ["NCCL"]
    assert "rehearsal" not in head


def test_a_rehearsal_leaves_nothing_that_could_be_kept(tmp_path: Path) -> None:
    made = session(tmp_path, rehearsal=True)
    made.write("gpu-outside", [])
    (path,) = tmp_path.rglob("*.json")
    assert path.name == "rehearsal-gpu-outside.json"
    assert json.loads(path.read_text())["head"]["rehearsal"] is True
    assert made.recordings.is_relative_to(tmp_path / "rehearsal")
    with pytest.raises(NotMeasuredError):
        keep(tmp_path)


def test_the_virtual_gpu_is_of_the_real_ones_model_and_memory(tmp_path: Path) -> None:
    made = session(tmp_path, rehearsal=False)
    assert made.real.device == "real"
    assert (made.virtual.device, made.virtual.gpu, made.virtual.memory_bytes) == ("virtual", "h200", 150 << 30)
    assert session(tmp_path, rehearsal=True).real == session(tmp_path, rehearsal=True).virtual


def test_a_process_gets_no_more_time_than_its_piece_has(tmp_path: Path) -> None:
    made = session(tmp_path, rehearsal=False)
    made.ends_at = time.monotonic() + 100.0
    assert 50.0 < made.timeout_s() < 90.0
    assert made.timeout_s(30.0) == 30.0
    made.ends_at = time.monotonic() + 10.0
    assert made.is_over


def test_a_piece_that_breaks_is_told_and_ends_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(made: Session) -> bool:
        raise ValueError("a broken piece")

    pieces = {name: Piece(name, 5.0, runs) for name, runs in (("bad", breaks), ("good", lambda made: True))}
    monkeypatch.setattr(confirm, "PIECES", pieces)
    made = session(tmp_path, rehearsal=False)
    assert [run_piece(made, name) for name in confirm.PIECES] == [False, True]
    assert any("a broken piece" in line for line in made.lines)


def test_the_pieces_fit_into_30_minutes_and_each_into_8() -> None:
    limits = [piece.limit_s for piece in confirm.PIECES.values()]
    assert sum(limits) <= 30 * 60
    assert max(limits) <= 8 * 60


def test_a_piece_that_does_not_exist_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        confirm.main(["recording"])
    assert "there is no piece 'recording'" in capsys.readouterr().err
