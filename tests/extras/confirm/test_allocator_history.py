from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fakedist.extras.confirm import allocator_history
from fakedist.extras.confirm.allocator_history import EventsBuilder, RecordingFileError, load
from tests.extras.confirm.made_up import EVENTS, HEAD, job, recording


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    assert HEAD.directory_name == "nvidia-h200-torch2.11.0"
    failed = job("failed", ())
    failed.error, failed.notes = "RuntimeError: no", ["refused: cuFoo, 2 calls"]
    saved = recording(job(), failed)
    saved.save(tmp_path / "deep" / "a.jsonl.gz")
    assert load(tmp_path / "deep" / "a.jsonl.gz") == saved


def test_the_same_recording_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        recording(job()).save(tmp_path / name)
    first = (tmp_path / "a.jsonl.gz").read_bytes()
    assert first == (tmp_path / "b.jsonl.gz").read_bytes()
    assert first[4:8] == b"\0\0\0\0"  # gzip's time
    assert first[3] == 0  # and no file name


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", *(gzip.compress(line) for line in (b'{"format":2}\n', b"[]\n", b'{"format":1}\n'))],
    ids=["empty", "text", "format", "list", "headless"],
)
def test_what_is_no_recording_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(RecordingFileError, match=str(tmp_path / "file")) as raised:
        load(tmp_path / "file")
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording(job()).save(tmp_path / "file")
    monkeypatch.setattr(allocator_history, "_MOST_BYTES", 100)
    with pytest.raises(RecordingFileError, match="more than 100 bytes"):
        load(tmp_path / "file")


def test_a_recording_whose_columns_do_not_fit_is_refused(tmp_path: Path) -> None:
    torn = job()
    torn.events.sizes.pop()
    recording(torn).save(tmp_path / "file")
    with pytest.raises(RecordingFileError, match="not equally long"):
        load(tmp_path / "file")


def test_streams_are_numbered_by_their_first_event_and_snapshots_are_left_out() -> None:
    builder = EventsBuilder()
    for action, stream in (("alloc", 96), ("snapshot", 5), ("alloc", 64), ("annotate", 1), ("free_requested", 96)):
        builder.add(action, 512, stream)
    events = builder.build()
    assert (events.actions, events.streams) == ("aar", [0, 1, 0])
    assert len(job().events) == len(EVENTS)
