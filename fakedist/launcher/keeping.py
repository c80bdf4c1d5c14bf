"""Keeps a template process for ranks that run one after the other. It needs the standard library alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from fakedist.launcher.boot import OF_A_TEMPLATE
from fakedist.launcher.template_process import TemplateProcess
from fakedist.rank.template.channel import PEAK

#: Templates that are started for one script. If ranks start again on their own even so, no template fits them.
_MOST_TEMPLATES = 3
_ROOT = os.fspath(Path(__file__).parents[2])


class TemplateKeeper(TemplateProcess[socket.socket]):
    """Starts a template once it is known what to import, and a new one when that changes.

    Args:
        learned: The file that takes what a rank's script imported (:mod:`fakedist.rank.template.learned`).
        output: The descriptor for what the template prints. None for this process's stdout and stderr.
    """

    def __init__(self, learned: Path, output: int | None = None) -> None:
        super().__init__()
        self.learned = learned
        self._output = output
        self._key = ""
        self._version = (0, 0)
        self._num_started = 0

    def open_channel(self, key: str) -> socket.socket | None:
        """A channel to a template for a script.

        None if it is not known yet what the script imports, or if no template fits its ranks: a rank that starts again
        writes once more what it imports.
        """
        try:
            found = json.loads(self.learned.read_text())
            status = self.learned.stat()
        except (OSError, ValueError):
            return None
        if found["key"] != key:
            return None
        if key != self._key:
            self._key, self._num_started = key, 0
        version = status.st_ino, status.st_mtime_ns
        if version != self._version or self._process is None:
            self.close()
            if self._num_started < _MOST_TEMPLATES:
                self._start(found)
        self._version = version
        if self._connection is None:
            return None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._connection, [b"c"], [theirs.fileno()])
            except OSError:  # it was killed
                ours.close()
                self.close()
                return None
        return ours

    def most_bytes(self) -> int:
        """The most resident memory of a rank that ended since this was asked last."""
        most = 0
        if self._connection is not None:
            with suppress(BlockingIOError, ConnectionError):
                while data := self._connection.recv(PEAK.size, socket.MSG_DONTWAIT):
                    most = max(most, PEAK.unpack(data)[0] * 1024)
        return most

    def _start(self, found: dict[str, object]) -> None:
        ours, theirs = socket.socketpair()
        environment, cwd = found["environment"], found["cwd"]
        assert isinstance(environment, dict)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", OF_A_TEMPLATE, _ROOT, os.fspath(self.learned), str(theirs.fileno())],
                env=environment,
                cwd=str(cwd),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._connection = ours
        self._num_started += 1
