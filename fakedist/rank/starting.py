"""How a rank's process starts: on its own, or as a fork of a template."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fakedist.importing import when_imported
from fakedist.options import Job
from fakedist.rank.fork_server import end_with_parent, serve
from fakedist.rank.preloading import Learner, Preloaded, preload
from fakedist.rank.reporter import PIPE_VARIABLE

#: Environment variable for a rank that starts on its own. It is removed before the script runs.
START_VARIABLE = "FAKEDIST_START"


class Start:
    """The start of a rank.

    Attributes:
        learn: The file that takes what its script imports of torch. None for none.
        restarted: Its difference from a template, so that it restarts on its own. Empty without one.
        preloaded: Torch's modules, if it forked from a template.
        parent: The process that asked for it, if that is not its parent.
    """

    def __init__(
        self,
        learn: Path | None = None,
        restarted: str = "",
        preloaded: Preloaded | None = None,
        parent: int | None = None,
    ) -> None:
        self.restarted, self.parent = restarted, parent
        self._learn, self._preloaded = learn, preloaded
        self._environment = dict(os.environ)
        self._learner: Learner | None = None

    @classmethod
    def from_environment(cls) -> Start:
        """Read and remove the variable, so that the script and its programs do not see it."""
        message = json.loads(os.environ.pop(START_VARIABLE, "{}"))
        return cls(Path(message["learn"]) if message.get("learn") else None, message.get("restarted", ""))

    def at_exit(self, leave: Callable[[], None]) -> bool:
        """Call this when the process ends, after all later handlers. Returns whether nothing follows."""
        if self._preloaded is None:
            return _register_last(leave)
        atexit.register(self._preloaded.show)
        _at_last.append(leave)
        return _is_last

    @contextmanager
    def watched(self, job: Job, restart: Callable[[str], None]) -> Iterator[None]:
        """Watch the script's imports of torch's; ``restart``, given a reason, starts the rank on its own."""
        if self._preloaded is not None:
            self._preloaded.restart = restart
        if self._learn is None:
            yield
            return
        learner = self._learner = Learner(self._learn, job, self._environment)
        with when_imported(learner.asked, lambda module: learner.imported()):
            yield

    def surrounded(self) -> None:
        """The recorder and the faked world are set up in torch."""
        if self._preloaded is not None:
            self._preloaded.surrounded()

    def cuda_begins(self) -> None:
        """CUDA is initialised. Nothing is allocated yet."""
        for part in (self._learner, self._preloaded):
            if part is not None:
                part.cuda_begins()

    def over(self) -> None:
        """The script has ended, after it imported torch."""
        if self._preloaded is not None:
            self._preloaded.over()
        if self._learner is not None:
            with suppress(OSError):
                self._learner.write()


def start_variable(learn: Path | None, restarted: str) -> dict[str, str]:
    """The variable that :meth:`Start.from_environment` reads."""
    return {START_VARIABLE: json.dumps({"learn": None if learn is None else str(learn), "restarted": restarted})}


def forked_rank(learned: str, door: str) -> tuple[str, Start]:
    """Be a template of ranks. Return only in each rank, with its run directory and start."""
    global _is_last
    end_with_parent(signal.SIGKILL)
    _is_last = _register_last(_run_last)  # before any import registers a handler
    preloaded = preload(Path(learned))
    request, (pipe,) = serve(socket.socket(fileno=int(door)), serves=preloaded is not None)
    assert preloaded is not None
    os.environ[PIPE_VARIABLE] = str(pipe)
    importlib.invalidate_caches()
    preloaded.become_finder()
    return request["run_directory"], Start(preloaded=preloaded, parent=request["parent"])


_at_last: list[Callable[[], None]] = []
_is_last = False


def _run_last() -> None:
    for handler in _at_last:
        handler()


def _register_last(leave: Callable[[], None]) -> bool:
    """Call this when the process ends. Return whether nothing follows: ``sitecustomize`` may come before us."""
    is_last = not atexit._ncallbacks()
    atexit.register(leave)
    return is_last
