"""Finds copies of a model that never run: averages of its parameters (EMA), snapshots, a reference.

No forward reveals them, so they are searched for among all live objects: modules that did not run but have the class
and the shapes of one that did, and lists and dicts of tensors that have the shapes of a model's parameters.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from types import CellType, FrameType, ModuleType

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fakedist.frames import OURS, TORCH, local_addresses
from fakedist.record.alive import all_alive
from fakedist.record.marker import PLAIN, Piece, device_pieces
from fakedist.record.marks import Marks
from fakedist.record.module_names import LayerTable, class_name, modules_of, unwrapped
from fakedist.rundir.schema import ALIKE

#: Attributes in which wrappers keep what they hold. The names say nothing about it.
_SAY_NOTHING = {"module", "model", "_modules", "params", "parameters", "shadow_params", "shadow", "state", "data"}
_LEVELS = 3


def variable_name(held: object) -> str:
    """The name of a variable or attribute that holds an object or a holder of it. Empty if none is known."""
    for _ in range(_LEVELS):
        holders = [holder for holder in gc.get_referrers(held) if not isinstance(holder, (FrameType, list, tuple))]
        if name := _local_name({id(held), *(id(holder) for holder in holders if isinstance(holder, CellType))}):
            return name
        keys = [(key, holder) for holder in holders for key in _keys(holder, held)]
        for key, holder in sorted(keys, key=lambda pair: pair[0] in _SAY_NOTHING):
            if key not in _SAY_NOTHING:
                return key
            held = _owner(holder)
            break
        else:
            return ""
        if isinstance(held, dict):
            return ""
    return ""


def _keys(holder: object, held: object) -> Iterator[str]:
    """The names under which a namespace (a module's, an instance's or a plain dict) holds an object."""
    space = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
    if isinstance(space, dict):
        for key, value in list(space.items()):
            if value is held and isinstance(key, str) and key.isidentifier() and not key.startswith("__"):
                yield key


def _owner(holder: object) -> object:
    if isinstance(holder, dict):
        for referrer in gc.get_referrers(holder):
            if not isinstance(referrer, (dict, ModuleType)) and getattr(referrer, "__dict__", None) is holder:
                return referrer
    return holder


def _local_name(addresses: set[int]) -> str:
    """The name of a local variable that holds one of these, in a running function outside torch and fakedist."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((OURS, TORCH, "<")):
            for name, address in local_addresses(frame):
                if address in addresses and name.isidentifier():
                    return name
        frame = frame.f_back
    return ""


_COPY = "copy of the parameters"
_LEAST = 0.01  # fraction of known memory below which no search is made: it takes a tenth of a second
Shapes = dict[str, tuple[int, ...]]

# Methods are nn.Module's own: Megatron's DistributedDataParallel keeps a list under the name ``buffers``.


class Copies:
    """Finds copies of models, with all below them, and marks their memory. Each copy has its own layer."""

    def __init__(self, layers: LayerTable, marks: Marks) -> None:
        self._layers = layers
        self._marks = marks
        self._looked = self._op = -1
        self._names: dict[tuple[int, int, int], str] = {}
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def mark_once(self, step: int, op: int) -> None:
        """Mark every copy that is alive now, at most once per step."""
        if step != self._looked:
            self._looked = step
            self.mark(op)

    def mark(self, op: int) -> None:
        """Mark every copy that is alive now. Nothing new is, as long as the next operation is the same."""
        if op == self._op:
            return
        self._op = op
        trained = [root for root in self._layers.roots() if any(p.requires_grad for p in nn.Module.parameters(root))]
        if not trained:
            return
        modules = [module for root in trained for module in modules_of(root)]
        buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        if not _leaves_any(self._marks.claimed_bytes(buffers)):
            return
        pieces = self._marks.claimed() | _pieces(buffers)
        if not _leaves_any(sum(pieces.values())):
            return
        wanted = [counts for root in trained for counts in _counts(root)]
        living = all_alive()
        all_modules = living.of(lambda kind: issubclass(kind, nn.Module))
        holders = living.holding({counts.total() for counts in wanted})
        del living  # it may hold this call's frame, which would hold it, too
        claimed = {address for address, _ in pieces}
        for module in self._strangers(all_modules):
            tensors = [t for t in _state(module).values() if not set(_addresses([t])) <= claimed]
            if tensors and _is_like_one_of(module, trained):
                self._mark(module, tensors, "other", class_name(module))
                self.modules.update(modules_of(module))
                claimed |= set(_addresses(tensors))
        for holder in holders:
            tensors = _tensors_of(holder)
            is_alike = bool(tensors) and Counter(tuple(t.shape) for t in tensors) in wanted
            if is_alike and not claimed.intersection(_addresses(tensors)):
                self._mark(holder, tensors, ALIKE, "")

    def _mark(self, holder: object, tensors: Iterable[torch.Tensor], category: str, of_class: str) -> None:
        """Mark the tensors of a copy. Its layer is named after the variable that holds it, or after its class."""
        pieces = _pieces(tensors)
        if not pieces:  # ZeRO-3 empties parameters that it has released, and a list of those is like the model's
            return
        key = (id(holder), *next(iter(pieces)))  # the variable may be gone when it is seen again
        if key not in self._names:
            self._names[key] = variable_name(holder) or (of_class if _is_a_copys(of_class) else "")
        name = self._names[key]
        layer = self._layers.copy(f"{_COPY} ({name})" if name else _COPY, of_class)
        for (address, start), bytes_ in pieces.items():
            self._marks.mark(Piece(address, start, bytes_), category, layer)

    def _strangers(self, objects: list[object]) -> list[nn.Module]:
        """Modules that never ran and are part of neither a module that did nor another stranger."""
        modules = [module for module in objects if isinstance(module, nn.Module) and not self._layers.knows(module)]
        inner = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
        return [module for module in modules if id(module) not in inner and "_parameters" in module.__dict__]


