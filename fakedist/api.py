"""``fakedist.profile``: run one rank of a job from Python and return its run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from fakedist.check.running import Runner, Task
from fakedist.check.section import did_you_mean
from fakedist.errors import JobError
from fakedist.job import Collectives, Device, Job, Launcher, Until, Values
from fakedist.results.opening import open_run_directory
from fakedist.results.run import Run
from fakedist.units import parse_bytes


class JobOptions(TypedDict, total=False):
    """The other options of a job, as ``fakedist profile`` takes them."""

    module: bool
    gpus_per_node: int
    device: Device
    gpu: str
    gpu_memory: str
    steps: int | Literal["auto"]
    until: int | Until
    launcher: Launcher
    collectives: Collectives
    values: Values
    env: Mapping[str, str]
    timeout: float
    seed: int
    tapes: Sequence[str]
    with_peers: bool


def profile(
    target: str | os.PathLike[str],
    *arguments: str,
    world_size: int,
    rank: int = 0,
    output: str | os.PathLike[str] | None = None,
    **options: Unpack[JobOptions],
) -> Run:
    """Run one rank of a job in a child process, as ``fakedist profile`` does.

    Args:
        target: The script, or with ``module=True`` the name of a module.
        arguments: The script's arguments.
        world_size: Number of ranks in the job.
        rank: The rank to run.
        output: The run directory. An existing one is replaced. With ``with_peers=True``, the directory that holds the
            run directories of all ranks that run. None creates one in the directory for temporary files.
        options: See :class:`JobOptions`. The default device is the virtual GPU, even on a machine with a real one.

    Returns:
        The run. A rank that does not fit on the GPU also returns one, with ``fits`` false.

    Raises:
        JobError: The job is invalid.
        ScriptError: The script failed. Its ``output`` holds the end of what the script printed.
    """
    job = make_job(target, arguments, {**options, "world_size": world_size, "rank": rank})
    directory = Path(output) if output is not None else Path(tempfile.mkdtemp(prefix="fakedist-")) / "run"
    task = Task(f"{Path(job.target).name} rank {rank}", job, directory.resolve())
    Runner(Path.cwd()).run(task)
    return open_run_directory(task.run_directory)


def make_job(target: str | os.PathLike[str], arguments: tuple[str, ...], options: Mapping[str, object]) -> Job:
    """Make a job from the options of :func:`profile`.

    Raises:
        JobError: An option does not exist, or a value is invalid.
    """
    known = [*JobOptions.__annotations__, "world_size", "rank"]
    for name in options:
        if name not in known:
            raise JobError(f"a job has no option {name!r}", did_you_mean(name, known))
    values = dict(options)
    memory, env = values.pop("gpu_memory", None), values.pop("env", {})
    if not isinstance(env, Mapping):
        raise JobError(f"env is a mapping of names to values, not {env!r}", 'env={"NAME": "value"}')
    return Job.from_dict(
        {
            **values,
            "target": os.fspath(target),
            "is_module": bool(values.get("module", False)),
            "arguments": tuple(str(argument) for argument in arguments),
            "gpu_memory_bytes": None if memory is None else parse_bytes(str(memory)),
            "environment": tuple((str(name), str(value)) for name, value in env.items()),
            "timeout_s": values.get("timeout"),
        }
    )
