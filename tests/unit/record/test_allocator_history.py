from __future__ import annotations

from typing import Any

import pytest

from fakedist.record import device_memory
from fakedist.record.device_memory import AllocatorHistory
from fakedist.rundir.encoding import Record
from fakedist.rundir.memory_records import EventsRecord
from fakedist.rundir.rows import PoolRow

MIB = 1 << 20


def mapped(address: int, **more: object) -> dict[str, object]:
    return {"action": "segment_map", "addr": address, "size": MIB, "stream": 7, "time_us": 0, **more}


def held(address: int, size: int, pool: tuple[int, int], device: int = 0) -> dict[str, object]:
    return {"device": device, "address": address, "total_size": size, "segment_pool_id": pool}


def drained(monkeypatch: pytest.MonkeyPatch, trace: list[dict[str, Any]], *segments: dict[str, object]) -> EventsRecord:
    snapshot = {"device_traces": [trace], "segments": list(segments)}
    monkeypatch.setattr(device_memory, "take_snapshot", lambda: snapshot)
    monkeypatch.setattr(device_memory.torch.cuda.memory, "_record_memory_history", lambda **options: None)
    records: list[Record] = []
    history = AllocatorHistory(records.append, dict)
    history.start()
    history.drain()
    (record,) = records
    assert isinstance(record, EventsRecord)
    return record


def test_events_without_a_pool_have_that_of_the_segment_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = (MIB, 4 * MIB, 5 * MIB, 6 * MIB, 9 * MIB)
    segments = held(9 * MIB, MIB, (2, 0)), held(4 * MIB, 2 * MIB, (1, 0)), held(MIB, MIB, (0, 0))
    record = drained(monkeypatch, [mapped(address) for address in addresses], *segments)
    assert record.pools == [PoolRow(1, 1, 0), PoolRow(2, 1, 0), PoolRow(4, 2, 0)]


def test_another_devices_segments_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drained(monkeypatch, [mapped(MIB)], held(MIB, MIB, (1, 0), device=1)).pools == []


def test_the_pool_that_an_event_names_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    record = drained(monkeypatch, [mapped(MIB, pool_id=(3, 1))], held(MIB, MIB, (1, 0)))
    assert record.pools == [PoolRow(0, 3, 1)]
