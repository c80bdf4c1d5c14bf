"""Reads the ranges and the GPU activity from a report. Times are in nanoseconds from the report's origin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fakedist.analysis.nsys.database import Database
from fakedist.analysis.traces.intervals import Ints
from fakedist.analysis.traces.range_meanings import IGNORED, TAILS, Meaning, meaning, without_numbers
from fakedist.analysis.traces.step_trace import Activity, Ranges

#: The lowest 24 bits of globalTid are the thread, the bits above are the process. globalPid has no thread bits set.
THREAD_BITS = 24
#: ENUM_NSYS_EVENT_TYPE, with the same numbers in every version since 2022.4.
_PUSH_POP, _START_END, _DOMAIN = 59, 60, 75
_IDS = (("domainId", 0), ("textId", -1))
_NO_TEXT = -2
_DEVICE_COLUMNS = ("start", "end", "streamId", "correlationId", "globalPid", "graphNodeId", "deviceId")
_SHAPE = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
#: cupti_activity.h, CUpti_ActivityMemcpyKind.
_COPIES = ("?", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")


def read_ranges(database: Database, process: int) -> Ranges:
    """The ranges of a process. Marks and ranges without a meaning are left out.

    Args:
        database: The report.
        process: The upper bits of the process's ``globalTid``.
    """
    known = database.columns("NVTX_EVENTS")
    if not known:
        none = np.zeros(0, np.int64)
        return Ranges([], none.astype(np.int32), none, none, none, none)
    chosen = [f'"{name}"' if name in known else "NULL" for name in ("start", "end", "globalTid")]
    chosen += [f"IFNULL({name if name in known else 'NULL'}, {nothing})" for name, nothing in _IDS]
    where = f"WHERE globalTid >> {THREAD_BITS} = {process}"
    where += f" AND eventType IN ({_PUSH_POP}, {_START_END})" if "eventType" in known else ""
    name, sequence = _without_numbers("text" if "text" in known else "NULL")
    texts = _Texts(database)
    parts: list[npt.NDArray[np.int64]] = []
    ignored = 0
    for rows in database.chunks(f"SELECT {', '.join(chosen)}, {sequence}, {name} FROM NVTX_EVENTS {where}"):
        *numbers, read = zip(*rows, strict=True)
        start, end, thread, domain, text_id, number = map(_numbers, numbers)
        said = texts.by_name(domain, read)
        unread = said == _NO_TEXT
        said[unread], number[unread] = texts.by_id(domain[unread], text_id[unread])
        says = said >= 0
        ignored += len(rows) - int(says.sum())
        parts.append(np.stack([start, end, thread, said, number])[:, says])
    found = np.concatenate(parts, axis=1) if parts else np.zeros((5, 0), np.int64)
    begin, until, threads, meanings, sequences = found
    until[until < begin] = max(int(until.max(initial=0)), int(begin.max(initial=0)))  # never ended
    return Ranges(texts.meanings, meanings.astype(np.int32), threads, begin, until, sequences, ignored)


def _without_numbers(text: str) -> tuple[str, str]:
    """SQL for a text without the parts that make each unique, and for autograd's number: ``names.without_numbers``.

    For ten million texts this takes a tenth of the time of Python.
    """
    name = "".join(
        f"WHEN instr({text}, '{tail}') THEN substr({text}, 1, instr({text}, '{tail}') - 1) " for tail in TAILS
    )
    place = f"instr({text}, '{TAILS[0]}')"
    # CAST reads the digits at the beginning of a text.
    number = f"CASE WHEN {place} THEN CAST(substr({text}, {place} + {len(TAILS[0])}) AS INTEGER) ELSE -1 END"
    return f"CASE {name}ELSE {text} END", number


def _numbers(values: tuple[int | None, ...]) -> npt.NDArray[np.int64]:
    try:
        return np.array(values, np.int64)
    except TypeError:  # a range without an end
        return np.array([-1 if value is None else value for value in values], np.int64)


Key = TypeVar("Key")
Value = TypeVar("Value")


class _Known(dict[Key, Value]):
    """A cache that computes missing values."""

    def __init__(self, understand: Callable[[Key], Value]) -> None:
        self._understand = understand

    def __missing__(self, key: Key) -> Value:
        found = self[key] = self._understand(key)
        return found


class _Texts:
    """Maps rows of NVTX_EVENTS to rows of meanings. Each text is interpreted once.

    Attributes:
        meanings: The meanings of texts.
    """

    def __init__(self, database: Database) -> None:
        columns = database.columns("NVTX_EVENTS")
        self.meanings: list[Meaning] = []
        self._names: _Known[int, _Known[str | None, int]] = _Known(
            lambda domain: _Known(lambda text: self._understand(text, domain))
        )
        self._ids: _Known[tuple[int, int], tuple[int, int]] = _Known(lambda key: self._understand_id(*key))
        self._strings: dict[int, str] = {}
        if "textId" in columns:
            wanted = database.rows("SELECT DISTINCT textId FROM NVTX_EVENTS WHERE textId IS NOT NULL")
            self._strings = database.strings(np.array([number for (number,) in wanted], np.int64))
        self._domains: dict[int, str] = {}
        if {"eventType", "domainId"} <= columns:
            text, text_id = ("text" if "text" in columns else "NULL"), ("textId" if self._strings else "NULL")
            query = f"SELECT domainId, {text}, {text_id} FROM NVTX_EVENTS WHERE eventType = {_DOMAIN}"
            self._domains = {
                domain: str(name or self._strings.get(number, "")) for domain, name, number in database.rows(query)
            }

    def by_name(self, domain: npt.NDArray[np.int64], names: Sequence[str | None]) -> npt.NDArray[np.int64]:
        """Rows of meanings; -1 for a text without a meaning, _NO_TEXT without a text."""
        domains = np.unique(domain).tolist()
        if len(domains) == 1:
            return np.array(list(map(self._names[domains[0]].__getitem__, names)), np.int64)
        return np.array([self._names[of][name] for of, name in zip(domain.tolist(), names, strict=True)], np.int64)

    def by_id(self, domain: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of meanings and autograd's numbers, for texts in StringIds."""
        found = [self._ids[key] for key in zip(domain.tolist(), ids.tolist(), strict=True)]
        return np.array(found, np.int64).reshape(-1, 2).T

    def _understand_id(self, domain: int, text_id: int) -> tuple[int, int]:
        text, number = without_numbers(self._strings.get(text_id, ""))
        return self._names[domain][text], number

    def _understand(self, text: str | None, domain: int) -> int:
        if not isinstance(text, str):  # SQLite lets any column hold anything
            return _NO_TEXT
        said = meaning(text, self._domains.get(domain, ""))
        if said.kind == IGNORED:
            return -1
        self.meanings.append(said)
        return len(self.meanings) - 1


