"""A confirmation: one file, written piece by piece, whose recordings must agree with themselves when it arrives."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fakedist.errors import JobError
from fakedist.extras.confirm import confirming
from fakedist.extras.confirm.allocator_history import load
from fakedist.extras.confirm.confirming import (
    PIECES,
    Confirmation,
    MeasuredPiece,
    PieceEnd,
    confirm,
    defects,
    read_confirmation,
    run_piece,
)
from fakedist.extras.confirm.pieces import Session
from fakedist.rundir.plain import to_plain

H200 = "nvidia-h200-torch2.11.0/real-bare.jsonl.gz"
KEPT = Path(__file__).parents[2] / "data" / "gpu" / H200
MACHINE = {"gpu": "NVIDIA H200", "capacity_bytes": 150 << 30, "driver": "580.1", "torch": "2.11.0+cu130", "python": "3"}


def of_an_h200(kept: Path = KEPT, **rows: Any) -> Confirmation:
    """The file that `fakedist confirm` would have written of the recording that is kept."""
    table = [
        {"job": job.name, "num_events": len(job.events), "allocated_bytes": job.peak_allocated_bytes}
        | {"reserved_bytes": job.peak_reserved_bytes}
        for job in load(kept).jobs.values()
    ]
    return Confirmation(
        confirming.FORMAT, "1.0", MACHINE, False, {name: PieceEnd(True, 1.0) for name in PIECES},
        {"gpu-recordings": {"head": {}, "rows": table}} | rows,
        {H200: base64.b64encode(kept.read_bytes()).decode()},
    )  # fmt: skip


def test_what_a_real_gpu_recorded_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(to_plain(of_an_h200())))
    read = read_confirmation(tmp_path / "a.json")
    assert list(defects(read)) == []
    assert read == of_an_h200()


def test_a_history_that_was_changed_is_found(tmp_path: Path) -> None:
    recording = load(KEPT)
    job = recording.jobs["lstm"]
    job.events.sizes[job.events.actions.index("S")] += 2 << 20
    job.statistics["allocation.all.allocated"] += 1
    (tmp_path / "changed.jsonl.gz").write_bytes(recording.packed())
    found = list(defects(of_an_h200(tmp_path / "changed.jsonl.gz")))
    assert [text.partition(" is ")[0] for text in found] == [
        "real-bare.jsonl.gz: lstm: allocation.all.allocated", "real-bare.jsonl.gz: lstm: reserved_bytes.all.peak",
    ]  # fmt: skip


def test_a_file_of_the_first_release_is_read(tmp_path: Path) -> None:
    """By hand: its tables have one more, of kernels without fakedist, and a rehearsal's have names of their own."""
    events = {"actions": "Saf", "sizes": [2 << 20, 512, 512], "streams": [0, 0, 0], "places": [-1, 0, -1]}
    job = {"name": "lstm", "events": events | {"names": ["jobs.py:1"]}, "statistics": {
        "allocation.all.allocated": 1, "allocation.all.freed": 1, "requested_bytes.all.peak": 512,
        "reserved_bytes.all.peak": 2 << 20, "allocated_bytes.all.peak": 512,
    }}  # fmt: skip
    head = {
        "format": 1,
        "device": "real",
        "way": "bare",
        **MACHINE,
        "date": "2026-11-26",
        "command": "fakedist confirm",
    }
    text = "\n".join(map(json.dumps, (head, job)))
    row = {"job": "lstm", "num_events": 3, "allocated_bytes": 512, "reserved_bytes": 2 << 20}
    old: dict[str, Any] = {
        "format": 1, "fakedist": "1.0", "machine": MACHINE, "is_rehearsal": False,
        "pieces": {name: {"went_well": True, "seconds": 9.5} for name in PIECES},
        "tables": {
            "gpu-recordings": {"head": {}, "rows": [row]},
            "gpu-recording-cost": {"head": {}, "rows": [{"job": "lstm", "bare_us": 104.0, "recorded_us": 107.0}]},
        },
        "recordings": {H200: base64.b64encode(gzip.compress(text.encode())).decode()}, "log": ["a line"],
    }  # fmt: skip
    file = tmp_path / "old.json"
    file.write_text(json.dumps(old))
    assert list(defects(read_confirmation(file))) == []
    old["tables"]["gpu-recording-cost"]["rows"][0]["bare_us"] = row["num_events"] = 0
    file.write_text(json.dumps(old))
    assert list(defects(read_confirmation(file))) == [
        "lstm: the table has num_events 0, its recording 3", "gpu-recording-cost: lstm took 0 us",
    ]  # fmt: skip


