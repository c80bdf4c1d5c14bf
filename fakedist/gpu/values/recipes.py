"""Values of tensors too large to hold them: the operations and the small tensors that they follow from.

A mask of 65,536 by 65,536 tokens has four billion elements, but follows from a few small tensors, which a recipe keeps.
Something small, such as the true elements of each block, is computed in pieces that do not outlive their use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import empty, full, stack, zeros

from fakedist.gpu.values.contents import Taint
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.tensors import Arguments, Keywords, flat

#: Elements that are computed at once.
PIECE = 1 << 21
#: The most elements of a tensor that is computed whole, by an operation that cannot be divided.
WHOLE = 1 << 22
#: The most elements that are computed for one result: a mask of 131,072 by 65,536 tokens, twenty seconds on two cores.
MOST = 1 << 33
#: Operations that follow each other. A tensor that each step changes would keep ever more of them.
_DEPTH = 64

#: For each dimension, its first element and the one after its last.
Box = tuple[tuple[int, int], ...]

_POINTWISE = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not"}
_POINTWISE |= {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift"}
_POINTWISE |= {"__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "__rsub__", "rsub", "neg", "abs", "sign"}
_POINTWISE |= {"add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "floor", "ceil", "round"}
_POINTWISE |= {"trunc", "sqrt", "rsqrt", "square", "exp", "log", "log2", "pow", "sigmoid", "tanh", "isneginf", "isinf"}
_POINTWISE |= {"minimum", "maximum", "clamp", "clamp_min", "clamp_max", "where", "masked_fill", "_to_copy", "clone"}
_POINTWISE |= {"convert_element_type", "contiguous", "to", "isnan", "isfinite"}
_FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FILLING = {"full", "full_like", "new_full", "fill"}
_REDUCE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "any": torch.any,
    "all": torch.all,
    "amax": torch.amax,
    "amin": torch.amin,
}
_LIKE = {"max": "amax", "min": "amin", "count_nonzero": "sum"}
_INDEX = {"index", "_unsafe_index"}
#: Keywords that say where a result lies.
_MEMORY_KEYWORDS = ("device", "pin_memory", "layout", "memory_format", "non_blocking")


class UnknownValueError(Exception):
    """A value is not known, or computing it would take too long."""


class Geometry(NamedTuple):
    """The layout of a tensor in its storage: elements along each dimension, the distance between them, the first."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Layout of a tensor."""
        return cls(tuple(map(int, tensor.size())), tuple(map(int, tensor.stride())), int(tensor.storage_offset()))

    @classmethod
    def contiguous(cls, tensor: torch.Tensor) -> Geometry:
        """Layout of a contiguous copy of a tensor."""
        size = tuple(map(int, tensor.size()))
        return cls(size, _steps(size), 0)

    def span(self, box: Box) -> tuple[int, int]:
        """The first element of the storage in a box, and the one after the last."""
        pairs = list(zip(box, self.stride, strict=True))
        first = self.offset + sum(start * stride for (start, _), stride in pairs)
        return first, first + sum((stop - 1 - start) * stride for (start, stop), stride in pairs) + 1


@dataclass(frozen=True)
class RecipeView:
    """A tensor over the memory of one that has a recipe."""

    recipe: Recipe
    geometry: Geometry


#: A tensor that an operation reads: its values, or the recipe of them.
Operand = torch.Tensor | RecipeView
#: Pieces computed for one result, by recipe and range.
_Pieces = dict[tuple[int, int, int], torch.Tensor]


