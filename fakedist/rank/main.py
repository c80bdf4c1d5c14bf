"""The child process: becomes the rank, runs the script as ``__main__`` and records how it ended.

Order matters. The virtual GPU must be loaded before torch. When the script imports torch,
:mod:`fakedist.rank.surroundings` installs the recorder and the faked world. Our exit handler is registered before
torch's, so it runs after those of torch and of the script. The recorder is closed while the frames of an error still
live, because they hold the tensors that were alive.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from fakedist.errors import ExitCode, FakedistError
from fakedist.gpu.models.catalogue import CONTEXT_BYTES, find_gpu
from fakedist.gpu.virtual import LEDGER_VARIABLE, VirtualGpu, virtual_gpu
from fakedist.options import Job
from fakedist.patch import imported_within, when_imported
from fakedist.rank.ending import (
    how_it_ended,
    lack_of_machine,
    line_of,
    other_threads,
    quiet_stop_in_threads,
    terminate,
    terminate_with_parent,
    uninterrupted,
    watched_exec,
    watched_exit,
    watched_signals,
)
from fakedist.rank.joining import (
    REPLACED_VARIABLE,
    name_in_use,
    offer,
    read_started_records,
    refuse_rank,
    take_refused,
)
from fakedist.rank.leaving import leave_at_once
from fakedist.rank.preloading import Start, run_as_main, start_of_rank, without_our_frames
from fakedist.rank.read_files import ListedSources, listed_sources
from fakedist.rank.reporter import Ended, Failed, Reporter, Restarted, Signals, Started
from fakedist.rundir import notes
from fakedist.rundir.collector import rare_collections
from fakedist.rundir.directory import KERNELS_NAME, SOURCES_NAME, TAPE_NAME, JournalWriter, load_job, read_journal
from fakedist.rundir.encoding import Record
from fakedist.rundir.launch_records import LaunchKeysRecord
from fakedist.rundir.outcome import BEYOND_CAPACITY, Ending, Outcome
from fakedist.rundir.records import NoteRecord, OutcomeRecord
from fakedist.world.spawned import OwnRanks, own_ranks

if TYPE_CHECKING:
    from fakedist.rank.surroundings import Surroundings

_exit = os._exit  # not what watches the script's calls of it
#: Modules whose import makes hundreds of thousands of objects.
_LARGE = frozenset({
    "torch", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy",
    "accelerate", "deepspeed", "lightning", "megatron.core", "torchtitan", "transformer_engine", "transformers",
})  # fmt: skip
_MAKE_ROOM = "make room on the disk, or write elsewhere with -o"


class JournalFailed(BaseException):
    """The journal cannot be written. A ``BaseException``, so that no ``except Exception`` in the script swallows it."""


class OwnJournal:
    """A journal that only this process writes. A forked child inherits the recorder, but its records are dropped."""

    def __init__(self, path: Path) -> None:
        self._pid = os.getpid()
        with _no_room_ends_the_run():
            self._writer = JournalWriter(path)

    def append(self, record: Record) -> None:
        """Write one record.

        Raises:
            JournalFailed: The record cannot be written, for example because the disk is full.
        """
        if os.getpid() == self._pid:
            with _no_room_ends_the_run():
                self._writer.append(record)

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._writer.num_bytes

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


@contextmanager
def _no_room_ends_the_run() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalFailed(f"the recording cannot be written: {error.strerror}") from error


class SetupFailed(BaseException):
    """Setup failed in the script's ``import torch``. A ``BaseException``, so no ``except Exception`` swallows it."""


