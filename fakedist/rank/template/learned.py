"""What a rank's script turned out to import, for the template of the ranks after it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from fakedist.options import Job
from fakedist.rank.template.collector import OutermostImport, counts
from fakedist.temporary import replacing

#: Packages that a script may import at any time: their modules change nothing that a module of another package does.
TORCH = frozenset({"torch", "torchgen", "functorch", "triton"})
_OURS = "fakedist"
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Scene:
    """What imports may depend on.

    Attributes:
        environment: ``os.environ``.
        path: ``sys.path``.
    """

    environment: dict[str, str]
    path: list[str]

    @classmethod
    def now(cls) -> Scene:
        """This process's scene."""
        return cls(dict(os.environ), list(sys.path))


@dataclass(frozen=True)
class Learned:
    """What a rank's script imported.

    Attributes:
        key: The script, see :func:`key_of`.
        gpu: The GPU model of its job, how many GPUs, and their bytes; None for the model's own.
        environment: The environment with which the rank's process started.
        cwd: The directory in which it started.
        modules: Installed modules in the order in which their imports began.
        scenes: The scene from a module on, each time it changed.
        counts: The collector's counts after each import that the script asked for.
    """

    key: str
    gpu: tuple[str, int, int | None]
    environment: dict[str, str]
    cwd: str
    modules: list[str]
    scenes: list[tuple[str, Scene]] = field(default_factory=list)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of a file that :meth:`read` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, path: Path) -> Learned | None:
        """Read what was learned. None if there is nothing yet."""
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        scenes = [(name, Scene(**scene)) for name, scene in found.pop("scenes")]
        name, devices, memory_bytes = found.pop("gpu")
        pairs = {module: (first, second) for module, (first, second) in found.pop("counts").items()}
        return cls(**found, gpu=(name, devices, memory_bytes), scenes=scenes, counts=pairs)


def write_learned(path: Path, learned: Learned) -> None:
    """Write what was learned. It replaces what was there, in one step."""
    with replacing(path) as fresh:
        fresh.write_text(learned.to_json())


def key_of(job: Job) -> str:
    """What the jobs of one template have in common."""
    return json.dumps([job.is_module, job.target])


def gpu_of(job: Job) -> tuple[str, int, int | None]:
    """The GPU of a job, as :class:`Learned` has it."""
    return job.gpu, job.gpus_per_node, job.gpu_memory_bytes


def is_installed(place: str | None) -> bool:
    """Whether a file belongs to an installed package, and not to the script."""
    return place is not None and any(part in _INSTALLED for part in Path(place).parts)


class Learner:
    """Watches what the script of this process imports.

    Args:
        path: The file that takes what was learned.
        job: The job.
        environment: The environment with which this process started.
    """

    def __init__(self, path: Path, job: Job, environment: dict[str, str]) -> None:
        self._path, self._job = path, job
        self._environment, self._cwd = environment, os.getcwd()
        self._scenes: list[tuple[str, Scene]] = []
        self._tops: dict[str, bool] = {}
        self._asked: dict[str, None] = {}
        self._at_cuda: set[str] | None = None
        self._outermost = OutermostImport()
        self._counts: dict[str, tuple[int, int]] = {}

    def asked(self, name: str) -> bool:
        """Note a module that is being imported, and the scene. Returns whether :meth:`imported` wants it, too."""
        self._asked[name] = None
        top = name.partition(".")[0]
        if top not in self._tops:
            self._tops[top] = is_installed(_origin(top))
        if self._tops[top] and (not self._scenes or self._scenes[-1][1] != Scene.now()):
            self._scenes.append((name, Scene.now()))
        return self._outermost.begins(name)

    def imported(self, name: str) -> None:
        """Note that a module has been imported."""
        self._outermost.ends()
        self._counts[name] = counts()

    def cuda_begins(self) -> None:
        """Note what was imported by now. A framework that is imported later is not imported by the template."""
        self._at_cuda = set(sys.modules)

    def write(self) -> None:
        """Write what was learned."""
        names = [name for name in installed_modules(self._asked) if self._may_be_ready(name)]
        found = names, self._scenes, self._counts
        write_learned(self._path, Learned(key_of(self._job), gpu_of(self._job), self._environment, self._cwd, *found))

    def _may_be_ready(self, name: str) -> bool:
        return name.partition(".")[0] in TORCH or self._at_cuda is None or name in self._at_cuda


def installed_modules(names: Iterable[str]) -> list[str]:
    """Those of these modules that are imported, and that installed packages or fakedist have."""
    return [
        name
        for name in names
        if (module := sys.modules.get(name)) is not None
        and (name.partition(".")[0] == _OURS or is_installed(getattr(module, "__file__", None)))
    ]


def _origin(name: str) -> str | None:
    if name in sys.stdlib_module_names or name == _OURS:
        return None
    try:
        spec = PathFinder.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places: Sequence[str] = list(spec.submodule_search_locations or ())
    return spec.origin or (places[0] if places else None)
