"""Starts a rank as a fork of a template, if one was made for such a rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from fakedist.launcher.keeping import ForkedChild, TemplateKeeper, offered_template
from fakedist.options import Job
from fakedist.rank.preloading import Learned, differing_variable, key_of
from fakedist.rank.starting import start_variable


class RankTemplate:
    """A template, as a process that runs ranks has it: the file of its imports, and its door's descriptor or None."""

    def __init__(self, learned: Path, door: int | None) -> None:
        self._path, self._door = learned, door

    @classmethod
    def from_environment(cls) -> RankTemplate | None:
        """The template that a task's supervisor offers."""
        return None if (offered := offered_template()) is None else cls(*offered)

    @classmethod
    def of_keeper(cls, keeper: TemplateKeeper | None, job: Job) -> RankTemplate | None:
        """The template that a keeper has for a job, for its next rank. None without a keeper."""
        return None if keeper is None else cls(keeper.learned, keeper.open_door(key_of(job)))

    def fork(
        self, job: Job, run_directory: Path, environment: Mapping[str, str], *, stdout: int | None, pipe: int
    ) -> ForkedChild | None:
        """Fork a rank. None if the template does not fit it, or makes none. A ``stdout`` of None is this process's."""
        learned = None if self._door is None else Learned.read(self._path)
        if self._door is None or learned is None or not _is_for(learned, job, environment):
            return None
        sys.stdout.flush()
        request = {
            "run_directory": os.fspath(run_directory.absolute()),
            "environment": dict(environment),
            "cwd": os.getcwd(),
            "parent": os.getpid(),
        }
        return ForkedChild.ask(self._door, request, (0, 1 if stdout is None else stdout, 2, pipe))

    def learning(self, restarted: str) -> dict[str, str]:
        """The variable that has a rank without a template, or one that restarts, write down what its script imports."""
        return start_variable(self._path if self._door is None or restarted else None, restarted)


def _is_for(learned: Learned, job: Job, environment: Mapping[str, str]) -> bool:
    if job.device != "virtual" or job.nsys or learned.key != key_of(job) or learned.cwd != os.getcwd():
        return False
    return not differing_variable(environment, learned.started)
