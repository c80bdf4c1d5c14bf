"""``--clock-run``: a second run of a script whose first run had no steps after the recorded ones, for the host's time.

The first run keeps the keys of its timed step's launches. The second one records a step or two, for what the host reads
in a step, and goes on in bare steps (:mod:`fakedist.record.host_clock`), whose launches are matched with those keys.
Its own recording is dropped; the host's clock goes to the second journal of the first run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from fakedist.errors import FakedistError
from fakedist.options import Job
from fakedist.rundir.directory import JOURNAL_NAME, KERNELS_NAME
from fakedist.rundir.encoding import Record
from fakedist.rundir.journal import JournalWriter, read_journal
from fakedist.rundir.launch_records import HostClockRecord, LaunchKeysRecord
from fakedist.rundir.manifest import new_manifest
from fakedist.rundir.outcome import Ending
from fakedist.rundir.records import NoteRecord, StepRecord
from fakedist.rundir.time_notes import second_run_without_time
from fakedist.temporary import scratch_directory

#: Runs a job until it ends, in a run directory with its manifest.
RunJob = Callable[[Job, Path], Ending]
#: A second run needs two steps. Of fewer than four it records the first alone, of others two.
_LEAST_STEPS, _FEW_STEPS = 2, 4
#: Notes of the second run that are the first one's, too.
_NOTES = ("second_run_without_time", "host_clock_disturbed")


def time_in_second_run(job: Job, run_directory: Path, ending: Ending, run: RunJob) -> None:
    """Run the script of a finished run again, unless that had bare steps, and add the host's clock or a note to it.

    Args:
        ending: How the first run ended.
        run: Runs the job.
    """
    first, num_steps = None, 0
    for record in read_journal(run_directory / JOURNAL_NAME):
        if isinstance(record, LaunchKeysRecord):
            first = record
        elif isinstance(record, StepRecord):
            num_steps = max(num_steps, record.step)
    if first is None:
        return
    if not ending.ended_well:
        records = _no_time("the first run did not end well")
    elif num_steps < _LEAST_STEPS:
        records = _no_time("the script trains one step, and must train another")
    else:
        steps = 1 if num_steps < _FEW_STEPS else 2
        again = dataclasses.replace(job, steps=steps, until=None, clock_run=False)
        records = _of_second_run(again, first, run)
    _write(run_directory / KERNELS_NAME, records)


def _of_second_run(job: Job, first: LaunchKeysRecord, run: RunJob) -> list[Record]:
    """The host's clock, or a note that says why there is none."""
    with scratch_directory("clock") as directory:
        new_manifest(directory, job)
        _write(directory / KERNELS_NAME, [first])
        try:
            ending = run(job, directory)
        except FakedistError as error:
            return _no_time(error.message)
        except KeyboardInterrupt:
            return _no_time("it was interrupted")
        records = [record for record in read_journal(directory / JOURNAL_NAME) if _is_of_clock(record)]
    return records or _no_time(ending.message or "its process ended before")


def _no_time(why: str) -> list[Record]:
    return [NoteRecord(second_run_without_time(why))]


def _is_of_clock(record: Record) -> bool:
    return isinstance(record, HostClockRecord) or (isinstance(record, NoteRecord) and record.note.code in _NOTES)


def _write(path: Path, records: Iterable[Record]) -> None:
    with closing(JournalWriter(path)) as journal:
        for record in records:
            journal.append(record)
