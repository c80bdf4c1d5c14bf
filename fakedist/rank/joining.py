"""Processes that the script starts: they find the rank's virtual GPU, and share its memory.

The rank puts ``started/`` first on the PYTHONPATH. Its ``sitecustomize`` calls :func:`join` in a started process right
before that imports torch. The other parts of the rank's surroundings (values, process groups) follow once the process
initialises CUDA or makes a process group for GPUs: a DataLoader's worker does neither. Nothing is recorded there,
but that it was out of memory, and what its inference engine measured and keeps asleep.
"""

from __future__ import annotations

import atexit
import functools
import json
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fakedist.errors import FakedistError, SetupError
from fakedist.gpu.driver.build import torch_build
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.virtual import LEDGER_VARIABLE, VirtualGpu, virtual_gpu
from fakedist.options import Job, profile_command
from fakedist.patch import patched, present, when_imported
from fakedist.rank.reporter import Reporter
from fakedist.rundir.directory import load_job
from fakedist.rundir.encoding import RECORDS, Record, decode, encode
from fakedist.rundir.memory_records import FailedRequestRecord
from fakedist.rundir.notes import Note, engine_made_up, started_out_of_memory
from fakedist.rundir.records import EngineCacheRecord, EngineRecord, EngineSleepRecord, NoteRecord
from fakedist.temporary import FRESH_PREFIX
from fakedist.world.spawned import OwnRanks, engines_known, is_for_hosts

#: Where a started process finds the job: the rank's run directory.
RUN_VARIABLE = "FAKEDIST_RUN"
#: The environment with which the rank began, for a program that would have replaced it.
REPLACED_VARIABLE = "FAKEDIST_REPLACED"
#: Variables that shells and Python set by themselves.
_OF_SHELLS = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "LC_CTYPE"})
#: What DeepSpeed's launcher and ``torch.distributed.launch`` pass to each rank.
_LOCAL_RANK = re.compile(r"^(--local[-_]rank=)\d+$")
_PATH = "PYTHONPATH"
_STARTED = os.fspath(Path(__file__).with_name("started"))
_GROUPS = "torch.distributed.distributed_c10d"
_NO_STEP = 1 << 30
#: In the rank's directory until the rank ends: a record of a started process a line.
STARTED_FILE = f"{FRESH_PREFIX}started.jsonl"
#: Likewise: why a started process ended the rank.
_REFUSED = f"{FRESH_PREFIX}refused.json"


def offer(run_directory: Path) -> None:
    """Let the processes that this one starts from here on join its GPU, which it shares already."""
    os.environ[RUN_VARIABLE] = os.fspath(run_directory.resolve())
    for name in (STARTED_FILE, _REFUSED):
        (run_directory / name).unlink(missing_ok=True)
    further = [path for path in os.environ.get(_PATH, "").split(os.pathsep) if path and path != _STARTED]
    os.environ[_PATH] = os.pathsep.join([_STARTED, *further])


def name_in_use(gpu: VirtualGpu, name: str) -> None:
    """Call this process by its name in what is in use of the GPU, and those that multiprocessing forks from it."""
    from multiprocessing import util  # it registers a handler at exit, which a server of forks must not have

    gpu.called(name)
    util.register_after_fork(gpu, lambda gpu: gpu.called(multiprocessing.current_process().name))


def _own_name() -> str:
    """The name that multiprocessing gave this process, or the script or module that it runs."""
    if (name := multiprocessing.current_process().name) != "MainProcess":
        return name
    if "-m" in (options := sys.orig_argv[1:]) and sys.argv[0] in ("-m", ""):
        return f"python -m {options[options.index('-m') + 1]}"
    return Path(sys.argv[0]).name if sys.argv[0] not in ("-c", "") else f"python {sys.argv[0]}".strip()


