"""Prints, replays of graphs and folded constants, which torch runs below its dispatch modes: the engine sees nothing.

Graphs of one pool share memory, and each replay writes its own. No kernel does that here, so the bytes of a capture are
kept when it ends and restored when it is replayed. Inductor computes constants on the device while it compiles.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fakedist.gpu.demand.triton_code import read_source
from fakedist.gpu.values.contents import Defined, host_bytes
from fakedist.gpu.values.tensors import PLAIN, Arguments, Holding, Keywords, find_know
from fakedist.graph_captures import GraphObserver, watched_graphs
from fakedist.importing import now_and_when_imported
from fakedist.patch import patched, present

#: A graph's memory as the host sees it, and the bytes to write there.
_Writes = list[tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def printed(on_host: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Print device tensors with their values, unless ``on_host`` returns None. RecordingError if torch differs."""
    import torch._tensor_str as printer

    original, contents = present(printer, "_str"), present(printer, "_tensor_str")

    def _str(self: torch.Tensor, *, tensor_contents: str | None = None) -> object:
        if type(self) in (torch.Tensor, torch.nn.Parameter) and self.is_cuda and tensor_contents is None:
            host = on_host(self)
            tensor_contents = "..." if host is None else contents(host, len("tensor("))
        return original(self, tensor_contents=tensor_contents)

    with patched(printer, "_str", _str):
        yield


@contextmanager
def replayed(defined: Defined) -> Iterator[None]:
    """Keep the values that captures define for their replays. RecordingError if this torch captures otherwise."""
    with watched_graphs(_Replays(defined)):
        yield


class _Replays(GraphObserver):
    def __init__(self, defined: Defined) -> None:
        self._defined = defined
        self._know = find_know()
        self._kept: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, _Writes] = weakref.WeakKeyDictionary()

    def capture_begins(self) -> None:
        self._defined.written = {}

    def capture_ended(self, graph: torch.cuda.CUDAGraph) -> None:
        written, self._defined.written = self._defined.written or {}, None
        memories = [host_bytes(address, num_bytes) for address, num_bytes in written.items()]
        self._kept[graph] = [(memory, memory.clone()) for memory in memories]
        weakref.finalize(graph, _forget, self._defined.replayed, list(written))

    def replayed(self, graph: torch.cuda.CUDAGraph) -> None:
        for memory, values in self._kept.get(graph, ()):
            memory.copy_(values)
            self._know(memory.data_ptr(), memory.numel(), Holding.COMPUTED)
            self._defined.replayed[memory.data_ptr()] = memory.numel()
            self._defined.watch.replayed()


#: Modules whose ConstantFolder runs parts of a graph while no mode is active (``_disable_current_modes``).
_FOLDERS = {"torch._inductor.constant_folding", "torch._export.passes.constant_folding"}
#: Runs one operation.
_Execute = Callable[[OpOverload, Arguments, Keywords], object]


@contextmanager
def folded(execute: _Execute) -> Iterator[None]:
    """Compute constants that a compiler folds into its graphs, without a record. RecordingError if torch differs."""
    with ExitStack() as undo:

        def watch(module: ModuleType) -> None:
            folder = present(module, "ConstantFolder")
            original: Callable[..., object] = present(folder, "run")

            def run(self: object, *args: object, **kwargs: object) -> object:
                if torch._C._len_torch_dispatch_stack():
                    return original(self, *args, **kwargs)
                with _Computed(execute):
                    return original(self, *args, **kwargs)

            undo.enter_context(patched(folder, "run", run))

        undo.enter_context(now_and_when_imported(_FOLDERS, watch))
        yield


class _Computed(TorchDispatchMode):
    def __init__(self, execute: _Execute) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._execute = execute

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type[torch.Tensor]],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        if isinstance(func, OpOverload) and all(kind.__torch_dispatch__ is PLAIN for kind in types):
            return self._execute(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


#: Classes that launch Triton's kernels, by their modules: the script's own kernels, and Inductor's.
_LAUNCHERS = {"triton.runtime.jit": "JITFunction", "torch._inductor.runtime.triton_heuristics": "CachingAutotuner"}
#: What a kernel writes: positions and names of arguments.
_Written = tuple[tuple[int, str], ...]


@contextmanager
def triton_writes(spoil: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call ``spoil`` with device tensors that Triton kernels write. RecordingError if launches are unknown."""
    with ExitStack() as undo:

        def watch(module: ModuleType) -> None:
            launcher = present(module, _LAUNCHERS[module.__name__])
            original: Callable[..., object] = present(launcher, "run")
            kernels: weakref.WeakKeyDictionary[object, _Written] = weakref.WeakKeyDictionary()

            def run(self: object, *args: object, **kwargs: object) -> object:
                result = original(self, *args, **kwargs)
                written = kernels.get(self)
                if written is None:
                    written = kernels[self] = _written_by(self)
                for index, name in written if not kwargs.get("warmup") else ():
                    value = args[index] if index < len(args) else kwargs.get(name)
                    if isinstance(value, torch.Tensor) and value.is_cuda:
                        spoil(value)
                return result

            undo.enter_context(patched(launcher, "run", run))

        undo.enter_context(now_and_when_imported(_LAUNCHERS, watch))
        yield


def _written_by(launcher: Any) -> _Written:
    """The arguments that a kernel writes: Inductor says which inputs, and the source of others shows it."""
    mutated = getattr(launcher, "mutated_arg_names", None)
    names = list(launcher.arg_names if mutated is None else launcher.fn.arg_names)
    if mutated is None:
        accesses = read_source(launcher.fn.__name__, str(getattr(launcher, "src", ""))).accesses
        mutated = [name for name, access in accesses.items() if access.stores or access.adds]
    return tuple((index, name) for index, name in enumerate(names) if name in mutated)


def _forget(replayed: dict[int, int], addresses: list[int]) -> None:
    """A graph is gone, and its memory may be reused for anything."""
    for address in addresses:
        replayed.pop(address, None)
