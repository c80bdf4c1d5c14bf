"""Watches calls of Transformer Engine's extension, which launches kernels that torch's dispatcher does not see.

Its functions are replaced while a step is timed, wherever they are held: in the extension, in modules of Transformer
Engine that imported them, and in optimizers, which pass them to ``MultiTensorApply``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from fakedist.gpu.demand.attention_demand import Known
from fakedist.gpu.demand.operation_demand import Demand
from fakedist.gpu.demand.transformer_engine_demand import extension_demand, launches_kernels
from fakedist.gpu.values.arguments import Arguments, Keywords
from fakedist.patch import patched, present

EXTENSION = "transformer_engine_torch"
PACKAGE = "transformer_engine"
_APPLY = ("transformer_engine.pytorch.optimizers.multi_tensor_apply", "MultiTensorApply", "__call__")

_Function = Callable[..., object]


class Watcher(Protocol):
    """Is told of calls."""

    def call_begins(self, operation: str) -> int:
        """A call begins in this thread. Returns a tag for it."""

    def call_ended(self, tag: int, demand: Demand | None) -> None:
        """The call with that tag ended; without a demand if it failed."""


@contextmanager
def watched_calls(watcher: Watcher, known: Known) -> Iterator[None]:
    """Tell the watcher of each call, if the extension is loaded.

    Args:
        watcher: Is told.
        known: Returns a tensor's values, or None if no kernel computed them.

    Raises:
        RecordingError: This Transformer Engine applies its optimizers in another way.
    """
    extension = sys.modules.get(EXTENSION)
    if extension is None:
        yield
        return
    replaced = {
        id(function): _watched(name, function, watcher, known)
        for name, function in vars(extension).items()
        if callable(function) and not isinstance(function, type) and launches_kernels(name)
    }
    with ExitStack() as undo:
        for name, module in list(sys.modules.items()):
            if name == EXTENSION or name.split(".")[0] == PACKAGE:
                for attribute, value in list(vars(module).items()):
                    if id(value) in replaced:
                        undo.enter_context(patched(module, attribute, replaced[id(value)]))
        if _APPLY[0] in sys.modules:
            owner = present(sys.modules[_APPLY[0]], _APPLY[1])
            undo.enter_context(patched(owner, _APPLY[2], _applying(present(owner, _APPLY[2]), replaced)))
        yield


def _watched(name: str, original: _Function, watcher: Watcher, known: Known) -> _Function:
    def call(*args: object, **kwargs: object) -> object:
        tag, demand = watcher.call_begins(f"{PACKAGE}.{name}"), None
        try:
            result = original(*args, **kwargs)
            demand = _demand(name, args, kwargs, result, known)
            return result
        finally:
            watcher.call_ended(tag, demand)

    return call


def _demand(name: str, args: Arguments, kwargs: Keywords, result: object, known: Known) -> Demand | None:
    """The call's demand. None if another version's arguments are others: its kernels count as not known."""
    try:
        return extension_demand(name, args, kwargs, result, known)
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def _applying(original: _Function, replaced: dict[int, _Function]) -> _Function:
    def apply(owner: object, function: object, *args: object) -> object:
        return original(owner, replaced.get(id(function), function), *args)

    return apply
