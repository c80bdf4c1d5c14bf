"""A rank's process, as its parent sees it: started on its own, or forked from a template."""

from __future__ import annotations

import os
import subprocess

from fakedist.launcher.keeping import ForkedChild


class OwnChild:
    """A process that this one started. Its process ID stays taken until :meth:`wait` has returned."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def has_ended(self) -> bool:
        """Whether it has ended. It is not reaped, so its process group keeps its number."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self) -> int:
        """Wait for it, and reap it. Returns its exit code; -n if signal n killed it."""
        return self._process.wait()


Child = OwnChild | ForkedChild
