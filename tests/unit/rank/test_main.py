from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fakedist.rank.main import JournalFailed, OwnJournal
from fakedist.rundir.journal import read_journal
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


def test_a_full_disk_ends_the_run_past_every_except_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = OwnJournal(tmp_path / "journal.bin")

    def full(record: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal._writer, "append", full)
    with pytest.raises(JournalFailed, match="No space left on device"):
        journal.append(NoteRecord(Note("lost", "lost")))
    journal.close()
    assert not issubclass(JournalFailed, Exception)
