"""The child process: become the rank, run the script as ``__main__``, write down how it ended.

Order matters. The virtual GPU must be there before torch is imported; the exit handler is registered before torch's,
so that it runs after those of torch and of the script; the recorder is closed while the frames of an error still
live, because they hold the tensors that were alive.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fakedist.ending import (
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
from fakedist.errors import FakedistError
from fakedist.job import Job, profile_command
from fakedist.progress import Teller
from fakedist.run.directory import TAPE_NAME
from fakedist.run.journal import JournalWriter
from fakedist.run.manifest import load_manifest
from fakedist.run.tape import find_tapes, script_identity
from fakedist.script import run_as_main, without_our_frames

if TYPE_CHECKING:
    import torch

    from fakedist.gpu.values import ValueEngine
    from fakedist.gpu.virtual import VirtualGpu
    from fakedist.record.recorder import Recorder
    from fakedist.record.timed import Tracer
    from fakedist.record.timer import Timer
    from fakedist.world.tape import Tapes

_FACTS_EVERY_S = 2.0
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


class Rank:
    """This process as the rank: the GPU, the recorder and the faked world around the script."""

    def __init__(self, job: Job, run_directory: Path, teller: Teller) -> None:
        self._job = job
        self._teller = teller
        self._pid = os.getpid()
        self._journal = OwnJournal(run_directory / "journal.bin")
        self._surroundings = ExitStack()
        self._recording = ExitStack()
        self._recorder: Recorder | None = None
        self._gpu: VirtualGpu | None = None
        self._values: ValueEngine | None = None
        self._facts_at = time.monotonic()
        self._refused = 0
        self._tape_file = OwnJournal(run_directory / TAPE_NAME)
        self._tapes: Tapes | None = None
        self._world_notes: Callable[[], list[str]] = list
        self._spec_memory_bytes = 0

    def enter(self) -> None:
        """Set up everything that the script will find.

        Raises:
            FakedistError: This machine or this torch cannot do it.
        """
        atexit.register(self.leave)
        if self._job.device == "virtual":
            self._enter_virtual_gpu()
        from fakedist.record.outside import nccl_record
        from fakedist.record.recorder import Recorder

        self._write_gpu()
        self._journal.append(nccl_record())
        execute = None if self._values is None else self._values.execute
        recorder = Recorder(self._journal, self._job.steps, execute, self._progress, self._timer())
        if tracer := _tracer(self._job):
            recorder.trace(tracer)
        self._world_notes = self._surroundings.enter_context(self._world(recorder))
        self._surroundings.enter_context(watched_exit(self._exits_at_once))
        self._surroundings.enter_context(quiet_stop_in_threads(self._stopped_in_thread))
        self._recorder = self._recording.enter_context(recorder)

    def close(self, outcome: str, code: int, message: str = "", line: str = "") -> None:
        """Write everything that is still in memory, and how the script ended and where; the first call counts."""
        recorder, self._recorder = self._recorder, None
        if recorder is None or os.getpid() != self._pid:
            return
        how = {"outcome": outcome, "code": code, "message": message}
        with uninterrupted():
            try:
                self._write_facts()
                self._write_what_the_host_did_not_compute()
                self._write_about_the_world()
                self._write_what_may_have_failed_it(outcome)
                self._write_what_torch_does_not_see()
                self._write_what_was_traced()
                recorder.close({**how, "line": line})
            except JournalFailed as error:
                self.give_up(error)
            else:
                self._teller.tell({**how, "line": line})

    def give_up(self, error: JournalFailed) -> None:
        """The records cannot be written any more: the parent says so."""
        self._recorder = None
        _tell_error(self._teller, str(error), _MAKE_ROOM, before_start=False)

    def stop_recording(self) -> None:
        """Take the recorder's hooks off torch; the faked world stays for the script's exit handlers."""
        if os.getpid() == self._pid:
            self._recording.close()

    def leave(self) -> None:
        """The process ends: nothing of the script runs any more."""
        if os.getpid() != self._pid:
            return
        self.close("finished", 0)
        self.stop_recording()
        self._surroundings.close()
        self._tape_file.close()
        self._journal.close()

    def _world(self, recorder: Recorder) -> AbstractContextManager[Callable[[], list[str]]]:
        """The other ranks, around the script; gives what is to be noted of them at its end."""
        from fakedist.world.reroute import fake_world

        is_undefined = None if self._values is None else self._values.is_undefined
        self._tapes = self._enter_tapes()
        return fake_world(self._job, recorder.ledger, is_undefined, self._tapes)

    def _enter_virtual_gpu(self) -> None:
        from fakedist.gpu.spec import find_gpu
        from fakedist.gpu.virtual import virtual_gpu

        job = self._job
        spec = find_gpu(job.gpu)
        self._spec_memory_bytes = spec.memory_bytes
        gpu = virtual_gpu(spec, devices=job.gpus_per_node, memory_bytes=job.gpu_memory_bytes)
        self._gpu = self._surroundings.enter_context(gpu)
        if job.values != "off":
            from fakedist.gpu.values import ValueEngine, printed_values

            self._values = ValueEngine(job.seed, strict=job.values == "strict")
            self._surroundings.enter_context(printed_values(self._values))
            self._surroundings.enter_context(self._values.replays())

    def _enter_tapes(self) -> Tapes:
        """This rank's tape, and those that it is answered from."""
        from fakedist.world.tape import Tapes

        job, known = self._job, None
        if self._values is not None:
            known = self._values.known
        elif job.device == "virtual":
            known = _unless_on_device
        self._tape_file.append({"kind": "tape", **script_identity(job, os.getcwd())})

        def command(ranks: Sequence[int]) -> str:
            if len(ranks) > 1:
                return profile_command(dataclasses.replace(job, with_peers=False), ranks)
            return "" if job.with_peers else profile_command(dataclasses.replace(job, with_peers=True))

        return Tapes(self._tape_file.append, known, find_tapes(job), job.rank, command)

    def _write_about_the_world(self) -> None:
        if self._tapes is not None:
            self._tapes.close(sys.exc_info()[1])
        for text in self._world_notes():
            self._journal.append({"kind": "note", "text": text})

    def _timer(self) -> Timer | None:
        """Who times a step, if that is wanted."""
        if not self._job.kernels or self._gpu is None or _rehearses():
            return None
        from fakedist.gpu.estimate import Estimate
        from fakedist.gpu.spec import find_gpu

        return Estimate(find_gpu(self._job.gpu))

    def _write_gpu(self) -> None:
        import torch

        gpu = torch.cuda.get_device_properties(self._job.device_index)
        alloc_conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        self._journal.append(
            {
                "kind": "gpu",
                "torch": str(torch.__version__),
                "cuda": torch.version.cuda or "",
                "python": platform.python_version(),
                "gpu_name": gpu.name,
                "capacity_bytes": gpu.total_memory,
                "spec_memory_bytes": self._spec_memory_bytes,
                "peaks": _peaks(gpu.name),
                "device_index": self._job.device_index,
                "alloc_conf": alloc_conf,
                "compute_capability": f"{gpu.major}.{gpu.minor}",
                "notes": list(self._gpu.notes) if self._gpu is not None else [],
            }
        )

    def _progress(self, phase: str, step: int, allocated_bytes: int) -> None:
        message = {"phase": phase, "step": step, "steps": self._job.steps, "allocated_bytes": allocated_bytes}
        self._teller.tell(message)
        if time.monotonic() - self._facts_at > _FACTS_EVERY_S:
            self._write_facts()

    def _write_facts(self) -> None:
        """What the virtual GPU made up or could not answer, since the last time."""
        self._facts_at = time.monotonic()
        if self._values is not None and (invented := self._values.invented()):
            self._journal.append({"kind": "invented", "rows": invented})
        if self._gpu is not None:
            refused = self._gpu.refused()
            if (calls := sum(count for _, count in refused)) != self._refused:
                self._refused = calls
                self._journal.append({"kind": "unanswered", "rows": refused})

    def _write_what_the_host_did_not_compute(self) -> None:
        operations, first = self._values.not_computed_on_host() if self._values is not None else (0, "")
        if operations:
            where = f"at {first}" if first else "in a backward"
            text = (
                f"{operations:,} operations on host tensors of more than 4 MiB were not computed, first {where}: "
                "large floats hold no values, neither on the virtual GPU nor, with it, on the host"
            )
            self._journal.append({"kind": "note", "text": text})

    def _write_what_was_traced(self) -> None:
        launches = self._gpu.traced() if self._gpu is not None else 0
        if launches and not _rehearses():
            text = (
                f"the script's profiler saw {launches:,} launches of the virtual GPU: their names, streams and order "
                "are the job's, their times are not a GPU's (each takes 1 us); operations on small tensors, which the "
                "host computes, launch none"
            )
            self._journal.append({"kind": "note", "text": text})

    def _write_what_may_have_failed_it(self, outcome: str) -> None:
        if outcome == "exception" and self._job.device == "virtual" and self._job.values == "off":
            text = (
                "with --values off nothing is computed, and what the script reads from the GPU is zeros: "
                "its error may come of that; without --values off small tensors are computed"
            )
            self._journal.append({"kind": "note", "text": text})

    def _write_what_torch_does_not_see(self) -> None:
        """NCCL's environment as the script left it; on a real GPU what is held beside the caching allocator."""
        from fakedist.record.outside import nccl_record, outside_record

        self._journal.append(nccl_record())
        if self._job.device == "cuda" and (found := outside_record(self._job.device_index)) is not None:
            self._journal.append(found)

    def _exits_at_once(self, code: int) -> None:
        self.close("exit", code, "os._exit")

    def _stopped_in_thread(self) -> None:
        self.close("stopped", 0, f"after {self._job.steps} steps, in a thread")


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


def _unless_on_device(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor whose values are known: with --values off, nothing on the virtual GPU is."""
    return None if tensor.is_cuda else tensor


def _peaks(product: str) -> dict[str, Any] | None:
    """What a GPU does at most: ``flops`` by dtype, ``bytes_per_s``; None if the data of its model are not known."""
    from fakedist.gpu.spec import GPUS

    spec = next((spec for spec in GPUS.values() if spec.product == product), None)
    return None if spec is None else {"flops": dict(spec.peak_flops), "bytes_per_s": spec.memory_bandwidth}


def _tracer(job: Job) -> Tracer | None:
    """What traces a step after the recorded ones."""
    from fakedist.record.kernels import CuptiTracer
    from fakedist.record.timed import NsysTracer

    if job.nsys is not None:
        return NsysTracer()
    if not job.kernels or (job.device == "virtual" and not _rehearses()):
        return None
    return CuptiTracer("measured" if job.device == "cuda" else "simulated")


def _rehearses() -> bool:
    """Whether a step on the virtual GPU is timed as on a real one: everything but the times is then as there."""
    return os.environ.get("FAKEDIST_REHEARSE") == "cupti"
