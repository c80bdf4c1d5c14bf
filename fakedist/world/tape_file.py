"""Both ends of a tape: the reader of another rank's tape, and the writer of this rank's own."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import empty

from fakedist.rundir import notes
from fakedist.rundir.encoding import Record
from fakedist.rundir.notes import Note
from fakedist.rundir.tape import (
    ANY_RANK,
    MAX_TAPE_BYTES,
    MAX_TENSOR_BYTES,
    Awaited,
    Channel,
    GroupRecord,
    Guess,
    Lost,
    MovedFile,
    Sent,
    SentRecord,
    StoredRecord,
    Tape,
    TapeFollower,
    TensorSent,
)

#: Writes a record to the tape's file.
Append = Callable[[Record], None]
#: Returns a CPU tensor with a tensor's values, in the same memory if possible; None if the values are unknown.
Known = Callable[[torch.Tensor], torch.Tensor | None]
#: Limits: lines of the script recorded as guesses, and files recorded as renamed or removed.
_MAX_SITES, _MAX_MOVED = 100, 2000
#: Seconds between two looks at the tape of a rank that still runs.
_POLL_S = 0.02
Found = TypeVar("Found")
_PLAIN = torch.Tensor.__torch_dispatch__


class Where(NamedTuple):
    """One call of a group, identified the same way on both sides.

    Attributes:
        operation: Its name.
        channel: The group.
        source: The sender's rank in the job; ANY_RANK if any rank may send.
        to: The receiver's rank in the job; ANY_RANK for the whole group.
        sequence: Number of the call among the group's collectives; 0 for point-to-point calls.
        tag: Tag of a point-to-point call; None if tags do not matter.
    """

    operation: str
    channel: Channel
    source: int
    to: int = ANY_RANK
    sequence: int = 0
    tag: int | None = None


class Reader:
    """One tape of another rank: a queue for each kind of call.

    If that rank still runs, a question waits until the tape has the answer or is over. So the answer is the same as
    after its run.
    """

    def __init__(self, tape: Tape, rank: int) -> None:
        self.tape = tape
        self.num_answers = self.num_unknown = self.num_over = 0
        self._stored: dict[str, list[bytes]] = {}
        self._queues: dict[tuple[str, Channel, int], deque[Sent]] = {}
        self._follower = TapeFollower(tape, rank)
        self._read()

    def has(self, where: Where) -> bool:
        """Whether the tape has a matching call that has not been taken."""
        return self._wait_for(lambda: self._match(where)) is not None

    def take(self, where: Where) -> Sent | None:
        """Take the next matching call; None if there is none."""
        sent = self._wait_for(lambda: self._match(where))
        if sent is None:
            self.num_over += 1
            return None
        self._queue(where).remove(sent)
        return sent

    def stored(self, key: str, nth: int) -> bytes | None:
        """The n-th value that the rank set for a store's key, from 1, or its last if there are fewer; None without."""
        self._wait_for(lambda: self._stored.get(key, [])[nth - 1 : nth] or None)
        values = self._stored.get(key)
        return values[min(nth, len(values)) - 1] if values else None

    def _match(self, where: Where) -> Sent | None:
        return next((sent for sent in self._queue(where) if where.tag is None or sent.tag == where.tag), None)

    def _wait_for(self, find: Callable[[], Found | None]) -> Found | None:
        while (found := find()) is None and not self._follower.is_over:
            time.sleep(_POLL_S)
            self._read()
        return found

    def _read(self) -> None:
        for record in self._follower.read():
            if isinstance(record, Sent):
                self._queues.setdefault((record.operation, record.channel, record.to), deque()).append(record)
            else:
                self._stored.setdefault(record.key, []).append(record.value)

    def _queue(self, where: Where) -> deque[Sent]:
        return self._queues.get((where.operation, where.channel, where.to), deque())

    def notes(self) -> Iterable[Note]:
        """Notes for the report."""
        whose = f"the tape of rank {self.tape.rank} ({self.tape.run_directory})"
        if self.num_answers:  # a rank may need nothing from the ranks before it
            yield notes.tape_answered(self.num_answers, whose)
        if self.num_unknown:
            yield notes.tape_without_values(self.num_unknown, whose)
        if self.num_over:
            yield notes.tape_too_short(self.num_over, whose)


@dataclass
class _Later:
    """Values being copied from a real device, complete once the event is."""

    values: torch.Tensor
    event: torch.cuda.Event

    def bytes(self, wait: bool) -> bytes | None:
        if wait:
            self.event.synchronize()
        return _bytes(self.values) if self.event.query() else None


#: Type, shape and values of a tensor that is about to be written.
_Listed = tuple[str, tuple[int, ...], bytes | _Later | None]