def refuse_rank(job: Job, run_directory: Path, function: str, *, is_fork: bool = False) -> None:
    """End the rank's process: this process, which the script started, is a rank itself. ``function``: what it runs.

    Without a function, it is a program, which ``fakedist profile`` can run in the rank's place, or a fork of the rank.
    """
    if function or is_fork:
        hint = (
            f"start {function or 'the ranks'} by torch.multiprocessing.spawn, in as many processes as the job has"
            " ranks, or run one in the script's own process, which has the variables that torchrun sets"
        )
    else:
        words = sys.orig_argv[1:]
        while words[0].startswith("-") and words[0] not in ("-c", "-m"):  # Python's own: torchrun starts it with -u
            words = words[2 if words[0] in ("-W", "-X") else 1 :]
        is_module = words[0] == "-m"
        target, *arguments = words[is_module:]
        arguments = [_LOCAL_RANK.sub(rf"\g<1>{job.device_index}", argument) for argument in arguments]
        own = replace(job, target=target, is_module=is_module, arguments=tuple(arguments))
        hint = profile_command(replace(own, environment=tuple({**dict(job.environment), **_changed()}.items())))
    who = "a fork of the script" if is_fork and not function else f"{_own_name()}, which the script started,"
    text = f"{who} is a rank of its own of the job; fakedist runs rank {job.rank} alone"
    (run_directory / _REFUSED).write_text(json.dumps([text, hint]))
    with suppress(ProcessLookupError):  # it has ended already
        os.kill(_rank_process(), signal.SIGTERM)


def _rank_process() -> int:
    return int(os.environ[LEDGER_VARIABLE].split("/")[2])


def _replaces_rank() -> bool:
    """Return whether this process would have replaced the rank's, by ``os.exec*``."""
    return REPLACED_VARIABLE in os.environ and os.getppid() == _rank_process()


def _changed() -> dict[str, str]:
    """The variables that a program has in the rank's place, and the rank did not begin with."""
    begun: dict[str, str] = json.loads(os.environ[REPLACED_VARIABLE]) if _replaces_rank() else dict(os.environ)
    own = {name: value for name, value in os.environ.items() if begun.get(name) != value}
    return {name: value for name, value in own.items() if name not in _OF_SHELLS and not name.startswith("FAKEDIST_")}


def take_refused(run_directory: Path) -> tuple[str, str] | None:
    """Take why a started process ended this one, and what to type; None if none did."""
    path = run_directory / _REFUSED
    if not path.exists():
        return None
    text, hint = json.loads(path.read_text())
    path.unlink()
    return text, hint


def read_started_records(run_directory: Path) -> list[Record]:
    """Take the records of started processes: that they were out of memory, and facts of engines."""
    path = run_directory / STARTED_FILE
    if not path.exists():
        return []
    records = [decode(json.loads(line), RECORDS) for line in path.read_text().splitlines()]
    path.unlink()
    engines = {record.process: None for record in records if isinstance(record, (EngineRecord, EngineSleepRecord))}
    return [*records, *(NoteRecord(engine_made_up(process)) for process in engines)]


def join() -> None:
    """Join the GPU of the rank that started this process, before torch is imported.

    It does nothing where this Python has no CUDA build of torch.

    Raises:
        ImportError: The rank's GPU cannot be had here. Its text is one line.
    """
    try:
        has_cuda = bool(torch_build()[1])
    except SetupError:
        has_cuda = False
    if not has_cuda:
        return
    try:
        run_directory = Path(os.environ[RUN_VARIABLE])
        _Started(load_job(run_directory), run_directory).enter()
    except (FakedistError, OSError, KeyError) as error:
        text = f"{error.message}; {error.hint}" if isinstance(error, FakedistError) else repr(error)
        raise ImportError(f"fakedist: this process cannot use its rank's virtual GPU: {text}") from None


class _StartedJournal:
    """Takes a journal's records, and gives the rank torch's errors, as notes, and its engine's: of an engine on several
    GPUs, those of the process on the rank's own.
    """

    num_bytes = 0

    def __init__(self, path: Path, gpu: VirtualGpu, memory_bytes: int, device: int) -> None:
        self._path, self._gpu, self._memory_bytes, self._device = path, gpu, memory_bytes, device

    def append(self, record: Record) -> None:
        """Drop a record, or give it to the rank. One write appends a whole line, whichever process it comes from."""
        if isinstance(record, FailedRequestRecord):
            record = NoteRecord(self._out_of_memory(record))
        elif isinstance(record, (EngineRecord, EngineSleepRecord, EngineCacheRecord)) and (
            self._gpu.visible()[sys.modules["torch"].cuda.current_device()] == self._device
        ):
            record = replace(record, process=_own_name())
        else:
            return
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, (json.dumps(encode(record)) + "\n").encode())
        finally:
            os.close(file)

    def _out_of_memory(self, failed: FailedRequestRecord) -> Note:
        used = self._gpu.in_use(failed.device, restarts=False)
        return started_out_of_memory(
            f"{_own_name()} ({os.getpid()})",
            line=failed.line,
            asked_bytes=failed.requested_bytes,
            own_bytes=used.backed + used.outside,
            others_bytes=used.others,
            total_bytes=self._memory_bytes,
        )


