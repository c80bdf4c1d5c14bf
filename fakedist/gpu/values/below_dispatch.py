"""Prints, replays of graphs and folded constants, which torch runs below its dispatch modes: the engine sees nothing.

Graphs of one pool share memory, and each replay writes its own. No kernel does that here, so the bytes of a capture are
kept when it ends and restored when it is replayed. Inductor computes constants on the device while it compiles.
"""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fakedist.gpu.demand.triton_code import compiled_text
from fakedist.gpu.values.contents import Defined, host_bytes
from fakedist.gpu.values.tensors import PLAIN, Arguments, Holding, Keywords, find_know, report_kernel, report_write
from fakedist.graph_captures import GraphObserver, watched_graphs
from fakedist.patch import now_and_when_imported, patched, present

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
        self._lost: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, set[int]] = weakref.WeakKeyDictionary()

    def capture_begins(self) -> None:
        self._defined.take_losses()
        self._defined.written, self._defined.lost = {}, set()

    def capture_ended(self, graph: torch.cuda.CUDAGraph) -> None:
        self._defined.take_losses()
        written, self._defined.written = self._defined.written or {}, None
        self._lost[graph] = self._defined.lost
        memories = [host_bytes(address, num_bytes) for address, num_bytes in written.items()]
        self._kept[graph] = [(memory, memory.clone()) for memory in memories]
        weakref.finalize(graph, _forget, self._defined.replayed, list(written))

    def replayed(self, graph: torch.cuda.CUDAGraph) -> None:
        for address in self._lost.get(graph, ()):
            report_write(address)
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


#: Classes that load what Triton compiled, with their methods: Triton's own, and those of torch's static launcher.
_LOADERS = {
    "triton.compiler.compiler": ("CompiledKernel", "_init_handles"),
    "torch._inductor.runtime.static_triton_launcher": ("StaticallyLaunchedCudaKernel", "load_kernel"),
    "torch._inductor.runtime.static_cuda_launcher": ("StaticallyLaunchedCudaKernel", "load_kernel"),
}


@contextmanager
def triton_writes() -> Iterator[None]:
    """Have the driver know through which parameters each kernel of Triton's writes, before its first launch.

    RecordingError if this Triton or torch loads kernels in an unknown way.
    """
    with ExitStack() as undo:

        def watch(module: ModuleType) -> None:
            name, method = _LOADERS[module.__name__]
            loader = present(module, name)
            original: Callable[..., object] = present(loader, method)
            told: set[int] = set()

            def load(self: Any, *args: object, **kwargs: object) -> object:
                result = original(self, *args, **kwargs)
                for function in (self.function, *getattr(self, "functions", {}).values()):
                    if isinstance(function, int) and function not in told:
                        told.add(function)
                        _report(self, function)
                return result

            undo.enter_context(patched(loader, method, load))

        undo.enter_context(now_and_when_imported(_LOADERS, watch))
        yield


def _report(kernel: object, function: int) -> None:
    """Report a kernel. Without its PTX the driver takes all that it gets as written."""
    ptx = compiled_text(kernel, "ptx")
    written = written_parameters(ptx, str(getattr(kernel, "name", ""))) if ptx else None
    if written is not None:
        report_kernel(function, written)


def _forget(replayed: dict[int, int], addresses: list[int]) -> None:
    """A graph is gone, and its memory may be reused for anything."""
    for address in addresses:
        replayed.pop(address, None)


#: Comments, lines of the source, and labels.
_COMMENT = re.compile(r"//[^\n]*|^\s*\.loc\b[^\n]*|^\s*[\w$]+:(?!:)", re.MULTILINE)
#: Where one instruction ends and another begins. A brace on a line of its own is a function's or inline assembly's.
_BETWEEN = re.compile(r";|^\s*[{}]", re.MULTILINE)
#: An instruction: perhaps a predicate, then its opcode and its operands.
_INSTRUCTION = re.compile(r"\s*(?:\{\s*)?(?:@!?[%\w$]+\s+)?([a-z]\w*(?:[.:]+\w+)*)\s+([^\s].*)", re.DOTALL)
#: Registers, parameters and variables; predicates point nowhere.
_NAME = re.compile(r"(?<![\w$%.])(?!%(?:\d+_)?p\d)%?[\w$]*[A-Za-z_$][\w$]*")
_ADDRESS = re.compile(r"\[([^\]]*)\]")
#: What an instruction gives a value to: names in braces, or one name.
_DESTINATION = re.compile(r"\s*(\{[^}]*\}|[^,\[{]*)")
_STORES = re.compile(r"(?:st|atom|red|multimem|sust|sured|tensormap|stmatrix)\.(?!ld_reduce)")
#: Copies between global memory and a block's own, in which the target's space comes first.
_BULK = re.compile(r"(?:multimem\.)?cp\.(?:reduce\.)?async\.bulk\.")
_OWN_SPACE = re.compile(r"\.(?:shared|local|param|const)\b|^[sl][td]matrix\.")
#: Names that stand for a block's own memory, global memory, and what the descriptors point to that a block makes.
_OWN, _GLOBAL, _DESCRIBED = "own memory", "global memory", "described memory"
#: The root of an address that comes from global memory.
_LOADED = -1