class Recipe:
    """One operation, with operands instead of tensors in its arguments. UnknownValueError if it cannot be computed.

    ``result`` is the geometry of its result, which must fill its storage; ``item`` its index among several, or -1.
    """

    def __init__(
        self,
        operator: Operator,
        args: Arguments,
        kwargs: Keywords,
        *,
        result: Geometry,
        dtype: torch.dtype,
        item: int = -1,
        taint: Taint | None = None,
    ) -> None:
        self.operator, self.args = operator, args
        self.kwargs = {name: value for name, value in kwargs.items() if name not in _MEMORY_KEYWORDS}
        self.size, self.dtype, self.item, self.taint = result.size, dtype, item, taint
        self.order = _memory_order(result)
        depths = (value.recipe.depth for value in _operands(self) if isinstance(value, RecipeView))
        self.depth: int = 1 + max(depths, default=0)
        if self.depth > _DEPTH:
            raise UnknownValueError
        self._rule = _rule(self)
        self._computed: torch.Tensor | None = None

    @property
    def own_bytes(self) -> int:
        """Host memory of the small tensors that it keeps."""
        return sum(value.untyped_storage().nbytes() for value in _operands(self) if isinstance(value, torch.Tensor))

    def forget(self) -> None:
        """Drop everything. The values are not known any more."""
        self._rule, self.args, self.kwargs, self._computed = _forgotten, (), {}, None

    def value(self, geometry: Geometry | None = None) -> torch.Tensor:
        """The values, or those of a tensor over the same memory. UnknownValueError if not known, or too many."""
        if geometry is None:
            geometry = Geometry(self.size, _strides(self.size, self.order), 0)
        return _whole(RecipeView(self, geometry), WHOLE)

    def whole(self) -> torch.Tensor:
        """The result of an operation that cannot be divided. It is computed once."""
        if self._computed is None:
            self._computed = self._call(lambda operand: _whole(operand, WHOLE)).expand(self.size)
        return self._computed

    def call(self, pieces: Callable[[Operand], torch.Tensor]) -> torch.Tensor:
        """Run the operation with operands that ``pieces`` returns."""
        return self._call(pieces)

    def _call(self, pieces: Callable[[Operand], torch.Tensor]) -> torch.Tensor:
        def given(value: object, *, is_written: bool = False) -> object:
            if isinstance(value, (torch.Tensor, RecipeView)):
                operand = pieces(value)
                return operand.clone() if is_written else operand
            return [given(item) for item in value] if isinstance(value, (list, tuple)) else value

        written = self.operator.written
        args = [given(value, is_written=index in written) for index, value in enumerate(self.args)]
        kwargs = {name: given(value) for name, value in self.kwargs.items()}
        try:
            result = self.operator.func(*args, **kwargs)
        except Exception as error:  # no CPU kernel, or none for these types
            raise UnknownValueError from error
        result = result if self.item < 0 else result[self.item]
        if not isinstance(result, torch.Tensor):
            raise UnknownValueError
        return result

    def elements(self, first: int, end: int, pieces: _Pieces) -> torch.Tensor:
        """A range of elements, in the order of memory."""
        key = (id(self), first, end)
        if key in pieces:
            return pieces[key]
        size = [self.size[dim] for dim in self.order]
        box, start = _box_of(size, first, end)
        if math.prod(stop - begin for begin, stop in box) > 2 * max(PIECE, end - first):
            raise UnknownValueError
        logical: list[tuple[int, int]] = [(0, 0)] * len(size)
        for index, dim in enumerate(self.order):
            logical[dim] = box[index]
        values = self._rule(self, tuple(logical), pieces)
        flat = values.permute(self.order).reshape(-1)[first - start : end - start].contiguous()
        pieces[key] = flat
        return flat


# ---- reading operands


def _read(operand: Operand, box: Box, pieces: _Pieces) -> torch.Tensor:
    if isinstance(operand, torch.Tensor):
        return operand[tuple(slice(start, stop) for start, stop in box)]
    size = [stop - start for start, stop in box]
    if 0 in size:
        return empty(size, dtype=operand.recipe.dtype)
    first, end = operand.geometry.span(box)
    if end - first > 4 * PIECE:
        raise UnknownValueError
    flat = operand.recipe.elements(first, end, pieces)
    return flat.as_strided(size, operand.geometry.stride, flat.storage_offset())