class Rank:
    """Turns this process into the rank: the GPU before torch, its surroundings once the script imports torch."""

    def __init__(self, job: Job, run_directory: Path, reporter: Reporter, start: Start) -> None:
        self._job = job
        self._start = start
        self._reporter = reporter
        self._pid = os.getpid()
        self._journal = OwnJournal(run_directory / "journal.bin")
        self._tape_file = OwnJournal(run_directory / TAPE_NAME)
        self._before_torch = ExitStack()
        self._gpu: VirtualGpu | None = None
        self._own_ranks = OwnRanks(job, refuse=partial(refuse_rank, job, run_directory, is_fork=True))
        self._run_directory = run_directory
        self._sources: ListedSources | None = None
        self._surroundings: Surroundings | None = None
        self._closed = self.has_failed = False
        self._is_last = False
        self._exit_code: int | None = None

    def enter(self) -> None:
        """Set up everything outside torch. The rest follows when the script imports torch.

        Raises:
            FakedistError: This machine cannot run the job.
            SetupFailed: The same, with torch imported. The parent has the reason.
        """
        self._is_last = self._start.at_exit(self.leave)
        enter = self._before_torch.enter_context
        job = self._job
        if job.device == "virtual":
            spec = find_gpu(job.gpu)
            gpu = virtual_gpu(spec, job.gpus_per_node, job.gpu_memory_bytes, job.reserve_bytes or 0)
            self._gpu = enter(gpu)
            os.environ.pop(LEDGER_VARIABLE, None)  # of another rank
            self._gpu.share(CONTEXT_BYTES.get(find_gpu(job.gpu).product, (0, ""))[0])
            name_in_use(self._gpu, "")
            offer(self._run_directory)
        enter(own_ranks(self._own_ranks))
        self._sources = enter(listed_sources(self._run_directory / SOURCES_NAME))
        enter(watched_exit(self._exits_at_once))
        enter(watched_exec({REPLACED_VARIABLE: json.dumps(dict(os.environ))}))
        enter(watched_signals(lambda number: self._reporter.send(Signals(number))))
        enter(quiet_stop_in_threads(self._stopped_in_thread, SetupFailed))
        enter(when_imported(lambda name: name == "torch", self._torch_is_imported))
        enter(imported_within(_LARGE.__contains__, lambda module: rare_collections()))
        if "torch" in sys.modules:  # a fork server imported it
            self._guarded(self._surround)
        enter(self._start.watched(self._restart))

    def close(self, ending: Ending, line: str = "", *, stops: bool = True) -> Ending:
        """Write what is still in memory, and how and where the script ended. Only the first call has an effect.

        ``stops`` is false while other code of the script runs. Returns the ending that counts: that of the recorded
        steps, unless the user interrupted those after them.
        """
        if self._closed or os.getpid() != self._pid or self.lacks_memory():
            return ending
        if refused := take_refused(self._run_directory):
            self.give_up(*refused)
            return ending
        self._closed = True
        of_script = ending
        is_recorded = self._surroundings is not None and self._surroundings.is_recorded
        if is_recorded and ending.outcome not in (Outcome.INTERRUPTED, Outcome.KILLED):
            ending = Ending(Outcome.STOPPED, 0)
            line = ""
        was_stopped = self._surroundings is not None and self._surroundings.stopped
        if was_stopped and ending.ended_by_itself and not ending.code:
            ending = Ending(Outcome.STOPPED, 0)
            line = ""  # a test runner or a bare `except:` caught the stop
        with uninterrupted():
            try:
                for record in read_started_records(self._run_directory):
                    self._journal.append(record)
                if self._surroundings is not None:
                    self._surroundings.close(of_script if is_recorded else ending, line)
                    self._start.over()
                else:
                    self._write_without_torch(ending, line)
                if self._sources is not None:
                    self._sources.imported()
                if stops:  # a later record would have the parent compute everything again
                    self.stop_recording()
            except JournalFailed as error:
                self.give_up(str(error), _MAKE_ROOM)
            except Exception as error:  # else the script's exit code would be blamed
                traceback.print_exc()
                text = f"{type(error).__name__} while the recording was closed: {error}"
                _report_error(self._reporter, text, "this is a bug in fakedist", before_start=False)
            else:
                is_beyond = self._gpu is not None and self._gpu.is_beyond
                if is_recorded and self._surroundings is not None:
                    is_beyond = self._surroundings.was_beyond  # made-up sizes of a bare step count for nothing
                reported = BEYOND_CAPACITY if ending.ended_well and is_beyond else ending  # the script ended as it did
                self._reporter.send(Ended(reported.outcome, reported.code or 0, reported.message, line))
        return ending

    def give_up(self, message: str, hint: str) -> None:
        """Stop recording. The parent reports the error."""
        self._closed = True
        _report_error(self._reporter, message, hint, before_start=False)

    def lacks_memory(self, raised: BaseException | None = None) -> bool:
        """Whether this machine could not give what the GPU had left. The run has no result, whatever the script did."""
        error = None if self._gpu is None else lack_of_machine(self._gpu.lacked_bytes, raised)
        if error is not None and not self._closed:
            self.give_up(error.message, error.hint)
        return error is not None

    def stop_recording(self) -> None:
        """Remove the recorder's hooks from torch. The faked world stays for the script's exit handlers."""
        if os.getpid() == self._pid and self._surroundings is not None:
            self._surroundings.stop_recording()

    def leave(self) -> None:
        """Take everything down. The process is ending and no code of the script runs any more."""
        if os.getpid() != self._pid:
            return
        self.close(Ending(Outcome.FINISHED, 0))
        if self._surroundings is not None:
            self._surroundings.leave()
        self._before_torch.close()
        self._tape_file.close()
        self._journal.close()
        if self._exit_code is not None:
            leave_at_once(self._exit_code)

    def exits_with(self, code: int | str | None) -> None:
        """The argument for ``sys.exit`` is known. If it is neither None nor an integer, Python prints it."""
        # Tools that trace a GPU write their files later.
        if self._is_last and self._job.device == "virtual" and not self._job.nsys:
            self._exit_code = 0 if code is None else code & 0xFF if isinstance(code, int) else 1

    def _torch_is_imported(self, module: ModuleType) -> None:
        """Set up torch's surroundings, once. A forked process is not the rank."""
        if os.getpid() != self._pid:
            self._before_torch.enter_context(self._own_ranks.refusing())
            return
        if self.has_failed:  # a bare `except:` swallowed the first SetupFailed
            raise SetupFailed
        if self._surroundings is None and not self._closed:
            self._guarded(self._surround)

    def _surround(self) -> None:
        from fakedist.rank.surroundings import Process, Surroundings

        if self._gpu is not None:
            self._gpu.set_environment()
        process = Process(
            job=self._job,
            journal=self._journal,
            tape=self._tape_file,
            reporter=self._reporter,
            gpu=self._gpu,
            own_ranks=self._own_ranks,
            cuda_begins=self._start.cuda_begins,
            first_run=_first_run(self._run_directory),
        )
        if self._start.restarted:
            self._journal.append(NoteRecord(notes.started_again(self._start.restarted)))
        surroundings = Surroundings(process, self._guarded)
        surroundings.enter()
        self._surroundings = surroundings
        if threading.current_thread() is not threading.main_thread():
            _in_main_thread(surroundings.record_this_thread)

    def _restart(self, reason: str) -> None:
        """End this process, whatever the script catches. The parent starts the rank on its own."""
        if os.getpid() == self._pid:
            self._reporter.send(Restarted(reason))
            _exit(0)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run setup work. If it fails, send the parent the reason and end the run with SetupFailed."""
        try:
            work()
        except FakedistError as error:
            self._fail(error.message, error.hint)
        except Exception as error:
            traceback.print_exc()
            self._fail(f"{type(error).__name__} while torch was set up: {error}", "this is a bug in fakedist")

    def _fail(self, message: str, hint: str) -> NoReturn:
        self._closed = self.has_failed = True
        _report_error(self._reporter, message, hint, before_start=True)
        raise SetupFailed(message) from None

    def _write_without_torch(self, ending: Ending, line: str) -> None:
        note = notes.torch_import_not_seen() if "torch" in sys.modules else notes.torch_not_imported()
        self._journal.append(NoteRecord(note))
        self._journal.append(OutcomeRecord(ending.outcome, ending.code, ending.message, line))

    def _exits_at_once(self, code: int) -> None:
        self.close(Ending(Outcome.EXIT, code, "os._exit"), stops=False)

    def _stopped_in_thread(self) -> None:
        self.close(Ending(Outcome.STOPPED, 0, "in a thread"), stops=False)


def _first_run(run_directory: Path) -> LaunchKeysRecord | None:
    """The keys of the timed step in the script's first run; None if this is the first."""
    path = run_directory / KERNELS_NAME
    records = read_journal(path) if path.exists() else ()
    return next((record for record in records if isinstance(record, LaunchKeysRecord)), None)


