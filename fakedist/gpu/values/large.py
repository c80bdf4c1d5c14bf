"""Large integers and masks that follow from small tensors: what is computed from them is computed too.

The device holds no values of them (:mod:`fakedist.gpu.values.contents`). Their recipes are kept instead
(:mod:`fakedist.gpu.values.recipes`): a block mask of ``flex_attention`` is counted block by block from a mask of all
queries and keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from weakref import ref

import torch

from fakedist.gpu.values.arguments import Arguments, Keywords, plain_tensors
from fakedist.gpu.values.contents import covers, host_view, is_small
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.known import Taint
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.recipes import Geometry, Part, Recipe, UnknownValueError
from fakedist.gpu.values.scans import distinct
from fakedist.gpu.values.storage import storage_of

#: The most host memory that recipes keep. The oldest ones are forgotten first.
_MOST_BYTES = 256 << 20
_WHOLE_TYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Large:
    """Keeps the recipes of large tensors, and computes what is small.

    Args:
        host: The device memory's values.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._kept: deque[tuple[ref[Recipe], int]] = deque()
        self._bytes = 0

    def reads(self, operator: Operator, args: Arguments, kwargs: Keywords) -> Reading | None:
        """What an operation reads, before it runs; None if not all of it is known, or the result cannot be."""
        if operator.random or operator.dynamic or not operator.is_kernel:
            return None
        first = 1 if operator.like else 0
        values = (*args[first:], *kwargs.values())
        tensors = plain_tensors(values)
        ignored = plain_tensors([args[i] for i in operator.written if i < len(args)]) if operator.overwrites else []
        needed = [tensor for tensor in tensors if not any(tensor is other for other in ignored)]
        if not all(map(self._is_known, needed)):
            return None
        parts = [part for tensor in needed if (part := self.part(tensor)) is not None]
        if not tensors and not operator.like and not self._is_made(args, kwargs):
            return None
        taints = [part.recipe.taint for part in parts if part.recipe.taint is not None]
        own = self._host.taint(tensor for tensor in needed if tensor.is_cuda)
        taints += [own] if own is not None else []
        taint = taints[0] if len(set(taints)) == 1 else Taint(tuple(set(taints))) if taints else None
        return Reading({id(tensor) for tensor in ignored}, taint)

    def follow(
        self, operator: Operator, args: Arguments, kwargs: Keywords, outputs: list[torch.Tensor], reading: Reading
    ) -> bool:
        """Keep the recipes of an operation's results, and compute those that are small. Return whether they are known.

        Args:
            operator: The operation.
            args: Its arguments.
            kwargs: Its keyword arguments.
            outputs: What it returned or wrote.
            reading: What it reads.
        """
        if not any(output.dtype in _WHOLE_TYPES or is_small(output) for output in outputs):
            return False
        if not all(is_small(output) or covers(output, storage_of(output)[1]) for output in outputs):
            return False  # part of a tensor was written
        try:
            operands = self._operands(operator, args, reading)
            named = {name: self._operand(value, reading) for name, value in kwargs.items()}
            recipes = [
                Recipe(
                    operator,
                    operands,
                    named,
                    result=Geometry.contiguous(output) if is_small(output) else Geometry.of(output),
                    dtype=output.dtype,
                    item=place if len(outputs) > 1 else -1,
                    taint=reading.taint,
                )
                for place, output in enumerate(outputs)
            ]
            values = [
                recipe.value() if is_small(output) else None for recipe, output in zip(recipes, outputs, strict=True)
            ]
        except UnknownValueError:
            return False
        for output, recipe, value in zip(outputs, recipes, values, strict=True):
            if value is None:
                self._keep(output, recipe)
                continue
            self._host.write(output, value)
            self._host.shares.forget(output)
            if reading.taint is not None:
                self._host.taints.mark(output, reading.taint)
        return True

    def part(self, tensor: torch.Tensor) -> Part | None:
        """The recipe of a large tensor's values; None if it has none."""
        recipe = self._host.recipe(tensor)
        return None if recipe is None else Part(recipe, Geometry.of(tensor))

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A large tensor's values, if they are known and not too many."""
        part = self.part(tensor)
        if part is None:
            return None
        try:
            return part.recipe.value(part.geometry)
        except UnknownValueError:
            return None

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if not tensor.is_cuda:
            return not self._host.is_hollow(tensor)
        return self._host.holds(tensor) or self._host.recipe(tensor) is not None

    @staticmethod
    def _is_made(args: Arguments, kwargs: Keywords) -> bool:
        """Whether an operation makes integers or a mask of nothing: ``arange``, ``full``."""
        dtype = kwargs.get("dtype")
        return dtype in _WHOLE_TYPES or (dtype is None and all(isinstance(value, int) for value in args[:2]))

    def _operands(self, operator: Operator, args: Arguments, reading: Reading) -> Arguments:
        skipped = args[:1] if operator.like else ()
        return (*(None for _ in skipped), *(self._operand(value, reading) for value in args[len(skipped) :]))

    def _operand(self, value: object, reading: Reading) -> object:
        if isinstance(value, (list, tuple)):
            return [self._operand(each, reading) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in reading.ignored:
            return None
        if (part := self.part(value)) is not None and not self._host.holds(value):
            return part
        once = distinct(value.detach())
        copy = (host_view(once) if once.is_cuda else once).clone()
        return copy if once.shape == value.shape else copy.expand(value.shape)

    def _keep(self, tensor: torch.Tensor, recipe: Recipe) -> None:
        self._host.know_recipe(tensor, recipe)
        self._kept.append((ref(recipe), recipe.own_bytes))
        self._bytes += recipe.own_bytes
        if self._bytes > _MOST_BYTES:
            self._host.sweep()
            self._kept = deque((kept, num_bytes) for kept, num_bytes in self._kept if kept() is not None)
            self._bytes = sum(num_bytes for _, num_bytes in self._kept)
        while self._bytes > _MOST_BYTES:
            oldest, num_bytes = self._kept.popleft()
            self._bytes -= num_bytes
            if (forgotten := oldest()) is not None:
                forgotten.forget()


class Reading:
    """What an operation reads.

    Args:
        ignored: Identities of the arguments that it writes without reading them.
        taint: The taint of what it reads.
    """

    __slots__ = ("ignored", "taint")

    def __init__(self, ignored: Iterable[int], taint: Taint | None) -> None:
        self.ignored, self.taint = frozenset(ignored), taint
