"""Marks what blocks of memory are for, where that is known: parameters, gradients, optimizer state, workspaces."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from fakedist.rank.frameworks import deepspeed, megatron, transformer_engine
from fakedist.record.marker import PLAIN, WHAT_BITS, Marker, Piece, PythonMarker, What, device_pieces, inside_transforms
from fakedist.record.module_names import KEEP_LAYER, OUTSIDE, LayerTable, modules_of
from fakedist.record.position import Position
from fakedist.record.unseen import put_back, take
from fakedist.rundir.memory_records import MarksRecord
from fakedist.rundir.schema import ALIKE, ALIKE_CODE, CATEGORIES, SHARD, SHARD_CODE

_CODES = {name: code for code, name in enumerate(CATEGORIES)} | {SHARD: SHARD_CODE, ALIKE: ALIKE_CODE}
# As numbers: a member of an enumeration takes longer to find than all else about a tensor.
_STATE, _ITS_GRADIENT, _BOTH = int(What.STATE), int(What.ITS_GRADIENT), int(What.PARAMETER_AND_ITS_GRADIENT)
_attributes = attrgetter("__dict__")
#: Attributes of a parameter that hold a gradient.
_GRADIENTS = ("grad", megatron.GRADIENT)


class OwnedPart(NamedTuple):
    """Elements of a tensor that belong to a layer: ``number`` of them, from ``first`` on."""

    layer: int
    first: int
    number: int


class _Gather(NamedTuple):
    """An all_gather into one tensor: this rank's own piece, and where in the gathered block it goes."""

    mine: Piece
    start: int


def _is_bare(parameter: torch.Tensor) -> bool:
    """Return whether no framework has set attributes of a parameter, in which it may keep further tensors."""
    return type(parameter) in PLAIN and not parameter.__dict__


def _are_bare(parameters: Sequence[torch.Tensor]) -> bool:
    # Without a call in Python for each.
    return PLAIN.issuperset(map(type, parameters)) and not any(map(_attributes, parameters))


