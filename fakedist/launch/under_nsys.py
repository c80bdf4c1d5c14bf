"""Runs a rank under Nsight Systems: its command prefix, its exit code and its report."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from fakedist.errors import FakedistError
from fakedist.job import Job
from fakedist.launch.nsight import (
    ENVIRONMENT,
    export_sqlite,
    find_nsys,
    finished_report,
    profile_command,
    traces_events,
)
from fakedist.rank.teller import Ended
from fakedist.run.directory import KERNELS_NAME, NSYS_NAME
from fakedist.run.journal import JournalWriter
from fakedist.run.notes import nsys_failed
from fakedist.run.records import NoteRecord
from fakedist.run.trace_records import HostRecord, KernelsRecord
from fakedist.temporary import FRESH_PREFIX

#: Seconds that nsys may take to write its report after the rank has ended.
FINISH_S = 600.0


def around(job: Job, run_directory: Path, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The prefix of the rank's command, and the rank's environment."""
    nsys, traces_cuda = find_nsys(), job.device == "cuda"
    command = profile_command(
        nsys,
        run_directory.resolve() / NSYS_NAME,
        traces_cuda=traces_cuda,
        arguments=job.nsys_args,
        has_events=traces_cuda and traces_events(nsys),
    )
    return command, {**ENVIRONMENT, **environment}


def code_of_rank(code: int, told: Ended | None) -> int:
    """The rank's exit code, from its own message or from nsys's code, where 128 + n means signal n.

    nsys may have failed itself, so the rank's message wins.
    """
    if told is not None:
        return told.code
    return 128 - code if code > 128 else code


def join_report(run_directory: Path) -> None:
    """Fill in a run's kernels from the report that nsys left in it. If that fails, a note gives the reason."""
    journal = JournalWriter(run_directory / KERNELS_NAME)
    report = run_directory / f"{NSYS_NAME}.nsys-rep"
    try:
        try:
            report = finished_report(find_nsys(), run_directory / NSYS_NAME, FINISH_S)
            for record in _step(run_directory, report):
                journal.append(record)
        except FakedistError as error:
            kept = f"; {report.name} is kept" if report.exists() else ""
            journal.append(NoteRecord(nsys_failed(error.message, kept)))
        except KeyboardInterrupt:
            again = f": fakedist nsys {report}   joins its report" if report.exists() else ""
            journal.append(NoteRecord(nsys_failed("interrupted", again)))
    finally:
        journal.close()


def _step(run_directory: Path, report: Path) -> tuple[KernelsRecord, HostRecord]:
    from fakedist.analysis.nsys.imported import recorded_step

    with tempfile.TemporaryDirectory(dir=run_directory, prefix=FRESH_PREFIX) as scratch:
        exported = Path(scratch) / "report.sqlite"
        export_sqlite(report, exported, FINISH_S)
        return recorded_step(run_directory, exported, report)
