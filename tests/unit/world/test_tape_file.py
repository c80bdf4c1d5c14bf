from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakedist.options import Job
from fakedist.rundir.directory import TAPE_NAME, create_run_directory
from fakedist.rundir.journal import JournalWriter
from fakedist.rundir.manifest import load_manifest, new_manifest, write_manifest
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.tape import GroupRecord, SentRecord, StoredRecord, Tape
from fakedist.world import tape_file
from fakedist.world.tape_file import Reader, Where

CALL = Where("broadcast", ((0, 1), 0), source=0, sequence=1)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """The run of a rank that has written nothing of interest yet."""
    with create_run_directory(tmp_path / "rank0", False) as directory:
        new_manifest(directory, Job(world_size=4, rank=0, target="train.py"))
        yield directory


@pytest.fixture
def meanwhile(running: Path, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What the rank does, one thing each time that its tape is waited for. At last it ends."""
    tape = JournalWriter(running / TAPE_NAME)
    tape.append(GroupRecord(0, (0, 1), 0))

    def end() -> None:
        write_manifest(running, dataclasses.replace(load_manifest(running), exit=Ending(Outcome.STOPPED, 0)))

    steps: list[Callable[[], None]] = [
        lambda: tape.append(StoredRecord("seed", b"7")),
        lambda: tape.append(SentRecord(0, -1, "broadcast", 1, 0, tensors=[], objects=[b"plan"])),
        lambda: tape.append(StoredRecord("seed", b"8")),
        end,
    ]
    monkeypatch.setattr(tape_file.time, "sleep", lambda seconds: steps.pop(0)())
    return steps


def test_a_call_of_a_rank_that_still_runs_is_waited_for(running: Path, meanwhile: list[Callable[[], None]]) -> None:
    reader = Reader(Tape(running, 0), 1)
    assert len(meanwhile) == 4
    sent = reader.take(CALL)
    assert sent is not None
    assert sent.objects == (b"plan",)
    assert len(meanwhile) == 2
    assert reader.take(CALL) is None  # the rank has ended without a second one
    assert meanwhile == []
    assert reader.num_over == 1


def test_values_in_stores_are_those_of_the_whole_tape(running: Path, meanwhile: list[Callable[[], None]]) -> None:
    reader = Reader(Tape(running, 0), 1)
    assert reader.stored("seed", 1) == b"7"
    assert len(meanwhile) == 3
    assert reader.stored("seed", 3) == b"8"  # the last of two, which is known at the end alone
    assert meanwhile == []
    assert reader.stored("other", 1) is None


def test_whether_a_rank_sends_is_known_when_it_does_or_has_ended(
    running: Path, meanwhile: list[Callable[[], None]]
) -> None:
    reader = Reader(Tape(running, 0), 1)
    assert reader.has(CALL)
    assert len(meanwhile) == 2
    assert not reader.has(CALL._replace(operation="scatter"))
    assert meanwhile == []
