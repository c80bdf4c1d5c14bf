"""Reads an Nsight Systems report: one process on one GPU, or one step of it.

Reads an Nsight Systems report exported to SQLite: ranges, GPU activity, and what streams and the host wait for.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fakedist.analysis.recording import read_recording
from fakedist.bounded import UnreadableError, open_file
from fakedist.errors import ReportError
from fakedist.rundir.collector import no_collector
from fakedist.rundir.trace_records import HostRecord, KernelsRecord
from fakedist.traces.one_step import StepChoice, choose_process, find_path, one_step
from fakedist.traces.step_trace import (
    HOST_WAITS,
    HOST_WAITS_FOR_DEVICE,
    IGNORED,
    STREAM_WAITS,
    TAILS,
    Activity,
    CudaCalls,
    Ints,
    Meaning,
    ProcessTrace,
    Ranges,
    Waits,
    find_rows,
    meaning,
    taken,
    without_numbers,
)
from fakedist.traces.traced_step import ImportedStep, LayerNumbers, Tool, Trace, host_record, kernel_record

_MAGIC = b"SQLite format 3\0"
_CHUNK_ROWS = 100_000
#: SQLite's steps: a row of ten columns takes some 30, and more than 20 bytes. Queries read each table a few times.
_LEAST_STEPS, _STEPS_A_BYTE, _STEPS_A_CALL = 10_000_000, 100, 100_000
#: The most bytes of one value: the name of a kernel has thousands.
_LONGEST_VALUE = 16 << 20
_EXPORT = "nsys export --type sqlite REPORT.nsys-rep   exports it again"


class Database:
    """An export open for reading, made by any version of nsys. Errors name the path ``called``."""

    def __init__(self, called: Path, connection: sqlite3.Connection) -> None:
        self.called = called
        self._connection = connection
        names = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        self.tables = {str(name) for (name,) in names}

    def columns(self, table: str) -> set[str]:
        """Names of a table's columns; empty if the table does not exist."""
        return {str(row[1]) for row in self._connection.execute(f'PRAGMA table_info("{table}")')}

    def rows(self, query: str) -> list[tuple[Any, ...]]:  # as sqlite3 types them: a query decides
        """All rows of a short result."""
        return self._connection.execute(query).fetchall()

    def chunks(self, query: str) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of a long result, in chunks."""
        cursor = self._connection.execute(query)
        while rows := cursor.fetchmany(_CHUNK_ROWS):
            yield rows

    def integers(self, table: str, names: Sequence[str], where: str = "") -> dict[str, Ints]:
        """Integer columns; -1 if a row has no value, or the table has no such column."""
        known = self.columns(table)
        if not known:
            return {name: np.zeros(0, np.int64) for name in names}
        chosen = ", ".join(f'COALESCE("{name}", -1)' if name in known else "-1" for name in names)
        parts = [
            np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * len(names)).reshape(-1, len(names))
            for rows in self.chunks(f'SELECT {chosen} FROM "{table}" {where}')
        ]
        values = np.concatenate(parts) if parts else np.zeros((0, len(names)), np.int64)
        return {name: np.ascontiguousarray(values[:, column]) for column, name in enumerate(names)}

    def strings(self, ids: Ints) -> dict[int, str]:
        """Texts of ``StringIds``."""
        wanted = set(ids.tolist())
        texts = {}
        for rows in self.chunks("SELECT id, value FROM StringIds"):
            texts.update({number: str(value) for number, value in rows if number in wanted})
        return texts

    def pairs(self, *tables: str) -> dict[str, str]:
        """Names and values of the first of these tables that exists. Older versions use other table names."""
        for table in tables:
            if {"name", "value"} <= self.columns(table):
                return {str(name): str(value) for name, value in self.rows(f'SELECT name, value FROM "{table}"')}
        return {}


@contextmanager
def open_database(path: Path, called: Path | None = None) -> Iterator[Database]:
    """Open an export. Errors name the path ``called``: the report that it was exported from.

    Raises:
        ReportError: The file is missing, is not SQLite or not nsys's, or is incomplete. Reading can raise it too.
    """
    size = _check(path)
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        bound = _bound(connection, size)
        try:
            database = Database(called or path, connection)
            if "StringIds" not in database.tables or not database.pairs("META_DATA_EXPORT", "EXPORT_META_DATA"):
                problem = "it holds no tables" if not database.tables else "it has no StringIds or no META_DATA_EXPORT"
                raise ReportError(f"{database.called} is not a complete nsys export: {problem}", _EXPORT)
            yield database
        finally:
            connection.close()
    except (sqlite3.Error, sqlite3.Warning, UnicodeDecodeError) as error:
        cause = f"reading it does not end: {bound.most:,} steps" if bound.is_over else error
        raise ReportError(f"{called or path} cannot be read: {cause}", _EXPORT) from error


class _Bound:
    """Counts SQLite's steps, and stops a query beyond any table of this size: a view can be endless."""

    def __init__(self, most: int) -> None:
        self.most, self.is_over = most, False
        self._num_calls = 0

    def __call__(self) -> bool:
        self._num_calls += 1
        self.is_over = self._num_calls * _STEPS_A_CALL > self.most
        return self.is_over


