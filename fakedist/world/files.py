"""Files that the script writes: those that ranks share, and checkpoints of tensors without values.

Ranks run one after the other. If all ranks write into a directory that rank 0 then renames, it is gone before the next
rank begins, which waits or fails far from the cause. So a rank's tape lists what it renamed or removed, and a later
rank's last message names the one it looked for, found in the error and in the variables of its frames.

Large tensors on the virtual GPU hold no values and read as zeros. A 70B model's would fill a disk, so zeros become
holes in the file. ``torch.save`` (also under torch.distributed.checkpoint) and safetensors
(:mod:`fakedist.rank.frameworks.safetensors`) write through this module. The file reads back the same.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import io
import os
import stat
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from mmap import mmap
from pathlib import Path
from types import FrameType
from typing import IO

import torch
from torch.utils._pytree import tree_leaves

from fakedist.errors import chain_of
from fakedist.frames import is_the_scripts
from fakedist.patch import patched, present
from fakedist.rundir import notes
from fakedist.rundir.notes import Note
from fakedist.rundir.tape import Lost, MovedFile
from fakedist.units import format_bytes

_RENAMES, _REMOVALS = ("rename", "replace"), ("remove", "unlink", "rmdir")
#: Caches of Python and of compilers, whose files come and go.
_CACHES = ("__pycache__", "torchinductor", ".triton")
_MAX_VALUES = 200
_LIBRARY = tuple(f"{sysconfig.get_path('stdlib')}/{name}" for name in ("pathlib", "shutil", "os.py", "tempfile"))


@contextmanager
def watched_files(write: Callable[[MovedFile], None]) -> Iterator[None]:
    """Call ``write`` with what the script renames and removes."""

    def watch(name: str) -> Callable[..., object]:
        original = getattr(os, name)
        words = ("src", "dst") if name in _RENAMES else ("path",)

        @functools.wraps(original)
        def watched(*args: object, **kwargs: object) -> object:
            path, target = [*args, *(kwargs.get(word) for word in words[len(args) :]), None][:2]
            before = _absolute(path, kwargs)
            result = original(*args, **kwargs)
            if before:
                write(MovedFile(before, _absolute(target, kwargs), _line()))
            return result

        return watched

    with ExitStack() as stack:
        for name in (*_RENAMES, *_REMOVALS):
            original, watched = getattr(os, name), watch(name)
            for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
                if original in known:
                    known.add(watched)
                    stack.callback(known.discard, watched)
            stack.enter_context(patched(os, name, watched))
        yield


def _line() -> str:
    """The script's line that made the call, above the frames of ``pathlib`` and ``shutil``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_LIBRARY) or not is_the_scripts(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _absolute(path: object, how: Mapping[str, object]) -> str:
    is_below = any(how.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"))
    if is_below or not isinstance(path, (str, bytes, os.PathLike)):
        return ""
    whole = os.path.abspath(os.fsdecode(path))
    return "" if any(cache in whole for cache in _CACHES) else whole


def find_lost(
    error: BaseException, moved: Sequence[tuple[int, MovedFile]], directories: Mapping[int, str]
) -> Lost | None:
    """A path that a failed script missed because ranks run one after the other; ``moved`` has each file's rank."""
    named = [path for path in _named(error) if not os.path.exists(path)]
    seen = [*named, *(path for path in _in_frames(error) if not os.path.exists(path))]
    gone = {file.path: (rank, file) for rank, file in moved}
    for path in seen:
        for candidate in (path, *map(str, Path(path).parents)):
            if candidate in gone:
                return _taken_away(*gone[candidate])
    for path in seen:
        for rank, directory in directories.items():
            there = os.path.join(directory, os.path.relpath(path))
            if directory != os.getcwd() and os.path.exists(there):
                problem = f"is missing: rank {rank} ran in {directory} and has {there}"
                return Lost(f"{path}, which this rank looked for, {problem}", False)
    may_be_written = 0 not in directories
    problem = "is missing; in the real job another rank may write it"
    if named:
        return Lost(f"{named[0]}, which this rank looked for, {problem}", may_be_written)
    waited = [path for path in seen if os.path.isdir(os.path.dirname(path)) and not _is_own_temporary(path)]
    if waited and any(
        isinstance(link, TimeoutError) or type(link).__name__ == "Terminated" for link in chain_of(error)
    ):
        return Lost(f"{waited[0]}, for which this rank seems to wait, {problem}", may_be_written)
    return None


def _is_own_temporary(path: str) -> bool:
    """Only this process knows the name of a compiler's file between its stages."""
    return os.path.dirname(path) == tempfile.gettempdir() and os.path.basename(path).startswith(
        tempfile.gettempprefix()
    )


def _taken_away(rank: int, moved: MovedFile) -> Lost:
    how = f"renamed it to {moved.to}" if moved.to else "removed it"
    at = f" at {moved.line}" if moved.line else ""
    return Lost(
        f"{moved.path}, which this rank looked for, is missing: rank {rank}, which ran earlier, {how}{at}. "
        "Ranks run one after the other, so this rank finds only the files that earlier ranks left at their end",
        False,
    )


def _named(error: BaseException) -> Iterator[str]:
    for link in chain_of(error):
        if isinstance(link, FileNotFoundError) and isinstance(link.filename, (str, bytes)):
            name = os.fsdecode(link.filename)
            if os.sep in name or not any(
                frame.f_code.co_name == "_execute_child" for frame, _ in traceback.walk_tb(link.__traceback__)
            ):  # else a program that PATH has not
                yield os.path.abspath(name)


def _in_frames(error: BaseException) -> Iterator[str]:
    for link in chain_of(error):
        for frame, _ in reversed(list(traceback.walk_tb(link.__traceback__))):
            if is_the_scripts(frame.f_code.co_filename):
                yield from _in_frame(frame)


def _in_frame(frame: FrameType) -> Iterator[str]:
    values = list(frame.f_locals.values())[:_MAX_VALUES]
    if frame.f_code.co_name != "<module>":
        values += list(getattr(frame.f_locals.get("self"), "__dict__", {}).values())[:_MAX_VALUES]
    for value in values:
        if isinstance(value, Path) or (type(value) is str and _may_be_path(value)):
            yield os.path.abspath(value)


def _may_be_path(text: str) -> bool:
    return os.sep in text and "://" not in text and len(text) < 1000 and text.isprintable()


_PIECE = 1 << 20
_ZEROS = bytes(_PIECE)
#: A smaller save is not announced, and safetensors writes it itself.
LARGE_BYTES = 64 << 20
#: Attribute in which a transparent wrapper keeps its file: tempfile's, fsspec's, torch.distributed.checkpoint's.
_WRAPPERS = {"_TemporaryFileWrapper": "file", "LocalFileOpener": "f", "NoCloseWriter": "raw"}
_PLAIN_FILES = (io.BufferedWriter, io.BufferedRandom, io.FileIO)


class Saved:
    """Counts zeros saved as holes, which the virtual GPU turns on; also those of processes that fork from this one."""

    def __init__(self) -> None:
        self.is_on = False
        self._has_announced = False
        # Shared memory, each process at a place by its number: Megatron Core writes a checkpoint in several at once.
        self._holes = memoryview(mmap(-1, 4096)).cast("q")

    @property
    def holes_bytes(self) -> int:
        """Their sum, of all processes."""
        return sum(self._holes)

    def add_hole(self, num_bytes: int) -> None:
        """Count a hole."""
        self._holes[os.getpid() % len(self._holes)] += num_bytes

    def announce(self, bytes_: int) -> None:
        """Print the size of the first large checkpoint before it is written."""
        if self.is_on and bytes_ >= LARGE_BYTES and not self._has_announced:
            self._has_announced = True
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
    """A regular file that skips pieces of zeros beyond its end; everything else is the file's own."""

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
            saved.add_hole(len(piece))
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
        saved.announce(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
        return save(obj, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patched(module, "_open_zipfile_writer_file", open_file))
        stack.enter_context(patched(module, "_open_zipfile_writer_buffer", open_buffer))
        stack.enter_context(patched(module, "_save", save_all))
        stack.callback(setattr, saved, "is_on", False)
        saved.is_on = True
        yield


def _plain_file(buffer: object) -> IO[bytes] | None:
    if name := _WRAPPERS.get(type(buffer).__name__):
        buffer = getattr(buffer, name, None)
    if not isinstance(buffer, _PLAIN_FILES) or not buffer.seekable():
        return None
    is_regular = stat.S_ISREG(os.fstat(buffer.fileno()).st_mode)
    return buffer if is_regular and not (fcntl.fcntl(buffer.fileno(), fcntl.F_GETFL) & os.O_APPEND) else None
