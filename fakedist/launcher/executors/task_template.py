"""The task template: a process that has imported what makes tables, and from which the processes of tasks fork.

A fork becomes a child of the supervisor, which then watches it as it does one that started on its own. Both halves need
the standard library alone, besides what the template is to import.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fakedist.launcher.template_process import TemplateProcess
from fakedist.launcher.template_variable import told_of_template
from fakedist.rank.template.channel import Channel, Forked, ForkTask

#: Seconds in which a template has to answer. Its imports take one.
_ANSWER_S = 60.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PID = struct.Struct("<i")
#: Arrow's allocator would start a thread, and none may be missing in a fork.
_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


class TaskTemplate(TemplateProcess[Channel]):
    """The supervisor's half. There is one template, from the second task on: the first may be the only one.

    If the template ends, tasks start on their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_tasks = 0
        self._environment: dict[str, str] = {}

    def fork(self, program: Sequence[str], task: ForkTask, files: Sequence[int]) -> Forked | None:
        """Fork the process of a task. None if it has to start on its own.

        Args:
            program: The template's program and arguments, to which the descriptor for :func:`forked_task` is added.
            task: What to be.
            files: The descriptor for its output; that of a channel to a template of ranks, if there is one.
        """
        self._num_tasks += 1
        if self._num_tasks == 2:
            with suppress(OSError):  # no memory, or no process more
                self._start(program, task)
        if self._connection is None or task.environment != self._environment:
            return None
        with suppress(OSError):
            self._connection.send(task, files)
            if self._connection.has_message(_ANSWER_S):
                answer, _ = self._connection.receive()
                if isinstance(answer, Forked):
                    return answer
        self.close()  # it ended: something cannot be imported, or starts threads
        return None

    def _start(self, program: Sequence[str], task: ForkTask) -> None:
        ours, theirs = socket.socketpair()
        self._connection, self._environment = Channel(ours), task.environment
        with theirs:
            self._process = subprocess.Popen(
                [*program, str(theirs.fileno())],
                env=task.environment | _NO_THREADS,
                cwd=task.cwd,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )


def forked_task(control: int, import_: Callable[[], None]) -> list[str]:
    """Be a template: fork the processes of tasks until the supervisor closes its end.

    This returns in each of them, once it is as if it had been started for the task, and never in the template itself.

    Args:
        control: The descriptor of the channel to the supervisor.
        import_: Imports what tasks need.

    Returns:
        The task's arguments.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    supervisor = os.getppid()
    begun = {name: value for name, value in os.environ.items() if name not in _NO_THREADS}  # Python may set LC_CTYPE
    import_()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    gc.freeze()
    channel = Channel(socket.socket(fileno=control))
    while _has_one_thread():
        task, files = channel.receive()
        if not isinstance(task, ForkTask):
            break
        if _fork(channel, files):
            channel.close()
            _become(replace(task, environment=begun | task.environment), files, supervisor)
            return task.arguments
    os._exit(0)  # handlers of modules that were not used have nothing to do


def _has_one_thread() -> bool:
    """Whether a fork would lack no thread of a library. OpenBLAS ends its own before each fork."""
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _fork(channel: Channel, files: Sequence[int]) -> bool:
    """Fork a process that becomes a child of the supervisor. Returns whether this is it.

    The process between the two ends at once, and the kernel then gives its child to the supervisor, which adopts what
    its tasks leave behind.
    """
    (told, tell), (waiting, go) = os.pipe(), os.pipe()
    if not (between := os.fork()):
        if pid := os.fork():
            os.write(tell, _PID.pack(pid))
            os._exit(0)
        for each in (told, tell, go):
            os.close(each)
        if not os.read(waiting, 1):
            os._exit(1)  # the template was killed, or the supervisor
        os.close(waiting)
        return True
    for each in (tell, waiting, *files):
        os.close(each)
    pid = _PID.unpack(os.read(told, _PID.size))[0]
    os.waitpid(between, 0)
    with suppress(OSError):
        channel.send(Forked(pid))
        os.write(go, b"g")
    os.close(told)
    os.close(go)
    return False


def _become(task: ForkTask, files: Sequence[int], supervisor: int) -> None:
    """Make this fork a process as if it had been started for the task."""
    os.setsid()
    end_with_supervisor(supervisor)
    output, *channels = files
    null = os.open(os.devnull, os.O_RDONLY)
    for number, each in enumerate((null, output, output)):
        os.dup2(each, number)
    os.close(null)
    os.close(output)
    os.chdir(task.cwd)
    os.environ.clear()
    os.environ.update(task.environment)
    if task.learned:
        os.environ.update(told_of_template(Path(task.learned), channels[0] if channels else None))


def end_with_supervisor(supervisor: int) -> None:
    """End this process, and by its own doing the rank, if even the supervisor is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != supervisor:  # it died before the prctl call
        os.kill(os.getpid(), signal.SIGTERM)