def read_activity(database: Database) -> Activity:
    """Activity on the GPU, in order of start."""
    names: dict[str, int] = {}
    shapes: dict[tuple[str, str], int] = {("", ""): 0}
    parts = [
        _kernels(database, names, shapes),
        _memory(database, "CUPTI_ACTIVITY_KIND_MEMCPY", names),
        _memory(database, "CUPTI_ACTIVITY_KIND_MEMSET", names),
        _graphs(database, names),
    ]
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in (*_DEVICE_COLUMNS, "bytes")}
    order = np.argsort(columns["start"], kind="stable")
    name, shape, is_copy, is_graph = (
        np.concatenate([getattr(part, each) for part in parts])[order]
        for each in ("name", "shape", "is_copy", "is_graph")
    )
    sorted_columns = {each: column[order] for each, column in columns.items()}
    return Activity(sorted_columns, name, shape, is_copy, is_graph, list(names), list(shapes))


def _part(columns: dict[str, Ints], name: Ints, shape: Ints | None = None) -> Activity:
    none = np.zeros(len(name), np.int64)
    no = none.astype(bool)
    return Activity(columns, name, none if shape is None else shape, no, no.copy())


def _kernels(database: Database, names: dict[str, int], shapes: dict[tuple[str, str], int]) -> Activity:
    table = "CUPTI_ACTIVITY_KIND_KERNEL"
    known = database.columns(table)
    # The demangled name distinguishes elementwise kernels; the short name does not.
    named = next((name for name in ("demangledName", "name", "mangledName", "shortName") if name in known), "shortName")
    columns = database.integers(table, (*_DEVICE_COLUMNS, named, *_SHAPE))
    name = columns.pop(named)
    texts = database.strings(np.unique(name))
    distinct, place = np.unique(name, return_inverse=True)
    numbers = [names.setdefault(texts.get(int(each), "?"), len(names)) for each in distinct]
    grids, which = np.unique(np.stack([columns.pop(side) for side in _SHAPE]), axis=1, return_inverse=True)
    found = [shapes.setdefault((_sides(grid[:3]), _sides(grid[3:])), len(shapes)) for grid in grids.T.tolist()]
    columns["bytes"] = np.full(len(name), -1, np.int64)
    return _part(columns, np.array(numbers, np.int64)[place], np.array(found, np.int64)[which.ravel()])


def _sides(sides: list[int]) -> str:
    return "" if min(sides) < 0 else ",".join(map(str, sides))


def _memory(database: Database, table: str, names: dict[str, int]) -> Activity:
    is_copy = table.endswith("MEMCPY")
    columns = database.integers(table, (*_DEVICE_COLUMNS, "bytes", *(("copyKind",) if is_copy else ())))
    kind = columns.pop("copyKind") if is_copy else np.zeros(len(columns["start"]), np.int64)
    distinct, place = np.unique(kind, return_inverse=True)
    copies = [f"Memcpy {_COPIES[each] if 0 < each < len(_COPIES) else each}" for each in distinct]
    texts = copies if is_copy else ["Memset"] * len(distinct)
    numbers = [names.setdefault(text, len(names)) for text in texts]
    part = _part(columns, np.array(numbers, np.int64)[place])
    part.is_copy[:] = True
    # A copy within the GPU's memory reads and writes it.
    columns["bytes"] = np.where((kind == 8) & (columns["bytes"] > 0), 2 * columns["bytes"], columns["bytes"])
    return part


def _graphs(database: Database, names: dict[str, int]) -> Activity:
    """CUDA graphs of which nsys traced only the launch (``--cuda-graph-trace=graph``, its default)."""
    columns = database.integers("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", (*_DEVICE_COLUMNS, "bytes"))
    number = names.setdefault("CUDA graph", len(names)) if len(columns["start"]) else 0
    part = _part(columns, np.full(len(columns["start"]), number, np.int64))
    part.is_graph[:] = True
    return part
