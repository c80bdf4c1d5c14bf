"""Runs the integer part of a compiled graph on the host, and gives the graph's buffers and results its values.

The part is :class:`fakedist.record.compiled_graphs.IntegerPart`. Large masks get recipes, as elsewhere
(:mod:`fakedist.gpu.values.recipes`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import empty, empty_strided, tensor
from torch._ops import OpOverload

from fakedist.gpu.values.contents import Taint, host_view, is_small
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.recipes import PIECE, Geometry, Recipe, RecipeView, UnknownValueError
from fakedist.gpu.values.tensors import distinct, flat, storage_of

#: As ``record.compiled_graphs.CONSTANT``.
CONSTANT = "constant"
_META = torch.device("meta")


class Integers(Protocol):
    """See :class:`fakedist.record.compiled_graphs.IntegerPart`."""

    nodes: list[tuple[str, str, list[object], dict[str, object]]]
    inputs: dict[str, int]
    outputs: dict[int, str]
    buffers: dict[str, str]
    results: dict[str, str]


@dataclass(frozen=True)
class _Lazy:
    """A tensor that has a recipe, or of which only the mean is known.

    ``shape`` is a tensor without memory, whose views have the same geometry.
    """

    recipe: Recipe | None
    shape: torch.Tensor
    mean: float | None = None


@dataclass(frozen=True)
class _Input:
    value: object
    taint: Taint | None


class GraphValues:
    """Gives compiled graphs their integers."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._last: dict[int, tuple[Integers, GraphRun]] = {}

    def begin(self, part: Integers, inputs: Sequence[object]) -> GraphRun:
        """A graph with this part begins with these inputs."""
        known = {
            name: self._input(inputs[index]) if index < len(inputs) else _Input(None, None)
            for name, index in part.inputs.items()
        }
        if part.results:
            return GraphRun(part, known, self.give, self._input)
        last = self._last.get(id(part))
        if last is not None and last[0] is part and last[1].is_of(known):
            return last[1]
        run = GraphRun(part, known, self.give)
        self._last[id(part)] = (part, run)
        return run

    def give(self, result: torch.Tensor, value: object, taint: Taint | None) -> None:
        """Give a tensor the value of a node. If that is not known, a kernel wrote it that was not computed."""
        if value is None:
            self._host.spoil(result)
        if isinstance(value, _Lazy):
            if value.recipe is None:
                self._host.spoil(result)
                if value.mean is not None and value.shape.numel() == result.numel():
                    self._host.means.know(result, value.mean)
            elif not is_small(result) and value.shape.is_contiguous() and result.is_contiguous():
                part = Geometry.of(value.shape)
                if not part.offset and math.prod(part.size) == math.prod(value.recipe.size):
                    self._host.know_recipe(result, value.recipe)
            return
        if not isinstance(value, torch.Tensor) or value.dtype != result.dtype or value.numel() != result.numel():
            return
        if not is_small(result):
            return
        if value.shape != result.shape:
            if not result.is_contiguous():
                return
            value = value.reshape(result.shape)
        self._host.write(result, value)
        self._host.means.forget(result)
        if taint is not None:
            self._host.taints.mark(result, taint)

    def _input(self, value: object) -> _Input:
        if not isinstance(value, torch.Tensor):
            return _Input(value if isinstance(value, (int, float)) else None, None)
        if value.is_cuda and not self._host.holds(value):
            recipe, means = self._host.recipe(value), self._host.means
            mean = None if means.is_assumed(value) else means.of(value)
            if recipe is None and mean is None:
                return _Input(None, None)
            shape = empty(0, dtype=value.dtype, device=_META).set_(*_lies(value))
            return _Input(_Lazy(recipe, shape, mean), None if recipe is None else recipe.taint)
        if self._host.has_no_data(value) or type(value) not in (torch.Tensor, torch.nn.Parameter):
            return _Input(None, None)
        once = distinct(value.detach())
        copy = (host_view(once) if once.is_cuda else once).clone().expand(value.shape)
        return _Input(copy, self._host.taint((value,)) if value.is_cuda else None)


