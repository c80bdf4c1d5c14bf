"""The command line that runs a job again, for hints."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from fakedist.job.definition import OF_FIELDS, Job

#: Always given. Their defaults on the command line depend on the machine, or on what the user expects.
_ALWAYS = ("world_size", "rank", "device", "steps")


def profile_arguments(job: Job, ranks: Sequence[int] = ()) -> list[str]:
    """Arguments of ``fakedist profile`` that run the job, or these ranks of it.

    They include every option of the job that differs from its default. The run's directory and the form of the result
    are not part of the job.
    """
    found = []
    for option in OF_FIELDS:
        value = getattr(job, option.field)
        if option.field == "rank":
            found.append(f"--rank={','.join(map(str, ranks)) or job.rank}")
        elif value != option.default or option.field in _ALWAYS:
            found += option.arguments(value)
    return [*found, *(["-m"] if job.is_module else []), job.target, *job.arguments]


def profile_command(job: Job, ranks: Sequence[int] = ()) -> str:
    """The complete shell command that runs the job, or these ranks of it."""
    return shlex.join(["fakedist", "profile", *profile_arguments(job, ranks)])
