from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import torch

from fakedist import harness
from fakedist.harness import JournalFailed, OwnJournal, Terminated
from fakedist.record.steps import StopRun
from fakedist.run.journal import read_journal


def _during(error: BaseException, context: BaseException) -> BaseException:
    error.__context__ = context
    return error


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (StopRun(), "stopped", 0),
        (_during(SystemExit(1), StopRun()), "stopped", 0),
        (_during(RuntimeError("closing failed"), StopRun()), "stopped", 0),
        (SystemExit(), "exit", 0),
        (SystemExit(3), "exit", 3),
        (SystemExit(-1), "exit", 255),
        (SystemExit("a text"), "exit", 1),
        (Terminated(143), "interrupted", 143),
        (KeyboardInterrupt(), "interrupted", 130),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory", 4),
        (_during(RuntimeError("step failed"), torch.OutOfMemoryError()), "out_of_memory", 4),
        (_during(SystemExit(9), torch.OutOfMemoryError()), "exit", 9),
        (ValueError("x"), "exception", 1),
    ],
)
def test_what_the_script_raised_says_how_it_ended(error: BaseException, outcome: str, code: int) -> None:
    assert harness._how(error)[:2] == (outcome, code)


def test_a_message_is_one_line() -> None:
    assert harness._how(ValueError("first\nsecond"))[2] == "ValueError: first"
    assert harness._how(ValueError())[2] == "ValueError"


def test_a_forked_child_writes_nothing_into_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = OwnJournal(tmp_path / "journal.bin")
    journal.append({"kind": "note", "text": "parent"})
    monkeypatch.setattr(os, "getpid", lambda: -1)
    journal.append({"kind": "note", "text": "child"})
    monkeypatch.undo()
    journal.close()
    assert [record["text"] for record in read_journal(tmp_path / "journal.bin")] == ["parent"]


def test_a_full_disk_ends_the_run_past_every_except_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = OwnJournal(tmp_path / "journal.bin")

    def full(record: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal._writer, "append", full)
    with pytest.raises(JournalFailed, match="No space left on device"):
        journal.append({"kind": "note"})
    journal.close()
    assert not issubclass(JournalFailed, Exception)


def test_os_exit_is_seen_before_it_happens_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", lambda status: codes.append(-status))
    original = os._exit
    with harness._watched_exit(codes.append):
        os._exit(7)
    assert codes == [7, -7]
    assert os._exit is original


def test_signals_wait_until_the_records_are_written() -> None:
    written = []

    def write() -> None:
        with harness._uninterrupted():
            signal.raise_signal(signal.SIGINT)
            written.append("record")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert written