class Writer:
    """Writes this rank's tape, in the order of the calls."""

    def __init__(self, append: Append, known: Known | None) -> None:
        self._append = append
        self._known = known
        self._numbers: dict[Channel, int] = {}
        self._waiting: deque[tuple[Record, list[_Listed]]] = deque()
        self._num_bytes = self._num_moved = 0
        self._sites: set[tuple[str, int, str]] = set()
        self.num_cut = 0

    def tensors(self, where: Where, tensors: Sequence[torch.Tensor]) -> None:
        """Write tensors that this rank sends."""
        # The limit is for all tensors of a call together: a script that scatters often sends one float to each rank.
        is_small = sum(tensor.nbytes for tensor in tensors) <= MAX_TENSOR_BYTES and self._has_room()
        listed: list[_Listed] = [
            (dtype_name(tensor.dtype), tuple(tensor.shape), self._values(tensor) if is_small else None)
            for tensor in tensors
        ]
        self._write(where, listed, [])

    def objects(self, where: Where, objects: Sequence[bytes]) -> None:
        """Write pickled objects that this rank sends."""
        has_room = self._has_room()
        if has_room:
            self._num_bytes += sum(len(pickled) for pickled in objects)
        self._write(where, [], [pickled if has_room else None for pickled in objects])

    def awaited(self, awaited: Awaited) -> None:
        """Write a call that only another rank could have answered."""
        self._waiting.append((awaited, []))
        self.flush(wait=True)

    def guessed(self, guess: Guess) -> None:
        """Write what stood in for another rank's value, once for each line of the script."""
        site = (guess.called, guess.awaited.source, guess.line)
        if site in self._sites or len(self._sites) >= _MAX_SITES:
            return
        self._sites.add(site)
        self._waiting.append((guess, []))
        self.flush()

    def stored(self, key: str, value: bytes) -> None:
        """Write what this rank sets in a store."""
        if len(value) <= MAX_TENSOR_BYTES and self._has_room():
            self._num_bytes += len(value)
            self._waiting.append((StoredRecord(key, value), []))
            self.flush()

    def moved(self, moved: MovedFile) -> None:
        """Write what the script renamed or removed."""
        self._num_moved += 1
        if self._num_moved <= _MAX_MOVED:
            self._waiting.append((moved, []))
            self.flush()

    def lost(self, lost: Lost) -> None:
        """Write what the script finally looked for and did not find."""
        self._waiting.append((lost, []))
        self.flush(wait=True)

    def flush(self, wait: bool = False) -> None:
        """Write in order what has arrived from the device; with ``wait``, wait until everything has."""
        while self._waiting:
            record, listed = self._waiting[0]
            sent: list[TensorSent] = []
            for dtype, shape, values in listed:
                found = None if isinstance(values, _Later) else values
                if isinstance(values, _Later):
                    with suppress(RuntimeError):  # a failed device returns no values
                        found = values.bytes(wait)
                    if found is None and not wait:
                        return
                sent.append((dtype, shape, found))
            self._append(replace(record, tensors=sent) if isinstance(record, SentRecord) else record)
            self._waiting.popleft()

    def _has_room(self) -> bool:
        if self._num_bytes <= MAX_TAPE_BYTES:
            return True
        self.num_cut += 1
        return False

    def _write(self, where: Where, tensors: list[_Listed], objects: list[bytes | None]) -> None:
        number = self._numbers.get(where.channel)
        if number is None:
            number = self._numbers[where.channel] = len(self._numbers)
            ranks, nth = where.channel
            self._waiting.append((GroupRecord(number, ranks, nth), []))
        sent = SentRecord(
            number,
            where.to,
            where.operation,
            where.sequence,
            where.tag or 0,
            tensors=[],
            objects=objects,
        )
        self._waiting.append((sent, tensors))
        self.flush()

    def _values(self, tensor: torch.Tensor) -> bytes | _Later | None:
        """A tensor's values, a copy in progress, or None if there are no values to write."""
        if type(tensor).__torch_dispatch__ is not _PLAIN or tensor.layout is not torch.strided:
            return None
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # a graph runs later, and more than once
        if tensor.numel() and not tensor.data_ptr():
            return None  # its storage was freed, as FSDP frees parameters
        self._num_bytes += tensor.nbytes
        if self._known is not None:
            known = self._known(tensor)
            return None if known is None else _bytes(known)
        if not tensor.is_cuda:
            return _bytes(tensor)
        if not tensor.is_contiguous():
            return None  # making it contiguous would take memory that the job does not
        values = empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        values.copy_(tensor.detach(), non_blocking=True)
        return _Later(values, torch.cuda.current_stream(tensor.device).record_event())


def _bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def tensor_of(dtype: str, shape: Sequence[int], values: bytes | None) -> torch.Tensor:
    """Rebuild a tensor from its record."""
    kind: torch.dtype = getattr(torch, dtype)
    if not values:
        return empty(tuple(shape), dtype=kind)
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).view(kind).view(tuple(shape))


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a type on tapes: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def num_elements(shape: Sequence[int]) -> int:
    """Number of elements of a tensor."""
    count = 1
    for size in shape:
        count *= size
    return count
