"""The words and types of which tables of a run directory are declared: :mod:`fakedist.rundir.table_rows` has them.

A table is a class: its docstring says what a row is, and its annotated fields are the columns, in order. A field's type
is the column's. ``Annotated`` adds, in any order: the meaning, a text, in which ``{words}`` stands for the words; the
only words that the column may hold, a tuple; the table of which its numbers are rows (:class:`RowOf`); marks
(:class:`ColumnMark`). Where a record's class declares a table, its ``Attributes:`` are the meanings.
"""

from __future__ import annotations

import enum
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, TypeVar

from fakedist.docstrings import docstring_of

SCHEMA_VERSION = 1

#: What a block of memory is for; where several hold, the first does.
CATEGORIES = (
    "parameter",
    "optimizer_state",
    "gradient",
    "workspace",
    "activation",
    "communication",
    "temporary",
    "other",
)
#: In the journal alone: this rank's part of parameters that were gathered; a parameter unless made for the gather.
SHARD, SHARD_CODE = "shard", 255
#: In the journal alone: what has the shapes of a model's parameters; a copy of them unless it was made as zeros.
ALIKE, ALIKE_CODE = "alike", 254
#: Records have their places, so a new one goes to the end.
PHASES = ("init", "forward", "backward", "optimizer", "other", "generation")
#: Phases of the host's memory: an evaluation, or a checkpoint that is written or read, comes before the others.
HOST_PHASES = (*PHASES, "evaluation", "save", "load")
#: In the journal: what happened to the host's memory. See ``gpu/fast_path/host.cpp``.
HOST_CHANGES = ("pageable", "pinned", "registered", "moved")
#: Kinds of the host's memory: tensors, pinned memory, and shared memory in /dev/shm.
HOST_KINDS = ("pageable", "pinned", "shared")
#: What a kernel does.
FAMILIES = ("gemm", "attention", "norm", "elementwise", "copy", "optimizer", "communication", "other")
#: Families of compute. Communication is not one of them.
COMPUTE_FAMILIES = tuple(name for name in FAMILIES if name != "communication")
#: What a kernel's time is spent for: its phase, but what backward computes again stands alone.
KINDS = ("generation", "forward", "recompute", "backward", "optimizer", "other")
#: What limits an estimated kernel; empty where that is not known.
BOUNDS = ("", "compute", "memory", "launch")
#: The moments of the table `segments`: the reserved peak when it was reached, and the allocated peak.
MOMENTS = ("peak_reserved", "peak_allocated")
#: Parts of what is in use of a device: two of the rank's own process, and another process as a whole.
USE_PARTS = ("allocator", "KV cache", "outside", "all")
#: What the free memory of a segment is; where several hold, the first does.
SEGMENT_STATES = {
    "unknown": "before the history, at an unknown address",
    "private": "in a private pool (of a CUDA graph or a torch.cuda.MemPool)",
    "empty": "nothing in it is allocated",
    "expandable": "expandable, and something in it is allocated",
    "small": "of the small pool (blocks up to 1 MiB), and something in it is allocated",
    "pinned": "less than half of it is allocated",
    "used": "half of it or more is allocated",
}
#: The allocator's own names, c10/cuda/CUDACachingAllocator.h TraceEntry::Action.
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
    "annotate",
)


@dataclass(frozen=True)
class Stored:
    """A Parquet type other than that of the field's Python type."""

    type: str


Int32 = Annotated[int, Stored("int32")]
UInt64 = Annotated[int, Stored("uint64")]


class ColumnMark(enum.Enum):
    """A fact about a column: texts that are lists of ranks, or empty; a column that tables of earlier versions lack,
    which then reads as NaN or as empty texts.
    """

    RANKS = enum.auto()
    NEWER = enum.auto()


@dataclass(frozen=True)
class RowOf:
    """A column's numbers, or those of its lists, are rows of a table. What is read is checked.

    Attributes:
        table: The table's name.
        least: The least of the numbers: -1 where it stands for none.
        may_end: Whether it may also be the number of rows there, for what never ended.
        is_earlier: Whether it is a row before its own.
    """

    table: str
    least: int = 0
    may_end: bool = False
    is_earlier: bool = False


