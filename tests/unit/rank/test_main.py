from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from fakedist.rank.main import JournalFailed, OwnJournal
from fakedist.rundir.directory import read_journal
from fakedist.rundir.notes import Note
from fakedist.rundir.records import NoteRecord


def test_a_forked_child_writes_nothing_into_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = OwnJournal(tmp_path / "journal.bin")
    journal.append(NoteRecord(Note("parent", "parent")))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    journal.append(NoteRecord(Note("child", "child")))
    monkeypatch.undo()
    journal.close()
    assert list(read_journal(tmp_path / "journal.bin")) == [NoteRecord(Note("parent", "parent"))]


def test_a_file_that_cannot_grow_ends_the_run_past_every_except_exception(tmp_path: Path) -> None:
    journal, limits = OwnJournal(tmp_path / "journal.bin"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(JournalFailed, match="File too large"):
            journal.append(NoteRecord(Note("lost", "lost" * 10_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.close()
    assert not issubclass(JournalFailed, Exception)
