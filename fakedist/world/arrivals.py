"""What arrives from ranks that do not exist: the value contract, "every rank is like me".

=====================================  ================================================================
call                                   result
=====================================  ================================================================
all_reduce, reduce                     :func:`reduced`: mine as often as the group has ranks
all_gather, gather                     :func:`spread`: mine in every slot
reduce_scatter                         my chunk, reduced
all_to_all                             :func:`spread`: in every slot what I would send to me
broadcast from another rank            the tape's; else :func:`finite`: the buffer as it is, where finite
scatter from another rank, recv        the tape's; else :func:`invent`: floats seeded normal, others zero
=====================================  ================================================================

Every function writes into the tensors that it is given and takes no memory from the caching allocator, because the real
job's allocator would not see it either; nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import randn
from torch import tensor as new_tensor

from fakedist.world.scratch import pieces
from fakedist.world.tape import Tapes, Where

#: Changes a tensor in place; what it returns does not count.
Change = Callable[[torch.Tensor], object]

_KEEP = {"AVG", "MIN", "MAX", "BAND", "BOR"}


class Arrivals:
    """Makes what arrives. One of these serves all groups of a rank.

    Args:
        seed: Of every value that is made up.
        is_undefined: Says that a device tensor holds nothing (the virtual GPU computed nothing into it).
        tapes: What this rank sends, and what others have sent.
    """

    def __init__(
        self, seed: int, is_undefined: Callable[[torch.Tensor], bool] | None = None, tapes: Tapes | None = None
    ) -> None:
        self.tapes = tapes or Tapes()
        self._seed = seed
        self._is_undefined = is_undefined or (lambda tensor: False)
        self._changes: dict[tuple[object, torch.dtype, int], Change] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self._draws = torch.Generator().manual_seed(seed)

    def reduced(self, tensor: torch.Tensor, num_ranks: int, op: object) -> None:
        """Reduce ``tensor`` in place with ``num_ranks - 1`` others like it.

        Sums and products saturate at the dtype's finite range, where a real sum of so many would often not end.
        """
        known = (hash(op), tensor.dtype, num_ranks)  # the hash of a ReduceOp is its kind
        if (change := self._changes.get(known)) is None:
            name, factor = reduce_op(op)
            change = _change("SUM" if name == "PREMUL_SUM" else name, tensor.dtype, num_ranks)
            if name == "PREMUL_SUM":  # each has a factor of its own
                tensor.mul_(factor)
            else:
                self._changes[known] = change
        change(tensor)

    def reduced_into(self, output: torch.Tensor, mine: torch.Tensor, num_ranks: int, op: object) -> None:
        """Put ``mine``, reduced, into an output of as many elements."""
        output.view(-1).copy_(mine.reshape(-1))
        self.reduced(output, num_ranks, op)

    def spread(self, outputs: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        """Fill every output with ``mine``, repeated or cut to its size; nothing to repeat is zeros."""
        if {output.shape for output in outputs} == {mine.shape}:
            torch._foreach_copy_(list(outputs), [mine] * len(outputs))
            return
        wanted = [output for output in outputs if output.numel()]
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
        if not torch._C._is_alias_of(output, mine):  # type: ignore[attr-defined]
            slots.copy_(mine)
            return
        for part in (slots[:rank], slots[rank + 1 :]):
            if len(part):
                part.copy_(mine)
        slots[rank : rank + 1].copy_(mine)

    def receive(self, where: Where, tensors: Sequence[torch.Tensor], otherwise: Change, slot: int = 0) -> None:
        """Fill with what is on the tape; ``otherwise`` changes each tensor where the tape does not know.

        Raises:
            WorldError: The tape has something else than this call expects.
        """
        arrived = self.tapes.receive(where, tensors, slot)
        if arrived is None or (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            if arrived is None:
                self._count(where, tensors, is_invented=otherwise == self.invent)
            for tensor in tensors:
                otherwise(tensor)
        else:
            self._put(tensors, arrived)

    def _put(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value.view(tensor.shape), non_blocking=True)

    def _count(self, where: Where, tensors: Sequence[torch.Tensor], is_invented: bool) -> None:
        """Tensors of another rank are about to be made up, or to stay as they are."""
        called = "recv" if where.operation == "send" else where.operation
        first = tensors[0]
        if is_invented:
            self.tapes.made_up.tensors(called, len(tensors), _is_float(first.dtype))
        if not _is_float(first.dtype) and first.numel():  # sizes, flags, pickled bytes: what a script decides by
            held = "zeros" if is_invented else "this rank's own values"
            name = f"{str(first.dtype).removeprefix('torch.')} {list(first.shape)}"
            self.tapes.guessed(where, called, f"{held} in a tensor {name}", is_object=False)

    def invent(self, tensor: torch.Tensor) -> None:
        """Fill with floats drawn from a normal distribution, or zeros for every other type."""
        if not _is_float(tensor.dtype):
            tensor.zero_()
        elif tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            tensor.fill_(float(randn((), generator=self._draws)))  # a graph cannot use a generator of ours
        else:
            tensor.normal_(generator=self._generator(tensor.device))

    def finite(self, tensor: torch.Tensor) -> None:
        """Leave the buffer as it is; values that are not finite become some drawn from a normal distribution."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if self._is_undefined(tensor):
            self.invent(tensor)
        elif _is_wide_float(tensor.dtype) and (tensor.is_cuda or not bool(torch.isfinite(tensor).all())):
            for piece, (drawn, is_finite) in pieces(tensor, (tensor.dtype, torch.bool)):
                # torch.isfinite takes a temporary; inf - inf and nan - nan are not 0, and NaN equals nothing.
                torch.eq(torch.sub(piece, piece, out=drawn), 0, out=is_finite)
                self.invent(drawn)
                torch.where(is_finite, piece, drawn, out=piece)

    def _generator(self, device: torch.device) -> torch.Generator:
        generator = self._generators.get(device)
        if generator is None:
            generator = torch.Generator(device)
            generator.manual_seed(self._seed)
            self._generators[device] = generator
        return generator


