"""Scripts that start their own ranks: only the chosen rank runs, in this process, at the point where it would start.

``torch.multiprocessing.spawn``, ``start_processes`` and loops of ``Process(target=...)`` all call
``BaseProcess.start``. Where torch starts as many processes as the job or its node has ranks, each is a rank. Of other
processes, one is a rank if its target leads to ``init_process_group`` or sets RANK. A rank is not started: the chosen
rank's target runs here, and the other ranks end at once with exit code 0. Other processes (DataLoader workers,
managers) start as usual, and so does every process of a script that has joined a group or holds memory of a GPU: it is
a rank itself. A script may import torch only in its ranks, so nothing here needs torch.

A process's rank, in the job or on its node, is its parameter ``rank``, else its first integer that can be one, else its
position in the order of starting. If ``init_process_group`` then names another rank of this job, the process was not
the chosen one. A process that was started and turns out to be a rank ends the job before it looks for the others: it is
one of many, on one GPU. Where the script then waits for what the others would send, a line states that.

``elastic_launch`` is torchrun as a function, whose place fakedist takes: it calls the function here.

A process that the script started may join others for GPUs only if it is an inference engine's: multiprocessing runs a
function of vLLM's or SGLang's in it. The engine's other ranks are such processes too. It has a
variable of its environment for that, because it may initialise CUDA while it imports what it will run.
"""

from __future__ import annotations

import dis
import functools
import inspect
import multiprocessing
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeGuard, cast

from fakedist.errors import JobError
from fakedist.options import Job
from fakedist.patch import now_and_when_imported, patched, present
from fakedist.rundir import notes
from fakedist.rundir.notes import Note
from fakedist.world.environ import rank_environment

#: A process that calls one of these becomes a rank.
_JOINING = {"init_process_group", "init_device_mesh", "init_distributed", "PartialState"}
_OF_HOSTS = frozenset({"gloo", "mpi", "fake"})
_ENGINES = {"vllm", "sglang"}
#: Set for an engine's processes.
_ENGINE_VARIABLE = "FAKEDIST_ENGINE"
#: Packages whose functions make no ranks of the job. The groups that an engine's processes join are the engine's own.
_NOT_THE_USERS = {"torch", *_ENGINES, *sys.stdlib_module_names} - {"__main__"}
_RANK_NAMES = ("rank", "global_rank", "world_rank", "local_rank")
#: Variables that a process sets if it is a rank.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK")
_SPAWN, _LAUNCHER = "torch.multiprocessing.spawn", "torch.distributed.launcher.api"
#: A script that does nothing for so long while ranks that it starts do not run may wait for them.
_IDLE_S = 20
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


#: Ends the job because a process that the script started is a rank: takes the function or program that it runs.
Refuse = Callable[[str], None]


