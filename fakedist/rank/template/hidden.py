"""Hides the modules that a template has imported, and lets each appear again when the rank's script imports it.

A module that is hidden is neither in ``sys.modules`` nor an attribute of its package. When something imports it, the
modules that it asked for while it was imported appear first, in that order, then it is as it was: what an import does,
without running the module's code. Watchers of imports (:mod:`fakedist.importing`) see each of them.
"""

from __future__ import annotations

import copy
import importlib
import importlib.abc
import os
import sys
from collections.abc import Callable, Iterable, MutableMapping, Set
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fakedist.patch import Replaced, replacements
from fakedist.rank.template.learned import TORCH, Scene
from fakedist.rank.template.recording import Imported
from fakedist.rank.template.scenes import difference

_ABSENT = object()


class HiddenModules:
    """Modules of a template, out of sight.

    Args:
        imported: What they did while they were imported.

    Attributes:
        differs: Called with what tells the scene of an import from the template's. None: nothing is compared yet.
        appeared: Called with the name of a module that has appeared, before the import that asked for it goes on.
        imported: What they did while they were imported.
        modules: Those that are still hidden, and what they made.
        others: The modules that something tried to import, and that are not among these.
    """

    def __init__(self, imported: dict[str, Imported]) -> None:
        self.differs: Callable[[str], None] | None = None
        self.appeared: Callable[[str], None] = _ignore
        self.others: dict[str, None] = {}
        self.imported = imported
        self.modules: dict[str, ModuleType] = {}
        self._attributes: dict[str, dict[str, object]] = {}
        self._made: dict[str, list[str]] = {}
        self._main: ModuleType | None = None
        self._depth = 0
        self._has_compiled = False
        self._written: set[tuple[str, str | None]] = set()

    def hide(self) -> None:
        """Take the modules, and what they made, out of ``sys.modules`` and out of their packages."""
        self._main = sys.modules["__main__"]
        names = [*self.imported, *(name for each in self.imported.values() for name in each.made)]
        for name in dict.fromkeys(names):
            if (module := sys.modules.pop(name, None)) is not None:
                self.modules[name] = module
        for name, module in self.modules.items():
            parent, _, child = name.rpartition(".")
            owner = self.modules.get(parent, sys.modules.get(parent))
            if owner is None:
                continue
            value = vars(owner).get(child, _ABSENT)
            if value is module:
                del vars(owner)[child]
                if name not in self.imported:
                    self._made.setdefault(parent, []).append(name)
            elif parent in self.modules:
                self._attributes.setdefault(parent, {})[child] = value

    def show_all(self) -> None:
        """Show what is still hidden, for exit handlers that these modules registered."""
        for name, module in self.modules.items():
            sys.modules[name] = module
        for name, module in self.modules.items():
            parent, _, child = name.rpartition(".")
            if parent in sys.modules and child not in self._attributes.get(parent, {}):
                vars(sys.modules[parent])[child] = module
        self.modules.clear()

    def left(self, names: Iterable[str]) -> list[str]:
        """Those of these modules that are still hidden."""
        return [name for name in names if name in self.modules]

    def find(self, name: str) -> ModuleSpec | None:
        """How to import a module that is hidden; None for any other."""
        if name not in self.imported or name not in self.modules:
            self.others[name] = None
            return None
        known = getattr(self.modules[name], "__spec__", None)
        spec = copy.copy(known) if isinstance(known, ModuleSpec) else ModuleSpec(name, None)
        spec.loader = _Appearing(self, name)
        return spec

    def create(self, name: str) -> ModuleType | None:
        """A hidden module, as importlib is to make it. None if it is no ordinary one."""
        if not self._depth and self.differs is not None and (found := self._difference(name)):
            self.differs(found)
        module = self.modules[name]
        return module if isinstance(module, ModuleType) else None

    def appear(self, name: str) -> None:
        """Do what the import of a module did."""
        module = sys.modules[name] = self.modules.pop(name)
        done = self.imported[name]
        sys.path[:0] = [each for each in done.path_first if each not in sys.path]
        sys.path += [each for each in done.path_last if each not in sys.path]  # there may be modules that it asks for
        self._depth += 1
        try:
            for asked in done.asked:
                if asked in self.imported and asked not in sys.modules:
                    importlib.import_module(asked)
                else:
                    self._make(asked)
        finally:
            self._depth -= 1
        for made in done.made:
            self._make(made)
        for made in self._made.get(name, ()):  # an extension's modules may be made before it is in sys.modules itself
            if made in sys.modules:
                vars(module)[made.rpartition(".")[2]] = sys.modules[made]
        for variable, text in done.written.items():
            _put(os.environ, variable, text)
        self._written |= done.written.items()
        for child, value in self._attributes.get(name, {}).items():  # the imports of its children have replaced them
            if value is _ABSENT:
                vars(module).pop(child, None)
            else:
                vars(module)[child] = value
        self._repeat(done)
        _take_replacements(module, done)
        if "__main__" in done.asked:
            for each in [each for each, value in vars(module).items() if value is self._main]:
                vars(module)[each] = sys.modules["__main__"]
        self.appeared(name)

    def _repeat(self, done: Imported) -> None:
        """Do to the process what the import of a module did to the template's, and what it did not do there."""
        torch: Any = sys.modules.get("torch")
        if done.devices is not None and torch._C._cuda_getDeviceCount() != done.devices and self.differs is not None:
            self.differs("CUDA_VISIBLE_DEVICES")
        for _ in range(done.operations):
            torch.empty(0, device="cpu")  # the recorder numbers operations
        if done.compiled and not self._has_compiled:
            self._has_compiled = True
            torch.compile(_nothing)  # the recorder's stand-in follows compilations from the first call on

    def _make(self, name: str) -> None:
        """Let a module appear that another module made."""
        if (module := self.modules.pop(name, None)) is None:
            return
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent in sys.modules and child not in self._attributes.get(parent, {}):
            vars(sys.modules[parent])[child] = module

    def _difference(self, name: str) -> str:
        """Why the import of a module might do something else here than in the template. Empty if it does the same."""
        needed = self._needed(name)
        if all(each.name.partition(".")[0] in sys.stdlib_module_names for each in needed):
            return ""
        here = Scene.now()
        read: set[str] = set().union(*(each.read for each in needed))
        written = set(self._written) | {pair for each in needed for pair in each.written.items()}
        scenes = {id(each.scene): each.scene for each in needed}
        added = {entry for each in needed for entry in (*each.path_first, *each.path_last)}
        found = (difference(here, _as_here(there, here, written, added), read) for there in scenes.values())
        return next(filter(None, found), "")

    def _needed(self, name: str) -> list[Imported]:
        """What the import of a module would import that is not imported yet."""
        found: dict[str, Imported] = {}
        unseen = [name]
        while unseen:
            each = unseen.pop()
            if each in self.modules and each in self.imported and each not in found:
                found[each] = self.imported[each]
                unseen += [*found[each].asked, each.rpartition(".")[0]]
        return list(found.values())


