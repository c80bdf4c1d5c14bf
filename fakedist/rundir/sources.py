"""Names that both halves know: the script's code and what does not belong to it, and operations of made-up values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: A file that Inductor generated for a compiled graph: "c" and 51 base-32 digits of a SHA-256.
INDUCTOR_FILE = re.compile(r"\bc[a-z2-7]{51}\.py\b")

#: The operation of made-up times between two events, in the table ``invented``.
EVENT_TIME = "cuda.Event.elapsed_time"

#: The operation of a row without values: at its line, a router picked experts by made-up values.
ROUTED = "router"
#: Files of Python whose functions stand between the script and torch. The line is their caller's.
WRAPPERS = ("/typing_extensions.py", "/warnings.py", "/_py_warnings.py", "/contextlib.py", "/functools.py")

#: Methods by which tensor subclasses pass an operation on. Its line is their caller's.
PASSES_ON = frozenset({"__torch_function__", "__torch_dispatch__"})

#: How a line of a run's list of sources begins: a file, the last part of a module's name, and "a Python was started".
FILE_LINE, NAME_LINE, STARTED_LINE = "file ", "name ", "started"


@dataclass(frozen=True, slots=True)
class RunSources:
    """The Python files outside of installed packages that a run read.

    Attributes:
        files: Their absolute paths.
        names: The last parts of the names of all modules that it imported, or tried to import.
        is_whole: Whether no other Python was started, whose files are not known.
    """

    files: frozenset[str]
    names: frozenset[str]
    is_whole: bool


def read_sources(path: Path) -> RunSources | None:
    """Read a run's list; None if it has none."""
    try:
        lines = path.read_text("utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    files = frozenset(line.removeprefix(FILE_LINE) for line in lines if line.startswith(FILE_LINE))
    names = frozenset(line.removeprefix(NAME_LINE) for line in lines if line.startswith(NAME_LINE))
    return RunSources(files, names, is_whole=STARTED_LINE not in lines)
