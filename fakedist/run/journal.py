"""The journal: what the rank's process writes while it runs, readable wherever it was cut off.

The file starts with ``FDJ1``. Each record is its length and CRC-32 (both uint32, little endian) and a pickle (protocol
4) of a dict of builtins; columns are ``bytes`` of ``array.array``. The reader refuses any pickle that names a global.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fakedist.errors import RunDirectoryError

MAGIC = b"FDJ1"
_HEAD = struct.Struct("<II")


class JournalWriter:
    """Appends records to a new journal.

    Args:
        path: The file; it must not exist.

    Raises:
        OSError: It cannot be created or written.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._write(MAGIC)

    def append(self, record: dict[str, Any]) -> None:
        """Write one record; it is in the file when this returns."""
        body = pickle.dumps(record, protocol=4)
        self._write(_HEAD.pack(len(body), zlib.crc32(body)) + body)

    def close(self) -> None:
        """No more records."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]


class _BuiltinsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise RunDirectoryError(
            f"the journal wants to load {module}.{name}; a journal holds only numbers and text",
            "it was not written by fakedist: do not trust this directory",
        )


class JournalReader:
    """Iterates over a journal's records.

    Attributes:
        truncated: Whether the file ended in the middle of a record; known after iterating.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.truncated = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                if MAGIC.startswith(magic):
                    self.truncated = True
                    return
                raise RunDirectoryError(f"{self._path} is not a journal of fakedist")
            while head := file.read(_HEAD.size):
                length, crc = _HEAD.unpack(head) if len(head) == _HEAD.size else (-1, 0)
                body = file.read(length) if length >= 0 else b""
                if length < 0 or len(body) < length or zlib.crc32(body) != crc:
                    self.truncated = True
                    return
                yield self._record(body)

    def _record(self, body: bytes) -> dict[str, Any]:
        try:
            record = _BuiltinsOnly(io.BytesIO(body)).load()
        except RunDirectoryError:
            raise
        except Exception as error:  # whole by its checksum, so nothing that a cut-off run leaves
            raise RunDirectoryError(f"{self._path} is not a journal of fakedist: {error}") from error
        if not isinstance(record, dict) or "kind" not in record:
            raise RunDirectoryError(f"{self._path} is not a journal of fakedist")
        return record


def read_journal(path: Path) -> JournalReader:
    """The records of a journal; a cut-off tail is left out and told by ``truncated``.

    Raises:
        RunDirectoryError: While iterating, if the file is no journal or holds anything but builtins.
    """
    return JournalReader(path)
