"""The imports that a fork server of ranks does once, and the ranks that start with them.

The first rank of a script starts on its own and notes what it imports of :data:`PRELOADED`. The server imports the
same, in the same environment, with the virtual GPU's driver loaded and CUDA not initialised. A rank that sets another
environment than the first one did starts anew, on its own. Every rank imports all other packages itself: they may count
devices, change torch, or read the rank while they are imported.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.smi.nvidia_smi import VARIABLE
from fakedist.gpu.virtual import LEDGER_VARIABLE, virtual_gpu
from fakedist.options import Job
from fakedist.patch import replacements, when_imported
from fakedist.rank.fork_server import can_fork, end_with_parent, serve
from fakedist.rank.joining import RUN_VARIABLE
from fakedist.rank.reporter import PIPE_VARIABLE
from fakedist.temporary import replacing

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def run_as_main(job: Job) -> None:
    """Run the script in this process as ``__main__``. Whatever it raises propagates.

    ``sys.argv``, ``sys.path[0]`` and the module's attributes become what they are under ``python script.py`` or
    ``python -m module`` (CPython's ``pymain_run_python`` and ``pymain_run_module``).
    """
    main = main_module()
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):  # 3.14 evaluates annotations lazily
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    if job.is_module:
        sys.argv = ["-m", *job.script_arguments]
        _put_first(os.getcwd())
        runpy._run_module_as_main(job.target)  # type: ignore[attr-defined]
        return
    sys.argv = [job.target, *job.script_arguments]
    if os.path.isdir(job.target) or zipfile.is_zipfile(job.target):
        sys.path.insert(0, os.path.realpath(job.target))
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    _put_first(os.path.dirname(os.path.realpath(job.target)))
    path = os.path.join(os.getcwd(), job.target)
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


@cache
def main_module() -> types.ModuleType:
    """The script's module. In a fork server it exists before the script's imports, some of which keep it (dill)."""
    return types.ModuleType("__main__")


def without_our_frames(error: BaseException) -> types.TracebackType | None:
    """The error's traceback, starting at the script's first frame."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.tb_next
    return frame if frame is not None else error.__traceback__


def _put_first(directory: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, directory)


#: Torch's own packages.
TORCH = frozenset({"torch", "torchgen", "functorch", "triton"})
#: Packages that a server imports. wandb, which Megatron-core imports, needs no torch, starts no thread, and reads no
#: variable of :data:`_UNREAD`. With pydantic it takes a third of the imports of a rank that lacks it.
PRELOADED = TORCH | {"wandb"}
#: Torch's modules that ask CUDA for its devices while they are imported.
_COUNTS_DEVICES = frozenset({"torch.utils.cpp_extension"})
#: Variables that these imports do not read. Most are set by launchers, and read when a process group or CUDA begins.
_UNREAD = frozenset(
    {
        # torchrun (torch/distributed/elastic/agent/server/local_elastic_agent.py)
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        "TORCHELASTIC_USE_AGENT_STORE",
        # deepspeed, srun, mpirun
        *("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES"),
        *("SLURM_TASKS_PER_NODE", "SLURM_JOB_NUM_NODES", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        *("OMPI_COMM_WORLD_NODE_RANK", "OMPI_UNIVERSE_SIZE", "PMI_RANK", "PMI_SIZE"),
        *("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        *("CUDA_VISIBLE_DEVICES", VARIABLE, LEDGER_VARIABLE, RUN_VARIABLE),
        "TORCHINDUCTOR_CACHE_DIR",  # torch._dynamo sets it to its default
        "LC_CTYPE",  # Python may set it
    }
)
_ANY_GPU = "h100-80g"  # each rank configures its own
#: Environment variable of a rank that starts on its own. It is removed before the script runs.
_START = "FAKEDIST_START"


@dataclass(frozen=True)
class Imports:
    """The imports of the first rank of a script.

    Attributes:
        key: The script and its environment, see :func:`key_of`.
        started: The environment with which the rank's process started, in ``cwd``.
        environment, path: The environment, and ``sys.path``, when it imported torch.
        modules: The imports that no module of :data:`PRELOADED` asked for, in order.
        cuda_path: ``sys.path`` when CUDA was initialised.
        counts: The cycle collector's counts then. Empty if CUDA was not initialised.
        ended: The environment at the end of the script.
    """

    key: str
    started: dict[str, str]
    cwd: str
    environment: dict[str, str]
    path: list[str]
    modules: list[str]
    cuda_path: list[str]
    counts: list[int]
    ended: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Imports | None:
        """Read a file of :meth:`write`. None if there is none yet."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError):
            return None

    def write(self, path: Path) -> None:
        """Write it to a file. It replaces the file in one step."""
        with replacing(path) as fresh:
            fresh.write_text(json.dumps(asdict(self)))

    def fits(self, key: str, environment: Mapping[str, str]) -> bool:
        """Return whether a rank of this environment may start with these imports, in this process's directory."""
        return self.key == key and self.cwd == os.getcwd() and not differing_variables(environment, self.started)


def key_of(job: Job) -> str:
    """The script of a job, and its environment. Its arguments may differ from rank to rank."""
    return json.dumps([job.is_module, job.target, job.environment, job.nccl_environment])


def differing_variables(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The variables besides :data:`_UNREAD` in which two environments differ."""
    return sorted(name for name in (one.keys() | other.keys()) - _UNREAD if one.get(name) != other.get(name))


class Start:
    """The start of a rank that starts on its own, and notes nothing."""

    #: The process that wants the rank, if that is not its parent.
    parent: int | None = None

    def __init__(self, restarted: str = "") -> None:
        #: Its difference from the ranks of the fork server from which it forked at first. Empty if it did not.
        self.restarted = restarted

    def at_exit(self, leave: Callable[[], None]) -> bool:
        """Call this when the process ends, after all later handlers. Returns whether nothing follows."""
        is_last = not atexit._ncallbacks()  # sitecustomize may come before us
        atexit.register(leave)
        return is_last

    @contextmanager
    def watched(self, restart: Callable[[str], None]) -> Iterator[None]:
        """Watch the script's imports and its environment; ``restart``, given a reason, starts it on its own."""
        yield

    def cuda_begins(self) -> None:
        """CUDA is initialised. Nothing is allocated yet."""

    def over(self) -> None:
        """The script has ended, after it imported torch."""


class FirstRank(Start):
    """Writes to a file what the script imports."""

    def __init__(self, path: Path, key: str) -> None:
        super().__init__()
        self._path, self._open = path, ""
        self._imports = Imports(key, dict(os.environ), os.getcwd(), {}, [], [], [], [], {})

    @contextmanager
    def watched(self, restart: Callable[[str], None]) -> Iterator[None]:
        """Watch the script's imports."""
        with when_imported(self._asked, lambda module: self._imported()):
            yield

    def _asked(self, name: str) -> bool:
        """A module is looked for. Returns whether to watch it: nothing that is watched asked for it."""
        if name.partition(".")[0] not in PRELOADED or self._open in sys.modules:
            return False
        if not self._imports.modules and name != "torch":
            return False
        self._open = name  # an import that failed is not in sys.modules any more
        if name == "torch":
            self._imports = replace(self._imports, environment=dict(os.environ), path=list(sys.path))
        return True

    def _imported(self) -> None:
        """Count the module if it was imported in the environment of torch, and left that as it was."""
        name, self._open = self._open, ""
        if name not in _COUNTS_DEVICES and not differing_variables(os.environ, self._imports.environment):
            self._imports.modules.append(name)

    def cuda_begins(self) -> None:
        """Note what a later rank must have by then."""
        self._imports = replace(self._imports, cuda_path=list(sys.path), counts=list(gc.get_count()))

    def over(self) -> None:
        """Write the imports, if CUDA was initialised."""
        if self._imports.modules and self._imports.counts:
            with suppress(OSError):
                replace(self._imports, ended=dict(os.environ)).write(self._path)


class ForkedRank(Start):
    """A rank that starts with the imports of a server: those that came ``late``, after torch's own, among them."""

    def __init__(self, imports: Imports, late: list[ModuleType], parent: int, last: list[Callable[[], None]]) -> None:
        super().__init__()
        self._imports, self._late, self._last, self.parent = imports, late, last, parent
        self._unset: dict[str, str | None] = {}  # what the first rank's script had set before it imported torch
        self._restart: Callable[[str], None] | None = None

    def at_exit(self, leave: Callable[[], None]) -> bool:
        """The server has registered its handler before any import could."""
        self._last.append(leave)
        return True

    @contextmanager
    def watched(self, restart: Callable[[str], None]) -> Iterator[None]:
        """Torch's functions have been replaced. Do so in modules that would be imported from now on, too."""
        stands_in = {id(one.original): one for one in replacements() if callable(one.original)}
        for module in self._late:
            for name, value in list(vars(module).items()):
                if (one := stands_in.get(id(value))) is not None and one.owner is not module:
                    vars(module)[name] = getattr(one.owner, one.name)
        known = self._imports.environment
        self._unset = {name: known.get(name) for name in differing_variables(os.environ, known)}
        self._restart = restart
        sys.addaudithook(self._audit)
        yield

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """A variable that the first rank has not set so may change what an import would bring."""
        if self._restart is None or event not in ("os.putenv", "os.unsetenv"):
            return
        name = os.fsdecode(arguments[0])
        value = os.fsdecode(arguments[1]) if event == "os.putenv" else None
        if name in self._unset and self._unset[name] == value:
            del self._unset[name]
        if name not in _UNREAD and value not in (self._imports.environment.get(name), self._imports.ended.get(name)):
            self._restart(name)

    def cuda_begins(self) -> None:
        """Compare what no event shows. Set the cycle collector's counts as in the first rank.

        It runs after a number of allocations, many of them by imports, and would free a tensor in a reference cycle at
        another event.
        """
        if self._restart is not None and (self._unset or sys.path != self._imports.cuda_path):
            self._restart(next(iter(self._unset), "sys.path"))
        if gc.isenabled():
            youngest, young, _ = self._imports.counts
            gc.collect(1)
            for _ in range(young):
                gc.collect(0)
            while gc.get_count()[0] < youngest:
                _kept.append([])

    def over(self) -> None:
        """From now on the environment may change."""
        self._restart = None


_kept: list[list[object]] = []


def start_of_rank() -> Start:
    """The start of a rank's own process. Its variable is removed, so that the script and its programs do not see it."""
    message = json.loads(os.environ.pop(_START, "{}"))
    return (
        FirstRank(Path(message["path"]), message["key"]) if "path" in message else Start(message.get("restarted", ""))
    )


def first_rank(path: Path, key: str) -> dict[str, str]:
    """The variable that makes a rank the first of its script: it writes its imports to a file."""
    return {_START: json.dumps({"path": str(path), "key": key})}


def restarted_rank(difference: str) -> dict[str, str]:
    """The variable of a rank that differs from those of its fork server."""
    return {_START: json.dumps({"restarted": difference})}


def forked_rank(path: str, door: str) -> tuple[str, Start]:
    """Be a fork server of ranks with the imports in a file. Return only in each rank: its run directory and start.

    If an import fails, asks CUDA for its devices, changes ``sys.path`` or starts a thread, this process starts again
    without it and those after it.
    """
    end_with_parent(signal.SIGKILL)
    last: list[Callable[[], None]] = []
    is_last = not atexit._ncallbacks()  # before any import registers a handler
    atexit.register(lambda: [handler() for handler in last])
    imports = Imports.read(Path(path))
    assert imports is not None
    own_path, own_environment = list(sys.path), dict(os.environ)
    number, late = _import(imports)
    if number < len(imports.modules):
        replace(imports, modules=imports.modules[:number]).write(Path(path))
        os.execve(sys.executable, sys.orig_argv, own_environment)
    sys.path[:] = own_path
    serves = is_last and "torch" in sys.modules and can_fork()
    request, (pipe,) = serve(socket.socket(fileno=int(door)), serves=serves)
    os.environ[PIPE_VARIABLE] = str(pipe)
    importlib.invalidate_caches()
    sys.modules["torch"].default_generator.seed()  # seeded by their imports, in every process anew
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    return request["run_directory"], ForkedRank(imports, late, request["parent"], last)


def _import(imports: Imports) -> tuple[int, list[ModuleType]]:
    """Import the modules until one must not be. Returns their number, and the modules that came after torch's own."""
    os.environ.update(imports.environment)
    for variable in os.environ.keys() - imports.environment.keys():
        del os.environ[variable]
    sys.path[:] = imports.path
    sys.modules["__main__"] = main_module()
    early: set[str] = set()
    with virtual_gpu(find_gpu(_ANY_GPU)) as gpu:
        for number, module in enumerate(imports.modules):
            try:
                importlib.import_module(module)
            except Exception:  # the first rank's went well
                return number, []
            if gpu.visible() or sys.path != imports.path or not can_fork():
                return number, []
            early = early or set(sys.modules)
    import fakedist.rank.surroundings  # noqa: F401  each rank needs it, and it imports nothing more of torch

    if callable(key := getattr(sys.modules.get("torch._inductor.codecache"), "torch_key", None)):
        key()  # hashes torch's sources, as every rank would
    gc.collect()  # a rank then walks only what it makes itself
    late = [module for name, module in sys.modules.items() if name not in early and name.partition(".")[0] in TORCH]
    return len(imports.modules), late