#: Modules whose processes take the functions that they run from a queue.
_POOLS = {"concurrent.futures.process", "multiprocessing.pool", "torch.multiprocessing.pool"}


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

    ``refuse`` is called in a started process that is a rank of the job. ``has_peers``: the process is one of an
    engine's, and the other ranks of its groups are processes that run.
    """

    def __init__(self, job: Job, *, is_started: bool = False, refuse: Refuse = lambda what: None) -> None:
        self._job = job
        self._refuse = refuse
        self.is_started = is_started
        self.has_peers = is_started and os.environ.get(_ENGINE_VARIABLE) == "1"
        self._pid = os.getpid()
        self._num_started = 0
        self._num_together = 0
        self._has_run = False
        self._running_candidate = False
        self._over: _Over | None = None
        self.is_over = threading.Event()
        #: Called in a thread that joins the job's group.
        self.record_thread: Callable[[], None] = lambda: None

    def joins(self, rank: int, num_ranks: int) -> None:
        """Check the rank that the process joins as. AnotherRank if the script started it and did not choose it.

        Raises:
            RuntimeError: A process besides the rank's joins others of the script's.
        """
        is_besides = (self.is_started or os.getpid() != self._pid) and not self.has_peers and num_ranks != 1
        if is_besides and num_ranks == self._job.world_size:
            self.refuse_rank()
        if is_besides:
            raise RuntimeError(
                f"fakedist: a process that the script started joins a group of {num_ranks} ranks for GPUs; only those "
                "that vLLM or SGLang spawn may (with VLLM_WORKER_MULTIPROC_METHOD=spawn), or give it a group of its own"
            )
        is_thread = threading.current_thread() is not threading.main_thread() and num_ranks == self._job.world_size
        if (self._running_candidate or is_thread) and num_ranks == self._job.world_size and rank != self._job.rank:
            raise SystemExit if is_thread else AnotherRank  # a thread ends by it without a word
        if is_thread:
            self.record_thread()

    def refuse_rank(self) -> None:
        """End the job: this process, which the script started, is one of its ranks."""
        process, function = multiprocessing.current_process(), ""
        target, _ = _called(cast("_Process", process))
        if target is not _nothing:  # else a program's own process
            target = inspect.unwrap(getattr(target, "func", target))
            function = getattr(target, "__qualname__", type(target).__qualname__)
            if getattr(target, "__module__", None) in _POOLS:
                function = "the pool's function"
        self._refuse(function)
        raise RuntimeError("fakedist: this process, which the script started, is a rank of its own of the job")

    def sets_rank(self) -> bool:
        """Return whether this process, which the script started, was given a rank among others, not the chosen one."""
        is_another = os.environ.get("RANK") not in (None, "", str(self._job.rank))
        return is_another and not self.has_peers and os.environ.get("WORLD_SIZE") != "1"

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
            if not self._num_started:
                threading.Thread(target=self._tell_of_waiting, daemon=True).start()
            self._num_started += 1
            if not self._has_run and index in (self._job.rank, self._job.device_index):
                self._run_here(process)
            self._over = self._over or _Over()
            process._popen, process._sentinel = self._over, self._over.sentinel
            del process._target, process._args, process._kwargs

        return start

    def _is_rank(self, process: _Process) -> bool:
        if self._is_a_rank_itself():
            return False
        target, _ = _called(process)
        if self._are_ranks() and target is not process._target:
            return True
        return _joins_a_group(target, set(), 0)

    def _are_ranks(self) -> bool:
        """Return whether torch starts as many processes together as the job or its node has ranks."""
        return self._num_together in (self._job.world_size, self._job.local_world_size)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse a rank where it begins to look for the others, which do not run. RecordingError if torch differs."""
        groups = sys.modules["torch.distributed.distributed_c10d"]
        original = present(groups, "init_process_group")
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init_process_group(*args: object, **kwargs: object) -> object:
            named = signature.bind(*args, **kwargs).arguments
            given = named.get("world_size", -1)
            num_ranks = given if given > 0 else int(os.environ.get("WORLD_SIZE") or -1)
            if num_ranks == self._job.world_size and not is_for_hosts(named.get("backend")):
                self.joins(named.get("rank", -1), num_ranks)
            if self.is_started and num_ranks == 1:
                os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # no agent keeps a store for one process
            return original(*args, **kwargs)

        package = sys.modules["torch.distributed"]
        with (
            patched(groups, "init_process_group", init_process_group),
            patched(package, "init_process_group", init_process_group),
        ):
            yield

    def _is_a_rank_itself(self) -> bool:
        has_run = self._has_run and not self._running_candidate  # cycles may hold the memory of a rank that has ended
        return os.getpid() != self._pid or _has_joined() or (not has_run and _holds_memory())

    @contextmanager
    def watching_torch(self) -> Iterator[None]:
        """Note how many processes torch starts together, and take the place of its elastic launcher.

        RecordingError if this torch starts them in another way.
        """
        with ExitStack() as stack:

            def launcher_is_imported(module: types.ModuleType) -> None:
                stack.enter_context(patched(module, "launch_agent", self._launch(present(module, "launch_agent"))))

            package, module = sys.modules["torch.multiprocessing"], sys.modules[_SPAWN]
            together = self._together(present(module, "start_processes"))
            for owner in (module, package):
                stack.enter_context(patched(owner, "start_processes", together))
            stack.enter_context(now_and_when_imported({_LAUNCHER}, launcher_is_imported))
            yield

    def _together(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def start_processes(*args: object, **kwargs: object) -> object:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            before, self._num_together = self._num_together, bound.arguments["nprocs"]
            if self._are_ranks() and bound.arguments["start_method"] == "forkserver":
                bound.arguments["start_method"] = "spawn"  # a server's processes may be started in threads
            try:
                return original(*bound.args, **bound.kwargs)
            finally:
                self._num_together = before

        return start_processes

    def _launch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def launch_agent(config: Any, entrypoint: object, args: list[object], **settings: object) -> object:
            if not callable(entrypoint) or self._is_a_rank_itself():
                return original(config, entrypoint, args, **settings)
            num_ranks = config.max_nodes * config.nproc_per_node
            if num_ranks != self._job.world_size:
                raise JobError(
                    f"the script launches {num_ranks} ranks, and the job has {self._job.world_size}",
                    f"fakedist profile --world-size {num_ranks}",
                )
            with _as_torchrun_would(self._job):
                returned = entrypoint(*args)
            return dict.fromkeys(range(config.nproc_per_node), returned)  # by the local rank: each is like this one

        return launch_agent

    def _tell_of_waiting(self) -> None:
        """Say once where the main thread waits, perhaps for other ranks: it does not move, and nothing computes."""
        before: object = None
        while not self.is_over.wait(_IDLE_S):
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            now = id(frame), frame.f_lasti, round(time.process_time())
            if now == before:
                own = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(__file__)))
                running = [each for each in traceback.extract_stack(frame) if not each.filename.startswith(own)]
                where = f" at {running[-1].filename}:{running[-1].lineno} ({running[-1].name})" if running else ""
                sys.stderr.write(
                    f"fakedist: the script has waited for {_IDLE_S} s{where}, perhaps for ranks that it starts: only "
                    f"rank {self._job.rank} runs. Ctrl-C ends it with a report; or have that rank give what it waits "
                    "for, or run one rank in the script's own process, which has RANK set\n"
                )
                return
            before = now

    def _index(self, process: _Process) -> int:
        target, arguments = _called(process)
        try:
            named = {**vars(process), **inspect.signature(target).bind(*arguments, **process._kwargs).arguments}
        except (TypeError, ValueError):
            named = {}
        values = [value for value in (*arguments, *process._kwargs.values()) if type(value) is int]
        numbers = [value for value in values if 0 <= value < self._job.world_size]
        by_name = [named[name] for name in _RANK_NAMES if type(named.get(name)) is int]
        return next(iter(by_name + numbers), self._num_started)

    def _run_here(self, process: _Process) -> None:
        target, arguments = _called(process)
        num_together = self._num_together
        # Until it turns out to be another: its report may be written while it runs.
        self._running_candidate = self._has_run = True
        self._num_together = 0
        try:
            target(*arguments, **process._kwargs)
        except AnotherRank:
            self._has_run = False
            return
        except SystemExit as error:
            if error.code:
                raise
        finally:
            self._running_candidate, self._num_together = False, num_together
        if _has_joined():  # the group would have ended with its process
            sys.modules["torch.distributed"].destroy_process_group()


