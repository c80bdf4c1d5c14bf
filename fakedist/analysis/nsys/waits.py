"""Reads what streams and the host wait for: the synchronisations of a report, and the events that were recorded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fakedist.analysis.nsys.activity import THREAD_BITS
from fakedist.analysis.nsys.database import Database
from fakedist.analysis.traces.intervals import Ints
from fakedist.analysis.traces.lookup import find_rows, taken
from fakedist.analysis.traces.step_trace import HOST_WAITS, HOST_WAITS_FOR_DEVICE, STREAM_WAITS, Waits

_SYNCHRONISATIONS, _EVENTS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
#: cupti_activity.h, CUpti_ActivitySynchronizationType: what each is in a table of launches.
_TYPES = {1: HOST_WAITS, 2: STREAM_WAITS, 3: HOST_WAITS, 4: HOST_WAITS_FOR_DEVICE}
_WITH_EVENT = (1, 2)


def read_waits(database: Database, process: int, step: tuple[int, int]) -> Waits | None:
    """The waits of a step; None if the report does not tell where events were recorded (``--cuda-event-trace``).

    Args:
        database: The report.
        process: The upper bits of the process's ``globalPid``.
        step: When the step began and ended.
    """
    columns = ("start", "end", "streamId", "correlationId", "globalPid", "syncType", "eventId")
    wanted = ("streamId", "correlationId", "globalPid", "eventId")
    if not set(wanted) <= database.columns(_EVENTS) or not set(columns) <= database.columns(_SYNCHRONISATIONS):
        return None
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
    found = {
        "what": np.array([_TYPES[each] for each in waits["syncType"].tolist()], np.int64),
        "stream": np.where(of_event, -1, waits["streamId"]),
        "recorded_on": taken(records["streamId"], row),
        "record": taken(records["correlationId"], row),
        "start": waits["start"],
        "end": waits["end"],
    }
    return Waits.of(found, dict(zip(records["correlationId"].tolist(), at.tolist(), strict=True)))


def _last_before(records: dict[str, Ints], event: Ints, correlation: Ints) -> Ints:
    """For each wait, the last record of its event that the host made before it; -1 without one."""
    order = np.lexsort((records["correlationId"], records["eventId"]))
    keys = (records["eventId"][order] << 32) | records["correlationId"][order]
    place = np.searchsorted(keys, (np.maximum(event, 0) << 32) | correlation) - 1
    found = np.where(place >= 0, order[np.maximum(place, 0)], -1) if len(order) else np.full(len(event), -1, np.int64)
    known: Ints = np.where(taken(records["eventId"], found) == event, found, -1)
    return known


def _of_process(columns: dict[str, Ints], process: int) -> dict[str, Ints]:
    return _where(columns, columns["globalPid"] >> THREAD_BITS == process)


def _where(columns: dict[str, Ints], mask: npt.NDArray[np.bool_]) -> dict[str, Ints]:
    return {name: column[mask] for name, column in columns.items()}
