"""Records that started processes tell the rank."""

from __future__ import annotations

import json
from pathlib import Path

from fakedist.rank.joining import TOLD, take_told
from fakedist.rundir.encoding import encode
from fakedist.rundir.notes import engine_made_up
from fakedist.rundir.records import EngineCacheRecord, EngineSleepRecord, NoteRecord


def test_what_is_told_is_taken_once_and_an_engine_has_one_note_that_its_answers_are_made_up(tmp_path: Path) -> None:
    told = [
        EngineCacheRecord(3, -1, "EngineCore"),
        EngineSleepRecord("level 1", 7, {"tensors": 5}, "EngineCore"),
        EngineSleepRecord("level 2", 9, {"tensors": 5}, "EngineCore"),
    ]
    (tmp_path / TOLD).write_text("".join(json.dumps(encode(record)) + "\n" for record in told))
    assert take_told(tmp_path) == [*told, NoteRecord(engine_made_up("EngineCore"))]
    assert take_told(tmp_path) == []
