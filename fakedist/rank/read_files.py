"""Lists the Python files that the script and its forks run or open, for a sweep to see which of them changed.

An audit hook sees them: modules also from bytecode caches, extensions, and what ``exec`` and ``runpy`` run. A line is
written when a file or a name is first seen, so a killed rank leaves its list, too.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import CodeType

from fakedist.patch import imported_within
from fakedist.rundir.sources import FILE_LINE, NAME_LINE, STARTED_LINE

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_PACKAGES = ("/site-packages/", "/dist-packages/")  # their versions tell them apart
#: Directories of what compilers generated, by name and by the variables that move them.
_CACHES = ("/torchinductor_", "/.triton/", "/.cache/")
_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "FAKEDIST_CACHE")
_SUFFIXES = (".py", ".so")
_EVENTS = frozenset(("open", "exec", "import", "subprocess.Popen"))
#: Imported by the first process that multiprocessing starts anew.
_SPAWNING = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")


class ListedSources:
    """The list, which is being written."""

    def __init__(self, file: int) -> None:
        self.is_on = True
        self._file, self._seen = file, set[str]()

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """Take one of ``_EVENTS`` (:func:`sys.addaudithook`). It must not raise."""
        if not self.is_on:
            return
        if event == "import":
            self._path(arguments[1])  # of an extension
        elif event == "subprocess.Popen":
            if "python" in os.path.basename(str(arguments[0])):
                self._write(STARTED_LINE)
        else:
            first = arguments[0]
            self._path(first.co_filename if isinstance(first, CodeType) else first)

    def imported(self) -> None:
        """List what is imported now: a fork server imported modules before this process began."""
        for name, module in list(sys.modules.items()):
            self.wanted(name)
            path = getattr(module, "__file__", None)
            if isinstance(path, str) and os.path.isabs(path):  # torch has modules without one
                self._path(path)

    def wanted(self, name: str) -> bool:
        """Take the name of a module that is to be imported."""
        if self.is_on:
            self._write(NAME_LINE + name.rpartition(".")[2])
            if name in _SPAWNING:
                self._write(STARTED_LINE)
        return False  # its import is left alone

    def _path(self, path: object) -> None:
        if not isinstance(path, str) or "<" in path or not path.endswith(_SUFFIXES):
            return
        if _is_of_others(path):  # most are: links are followed for the rest alone
            return
        whole = os.path.realpath(path)  # as sys.path has the script's directory
        if not _is_of_others(whole):
            self._write(FILE_LINE + whole)

    def _write(self, line: str) -> None:
        if line not in self._seen and "\n" not in line:
            self._seen.add(line)
            with suppress(OSError):  # the script may close files that it did not open
                os.write(self._file, os.fsencode(line + "\n"))


def _is_of_others(path: str) -> bool:
    caches = [os.environ[name] for name in _CACHE_VARIABLES if os.environ.get(name)]
    return path.startswith((_OURS, _LIBRARY, *caches)) or any(part in path for part in (*_PACKAGES, *_CACHES))


@contextmanager
def listed_sources(path: Path) -> Iterator[ListedSources]:
    """List the sources in a file until the context exits."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    sources = ListedSources(file)

    def audit(event: str, arguments: tuple[object, ...], ours: frozenset[str] = _EVENTS) -> None:
        # Each id() is an event, too, and there are thousands in a step. When the interpreter ends, globals are None.
        if event in ours:
            sources.audit(event, arguments)

    sys.addaudithook(audit)
    try:
        with imported_within(sources.wanted, lambda module: nullcontext()):
            yield sources
    finally:
        sources.is_on = False
        os.close(file)
