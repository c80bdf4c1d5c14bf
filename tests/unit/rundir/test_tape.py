from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakedist.options import Job
from fakedist.rundir.directory import (
    TAPE_NAME,
    JournalWriter,
    create_run_directory,
    load_manifest,
    new_manifest,
    write_manifest,
)
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.tape import GroupRecord, Sent, SentRecord, StoredRecord, Tape, TapeFollower


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The directory of rank 0's run, which goes on."""
    with create_run_directory(tmp_path / "rank0", False) as directory:
        new_manifest(directory, Job(world_size=4, rank=0, target="train.py"))
        yield directory


@pytest.fixture
def tape(run: Path) -> JournalWriter:
    writer = JournalWriter(run / TAPE_NAME)
    writer.append(GroupRecord(0, (0, 1), 0))
    writer.append(GroupRecord(1, (0, 2), 0))
    return writer


def sent(group: int, sequence: int) -> SentRecord:
    return SentRecord(group, -1, "broadcast", sequence, 0, tensors=[], objects=[b"plan"])


def read(follower: TapeFollower) -> list[object]:
    return [record.sequence if isinstance(record, Sent) else record for record in follower.read()]


def test_what_a_rank_sends_comes_once_and_as_it_is_written(run: Path, tape: JournalWriter) -> None:
    follower = TapeFollower(Tape(run, 0), 1)
    assert read(follower) == []
    for number in (1, 2):
        tape.append(sent(0, number))
    tape.append(sent(1, 1))  # for rank 2 alone
    assert read(follower) == [1, 2]
    tape.append(StoredRecord("seed", b"7"))
    tape.append(sent(0, 3))
    assert read(follower) == [StoredRecord("seed", b"7"), 3]
    assert not follower.is_over


def test_half_a_record_comes_when_it_is_whole(run: Path, tape: JournalWriter) -> None:
    follower = TapeFollower(Tape(run, 0), 1)
    before = (run / TAPE_NAME).read_bytes()
    tape.append(sent(0, 1))
    whole = (run / TAPE_NAME).read_bytes()
    (run / TAPE_NAME).write_bytes(whole[: (len(before) + len(whole)) // 2])
    assert read(follower) == []
    (run / TAPE_NAME).write_bytes(whole)
    assert read(follower) == [1]


def test_a_tape_is_over_when_its_rank_has_ended(run: Path, tape: JournalWriter) -> None:
    follower = TapeFollower(Tape(run, 0), 1)
    tape.append(sent(0, 1))
    write_manifest(run, dataclasses.replace(load_manifest(run), exit=Ending(Outcome.STOPPED, 0)))
    assert (read(follower), follower.is_over) == ([1], True)


def test_a_tape_is_over_when_nothing_writes_it_any_more(tmp_path: Path) -> None:
    with create_run_directory(tmp_path / "rank0", False) as directory:
        new_manifest(directory, Job(world_size=4, rank=0, target="train.py"))  # and its parent is killed
        JournalWriter(directory / TAPE_NAME).close()
    follower = TapeFollower(Tape(tmp_path / "rank0", 0), 1)
    assert (read(follower), follower.is_over) == ([], True)
