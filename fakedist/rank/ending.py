"""The script's end: its outcome, signals, ``os._exit``, threads and the parent's death."""

from __future__ import annotations

import linecache
import opcode
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from fakedist.errors import ExitCode, FakedistError, SetupError, StopRun, chain_of
from fakedist.rank.fork_server import end_with_parent
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.units import format_bytes

#: Instructions at which our frames raise what is not their own fault: ``raise``, and a call with ``*args``.
_MEANT = {opcode.opmap[name] for name in ("RAISE_VARARGS", "RERAISE", "CALL_FUNCTION_EX")}
_ROOT = str(Path(__file__).parents[2]) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
#: Where the standard library is. Asking takes 0.2 ms, too long for each frame or object that is compared with it.
LIBRARY = sysconfig.get_path("stdlib")
_PF_EXITING = 4  # linux/sched.h
#: Errors of the C library, the linker, C++ and torch where there is no address space left.
_REFUSED = ("Cannot allocate memory", "failed to map segment", "std::bad_alloc", "can't allocate memory")
_HUB = (
    " (get_kernel downloads from a hub: run it once where there is a network and copy Hugging Face's cache here,"
    " or name a copy: LOCAL_KERNELS=REPOSITORY=DIRECTORY)"
)


class Terminated(SystemExit):
    """SIGTERM arrived. Exits as ``sys.exit`` does, so ``finally`` and ``atexit`` run and the records are kept."""


def how_it_ended(error: BaseException) -> Ending:
    """The script's end, by the error that it raised."""
    chain = list(chain_of(error))
    text = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
    if isinstance(error, Terminated) and parent_is_gone():
        return Ending(Outcome.KILLED, ExitCode.TERMINATED, "with fakedist profile, which was killed")
    if isinstance(error, Terminated):
        return Ending(Outcome.INTERRUPTED, ExitCode.TERMINATED, "SIGTERM")
    if any(isinstance(link, StopRun) for link in chain):
        expected = isinstance(error, (StopRun, SystemExit))
        return Ending(Outcome.STOPPED, 0, "" if expected else f"while stopping, the script raised {text}")
    if isinstance(error, SystemExit):
        code = error.code
        if code is None or isinstance(code, int):
            return Ending(Outcome.EXIT, (code or 0) & 0xFF, _refusal_of(error) if code == ExitCode.USAGE else "")
        return Ending(Outcome.EXIT, 1, str(code))
    if isinstance(error, KeyboardInterrupt):
        return Ending(Outcome.INTERRUPTED, ExitCode.INTERRUPTED, "Ctrl-C")
    out_of_memory = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())
    if any(isinstance(link, out_of_memory) for link in chain):
        return Ending(Outcome.OUT_OF_MEMORY, ExitCode.OUT_OF_MEMORY, text)
    if fault := next(filter(None, map(fault_of, chain)), ""):
        return Ending(Outcome.FAULT, ExitCode.ERROR, f"{text}, in {fault}")
    return Ending(Outcome.EXCEPTION, ExitCode.ERROR, text + (_HUB if any(map(_is_of_hub, chain)) else ""))


def _is_of_hub(error: BaseException) -> bool:
    """Whether ``get_kernel`` of Hugging Face's package ``kernels`` raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [(str(frame.f_globals.get("__name__")).partition(".")[0], frame.f_code.co_name) for frame in frames]
    return ("kernels", "get_kernel") in names


def _refusal_of(error: SystemExit) -> str:
    """The message that ``ArgumentParser.error`` left with; empty if something else did."""
    refusal = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        message = frame.f_locals.get("message") if frame.f_code.co_name == "error" else None
        refusal = message if isinstance(message, str) else refusal
    return " ".join(refusal.split())


def lack_of_machine(num_bytes: int, error: BaseException | None) -> SetupError | None:
    """The error of a run to which this machine gave no address space, of which tensors without values take their size.

    Args:
        num_bytes: What the virtual GPU or a large tensor on the host was refused; 0 if nothing was.
        error: What the script raised. Under ``ulimit -v``, it may say that something else was refused.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    is_limited = limit != resource.RLIM_INFINITY
    if not num_bytes and not (is_limited and error is not None and any(map(_says_refused, chain_of(error)))):
        return None
    text = f"this machine gave no address space{f' for {format_bytes(num_bytes)}' if num_bytes else ''}"
    if is_limited:
        allowed = f"ulimit -v allows {format_bytes(limit)}, in which libraries and all tensors of the virtual GPU count"
        return SetupError(f"{text}: {allowed}", "ulimit -v unlimited")
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        return SetupError(f"{text}: vm.overcommit_memory is 2", "sysctl vm.overcommit_memory=0")
    return SetupError(f"{text}: it may have too many mappings (vm.max_map_count)", "sysctl vm.max_map_count=1048576")


