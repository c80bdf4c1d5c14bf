"""Records that started processes leave for the rank."""

from __future__ import annotations

import json
from pathlib import Path

from fakedist.rank.joining import STARTED_FILE, read_started_records
from fakedist.rundir.encoding import encode
from fakedist.rundir.notes import engine_made_up
from fakedist.rundir.records import EngineCacheRecord, EngineSleepRecord, NoteRecord


def test_started_records_are_read_once_and_an_engine_has_one_note_that_its_answers_are_made_up(tmp_path: Path) -> None:
    records = [
        EngineCacheRecord(3, -1, "EngineCore"),
        EngineSleepRecord("level 1", 7, {"tensors": 5}, "EngineCore"),
        EngineSleepRecord("level 2", 9, {"tensors": 5}, "EngineCore"),
    ]
    (tmp_path / STARTED_FILE).write_text("".join(json.dumps(encode(record)) + "\n" for record in records))
    assert read_started_records(tmp_path) == [*records, NoteRecord(engine_made_up("EngineCore"))]
    assert read_started_records(tmp_path) == []
