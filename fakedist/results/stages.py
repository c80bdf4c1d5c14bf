"""The pipeline stages of a job, from the run of one of its ranks."""

from __future__ import annotations

from pathlib import Path

from fakedist.analysis.axes import Pipeline, find_pipeline
from fakedist.errors import JobError
from fakedist.results.opening import open_run_directory


def stages_of_job(path: Path) -> Pipeline:
    """The pipeline that a run's rank is in.

    Args:
        path: The run directory.

    Raises:
        JobError: Its groups show no pipeline, or several groups could be one.
        RunDirectoryError: It is not a run directory, or is damaged.
    """
    run = open_run_directory(path)
    job = run.manifest.job
    rank = 0 if job is None else job.rank
    found = find_pipeline(run.table("groups"), run.table("calls"), rank)
    if found is None:
        raise JobError(
            f"the groups of rank {rank} show no pipeline: none is named for one, and it sends to no other rank",
            "name the ranks to run: --rank 0,64",
        )
    return found