def _take_replacements(module: ModuleType, done: Imported) -> None:
    """Give a module what stands in for names that it took from others.

    We replace names in torch once torch is imported. Whoever takes one of them afterwards gets what stands in for it.
    A framework takes all of them afterwards, also without a ``from``; torch's own modules took some before.
    """
    is_torchs = done.name.partition(".")[0] in TORCH
    taken: dict[int, Replaced] = {}
    for replaced in replacements():
        source, name = getattr(replaced.owner, "__name__", ""), replaced.name
        if not is_torchs or (source, name) in done.took or (source, "*") in done.took:
            taken.setdefault(id(replaced.original), replaced)
    if not taken:
        return
    for each, value in list(vars(module).items()):
        if (found := taken.get(id(value))) is not None:
            vars(module)[each] = getattr(found.owner, found.name)


def _as_here(there: Scene, here: Scene, written: Iterable[tuple[str, str | None]], added: Set[str]) -> Scene:
    """The template's scene, with variables as they are here if they are as imports have set them there.

    What the import itself adds to ``sys.path`` may be there already.
    """
    environment = dict(there.environment)
    for variable, text in written:
        if there.environment.get(variable) == text:
            _put(environment, variable, here.environment.get(variable))
    path = [each for each in there.path if each not in added or each in here.path]
    return Scene(environment, path)


def _put(environment: MutableMapping[str, str], variable: str, text: str | None) -> None:
    if text is None:
        environment.pop(variable, None)
    else:
        environment[variable] = text


def _ignore(name: str) -> None:
    pass


def _nothing() -> None:
    pass


class HiddenFinder(importlib.abc.MetaPathFinder):
    """Finds hidden modules. It stands first of all finders."""

    def __init__(self, hidden: HiddenModules) -> None:
        self._hidden = hidden

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """The spec of a hidden module; None for any other, which the next finder finds."""
        return self._hidden.find(fullname)


class _Appearing(importlib.abc.Loader):
    """Loads a hidden module."""

    def __init__(self, hidden: HiddenModules, name: str) -> None:
        self._hidden, self._name = hidden, name
        self._as_before: dict[str, object] = {}

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module itself."""
        if (module := self._hidden.create(self._name)) is not None:
            self._as_before = {name: vars(module)[name] for name in ("__spec__", "__loader__") if name in vars(module)}
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Let the module appear."""
        vars(module).update(self._as_before)  # importlib has set them; torch's modules of settings refuse to be set
        self._hidden.appear(self._name)