_Roots = frozenset[int]


class _Flow(NamedTuple):
    """Where the values of ``targets`` come from."""

    targets: Iterable[str]
    sources: Iterable[str]


def written_parameters(ptx: str, kernel: str) -> list[bool] | None:
    """Whether a kernel writes through each of its parameters; None if it may write elsewhere, too."""
    entry = re.search(rf"\.entry\s+{re.escape(kernel)}\s*\(([^)]*)\)", ptx)
    if entry is None:
        return None
    roots: defaultdict[str, _Roots] = defaultdict(frozenset)
    parameters = re.findall(r"([\w$]+)(?:\[\d*\])?\s*(?:,|$)", entry[1].strip())
    for position, parameter in enumerate(parameters):
        roots[parameter] = frozenset({position})
    roots[_GLOBAL] = frozenset({_LOADED})
    instructions = list(_instructions(ptx))
    _follow(roots, [flow for opcode, operands in instructions for flow in _flows(opcode, operands)])
    written = set[int]()
    for opcode, operands in instructions:
        for names in _written(opcode, operands):
            reached = _reached(roots, names)
            if reached == {_LOADED} and not opcode.startswith("call"):
                return None
            written |= reached
    return [position in written for position in range(len(parameters))]


def _instructions(ptx: str) -> Iterator[tuple[str, str]]:
    """Opcodes and operands, of functions that the kernel may call, too. Each function has registers of its own."""
    for number, function in enumerate(re.split(r"\.func\b", _COMMENT.sub("", ptx))):
        for text in _BETWEEN.split(function):
            if (match := _INSTRUCTION.match(text)) is not None:
                yield match[1], match[2].replace("%", f"%{number}_")


def _written(opcode: str, operands: str) -> list[list[str]]:
    """The names that make up each address that an instruction writes in global memory."""
    if opcode.startswith("call"):
        return [[name] for name in _NAME.findall(operands)]
    is_copy = _BULK.match(opcode) is not None
    is_global = ".global.shared" in opcode if is_copy else not _OWN_SPACE.search(opcode)
    address = _ADDRESS.search(operands)
    if address is None or not is_global or not (is_copy or _STORES.match(opcode)):
        return []
    names = _NAME.findall(address[1])[:1]  # coordinates within a tensor come behind its descriptor
    return [names, [_DESCRIBED]] if ".tensor." in opcode else [names]


def _flows(opcode: str, operands: str) -> list[_Flow]:
    address = _ADDRESS.search(operands)
    inside = _NAME.findall(address[1]) if address else []
    if opcode.startswith("tensormap.replace") and address:
        described = _NAME.findall(operands[address.end() :]) if "global_address" in opcode else []
        return [_Flow([_DESCRIBED], described)]
    if opcode.startswith(("st.", "stmatrix.")) and address:
        to = inside if ".param" in opcode else [_OWN] if _OWN_SPACE.search(opcode) or ".global" not in opcode else []
        return [_Flow(to, _NAME.findall(operands[address.end() :]))]
    if _BULK.match(opcode) or opcode.startswith("cp.async."):
        return [_Flow([_OWN], [_GLOBAL])]
    destination = _DESTINATION.match(operands)
    targets = _NAME.findall(destination[1]) if destination else []
    if opcode.startswith("call"):
        targets = _NAME.findall(operands)
    if opcode.startswith(("ld.", "ldu.", "ldmatrix.", "atom.", "multimem.")):
        if ".param" in opcode:
            return [_Flow(targets, inside)]
        return [_Flow(targets, [_GLOBAL] if ".global" in opcode else [_OWN, _GLOBAL])]
    sources = _NAME.findall(operands[destination.end() :]) if destination else []
    return [_Flow(targets, sources)]


def _reached(roots: defaultdict[str, _Roots], names: Iterable[str]) -> _Roots:
    return frozenset[int]().union(*(roots[name] for name in names))


def _follow(roots: defaultdict[str, _Roots], flows: list[_Flow]) -> None:
    """Follow pointers until no more are found: loops carry them back."""
    changed = True
    while changed:
        changed = False
        for targets, sources in flows:
            reached = _reached(roots, sources)
            for target in targets:
                if not reached <= roots[target]:
                    roots[target] |= reached
                    changed = True
