"""Records imports: which module asked for which, and what of the environment each read and changed.

From the record, a rank that forked from the template can make modules appear as if they were imported one by one
(:mod:`fakedist.rank.template.hidden`).
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fakedist.importing import find_watched
from fakedist.rank.template.learned import Scene

_Names = Mapping[str, object] | None


@dataclass
class Imported:
    """What one module did while it was imported.

    Attributes:
        name: Its full name.
        scene: The scene when its import began.
        asked: The modules it asked for, in order, whether they were already imported or not.
        took: The names it took from modules, each with its module. "*" is all.
        made: Modules that it put into ``sys.modules`` itself.
        read: Variables that it read.
        written: Variables that it set; None for those it deleted.
        path_first, path_last: What it put before all of ``sys.path``, and behind it.
        path_differs: Whether it changed ``sys.path`` in another way.
        devices: How many CUDA devices it was told that there are. None if it did not ask.
        compiled: Whether it called ``torch.compile``.
        operations: How many of torch's operations it ran.
    """

    name: str
    scene: Scene
    asked: dict[str, None] = field(default_factory=dict)
    took: set[tuple[str, str]] = field(default_factory=set)
    made: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    written: dict[str, str | None] = field(default_factory=dict)
    path_first: list[str] = field(default_factory=list)
    path_last: list[str] = field(default_factory=list)
    path_differs: bool = False
    devices: int | None = None
    compiled: bool = False
    operations: int = 0

    def takes(self, other: Imported) -> None:
        """What an import that failed has left behind was done by the one that asked for it."""
        self.asked |= other.asked
        self.path_first, self.path_last = other.path_first + self.path_first, self.path_last + other.path_last
        self.path_differs |= other.path_differs
        self.devices = other.devices if self.devices is None else self.devices
        self.operations += other.operations


class Recording:
    """The imports of this process while it is :meth:`on`.

    Args:
        devices: How many CUDA devices there are, if none is hidden. A process that has asked CUDA cannot fork.

    Attributes:
        imported: Each module that was imported, in the order in which the imports began.
    """

    def __init__(self, devices: int = 0) -> None:
        self.imported: dict[str, Imported] = {}
        self._devices = devices
        self._path: list[str] = []
        self._open: list[Imported] = []
        self._known: set[str] = set()
        self._scene: Scene | None = None
        self._is_as_before = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record until the context ends."""
        before = set(sys.modules)
        self._known, self._path, self._is_as_before = set(before), sys.path[:], False
        finder = _Finder(self)
        import_, import_module = builtins.__import__, importlib.import_module

        def recorded_import(name: str, *given: Any, **named: Any) -> ModuleType:
            found = import_(name, *given, **named)
            if self._open:
                self._ask(*_imported(name, *given, **named))
            return found

        def recorded_import_module(name: str, package: str | None = None) -> ModuleType:
            found = import_module(name, package)
            if self._open:
                self._ask(importlib.util.resolve_name(name, package), ())
            return found

        sys.meta_path.insert(0, finder)
        builtins.__import__ = recorded_import
        importlib.import_module = recorded_import_module
        try:
            with _watched_environment(self), _answered_devices(self), _counted_operations(self):
                yield
        finally:
            sys.meta_path.remove(finder)
            builtins.__import__, importlib.import_module = import_, import_module
            _replace_in(sys.modules.keys() - before, recorded_import_module, import_module)

    def begin(self, name: str) -> None:
        """The code of a module begins to run."""
        self._note_path()
        if self._open:
            self._open[-1].asked[name] = None
        self._known.add(name)
        self.imported[name] = Imported(name, self._scene_now())
        self._open.append(self.imported[name])

    def end(self) -> None:
        """The code of the module that began last has run."""
        self._note_path()
        over = self._open.pop()
        if not self._known.issuperset(sys.modules):
            new = sys.modules.keys() - self._known
            over.made += [name for name in sys.modules if name in new]
            self._known |= new

    def drop(self) -> None:
        """The code of the module that began last has failed."""
        self._note_path()
        over = self._open.pop()
        del self.imported[over.name]
        if self._open:
            self._open[-1].asked.pop(over.name, None)
            self._open[-1].takes(over)  # what it imported by then stays imported

    def read(self, name: str) -> None:
        """The module that runs reads a variable."""
        if self._open:
            self._open[-1].read.add(name)

    def wrote(self, name: str, value: str | None) -> None:
        """The module that runs sets a variable, or deletes it."""
        self._is_as_before = False
        if self._open:
            self._open[-1].written[name] = value

    def count_devices(self, count: Callable[[], int]) -> int:
        """The number of CUDA devices, for the module that runs. Only if some may be hidden is CUDA asked."""
        if not self._open or "CUDA_VISIBLE_DEVICES" in os.environ:
            return count()
        self._open[-1].devices = self._devices
        return self._devices

    def ran_operation(self) -> None:
        """The module that runs has run an operation of torch's."""
        if self._open:
            self._open[-1].operations += 1

    def _note_path(self) -> None:
        """Note what the module that runs has done to ``sys.path``."""
        before, self._path = self._path, sys.path[:]
        if before == self._path or not self._open:
            return
        for first in range(len(self._path) - len(before) + 1):
            if self._path[first : first + len(before)] == before:
                self._open[-1].path_first[:0] = self._path[:first]
                self._open[-1].path_last += self._path[first + len(before) :]
                return
        self._open[-1].path_differs = True

    def _scene_now(self) -> Scene:
        """The scene. It is the one object as long as it does not change."""
        if self._scene is None or not self._is_as_before or self._scene.path != sys.path:
            open_, self._open = self._open, []  # what is read here is not read by a module
            scene = Scene.now()
            self._open, self._is_as_before = open_, True
            if self._scene is None or self._scene != scene:
                self._scene = scene
        return self._scene

    def _ask(self, name: str, names: Sequence[str]) -> None:
        open_ = self._open[-1]
        open_.asked[name] = None
        open_.took.update((name, each) for each in names)
        for each in getattr(sys.modules.get(name), "__all__", ()) if "*" in names else names:
            if (child := f"{name}.{each}") in sys.modules:
                open_.asked[child] = None