def _bound(connection: sqlite3.Connection, size: int) -> _Bound:
    bound = _Bound(_LEAST_STEPS + _STEPS_A_BYTE * size)
    connection.set_progress_handler(bound, _STEPS_A_CALL)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    return bound


def _check(path: Path) -> int:
    """Check what SQLite itself would not notice, or would report in its own words. Returns the file's bytes."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(100)
    except UnreadableError as error:
        raise ReportError(f"{path} is not an Nsight report: {error}", "fakedist nsys REPORT.nsys-rep") from None
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}", "fakedist nsys REPORT.nsys-rep") from error
    if not size:
        raise ReportError(f"{path} is empty", _EXPORT)
    if not head.startswith(_MAGIC):
        raise ReportError(
            f"{path} is not an SQLite file", "give a file that `nsys export --type sqlite` or `nsys profile` wrote"
        )
    page_bytes = int.from_bytes(head[16:18], "big")  # sqlite.org/fileformat.html: 1 means 65,536
    pages = int.from_bytes(head[28:32], "big")
    if size < pages * (65536 if page_bytes == 1 else page_bytes):
        raise ReportError(f"{path} is cut off: the export or a copy of it was interrupted", _EXPORT)
    if any(path.with_name(path.name + ending).exists() for ending in ("-journal", "-wal")):
        raise ReportError(f"{path} is still being written, or its export was interrupted", _EXPORT)
    return size


#: The lowest 24 bits of globalTid are the thread, the bits above are the process. globalPid has no thread bits set.
THREAD_BITS = 24
_THREAD = (1 << THREAD_BITS) - 1
#: ENUM_NSYS_EVENT_TYPE, with the same numbers in every version since 2022.4.
_PUSH_POP, _START_END, _DOMAIN = 59, 60, 75
_IDS = (("domainId", 0), ("textId", -1))
_NO_TEXT = -2
_DEVICE_COLUMNS = ("start", "end", "streamId", "correlationId", "globalPid", "graphNodeId", "deviceId")
_SHAPE = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
#: cupti_activity.h, CUpti_ActivityMemcpyKind.
_COPIES = ("?", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")


def read_ranges(database: Database, process: int) -> Ranges:
    """The ranges with a meaning of a process, which is the upper bits of its ``globalTid``."""
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
    columns = np.concatenate(parts, axis=1) if parts else np.zeros((5, 0), np.int64)
    begin, until, threads, meanings, sequences = columns
    until[until < begin] = max(int(until.max(initial=0)), int(begin.max(initial=0)))  # never ended
    return Ranges(texts.meanings, meanings.astype(np.int32), threads, begin, until, sequences, ignored)


def _without_numbers(text: str) -> tuple[str, str]:
    """SQL for ``names.without_numbers`` and autograd's number: a tenth of Python's time for ten million texts."""
    name = "".join(
        f"WHEN instr({text}, '{tail}') THEN substr({text}, 1, instr({text}, '{tail}') - 1) " for tail in TAILS
    )
    position = f"instr({text}, '{TAILS[0]}')"
    # CAST reads the digits at the beginning of a text.
    number = f"CASE WHEN {position} THEN CAST(substr({text}, {position} + {len(TAILS[0])}) AS INTEGER) ELSE -1 END"
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
        value = self[key] = self._understand(key)
        return value


class _Texts:
    """Maps rows of NVTX_EVENTS to rows of meanings. Each text is interpreted once."""

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
        rows = [self._ids[key] for key in zip(domain.tolist(), ids.tolist(), strict=True)]
        return np.array(rows, np.int64).reshape(-1, 2).T

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
    columns["end"] = np.maximum(columns["end"], columns["start"])  # what had not ended when tracing did
    order = np.argsort(columns["start"], kind="stable")
    name, shape, is_copy, is_graph = (
        np.concatenate([getattr(part, attribute) for part in parts])[order]
        for attribute in ("name", "shape", "is_copy", "is_graph")
    )
    sorted_columns = {key: column[order] for key, column in columns.items()}
    return Activity(sorted_columns, name, shape, is_copy, is_graph, list(names), list(shapes))


def read_calls(database: Database, process: int) -> CudaCalls:
    """The CUDA calls of a process, which is the upper bits of its ``globalTid``."""
    columns = ("globalTid", "start", "end", "correlationId", "nameId")
    calls = database.integers("CUPTI_ACTIVITY_KIND_RUNTIME", columns)
    calls = _where(calls, calls["globalTid"] >> THREAD_BITS == process)
    named, name = np.unique(calls.pop("nameId"), return_inverse=True)
    texts = database.strings(named)
    return CudaCalls(
        thread=calls["globalTid"],
        start=calls["start"],
        end=calls["end"],
        correlation=calls["correlationId"],
        name=name,
        names=[texts.get(number, "?").partition("_v")[0] for number in named.tolist()],  # cudaLaunchKernel_v7000
        threads={tid: f"thread {tid & _THREAD}" for tid in np.unique(calls["globalTid"]).tolist()},
    )


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
    distinct, which_name = np.unique(name, return_inverse=True)
    numbers = [names.setdefault(texts.get(int(number), "?"), len(names)) for number in distinct]
    grids, which = np.unique(np.stack([columns.pop(side) for side in _SHAPE]), axis=1, return_inverse=True)
    shape_numbers = [shapes.setdefault((_sides(grid[:3]), _sides(grid[3:])), len(shapes)) for grid in grids.T.tolist()]
    columns["bytes"] = np.full(len(name), -1, np.int64)
    return _part(columns, np.array(numbers, np.int64)[which_name], np.array(shape_numbers, np.int64)[which.ravel()])


def _sides(sides: list[int]) -> str:
    return "" if min(sides) < 0 else ",".join(map(str, sides))


def _memory(database: Database, table: str, names: dict[str, int]) -> Activity:
    is_copy = table.endswith("MEMCPY")
    columns = database.integers(table, (*_DEVICE_COLUMNS, "bytes", *(("copyKind",) if is_copy else ())))
    kind = columns.pop("copyKind") if is_copy else np.zeros(len(columns["start"]), np.int64)
    distinct, which = np.unique(kind, return_inverse=True)
    copies = [f"Memcpy {_COPIES[number] if 0 < number < len(_COPIES) else number}" for number in distinct]
    texts = copies if is_copy else ["Memset"] * len(distinct)
    numbers = [names.setdefault(text, len(names)) for text in texts]
    part = _part(columns, np.array(numbers, np.int64)[which])
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


_SYNCHRONISATIONS, _EVENTS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
#: cupti_activity.h, CUpti_ActivitySynchronizationType: what each is in a table of launches.
_TYPES = {1: HOST_WAITS, 2: STREAM_WAITS, 3: HOST_WAITS, 4: HOST_WAITS_FOR_DEVICE}
_WITH_EVENT = (1, 2)


def read_waits(database: Database, process: int, step: tuple[int, int]) -> tuple[dict[str, Ints], dict[int, int]]:
    """The waits of a process (``globalPid``'s upper bits) in a step, and when events were recorded, by correlation.

    Both are empty without ``--cuda-event-trace``.
    """
    columns = ("start", "end", "streamId", "correlationId", "globalPid", "syncType", "eventId")
    wanted = ("streamId", "correlationId", "globalPid", "eventId")
    if not set(wanted) <= database.columns(_EVENTS) or not set(columns) <= database.columns(_SYNCHRONISATIONS):
        return {}, {}
    waits = _of_process(database.integers(_SYNCHRONISATIONS, columns), process)
    waits = _where(
        waits, (waits["start"] >= step[0]) & (waits["start"] <= step[1]) & np.isin(waits["syncType"], [*_TYPES])
    )
    records = _of_process(database.integers(_EVENTS, wanted), process)
    calls = database.integers("CUPTI_ACTIVITY_KIND_RUNTIME", ("correlationId", "globalTid", "start"))
    calls = _where(calls, calls["globalTid"] >> THREAD_BITS == process)
    row = _last_before(records, waits["eventId"], waits["correlationId"])
    row[~np.isin(waits["syncType"], _WITH_EVENT)] = -1
    at = taken(calls["start"], find_rows(calls["correlationId"], records["correlationId"]))
    of_event = np.isin(waits["syncType"], (1, 4))  # the host waits for no stream then
    columns_of_waits = {
        "what": np.array([_TYPES[kind] for kind in waits["syncType"].tolist()], np.int64),
        "stream": np.where(of_event, -1, waits["streamId"]),
        "recorded_on": taken(records["streamId"], row),
        "record": taken(records["correlationId"], row),
        "correlation": waits["correlationId"],
        "start": waits["start"],
        "end": waits["end"],
    }
    return columns_of_waits, dict(zip(records["correlationId"].tolist(), at.tolist(), strict=True))


def _last_before(records: dict[str, Ints], event: Ints, correlation: Ints) -> Ints:
    """For each wait, the last record of its event that the host made before it; -1 without one."""
    order = np.lexsort((records["correlationId"], records["eventId"]))
    keys = (records["eventId"][order] << 32) | records["correlationId"][order]
    index = np.searchsorted(keys, (np.maximum(event, 0) << 32) | correlation) - 1
    row = np.where(index >= 0, order[np.maximum(index, 0)], -1) if len(order) else np.full(len(event), -1, np.int64)
    known: Ints = np.where(taken(records["eventId"], row) == event, row, -1)
    return known


def _of_process(columns: dict[str, Ints], process: int) -> dict[str, Ints]:
    return _where(columns, columns["globalPid"] >> THREAD_BITS == process)


def _where(columns: dict[str, Ints], mask: npt.NDArray[np.bool_]) -> dict[str, Ints]:
    return {name: column[mask] for name, column in columns.items()}


def read_trace(database: Database, choice: StepChoice) -> Trace:
    """One step of one process of a report; ReportError if it lacks kernels, the process, or the step."""
    process = read_process(database, choice)
    trace = one_step(process, choice, database.called)
    syncs, recorded = read_waits(database, process.process, trace.host)
    trace = replace(trace, syncs=syncs, waits=Waits.of(syncs, recorded) if syncs else None)
    return replace(trace, path=find_path(trace))


def gpu_name(database: Database, number: int = 0) -> str:
    """Name of a GPU of the machine, or of its first one; empty if the report does not contain it."""
    columns = database.columns("TARGET_INFO_GPU")
    if "name" not in columns:
        return ""
    order = f"ORDER BY id != {number}" if "id" in columns else ""
    rows = database.rows(f"SELECT name FROM TARGET_INFO_GPU {order} LIMIT 1")
    return str(rows[0][0]) if rows else ""


def tool_version(database: Database) -> str:
    """Version of the nsys that exported the report."""
    return database.pairs("META_DATA_EXPORT", "EXPORT_META_DATA").get("EXPORT_PRODUCT_VERSION", "")


def read_process(database: Database, choice: StepChoice = StepChoice()) -> ProcessTrace:  # noqa: B008
    """One process on one GPU, by default that with the most kernels; ReportError without kernels, or without it."""
    everything = read_activity(database)
    if not len(everything):
        raise ReportError(
            f"{database.called} has no kernels: no GPU was used, or nsys ran without --trace=cuda",
            "nsys profile --trace=cuda,nvtx ...   traces both",
        )
    by = everything.columns["globalPid"] >> THREAD_BITS
    gpus = everything.columns["deviceId"]
    _, key = np.unique(np.stack([by, gpus]), axis=1, return_inverse=True)
    key = key.ravel()

    def described(number: int) -> tuple[int, int, str]:
        row = int(np.flatnonzero(key == number)[0])
        device = int(gpus[row])
        return int(by[row]) & _PROCESS, device, gpu_name(database, device)

    chosen, processes = choose_process(everything, key, described, database.called, choice)
    is_own = key == chosen
    whole = int(by[is_own][0])
    activity = everything.where(is_own)
    calls = read_calls(database, whole)
    thread, launch = _launches(calls, activity)
    order = np.lexsort((activity.columns["start"], launch))
    activity, thread, launch = activity.where(order), thread[order], launch[order]
    made_in, made_at = _captures(database, activity, whole)
    ranges = read_ranges(database, whole).with_functions()
    return ProcessTrace(
        tool="nsys",
        gpu=described(chosen)[-1],
        ranges=ranges,
        activity=activity,
        thread=thread,
        launch=launch,
        linked=np.full(len(thread), -1, np.int64),
        made_in=made_in,
        made_at=made_at,
        inputs=np.full(len(ranges.meaning), -1, np.int64),
        tool_version=tool_version(database),
        num_elsewhere=len(everything) - len(activity),
        process=whole,
        processes=processes,
        calls=calls,
    )


#: The bits of ``globalPid`` that are the system's own number of a process.
_PROCESS = (1 << 24) - 1


def _launches(calls: CudaCalls, activity: Activity) -> tuple[Ints, Ints]:
    """For each activity, the thread and time of its launch; -1 and its own start if the launch was not traced."""
    correlation = np.where(calls.correlation > 0, calls.correlation, -1)
    asked = activity.columns["correlationId"]
    row = np.where(asked > 0, find_rows(correlation, asked), -1)
    return taken(calls.thread, row), np.where(row >= 0, taken(calls.start, row), activity.columns["start"])


def _captures(database: Database, activity: Activity, process: int) -> tuple[Ints, Ints]:
    """For nodes of CUDA graphs, the thread that captured them and when; -1 if the report does not contain it."""
    nodes = activity.columns["graphNodeId"]
    thread, time = np.full(len(nodes), -1, np.int64), np.full(len(nodes), -1, np.int64)
    table = next((name for name in ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS") if name in database.tables), "")
    if not table or not bool((nodes > 0).any()):
        return thread, time
    made = database.integers(table, ("graphNodeId", "originalGraphNodeId", "globalTid", "start"))
    mine = made["globalTid"] >> THREAD_BITS == process
    node, original, by, at = (made[name][mine] for name in ("graphNodeId", "originalGraphNodeId", "globalTid", "start"))
    captured = dict(zip(node.tolist(), zip(original.tolist(), by.tolist(), at.tolist(), strict=True), strict=True))
    for row in np.flatnonzero(nodes > 0).tolist():
        number = int(nodes[row])
        for _ in range(8):  # an instance is a clone of a graph, which may itself be a clone
            if number not in captured:
                break
            number, thread[row], time[row] = captured[number]
    return thread, time


def recorded_step(run_directory: Path, exported: Path, report: Path) -> tuple[KernelsRecord, HostRecord]:
    """The journal's records of a recorded run's timed step, from its report as SQLite (``exported``).

    Raises:
        ReportError: The report cannot be read, or has no kernels.
    """
    layers = LayerNumbers(read_recording(run_directory).layers)
    with no_collector(), open_database(exported, report) as database:
        trace = read_trace(database, StepChoice())
        return kernel_record(trace, layers, _tool(database, report.name)), host_record(trace)


def read_report(exported: Path, report: Path, choice: StepChoice) -> ImportedStep:
    """Read a report, exported as SQLite; ReportError if it cannot be read, or has no such kernels."""
    with no_collector(), open_database(exported, report) as database:
        return ImportedStep.of(report, read_trace(database, choice), _tool(database, str(report.resolve())))


def _tool(database: Database, report: str) -> Tool:
    return Tool("nsys", version=tool_version(database), report=report)
