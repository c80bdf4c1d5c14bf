"""tape.bin: everything that a rank sent, for other ranks' runs to receive.

The tape is a separate journal (:mod:`fakedist.rundir.directory`) with records of its own, so a rank killed at any
moment leaves what it had sent.
Reading it yields only numbers, text and bytes. Objects stay as the bytes that torch.distributed pickled. Only the
process of a rank that receives one unpickles it, as torch.distributed would.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fakedist.errors import RunDirectoryError
from fakedist.options import Job
from fakedist.rundir.directory import (
    MANIFEST_NAME,
    TAPE_NAME,
    JournalReader,
    is_in_use,
    load_job,
    load_manifest,
    read_journal,
)
from fakedist.rundir.encoding import Kinds, Record, record_kind
from fakedist.rundir.outcome import Outcome
from fakedist.units import format_rank_list

#: Evenly spaced ranks as ("range", start, stop, step); other ranks listed one by one.
RanksKey = tuple[str | int, ...]
#: Identifies a group: its ranks, and how many groups of the same ranks were made before it.
Channel = tuple[RanksKey, int]
#: Type, shape and values of a tensor. The values are None if they were not kept.
TensorSent = tuple[str, tuple[int, ...], bytes | None]

#: The source of a receive from any rank.
ANY_RANK = -1
#: The operation for a store key that another rank would have set.
STORE = "store"
#: Larger tensors are recorded without their values.
MAX_TENSOR_BYTES = 1 << 20
#: Once a run's values exceed this, later tensors are recorded without theirs.
MAX_TAPE_BYTES = 1 << 30


#: Every kind of record of a tape, by its name in the file.
TAPE_RECORDS: Kinds = {}


@dataclass(frozen=True)
class Sent:
    """One call in which a rank sent something.

    Attributes:
        operation: send, broadcast, scatter, or an object collective.
        channel: Its group.
        to: The receiving rank; -1 for the whole group.
        sequence: Number of the call among the group's collectives, from 1. Meaningless for sends.
        tag: The tag of a send.
        tensors: The tensors sent. A scatter has one for each rank of the group.
        objects: The objects sent, pickled; None if not kept. A scatter has one for each rank.
    """

    operation: str
    channel: Channel
    to: int
    sequence: int
    tag: int
    tensors: tuple[TensorSent, ...]
    objects: tuple[bytes | None, ...]


@record_kind("tape", TAPE_RECORDS)
class ScriptRecord(Record):
    """A job's script. A tape begins with it.

    Attributes:
        script: Its name.
        path: Its path; empty for a module.
        sha256: A hash of its contents; empty where it is not one file.
    """

    script: str
    path: str
    sha256: str


@record_kind("group", TAPE_RECORDS)
class GroupRecord(Record):
    """A group on which this rank sends, the ``nth`` of the same ranks."""

    number: int
    ranks: RanksKey
    nth: int


@record_kind("sent", TAPE_RECORDS)
class SentRecord(Record):
    """One call in which this rank sent something. :class:`Sent` explains the fields.

    Attributes:
        group: Number of its group.
    """

    group: int
    to: int
    operation: str
    sequence: int
    tag: int
    tensors: list[TensorSent]
    objects: list[bytes | None]


@record_kind("stored", TAPE_RECORDS)
class StoredRecord(Record):
    """A value that this rank set in a store."""

    key: str
    value: bytes


@record_kind("awaited", TAPE_RECORDS)
class Awaited(Record):
    """A call that only another rank's tape could have answered, so the rank ended there.

    Attributes:
        operation: The operation with which the other rank sends.
        source: The other rank; -1 if any rank may send.
        channel: The group.
        to: This rank; -1 for the whole group.
        tag: The tag of a send; None where tags do not matter.
        nth: Which of the source's calls of this kind it is, from 1.
        key: If the operation is "store", the store key that another rank would have set.
    """

    operation: str
    source: int
    channel: Channel
    to: int
    tag: int | None
    nth: int
    key: str = ""


@record_kind("guessed", TAPE_RECORDS)
class Guess(Record):
    """A call in which this rank's own value stood in for what another rank would have sent.

    Attributes:
        awaited: The call. A tape that contains it answers it.
        called: Its name on this side.
        line: Where the script first made it, as ``file:line (function)``.
        held: What stood in for the other rank's value, in words.
        is_object: Whether it was a Python object. Otherwise it was integers or flags in a tensor.
    """

    awaited: Awaited
    called: str
    line: str
    held: str
    is_object: bool


@record_kind("moved", TAPE_RECORDS)
class MovedFile(Record):
    """A file or directory that a run renamed or, with an empty ``to``, removed, at ``file:line (function)``."""

    path: str
    to: str
    line: str


@record_kind("lost", TAPE_RECORDS)
class Lost(Record):
    """A missing file or directory that made the script fail: which and why, in one sentence.

    ``may_be_written``: a rank that has not run may write it.
    """

    text: str
    may_be_written: bool


@dataclass(frozen=True)
class Tape:
    """The tape of the run of one rank."""

    run_directory: Path
    rank: int

    @property
    def directory(self) -> str:
        """The working directory that the run started in."""
        return load_manifest(self.run_directory).cwd

    def sent_to(self, rank: int) -> Iterator[Sent]:
        """Calls in which the run sent to a rank or to a group that contains it, in order. A cut-off tail is left out.

        Raises:
            RunDirectoryError: The file is not a tape.
        """
        addressed = Addressed(rank)
        for record in self._records():
            if (sent := addressed.sent(record)) is not None:
                yield sent

    def awaited(self) -> Awaited | None:
        """The last call that the run waited for and never got; None if every call was answered."""
        last = None
        for record in self._records():
            if isinstance(record, Awaited):
                last = record
        return last

    def guesses(self) -> list[Guess]:
        """Calls where the run continued with its own value, one per line of the script, objects first."""
        guesses = [record for record in self._records() if isinstance(record, Guess)]
        return sorted(guesses, key=lambda guess: not guess.is_object)

    def stored(self) -> dict[str, list[bytes]]:
        """Values that the run set in stores, by key, in order."""
        values: dict[str, list[bytes]] = {}
        for record in self._records():
            if isinstance(record, StoredRecord):
                values.setdefault(record.key, []).append(record.value)
        return values

    def moved(self) -> list[MovedFile]:
        """The files and directories that the run renamed or removed, in order."""
        return [record for record in self._records() if isinstance(record, MovedFile)]

    def lost(self) -> Lost | None:
        """The file or directory that was missing when the script failed; None if there was none."""
        return next((record for record in self._records() if isinstance(record, Lost)), None)

    def _records(self) -> JournalReader:
        return read_journal(self.run_directory / TAPE_NAME, TAPE_RECORDS)

    def has(self, awaited: Awaited, rank: int) -> bool:
        """Whether the run sent what ``rank`` was waiting for."""
        if awaited.operation == STORE:
            return len(self.stored().get(awaited.key, ())) >= awaited.nth
        sent = (
            sent
            for sent in self.sent_to(rank)
            if (sent.operation, sent.channel, sent.to) == (awaited.operation, awaited.channel, awaited.to)
        )
        return sum(awaited.tag is None or one.tag == awaited.tag for one in sent) >= awaited.nth


class Addressed:
    """Picks from a tape's records, in order, the calls in which its rank sent something to one rank or its groups."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._channels: dict[int, Channel] = {}

    def sent(self, record: Record) -> Sent | None:
        """The call of a record. None if it is about something else, or for others."""
        if isinstance(record, GroupRecord):
            if is_member(self._rank, record.ranks):
                self._channels[record.number] = (record.ranks, record.nth)
            return None
        if not isinstance(record, SentRecord) or record.to not in (-1, self._rank):
            return None
        if (channel := self._channels.get(record.group)) is None:
            return None
        return Sent(
            record.operation,
            channel,
            record.to,
            record.sequence,
            record.tag,
            tensors=tuple(record.tensors),
            objects=tuple(record.objects),
        )