def _size(operand: Operand) -> tuple[int, ...]:
    return tuple(operand.size()) if isinstance(operand, torch.Tensor) else operand.geometry.size


def _whole(operand: Operand, most: int) -> torch.Tensor:
    if isinstance(operand, torch.Tensor):
        return operand
    size = _size(operand)
    if math.prod(size) > most:
        raise UnknownValueError
    if 0 in size:
        return empty(size, dtype=operand.recipe.dtype)
    whole = empty(size, dtype=operand.recipe.dtype)
    for box in _divided(operand, tuple((0, n) for n in size)):
        whole[tuple(slice(start, stop) for start, stop in box)] = _read(operand, box, {})
    return whole


def _divided(operand: Operand, box: Box) -> Iterator[Box]:
    """A box in parts that are small in memory, cut along the dimension whose elements are farthest apart."""
    if isinstance(operand, torch.Tensor):
        stride, num_elements = tuple(operand.stride()), math.prod(stop - start for start, stop in box)
    else:
        stride = operand.geometry.stride
        first, end = operand.geometry.span(box)
        num_elements = max(end - first, math.prod(stop - start for start, stop in box))
    longer = [dim for dim, (start, stop) in enumerate(box) if stop - start > 1]
    if num_elements <= PIECE or not longer:
        yield box
        return
    dim = max(longer, key=lambda axis: stride[axis])
    start, stop = box[dim]
    step = max((stop - start) * PIECE // num_elements, 1)
    for begin in range(start, stop, step):
        part = (*box[:dim], (begin, min(begin + step, stop)), *box[dim + 1 :])
        if step > 1 or stop - start == 1:
            yield part
        else:
            yield from _divided(operand, part)


def _operands(recipe: Recipe) -> list[Operand]:
    values = flat((recipe.args, recipe.kwargs.values()))
    return [value for value in values if isinstance(value, (torch.Tensor, RecipeView))]


# ---- how each kind of operation computes a box of its result

_Rule = Callable[[Recipe, Box, _Pieces], torch.Tensor]


def _rule(recipe: Recipe) -> _Rule:
    name = recipe.operator.name
    name = name if name in _POINTWISE else name.removesuffix("_")
    operands = _operands(recipe)
    if recipe.item < 0:
        if name in _FILLED or (name in _FILLING and not operands[int(bool(recipe.operator.written)) :]):
            return _filled
        if name in _POINTWISE and not any(isinstance(value, (list, tuple)) for value in recipe.args if value != []):
            return _pointwise
        if name == "copy":
            return _copied
        if _is_reduction(recipe, name) and operands:
            return _reduced
        if name in _INDEX and _picks_elements(recipe):
            return _picked
        if name == "constant_pad_nd":
            return _padded
    if math.prod(recipe.size) > WHOLE or any(math.prod(_size(operand)) > WHOLE for operand in operands):
        raise UnknownValueError
    return _from_whole


def _forgotten(recipe: Recipe, box: Box, pieces: _Pieces) -> torch.Tensor:
    raise UnknownValueError


def _from_whole(recipe: Recipe, box: Box, pieces: _Pieces) -> torch.Tensor:
    return recipe.whole()[tuple(slice(start, stop) for start, stop in box)]


def _filled(recipe: Recipe, box: Box, pieces: _Pieces) -> torch.Tensor:
    value = _FILLED.get(recipe.operator.name.removesuffix("_"))
    if value is None:
        fill = recipe.operator.argument("fill_value", recipe.args, recipe.kwargs)
        fill = recipe.operator.argument("value", recipe.args, recipe.kwargs) if fill is None else fill
        if not isinstance(fill, (bool, int, float)):
            raise UnknownValueError
        return full((), fill).to(recipe.dtype).expand([stop - start for start, stop in box])
    return full((), value, dtype=recipe.dtype).expand([stop - start for start, stop in box])


def _broadcast(size: tuple[int, ...], box: Box) -> Box:
    return tuple((0, 1) if n == 1 else part for n, part in zip(size, box[len(box) - len(size) :], strict=True))


def _pointwise(recipe: Recipe, box: Box, pieces: _Pieces) -> torch.Tensor:
    values = recipe.call(lambda operand: _read(operand, _broadcast(_size(operand), box), pieces))
    return values.to(recipe.dtype).expand([stop - start for start, stop in box])


def _copied(recipe: Recipe, box: Box, pieces: _Pieces) -> torch.Tensor:
    source = recipe.args[1]
    assert isinstance(source, (torch.Tensor, RecipeView))
    values = _read(source, _broadcast(_size(source), box), pieces).to(recipe.dtype)
    return values.expand([stop - start for start, stop in box])


def _padded(recipe: Recipe, box: Box, pieces: _Pieces) -> torch.Tensor:
    source, pads = recipe.args[:2]
    assert isinstance(source, (torch.Tensor, RecipeView))
    assert isinstance(pads, (list, tuple))
    value = recipe.operator.argument("value", recipe.args, recipe.kwargs)
    assert isinstance(value, (bool, int, float))
    size = _size(source)
    if not any(pads):
        return _read(source, box, pieces).to(recipe.dtype)
    before = [0] * (len(size) - len(pads) // 2) + [int(pads[index]) for index in range(len(pads) - 2, -1, -2)]
    padded = full([stop - start for start, stop in box], value, dtype=recipe.dtype)
    inner = [
        (min(max(start - pad, 0), n), min(max(stop - pad, 0), n))
        for (start, stop), pad, n in zip(box, before, size, strict=True)
    ]
    if all(stop > start for start, stop in inner):
        target = [
            slice(start + pad - begin, stop + pad - begin)
            for (start, stop), pad, (begin, _) in zip(inner, before, box, strict=True)
        ]
        padded[tuple(target)] = _read(source, tuple(inner), pieces)
    return padded


def _picks_elements(recipe: Recipe) -> bool:
    source, indices = recipe.args[:2]
    if not isinstance(source, (torch.Tensor, RecipeView)) or not isinstance(indices, (list, tuple)):
        return False
    if len(indices) != len(_size(source)) or math.prod(_size(source)) > WHOLE:
        return False
    are_operands = all(isinstance(index, (torch.Tensor, RecipeView)) for index in indices)
    return are_operands and not any(_dtype(index) in (torch.bool, torch.uint8) for index in indices)


def _dtype(operand: Operand) -> torch.dtype:
    return operand.dtype if isinstance(operand, torch.Tensor) else operand.recipe.dtype


def _picked(recipe: Recipe, box: Box, pieces: _Pieces) -> torch.Tensor:
    source, indices = recipe.args[:2]
    assert isinstance(source, (torch.Tensor, RecipeView))
    assert isinstance(indices, (list, tuple))
    read = [_read(index, _broadcast(_size(index), box), pieces) for index in indices]
    return _whole(source, WHOLE)[tuple(index.long() for index in read)].expand([stop - start for start, stop in box])


# ---- reductions


def _is_reduction(recipe: Recipe, name: str) -> bool:
    if name not in _REDUCE and name not in _LIKE:
        return False
    return recipe.operator.written == () and len(_operands(recipe)) == 1


def _reduced(recipe: Recipe, box: Box, pieces: _Pieces) -> torch.Tensor:
    source = recipe.args[0]
    assert isinstance(source, (torch.Tensor, RecipeView))
    size = _size(source)
    axes = recipe.operator.argument("dim", recipe.args, recipe.kwargs)
    dims = {axes} if isinstance(axes, int) else set(axes) if isinstance(axes, (list, tuple)) else set()
    dims = {dim % max(len(size), 1) for dim in dims} or set(range(len(size)))
    keeps = bool(recipe.operator.argument("keepdim", recipe.args, recipe.kwargs))
    kept = iter(part for index, part in enumerate(box) if not (keeps and index in dims))
    inner = tuple((0, n) if dim in dims else next(kept) for dim, n in enumerate(size))
    if math.prod(stop - start for start, stop in inner) > MOST:
        raise UnknownValueError
    return _reduce(recipe, source, inner, sorted(dims)).reshape([stop - start for start, stop in box])


def _reduce(recipe: Recipe, source: Operand, box: Box, dims: list[int]) -> torch.Tensor:
    name = recipe.operator.name
    reduce, is_count = _REDUCE[_LIKE.get(name, name)], name == "count_nonzero"
    named = {"dtype": recipe.dtype} if reduce is torch.sum else {}
    size = [1 if dim in dims else stop - start for dim, (start, stop) in enumerate(box)]
    reduced: torch.Tensor | None = None
    filled = zeros(size, dtype=torch.bool)
    for part in _divided(source, box):
        values = _read(source, part, {})
        if is_count:
            values = values != 0
        if not dims:
            some = values.to(recipe.dtype)
        elif reduce is torch.sum and values.dtype == torch.bool:
            some = _count(values, dims).to(recipe.dtype)
        else:
            some = reduce(values, dim=dims, keepdim=True, **named)
        if reduced is None:
            reduced = empty(size, dtype=some.dtype)
        target = tuple(
            slice(0, 1) if dim in dims else slice(part[dim][0] - box[dim][0], part[dim][1] - box[dim][0])
            for dim in range(len(box))
        )
        if filled[target].any():
            some = reduce(stack((reduced[target], some)), dim=0, **named)
        reduced[target] = some
        filled[target] = True
    assert reduced is not None
    return reduced.to(recipe.dtype)


def _count(mask: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Count true elements eight bytes at once: a hundredth of a plain sum's time. Up to 255, no byte overflows."""
    last, others = mask.dim() - 1, [dim for dim in dims if dim != mask.dim() - 1]
    numbers = mask.view(torch.uint8)
    whole = mask.stride(last) == 1 and all(n % 8 == 0 for n in (mask.shape[last], *mask.stride()[:-1]))
    if last in dims and others and whole and math.prod(mask.shape[dim] for dim in others) <= 255:
        words = numbers if mask.storage_offset() % 8 == 0 else numbers.clone()
        numbers = words.view(torch.int64).sum(others, keepdim=True).view(torch.uint8)
        return numbers.sum(last, keepdim=True, dtype=torch.int64)
    return numbers.sum(dims, keepdim=True, dtype=torch.int64)


# ---- layouts in memory


def _memory_order(geometry: Geometry) -> tuple[int, ...]:
    """The dimensions of a tensor that fills its storage, those farthest apart first. UnknownValueError otherwise."""
    size, stride = geometry.size, geometry.stride
    order = tuple(sorted(range(len(size)), key=lambda dim: (-stride[dim], size[dim] == 1, dim)))
    if geometry.offset or any(n > 1 and s != e for n, s, e in zip(size, stride, _strides(size, order), strict=True)):
        raise UnknownValueError
    return order


def _strides(size: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides, step = [0] * len(size), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(size[dim], 1)
    return tuple(strides)


@functools.lru_cache(4096)
def _steps(size: tuple[int, ...]) -> tuple[int, ...]:
    return _strides(size, range(len(size)))


def _box_of(size: Sequence[int], first: int, end: int) -> tuple[Box, int]:
    """The smallest box of a contiguous tensor that holds elements ``first`` to ``end``, and its beginning."""
    steps = _steps(tuple(size))
    box: list[tuple[int, int]] = []
    begin, low, high = 0, first, end - 1
    for dim, step in enumerate(steps):
        one, other = low // step, high // step
        box.append((one, other + 1))
        begin += one * step
        if one != other:
            box += [(0, n) for n in size[dim + 1 :]]
            break
        low, high = low - one * step, high - one * step
    return tuple(box), begin