def test_tables_rehearsals_and_pieces_that_cannot_be_kept_are_named() -> None:
    made = of_an_h200(**{"gpu-estimates": {"head": {}, "rows": [{"job": "fp8", "measured_us": 0.0}]}})
    made.tables["gpu-recordings"]["rows"][0]["reserved_bytes"] += 512
    ended = {name: end for name, end in made.pieces.items() if name != "times"} | {"outside": PieceEnd(False, 45.0)}
    made = dataclasses.replace(made, pieces=ended, machine=MACHINE | {"gpu": "My GPU"})
    text = "\n".join(defects(made))
    for said in (
        "the GPU is not known", "'outside' did not go well", "'times' is missing",
        "is of NVIDIA H200", "allocations: the table has reserved_bytes", "gpu-estimates: fp8 took 0.0 us",
    ):  # fmt: skip
        assert said in text
    assert len(list(defects(dataclasses.replace(made, is_rehearsal=True)))) == 1


@pytest.mark.parametrize("name", ["../../escape", "/tmp/escape", "a/../../escape", "a/b/c"])
def test_a_name_that_leaves_the_directory_is_refused(name: str, tmp_path: Path) -> None:
    for part in ({"recordings": {name: ""}}, {"tables": {name: {}}}):
        (tmp_path / "a.json").write_text(json.dumps(to_plain(of_an_h200()) | part))
        with pytest.raises(JobError, match="leaves its directory"):
            read_confirmation(tmp_path / "a.json")


def test_a_recording_that_is_no_base64_or_no_recording_is_refused(tmp_path: Path) -> None:
    made = to_plain(of_an_h200())
    (tmp_path / "a.json").write_text(json.dumps(made | {"recordings": {H200: "no base64"}}))
    with pytest.raises(JobError, match="cannot be read"):
        read_confirmation(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps(made | {"recordings": {H200: "AAAA"}}))
    (found,) = defects(read_confirmation(tmp_path / "a.json"))
    assert found.startswith(f"{H200} cannot be read as a recording")


@pytest.mark.parametrize("content", ["", "[]", '{"format": 2}', '{"format": 1}'])
def test_another_file_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(JobError, match="cannot be read"):
        read_confirmation(tmp_path / "a.json")


def test_each_piece_is_in_the_file_though_a_later_one_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = tmp_path / "a.json", []

    def measures(session: Session) -> bool:
        session.write("gpu-outside", [{"after": "context"}])
        return True

    def breaks(session: Session) -> bool:
        seen.extend(read_confirmation(file).pieces)
        raise ValueError("a broken piece")

    monkeypatch.setattr(confirming, "real_machine", lambda: MACHINE)
    monkeypatch.setattr(confirming, "ensure_driver", lambda: None)
    pieces = {name: MeasuredPiece(name, 5.0, run) for name, run in (("a", measures), ("b", breaks))}
    assert not confirm(pieces, file, "typed", lambda line: None, is_rehearsal=False)
    read = read_confirmation(file)
    assert seen == ["a"]
    assert {name: end.went_well for name, end in read.pieces.items()} == {"a": True, "b": False}
    assert read.tables["gpu-outside"]["rows"] == [{"after": "context"}]
    assert any("a broken piece" in line for line in read.log)


def test_a_piece_has_its_time_and_more_with_patience(tmp_path: Path) -> None:
    left: list[float] = []
    piece = MeasuredPiece("measures", 100.0, lambda session: not left.append(session.timeout_s(1e6)))
    session = Session(tmp_path, MACHINE, [], 1, False, "typed", lambda line: None)
    assert run_piece(session, "piece", piece).went_well
    assert run_piece(session, "piece", piece, patience=3.0).went_well
    assert left == [pytest.approx(85.0, abs=1.0), pytest.approx(285.0, abs=1.0)]
    assert sum(each.limit_s for each in PIECES.values()) <= 25 * 60
