"""Torch in a template of ranks: imported once as the first rank of a script did, and given to each rank that asks.

Torch's modules stay out of ``sys.modules`` until the rank's script imports one of them; then all of them are there. A
rank with another environment than the first rank's starts anew, on its own. Every rank imports other packages itself:
they may change torch, and nothing would show whether the script had imported them.
"""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.abc
import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.smi.nvidia_smi import VARIABLE
from fakedist.gpu.virtual import virtual_gpu
from fakedist.options import Job
from fakedist.patch import replacements
from fakedist.rank.fork_server import can_fork
from fakedist.temporary import replacing

#: Torch's own packages: their modules change nothing of other packages, and nothing at all until they are used.
TORCH = frozenset({"torch", "torchgen", "functorch", "triton"})
#: Torch's modules that ask CUDA for its devices while they are imported, which each rank has to do itself.
_COUNTS_DEVICES = frozenset({"torch.utils.cpp_extension"})
#: Variables that no import of torch's reads. Most are set by launchers, and read when a process group or CUDA begins.
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
        *("CUDA_VISIBLE_DEVICES", VARIABLE),
        "TORCHINDUCTOR_CACHE_DIR",  # torch._dynamo sets it to its default
        "LC_CTYPE",  # Python may set it
    }
)


@dataclass(frozen=True)
class Learned:
    """The imports of torch's in the first rank of a script.

    Attributes:
        key: The script, see :func:`key_of`.
        gpu: The GPU model of its job, how many GPUs, and their bytes; None for the model's own.
        started: The environment with which the rank's process started, in ``cwd``.
        environment, path: The environment, and ``sys.path``, when it imported torch.
        ended: The environment at the end of the script.
        modules: The imports that nothing in torch asked for, in order.
        counts: The cycle collector's counts when CUDA was initialised. None if it was not.
    """

    key: str
    gpu: tuple[str, int, int | None]
    started: dict[str, str]
    cwd: str
    environment: dict[str, str]
    path: list[str]
    ended: dict[str, str]
    modules: list[str]
    counts: list[int] | None

    @classmethod
    def read(cls, path: Path) -> Learned | None:
        """Read a file of :meth:`write`. None if there is none yet."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError):
            return None

    def write(self, path: Path) -> None:
        """Write it to a file. It replaces the file in one step."""
        with replacing(path) as fresh:
            fresh.write_text(json.dumps(asdict(self)))


def key_of(job: Job) -> str:
    """The script of a job. Its arguments may differ from rank to rank."""
    return json.dumps([job.is_module, job.target])


def differing_variable(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The first variable besides :data:`_UNREAD` in which two environments differ. Empty if there is none."""
    names = sorted((one.keys() | other.keys()) - _UNREAD)
    return next((name for name in names if one.get(name) != other.get(name)), "")


class Learner:
    """Writes what this process's script imports of torch's; ``started`` is the environment at its start."""

    def __init__(self, path: Path, job: Job, started: dict[str, str]) -> None:
        gpu = job.gpu, job.gpus_per_node, job.gpu_memory_bytes
        self._path, self._open = path, ""
        self._learned = Learned(key_of(job), gpu, started, os.getcwd(), {}, [], {}, [], None)

    def asked(self, name: str) -> bool:
        """A module is looked for. Returns whether :meth:`imported` is to be called when it has been imported."""
        if name.partition(".")[0] not in TORCH or self._open in sys.modules:
            return False
        self._open = name  # an import that failed is not in sys.modules any more
        if not self._learned.modules:
            self._learned = replace(self._learned, environment=dict(os.environ), path=list(sys.path))
        return True

    def imported(self) -> None:
        """It has been imported. It counts if it was imported as torch itself was, and left the environment so."""
        name, self._open = self._open, ""
        if name not in _COUNTS_DEVICES and not differing_variable(os.environ, self._learned.environment):
            self._learned.modules.append(name)

    def cuda_begins(self) -> None:
        """CUDA is initialised."""
        self._learned = replace(self._learned, counts=list(gc.get_count()))

    def write(self) -> None:
        """Write what was learned, if the script imported torch."""
        if self._learned.modules[:1] == ["torch"]:
            replace(self._learned, ended=dict(os.environ)).write(self._path)


