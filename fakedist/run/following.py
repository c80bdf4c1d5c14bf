"""Reads a tape while its rank still runs. What it sends comes as it is written, in order."""

from __future__ import annotations

from collections.abc import Iterator

from fakedist.errors import RunDirectoryError
from fakedist.run.directory import TAPE_NAME, is_in_use
from fakedist.run.journal import JournalReader
from fakedist.run.manifest import load_manifest
from fakedist.run.outcome import Outcome
from fakedist.run.tape import TAPE_RECORDS, Addressed, Sent, StoredRecord, Tape


class TapeFollower:
    """A tape, for one of the ranks that receive from it.

    Args:
        tape: The tape, which may still grow.
        rank: The rank that receives.

    Attributes:
        is_over: Whether the tape was complete when it was last read: nothing more will come.
    """

    def __init__(self, tape: Tape, rank: int) -> None:
        self._tape = tape
        self._addressed = Addressed(rank)
        self._position = 0
        self.is_over = False

    def read(self) -> Iterator[Sent | StoredRecord]:
        """What has come since the last time: calls for the rank, and values in stores.

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
        """Whether the tape's rank has ended. A parent that was killed leaves no lock."""
        if not is_in_use(self._tape.run_directory):
            return True
        try:
            return load_manifest(self._tape.run_directory).exit.outcome is not Outcome.RUNNING
        except RunDirectoryError:
            return False
