"""The journal: what the rank's process writes while it runs. It stays readable wherever it is cut off.

The file starts with ``FDJ1``. Each record is its length and its CRC-32 (both uint32, little endian), followed by a
pickle (protocol 4) of a dict of builtins: the record's kind and its fields (:mod:`fakedist.rundir.encoding`). The
reader refuses any pickle that names a global.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from fakedist.bounded import ForeignCodeError, UnreadableError, load_builtins, open_file
from fakedist.errors import RunDirectoryError
from fakedist.rundir.encoding import Record, decode, encode
from fakedist.rundir.records import RECORDS

MAGIC = b"FDJ1"
_HEAD = struct.Struct("<II")
_PICKLE = b"\x80\x04"  # the first bytes of a protocol 4 pickle
_MOST_OF_A_TAIL = 1 << 30  # bytes of a record that was cut off; the largest records have some 100 MB
_MOST_CHECKS = 64  # how often the bytes after a broken record are read to find whole records in them


class JournalWriter:
    """Appends records to a new journal, a file that must not exist yet. ``num_bytes`` have been written.

    Raises:
        OSError: The file cannot be created or written.
    """

    def __init__(self, path: Path) -> None:
        self.num_bytes = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._write(MAGIC)

    def append(self, record: Record) -> None:
        """Write one record. It is in the file when this returns."""
        body = pickle.dumps(encode(record), protocol=4)
        self._write(_HEAD.pack(len(body), zlib.crc32(body)) + body)

    def close(self) -> None:
        """Close the file. No record can follow."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        self.num_bytes += len(data)
        while view:
            view = view[os.write(self._file, view) :]


_MOST_OF_A_KIND = 40


def damaged(path: Path, cause: str) -> RunDirectoryError:
    """The error for a recording file that no longer holds what was written."""
    return RunDirectoryError(f"the recording is damaged: {path} {cause}", "nothing was written; profile the job again")


class JournalReader:
    """Iterates over a journal's records, from where an earlier reader left it.

    A rank that is killed during a write leaves an incomplete record at the end of the file. A broken record with whole
    records after it was once written correctly, so the file is damaged.

    Attributes:
        truncated: Whether the file ended in the middle of a record. Known after iterating.
        position: Where the last whole record ended.
        unknown: Of records that no kind reads, such as those of an extra that is not here, how many by their kinds.
    """

    def __init__(self, path: Path, kinds: Mapping[str, type[Record]], start: int = 0) -> None:
        self._path = path
        self._kinds = kinds
        self.truncated = False
        self.position = start
        self.unknown: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Record]:
        with self._open() as file:
            # What is written from now on is left for the next reader: its last record may be half there.
            size = os.fstat(file.fileno()).st_size
            file.seek(self.position)
            magic = MAGIC if self.position else file.read(min(len(MAGIC), size))
            if magic != MAGIC:
                if MAGIC.startswith(magic):
                    self.truncated = True
                    return
                raise damaged(self._path, "is not a journal of fakedist")
            self.position = self.position or len(MAGIC)
            while head := file.read(min(_HEAD.size, size - self.position)):
                start = self.position + len(head)
                length, crc = _HEAD.unpack(head) if len(head) == _HEAD.size else (-1, 0)
                body = file.read(length) if 0 < length <= min(size - start, _MOST_OF_A_TAIL) else b""
                if not body or zlib.crc32(body) != crc:
                    if size - start > _MOST_OF_A_TAIL or _has_record(os.pread(file.fileno(), size - start, start)):
                        raise damaged(self._path, f"is broken at byte {self.position:,}, and more records follow")
                    self.truncated = True
                    return
                self.position = start + length
                if (record := self._record(body)) is not None:
                    yield record

    def _open(self) -> IO[bytes]:
        try:
            return open_file(self._path)
        except UnreadableError as error:
            raise damaged(self._path, f"cannot be read: {error}") from None

    def _record(self, body: bytes) -> Record | None:
        try:
            plain = load_builtins(io.BytesIO(body), len(body))
        except ForeignCodeError as error:
            raise RunDirectoryError(
                f"{self._path} cannot be read: {error}, and a journal holds only numbers and text",
                "it was not written by fakedist: do not trust this directory",
            ) from None
        except UnreadableError as error:  # its checksum is right, so the cause is not a cut-off run
            raise damaged(self._path, f"is not a journal of fakedist: {error}") from error
        if not isinstance(plain, dict) or "kind" not in plain:
            raise damaged(self._path, "is not a journal of fakedist")
        kind = str(plain["kind"])[:_MOST_OF_A_KIND]
        if kind not in self._kinds and self._kinds is RECORDS:  # a tape is read whole, or not at all
            self.unknown[kind] += 1
            return None
        try:
            return decode(plain, self._kinds)
        except (TypeError, ValueError) as error:
            raise damaged(self._path, f"has a record {kind!r} that is not fakedist's: {error}") from error


def _has_record(data: bytes) -> bool:
    """Return whether a whole record begins anywhere in the bytes after a broken one."""
    view = memoryview(data)
    at = data.find(_PICKLE)
    num_checked = 0
    while at >= 0 and num_checked <= _MOST_CHECKS * len(data):
        if at >= _HEAD.size:
            length, crc = _HEAD.unpack_from(data, at - _HEAD.size)
            if len(_PICKLE) < length <= len(data) - at:
                num_checked += length
                if zlib.crc32(view[at : at + length]) == crc:
                    return True
        at = data.find(_PICKLE, at + 1)
    return at >= 0  # made to look like records all over: no cut-off record does


def read_journal(path: Path, kinds: Mapping[str, type[Record]] = RECORDS) -> JournalReader:
    """The records of a journal. A cut-off tail is left out, and the reader's ``truncated`` is then true.

    Raises:
        RunDirectoryError: While iterating: the file is not a journal, is damaged, or holds anything but its records.
    """
    return JournalReader(path, kinds)