class Preloaded(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Torch's modules in a fork of a template, until the script imports one; ``early`` came with ``import torch``."""

    def __init__(self, learned: Learned, early: Collection[str], modules: dict[str, ModuleType]) -> None:
        self._learned = learned
        self._modules = modules
        main = sys.modules["__main__"]
        namespaces = [getattr(module, "__dict__", {}) for module in [*sys.modules.values()]]
        self._of_main = [(names, name) for names in namespaces for name, value in names.items() if value is main]
        self._late = [module for name, module in modules.items() if name not in early]
        self._order = [*sys.modules]
        #: Ends this process because of what it names.
        self.restart: Callable[[str], None] = _ignore
        for name in modules:
            del sys.modules[name]

    def become_finder(self) -> None:
        """Find torch's modules from now on, behind finders that are added later. Seed what their import seeds."""
        self._modules["torch"].default_generator.seed()
        if (random := sys.modules.get("numpy.random")) is not None:
            random.seed()
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """The spec of one of torch's modules as long as torch is not imported; None for any other."""
        if (module := self._modules.get(fullname)) is None:
            return None
        if fullname != "torch":
            importlib.import_module("torch")
        known = vars(module)
        spec = copy.copy(known.get("__spec__")) or ModuleSpec(fullname, None)
        spec.loader = self
        spec.loader_state = module, known.get("__spec__"), known.get("__loader__")
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, if this process is as the first rank was. Else this process ends."""
        if self._modules:
            learned = self._learned
            if name := differing_variable(os.environ, learned.environment):
                self.restart(name)
            if sys.path != learned.path:
                self.restart("sys.path")
        module: ModuleType = spec.loader_state[0]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give all modules to the script."""
        state: Any = module.__spec__
        _, module.__spec__, module.__loader__ = state.loader_state
        self.show()

    def show(self) -> None:
        """Put all modules into ``sys.modules``. Exit handlers need them if the script imported none."""
        sys.modules.update(self._modules)
        self._modules = {}
        for names, name in self._of_main:
            names[name] = sys.modules["__main__"]

    def over(self) -> None:
        """The script has ended, so the environment may change."""
        self.restart = _ignore

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """A variable that another rank of the script has not set may change what an import would bring."""
        if event in ("os.putenv", "os.unsetenv") and self.restart is not _ignore:
            name = os.fsdecode(arguments[0])
            value = os.fsdecode(arguments[1]) if event == "os.putenv" else None
            known = self._learned.environment.get(name), self._learned.ended.get(name)
            if name not in _UNREAD and value not in known:
                self.restart(name)

    def surrounded(self) -> None:
        """Torch's functions have been replaced. Do so in modules that would be imported from now on, too."""
        sys.addaudithook(self._audit)
        stands_in = {id(one.original): one for one in replacements() if callable(one.original)}
        for module in self._late:
            for name, value in list(vars(module).items()):
                if (one := stands_in.get(id(value))) is not None and one.owner is not module:
                    vars(module)[name] = getattr(one.owner, one.name)

    def cuda_begins(self) -> None:
        """Order modules, and set the cycle collector's counts, as in the first rank.

        Pickle, and so a key of Inductor's cache, names a memory format by the first module that has it. The collector
        runs after a number of allocations, many of them by imports, and would free a tensor in a reference cycle at
        another event.
        """
        for name in dict.fromkeys([*self._order, *sys.modules]):
            if name in sys.modules:
                sys.modules[name] = sys.modules.pop(name)
        if self._learned.counts is None or not gc.isenabled():
            return
        youngest, young, _ = self._learned.counts
        gc.collect(1)
        for _ in range(young):
            gc.collect(0)
        while gc.get_count()[0] < youngest:
            _kept.append([])


_kept: list[list[object]] = []


def _ignore(name: str) -> None:
    pass


def preload(path: Path) -> Preloaded | None:
    """Import what a file of :class:`Learned` names. None if ranks could not fork from this process.

    If an import asks CUDA for its devices, starts a thread or fails, this process restarts without it.
    """
    if (learned := Learned.read(path)) is None:
        return None
    name, devices, memory_bytes = learned.gpu
    known, environment, own_path = set(sys.modules), dict(os.environ), list(sys.path)
    os.environ.update(learned.environment)
    for variable in os.environ.keys() - learned.environment.keys():
        del os.environ[variable]
    sys.path[:] = learned.path
    early: set[str] = set()
    with virtual_gpu(find_gpu(name), devices=devices, memory_bytes=memory_bytes) as gpu:
        for number, module in enumerate(learned.modules):
            try:
                importlib.import_module(module)
                is_sound = not gpu.visible() and threading.active_count() == 1 and sys.path == learned.path
            except Exception:  # the first rank's went well
                is_sound = False
            if not is_sound:
                replace(learned, modules=learned.modules[:number]).write(path)
                os.execve(sys.executable, sys.orig_argv, environment)
            early = early or set(sys.modules)
    if "torch" not in sys.modules:
        return None
    import fakedist.rank.surroundings  # noqa: F401  each rank needs it, and it imports nothing more of torch

    if callable(key := getattr(sys.modules.get("torch._inductor.codecache"), "torch_key", None)):
        key()  # hashes torch's sources, as every rank would
    sys.path[:] = own_path
    brought = {name: module for name, module in sys.modules.items() if name not in known}
    tops = TORCH | {_top(name) for name, module in brought.items() if _uses_torch(module)}
    tops -= {"fakedist", *sys.stdlib_module_names}
    preloaded = Preloaded(learned, early, {name: module for name, module in brought.items() if _top(name) in tops})
    gc.collect()  # a rank then walks only what it makes itself
    return preloaded if can_fork() else None


def _top(name: str) -> str:
    return name.partition(".")[0]


def _uses_torch(module: ModuleType) -> bool:
    """Return whether a module has something of torch's: without torch it cannot have been imported."""
    values = list(getattr(module, "__dict__", {}).values())
    names = (one.__name__ if isinstance(one, ModuleType) else getattr(one, "__module__", "") for one in values)
    return any(_top(name) in TORCH for name in names if isinstance(name, str))