def main(run_directory: str, start: Start | None = None) -> int | str | None:
    """Run the job of ``run_directory``, and return the argument for ``sys.exit``.

    ``start`` is how a fork of a server starts; None in a process of its own.
    """
    reporter = Reporter.from_environment()
    start = start or start_of_rank()
    terminate_with_parent(start.parent)
    try:
        job = load_job(Path(run_directory))
        rank = Rank(job, Path(run_directory), reporter, start)
        rank.enter()
    except FakedistError as error:
        _report_error(reporter, error.message, error.hint, before_start=True)
        return 1
    except JournalFailed as error:
        _report_error(reporter, str(error), _MAKE_ROOM, before_start=True)
        return 1
    except SetupFailed:
        return 1
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    signal.signal(signal.SIGTERM, terminate)
    reporter.send(Started(os.getpid()))
    code: int | str | None = 0
    try:
        run_as_main(job)
    except BaseException as error:
        code = _ended(rank, error)
    else:
        if not other_threads():
            rank.close(Ending(Outcome.FINISHED, 0))
            rank.stop_recording()
    rank.exits_with(code)
    return code


def _ended(rank: Rank, error: BaseException) -> int | str | None:
    """Close the recording after ``error``, while its frames are alive. Return the argument for ``sys.exit``."""
    error.__traceback__ = without_our_frames(error)
    if isinstance(error, JournalFailed):
        rank.give_up(str(error), _MAKE_ROOM)
        return 1
    if rank.lacks_memory(error):
        return 1
    if rank.has_failed:
        return 1  # the parent has the reason, and any later error follows from it
    ending = rank.close(how_it_ended(error), line_of(error))
    rank.stop_recording()
    if isinstance(error, SystemExit) and ending.outcome is not Outcome.STOPPED:
        return error.code
    if ending.outcome is Outcome.STOPPED and not ending.message:
        return 0
    sys.excepthook(type(error), error, error.__traceback__)
    return ending.code


def _report_error(reporter: Reporter, message: str, hint: str, before_start: bool) -> None:
    reporter.send(Failed(message, hint, before_start))


_pending: list[object] = []  # keeps pending callbacks alive until Python calls them


def _in_main_thread(work: Callable[[], None]) -> None:
    """Have the main thread run ``work`` as soon as it executes Python code again, as Python does signal handlers."""

    def call(_: object) -> int:
        work()
        return 0

    _pending.append(ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call))
    ctypes.pythonapi.Py_AddPendingCall(_pending[-1], None)