@dataclass(frozen=True)
class Each:
    """A field that stands for a column for each word; ``{}`` in ``name``, and in the meaning, is the word."""

    name: str
    words: Sequence[str]


_TYPES = {str: "string", int: "int64", float: "double", float | None: "double", bool: "bool"}
#: What pandas calls them, where its name is another.
_DTYPES = {"string": "object", "double": "float64", "list<int32>": "object", "list<int64>": "object"}
_Fact = TypeVar("_Fact")


@dataclass(frozen=True)
class Column:
    """One column of a table: ``marks`` and ``row_of`` as :class:`ColumnMark` and :class:`RowOf` say.

    Attributes:
        name: Its name; ``_bytes`` and ``_us`` are its unit.
        type: Its Parquet type.
        meaning: One sentence.
        words: The only texts that it may hold; empty if it may hold any.
    """

    name: str
    type: str
    meaning: str
    words: tuple[str, ...] = ()
    row_of: RowOf | None = None
    marks: tuple[ColumnMark, ...] = ()


@dataclass(frozen=True)
class Table:
    """One file ``tables/<name>.parquet``.

    Attributes:
        declared: The class that declares it.
        is_newer: Whether runs of earlier versions lack it; it then has no rows.
    """

    declared: type
    is_newer: bool = False

    @property
    def row(self) -> str:
        """The meaning of a row, and the order of the rows."""
        return " ".join(docstring_of(self.declared).partition("\n\n")[0].split())

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns, in order."""
        kinds = [kind for kind in reversed(self.declared.__mro__) if kind.__module__ != "builtins"]
        meanings = {name: text for kind in kinds for name, text in attributes(kind).items()}
        hints = typing.get_type_hints(self.declared, include_extras=True)
        return tuple(column for name, hint in hints.items() for column in _columns(name, hint, meanings.get(name, "")))

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [column.name for column in self.columns]

    @property
    def dtypes(self) -> dict[str, str]:
        """The columns' types in pandas."""
        return {column.name: _DTYPES.get(column.type, column.type) for column in self.columns}


def _columns(name: str, hint: object, meaning: str) -> list[Column]:
    """The columns of a field: one, or with :class:`Each` one for each word. ``meaning`` is a record's."""
    words = next(_facts(hint, tuple), ())
    *_, text = (meaning.replace("``", "`").replace("None", "NaN"), *_facts(hint, str))
    text = text.replace("{words}", ", ".join(words))
    marks = tuple(_facts(hint, ColumnMark))
    column = Column(name, _type(hint), text, words, next(_facts(hint, RowOf), None), marks)
    each = next(_facts(hint, Each), None)
    if each is None:
        return [column]
    return [replace(column, name=each.name.format(word), meaning=text.format(word)) for word in each.words]


def _facts(hint: object, kind: type[_Fact]) -> Iterator[_Fact]:
    return (fact for fact in getattr(hint, "__metadata__", ()) if isinstance(fact, kind))


def _type(hint: typing.Any) -> str:
    if typing.get_origin(hint) is Annotated:
        stored = next(_facts(hint, Stored), None)
        return _type(hint.__origin__) if stored is None else stored.type
    if typing.get_origin(hint) is list:
        return f"list<{_type(typing.get_args(hint)[0])}>"
    return _TYPES[hint]


def attributes(kind: type) -> dict[str, str]:
    """The meaning of each attribute of a class, on one line, from its docstring."""
    text = docstring_of(kind).partition("Attributes:\n")[2]
    meanings: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line.startswith(" "):  # the next section, such as "Raises:"
            break
        if start := re.match(r"    (\w+): (.*)", line):
            last, meaning = start[1], start[2]
            meanings[last] = meaning
        elif meanings and line.strip():
            meanings[last] += " " + line.strip()
    return meanings
