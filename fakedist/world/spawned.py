"""Scripts that start their own ranks: only the chosen rank runs, in this process, at the point where it would start.

``torch.multiprocessing.spawn``, ``start_processes`` and loops of ``Process(target=...)`` all call
``BaseProcess.start``. A process whose target leads to ``init_process_group`` is not started: the chosen rank's target
runs here, and the other ranks end at once with exit code 0. Other processes (DataLoader workers, managers) start as
usual, and so does every process of a script that has joined a group or holds memory of a GPU: it is a rank itself.
A script may import torch only in its ranks, so nothing here needs torch.

A process's rank, in the job or on its node, is its parameter ``rank``, else its first integer, else its position in the
order of starting. If ``init_process_group`` then names another rank of this job, the process was not the chosen one.

A process that the script started may join others for GPUs only if it is an inference engine's: multiprocessing runs a
function of vLLM's or SGLang's in it. The engine's other ranks are such processes too. It has a
variable of its environment for that, because it may initialise CUDA while it imports what it will run.
"""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Protocol, TypeGuard

from fakedist.options import Job
from fakedist.patch import patched, present
from fakedist.rundir import notes
from fakedist.rundir.notes import Note

#: A process that calls one of these becomes a rank.
_JOINING = {"init_process_group", "init_device_mesh", "init_distributed", "PartialState"}
_OF_HOSTS = frozenset({"gloo", "mpi", "fake"})
_ENGINES = {"vllm", "sglang"}
#: Set for an engine's processes.
_ENGINE_VARIABLE = "FAKEDIST_ENGINE"
#: Packages whose functions make no ranks of the job. The groups that an engine's processes join are the engine's own.
_NOT_THE_USERS = {"torch", *_ENGINES, *sys.stdlib_module_names} - {"__main__"}
_RANK_NAMES = ("rank", "global_rank", "world_rank")
_MAX_DEPTH = 8
_MAX_SEEN = 500


class _Process(Protocol):
    """``multiprocessing``'s BaseProcess, as far as this module uses it."""

    _target: Callable[..., object] | None
    _args: tuple[object, ...]
    _kwargs: dict[str, object]
    _popen: object
    _sentinel: int

    def run(self) -> None: ...


class AnotherRank(BaseException):
    """The target that runs here turned out to be another rank. Its ``except Exception`` must not catch this."""


class _Over:
    """Stands in for ``multiprocessing``'s handle of a process that ended with exit code 0."""

    returncode = 0

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.sentinel = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # always ready

    def poll(self, flag: int = 0) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def terminate(self) -> None:
        """Do nothing: the process has ended."""

    kill = interrupt = close = terminate


class OwnRanks:
    """The ranks that the script starts by itself; with ``is_started``, in a process that the script started.

    ``has_peers``: it is one of an engine's, and the other ranks of its groups are processes that run.
    """

    def __init__(self, job: Job, *, is_started: bool = False) -> None:
        self._job = job
        self.is_started = is_started
        self.has_peers = is_started and os.environ.get(_ENGINE_VARIABLE) == "1"
        self._pid = os.getpid()
        self._num_started = 0
        self._has_run = False
        self._running_candidate = False
        self._over: _Over | None = None

    def joins(self, rank: int, num_ranks: int) -> None:
        """Check the rank that the process joins as. AnotherRank if the script started it and did not choose it.

        Raises:
            RuntimeError: A process besides the rank's joins others of the script's.
        """
        is_besides = self.is_started or os.getpid() != self._pid
        if is_besides and not self.has_peers and num_ranks not in (1, self._job.world_size):
            raise RuntimeError(
                f"fakedist: a process that the script started joins a group of {num_ranks} ranks for GPUs; only those "
                "that vLLM or SGLang spawn may (with VLLM_WORKER_MULTIPROC_METHOD=spawn), or give it a group of its own"
            )
        if self._running_candidate and num_ranks == self._job.world_size and rank != self._job.rank:
            raise AnotherRank

    def notes(self) -> Iterator[Note]:
        """Notes for the report."""
        if self._num_started and not self._has_run:
            yield notes.rank_not_started(self._num_started, self._job.rank, self._job.world_size)

    def start(self, original: Callable[[_Process], None]) -> Callable[[_Process], None]:
        """``BaseProcess.start``, which starts no ranks."""

        def start(process: _Process) -> None:
            if not self._is_rank(process):
                _start(process, original)
                return
            index = self._index(process)
            self._num_started += 1
            if not self._has_run and index in (self._job.rank, self._job.device_index):
                self._run_here(process)
            self._over = self._over or _Over()
            process._popen, process._sentinel = self._over, self._over.sentinel
            del process._target, process._args, process._kwargs

        return start

    def _is_rank(self, process: _Process) -> bool:
        run: object = type(process).run
        if os.getpid() != self._pid or _has_joined() or _holds_memory() or run is not BaseProcess.run:
            return False
        target, _ = _called(process)
        return _joins_a_group(target, set(), 0)

    def _index(self, process: _Process) -> int:
        target, arguments = _called(process)
        try:
            named = inspect.signature(target).bind(*arguments, **process._kwargs).arguments
        except (TypeError, ValueError):
            named = {}
        numbers = [value for value in (*arguments, *process._kwargs.values()) if type(value) is int]
        by_name = [named[name] for name in _RANK_NAMES if type(named.get(name)) is int]
        return next(iter(by_name + numbers), self._num_started)

    def _run_here(self, process: _Process) -> None:
        target, arguments = _called(process)
        self._running_candidate = True
        try:
            target(*arguments, **process._kwargs)
        except AnotherRank:
            return
        except BaseException as error:  # the run stopped after its steps, or the target failed
            self._has_run = True
            if not isinstance(error, SystemExit) or error.code:
                raise
        finally:
            self._running_candidate = False
        self._has_run = True
        if _has_joined():  # the group would have ended with its process
            sys.modules["torch.distributed"].destroy_process_group()


