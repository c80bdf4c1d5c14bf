"""The tape: what this rank sends is written down, and what other ranks' runs wrote down arrives here.

What another rank would send cannot be made up where it is an object, a size or a flag. A run therefore writes what its
rank sends into its run directory (:mod:`fakedist.run.tape`), and a run that is given such tapes is answered from them.
The n-th receive is answered by the n-th send: point-to-point calls are matched by group, sender and receiver (and by
tag, unless NCCL carries them, which knows none); collectives by group and sender, and they must be the same call of the
group, counted from its beginning, on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fakedist.errors import WorldError
from fakedist.frames import script_line
from fakedist.run.tape import (
    ANY_RANK,
    MAX_TAPE_BYTES,
    STORE,
    Awaited,
    Channel,
    Guess,
    Moved,
    Sent,
    Tape,
    TensorSent,
    describe_ranks,
    ranks_key,
)
from fakedist.world.files import what_is_lost
from fakedist.world.made_up import MadeUp
from fakedist.world.tape_file import Append, Known, Reader, Writer, dtype_name, num_elements, tensor_of


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
        command: What to type to run the ranks that it is given, this one last; for this one alone, to run all that it
            waits for, too, or nothing where that is what runs.

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
        self._writer = Writer(append, known) if append is not None else None
        self._made: Counter[Any] = Counter()
        self._command = command
        self._rank = rank
        self._readers = {tape.rank: Reader(tape, rank) for tape in others}
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
        return [tensor_of(*one) for one in sent]

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

    def missing(self, where: Where, called: str, what: str = "an object") -> WorldError:
        """The error of a call that only a tape could answer; this rank's tape says what it was.

        Args:
            where: The call that was asked for with :meth:`receive_objects`.
            called: Its name on this side.
            what: What it waits for.
        """
        if self._writer is not None:
            self._writer.awaited(self._awaited(where))
        whom = "any rank" if where.source == ANY_RANK else f"rank {where.source}"
        ranks = [0 if where.source == ANY_RANK else where.source, self._rank]
        if reader := self._readers.get(where.source):
            told = f"{called} waits for {what} from {whom}, whose tape {reader.tape.run_directory} has no more"
            return WorldError(told, f"record more of it (--steps), with the same script: {self._command(ranks)}")
        return WorldError(f"{called} waits for {what} from {whom}, which does not run", self._run_first(ranks))

    def guessed(self, where: Where, called: str, held: str, is_object: bool = True) -> None:
        """Something of this rank's own stayed in the place of another rank's; this rank's tape says what and where.

        Args:
            where: The call that was asked for.
            called: Its name on this side.
            held: What stayed, in words.
            is_object: Whether it is a Python object.
        """
        if is_object:
            self.made_up.object(called)
        if self._writer is not None:
            self._writer.guessed(Guess(self._awaited(where), called, script_line(), held, is_object))

    def moved(self, moved: Moved) -> None:
        """Write down that the script renamed or removed a file or directory."""
        if self._writer is not None:
            self._writer.moved(moved)

    def stores(self, key: str, value: bytes) -> None:
        """Write down what this rank sets in a store."""
        if self._writer is not None:
            self._writer.stored(key, value)

    def stored(self, key: str, nth: int) -> bytes | None:
        """What another rank set in a store the n-th time, from 1, or set last; None where no tape has the key."""
        for reader in self._readers.values():
            if values := reader.stored.get(key):
                reader.num_answers += 1
                return values[min(nth, len(values)) - 1]
        return None

    def missing_key(self, key: str) -> WorldError:
        """The error of a key that only another rank would have set; this rank's tape says which."""
        if self._writer is not None:
            self._writer.awaited(Awaited(STORE, ANY_RANK, ((), 0), ANY_RANK, None, 1, key))
        told = f"the script waits for the store's key {key!r}, which another rank would have set"
        if self._rank == 0:
            return WorldError(told, "run the rank that sets it first, and be answered from its tape: --rank R,0")
        return WorldError(told, self._run_first([0, self._rank]))

    def _run_first(self, ranks: Sequence[int]) -> str:
        told = f"run it first and be answered from its tape: {self._command(ranks)}"
        peers = self._command([self._rank])
        return f"{told}\nor run it and all others that this rank waits for: {peers}" if peers else told

    def _awaited(self, where: Where) -> Awaited:
        nth = self._asked[where._replace(sequence=0)]
        return Awaited(where.operation, where.source, where.channel, where.to, where.tag, nth)

    def notes(self) -> list[str]:
        """What a reader of the report must know."""
        notes = [note for reader in self._readers.values() for note in reader.notes()]
        notes += self.made_up.notes()
        if self._writer is not None and self._writer.num_cut:
            notes.append(
                f"the tape keeps {MAX_TAPE_BYTES >> 30} GiB of values: {self._writer.num_cut:,} later sends have none"
            )
        return notes

    def close(self, error: BaseException | None = None) -> None:
        """Write down what is still on its way from the device, and what the script missed that ends by an error."""
        if self._writer is None:
            return
        self._writer.flush(wait=True)
        if isinstance(error, (Exception, SystemExit)) and (self._rank or self._readers):
            tapes = [reader.tape for reader in self._readers.values()]
            moved = [(tape.rank, each) for tape in tapes for each in tape.moved()]
            if lost := what_is_lost(error, moved, {tape.rank: tape.directory for tape in tapes}):
                self._writer.lost(lost)

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
        given = [(dtype, num_elements(shape)) for dtype, shape, _ in sent]
        wanted = [(dtype_name(tensor.dtype), tensor.numel()) for tensor in tensors]
        if given != wanted:
            expected = ", ".join(f"{dtype_name(tensor.dtype)} {list(tensor.shape)}" for tensor in tensors)
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
