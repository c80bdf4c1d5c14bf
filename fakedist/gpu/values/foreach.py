"""Operations on lists of tensors, as optimizers use. A position is computed if all its tensors hold values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fakedist.gpu.values.arguments import Arguments, Keywords, device_tensors
from fakedist.gpu.values.contents import host_view, is_small
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.known import Taint
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.shares import NON_NEGATIVE


class Foreach:
    """Runs those operations.

    Args:
        host: The device memory's values.
    """

    def __init__(self, host: Host) -> None:
        self._host = host

    def run(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Run on the device, and on the host for the positions that can be computed."""
        chosen = self._chosen(operator, args, kwargs)
        taints = self._taints(args, kwargs, chosen)
        result = operator.func(*args, **kwargs)
        computed = self._compute(operator, args, kwargs, chosen) if chosen else None
        if chosen and computed is None:
            chosen = []
        done = set(chosen)
        for position in operator.written:
            written = args[position] if position < len(args) else ()
            if isinstance(written, (list, tuple)):
                self._mark(written, done)
                self._taint(written, taints, done)
        if isinstance(result, (list, tuple)):
            self._fill(operator, result, chosen, computed)
            self._taint(result, taints, done)
        return result

    def _taints(self, args: Arguments, kwargs: Keywords, chosen: list[int]) -> dict[int, Taint]:
        """The taints of the positions that read made-up values."""
        host = self._host
        if not chosen or not host.taints:
            return {}
        values = [*args, *kwargs.values()]
        shared = [value for value in values if isinstance(value, torch.Tensor)]
        lists = [v for v in values if isinstance(v, (list, tuple)) and v and isinstance(v[0], torch.Tensor)]
        found = {i: host.taint((*shared, *(listed[i] for listed in lists if i < len(listed)))) for i in chosen}
        return {i: taint for i, taint in found.items() if taint is not None}

    def _taint(self, results: Sequence[torch.Tensor], taints: dict[int, Taint], done: set[int]) -> None:
        for i, taint in taints.items():
            if i in done and i < len(results) and is_small(results[i]):  # an optimizer may lack this state
                self._host.taints.mark(results[i], taint)

    def _chosen(self, operator: Operator, args: Arguments, kwargs: Keywords) -> list[int]:
        """Positions of the lists at which every tensor that is read holds its values."""
        near = [i for i, tensor in enumerate(_tensors(args)) if tensor.is_cuda and is_small(tensor)]
        if not near:
            return []
        ignored = operator.written if operator.overwrites else ()
        read = [value for i, value in enumerate(args) if i not in ignored]
        alone = [value for value in (*read, *kwargs.values()) if isinstance(value, torch.Tensor)]
        lists = [value for value in (*read, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
        if not all(not tensor.is_cuda or self._host.holds(tensor) for tensor in alone):
            return []
        lists = [listed for listed in lists if isinstance(listed[0], torch.Tensor)]
        return [i for i in near if all(not each[i].is_cuda or self._host.holds(each[i]) for each in lists)]

    def _compute(
        self, operator: Operator, args: Arguments, kwargs: Keywords, chosen: list[int]
    ) -> Sequence[torch.Tensor] | None:
        """The results at the chosen positions, none if it writes its arguments; None if the host cannot compute it."""
        num_all = len(_tensors(args))

        def picked(value: object) -> object:
            if isinstance(value, (list, tuple)) and len(value) == num_all:
                return [picked_one(value[i]) for i in chosen]
            if isinstance(value, torch.Tensor) and not value.is_cuda and value.shape == (num_all,):
                return value[chosen]  # "scalars" of _foreach_addcdiv_.Tensor
            return picked_one(value)

        def picked_one(value: object) -> object:
            return host_view(value) if isinstance(value, torch.Tensor) and value.is_cuda else value

        try:
            named = {name: picked(value) for name, value in kwargs.items()}
            found: Sequence[torch.Tensor] | None = operator.func(*map(picked, args), **named)
        except Exception:  # no CPU kernel, or none for these types
            return None
        return () if found is None else found

    def _mark(self, written: Sequence[torch.Tensor], done: set[int]) -> None:
        for i, tensor in enumerate(written):
            if i in done:
                self._host.defined.define(tensor)
                self._host.taints.clear(tensor)
                self._host.shares.forget(tensor)
            elif tensor.is_cuda:
                self._host.spoil(tensor)

    def _fill(
        self,
        operator: Operator,
        result: Sequence[torch.Tensor],
        chosen: list[int],
        computed: Sequence[torch.Tensor] | None,
    ) -> None:
        for i, values in zip(chosen, computed or (), strict=False):
            if is_small(result[i]):
                self._host.write(result[i], values)
        if operator.name in NON_NEGATIVE:
            for tensor in device_tensors(result):
                self._host.shares.know_non_negative(tensor)


def _tensors(args: Arguments) -> Sequence[torch.Tensor]:
    """The first list of tensors. It need not be the first argument: ``_foreach_pow(2.0, exponents)``."""
    return next((value for value in args if isinstance(value, (list, tuple))), ())