@contextmanager
def own_ranks(job: Job) -> Iterator[OwnRanks]:
    """Start no process that would be a rank; run the chosen one here. RecordingError if they cannot be intercepted."""
    own = OwnRanks(job)
    with patched(BaseProcess, "start", own.start(present(BaseProcess, "start"))):
        yield own


def is_for_hosts(backend: object) -> bool:
    """Return whether groups of a backend need no GPU."""
    return str(backend) in _OF_HOSTS


def _start(process: _Process, original: Callable[[_Process], None]) -> None:
    """Start a process, and say in its environment whether it is an engine's."""
    target, _ = _called(process)
    target = getattr(target, "func", target)
    before = os.environ.get(_ENGINE_VARIABLE)
    os.environ[_ENGINE_VARIABLE] = str(int((getattr(target, "__module__", "") or "").partition(".")[0] in _ENGINES))
    try:
        original(process)
    finally:
        os.environ.pop(_ENGINE_VARIABLE)
        if before is not None:
            os.environ[_ENGINE_VARIABLE] = before


@contextmanager
def engines_known() -> Iterator[None]:
    """Say in the environment of processes that start whether they are an engine's."""
    original = present(BaseProcess, "start")
    with patched(BaseProcess, "start", lambda process: _start(process, original)):
        yield


def _has_joined() -> bool:
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _holds_memory() -> bool:
    """Return whether this process has tensors on a GPU: then it is a rank itself, not a launcher of ranks."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and cuda.is_initialized() and bool(cuda.memory_allocated(cuda.current_device()))


def _called(process: _Process) -> tuple[Callable[..., object], tuple[object, ...]]:
    """The function that a process would call, and its arguments; for ``spawn``, the one passed to it."""
    target, arguments = process._target or _nothing, tuple(process._args)
    # Look the module up here: torch.multiprocessing's own attribute of this name is a function.
    spawn = sys.modules.get("torch.multiprocessing.spawn")
    if spawn is not None and target is present(spawn, "_wrap"):
        function, index, rest, _ = arguments
        assert callable(function)
        assert isinstance(rest, Iterable), "spawn passes them on as *args"
        return function, (index, *rest)
    return target, arguments


def _nothing() -> None:
    """The target of a process without one."""


def _joins_a_group(target: Callable[..., object], seen: set[int], depth: int) -> bool:
    """Judge by the names in a function's code. Methods and callable objects are a framework's, and count as ranks."""
    target = inspect.unwrap(getattr(target, "func", target))
    if depth == 0 and isinstance(target, types.FunctionType) and not _is_the_users(target):
        return False
    if not isinstance(target, (types.FunctionType, type)):
        return depth == 0 and callable(target) and not inspect.isbuiltin(target) and not _is_known_method(target)
    if id(target) in seen or len(seen) > _MAX_SEEN or depth > _MAX_DEPTH:
        return False
    seen.add(id(target))
    functions = [target] if isinstance(target, types.FunctionType) else _methods(target)
    for function in functions:
        names = _names(function.__code__)
        if names & _JOINING:
            return True
        reached = [function.__globals__[name] for name in names if name in function.__globals__]
        reached += [
            vars(one)[name] for one in reached if isinstance(one, types.ModuleType) for name in names & set(vars(one))
        ]
        if any(_is_the_users(one) and _joins_a_group(one, seen, depth + 1) for one in reached):
            return True
    return False


def _is_known_method(target: object) -> bool:
    """Recognise methods of torch or Python itself (a manager's server, a DataLoader's worker)."""
    return not _is_the_users(getattr(target, "__func__", type(target)))


def _is_the_users(value: object) -> TypeGuard[types.FunctionType | type]:
    if not isinstance(value, (types.FunctionType, type)):
        return False
    return (value.__module__ or "").partition(".")[0] not in _NOT_THE_USERS


def _methods(owner: type) -> list[types.FunctionType]:
    return [value for value in vars(owner).values() if isinstance(value, types.FunctionType)]


def _names(code: types.CodeType) -> set[str]:
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names
