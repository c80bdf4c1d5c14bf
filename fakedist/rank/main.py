"""The child process: become the rank, run the script as ``__main__``, write down how it ended.

Order matters. The virtual GPU must be loaded before torch is imported, and the script imports torch: what goes around
it (:mod:`fakedist.rank.surroundings`) is put in place at that moment. The exit handler is registered before torch's, so
that it runs after those of torch and of the script. The recorder is closed while the frames of an error still live,
because they hold the tensors that were alive.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from fakedist.errors import FakedistError
from fakedist.gpu.spec import find_gpu
from fakedist.gpu.virtual import VirtualGpu, virtual_gpu
from fakedist.importing import when_imported
from fakedist.job import Job
from fakedist.rank.ending import (
    INTERRUPTED_CODE,
    end_with_parent,
    how_it_ended,
    line_of,
    other_threads,
    quiet_stop_in_threads,
    terminate,
    uninterrupted,
    watched_exit,
)
from fakedist.rank.script import run_as_main, without_our_frames
from fakedist.rank.teller import Teller
from fakedist.run.directory import TAPE_NAME
from fakedist.run.journal import JournalWriter
from fakedist.run.manifest import load_manifest
from fakedist.world.spawned import OwnRanks, own_ranks

if TYPE_CHECKING:
    from fakedist.rank.surroundings import Surroundings

_MAKE_ROOM = "make room on the disk, or write elsewhere with -o"


class JournalFailed(BaseException):
    """The journal cannot be written, so the run ends; no ``except Exception`` of the script must go on without it."""


class OwnJournal:
    """The journal of this process alone: a forked child, which has the recorder too, writes nothing."""

    def __init__(self, path: Path) -> None:
        self._pid = os.getpid()
        with _no_room_ends_the_run():
            self._writer = JournalWriter(path)

    def append(self, record: dict[str, Any]) -> None:
        """Write one record.

        Raises:
            JournalFailed: It cannot be written (a full disk).
        """
        if os.getpid() == self._pid:
            with _no_room_ends_the_run():
                self._writer.append(record)

    def close(self) -> None:
        """No more records."""
        self._writer.close()


@contextmanager
def _no_room_ends_the_run() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalFailed(f"the recording cannot be written: {error.strerror}") from error


class SetupFailed(BaseException):
    """The rank cannot be set up where the script imports torch; no ``except Exception`` of it must go on without."""


class Rank:
    """This process as the rank: the GPU before torch, and torch's surroundings once the script has imported it.

    Attributes:
        has_failed: Whether those could not be set up.
    """

    def __init__(self, job: Job, run_directory: Path, teller: Teller) -> None:
        self._job = job
        self._teller = teller
        self._pid = os.getpid()
        self._journal = OwnJournal(run_directory / "journal.bin")
        self._tape_file = OwnJournal(run_directory / TAPE_NAME)
        self._before_torch = ExitStack()
        self._gpu: VirtualGpu | None = None
        self._own_ranks = OwnRanks(job)
        self._surroundings: Surroundings | None = None
        self._closed = self.has_failed = False

    def enter(self) -> None:
        """Set up all that the script will find but for what is in torch: that follows when torch is imported.

        Raises:
            FakedistError: This machine cannot do it.
        """
        atexit.register(self.leave)
        enter, job = self._before_torch.enter_context, self._job
        if job.device == "virtual":
            gpu = virtual_gpu(find_gpu(job.gpu), devices=job.gpus_per_node, memory_bytes=job.gpu_memory_bytes)
            self._gpu = enter(gpu)
        self._own_ranks = enter(own_ranks(job))
        enter(watched_exit(self._exits_at_once))
        enter(quiet_stop_in_threads(self._stopped_in_thread, SetupFailed))
        enter(when_imported(lambda name: name == "torch", self._torch_is_imported))

    def close(self, outcome: str, code: int, message: str = "", line: str = "") -> None:
        """Write everything that is still in memory, and how the script ended and where; the first call counts."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if (
            self._surroundings is not None
            and self._surroundings.stopped
            and not code
            and outcome in ("finished", "exit")
        ):
            outcome, line = "stopped", ""  # what runs the script (unittest, pytest) ended well all the same
        how = {"outcome": outcome, "code": code, "message": message}
        with uninterrupted():
            try:
                if self._surroundings is not None:
                    self._surroundings.close({**how, "line": line})
                else:
                    self._write_without_torch({**how, "line": line})
            except JournalFailed as error:
                self.give_up(error)
            else:
                self._teller.tell({**how, "line": line})

    def give_up(self, error: JournalFailed) -> None:
        """The records cannot be written any more: the parent says so."""
        self._closed = True
        _tell_error(self._teller, str(error), _MAKE_ROOM, before_start=False)

    def stop_recording(self) -> None:
        """Take the recorder's hooks off torch; the faked world stays for the script's exit handlers."""
        if os.getpid() == self._pid and self._surroundings is not None:
            self._surroundings.stop_recording()

    def leave(self) -> None:
        """The process ends: nothing of the script runs any more."""
        if os.getpid() != self._pid:
            return
        self.close("finished", 0)
        if self._surroundings is not None:
            self._surroundings.leave()
        self._before_torch.close()
        self._tape_file.close()
        self._journal.close()

    def _torch_is_imported(self, module: ModuleType) -> None:
        """Put its surroundings around torch, once; a forked process is not the rank."""
        if os.getpid() != self._pid:
            return
        if self.has_failed:  # a bare `except:` swallowed the first one
            raise SetupFailed
        if self._surroundings is None and not self._closed:
            self._guarded(self._surround)

    def _surround(self) -> None:
        from fakedist.rank.surroundings import Process, Surroundings

        if self._gpu is not None:
            self._gpu.set_environment()
        process = Process(self._job, self._journal, self._tape_file, self._teller, self._gpu, self._own_ranks)
        surroundings = Surroundings(process, self._guarded)
        surroundings.enter()
        self._surroundings = surroundings
        if threading.current_thread() is not threading.main_thread():
            _in_main_thread(surroundings.record_this_thread)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run what must not fail: where it does, the run ends, whatever the script catches.

        Raises:
            SetupFailed: It did, and the parent knows why.
        """
        try:
            work()
        except FakedistError as error:
            self._fail(error.message, error.hint)
        except Exception as error:
            traceback.print_exc()
            self._fail(f"{type(error).__name__} while torch was set up: {error}", "this is a bug in fakedist")

    def _fail(self, message: str, hint: str) -> NoReturn:
        self._closed = self.has_failed = True
        _tell_error(self._teller, message, hint, before_start=True)
        raise SetupFailed(message) from None

    def _write_without_torch(self, how: dict[str, object]) -> None:
        """The outcome of a script in which torch was never imported, or not past the finder that watches for it."""
        text = "the script never imported torch: there is nothing to report"
        if "torch" in sys.modules:
            text = "the script imported torch past Python's import system: nothing of what it did was recorded"
        self._journal.append({"kind": "note", "text": text})
        self._journal.append({"kind": "outcome", **how, "last_phase": "init", "last_step": 0})

    def _exits_at_once(self, code: int) -> None:
        self.close("exit", code, "os._exit")

    def _stopped_in_thread(self) -> None:
        self.close("stopped", 0, "in a thread")


def main(run_directory: str) -> int | str | None:
    """Run the job of ``run_directory`` in this process; returns what to give to ``sys.exit``."""
    teller = Teller.from_environment()
    end_with_parent()
    try:
        job = Job.from_dict(load_manifest(Path(run_directory))["job"])
        rank = Rank(job, Path(run_directory), teller)
        rank.enter()
    except FakedistError as error:
        _tell_error(teller, error.message, error.hint, before_start=True)
        return 1
    except JournalFailed as error:
        _tell_error(teller, str(error), _MAKE_ROOM, before_start=True)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    signal.signal(signal.SIGTERM, terminate)
    teller.tell({"started": True, "pid": os.getpid()})
    try:
        run_as_main(job)
    except BaseException as error:
        return _ended(rank, error)
    if not other_threads():
        rank.close("finished", 0)
        rank.stop_recording()
    return 0


def _ended(rank: Rank, error: BaseException) -> int | str | None:
    """The script raised ``error``: close the recording while its frames are alive; the code for ``sys.exit``."""
    error.__traceback__ = without_our_frames(error)
    if isinstance(error, JournalFailed):
        rank.give_up(error)
        return 1
    if rank.has_failed:
        return 1  # the parent has been told, and whatever the script makes of it comes of that
    outcome, code, message = how_it_ended(error)
    rank.close(outcome, code, message, line_of(error))
    rank.stop_recording()
    if isinstance(error, SystemExit) and outcome != "stopped":
        return error.code
    if outcome == "stopped" and not message:
        return 0
    sys.excepthook(type(error), error, error.__traceback__)
    return code


def _tell_error(teller: Teller, message: str, hint: str, before_start: bool) -> None:
    """An error of ours: the parent prints it."""
    teller.tell({"error": message, "hint": hint, "before_start": before_start})


_pending: list[Any] = []  # what Python has yet to call must live until then


def _in_main_thread(work: Callable[[], None]) -> None:
    """Have the main thread run ``work`` as soon as it runs Python again: signal handlers are called in this way."""

    def call(_: Any) -> int:
        work()
        return 0

    _pending.append(ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call))
    ctypes.pythonapi.Py_AddPendingCall(_pending[-1], None)
