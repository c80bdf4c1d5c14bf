"""Values that arrive from the other ranks by the value contract, "every rank is like me".

Whatever a GPU's caching allocator hands out is recorded and counted. So wider types and masks go into a fixed buffer
that the allocator does not know.

=====================================  ================================================================
call                                   result
=====================================  ================================================================
all_reduce, reduce                     :func:`reduced`: my tensor, once for each rank of the group
all_gather, gather                     :func:`spread`: my tensor in every slot
reduce_scatter                         my chunk, reduced
all_to_all                             :func:`spread`: what I would send to myself in every slot
broadcast from another rank            the tape's; else :func:`finite`: finite values stay
scatter from another rank, recv        the tape's; else :func:`invent`: seeded normal floats, else zeros
=====================================  ================================================================

Every function writes into the tensors passed to it. None takes memory from the caching allocator, because in the real
job the allocator would not see any either. None waits for a device.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar, cast

import torch
from torch import empty, randn
from torch import tensor as new_tensor

from fakedist.errors import WorldError
from fakedist.frames import torch_files
from fakedist.world.checks import reduction_name
from fakedist.world.tapes import Tapes, Where

BYTES = 1 << 20

_last_use: dict[torch.device, torch.cuda.Event] = {}


def pieces(tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Split a tensor (contiguous on CUDA) into parts, each with an uninitialised scratch tensor of its shape per dtype.

    On CUDA the parts fit the buffer (WorldError if it cannot be allocated); on the CPU there is one, with fresh memory.
    """
    if not tensor.is_cuda or not tensor.is_contiguous():
        yield tensor, [torch.empty_like(tensor, dtype=dtype) for dtype in dtypes]
        return
    device, stream = tensor.device, torch.cuda.current_stream(tensor.device)
    address, captured = _buffer(device.index), torch.cuda.is_current_stream_capturing()
    if device in _last_use and not captured:
        stream.wait_event(_last_use[device])  # streams take turns
    for piece in tensor.view(-1).split(BYTES // sum(dtype.itemsize for dtype in dtypes) // 8 * 8):
        at, scratch = address, []
        for dtype in dtypes:
            bytes_ = piece.numel() * dtype.itemsize
            storage = torch._C._construct_storage_from_data_pointer(at, device, bytes_)
            scratch.append(empty(0, dtype=dtype, device=device).set_(storage))
            at += -(-bytes_ // 16) * 16
        yield piece, scratch
    if not captured:
        _last_use[device] = stream.record_event()


@functools.cache
def _buffer(device_index: int) -> int:
    """Address of the device's buffer; it lives as long as the process."""
    runtime = ctypes.CDLL(None)  # torch's own, or the virtual GPU's: both are loaded with global symbols
    address = ctypes.c_void_p()
    with torch.cuda.device(device_index):
        allocate = getattr(runtime, "fakedist_own_memory", runtime.cudaMalloc)
        error = allocate(ctypes.byref(address), ctypes.c_size_t(BYTES))
    if error or not address.value:
        raise WorldError(f"cudaMalloc of {BYTES} bytes failed with error {error}", "the GPU has no memory left")
    return address.value


#: Changes a tensor in place; its return value is ignored.
Change = Callable[[torch.Tensor], object]
#: Takes a device tensor whose values another rank should have sent, and what to call when the script reads one. Returns
#: whether reads are seen.
NotSent = Callable[[torch.Tensor, Callable[[], object]], bool]
#: Takes a tensor and the ranks of a group. Returns what each of them has instead, on the host; None: the same.
OfRanks = Callable[[torch.Tensor, Sequence[int]], list[torch.Tensor] | None]
#: The most integers or flags on the host that count as read when they arrive.
_FEW = 64
#: From here, C++ of DDP compares shapes and buckets with rank 0's. They are this rank's own, and right.
_DDP_FILES = ("torch/nn/parallel/distributed.py", "torch/distributed/utils.py")
#: Here torch gives all ranks rank 0's seed or state of random numbers. This rank's own is as good.
_SEED_FILES = ("torch/distributed/tensor/_random.py", "torch/utils/data/dataloader.py")

_KEEP = {"AVG", "MIN", "MAX", "BAND", "BOR"}


_flags: ContextVar[tuple[int, ...]] = ContextVar("flags", default=())


@contextmanager
def sent_flags(values: Sequence[int]) -> Iterator[None]:
    """While active, these integers arrive in tensors of as many 64-bit integers that no tape can fill."""
    token = _flags.set(tuple(values))
    try:
        yield
    finally:
        _flags.reset(token)


class Slot(NamedTuple):
    """The ranks of a group, and the part of what each has that comes to this rank; None: all of it."""

    ranks: Sequence[int]
    part: int | None = None


_OVER_RANKS: dict[str, Callable[..., torch.Tensor]] = {"SUM": torch.sum, "MAX": torch.amax, "MIN": torch.amin}

_Arrive = TypeVar("_Arrive", bound=Callable[..., object])
#: Of all threads: values on the device stay as they are.
_on_host_alone = threading.Event()


@contextmanager
def on_host_alone() -> Iterator[None]:
    """While active, values arrive on the host alone: those on the device are stale."""
    _on_host_alone.set()
    try:
        yield
    finally:
        _on_host_alone.clear()


def _arriving(original: _Arrive) -> _Arrive:
    """Have a function of :class:`Arrivals` leave tensors on the device alone while :func:`on_host_alone` is active."""

    @functools.wraps(original)
    def arrive(arrivals: Arrivals, written: torch.Tensor | Sequence[torch.Tensor], *others: object) -> object:
        if _on_host_alone.is_set():
            first = written if isinstance(written, torch.Tensor) else next(iter(written), None)
            if first is not None and first.is_cuda:
                return None
        return original(arrivals, written, *others)

    return cast(_Arrive, arrive)


class Arrivals:
    """Makes the values that arrive. One instance serves all groups of a rank.

    ``is_undefined``: a device tensor holds no values (the virtual GPU computed nothing into it). ``not_sent`` is called
    with device tensors of integers or flags that no tape could fill; None: reads are not seen.
    """

    def __init__(
        self,
        seed: int,
        is_undefined: Callable[[torch.Tensor], bool] | None = None,
        tapes: Tapes | None = None,
        not_sent: NotSent | None = None,
        of_ranks: OfRanks | None = None,
    ) -> None:
        self._of_ranks = of_ranks
        self.tapes = tapes or Tapes()
        self._not_sent = not_sent or (lambda tensor, when_read: False)
        self._seed = seed
        self._is_undefined = is_undefined or (lambda tensor: False)
        self._changes: dict[tuple[object, torch.dtype, int], Change] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self._draws = torch.Generator().manual_seed(seed)

    @_arriving
    def reduced(self, tensor: torch.Tensor, num_ranks: int, op: object) -> None:
        """Reduce ``tensor`` in place with ``num_ranks - 1`` others like it.

        Sums and products saturate at the ends of the dtype's finite range, which a real sum would often not reach.
        """
        known = (hash(op), tensor.dtype, num_ranks)  # the hash of a ReduceOp is its kind
        if (change := self._changes.get(known)) is None:
            name = reduction_name(op)
            change = _change("SUM" if name == "PREMUL_SUM" else name, tensor.dtype, num_ranks)
            if name == "PREMUL_SUM":  # each op has its own factor, so it is not cached
                tensor.mul_(premultiplier(op))
            else:
                self._changes[known] = change
        change(tensor)

    @_arriving
    def reduced_into(self, output: torch.Tensor, mine: torch.Tensor, num_ranks: int, op: object) -> None:
        """Reduce ``mine`` into an output with the same number of elements."""
        output.view(-1).copy_(mine.reshape(-1))
        self.reduced(output, num_ranks, op)

    @_arriving
    def spread(self, outputs: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        """Fill every output with ``mine``, repeated or cut to its size; if ``mine`` is empty, with zeros."""
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

    @_arriving
    def spread_evenly(self, output: torch.Tensor, mine: torch.Tensor, rank: int, num_ranks: int) -> None:
        """Fill equal slots of one output with ``mine``, repeated or cut to size; in one kernel unless they alias."""
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

    @_arriving
    def routed(self, output: torch.Tensor | Sequence[torch.Tensor], mine: torch.Tensor, where: Slot) -> bool:
        """Fill an output, or each slot, with what the ranks of a group send if it follows from choices of experts.

        Returns whether it does. Then these differ from rank to rank.
        """
        theirs = self._choices(mine, where.ranks) if mine.numel() > 1 else None
        if theirs is None:
            return False
        if where.part is not None:
            theirs = [values.view(len(where.ranks), -1)[where.part] for values in theirs]
        if isinstance(output, torch.Tensor):
            output.copy_(torch.stack(theirs).view(output.shape))
        else:
            for slot, values in zip(output, theirs, strict=True):
                slot.copy_(values.view(slot.shape))
        return True

    @_arriving
    def routed_sum(self, tensor: torch.Tensor, ranks: Sequence[int], op: object) -> bool:
        """Reduce over the ranks, in place, like :meth:`routed`."""
        if self._of_ranks is None:
            return False
        name = reduction_name(op)
        theirs = self._choices(tensor, ranks) if name in _OVER_RANKS and (tensor.numel() > 1 or name == "MAX") else None
        if theirs is None:
            return False
        tensor.copy_(_OVER_RANKS[name](torch.stack(theirs), 0))
        return True

    def _choices(self, mine: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor] | None:
        return None if self._of_ranks is None or len(ranks) < 2 else self._of_ranks(mine, ranks)

    @_arriving
    def put(self, output: torch.Tensor, values: torch.Tensor) -> None:
        """Fill an output with values on the host, of another integer type maybe."""
        output.copy_(values)

    @_arriving
    def repeat(self, output: torch.Tensor, mine: torch.Tensor) -> None:
        """Fill an output with rows on the host, again and again.

        The virtual GPU knows what follows from large integers only where they follow from small ones on the device.
        """
        times = len(output) // max(len(mine), 1)
        if not output.is_cuda or mine.nbytes > BYTES:
            output.copy_(mine.repeat(times, 1))
        elif output.numel():
            storage = torch._C._construct_storage_from_data_pointer(
                _buffer(output.device.index), output.device, mine.nbytes
            )
            small = empty(0, dtype=mine.dtype, device=output.device).set_(storage).view(mine.shape)
            output.view(times, *mine.shape).copy_(small.copy_(mine).expand(times, *mine.shape))

    def receive(self, where: Where, tensors: Sequence[torch.Tensor], otherwise: Change, slot: int = 0) -> None:
        """Fill the tensors from the tape, else by ``otherwise``. WorldError if the tape holds something else."""
        arrived = self.tapes.receive(where, tensors, slot) or _known_flags(tensors)
        if arrived is None or (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            for tensor in tensors:
                otherwise(tensor)
            if arrived is None:
                self._stood_in(where, tensors, is_invented=otherwise == self.invent)
        else:
            self._put(tensors, arrived)

    def _put(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value.view(tensor.shape), non_blocking=True)

    def _stood_in(self, where: Where, tensors: Sequence[torch.Tensor], is_invented: bool) -> None:
        """Take note of tensors from another rank that were made up or left unchanged.

        Integers and flags are guesses once the script reads them, because it branches on them; at once if reads are not
        seen.
        """
        called = "recv" if where.operation == "send" else where.operation
        if is_invented:
            self.tapes.made_up.tensors(called, len(tensors), _is_float(tensors[0].dtype))
        wanted = [tensor for tensor in tensors if not _is_float(tensor.dtype) and tensor.numel()]
        if not wanted or _is_torchs_own():
            return
        held = "zeros" if is_invented else "this rank's own values"
        name = f"{str(wanted[0].dtype).removeprefix('torch.')} {list(wanted[0].shape)}"
        guess = self.tapes.guess(where, called, f"{held} in a tensor {name}")

        def read() -> None:
            self.tapes.made_up.read(where.source, called)
            self.tapes.write(guess)

        for tensor in wanted:
            if tensor.is_cuda and self._not_sent(tensor, read):
                continue
            self.tapes.write(guess)
            if not tensor.is_cuda and tensor.numel() <= _FEW:
                self.tapes.made_up.arrived_on_host(where.source, called)

    def invent(self, tensor: torch.Tensor) -> None:
        """Fill with floats drawn from a normal distribution; with zeros for any other type."""
        if not _is_float(tensor.dtype):
            tensor.zero_()
        elif tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            tensor.fill_(float(randn((), generator=self._draws)))  # a CUDA graph cannot use our generator
        else:
            tensor.normal_(generator=self._generator(tensor.device))

    def finite(self, tensor: torch.Tensor) -> None:
        """Leave the buffer unchanged, but replace non-finite values by draws from a normal distribution."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if self._is_undefined(tensor):
            self.invent(tensor)
        elif _is_wide_float(tensor.dtype) and (tensor.is_cuda or not bool(torch.isfinite(tensor).all())):
            for piece, (drawn, is_finite) in pieces(tensor, (tensor.dtype, torch.bool)):
                # torch.isfinite allocates a temporary. inf - inf and nan - nan are NaN, which does not equal 0.
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
    """Moves nothing: tensors keep their values (``--collectives noop``), and none is made up."""

    def _nothing(self, *args: object, **kwargs: object) -> None:
        pass

    reduced = reduced_into = spread = spread_evenly = put = repeat = _put = _stood_in = invent = finite = _nothing


def _known_flags(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    flags = _flags.get()
    is_known = flags and all(tensor.dtype == torch.int64 and tensor.numel() == len(flags) for tensor in tensors)
    return [new_tensor(flags) for _ in tensors] if is_known else None


def premultiplier(op: object) -> float | torch.Tensor:
    """The factor of a PREMUL_SUM, which torch 2.11 gives only to pickle."""
    state = op.__getstate__()
    assert isinstance(state, tuple), "pybind11's state of a ReduceOp is a tuple"
    factor: float | torch.Tensor = state[1]
    return factor


def _is_torchs_own() -> bool:
    """Return whether torch compares or shares values of its own, of which this rank's are as good as another's."""
    files = list(torch_files())
    return any(file.endswith(_SEED_FILES) for file in files) or any(file.endswith(_DDP_FILES) for file in files[:1])


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_complex or _is_wide_float(dtype)


def _is_wide_float(dtype: torch.dtype) -> bool:
    """Torch only converts eight-bit floats; it computes with wider ones."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _change(name: str, dtype: torch.dtype, num_ranks: int) -> Change:
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
    """Multiply and saturate: 64-bit integers at the largest multiple, other types at the end of their range."""
    low, high = _limits(dtype)
    if dtype in (torch.float32, torch.float64):
        # A tensor operand of the same type needs no conversion: 1.5 us for a small tensor, against 2.8 for a number.
        factor, lowest, highest = (new_tensor(float(value), dtype=dtype) for value in (num_ranks, low, high))
        return lambda tensor: (
            tensor.mul_(num_ranks).clamp_(low, high) if tensor.is_cuda else tensor.mul_(factor).clamp_(lowest, highest)
        )
    if _is_wide_float(dtype):
        return lambda tensor: tensor.mul_(num_ranks).clamp_(low, high)
    if dtype == torch.int64:
        return lambda tensor: tensor.clamp_(-(-low // num_ranks), high // num_ranks).mul_(num_ranks)
    wider = torch.float32 if dtype.is_floating_point else torch.int64
    return _in_wider(wider, lambda exact: exact.mul_(num_ranks).clamp_(low, high))


def _product(dtype: torch.dtype, num_ranks: int) -> Change:
    low, high = _limits(dtype)
    if _is_wide_float(dtype):
        return lambda tensor: tensor.pow_(num_ranks).clamp_(low, high)
    if dtype.is_floating_point:
        return _in_wider(torch.float32, lambda exact: exact.pow_(num_ranks).clamp_(low, high))

    def change(tensor: torch.Tensor) -> None:
        for piece, (power, is_over) in pieces(tensor, (torch.float64, torch.bool)):
            torch.ge(power.copy_(piece).pow_(num_ranks), high, out=is_over)
            piece.copy_(power.masked_fill_(is_over, 0).clamp_(low, high)).masked_fill_(is_over, high)

    return change


def _in_wider(dtype: torch.dtype, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:

    def changed(tensor: torch.Tensor) -> None:
        for piece, (exact,) in pieces(tensor, (dtype,)):
            piece.copy_(change(exact.copy_(piece)))

    return changed


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max


def _repeat(target: torch.Tensor, mine: torch.Tensor) -> None:
    whole = target.numel() // mine.numel() * mine.numel()
    target[:whole].view(-1, mine.numel()).copy_(mine)
    target[whole:].copy_(mine[: target.numel() - whole])
