"""What is read of a report: ranges, launches, and what the GPU did. Times in nanoseconds from the report's zero."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fakedist.analysis.nsys.database import Database
from fakedist.analysis.timed.events import Activity, Ranges
from fakedist.analysis.timed.intervals import Ints
from fakedist.analysis.timed.names import IGNORED, Meaning, meaning, without_numbers

#: globalTid holds the process above its lowest 24 bits, which are the thread's; globalPid has none of those.
THREAD_BITS = 24
#: ENUM_NSYS_EVENT_TYPE; the same numbers in every version from 2022.4 on.
_PUSH_POP, _START_END, _DOMAIN = 59, 60, 75
_DEVICE_COLUMNS = ("start", "end", "streamId", "correlationId", "globalPid", "graphNodeId", "deviceId")
_SHAPE = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
#: cupti_activity.h, CUpti_ActivityMemcpyKind.
_COPIES = ("?", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")


def read_ranges(database: Database, process: int) -> Ranges:
    """The ranges of a process that say anything; marks, and ranges of no meaning, are left out.

    Args:
        database: The report.
        process: The upper bits of its ``globalTid``.
    """
    known = database.columns("NVTX_EVENTS")
    meanings: list[Meaning] = []
    if not known:
        none = np.zeros(0, np.int64)
        return Ranges(meanings, none.astype(np.int32), none, none, none, none)
    wanted = ("start", "end", "globalTid", "textId", "domainId", "text")
    chosen = ", ".join(f'"{name}"' if name in known else "NULL" for name in wanted)
    where = f"WHERE globalTid >> {THREAD_BITS} = {process}"
    where += f" AND eventType IN ({_PUSH_POP}, {_START_END})" if "eventType" in known else ""
    texts = _Texts(database, meanings)
    parts: list[npt.NDArray[np.int64]] = []
    ignored = 0
    for rows in database.chunks(f"SELECT {chosen} FROM NVTX_EVENTS {where}"):
        start, end, thread, text_id, domain, text = zip(*rows, strict=True)
        read = [texts.read(*each) for each in zip(text_id, domain, text, strict=True)]
        part = np.empty((5, len(rows)), np.int64)
        part[0], part[1], part[2] = _numbers(start), _numbers(end), _numbers(thread)
        part[3:] = np.array(read, np.int64).T
        says = part[3] >= 0
        ignored += len(rows) - int(says.sum())
        parts.append(part[:, says])
    found = np.concatenate(parts, axis=1) if parts else np.zeros((5, 0), np.int64)
    begin, until, threads, said, sequence = found
    until[until < begin] = max(int(until.max(initial=0)), int(begin.max(initial=0)))  # never ended
    return Ranges(meanings, said.astype(np.int32), threads, begin, until, sequence, ignored)


def _numbers(values: tuple[int | None, ...]) -> npt.NDArray[np.int64]:
    try:
        return np.array(values, np.int64)
    except TypeError:  # a range without an end
        return np.array([-1 if value is None else value for value in values], np.int64)


class _Texts:
    """Numbers of meanings by what rows of NVTX_EVENTS hold; every text is understood once."""

    def __init__(self, database: Database, meanings: list[Meaning]) -> None:
        columns = database.columns("NVTX_EVENTS")
        self._meanings = meanings
        self._known: dict[tuple[str, int], int] = {}
        self._by_id: dict[tuple[int, int], tuple[int, int]] = {}
        self._strings: dict[int, str] = {}
        if "textId" in columns:
            wanted = database.rows("SELECT DISTINCT textId FROM NVTX_EVENTS WHERE textId IS NOT NULL")
            self._strings = database.strings(np.array([number for (number,) in wanted], np.int64))
        self._domains: dict[int, str] = {}
        if {"eventType", "domainId"} <= columns:
            query = f"SELECT domainId, text, textId FROM NVTX_EVENTS WHERE eventType = {_DOMAIN}"
            for domain, text, text_id in database.rows(query.replace("textId", "textId" if self._strings else "NULL")):
                self._domains[domain] = text or self._strings.get(text_id, "")

    def read(self, text_id: int | None, domain: int | None, text: str | None) -> tuple[int, int]:
        """Row of the meaning, -1 if there is none, and autograd's sequence number."""
        if text is None:
            if text_id is None:
                return -1, -1
            key = (text_id, domain or 0)
            found = self._by_id.get(key)
            if found is None:
                found = self._by_id[key] = self._understand(self._strings.get(text_id, ""), domain or 0)
            return found
        return self._understand(text, domain or 0)

    def _understand(self, text: str, domain: int) -> tuple[int, int]:
        text, sequence = without_numbers(text)
        number = self._known.get((text, domain))
        if number is None:
            said = meaning(text, self._domains.get(domain, ""))
            number = -1 if said.kind == IGNORED else len(self._meanings)
            if number >= 0:
                self._meanings.append(said)
            self._known[text, domain] = number
        return number, sequence


def read_activity(database: Database) -> Activity:
    """What the GPU did, in the order of its start."""
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
    # The demangled name says which elementwise kernel it is; the short one does not.
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
    # What the GPU's memory gives and takes.
    columns["bytes"] = np.where((kind == 8) & (columns["bytes"] > 0), 2 * columns["bytes"], columns["bytes"])
    return part


def _graphs(database: Database, names: dict[str, int]) -> Activity:
    """Graphs of which nsys traced only the launch (``--cuda-graph-trace=graph``, its default)."""
    columns = database.integers("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", (*_DEVICE_COLUMNS, "bytes"))
    number = names.setdefault("CUDA graph", len(names)) if len(columns["start"]) else 0
    part = _part(columns, np.full(len(columns["start"]), number, np.int64))
    part.is_graph[:] = True
    return part
