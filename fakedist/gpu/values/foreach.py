"""Operations on lists of tensors, as optimizers use. A position is computed if all its tensors hold values."""

from __future__ import annotations

from typing import Any

import torch

from fakedist.gpu.values.contents import host_view, is_small
from fakedist.gpu.values.doubts import Doubt
from fakedist.gpu.values.host import Host, device_tensors
from fakedist.gpu.values.kinds import Kind
from fakedist.gpu.values.shares import NON_NEGATIVE


class Foreach:
    """Runs those operations.

    Args:
        host: The device memory's values.
    """

    def __init__(self, host: Host) -> None:
        self._host = host

    def run(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on the device, and on the host for the positions that can be computed."""
        chosen = self._chosen(kind, args, kwargs)
        doubts = self._doubts(args, kwargs, chosen)
        result = func(*args, **kwargs)
        computed = self._compute(func, args, kwargs, chosen) if chosen else None
        if chosen and computed is None:
            chosen = []
        done = set(chosen)
        for position in kind.written:
            written = args[position] if position < len(args) else ()
            if isinstance(written, (list, tuple)):
                self._mark(written, done)
                self._doubt(written, doubts, done)
        if isinstance(result, (list, tuple)):
            self._fill(kind, result, chosen, computed)
            self._doubt(result, doubts, done)
        return result

    def _doubts(self, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: list[int]) -> dict[int, Doubt]:
        """The doubts of the positions that read made-up values."""
        host = self._host
        if not chosen or not host.doubts:
            return {}
        values = [*args, *kwargs.values()]
        shared = [value for value in values if isinstance(value, torch.Tensor)]
        lists = [v for v in values if isinstance(v, (list, tuple)) and v and isinstance(v[0], torch.Tensor)]
        found = {i: host.doubt((*shared, *(listed[i] for listed in lists if i < len(listed)))) for i in chosen}
        return {i: doubt for i, doubt in found.items() if doubt is not None}

    def _doubt(self, results: Any, doubts: dict[int, Doubt], done: set[int]) -> None:
        for i, doubt in doubts.items():
            if i in done and i < len(results) and is_small(results[i]):  # an optimizer may lack this state
                self._host.doubts.mark(results[i], doubt)

    def _chosen(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Positions of the lists at which every tensor that is read holds its values."""
        near = [i for i, tensor in enumerate(_tensors(args)) if tensor.is_cuda and is_small(tensor)]
        if not near:
            return []
        ignored = kind.written if kind.overwrites else ()
        read = [value for i, value in enumerate(args) if i not in ignored]
        alone = [value for value in (*read, *kwargs.values()) if isinstance(value, torch.Tensor)]
        lists = [value for value in (*read, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
        if not all(not tensor.is_cuda or self._host.holds(tensor) for tensor in alone):
            return []
        lists = [listed for listed in lists if isinstance(listed[0], torch.Tensor)]
        return [i for i in near if all(not each[i].is_cuda or self._host.holds(each[i]) for each in lists)]

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: list[int]) -> Any:
        num_all = len(_tensors(args))

        def picked(value: Any) -> Any:
            if isinstance(value, (list, tuple)) and len(value) == num_all:
                return [picked_one(value[i]) for i in chosen]
            if isinstance(value, torch.Tensor) and not value.is_cuda and value.shape == (num_all,):
                return value[chosen]  # "scalars" of _foreach_addcdiv_.Tensor
            return picked_one(value)

        def picked_one(value: Any) -> Any:
            return host_view(value) if isinstance(value, torch.Tensor) and value.is_cuda else value

        try:
            found = func(*map(picked, args), **{name: picked(value) for name, value in kwargs.items()})
        except Exception:  # no CPU kernel, or none for these types
            return None
        return () if found is None else found

    def _mark(self, written: Any, done: set[int]) -> None:
        for i, tensor in enumerate(written):
            if i in done:
                self._host.defined.define(tensor)
                self._host.doubts.clear(tensor)
                self._host.shares.forget(tensor)
            elif tensor.is_cuda:
                self._host.spoil(tensor)

    def _fill(self, kind: Kind, result: Any, chosen: list[int], computed: Any) -> None:
        for i, values in zip(chosen, computed or (), strict=False):
            if is_small(result[i]):
                self._host.write(result[i], values)
        if kind.name in NON_NEGATIVE:
            for tensor in device_tensors(result):
                self._host.shares.know_non_negative(tensor)


def _tensors(args: tuple[Any, ...]) -> Any:
    """The first list of tensors. It need not be the first argument: ``_foreach_pow(2.0, exponents)``."""
    return next((value for value in args if isinstance(value, (list, tuple))), ())
