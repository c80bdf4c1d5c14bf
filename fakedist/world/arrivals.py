"""What arrives from ranks that do not exist: the value contract, "every rank is like me".

=====================================  ================================================================
call                                   result
=====================================  ================================================================
all_reduce, reduce                     :func:`reduced`: mine as often as the group has ranks
all_gather, gather                     :func:`spread`: mine in every slot
reduce_scatter                         my chunk, reduced
all_to_all                             :func:`spread`: in every slot what I would send to me
broadcast from another rank            :func:`finite`: the buffer as it is, where that is finite
scatter from another rank, recv        :func:`invent`: floats seeded normal, integers and bools zero
=====================================  ================================================================

Every function writes into the tensors that it is given and takes no memory from the caching allocator, because the real
job's allocator would not see it either; nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_KEEP = {"AVG", "MIN", "MAX", "BAND", "BOR"}


class Arrivals:
    """Makes what arrives. One of these serves all groups of a rank.

    Args:
        seed: Of every value that is made up.
        is_undefined: Says that a device tensor holds nothing (the virtual GPU computed nothing into it).
    """

    def __init__(self, seed: int, is_undefined: Callable[[torch.Tensor], bool] | None = None) -> None:
        self._seed = seed
        self._is_undefined = is_undefined or (lambda tensor: False)
        self._generators: dict[torch.device, torch.Generator] = {}
        self._draws = torch.Generator().manual_seed(seed)

    def reduced(self, tensor: torch.Tensor, num_ranks: int, op: object) -> None:
        """Reduce ``tensor`` in place with ``num_ranks - 1`` others like it.

        Sums and products saturate at the dtype's finite range.
        """
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            # Eight-bit floats have no arithmetic of their own: a temporary is not to be avoided.
            info = torch.finfo(tensor.dtype)
            wide = tensor.float()
            _reduce(wide, num_ranks, op)
            tensor.copy_(wide.clamp_(info.min, info.max))
        else:
            _reduce(tensor, num_ranks, op)

    def spread(self, outputs: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        """Fill every output with ``mine``, repeated or cut to its size; nothing to repeat is zeros."""
        wanted = [output for output in outputs if output.numel()]
        if not wanted:
            return
        if all(output.shape == mine.shape for output in wanted):
            torch._foreach_copy_(wanted, [mine] * len(wanted))
            return
        flat = mine.reshape(-1)
        available = flat.numel()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        pieces: dict[int, torch.Tensor] = {}
        for output in wanted:
            target = output.view(-1)
            size = target.numel()
            if not available:
                target.zero_()
            elif size <= available:
                targets.append(target)
                sources.append(pieces.setdefault(size, flat[:size]))
            else:
                _repeat(target, flat)
        if targets:
            torch._foreach_copy_(targets, sources)

    def spread_evenly(self, output: torch.Tensor, mine: torch.Tensor, place: tuple[int, int]) -> None:
        """Fill equal slots of one output with ``mine``, in one kernel, or two where ``mine`` is a part of it.

        Args:
            output: As many slots as the group has ranks.
            mine: One slot's worth; repeated or cut where it is not.
            place: This rank's slot, and the number of slots.
        """
        rank, num_ranks = place
        if not output.numel():
            return
        if output.numel() != mine.numel() * num_ranks:
            self.spread(output.view(-1).chunk(num_ranks), mine)
            return
        slots, mine = output.view(num_ranks, -1), mine.reshape(1, -1)
        if output.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr():
            slots.copy_(mine)
            return
        for part in (slots[:rank], slots[rank + 1 :]):
            if len(part):
                part.copy_(mine)
        slots[rank : rank + 1].copy_(mine)

    def invent(self, tensor: torch.Tensor) -> None:
        """Fill with floats drawn from a normal distribution, or zeros for every other type."""
        if tensor.dtype.is_complex or (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
            generator = self._generators.get(tensor.device)
            if generator is None:
                generator = torch.Generator(tensor.device)
                generator.manual_seed(self._seed)
                self._generators[tensor.device] = generator
            tensor.normal_(generator=generator)
        else:
            tensor.zero_()

    def finite(self, tensor: torch.Tensor) -> None:
        """Leave the buffer as it is; values that are not finite become one drawn from a normal distribution.

        One value for all of them: as many as there are would take memory that the real job does not take.
        """
        if self._is_undefined(tensor):
            self.invent(tensor)
        elif tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            drawn = float(torch.randn((), generator=self._draws))
            torch.nan_to_num(tensor, nan=drawn, posinf=drawn, neginf=drawn, out=tensor)


def reduce_op(op: object) -> tuple[str, float | torch.Tensor]:
    """Name of a reduction, e.g. SUM, and PREMUL_SUM's factor."""
    kind = getattr(op, "op", op)
    name = str(getattr(kind, "name", kind))
    return (name, op.__getstate__()[1]) if name == "PREMUL_SUM" else (name, 1.0)  # type: ignore[index]


def _reduce(tensor: torch.Tensor, num_ranks: int, op: object) -> None:
    name, factor = reduce_op(op)
    if name == "PREMUL_SUM":
        tensor.mul_(factor)
        name = "SUM"
    if name in _KEEP or num_ranks == 1:
        return
    if name == "SUM":
        _multiply(tensor, num_ranks)
    elif name == "PRODUCT":
        _power(tensor, num_ranks)
    elif name == "BXOR":
        if num_ranks % 2 == 0:
            tensor.zero_()
    else:
        raise ValueError(f"no such reduction: {name}")


def _multiply(tensor: torch.Tensor, factor: int) -> None:
    """Multiply in place and saturate, without a temporary: integers at the largest multiple that the type can hold."""
    dtype = tensor.dtype
    if dtype == torch.bool:
        return  # true or true is true
    if dtype.is_complex or (dtype.is_floating_point and dtype != torch.float16):
        tensor.mul_(factor)  # only values beyond 1e35 would leave the range
    elif dtype.is_floating_point:
        info = torch.finfo(dtype)
        tensor.clamp_(info.min / factor, info.max / factor).mul_(factor)
    else:
        limits = torch.iinfo(dtype)
        factor = min(factor, limits.max)
        tensor.clamp_(-(-limits.min // factor), limits.max // factor).mul_(factor)


def _power(tensor: torch.Tensor, exponent: int) -> None:
    dtype = tensor.dtype
    if dtype == torch.bool or dtype.is_complex:
        return
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        tensor.pow_(exponent).clamp_(info.min, info.max)
        return
    limits = torch.iinfo(dtype)
    exact = tensor.double().pow_(exponent)  # products of integers are rare: the temporary is bearable
    over, under = exact >= limits.max, exact <= limits.min
    tensor.copy_(exact.masked_fill_(over | under, 0)).masked_fill_(over, limits.max).masked_fill_(under, limits.min)


def _repeat(target: torch.Tensor, mine: torch.Tensor) -> None:
    whole = target.numel() // mine.numel() * mine.numel()
    target[:whole].view(-1, mine.numel()).copy_(mine)
    target[whole:].copy_(mine[: target.numel() - whole])