class Marks:
    """Marks on blocks, and the layer that owns each parameter.

    A mark means: the block last allocated at this address, by an operation up to this one, belongs to that category and
    layer. It holds for the block's whole life, so it may come late.
    """

    def __init__(self, position: Position, layers: LayerTable, marker: Marker | None = None) -> None:
        self._is_on = True
        self._position = position
        self._layers = layers
        self._marker = marker or PythonMarker(position.cells)
        self._tensors: list[torch.Tensor] = []  # to mark at the next flush,
        self._wanted: list[int] = []  # and as what
        self.owners = layers.owners
        self._gathers: dict[int, _Gather] = {}
        self._handles: list[RemovableHandle] = []
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}

    def take(self) -> MarksRecord:
        """The marks since the last call."""
        return self._marker.take_marks()

    def mark(self, piece: Piece, category: str, layer: int, op: int | None = None) -> None:
        """Mark a block, of which the layer uses this piece."""
        if self._is_on:
            self._marker.mark(self._position.op - 1 if op is None else op, piece, _CODES[category], layer)

    def communication(self, address: int, bytes_: int) -> None:
        """Mark a block that a collective uses."""
        self.mark(Piece(address, 0, bytes_), "communication", KEEP_LAYER)

    def workspace(self, address: int, op: int, bytes_: int) -> None:
        """Mark a block that a library works in."""
        self.mark(Piece(address, 0, bytes_), "workspace", KEEP_LAYER, op)

    def mark_tensor(self, tensor: object, category: str, layer: int) -> None:
        """Mark every block that holds a tensor."""
        for piece in device_pieces(tensor):
            self.mark(piece, category, layer)
            if category == "parameter" and piece.address in self._gathers:
                self._mark_shard(self._gathers[piece.address], layer, piece)

    def gathered(self, mine: torch.Tensor, whole: torch.Tensor, index: int) -> None:
        """Remember an all_gather that copies this rank's part, the ``index``-th, into the whole."""
        if not self._is_on:
            return
        own, gathered = device_pieces(mine)[0], device_pieces(whole)[0]
        if own.address != gathered.address:
            self._gathers[gathered.address] = _Gather(own, gathered.start + index * own.size)

    def step_ended(self) -> None:
        """Forget what the step gathered. Other blocks will have its addresses."""
        self._gathers.clear()

    def _mark_shard(self, gather: _Gather, layer: int, piece: Piece) -> None:
        mine, start = gather
        first, last = max(piece.start, start), min(piece.start + piece.size, start + mine.size)
        if first < last:
            self.mark(Piece(mine.address, mine.start + first - start, last - first), SHARD, layer)

    # ---- where tensors are

    def _want(self, tensor: object, kind: What, layer: int) -> None:
        if isinstance(tensor, torch.Tensor):
            self._tensors.append(tensor)
            self._wanted.append(layer << WHAT_BITS | kind)

    def _flush(self) -> None:
        tensors, codes = self._tensors, self._wanted
        if not tensors:
            return
        self._tensors, self._wanted = [], []
        if not self._gathers:
            self._marker.mark_tensors(tensors, codes, self._locate)
            return
        for tensor, wanted in zip(tensors, codes, strict=True):  # the shards among them are marked, too
            self._locate(tensor, wanted)

    def _locate(self, tensor: torch.Tensor, wanted: int) -> None:
        kind, layer = wanted & (1 << WHAT_BITS) - 1, wanted >> WHAT_BITS
        if kind in (What.PARAMETER, What.PARAMETER_AND_ITS_GRADIENT):
            self.mark_tensor(tensor, "parameter", layer)
        if kind == What.GRADIENT:
            self.mark_tensor(tensor, "gradient", layer)
        if kind in (What.ITS_GRADIENT, What.PARAMETER_AND_ITS_GRADIENT):
            self.mark_tensor(tensor.grad, "gradient", layer)
        if kind == What.STATE:
            for piece in device_pieces(tensor):
                self._marker.mark_state(tensor, piece, layer)

    # ---- parameters and gradients

    def scan(self, root: nn.Module) -> None:
        """Mark the parameters, buffers and gradients of a model. The first module that has a tensor owns it."""
        self._layers.layer(root)
        for module in modules_of(root):
            self._module(module, self._layers.layer(module))
        self._flush()

    def module(self, module: nn.Module, layer: int) -> None:
        """Mark a module's own parameters, their copies and its buffers as they are now, and gradients from now on."""
        self._module(module, layer)
        self._flush()

    def _module(self, module: nn.Module, layer: int) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and not is_lazy(parameter):
                tensor = inside_transforms(parameter)
                self._where_it_is(tensor, self._owned(tensor, layer))
        for buffer in module._buffers.values():
            if buffer is not None and not is_lazy(buffer):
                self._want(inside_transforms(buffer), What.PARAMETER, layer)
        for copy in module.__dict__.get(transformer_engine.COPIES, {}).values():
            # Not always a tensor: inside a module Transformer Engine keeps only the parts of one.
            for tensor in (copy,) if isinstance(copy, torch.Tensor) else vars(copy).values():
                self._want(tensor, What.PARAMETER, layer)

    def parameter(self, parameter: torch.Tensor, layer: int) -> None:
        """Mark one parameter and its gradients."""
        with self._position.lock:
            self._where_it_is(parameter, self._owned(parameter, layer))
            self._flush()

    def _owned(self, parameter: torch.Tensor, layer: int) -> int:
        """The layer that owns a parameter: this one, unless another was first. Gradients are marked from now on."""
        owner = self.owners.owner(parameter)
        if owner > OUTSIDE or owner == layer:
            return owner
        self.owners.own(parameter, layer)  # in place of OUTSIDE, too: a module owns it after all
        if owner == KEEP_LAYER and parameter.requires_grad and parameter.is_leaf:
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, layer)))
        return layer

    def compiled_backward(self) -> Callable[[], None]:
        """Take our hooks off as a backward begins, because torch compiles it with the hooks of its parameters.

        The function that this returns, to be called when the backward has ended, marks the gradients.
        """
        taken = take(self._handles)

        def ended() -> None:
            put_back(taken)
            for parameter, layer in self.owners:
                if parameter.grad is not None:
                    self._where_it_is(parameter, layer)
            self._flush()

        return ended

    def _watch(self, parameter: torch.Tensor) -> None:
        """Watch a tensor without a module. If a backward adds a gradient to it, it is a parameter and not a copy."""
        known = self._watched.get(id(parameter))
        if (known is None or known() is not parameter) and parameter.requires_grad and parameter.is_leaf:
            self._watched[id(parameter)] = weakref.ref(parameter)
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._is_parameter))

    def _is_parameter(self, parameter: torch.Tensor) -> None:
        if self.owners.owner(parameter) == KEEP_LAYER:
            self.parameter(parameter, OUTSIDE)

    @contextmanager
    def released(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Hold no weak reference to these tensors while their contents, and so their gradients' hooks, are swapped."""
        layers = [self.owners.owner(tensor) for tensor in tensors]
        for tensor in tensors:
            self.owners.forget(tensor)
        watched = [self._watched.pop(id(tensor), None) is not None for tensor in tensors]
        try:
            yield
        finally:
            for tensor, layer, was_watched in zip(tensors, layers, watched, strict=True):
                if layer != KEEP_LAYER:
                    self._owned(tensor, layer)
                elif was_watched:
                    self._watch(tensor)

    def _gradient_ready(self, layer: int, parameter: torch.Tensor) -> None:
        if _is_bare(parameter) and not self._gathers:
            self._marker.mark_tensor(parameter, layer << WHAT_BITS | _BOTH, self._locate)
        else:
            self.parameter(parameter, layer)

    def _where_it_is(self, parameter: torch.Tensor, layer: int) -> None:
        if _is_bare(parameter):
            self._tensors.append(parameter)
            self._wanted.append(layer << WHAT_BITS | _BOTH)
            return
        self._want(parameter, What.PARAMETER, layer)
        is_deepspeeds = deepspeed.keeps_tensors(parameter)
        if is_deepspeeds:
            self._want(deepspeed.part_of(parameter), What.PARAMETER, layer)
        for tensor in _gradients(parameter):
            self._want(tensor, What.GRADIENT, layer)
        if is_deepspeeds:
            for tensor in deepspeed.gradients_of(parameter):
                self._want(tensor, What.GRADIENT, layer)
            self._flush()
            for buffer in deepspeed.gradient_buffers(parameter):
                for piece in device_pieces(buffer):
                    # Bytes that hold no gradient belong to no layer.
                    self.mark(Piece(piece.address, 0, 0), "gradient", OUTSIDE)

    # ---- optimizer state

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark an optimizer's gradients and state. Parameters that no module has (fp32 copies) count as state."""
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        known, tensors, wanted = _OwnedMemory(self._memory_of_parameters()), self._tensors, self._wanted
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owners = self.owners.of(parameters)
        for parameter in (p for p, layer in zip(parameters, owners, strict=True) if layer == KEEP_LAYER):
            self._state(parameter, known.parts(parameter))
            self._watch(parameter)
        if _are_bare(parameters):
            tensors += parameters
            wanted += [layer << WHAT_BITS | _ITS_GRADIENT for layer in owners]
        else:
            for parameter, layer in zip(parameters, owners, strict=True):
                for gradient in _gradients(parameter):
                    self._want(gradient, What.GRADIENT, layer)
        for (parameter, state), layer in zip(optimizer.state.items(), self.owners.of(optimizer.state), strict=True):
            parts = self._flattened(parameter) or (known.parts(parameter) if layer == KEEP_LAYER else [])
            if parts:
                for value in _tensors(state):
                    if value.shape == parameter.shape:
                        self._state(value, parts)
                    else:
                        self._want(value, What.STATE, parts[0].layer)
            else:
                before = len(tensors)
                _add_tensors(state, tensors)
                wanted += [layer << WHAT_BITS | _STATE] * (len(tensors) - before)
        for tensor, layer in self._kept_elsewhere(optimizer, known):
            self._want(tensor, What.STATE, layer)
        self._flush()

    def _flattened(self, parameter: object) -> list[OwnedPart]:
        """The parts of FSDP1's flat parameter, each of the layer whose own parameter it was; empty for any other."""
        infos = getattr(parameter, "_param_infos", ())
        return list(infos) and [
            OwnedPart(self._layers.layer(info.module), shard.offset_in_shard, shard.numel_in_shard)
            for info, shard in zip(infos, getattr(parameter, "_shard_param_infos", ()), strict=False)
            if shard.in_shard
        ]

    def _kept_elsewhere(
        self, optimizer: torch.optim.Optimizer, known: _OwnedMemory
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """An optimizer's tensors in attributes and groups of its own, outside ``state``, each with its layer.

        Tensors in the memory of parameters or gradients, such as flat buffers of both, are not among them.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kept = [(value, parameters) for name, value in vars(optimizer).items() if name not in ("param_groups", "state")]
        for group in optimizer.param_groups:
            kept += [(value, group["params"]) for name, value in group.items() if name != "params"]
        ids = cache(lambda: set(map(id, parameters)))  # most optimizers keep nothing elsewhere
        gradients: set[int] | None = None
        for value, its_parameters in kept:
            if not isinstance(value, (dict, list, tuple, torch.Tensor)):
                continue
            for tensor, parameter in _with_parameters(value, its_parameters):
                if id(tensor) in ids() or self.owners.owner(tensor) != KEEP_LAYER or not tensor.is_cuda:
                    continue
                if gradients is None:
                    own = (gradient for parameter in parameters for gradient in _gradients(parameter))
                    gradients = {piece.address for gradient in own for piece in device_pieces(gradient)}
                if not known.parts(tensor) and not any(piece.address in gradients for piece in device_pieces(tensor)):
                    yield tensor, self.owners.owner(parameter)

    def optimizers(self) -> None:
        """Mark the state of every optimizer that ever stepped, including one that ran out of memory in its step."""
        for reference in list(self._optimizers.values()):
            if (optimizer := reference()) is not None:
                self.optimizer(optimizer)

    def claimed(self) -> dict[tuple[int, int], int]:
        """Bytes of known parameters, gradients and optimizer tensors, by (address of the storage, start)."""
        tensors, wanted = self._claimed()
        gradients = [tensor.grad for tensor, kind in zip(tensors, wanted, strict=True) if kind == _BOTH]
        known = (piece for tensor in (*tensors, *gradients) for piece in device_pieces(tensor))
        return {(address, start): size for address, start, size in known}

    def claimed_bytes(self, others: Sequence[torch.Tensor]) -> int | None:
        """The sum of :meth:`claimed`, with other tensors, none twice. None if it is not known without locating all."""
        tensors, wanted = self._claimed()
        return self._marker.bytes_of([*tensors, *others], wanted + [What.PARAMETER] * len(others))

    def _claimed(self) -> tuple[list[torch.Tensor], list[int]]:
        """Known parameters and optimizer tensors, and which of them count with their gradients."""
        known = [parameter for parameter, _ in self.owners]
        others: list[object] = []
        wanted: list[int] = [_BOTH] * len(known)
        for index, parameter in enumerate(() if _are_bare(known) else known):
            if not _is_bare(parameter):
                wanted[index] = What.PARAMETER
                others += [*_gradients(parameter), getattr(parameter, megatron.MASTER, None)]
        tensors = [*known, *(other for other in others if isinstance(other, torch.Tensor))]
        for reference in self._optimizers.values():
            if (optimizer := reference()) is not None:
                for group in optimizer.param_groups:
                    owners = zip(group["params"], self.owners.of(group["params"]), strict=True)
                    tensors += [parameter for parameter, layer in owners if layer == KEEP_LAYER]
                for state in optimizer.state.values():
                    _add_tensors(state, tensors)
                own = self._kept_elsewhere(optimizer, _OwnedMemory(self._memory_of_parameters()))
                tensors += [tensor for tensor, _ in own]
        return tensors, wanted + [What.PARAMETER] * (len(tensors) - len(known))

    def _memory_of_parameters(self) -> Iterator[tuple[int, int, int]]:
        """(first byte, byte after the last, layer) of every parameter and of its copies for the optimizer."""
        for parameter, layer in self.owners:
            for tensor in (parameter, getattr(parameter, megatron.MASTER, None), deepspeed.master_of(parameter)):
                for address, start, size in device_pieces(tensor):
                    yield address + start, address + start + size, layer

    def _state(self, tensor: torch.Tensor, parts: Sequence[OwnedPart]) -> None:
        """Mark a tensor of an optimizer: each part for its layer or, without parts, all of it for no layer."""
        for whole in device_pieces(tensor):
            for owner, piece in _shared(whole, tensor.element_size(), parts) if parts else ((KEEP_LAYER, whole),):
                self._marker.mark_state(tensor, piece, owner)

    def close(self) -> None:
        """Remove the hooks from the parameters, and mark nothing more."""
        self._is_on = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _gradients(parameter: torch.Tensor) -> Sequence[object]:
    return [getattr(parameter, name, None) for name in _GRADIENTS]


def _shared(whole: Piece, width: int, parts: Iterable[OwnedPart]) -> list[tuple[int, Piece]]:
    address, start, _ = whole
    return [(layer, Piece(address, start + first * width, number * width)) for layer, first, number in parts]


class _OwnedMemory:
    """Ranges of device memory that belong to layers: (first byte, byte after the last, layer), read when needed."""

    def __init__(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        self._unsorted = ranges

    @cached_property
    def _ranges(self) -> list[tuple[int, int, int]]:
        return sorted(self._unsorted)

    @cached_property
    def _starts(self) -> list[int]:
        return [first for first, _, _ in self._ranges]

    def parts(self, tensor: object) -> list[OwnedPart]:
        """The elements of a tensor in each layer's memory. Empty if it is not one piece on a device."""
        pieces = list(device_pieces(tensor))
        if not isinstance(tensor, torch.Tensor) or len(pieces) != 1:
            return []
        width, start = tensor.element_size(), pieces[0].address + pieces[0].start
        end = start + pieces[0].size
        parts = []
        for first, last, layer in self._ranges[max(0, bisect_right(self._starts, start) - 1) :]:
            if first >= end:
                break
            if last > start:
                begin = max(first, start)
                parts.append(OwnedPart(layer, (begin - start) // width, (min(last, end) - begin) // width))
        return parts


def _with_parameters(
    value: object, parameters: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """The tensors in an attribute of an optimizer, each with its parameter: a dictionary's key, or by its position.

    Positions count only in a list of as many tensors as parameters, of the same shapes.
    """
    if isinstance(value, dict) and any(isinstance(key, torch.Tensor) for key in value):
        for key, state in value.items():
            yield from ((tensor, key if isinstance(key, torch.Tensor) else None) for tensor in _tensors(state))
        return
    tensors = _tensors(value)
    if not tensors:  # most attributes: the shapes of all parameters take longer than everything else here
        return
    aligned = [tensor.shape for tensor in tensors] == [parameter.shape for parameter in parameters]
    yield from zip(tensors, parameters if aligned else [None] * len(tensors), strict=True)


def _tensors(state: object) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    _add_tensors(state, tensors)
    return tensors


def _add_tensors(state: object, tensors: list[torch.Tensor]) -> None:
    if isinstance(state, dict):
        state = state.values()
    elif isinstance(state, torch.Tensor):
        tensors.append(state)
        return
    elif not isinstance(state, (list, tuple)):
        return
    for value in state:
        if type(value) is torch.Tensor:
            tensors.append(value)
        else:
            _add_tensors(value, tensors)