def _leaves_any(known: int | None) -> bool:
    """Return whether enough memory is allocated besides the known bytes; True while those are unknown."""
    if known is None:
        return True
    allocated = 0
    if torch.cuda.is_initialized():  # not memory_allocated(), which lists all statistics for one
        allocated = torch._C._cuda_memoryStats(torch.cuda.current_device())["allocated_bytes"]["all"]["current"]
    return allocated - known >= known * _LEAST


def _is_a_copys(of_class: str) -> bool:
    return any(word in of_class.lower() for word in ("ema", "average"))


def _is_like_one_of(module: nn.Module, trained: list[nn.Module]) -> bool:
    """Return whether a module has the class and shapes of a trained one, or of a submodule with submodules."""
    inner = unwrapped(module)
    shapes = _shapes(inner)
    for root in trained:
        top = unwrapped(root)
        for part in nn.Module.modules(top):
            if class_name(part) == class_name(inner) and (part is top or part._modules) and _shapes(part) == shapes:
                return bool(shapes)
    return False


def _shapes(module: nn.Module) -> Shapes:
    return {name: tuple(p.shape) for name, p in nn.Module.named_parameters(module) if not is_lazy(p)}


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    named = {**dict(nn.Module.named_parameters(module)), **dict(nn.Module.named_buffers(module))}
    return {name: tensor for name, tensor in named.items() if not is_lazy(tensor)}


def _counts(root: nn.Module) -> Iterator[Counter[tuple[int, ...]]]:
    """Tensors per shape in a list of a model's parameters: of all, of the trained ones, and of all with buffers."""
    parameters = _made(nn.Module.parameters(root))
    yield Counter(tuple(p.shape) for p in parameters)
    yield Counter(tuple(p.shape) for p in parameters if p.requires_grad)
    yield Counter(tuple(t.shape) for t in (*parameters, *_made(nn.Module.buffers(root))))


def _made(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if not is_lazy(tensor)]


def _tensors_of(holder: object) -> list[torch.Tensor]:
    """The tensors of a list or dict that holds only plain tensors, all of them on the device."""
    values: Iterable[object] = ()
    if type(holder) is list:
        values = holder
    elif issubclass(type(holder), dict) and isinstance(holder, dict):
        values = dict.values(holder)
    if type(next(iter(values), None)) not in PLAIN:
        return []
    held = list(values)
    tensors = [item for item in held if type(item) in PLAIN and isinstance(item, torch.Tensor) and item.is_cuda]
    return tensors if len(tensors) == len(held) else []


def _addresses(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    return (piece.address for tensor in tensors for piece in device_pieces(tensor))


def _pieces(tensors: Iterable[torch.Tensor]) -> dict[tuple[int, int], int]:
    """Bytes by location: (address of the storage, start in it)."""
    return {(address, start): size for tensor in tensors for address, start, size in device_pieces(tensor)}
