"""Tapes: this rank writes what it sends, and receives what other ranks' runs sent.

An object, a size or a flag from another rank cannot be made up, so it comes from that rank's run directory
(:mod:`fakedist.rundir.tape`). The n-th send answers the n-th receive. Point-to-point calls are matched by group,
sender, receiver and, unless they run on NCCL, tag. Collectives are matched by group and sender, and must be the same
call of the group on both sides, counted from its beginning.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import empty

from fakedist.errors import WorldError
from fakedist.frames import script_line
from fakedist.rundir import notes
from fakedist.rundir.encoding import Record
from fakedist.rundir.notes import Note
from fakedist.rundir.records import NotSentRecord
from fakedist.rundir.tape import (
    ANY_RANK,
    MAX_TAPE_BYTES,
    MAX_TENSOR_BYTES,
    STORE,
    Awaited,
    Channel,
    GroupRecord,
    Guess,
    Lost,
    MovedFile,
    RanksKey,
    Sent,
    SentRecord,
    StoredRecord,
    Tape,
    TapeFollower,
    TensorSent,
    describe_ranks,
    ranks_key,
)
from fakedist.world.files import find_lost

#: Writes a record to the tape's file.
Append = Callable[[Record], None]
#: Returns a CPU tensor with a tensor's values, in the same memory if possible; None if the values are unknown.
Known = Callable[[torch.Tensor], torch.Tensor | None]
#: Limits: lines of the script recorded as guesses, and files recorded as renamed or removed.
_MAX_SITES, _MAX_MOVED = 100, 2000
#: Seconds between two looks at the tape of a rank that still runs.
_POLL_S = 0.02
Answer = TypeVar("Answer")
_PLAIN = torch.Tensor.__torch_dispatch__


class Where(NamedTuple):
    """One call of a group, identified the same way on both sides.

    ``source`` and ``to`` are ranks in the job; ANY_RANK: any sender, or the whole group. ``sequence`` counts the
    group's collectives (0: point-to-point). ``tag`` is None if tags do not matter.
    """

    operation: str
    channel: Channel
    source: int
    to: int = ANY_RANK
    sequence: int = 0
    tag: int | None = None


class Reader:
    """One tape of another rank: a queue for each kind of call. A question waits for the answer or the tape's end."""

    def __init__(self, tape: Tape, rank: int) -> None:
        self.tape = tape
        self.num_answers = self.num_unknown = self.num_over = 0
        self._stored: dict[str, list[bytes]] = {}
        self._queues: dict[tuple[str, Channel, int], deque[Sent]] = {}
        self._follower = TapeFollower(tape, rank)
        self._read()

    def has(self, where: Where) -> bool:
        """Return whether the tape has a matching call that has not been taken."""
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

    def _wait_for(self, find: Callable[[], Answer | None]) -> Answer | None:
        while (answer := find()) is None and not self._follower.is_over:
            time.sleep(_POLL_S)
            self._read()
        return answer

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
        self._flushing = threading.RLock()
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
        with self._flushing:  # threads of the script move files, too
            while self._waiting:
                record, listed = self._waiting[0]
                sent: list[TensorSent] = []
                for dtype, shape, values in listed:
                    kept = None if isinstance(values, _Later) else values
                    if isinstance(values, _Later):
                        with suppress(RuntimeError):  # a failed device returns no values
                            kept = values.bytes(wait)
                        if kept is None and not wait:
                            return
                    sent.append((dtype, shape, kept))
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


class MadeUp:
    """Counts calls that neither a tape nor "every rank is like me" could answer."""

    def __init__(self) -> None:
        self._objects = self._tensors = self._zeros = 0
        self._first_object = self._first_tensor = ""
        #: Integers and flags that another rank should have sent: (rank, call, line), and whether the script read them.
        self._not_sent: dict[tuple[int, str, str], bool] = {}

    def object(self, call: str) -> None:
        """Count an object of this rank that stood in for another rank's."""
        self._objects += 1
        self._first_object = self._first_object or _first(call)

    def tensors(self, call: str, count: int, are_floats: bool) -> None:
        """Count received tensors that were filled with random floats or with zeros."""
        self._tensors += count
        self._zeros += 0 if are_floats else count
        self._first_tensor = self._first_tensor or _first(call)

    def read(self, source: int, call: str) -> None:
        """Take note that the script reads an integer or a flag here that another rank should have sent."""
        self._not_sent[(source, call, script_line())] = True

    def arrived_on_host(self, source: int, call: str) -> None:
        """Take note of a few integers or flags on the host that another rank should have sent; reads are not seen."""
        self._not_sent.setdefault((source, call, script_line()), False)

    def not_sent(self, command: Callable[[int], str]) -> Iterator[NotSentRecord]:
        """The lines that read values another rank should have sent; ``command`` supplies them, given that rank."""
        for (source, call, line), is_read in self._not_sent.items():
            yield NotSentRecord(line, call, source, command(source), is_read)

    def notes(self) -> Iterator[Note]:
        """Notes for the report."""
        if self._objects:
            yield notes.objects_made_up(self._objects, self._first_object)
        if self._tensors:
            yield notes.tensors_made_up(self._tensors, self._zeros, self._first_tensor)


