"""Has the script import the stand-in of DeepEP as its package ``deep_ep``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from fakedist.extras.experts import deep_ep, hybrid_ep
from fakedist.extras.experts.deep_ep import Buffer, EventHandle, EventOverlap
from fakedist.extras.experts.deep_ep_sizes import Config
from fakedist.extras.experts.hybrid_ep import HybridEPBuffer
from fakedist.rundir import notes
from fakedist.rundir.notes import Note
from fakedist.world.reroute import Device


class _Finder(Loader):
    """Finds the stand-in as ``deep_ep`` and its submodules, before an installed package."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of one of the stand-in's modules; None for any other."""
        if fullname not in self._modules:
            return None
        return ModuleSpec(fullname, self, origin="fakedist", is_package=fullname == "deep_ep")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module."""
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it is complete."""


@contextmanager
def stand_in(device: Device) -> Iterator[Callable[[], list[Note]]]:
    """Import the stand-in as ``deep_ep``. Yields a function that returns the report's notes."""
    found: dict[str, Note] = {}

    def replaced(base: type, commit: str) -> type:
        used = partial(found.setdefault, base.__name__, notes.deep_ep_stands_in(base.__name__, commit))
        return type(
            base.__name__, (base,), {"device": device, "used": staticmethod(used), "__module__": "deep_ep.buffer"}
        )

    names: dict[str, object] = {
        "Buffer": replaced(Buffer, deep_ep.COMMIT),
        "Config": Config,
        "EventHandle": EventHandle,
        "EventOverlap": EventOverlap,
        "HybridEPBuffer": replaced(HybridEPBuffer, hybrid_ep.COMMIT),
    }
    names |= {"topk_idx_t": torch.int64}
    modules = {name: ModuleType(name, deep_ep.__doc__) for name in ("deep_ep", "deep_ep.buffer", "deep_ep.utils")}
    for module in modules.values():
        vars(module).update(names)
    vars(modules["deep_ep"])["__getattr__"] = _lacking
    finder: Any = _Finder(modules)
    sys.meta_path.insert(0, finder)
    try:
        yield lambda: list(found.values())
    finally:
        if finder in sys.meta_path:  # the script may have replaced the list
            sys.meta_path.remove(finder)
        for name in modules:
            sys.modules.pop(name, None)


def _lacking(name: str) -> object:
    if name == "ElasticBuffer":
        raise ImportError("fakedist has no deep_ep.ElasticBuffer: use deep_ep.Buffer")
    raise AttributeError(f"module 'deep_ep' has no attribute {name!r}")
