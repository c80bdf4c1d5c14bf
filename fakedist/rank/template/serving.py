"""The template's process: imports what it is told to, then forks a rank each time it is asked for one."""

from __future__ import annotations

import ctypes
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fakedist.rank.reporter import PIPE_VARIABLE
from fakedist.rank.template.channel import PEAK, Channel, Fork, Forked, Over, Refused, Release, Released
from fakedist.rank.template.hidden import HiddenFinder
from fakedist.rank.template.learned import TORCH, Learned
from fakedist.rank.template.preloading import CannotForkError, preload
from fakedist.rank.template.starting import ForkedStart, Ready, Start, register_last

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GRACE_S = 10.0
#: Stands for all frameworks, among the modules that a template leaves out.
_FRAMEWORKS = "frameworks"
_MOST_LEFT_OUT = 6


def forked_rank(learned: str, control: str, *left_out: str) -> tuple[str, Start]:
    """Be a template: fork ranks until the keeper closes its end.

    This returns in each rank, and never in the template itself.

    Args:
        learned: The file with what to import.
        control: The descriptor of the socket that the keeper sends channels over.
        left_out: Modules, each with those below it, because of which nothing could fork.

    Returns:
        The rank's run directory, and how it starts.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _last.is_last_of_all = register_last(_last.run)  # before any import registers a handler
    path, why, ready = Path(learned), "", None
    if (wanted := Learned.read(path)) is None:
        os._exit(1)
    path_of_modules = list(sys.path)
    try:
        ready = preload(without(wanted, left_out), path)
    except CannotForkError as error:
        more = error.without or _FRAMEWORKS
        if more not in left_out and len(left_out) < _MOST_LEFT_OUT:
            os.execve(sys.executable, [*sys.orig_argv, more], wanted.environment)
        why = str(error)
    sys.path[:] = path_of_modules
    return _Template(socket.socket(fileno=int(control)), ready, why).serve()


def without(learned: Learned, left_out: Collection[str]) -> Learned:
    """What is left to import without some modules and those below them, or without all frameworks.

    The scene that one of them was to begin with begins with the next that is left.
    """
    if _FRAMEWORKS in left_out:
        tops = {each.partition(".")[0] for each in learned.modules}
        left_out = {*left_out, *(tops - {*TORCH, "fakedist"})}
    scenes, scene = dict(learned.scenes), None
    modules, moved = [], []
    for name in learned.modules:
        scene = scenes.get(name, scene)
        if any(f"{name}.".startswith(f"{each}.") for each in left_out):
            continue
        modules.append(name)
        if scene is not None:
            moved.append((name, scene))
            scene = None
    return replace(learned, modules=modules, scenes=moved)


class _Last:
    """What runs when a rank's process ends, after the handlers of all imports."""

    def __init__(self) -> None:
        self.is_last_of_all = False
        self._handlers: list[Callable[[], None]] = []

    def register(self, handler: Callable[[], None]) -> bool:
        self._handlers.append(handler)
        return self.is_last_of_all

    def run(self) -> None:
        for each in self._handlers:
            each()


_last = _Last()


class _Template:
    """Serves one channel after the other, and one rank at a time."""

    def __init__(self, control: socket.socket, ready: Ready | None, why: str) -> None:
        self._control, self._ready, self._why = control, ready, why

    def serve(self) -> tuple[str, Start]:
        while True:
            files: list[int] = []
            with suppress(ConnectionError):  # the keeper left without reading how much memory ranks held
                _, files, *_ = socket.recv_fds(self._control, 1, 1)
            if not files:
                os._exit(0)  # handlers of modules that were not used have nothing to do
            channel = Channel(socket.socket(fileno=files[0]))
            with suppress(OSError):
                if (rank := self._serve(channel)) is not None:
                    return rank
            channel.close()

    def _serve(self, channel: Channel) -> tuple[str, Start] | None:
        """Fork the ranks that one process asks for. Returns in a rank, or when the process has closed its end."""
        while True:
            message, files = channel.receive()
            if not isinstance(message, Fork):
                return None
            if self._ready is None:
                channel.send(Refused(self._why))
            elif not (pid := os.fork()):
                channel.close()
                self._control.close()
                return message.run_directory, _become(message, files, self._ready)
            for each in files:
                os.close(each)
            if self._ready is not None:
                channel.send(Forked(pid))
                self._follow(pid, channel)

    def _follow(self, pid: int, channel: Channel) -> None:
        """Wait until a rank is over. It is asked to leave if whoever asked for it is gone."""
        ended = os.pidfd_open(pid)
        try:
            while ended not in (found := select.select([ended, channel.fileno()], [], [])[0]):
                if channel.fileno() in found:
                    os.kill(pid, signal.SIGTERM)
                    if not select.select([ended], [], [], _GRACE_S)[0]:
                        os.kill(pid, signal.SIGKILL)
                    break
            with suppress(OSError):
                status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                assert status is not None
                channel.send(Over(status.si_status if status.si_code == os.CLD_EXITED else -status.si_status))
                while not isinstance(channel.receive()[0], Release | None):
                    pass
        finally:
            os.close(ended)
            usage = os.wait4(pid, 0)[2]
            with suppress(OSError):
                self._control.send(PEAK.pack(usage.ru_maxrss))
                channel.send(Released())


def _become(asked: Fork, files: list[int], ready: Ready) -> Start:
    """Make this fork a process as if it had been started for the rank."""
    os.setsid()
    *streams, pipe = files
    for number, each in enumerate(streams):
        os.dup2(each, number)
        os.close(each)
    os.chdir(asked.cwd)
    os.environ.clear()
    os.environ.update(asked.environment | {PIPE_VARIABLE: str(pipe)})
    sys.meta_path.insert(0, HiddenFinder(ready.hidden))
    importlib.invalidate_caches()
    return ForkedStart(ready, asked.parent, _last.register)
