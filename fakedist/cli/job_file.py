"""Runs the job in a file that another process of fakedist wrote: a check, or ``fakedist.profile``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fakedist.cli.entry import exit_code_of
from fakedist.cli.output import remark, say_ending
from fakedist.cli.profile import STDERR, run_one
from fakedist.launcher.fork_servers import RankDoor
from fakedist.launcher.launching import Streams, check
from fakedist.launcher.machine import nothing_left
from fakedist.options import Job, profile_arguments


def run_job_file(path: str) -> int:
    """Run the job and leave its run directory, and print on stderr what ``fakedist profile`` would.

    It leaves no process behind, even if its supervisor was killed, as Ray kills the children of a worker that exits.
    The JSON file has the ``job`` (:meth:`fakedist.options.Job.to_dict`) and the run's ``directory``.
    Returns the exit code.
    """
    door = RankDoor.from_environment()
    values = json.loads(Path(path).read_text())
    job = Job.from_dict(values["job"])
    sys.argv = ["fakedist", "profile", *profile_arguments(job)]  # run.json's command, to be typed again

    def run() -> int:
        check(job)  # this machine may not be the one that checked it
        streams = Streams(child_stdout=STDERR, say=remark, door=door)
        run_directory, ending = run_one(job, Path(values["directory"]), True, streams)
        return say_ending(ending, job, run_directory)

    with nothing_left():
        return exit_code_of(run)
