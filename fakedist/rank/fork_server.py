"""A fork server: a process that has done its imports and forks a process on each request.

A request is a packet of JSON on a Unix socket, the *door*, with descriptors: for stdin, stdout and stderr, further
ones, and last a socket for the answers. This needs the standard library alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

#: The most resident memory of a process that has ended, in KiB, as the door's owner reads it.
PEAK = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GRACE_S = 10.0
_MOST_BYTES, _MOST_FILES = 1 << 22, 8


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a socket that keeps packets apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Send a message, and duplicates of descriptors.

    Raises:
        OSError: The other end is closed, or the message is too long.
    """
    socket.send_fds(end, [json.dumps(message).encode(errors="surrogateescape")], files)


def receive(end: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Wait for a message, and take the descriptors that came along. None: the other end is closed."""
    try:
        data, files, *_ = socket.recv_fds(end, _MOST_BYTES, _MOST_FILES)
    except ConnectionError:
        return None, []
    return (json.loads(data) if data else None), list(files)


def end_with_parent(number: int, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent ends; ``parent`` is None for the present one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # it ended before the prctl call
        os.kill(os.getpid(), number)


def can_fork() -> bool:
    """Return whether a fork would lack no thread of a library. OpenBLAS ends its own before each fork."""
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task")) == 1


def serve(door: socket.socket, *, serves: bool = True) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request, one after the other, until no process can send any more.

    This returns in each fork, once it is as if it had been started, and never in the server itself. Without
    ``serves``, each request is refused.

    Returns:
        The request, and its further descriptors.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    while True:
        request, files = receive(door)
        if request is None or len(files) < 4:
            os._exit(0)  # handlers of modules that were not used have nothing to do
        server = os.getpid()
        with socket.socket(fileno=files.pop()) as answers:
            pid = os.fork() if serves else None
            if pid:
                _follow(pid, answers, door)
            elif pid is None:
                with suppress(OSError):  # whoever asked is gone
                    send(answers, {"pid": None})
        if pid == 0:
            door.close()
            _become(request, files[:3], server)
            return request, files[3:]
        for descriptor in files:
            os.close(descriptor)


def _follow(pid: int, answers: socket.socket, door: socket.socket) -> None:
    """Report the end of a process to the requester. If that one is gone, ask the process to leave."""
    ended = os.pidfd_open(pid)
    with suppress(OSError):
        send(answers, {"pid": pid})
    if ended not in select.select([ended, answers.fileno()], [], [])[0]:
        os.kill(pid, signal.SIGTERM)
        if not select.select([ended], [], [], _GRACE_S)[0]:
            os.kill(pid, signal.SIGKILL)
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    with suppress(OSError):
        send(answers, {"code": status.si_status if status.si_code == os.CLD_EXITED else -status.si_status})
        answers.recv(1)  # until then its process ID stays taken
    os.close(ended)
    usage = os.wait4(pid, 0)[2]
    with suppress(OSError):  # its owner has gone
        door.send(PEAK.pack(usage.ru_maxrss), socket.MSG_DONTWAIT)


def _become(request: Mapping[str, Any], streams: Sequence[int], server: int) -> None:
    os.setsid()
    end_with_parent(signal.SIGTERM, server)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    locale = os.environ.get("LC_CTYPE")  # Python may have set it
    os.environ.clear()
    os.environ.update(request["environment"])
    if locale is not None:
        os.environ.setdefault("LC_CTYPE", locale)
