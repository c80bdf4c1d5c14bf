from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fakedist.errors import RecordingError
from fakedist.launcher.launching import time_in_second_run
from fakedist.options import Job
from fakedist.rundir.directory import JOURNAL_NAME, KERNELS_NAME, JournalWriter, load_job, read_journal
from fakedist.rundir.encoding import Record
from fakedist.rundir.launch_records import HostClockRecord, LaunchKeysRecord
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.records import NoteRecord, StepRecord
from fakedist.rundir.time_notes import host_clock_disturbed, timed_early

JOB = Job(world_size=16, rank=9, target="train.py")
KEYS = LaunchKeysRecord(3, b"12345678", 1)
CLOCK = HostClockRecord(3, b"12345678", 1, 2.0, 3.0, 3.0, 0.0, 0.1, 0.0, is_second_run=True)


def written(path: Path, *records: Record) -> None:
    journal = JournalWriter(path)
    for record in records:
        journal.append(record)
    journal.close()


def second_run(
    tmp_path: Path,
    *journal: Record,
    records: tuple[Record, ...] | RecordingError = (),
    outcome: Outcome = Outcome.FINISHED,
) -> tuple[list[Record], list[Job]]:
    """The records that a second run adds to a run with this journal, and the jobs that ran. It writes or raises."""
    written(tmp_path / JOURNAL_NAME, *journal)
    jobs = []

    def run(job: Job, directory: Path) -> Ending:
        assert load_job(directory) == job
        assert list(read_journal(directory / KERNELS_NAME)) == [KEYS]
        jobs.append(job)
        if isinstance(records, RecordingError):
            raise records
        written(directory / JOURNAL_NAME, *records)
        return Ending(Outcome.KILLED, 137, "by SIGKILL")

    job = dataclasses.replace(JOB, until="end", clock_run=True)
    time_in_second_run(job, tmp_path, Ending(outcome, 0), run)
    path = tmp_path / KERNELS_NAME
    return (list(read_journal(path)) if path.exists() else []), jobs


def steps(number: int) -> list[Record]:
    return [StepRecord(step, 0, 1, 0, "", "") for step in range(1, number + 1)]


@pytest.mark.parametrize(("num_steps", "recorded"), [(2, 1), (3, 1), (4, 2), (100, 2)])
def test_a_second_run_records_a_step_or_two_and_adds_the_clock_of_the_others(
    tmp_path: Path, num_steps: int, recorded: int
) -> None:
    disturbed = NoteRecord(host_clock_disturbed(2.0))
    made = (*steps(recorded), CLOCK, NoteRecord(timed_early(1)), disturbed)
    added, (job,) = second_run(tmp_path, *steps(num_steps), KEYS, records=made)
    assert added == [CLOCK, disturbed]
    assert (job.steps, job.until, job.clock_run) == (recorded, None, False)


@pytest.mark.parametrize(
    ("num_steps", "how", "why"),
    [
        (1, {}, "the script trains one step"),
        (3, {"outcome": Outcome.EXCEPTION}, "the first run did not end well"),
        (3, {"records": RecordingError("no such thing", "")}, "no such thing"),
        (3, {"records": ()}, "by SIGKILL"),
    ],
)
def test_a_second_run_that_measured_nothing_says_why(
    tmp_path: Path, num_steps: int, how: dict[str, Any], why: str
) -> None:
    (note,), _ = second_run(tmp_path, *steps(num_steps), KEYS, **how)
    assert isinstance(note, NoteRecord)
    assert note.note.code == "second_run_without_time"
    assert why in note.note.text


def test_a_run_that_had_bare_steps_needs_no_second_one(tmp_path: Path) -> None:
    assert second_run(tmp_path, *steps(3)) == ([], [])
