"""Reads files that anyone may have written: regular files only, a bounded number of bytes, builtins and nothing else.

It waits for no pipe, reads no device, runs no file's code and takes no more memory than a file's size justifies.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import stat
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

#: The most bytes of a JSON file that is read as a whole. The largest run.json that was seen has 0.2 MB.
MOST_JSON_BYTES = 64 << 20
#: The most bytes of a TOML file.
MOST_TOML_BYTES = 4 << 20
#: Memory that unpickled values may take for each byte of their pickle. A snapshot takes 8.
_MEMORY_FOR_A_BYTE = 32
_MEMORY_AT_LEAST = 1 << 30
_TOO_MUCH_MEMORY = "it asks for more memory than a file of its size may need"
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class UnreadableError(Exception):
    """A file does not hold what it should. The message goes after "cannot be read:"."""


class ForeignCodeError(UnreadableError):
    """A pickle names something to import and call, such as ``os.system``. Nothing was run."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it wants to load {name}")
        self.name = name


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file, or a link to one, for reading.

    Raises:
        UnreadableError: It is a pipe, a device, a socket or a directory.
        OSError: It cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError as error:  # a null character in the path
        raise UnreadableError(f"it is not a path: {error}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UnreadableError(f"it is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a file.

    Raises:
        UnreadableError: It is not a regular file, or has more than ``most`` bytes.
        OSError: It cannot be read.
    """
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UnreadableError(f"it has more than {most:,} bytes")
    return content


def read_json(path: Path, most: int = MOST_JSON_BYTES) -> object:
    """The value of a JSON file.

    Raises:
        UnreadableError: It is not a regular file, has more than ``most`` bytes, or is not JSON that can be loaded.
        OSError: It cannot be read.
    """
    return load_json(read_bytes(path, most))


def load_json(content: bytes) -> object:
    """The value of JSON; UnreadableError if it is not JSON, is nested too deeply, or takes more memory than it may."""
    try:
        with _bounded_memory(_MEMORY_AT_LEAST + _MEMORY_FOR_A_BYTE * len(content)):
            values: object = json.loads(content.decode("utf-8-sig"))
    except ValueError as error:  # json's, the codec's, and Python's for a number of thousands of digits
        raise UnreadableError(str(error).partition(";")[0]) from None
    except RecursionError:
        raise UnreadableError("its values are nested too deeply") from None
    except MemoryError:
        raise UnreadableError(_TOO_MUCH_MEMORY) from None
    return values


def read_toml(path: Path) -> tuple[dict[str, object], str]:
    """The values of a TOML file, and its text.

    Raises:
        UnreadableError: It is not a regular file, is too large or is not TOML.
        OSError: It cannot be read.
    """
    try:
        text = read_bytes(path, MOST_TOML_BYTES).decode()
        return tomllib.loads(text), text
    except ValueError as error:  # tomllib's, the codec's, and Python's for a number of thousands of digits
        raise UnreadableError(str(error).partition(";")[0]) from None
    except RecursionError:
        raise UnreadableError("its values are nested too deeply") from None


class _BuiltinsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[dict[object, object]]:
        if (module, name) == ("collections", "OrderedDict"):  # of torch.cuda.memory_stats()
            return dict
        raise ForeignCodeError(f"{module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside the file")


class _Watched(io.BytesIO):
    """Bytes that an unpickler loads in pieces of 128 KiB: before each, ``between`` is called."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.between: Callable[[], None] | None = None
        self._content = memoryview(content)

    def peek(self, size: int) -> memoryview:
        if self.between is not None:
            self.between()
        return self._content[self.tell() :][:size]


def load_builtins(content: bytes, watch: Callable[[Callable[[], list[object]]], None] | None = None) -> object:
    """Unpickle numbers, texts, lists and dicts. The memory that loading may take is bounded by the bytes.

    ``watch`` is called again and again meanwhile, with a function that returns the objects memoized by then, the last
    first. It may change these, and raise an UnreadableError.

    Raises:
        ForeignCodeError: It names something to import.
        UnreadableError: It is not a pickle, or its values take more memory than a pickle of this size may need.
    """
    file = _Watched(content)
    unpickler = _BuiltinsOnly(file)
    if watch is not None:
        file.between = partial(watch, partial(gc.get_referents, unpickler))
    try:
        with _bounded_memory(_MEMORY_AT_LEAST + _MEMORY_FOR_A_BYTE * len(content)):
            loaded: object = unpickler.load()
    except UnreadableError:
        raise
    except MemoryError:
        raise UnreadableError(_TOO_MUCH_MEMORY) from None
    except Exception as error:  # a damaged pickle can raise almost anything
        raise UnreadableError(str(error) or type(error).__name__) from None
    finally:
        file.between = None  # else file and unpickler keep each other, and all that it memoized
    return loaded


@contextmanager
def _bounded_memory(most: int) -> Iterator[None]:
    """Let this process take at most so many bytes more: a pickle of 14 bytes can ask for an index of 32 GB.

    There is no bound once torch is loaded, because its threads may need memory at the same time.
    """
    if "torch" in sys.modules:
        yield
        return
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):  # no Linux: nothing bounds it here
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = pages * resource.getpagesize() + most
    is_bounded = before != resource.RLIM_INFINITY and before <= bound
    is_refused = hard != resource.RLIM_INFINITY and hard < bound
    if is_bounded or is_refused:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