def ranks_key(ranks: Sequence[int]) -> RanksKey:
    """Ranks of a group in a form short enough to compare and write often."""
    if len(ranks) > 8 and (step := ranks[1] - ranks[0]):
        spaced = range(ranks[0], ranks[0] + step * len(ranks), step)
        if spaced == ranks or list(spaced) == list(ranks):
            return ("range", spaced.start, spaced.stop, spaced.step)
    return tuple(ranks)


def is_member(rank: int, key: RanksKey) -> bool:
    """Return whether a rank is among those of a :func:`ranks_key`."""
    return rank in (range(*map(int, key[1:])) if key[:1] == ("range",) else key)


def describe_ranks(key: RanksKey) -> str:
    """The ranks of a group in words: "ranks 0-7", "ranks 0-56:8", "ranks 1, 5, 7"."""
    if key[:1] == ("range",):
        return f"ranks {format_rank_list(range(*map(int, key[1:])))}"
    some = ", ".join(str(rank) for rank in key[:8])
    return f"rank{'s' if len(key) > 1 else ''} {some}{', ...' if len(key) > 8 else ''}"


def script_identity(job: Job, directory: str) -> ScriptRecord:
    """Identify a job's script: its name, its path and a hash of its contents."""
    path = Path(directory, job.target)
    if job.is_module or path.is_dir() or not path.is_file() or zipfile.is_zipfile(path):
        return ScriptRecord(job.target, "" if job.is_module else os.path.realpath(path), "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return ScriptRecord(job.target, os.path.realpath(path), digest)


def find_tapes(job: Job) -> list[Tape]:
    """The tapes in ``job.tapes`` (runs or directories of runs), sorted by rank, without the job's own rank.

    Raises:
        RunDirectoryError: A tape is missing or belongs to another job, or two tapes are from the same rank.
    """
    identity = script_identity(job, os.getcwd())
    directories: dict[int, Path] = {}
    for directory in _runs(job.tapes):
        rank = _check_run(directory, job, identity)
        if rank in directories:
            raise RunDirectoryError(
                f"two tapes are from rank {rank}: {directories[rank]} and {directory}", "give one of them"
            )
        directories[rank] = directory
    return [Tape(directory, rank) for rank, directory in sorted(directories.items()) if rank != job.rank]


def _runs(paths: Iterable[str]) -> Iterator[Path]:
    for text in paths:
        path = Path(text)
        if not (path / MANIFEST_NAME).exists() and path.is_dir():
            several = sorted(entry for entry in path.iterdir() if (entry / MANIFEST_NAME).exists())
            if several:
                yield from several
                continue
        yield path


def _check_run(directory: Path, job: Job, identity: ScriptRecord) -> int:
    """The rank of a run, once its tape is known to fit the job.

    Raises:
        RunDirectoryError: The run has no tape, or has another world size or script.
    """
    theirs = load_job(directory)
    if not (directory / TAPE_NAME).exists():
        raise RunDirectoryError(f"{directory} has no tape", "run that rank again: a run of fakedist profile has one")
    if theirs.world_size != job.world_size:
        raise RunDirectoryError(
            f"the tape {directory} is from a world of {theirs.world_size} ranks, and this job has {job.world_size}",
            f"--world-size {theirs.world_size}, or record rank {theirs.rank} in a world of {job.world_size}",
        )
    other = next(iter(read_journal(directory / TAPE_NAME, TAPE_RECORDS)), None)
    if not isinstance(other, ScriptRecord):
        return theirs.rank
    same = "" != identity.path == other.path or "" != identity.sha256 == other.sha256
    if not same and not (job.is_module and other.script == identity.script):
        raise RunDirectoryError(
            f"the tape {directory} is from the script {other.path or other.script}, "
            f"and this job runs {identity.path or identity.script}",
            f"record rank {theirs.rank} with {job.target}",
        )
    return theirs.rank


class TapeFollower:
    """A tape, which may still grow, for one of the ranks that receive from it.

    Attributes:
        is_over: Whether the tape was complete when it was last read: nothing more will come.
    """

    def __init__(self, tape: Tape, rank: int) -> None:
        self._tape = tape
        self._addressed = Addressed(rank)
        self._position = 0
        self.is_over = False

    def read(self) -> Iterator[Sent | StoredRecord]:
        """Read everything new: calls for the rank, and values in stores.

        Raises:
            RunDirectoryError: The file is not a tape.
        """
        is_over = self._has_ended()  # asked before the file is read: what is written until then is read
        records = JournalReader(self._tape.run_directory / TAPE_NAME, TAPE_RECORDS, self._position)
        for record in records:
            if isinstance(record, StoredRecord):
                yield record
            elif (sent := self._addressed.sent(record)) is not None:
                yield sent
        self._position = records.position
        self.is_over = is_over

    def _has_ended(self) -> bool:
        """Return whether the tape's rank has ended. A parent that was killed leaves no lock."""
        if not is_in_use(self._tape.run_directory):
            return True
        try:
            return load_manifest(self._tape.run_directory).exit.outcome is not Outcome.RUNNING
        except RunDirectoryError:
            return False