def _imported(
    name: str, among: _Names = None, local: _Names = None, fromlist: Sequence[str] | None = (), level: int = 0
) -> tuple[str, Sequence[str]]:
    """The full name of the module that a call of ``__import__`` means, and the names that it takes."""
    if not level:
        return name, fromlist or ()
    known = among or {}
    package = known.get("__package__")
    if package is None:
        package = known["__name__"] if "__path__" in known else str(known["__name__"]).rpartition(".")[0]
    return importlib.util.resolve_name("." * level + name, str(package)), fromlist or ()


def _replace_in(modules: Iterable[str], old: object, new: object) -> None:
    """Undo copies of a function that ``from importlib import import_module`` made."""
    for module in map(sys.modules.get, modules):
        names: dict[str, object] = getattr(module, "__dict__", {})
        for name in [each for each, value in names.items() if value is old]:
            names[name] = new


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the finders behind it find, and lets the recording hear when the module's code runs."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of any module that is found."""
        behind = [each for each in sys.meta_path if each is not self]
        return find_watched(behind, self._recorded, fullname, path, target)

    @contextmanager
    def _recorded(self, module: ModuleType) -> Iterator[None]:
        self._recording.begin(module.__name__)
        try:
            yield
        except BaseException:
            self._recording.drop()
            raise
        self._recording.end()


@contextmanager
def _answered_devices(recording: Recording) -> Iterator[None]:
    """Let the recording answer how many CUDA devices there are, as ``torch.cuda.is_available`` asks."""
    torch_c: Any = sys.modules.get("torch._C")
    count = getattr(torch_c, "_cuda_getDeviceCount", None)
    if count is None:
        yield
        return
    torch_c._cuda_getDeviceCount = lambda: recording.count_devices(count)
    try:
        yield
    finally:
        torch_c._cuda_getDeviceCount = count


@contextmanager
def _counted_operations(recording: Recording) -> Iterator[None]:
    """Let the recording hear of torch's operations, once torch is imported. Ranks number them."""
    modes: Any = sys.modules.get("torch.utils._python_dispatch")
    if modes is None:
        yield
        return

    def run(mode: object, operation: Any, kinds: object, given: Any = (), named: Any = None) -> object:
        recording.ran_operation()
        return operation(*given, **(named or {}))

    with type("Counting", (modes.TorchDispatchMode,), {"__torch_dispatch__": run})():
        yield


@contextmanager
def _watched_environment(recording: Recording) -> Iterator[None]:
    """Let the recording hear of what is read from ``os.environ`` by name, and of all changes."""
    kind: Any = type(os.environ)

    class Watched(kind):  # type: ignore[misc]
        def __getitem__(self, name: str) -> str:
            recording.read(name)
            return str(kind.__getitem__(self, name))

        def items(self) -> ItemsView[str, str]:  # to pick by the beginning of the name, as tqdm does
            return {name: kind.__getitem__(self, name) for name in self}.items()

        def __setitem__(self, name: str, value: str) -> None:
            kind.__setitem__(self, name, value)
            recording.wrote(name, value)

        def __delitem__(self, name: str) -> None:
            kind.__delitem__(self, name)
            recording.wrote(name, None)

    environment: Any = os.environ
    environment.__class__ = Watched
    try:
        yield
    finally:
        environment.__class__ = kind