def _lies(value: torch.Tensor) -> tuple[torch.UntypedStorage, int, torch.Size, tuple[int, ...]]:
    storage = empty(storage_of(value)[1], dtype=torch.uint8, device=_META).untyped_storage()
    return storage, int(value.storage_offset()), value.size(), value.stride()


class GraphRun:
    """One run of a graph. Its operations run when the first value is asked for; ``inputs`` has known values by name.

    They run again once more results are known that ``read`` has the values of.
    """

    def __init__(
        self,
        part: Integers,
        inputs: Mapping[str, _Input],
        give: Callable[[torch.Tensor, object, Taint | None], None],
        read: Callable[[torch.Tensor], _Input] | None = None,
    ) -> None:
        self._part, self._inputs, self._give, self._read = part, dict(inputs), give, read
        self._values: dict[str, object] | None = None
        self._taints: dict[str, Taint] = {}

    def is_of(self, inputs: Mapping[str, _Input]) -> bool:
        """Return whether these inputs have the same values."""
        for name, other in inputs.items():
            own = self._inputs[name]
            if own.taint is not None or other.taint is not None or type(own.value) is not type(other.value):
                return False
            if isinstance(own.value, _Lazy):
                return False
            if isinstance(own.value, torch.Tensor):
                assert isinstance(other.value, torch.Tensor)
                if own.value.shape != other.value.shape or not torch.equal(own.value, other.value):
                    return False
            elif own.value != other.value:
                return False
        return True

    def computed(self, results: Mapping[str, torch.Tensor]) -> None:
        """Operations that the graph called have these results, by the names of their nodes."""
        for name, result in results.items():
            if name not in self._inputs and self._read is not None:
                self._inputs[name] = self._read(result)
                self._values = None

    def settle(self, named: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Give buffers their values, by the names of their nodes."""
        for buffer, name in named:
            self._give(buffer, *self.of(name))

    def returned(self, results: object) -> None:
        """The graph returned its results. Give them their values."""
        if not isinstance(results, (list, tuple)):
            return
        for index, name in self._part.outputs.items():
            result = results[index] if index < len(results) else None
            if isinstance(result, torch.Tensor) and result.is_cuda:
                self._give(result, *self.of(name))

    def of(self, name: str) -> tuple[object, Taint | None]:
        """The value of a node, None if it is not known, and its taint."""
        if self._values is None:
            self._run()
        assert self._values is not None
        return self._values.get(name), self._taints.get(name)

    def known(self, name: str) -> torch.Tensor | None:
        """The values of a node; None if they are made up or not known."""
        value, taint = self.of(name)
        return value if isinstance(value, torch.Tensor) and taint is None else None

    def _run(self) -> None:
        values = self._values = {
            # The operations may write to them, and the inputs are compared with those of the next run.
            name: known.value.clone() if isinstance(known.value, torch.Tensor) else known.value
            for name, known in self._inputs.items()
        }
        self._taints = {name: known.taint for name, known in self._inputs.items() if known.taint is not None}
        for name, target, args, kwargs in self._part.nodes:
            taints = {self._taints[node] for node in _names((args, kwargs)) if node in self._taints}
            if taints:
                self._taints[name] = taints.pop() if len(taints) == 1 else Taint(tuple(taints))
            function = _function(target)
            try:
                operands = [_decoded(value, values) for value in args]
                named = {key: _decoded(value, values) for key, value in kwargs.items()}
                values[name] = _computed(function, operands, named)
            except Exception:  # not known, or no kernel of the host's can compute it
                values[name] = None
            if isinstance(function, OpOverload) and function._schema.is_mutable:
                self._wrote(next(iter(_names(args)), name), name)

    def _wrote(self, target: str, name: str) -> None:
        assert self._values is not None
        written = self._values.get(target)
        for other, value in self._values.items():
            if other == name or not _overlap(value, written):
                continue
            if self._values[name] is None:
                self._values[other] = None
            elif name in self._taints:
                self._taints[other] = self._taints[name]


def _overlap(value: object, other: object) -> bool:
    if isinstance(value, _Lazy) or isinstance(other, _Lazy):
        return value is other
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return value.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _names(value: object) -> list[str]:
    if isinstance(value, dict):
        if isinstance(name := value.get("n"), str):
            return [name]
        return [name for item in value.values() for name in _names(item)]
    return [name for item in value for name in _names(item)] if isinstance(value, (list, tuple)) else []


def _decoded(value: object, values: Mapping[str, object]) -> object:
    if isinstance(value, list):
        return [_decoded(item, values) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    if kind == "n":
        operand = values.get(text)
        if operand is None:
            raise UnknownValueError
        return operand
    return torch.device("cpu") if kind == "c" else getattr(torch, text)


def _constant(values: list[float], dtype: torch.dtype, size: list[int]) -> torch.Tensor:
    return tensor(values, dtype=dtype).reshape(size)


_functions: dict[str, Callable[..., object]] = {}


def _function(target: str) -> Callable[..., object]:
    function = _functions.get(target)
    if function is None:
        module, _, name = target.partition(":")
        if target == CONSTANT:
            function = _constant
        elif name:
            function = getattr(importlib.import_module(module), name)
        else:
            namespace, packet, overload = target.split(".")
            function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        _functions[target] = function
    return function


def _computed(function: Callable[..., object], args: list[object], kwargs: dict[str, object]) -> object:
    lazy = [value for value in flat((args, kwargs.values())) if isinstance(value, _Lazy)]
    if not isinstance(function, OpOverload):
        if lazy:
            raise UnknownValueError
        return function(*args, **kwargs)
    tensors = [value for value in flat((args, kwargs.values())) if isinstance(value, torch.Tensor)]
    if not lazy and (function._schema.is_mutable or (tensors and _most_elements(tensors) <= PIECE)):
        return function(*args, **kwargs)
    if lazy and function._schema.is_mutable:
        raise UnknownValueError
    shape = function(*map(_on_meta, args), **{name: _on_meta(value) for name, value in kwargs.items()})
    if not isinstance(shape, torch.Tensor):
        raise UnknownValueError
    if not lazy and shape.numel() <= PIECE:
        return function(*args, **kwargs)
    for operand in lazy:
        if shape.untyped_storage()._cdata == operand.shape.untyped_storage()._cdata:  # a view
            return _Lazy(operand.recipe, shape, operand.mean)
    whole = shape.numel() <= PIECE
    result = Geometry.contiguous(shape) if whole else Geometry.of(shape)
    named = {name: _operand(value) for name, value in kwargs.items()}
    recipe = Recipe(Operator(function), tuple(map(_operand, args)), named, result=result, dtype=shape.dtype)
    return recipe.value() if whole else _Lazy(recipe, shape)


def _most_elements(tensors: Sequence[torch.Tensor]) -> int:
    sizes: list[int] = []
    for operand in tensors:
        size = list(operand.shape)
        sizes = [1] * (len(size) - len(sizes)) + sizes
        for axis in range(1, len(size) + 1):
            sizes[-axis] = max(sizes[-axis], size[-axis])
    return math.prod(sizes)


def _on_meta(value: object) -> object:
    if isinstance(value, _Lazy):
        return value.shape
    if isinstance(value, torch.Tensor):
        return empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    if isinstance(value, list):
        return [_on_meta(item) for item in value]
    return _META if isinstance(value, torch.device) else value


def _operand(value: object) -> object:
    if isinstance(value, _Lazy):
        if value.recipe is None:
            raise UnknownValueError
        return RecipeView(value.recipe, Geometry.of(value.shape))
    return [_operand(item) for item in value] if isinstance(value, list) else value
