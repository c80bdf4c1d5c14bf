"""Compiled graphs of ``torch.compile``: where each runs, and which operations are only torch's tracing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType

import torch

from fakedist.importing import when_imported
from fakedist.patch import patched, present
from fakedist.record.inductor import Watched

#: Returns the context for a run of a compiled graph with these inputs. It is called with the results.
Around = Callable[[object, Sequence[object]], AbstractContextManager[Callable[[object], None]]]

_CALLBACKS = "torch._dynamo.callback"
_OUTPUT_CODE = "torch._inductor.output_code"
_get_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
_PROXY, _FUNCTIONAL = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL


def is_tracing() -> bool:
    """Whether torch runs with shapes alone in this thread. It compiles then, and nothing that runs is the job's."""
    return _get_mode(_FAKE) is not None


def is_followed() -> bool:
    """Whether torch records or rewrites what runs in this thread with real tensors, as ``make_fx`` does."""
    return _get_mode(_PROXY) is not None or _get_mode(_FUNCTIONAL) is not None


@contextmanager
def compilations(tell: Callable[[bool], None]) -> Iterator[None]:
    """Call ``tell(True)`` where torch begins to compile, a graph or its backward, and ``tell(False)`` at the end.

    Raises:
        RecordingError: This version's Dynamo compiles in another way.
    """
    depth = 0

    def around(original: Callable[..., AbstractContextManager[None]]) -> Callable[..., AbstractContextManager[None]]:
        @contextmanager
        def install_callbacks(*args: object, **kwargs: object) -> Iterator[None]:
            nonlocal depth
            depth += 1
            if depth == 1:
                tell(True)
            try:
                with original(*args, **kwargs):
                    yield
            finally:
                depth -= 1
                if not depth:
                    tell(False)

        return install_callbacks

    with ExitStack() as stack:

        def watch(module: ModuleType) -> None:
            owner, name = present(module, "CompilationCallbackHandler"), "install_callbacks"
            stack.enter_context(patched(owner, name, around(present(owner, name))))

        if _CALLBACKS in sys.modules:
            watch(sys.modules[_CALLBACKS])
        stack.enter_context(when_imported(_CALLBACKS.__eq__, watch))
        yield


@contextmanager
def compiled_graphs(graph: Around, watched: Watched) -> Iterator[None]:
    """Run every graph that Inductor compiled inside ``graph(compiled, inputs)``, and follow its compilation.

    That context gives a function, which is called with the results.

    Inductor takes seconds to import, so it is patched when the script first calls ``torch.compile``.

    Raises:
        RecordingError: This version's Inductor runs its graphs in another way.
    """
    original: Callable[..., object] = torch.compile
    with ExitStack() as undo:
        watching = False

        def watch() -> None:
            nonlocal watching
            if not watching:
                watching = True
                undo.enter_context(_inductor_graphs(graph))
                undo.enter_context(watched.compilations())

        @functools.wraps(original)
        def compile_(*args: object, **kwargs: object) -> object:
            watch()
            return original(*args, **kwargs)

        if _OUTPUT_CODE in sys.modules:
            watch()
        undo.enter_context(patched(torch, "compile", compile_))
        yield


@contextmanager
def _inductor_graphs(graph: Around) -> Iterator[None]:
    from torch._inductor import output_code

    original = present(present(output_code, "CompiledFxGraph"), "__call__")

    def call(self: object, inputs: Sequence[object]) -> object:
        with graph(self, inputs) as returned:
            results = original(self, inputs)
            returned(results)
            return results

    with patched(output_code.CompiledFxGraph, "__call__", call):
        yield