def _first(call: str) -> str:
    line = script_line()
    return f"first in {call}" + (f" at {line}" if line else "")


class Tapes:
    """This rank's tape and those of other ranks; ``append`` and ``known`` (else the tensor is copied) may be None.

    ``command`` returns the command that runs the given ranks, this one last. For this rank alone, it also runs all that
    it waits for, or is empty if that is the present command.
    """

    def __init__(
        self,
        append: Append | None = None,
        known: Known | None = None,
        others: Sequence[Tape] = (),
        rank: int = 0,
        command: Callable[[Sequence[int]], str] = lambda ranks: f"--rank {','.join(map(str, ranks))}",
    ) -> None:
        self._writer = Writer(append, known) if append is not None else None
        self._made: Counter[RanksKey] = Counter()
        self._command = command
        self._rank = rank
        self._readers = {tape.rank: Reader(tape, rank) for tape in others}
        self._asked: Counter[Where] = Counter()
        self.made_up = MadeUp()

    def channel(self, ranks: Sequence[int]) -> Channel:
        """Name a new group of these ranks the same way as every other member."""
        key = ranks_key(ranks)
        channel = (key, self._made[key])
        self._made[key] += 1
        return channel

    def send(self, where: Where, tensors: Sequence[torch.Tensor]) -> None:
        """Write the tensors that this rank sends to its tape."""
        if self._writer is not None:
            self._writer.tensors(where, tensors)

    def send_objects(self, where: Where, objects: Sequence[bytes]) -> None:
        """Write the pickled objects that this rank sends to its tape."""
        if self._writer is not None:
            self._writer.objects(where, objects)

    def sender(self, where: Where) -> int | None:
        """The rank whose tape can answer: the source, or the first that can if any rank may send; None if none can."""
        if where.source != ANY_RANK:
            return where.source if where.source in self._readers else None
        return next((rank for rank, reader in self._readers.items() if reader.has(where)), None)

    def receive(self, where: Where, tensors: Sequence[torch.Tensor], slot: int = 0) -> list[torch.Tensor] | None:
        """The tensors that a rank sent in this call, on the CPU; None if unknown. WorldError if it sent something else.

        ``slot`` is the first of the sent tensors to take: a scatter sends one for every rank.
        """
        call = self._next(where)
        if call is None:
            return None
        sent = call.tensors[slot : slot + len(tensors)]
        self._check_tensors(where, sent, tensors)
        reader = self._readers[where.source]
        if any(values is None for _, _, values in sent):
            reader.num_unknown += 1
            return None
        reader.num_answers += 1
        return [tensor_of(*one) for one in sent]

    def receive_objects(self, where: Where, num_objects: int) -> list[bytes] | None:
        """The pickled objects that a rank sent in this call; None if unknown. WorldError if their number differs."""
        call = self._next(where)
        if call is None:
            return None
        if len(call.objects) != num_objects:
            raise self._mismatch(where, f"{num_objects} objects", f"{len(call.objects)}")
        objects = [pickled for pickled in call.objects if pickled is not None]
        if len(objects) < num_objects:
            self._readers[where.source].num_unknown += 1
            return None
        self._readers[where.source].num_answers += 1
        return objects

    def missing(self, where: Where, called: str, awaited: str = "an object") -> WorldError:
        """Return the error for a call that only a tape could answer, and write the call to this rank's tape."""
        if self._writer is not None:
            self._writer.awaited(self._awaited(where))
        whom = "any rank" if where.source == ANY_RANK else f"rank {where.source}"
        ranks = [0 if where.source == ANY_RANK else where.source, self._rank]
        if reader := self._readers.get(where.source):
            problem = f"{called} waits for {awaited} from {whom}, but its tape {reader.tape.run_directory} has no more"
            return WorldError(problem, f"record more of it (--steps) with the same script: {self._command(ranks)}")
        return WorldError(f"{called} waits for {awaited} from {whom}, which does not run", self._run_first(ranks))

    def guessed(self, where: Where, called: str, held: str) -> None:
        """Note on this rank's tape that an object of its own stood in for another rank's, as ``held`` says."""
        self.made_up.object(called)
        self.write(self.guess(where, called, held, is_object=True))

    def guess(self, where: Where, called: str, held: str, *, is_object: bool = False) -> Guess:
        """Something of this rank's own that stands in for another rank's in the call that is made now."""
        return Guess(self._awaited(where), called, script_line(), held, is_object)

    def write(self, guess: Guess) -> None:
        """Write a guess to this rank's tape."""
        if self._writer is not None:
            self._writer.guessed(guess)

    def moved(self, moved: MovedFile) -> None:
        """Note on the tape that the script renamed or removed a file or directory."""
        if self._writer is not None:
            self._writer.moved(moved)

    def stores(self, key: str, value: bytes) -> None:
        """Write a value that this rank sets in a store to its tape."""
        if self._writer is not None:
            self._writer.stored(key, value)

    def stored(self, key: str, nth: int) -> bytes | None:
        """Another rank's n-th value of a key, from 1, or its last if there are fewer; None if no tape has the key."""
        for reader in self._readers.values():
            if (value := reader.stored(key, nth)) is not None:
                reader.num_answers += 1
                return value
        return None

    def missing_key(self, key: str) -> WorldError:
        """Return the error for a key that only another rank would have set, and write the key to this rank's tape."""
        if self._writer is not None:
            self._writer.awaited(Awaited(STORE, ANY_RANK, ((), 0), ANY_RANK, None, 1, key))
        problem = f"the script waits for the store's key {key!r}, which another rank would have set"
        if self._rank == 0:
            return WorldError(problem, "run the rank that sets it first, and use its tape: --rank R,0")
        return WorldError(problem, self._run_first([0, self._rank]))

    def _run_first(self, ranks: Sequence[int]) -> str:
        advice = f"run that rank first, and use its tape: {self._command(ranks)}"
        peers = self._command([self._rank])
        return f"{advice}\nor run every rank that this rank waits for: {peers}" if peers else advice

    def _awaited(self, where: Where) -> Awaited:
        nth = self._asked[where._replace(sequence=0)]
        return Awaited(where.operation, where.source, where.channel, where.to, where.tag, nth)

    def notes(self) -> list[Note]:
        """Notes for the report."""
        all_notes = [note for reader in self._readers.values() for note in reader.notes()]
        all_notes += self.made_up.notes()
        if self._writer is not None and self._writer.num_cut:
            all_notes.append(notes.tape_full(MAX_TAPE_BYTES, self._writer.num_cut))
        return all_notes

    def not_sent(self) -> list[NotSentRecord]:
        """The lines that read integers or flags that another rank should have sent."""
        return list(self.made_up.not_sent(lambda source: self._command([max(0, source), self._rank])))

    def close(self, error: BaseException | None = None) -> None:
        """Write the values still being copied from the device and, if the script ends in an error, what it missed."""
        if self._writer is None:
            return
        self._writer.flush(wait=True)
        if isinstance(error, (Exception, SystemExit)) and (self._rank or self._readers):
            tapes = [reader.tape for reader in self._readers.values()]
            moved = [(tape.rank, file) for tape in tapes for file in tape.moved()]
            if lost := find_lost(error, moved, {tape.rank: tape.directory for tape in tapes}):
                self._writer.lost(lost)

    def end(self) -> None:
        """From now on, neither write this rank's tape nor read others."""
        self._writer, self._readers = None, {}

    def _next(self, where: Where) -> Sent | None:
        self._asked[where._replace(sequence=0)] += 1
        reader = self._readers.get(where.source)
        if reader is None:
            return None
        call = reader.take(where)
        if call is not None and where.sequence != call.sequence:
            raise self._mismatch(
                where,
                f"it as call {where.sequence} of the group",
                f"it as call {call.sequence}: the ranks do not make the same calls",
            )
        return call

    def _check_tensors(self, where: Where, sent: Sequence[TensorSent], tensors: Sequence[torch.Tensor]) -> None:
        """Refuse other types and sizes. Shapes may differ, as on a wire."""
        actual = [(dtype, num_elements(shape)) for dtype, shape, _ in sent]
        wanted = [(dtype_name(tensor.dtype), tensor.numel()) for tensor in tensors]
        if actual != wanted:
            expected = ", ".join(f"{dtype_name(tensor.dtype)} {list(tensor.shape)}" for tensor in tensors)
            raise self._mismatch(
                where, expected, ", ".join(f"{name} {list(shape)}" for name, shape, _ in sent) or "nothing"
            )

    def _mismatch(self, where: Where, expected: str, actual: str) -> WorldError:
        tape = self._readers[where.source].tape
        return WorldError(
            f"{where.operation} from rank {where.source} in the group of {describe_ranks(where.channel[0])}: "
            f"this rank expects {expected}, the tape {tape.run_directory} has {actual}",
            f"record both with the same script and arguments: {self._command([where.source, self._rank])}",
        )
