"""Starts a rank as a fork of a template, if one was made for such a rank."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fakedist.launcher.children import ForkedChild
from fakedist.launcher.keeping import TemplateKeeper
from fakedist.launcher.template_variable import hear_of_template
from fakedist.options import Job
from fakedist.rank.template.channel import Channel, Fork, Forked
from fakedist.rank.template.learned import Learned, key_of
from fakedist.rank.template.scenes import differing_variable
from fakedist.rank.template.starting import start_variable


class RankTemplate:
    """What a process that runs ranks has of a template.

    Args:
        learned: The file with what a template imports, or that takes it.
        channel: The channel to a template. None if there is none yet.
    """

    def __init__(self, learned: Path, channel: socket.socket | None) -> None:
        self._path = learned
        self._channel = None if channel is None else Channel(channel)

    @classmethod
    def from_environment(cls) -> RankTemplate | None:
        """The template that a task's supervisor offers. Ranks and other programs do not see it."""
        return None if (told := hear_of_template()) is None else cls(*told)

    def fork(
        self, job: Job, run_directory: Path, environment: Mapping[str, str], *, stdout: int | None, pipe: int
    ) -> ForkedChild | None:
        """Fork a rank. None if the template was not made for such a rank, or makes none.

        Args:
            job: The job.
            run_directory: The rank's run directory.
            environment: Its environment.
            stdout: Where its stdout goes. None for this process's own.
            pipe: The descriptor for its messages.
        """
        learned = None if self._channel is None else Learned.read(self._path)
        if self._channel is None or learned is None or not _is_for(learned, job, environment):
            return None
        sys.stdout.flush()
        asked = Fork(os.fspath(run_directory.absolute()), dict(environment), os.getcwd(), os.getpid())
        try:
            self._channel.send(asked, (0, 1 if stdout is None else stdout, 2, pipe))
            answer, _ = self._channel.receive()
        except OSError:
            answer = None
        if isinstance(answer, Forked):
            return ForkedChild(answer.pid, self._channel)
        if answer is None:  # it was killed
            self.close()
        return None

    def learning(self, job: Job, restarted: str) -> dict[str, str]:
        """What a rank that starts on its own is told.

        It writes down what its script imports if it has no template. After a restart it does so too, because a new
        template may fit the ranks after it.
        """
        return start_variable(self._path if self._channel is None or restarted else None, restarted)

    def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _is_for(learned: Learned, job: Job, environment: Mapping[str, str]) -> bool:
    """Whether a template was made for such a rank: the same script, directory and environment."""
    if job.device != "virtual" or job.nsys or learned.key != key_of(job) or learned.cwd != os.getcwd():
        return False
    return not differing_variable(environment, learned.environment)


@contextmanager
def offered(keeper: TemplateKeeper | None, job: Job) -> Iterator[RankTemplate | None]:
    """The template that a keeper has for a job, for its next rank. None without a keeper."""
    if keeper is None:
        yield None
        return
    template = RankTemplate(keeper.learned, keeper.open_channel(key_of(job)))
    try:
        yield template
    finally:
        template.close()