class Nothing(Arrivals):
    """Moves nothing: tensors hold what they held (``--collectives noop``)."""

    def reduced(self, tensor: torch.Tensor, num_ranks: int, op: object) -> None:
        """Left as it is."""

    def reduced_into(self, output: torch.Tensor, mine: torch.Tensor, num_ranks: int, op: object) -> None:
        """Left as it is."""

    def spread(self, outputs: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        """Left as they are."""

    def spread_evenly(self, output: torch.Tensor, mine: torch.Tensor, place: tuple[int, int]) -> None:
        """Left as it is."""

    def _put(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Left as they are."""

    def _count(self, where: Where, tensors: Sequence[torch.Tensor], is_invented: bool) -> None:
        """None is made up."""

    def invent(self, tensor: torch.Tensor) -> None:
        """Left as it is."""

    def finite(self, tensor: torch.Tensor) -> None:
        """Left as it is."""


def reduce_op(op: object) -> tuple[str, float | torch.Tensor]:
    """Name of a reduction, e.g. SUM, and PREMUL_SUM's factor."""
    kind = getattr(op, "op", op)
    name = str(getattr(kind, "name", kind))
    return (name, op.__getstate__()[1]) if name == "PREMUL_SUM" else (name, 1.0)  # type: ignore[index]


def _is_float(dtype: torch.dtype) -> bool:
    """Whether values of the type can be drawn."""
    return dtype.is_complex or _is_wide_float(dtype)


def _is_wide_float(dtype: torch.dtype) -> bool:
    """Whether torch computes with the type; eight-bit floats are only converted."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _change(name: str, dtype: torch.dtype, num_ranks: int) -> Change:
    """What a reduction with others like me does to a tensor of that type."""
    if name not in (*_KEEP, "SUM", "PRODUCT", "BXOR"):
        raise ValueError(f"no such reduction: {name}")
    if name in _KEEP or num_ranks == 1 or dtype == torch.bool:  # true or true is true
        return _keep
    if name == "BXOR":
        return torch.Tensor.zero_ if num_ranks % 2 == 0 else _keep
    if dtype.is_complex:  # as ProcessGroupNCCL does
        return lambda tensor: _change(name, dtype.to_real(), num_ranks)(torch.view_as_real(tensor))
    return _sum(dtype, num_ranks) if name == "SUM" else _product(dtype, num_ranks)


def _keep(tensor: torch.Tensor) -> None:
    pass


def _sum(dtype: torch.dtype, num_ranks: int) -> Change:
    """Multiply and saturate: 64-bit integers at the largest multiple, others at the end of their range."""
    low, high = _limits(dtype)
    if dtype in (torch.float32, torch.float64):
        # Tensors of the same type are not converted: 1.5 us for a small tensor, where numbers take 2.8.
        factor, lowest, highest = (new_tensor(float(value), dtype=dtype) for value in (num_ranks, low, high))
        return lambda tensor: (
            tensor.mul_(num_ranks).clamp_(low, high) if tensor.is_cuda else tensor.mul_(factor).clamp_(lowest, highest)
        )
    if _is_wide_float(dtype):
        return lambda tensor: tensor.mul_(num_ranks).clamp_(low, high)
    if dtype == torch.int64:
        return lambda tensor: tensor.clamp_(-(-low // num_ranks), high // num_ranks).mul_(num_ranks)
    wider = torch.float32 if dtype.is_floating_point else torch.int64

    def change(tensor: torch.Tensor) -> None:
        for piece, (exact,) in pieces(tensor, (wider,)):
            piece.copy_(exact.copy_(piece).mul_(num_ranks).clamp_(low, high))

    return change


def _product(dtype: torch.dtype, num_ranks: int) -> Change:
    """Raise to a power and saturate."""
    low, high = _limits(dtype)
    if _is_wide_float(dtype):
        return lambda tensor: tensor.pow_(num_ranks).clamp_(low, high)

    def change(tensor: torch.Tensor) -> None:
        for piece, (power, is_over) in pieces(tensor, (torch.float64, torch.bool)):
            torch.ge(power.copy_(piece).pow_(num_ranks), high, out=is_over)
            piece.copy_(power.masked_fill_(is_over, 0).clamp_(low, high)).masked_fill_(is_over, high)

    return change


def _limits(dtype: torch.dtype) -> tuple[Any, Any]:
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max


def _repeat(target: torch.Tensor, mine: torch.Tensor) -> None:
    whole = target.numel() // mine.numel() * mine.numel()
    target[:whole].view(-1, mine.numel()).copy_(mine)
    target[whole:].copy_(mine[: target.numel() - whole])