@contextmanager
def own_ranks(own: OwnRanks) -> Iterator[None]:
    """Start no process that would be a rank; run the chosen one here. RecordingError if they cannot be intercepted."""
    try:
        with patched(BaseProcess, "start", own.start(present(BaseProcess, "start"))):
            yield
    finally:
        own.is_over.set()


@contextmanager
def _as_torchrun_would(job: Job) -> Iterator[None]:
    """Add the variables that torchrun sets, where another launcher has set others."""
    missing = {} if "RANK" in os.environ else rank_environment(replace(job, launcher="torchrun"))
    missing = {name: value for name, value in missing.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


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
    run: object = type(process).run
    if run is not BaseProcess.run:
        return type(process).run, (process,)
    target, arguments = getattr(process, "_target", None) or _nothing, tuple(getattr(process, "_args", ()))
    # Look the module up here: torch.multiprocessing's own attribute of this name is a function.
    spawn = sys.modules.get(_SPAWN)
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
        return (
            depth == 0
            and callable(target)
            and not inspect.isbuiltin(target)
            and _is_the_users(getattr(target, "__func__", type(target)))
        )
    if id(target) in seen or len(seen) > _MAX_SEEN or depth > _MAX_DEPTH:
        return False
    seen.add(id(target))
    functions = (
        [target]
        if isinstance(target, types.FunctionType)
        else [value for value in vars(target).values() if isinstance(value, types.FunctionType)]
    )
    for function in functions:
        names = _names(function.__code__)
        if names & _JOINING or _sets_rank(function.__code__):
            return True
        reached = [function.__globals__[name] for name in names if name in function.__globals__]
        reached += [
            vars(one)[name] for one in reached if isinstance(one, types.ModuleType) for name in names & set(vars(one))
        ]
        if any(_is_the_users(one) and _joins_a_group(one, seen, depth + 1) for one in reached):
            return True
    return False


def _is_the_users(value: object) -> TypeGuard[types.FunctionType | type]:
    if not isinstance(value, (types.FunctionType, type)):
        return False
    return (value.__module__ or "").partition(".")[0] not in _NOT_THE_USERS


def _names(code: types.CodeType) -> set[str]:
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _sets_rank(code: types.CodeType) -> bool:
    """Return whether code sets RANK in ``os.environ``, by itself or together with other variables."""
    if any(isinstance(constant, types.CodeType) and _sets_rank(constant) for constant in code.co_consts):
        return True
    if "environ" not in code.co_names:
        return False
    if "setdefault" in code.co_names and set(_RANK_VARIABLES) & set(filter(_is_text, code.co_consts)):
        return True
    before: object = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_SUBSCR" and before in _RANK_VARIABLES:
            return True
        # The names of keyword arguments, or the keys of a dictionary.
        names = (
            code.co_consts[instruction.arg or 0] if instruction.opname == "KW_NAMES" else before
        )  # 3.11 has no argval
        is_mapping = instruction.opname in ("KW_NAMES", "CALL_KW", "BUILD_CONST_KEY_MAP")
        if is_mapping and isinstance(names, tuple) and not {*names}.isdisjoint(_RANK_VARIABLES):
            return True
        before = instruction.argval
    return False


def _is_text(constant: object) -> bool:
    return isinstance(constant, str)