def _says_refused(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(text in str(error) for text in _REFUSED)


def fault_of(error: BaseException) -> str:
    """The line of this package at which it failed by itself, as ``fakedist/file.py:line (function)``.

    Empty for an error of the script, or of torch on its behalf: raised by the script's code below our frames, raised by
    us on purpose, as torch would, or by a call that we pass on, with its ``*args`` or to ``original``.
    """
    torch = sys.modules.get("torch")
    if torch is None or isinstance(error, (FakedistError, MemoryError)):
        return ""
    of_torch = os.path.dirname(torch.__file__ or "") + os.sep
    fault = ""
    link = error.__traceback__
    while link is not None:
        code = link.tb_frame.f_code
        name = code.co_filename
        if name.startswith(_OURS):
            fault = "" if _is_meant(link) else f"{name.removeprefix(_ROOT)}:{link.tb_lineno} ({code.co_name})"
        elif not name.startswith((of_torch, "<")) and not _is_of_library(name):
            fault = ""
        link = link.tb_next
    return fault


def line_of(error: BaseException) -> str:
    """The innermost traceback line outside the standard library and this package, as ``file:line (function)``.

    Empty if there is none.
    """
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not code.co_filename.startswith(("<", _OURS)) and not _is_of_library(code.co_filename):
            line = f"{code.co_filename}:{number} ({code.co_name})"
    return line


def line_now() -> str:
    """The line that :func:`line_of` would give for an error raised now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(("<", _OURS)) and not _is_of_library(name):
            return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return ""


def _is_meant(link: TracebackType) -> bool:
    """Return whether our frame raises, or passes a call of the script on."""
    code = link.tb_frame.f_code
    if code.co_code[link.tb_lasti] in _MEANT:
        return True
    line, _, column, _ = next(islice(code.co_positions(), link.tb_lasti // 2, None))
    return line is not None and linecache.getline(code.co_filename, line)[column or 0 :].startswith("original(")


def _is_of_library(filename: str) -> bool:
    return filename.startswith(LIBRARY) and not filename.startswith(f"{LIBRARY}/site-packages")


def other_threads() -> bool:
    """Return whether the interpreter will wait for threads that the script started."""
    return any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate())


class _Lineage:
    """This process and the one that wants it, which is not its parent if it forked from a server."""

    def __init__(self) -> None:
        self.is_of(os.getppid())

    def is_of(self, wanted_by: int) -> None:
        self.own, self.parent, self.wanted_by = os.getpid(), os.getppid(), wanted_by
        self.was_terminated = False


_lineage = _Lineage()


def terminate(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: the rank raises :class:`Terminated`, a forked child dies of the signal as usual."""
    if os.getpid() != _lineage.own:  # forked, such as a DataLoader worker
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        return
    if _lineage.was_terminated and parent_is_gone():  # the kernel repeats it while the parent's threads end
        return
    _lineage.was_terminated = True
    raise Terminated(ExitCode.TERMINATED)


def terminate_with_parent(wanted_by: int | None = None) -> None:
    """Have the kernel send this process SIGTERM when its parent dies, which watches ``wanted_by``, if given."""
    if wanted_by is not None:
        _lineage.is_of(wanted_by)
    end_with_parent(signal.SIGTERM)
    if parent_is_gone():  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def parent_is_gone() -> bool:
    """Return whether the process that wants this one has ended or is ending.

    The parent's main thread dies first, which sends SIGTERM here; it stays the parent until its last thread is gone.
    """
    if os.getppid() != _lineage.parent:
        return True
    try:
        stat = Path(f"/proc/{_lineage.wanted_by}/stat").read_text()
    except OSError:
        return True
    return bool(int(stat.rpartition(") ")[2].split()[6]) & _PF_EXITING)  # proc(5): flags are the ninth field


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM while the records are written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def watched_exit(exiting: Callable[[int], None]) -> Iterator[None]:
    """Call ``exiting(code)`` before ``os._exit`` ends this process."""
    original = os._exit

    def _exit(status: int) -> NoReturn:
        try:
            exiting(status & 0xFF)
        finally:
            original(status)

    os._exit = _exit
    try:
        yield
    finally:
        os._exit = original


@contextmanager
def watched_exec(variables: dict[str, str]) -> Iterator[None]:
    """Run a program that would replace this process in one of its own, with ``variables``, and end with its exit code.

    The program's processes may be ranks, which could not be reported if it had replaced this process.
    """
    own = os.getpid()
    originals = os.execv, os.execve

    def execve(path: Any, argv: Any, env: Any, /) -> NoReturn:
        if os.getpid() != own or isinstance(path, int):  # forked, or a descriptor
            originals[1](path, argv, env)
        whole = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()} | variables
        program = subprocess.Popen(argv, executable=os.path.abspath(os.fsdecode(path)), env=whole, close_fds=False)
        code = program.wait()
        os._exit(code if code >= 0 else 128 - code)

    os.execve = execve  # type: ignore[assignment]
    os.execv = lambda path, argv, /: execve(path, argv, os.environ)
    try:
        yield
    finally:
        os.execv, os.execve = originals


@contextmanager
def watched_signals(sends: Callable[[int], None]) -> Iterator[None]:
    """Call ``sends(number)`` before the script sends a signal to this process or its group."""
    own = os.getpid()

    def is_here(process: int) -> bool:
        return os.getpid() == own and process in (own, 0, -1, -os.getpgrp())

    def kill(pid: int, signum: int, /) -> None:
        if is_here(pid):
            sends(signum)
        original_kill(pid, signum)

    def killpg(pgid: int, signum: int, /) -> None:
        if is_here(-pgid):
            sends(signum)
        original_killpg(pgid, signum)

    def raise_signal(signum: int, /) -> None:
        sends(signum)
        original_raise(signum)

    def abort() -> NoReturn:
        sends(signal.SIGABRT)
        original_abort()

    original_kill, original_killpg, original_abort, original_raise = os.kill, os.killpg, os.abort, signal.raise_signal
    os.kill, os.killpg, os.abort, signal.raise_signal = kill, killpg, abort, raise_signal
    try:
        yield
    finally:
        os.kill, os.killpg, os.abort, signal.raise_signal = (
            original_kill,
            original_killpg,
            original_abort,
            original_raise,
        )


@contextmanager
def quiet_stop_in_threads(stopped: Callable[[], None], failed: type[BaseException]) -> Iterator[None]:
    """Suppress the traceback of a training thread that was stopped, or that a reported ``failed`` error ended."""
    original = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type.__name__ == "StopRun":
            stopped()
        elif issubclass(arguments.exc_type, failed):
            pass
        else:
            original(arguments)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = original
