"""The tape: what this rank sends is written down, and what other ranks' runs wrote down arrives here.

What another rank would send cannot be made up where it is an object, a size or a flag. A run therefore writes what its
rank sends into its run directory (:mod:`fakedist.run.tape`), and a run that is given such tapes is answered from them.
The n-th receive is answered by the n-th send: point-to-point calls are matched by group, sender and receiver (and by
tag, unless NCCL carries them, which knows none); collectives by group and sender, and they must be the same call of the
group, counted from its beginning, on both sides.
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import empty

from fakedist.errors import WorldError
from fakedist.run.tape import (
    ANY_RANK,
    MAX_TAPE_BYTES,
    MAX_TENSOR_BYTES,
    Channel,
    Sent,
    Tape,
    TensorSent,
    describe_ranks,
    ranks_key,
)
from fakedist.world.made_up import MadeUp

#: Writes a record to the tape's file.
Append = Callable[[dict[str, Any]], None]
#: A CPU tensor with the values of a tensor, in the same memory where it can be; None where nobody knows them.
Known = Callable[[torch.Tensor], torch.Tensor | None]
_PLAIN = torch.Tensor.__torch_dispatch__


class Where(NamedTuple):
    """One call of a group, as both of its sides see it.

    Attributes:
        operation: Its name.
        channel: The group.
        source: The rank in the job that sends; ANY_RANK where any may.
        to: The rank that receives; ANY_RANK for the whole group.
        sequence: Number of the call among the group's collectives; 0 for point-to-point calls.
        tag: Of a point-to-point call; None where tags do not count.
    """

    operation: str
    channel: Channel
    source: int
    to: int = ANY_RANK
    sequence: int = 0
    tag: int | None = None


class Tapes:
    """This rank's tape and those of other ranks.

    Args:
        append: Writes to this rank's tape; None where there is none.
        known: Gives the values of a tensor; None copies them from where they are.
        others: Tapes of other ranks.
        rank: This rank.
        command: What to type to run the ranks that it is given, this one last.

    Attributes:
        made_up: Counts what no tape answered.
    """

    def __init__(
        self,
        append: Append | None = None,
        known: Known | None = None,
        others: Sequence[Tape] = (),
        rank: int = 0,
        command: Callable[[Sequence[int]], str] = lambda ranks: f"--rank {','.join(map(str, ranks))}",
    ) -> None:
        self._writer = _Writer(append, known) if append is not None else None
        self._made: Counter[Any] = Counter()
        self._command = command
        self._rank = rank
        self._readers = {tape.rank: _Reader(tape, rank) for tape in others}
        self._asked: Counter[Any] = Counter()
        self.made_up = MadeUp()

    def channel(self, ranks: Sequence[int]) -> Channel:
        """Name a new group of these ranks, as every one of its members would."""
        key = ranks_key(ranks)
        channel = (key, self._made[key])
        self._made[key] += 1
        return channel

    def wants_objects(self) -> bool:
        """Whether objects must be pickled to be written down."""
        return self._writer is not None

    def send(self, where: Where, tensors: Sequence[torch.Tensor]) -> None:
        """Write down what this rank sends."""
        if self._writer is not None:
            self._writer.tensors(where, tensors)

    def send_objects(self, where: Where, objects: Sequence[bytes]) -> None:
        """Write down the pickled objects that this rank sends."""
        if self._writer is not None:
            self._writer.objects(where, objects)

    def sender(self, where: Where) -> int | None:
        """The rank whose tape has an answer: the source, or of any rank the first; None where no tape has one."""
        if where.source != ANY_RANK:
            return where.source if where.source in self._readers else None
        return next((rank for rank, reader in self._readers.items() if reader.has(where)), None)

    def receive(self, where: Where, tensors: Sequence[torch.Tensor], slot: int = 0) -> list[torch.Tensor] | None:
        """What a rank sent in this call, on the CPU: one tensor for each of ``tensors``; None where that is not known.

        Args:
            where: The call.
            tensors: What shall receive it.
            slot: First of the sent tensors to take: a scatter has one for every rank.

        Raises:
            WorldError: The rank sent something else in this call.
        """
        found = self._next(where)
        if found is None:
            return None
        sent = found.tensors[slot : slot + len(tensors)]
        self._check_tensors(where, sent, tensors)
        reader = self._readers[where.source]
        if any(values is None for _, _, values in sent):
            reader.num_unknown += 1
            return None
        reader.num_answers += 1
        return [_tensor(*one) for one in sent]

    def receive_objects(self, where: Where, num_objects: int) -> list[bytes] | None:
        """The pickled objects that a rank sent in this call; None where they are not known.

        Raises:
            WorldError: The rank sent another number of objects.
        """
        found = self._next(where)
        if found is None:
            return None
        if len(found.objects) != num_objects:
            raise self._mismatch(where, f"{num_objects} objects", f"{len(found.objects)}")
        objects = [pickled for pickled in found.objects if pickled is not None]
        if len(objects) < num_objects:
            self._readers[where.source].num_unknown += 1
            return None
        self._readers[where.source].num_answers += 1
        return objects

    def missing(self, where: Where, called: str) -> WorldError:
        """The error of a call that only a tape could answer; this rank's tape says what it was.

        Args:
            where: The call that was asked for with :meth:`receive_objects`.
            called: Its name on this side.
        """
        if self._writer is not None:
            self._writer.awaited(where, self._asked[where._replace(sequence=0)])
        if where.source == ANY_RANK:
            ranks, whom = [0, self._rank], "any rank"
        else:
            ranks, whom = [where.source, self._rank], f"rank {where.source}"
        if reader := self._readers.get(where.source):
            told = f"{called} waits for an object from {whom}, whose tape {reader.tape.run_directory} has no more"
            return WorldError(told, f"record more of it (--steps), with the same script: {self._command(ranks)}")
        told = f"{called} waits for an object from {whom}, which does not run"
        return WorldError(told, f"run it first and be answered from its tape: {self._command(ranks)}")

    def notes(self) -> list[str]:
        """What a reader of the report must know."""
        notes = [note for reader in self._readers.values() for note in reader.notes()]
        notes += self.made_up.notes()
        if self._writer is not None and self._writer.num_cut:
            notes.append(
                f"the tape keeps {MAX_TAPE_BYTES >> 30} GiB of values: {self._writer.num_cut:,} later sends have none"
            )
        return notes

    def close(self) -> None:
        """Write down what is still on its way from the device."""
        if self._writer is not None:
            self._writer.flush(wait=True)

    def _next(self, where: Where) -> Sent | None:
        self._asked[where._replace(sequence=0)] += 1
        reader = self._readers.get(where.source)
        if reader is None:
            return None
        found = reader.take(where)
        if found is not None and where.sequence != found.sequence:
            raise self._mismatch(
                where,
                f"it as call {where.sequence} of the group",
                f"its next one there as call {found.sequence}: the ranks do not make the same calls",
            )
        return found

    def _check_tensors(self, where: Where, sent: Sequence[TensorSent], tensors: Sequence[torch.Tensor]) -> None:
        """Refuse other types and sizes; shapes may differ, as they may on a wire."""
        given = [(dtype, _numel(shape)) for dtype, shape, _ in sent]
        wanted = [(_name(tensor.dtype), tensor.numel()) for tensor in tensors]
        if given != wanted:
            expected = ", ".join(f"{_name(tensor.dtype)} {list(tensor.shape)}" for tensor in tensors)
            raise self._mismatch(
                where, expected, ", ".join(f"{name} {list(shape)}" for name, shape, _ in sent) or "nothing"
            )

    def _mismatch(self, where: Where, expected: str, found: str) -> WorldError:
        tape = self._readers[where.source].tape
        return WorldError(
            f"{where.operation} from rank {where.source} in the group of {describe_ranks(where.channel[0])}: "
            f"this rank expects {expected}, the tape {tape.run_directory} has {found}",
            f"record both with the same script and arguments: {self._command([where.source, self._rank])}",
        )


class _Reader:
    """One tape of another rank: a queue for each kind of call."""

    def __init__(self, tape: Tape, rank: int) -> None:
        self.tape = tape
        self.num_answers = self.num_unknown = self.num_over = 0
        self._queues: dict[tuple[str, Channel, int], deque[Sent]] = {}
        for sent in tape.sent_to(rank):
            self._queues.setdefault((sent.operation, sent.channel, sent.to), deque()).append(sent)

    def has(self, where: Where) -> bool:
        queue = self._queue(where)
        return any(where.tag is None or sent.tag == where.tag for sent in queue)

    def take(self, where: Where) -> Sent | None:
        queue = self._queue(where)
        for sent in queue:
            if where.tag is None or sent.tag == where.tag:
                queue.remove(sent)
                return sent
        self.num_over += 1
        return None

    def _queue(self, where: Where) -> deque[Sent]:
        return self._queues.get((where.operation, where.channel, where.to), deque())

    def notes(self) -> Iterable[str]:
        whose = f"the tape of rank {self.tape.rank} ({self.tape.run_directory})"
        if self.num_answers:  # a rank may need nothing of those before it
            yield f"{self.num_answers:,} calls were answered from {whose}"
        if self.num_unknown:
            yield f"{self.num_unknown:,} calls were answered without values: {whose} has only their sizes"
        if self.num_over:
            yield f"{self.num_over:,} calls came after the end of {whose}, or are not on it: their values are made up"


@dataclass
class _Later:
    """Values on their way from a real device: complete when the event is."""

    values: torch.Tensor
    event: torch.cuda.Event

    def bytes(self, wait: bool) -> bytes | None:
        if wait:
            self.event.synchronize()
        return _bytes(self.values) if self.event.query() else None


class _Writer:
    """Writes this rank's tape, in the order of the calls."""

    def __init__(self, append: Append, known: Known | None) -> None:
        self._append = append
        self._known = known
        self._numbers: dict[Channel, int] = {}
        self._waiting: deque[tuple[dict[str, Any], list[Any]]] = deque()
        self._num_bytes = 0
        self.num_cut = 0

    def tensors(self, where: Where, tensors: Sequence[torch.Tensor]) -> None:
        # A tensor of one float is the common case of a script that scatters: all of them together have the limit.
        is_small = sum(tensor.nbytes for tensor in tensors) <= MAX_TENSOR_BYTES and self._has_room()
        listed = [
            (_name(tensor.dtype), tuple(tensor.shape), self._values(tensor) if is_small else None) for tensor in tensors
        ]
        self._write(where, listed, [])

    def objects(self, where: Where, objects: Sequence[bytes]) -> None:
        has_room = self._has_room()
        if has_room:
            self._num_bytes += sum(len(pickled) for pickled in objects)
        self._write(where, [], [pickled if has_room else None for pickled in objects])

    def awaited(self, where: Where, nth: int) -> None:
        call = (where.operation, where.source, where.channel, where.to, where.tag, nth)
        self._waiting.append(({"kind": "awaited", "call": call}, []))
        self.flush(wait=True)

    def flush(self, wait: bool = False) -> None:
        """Write what has arrived from the device, in order; or wait until all has."""
        while self._waiting:
            record, listed = self._waiting[0]
            for place, (dtype, shape, values) in enumerate(listed):
                if isinstance(values, _Later):
                    found = None
                    with suppress(RuntimeError):  # a device that failed has nothing to say any more
                        found = values.bytes(wait)
                    if found is None and not wait:
                        return
                    listed[place] = (dtype, shape, found)
            self._append(record)
            self._waiting.popleft()

    def _has_room(self) -> bool:
        if self._num_bytes <= MAX_TAPE_BYTES:
            return True
        self.num_cut += 1
        return False

    def _write(self, where: Where, tensors: list[Any], objects: list[bytes | None]) -> None:
        number = self._numbers.get(where.channel)
        if number is None:
            number = self._numbers[where.channel] = len(self._numbers)
            ranks, nth = where.channel
            self._waiting.append(({"kind": "group", "number": number, "ranks": ranks, "nth": nth}, []))
        call = (where.operation, where.sequence, where.tag or 0, tensors, objects)
        self._waiting.append(({"kind": "sent", "group": number, "to": where.to, "call": call}, tensors))
        self.flush()

    def _values(self, tensor: torch.Tensor) -> bytes | _Later | None:
        """A tensor's values, a promise of them, or None where there are none."""
        if type(tensor).__torch_dispatch__ is not _PLAIN or tensor.layout is not torch.strided:
            return None
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # a graph runs later, and more than once
        self._num_bytes += tensor.nbytes
        if self._known is not None:
            known = self._known(tensor)
            return None if known is None else _bytes(known)
        if not tensor.is_cuda:
            return _bytes(tensor)
        if not tensor.is_contiguous():
            return None  # putting it in order would take memory that the job does not take
        values = empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        values.copy_(tensor.detach(), non_blocking=True)
        return _Later(values, torch.cuda.current_stream(tensor.device).record_event())


def _bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def _tensor(dtype: str, shape: Sequence[int], values: bytes | None) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if not values:
        return empty(tuple(shape), dtype=kind)
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).view(kind).view(tuple(shape))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