class _Started:
    """A process that the script started."""

    def __init__(self, job: Job, run_directory: Path) -> None:
        self._records_file = run_directory / STARTED_FILE
        self._own = OwnRanks(job, is_started=True, refuse=functools.partial(refuse_rank, job, run_directory))
        self._device = job.device_index
        self._job = replace(
            job,
            world_size=1,
            rank=0,
            tapes=(),
            with_peers=False,
            oom="raise",
            gpu_lag="none",
            steps=_NO_STEP,
            until=None,
            timeout_s=None,
            kernels=False,
            times=None,
        )
        self._gpu: VirtualGpu | None = None
        self._is_surrounded = False
        self._before = ExitStack()

    def enter(self) -> None:
        """Load the driver, and wait for torch."""
        self._refuse_rank()
        job = self._job
        gpu = virtual_gpu(find_gpu(job.gpu), job.gpus_per_node, job.gpu_memory_bytes, job.reserve_bytes or 0)
        self._gpu = self._before.enter_context(gpu)
        self._gpu.share()
        name_in_use(self._gpu, _own_name())
        self._before.enter_context(engines_known())
        self._before.enter_context(when_imported("torch".__eq__, self._torch_is_imported))

    def _torch_is_imported(self, torch: ModuleType) -> None:
        assert self._gpu is not None
        self._gpu.set_environment()
        # Not a queued call: CUDA's lock is held while those run.
        begins: Callable[[], None] = present(torch.cuda, "_lazy_init")
        for module in [one for name, one in sys.modules.items() if name.startswith("torch.")]:
            if vars(module).get("_lazy_init") is begins:
                self._before.enter_context(patched(module, "_lazy_init", self._first(begins)))
        if (groups := sys.modules.get(_GROUPS)) is not None:
            made = present(groups, "_new_process_group_helper")
            self._before.enter_context(patched(groups, "_new_process_group_helper", self._new_group(groups, made)))
            self._before.enter_context(self._own.refusing())

    def _refuse_rank(self, replaces: bool = False) -> None:
        if replaces or self._own.sets_rank():
            self._own.refuse_rank()

    def _first(self, begins: Callable[[], None]) -> Callable[[], None]:
        def lazy_init() -> None:
            self._refuse_rank(_replaces_rank())
            self._surround()
            begins()

        return lazy_init

    def _new_group(self, groups: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
        """A group for hosts alone is torch's own, between any processes. One for GPUs begins the rest."""

        @functools.wraps(original)  # the rest asks for its signature
        def new_group(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any) -> Any:
            self._refuse_rank(_replaces_rank())
            if is_for_hosts(backend):  # once surrounded, those that come here
                return original(size, rank, ranks, backend, *args, **kwargs)
            self._surround()
            return groups._new_process_group_helper(size, rank, ranks, backend, *args, **kwargs)

        return new_group

    def _surround(self) -> None:
        """Set up what the rank has around torch, once."""
        if self._is_surrounded:
            return
        self._is_surrounded = True
        from fakedist.rank.surroundings import Process, Surroundings

        assert self._gpu is not None
        memory_bytes = self._job.gpu_memory_bytes or find_gpu(self._job.gpu).memory_bytes
        journal = _StartedJournal(self._records_file, self._gpu, memory_bytes, self._device)
        process = Process(
            job=self._job,
            journal=journal,
            tape=journal,
            reporter=Reporter(-1),
            gpu=self._gpu,
            own_ranks=self._own,
            cuda_begins=lambda: None,
        )
        surroundings = Surroundings(process, lambda work: work())
        surroundings.enter()
        atexit.register(surroundings.leave)
