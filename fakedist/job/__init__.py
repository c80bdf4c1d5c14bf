"""The job, and the one declaration of each of its options."""

from __future__ import annotations

from fakedist.job.command import profile_arguments, profile_command
from fakedist.job.definition import Collectives, Device, Job, Launcher, Until, Values
from fakedist.job.making import JobOptions, Program, make_jobs, place_from_environment
from fakedist.job.options import Door

__all__ = [
    "Collectives",
    "Device",
    "Door",
    "Job",
    "JobOptions",
    "Launcher",
    "Program",
    "Until",
    "Values",
    "make_jobs",
    "place_from_environment",
    "profile_arguments",
    "profile_command",
]
