"""The job, and the one declaration of each of its options."""

from __future__ import annotations

from fakedist.options.definition import (
    Collectives,
    Device,
    Job,
    Launcher,
    Until,
    Values,
    options_among,
    profile_arguments,
    profile_command,
)
from fakedist.options.kinds import Door
from fakedist.options.making import JobOptions, JobProgram, make_jobs, world_from_environment

__all__ = [
    "Collectives",
    "Device",
    "Door",
    "Job",
    "JobOptions",
    "JobProgram",
    "Launcher",
    "Until",
    "Values",
    "make_jobs",
    "options_among",
    "profile_arguments",
    "profile_command",
    "world_from_environment",
]
