"""Bools that are known without values: nothing is NaN or infinite, whatever its size.

``torch.isfinite(x)`` is ``(x == x) * (x.abs() != inf)`` by the time it reaches a kernel. Scripts end runs on such
tests, so they get the answer of a healthy run instead of a coin's.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fakedist.gpu.values.kinds import Kind

_ALWAYS = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
_SAME = {"eq": True, "ne": False, "le": True, "ge": True, "lt": False, "gt": False}
_KEEPS = {"all", "any", "clone", "_to_copy", "max", "min", "amax", "amin", "stack", "cat"}
_BOTH = {"mul", "bitwise_and", "logical_and", "bitwise_or", "logical_or"}
_NOT = {"logical_not", "bitwise_not"}


class Truths:
    """Remembers which bool tensors are all true or all false, by the address of their storage."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}

    def of(self, tensor: torch.Tensor) -> bool | None:
        """What every element is; None if that is not known."""
        return self._known.get(tensor.untyped_storage().data_ptr()) if tensor.dtype == torch.bool else None

    def made(self, kind: Kind, args: tuple[Any, ...], result: torch.Tensor) -> None:
        """A factory made ``result``."""
        address = result.untyped_storage().data_ptr()
        self._known.pop(address, None)
        if result.dtype == torch.bool and kind.name in ("zeros", "ones", "full"):
            self._known[address] = kind.name == "ones" or (kind.name == "full" and bool(args[1]))

    def result(self, kind: Kind, args: tuple[Any, ...], result: Any) -> bool | None:
        """What every element of an operation's result is; None if that is not known."""
        if not isinstance(result, torch.Tensor) or (not self._known and result.dtype != torch.bool):
            return None
        truth = self._follows(kind, args) if result.dtype == torch.bool else None
        address = result.untyped_storage().data_ptr()
        if truth is None:
            self._known.pop(address, None)
        else:
            self._known[address] = truth
        return truth

    def _follows(self, kind: Kind, args: tuple[Any, ...]) -> bool | None:
        name = kind.name
        if name in _ALWAYS:
            return _ALWAYS[name]
        if name in _SAME and len(args) > 1:
            if isinstance(args[1], torch.Tensor):
                return _SAME[name] if args[0] is args[1] or _is_same(args[0], args[1]) else None
            infinite = isinstance(args[1], float) and math.isinf(args[1])
            return name == "ne" if infinite and name in ("eq", "ne") else None
        known = [self.of(value) for value in _flat(args) if isinstance(value, torch.Tensor)]
        if not known or any(truth is None for truth in known):
            return None
        if name in _KEEPS:
            return known[0] if len(set(known)) == 1 else None
        if name in _NOT:
            return not known[0]
        if name in _BOTH:
            return any(known) if "or" in name else all(known)
        return None


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.stride() == second.stride() and first.shape == second.shape


def _flat(values: Any) -> list[Any]:
    return [inner for value in values for inner in (_flat(value) if isinstance(value, (list, tuple)) else [value])]
