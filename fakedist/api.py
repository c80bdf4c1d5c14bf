"""``fakedist.profile``: run one rank of a job from Python and return its run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from fakedist.check.running import RankToRun, run_rank, see_that_it_can_run
from fakedist.errors import JobError
from fakedist.options import Door, Job, JobOptions, JobProgram, make_jobs
from fakedist.results.opening import open_run_directory
from fakedist.results.run import Run


def profile(
    target: str | os.PathLike[str],
    *arguments: str,
    world_size: int | None = None,
    rank: int = 0,
    module: bool = False,
    output: str | os.PathLike[str] | None = None,
    **options: Unpack[JobOptions],
) -> Run:
    """Run one rank of a job in a child process, as ``fakedist profile`` does.

    Args:
        world_size: Number of ranks in the job, unless ``nnodes`` and ``gpus_per_node`` give it.
        output: The run directory. An existing one is replaced. With ``with_peers=True``, the directory that holds the
            run directories of all ranks that run. None creates one in the directory for temporary files.
        options: The other options of ``fakedist profile``, see docs/options.md. The default device is the virtual GPU,
            even on a machine with a real one.

    Returns:
        The run. A rank that does not fit on the GPU also returns one, with ``fits`` false.

    Raises:
        JobError: The job is invalid.
        SetupError: This machine cannot run it.
        ScriptError: The script failed. Its ``output`` holds the end of what the script printed.
    """
    program = JobProgram(os.fspath(target), tuple(map(str, arguments)), is_module=module)
    job = make_job(program, {**options, "world_size": world_size, "rank": rank})
    directory = Path(output) if output is not None else Path(tempfile.mkdtemp(prefix="fakedist-")) / "run"
    return run_job(job, f"{Path(job.target).name} rank {rank}", directory, Path.cwd())


def make_job(program: JobProgram, options: Mapping[str, object]) -> Job:
    """Make a job from Python's options.

    Raises:
        JobError: An option does not exist, a value is invalid, or the options name several ranks.
    """
    job, *others = make_jobs(program, options, Door.PYTHON)
    if others:
        raise JobError(f"{1 + len(others)} ranks are given, and one can run", f"rank={job.rank}")
    return job


def run_job(job: Job, name: str, run_directory: Path, cwd: Path) -> Run:
    """Run a job in a child process. Raises as :func:`profile` does."""
    see_that_it_can_run(job)
    rank = RankToRun(name, job, run_directory.resolve())
    run_rank(rank, cwd)
    return open_run_directory(rank.run_directory)
