"""Checkpoints of tensors without values: their zeros become holes in the file, which take no disk space.

Large tensors on the virtual GPU hold no values and read as zeros. The parameters of a 70B model would fill a disk with
them. ``torch.save`` (and with it torch.distributed.checkpoint) and safetensors
(:mod:`fakedist.rank.frameworks.safetensors`) write through this module. What is read back is the same.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

import torch
from torch.utils._pytree import tree_leaves

from fakedist.patch import patched, present
from fakedist.rundir import notes
from fakedist.rundir.notes import Note
from fakedist.units import format_bytes

_PIECE = 1 << 20
_ZEROS = bytes(_PIECE)
#: A smaller save is not announced, and safetensors writes it itself.
LARGE_BYTES = 64 << 20
#: Attribute in which a transparent wrapper keeps its file: tempfile's, fsspec's, torch.distributed.checkpoint's.
_WRAPPERS = {"_TemporaryFileWrapper": "file", "LocalFileOpener": "f", "NoCloseWriter": "raw"}
_PLAIN_FILES = (io.BufferedWriter, io.BufferedRandom, io.FileIO)


class Saved:
    """Counts what was saved as holes.

    Attributes:
        is_on: Whether to save holes; true on the virtual GPU.
        holes_bytes: Bytes of zeros left unwritten so far.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.holes_bytes = 0
        self._has_told = False

    def tell(self, bytes_: int) -> None:
        """Print the size of the first large checkpoint before it is written."""
        if self.is_on and bytes_ >= LARGE_BYTES and not self._has_told:
            self._has_told = True
            text = (
                f"fakedist: the script saves {format_bytes(bytes_)} of tensors. Those without values become holes: "
                "ls shows the file's full size, du the disk space that it takes"
            )
            sys.stderr.write(f"{text}\n")

    def notes(self) -> list[Note]:
        """Notes for the report."""
        return [notes.saved_with_holes(self.holes_bytes)] if self.holes_bytes else []


saved = Saved()


class SparseFile:
    """A file that skips pieces of zeros beyond its end; everything else is the file's own.

    Args:
        file: A regular file, open for writing.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write bytes, skipping pieces that are all zeros."""
        view = memoryview(data).cast("B")
        for at in range(0, len(view), _PIECE):
            self._write(bytes(view[at : at + _PIECE]))
        return len(view)

    def write_from(self, address: int, length: int) -> None:
        """Write memory of this process, starting at an address."""
        for at in range(0, length, _PIECE):
            self._write(ctypes.string_at(address + at, min(_PIECE, length - at)))

    def end(self) -> None:
        """Extend the file to its full length if it ends in a hole."""
        self._file.flush()
        if os.fstat(self._file.fileno()).st_size < (end := self._file.tell()):
            os.ftruncate(self._file.fileno(), end)

    def _write(self, piece: bytes) -> None:
        if piece != _ZEROS or self._file.tell() < os.fstat(self._file.fileno()).st_size:
            self._file.write(piece)
        else:
            saved.holes_bytes += len(piece)
            self._file.seek(len(piece), os.SEEK_CUR)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


@contextmanager
def sparse_saving() -> Iterator[None]:
    """Make ``torch.save`` write holes, and the adapter of safetensors."""
    module = torch.serialization
    to_file, to_buffer = (present(module, f"_open_zipfile_writer_{where}") for where in ("file", "buffer"))
    save = present(module, "_save")

    class ToFile(to_buffer):  # type: ignore[misc, valid-type]
        """A zip file opened by name, written through Python."""

        def __init__(self, name: str) -> None:
            self._opened = open(name, "wb")  # noqa: SIM115
            super().__init__(SparseFile(self._opened))

        def __exit__(self, *args: object) -> None:
            with self._opened:
                super().__exit__(*args)

    def open_file(name: str) -> object:
        is_plain = os.path.isfile(name) or (not os.path.exists(name) and os.path.isdir(os.path.dirname(name) or "."))
        return ToFile(name) if is_plain else to_file(name)

    def open_buffer(buffer: object) -> object:
        return to_buffer(buffer if (file := _plain_file(buffer)) is None else SparseFile(file))

    def save_all(obj: object, *args: object, **kwargs: object) -> object:
        tensors = {id(leaf): leaf for leaf in tree_leaves(obj) if isinstance(leaf, torch.Tensor)}
        saved.tell(sum(each.numel() * each.element_size() for each in tensors.values()))
        return save(obj, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patched(module, "_open_zipfile_writer_file", open_file))
        stack.enter_context(patched(module, "_open_zipfile_writer_buffer", open_buffer))
        stack.enter_context(patched(module, "_save", save_all))
        stack.callback(setattr, saved, "is_on", False)
        saved.is_on = True
        yield


def _plain_file(buffer: object) -> IO[bytes] | None:
    """The regular file that a file object writes to unchanged; None if there is none, or if it only appends."""
    if name := _WRAPPERS.get(type(buffer).__name__):
        buffer = getattr(buffer, name, None)
    if not isinstance(buffer, _PLAIN_FILES) or not buffer.seekable():
        return None
    is_regular = stat.S_ISREG(os.fstat(buffer.fileno()).st_mode)
    appends = fcntl.fcntl(buffer.fileno(), fcntl.F_GETFL) & os.O_APPEND
    return buffer if is_regular and not appends else None
