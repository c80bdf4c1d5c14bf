"""Device memory. No test process has a GPU: what torch does when CUDA begins, and CUDA's answers, are given by hand."""

from __future__ import annotations

import os
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch

from fakedist.record.device_memory import AllocatorHistory, Beginning, nccl_record, outside_record, take_snapshot
from fakedist.record.recorder import Recorder
from fakedist.rundir.encoding import Record
from fakedist.rundir.memory_records import EventsRecord
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.records import OutsideRecord
from fakedist.rundir.rows import PoolRow

MIB = 1 << 20


def initialise() -> None:
    """As ``torch.cuda._lazy_init`` does, of what was queued in these tests."""
    for call, _ in list(torch.cuda._queued_calls)[-1:]:
        call()


def test_what_is_wanted_happens_once_when_torch_initialises_cuda() -> None:
    cuda, called = Beginning(), []
    queued = len(torch.cuda._queued_calls)
    with cuda.watching():
        cuda.then(lambda: called.append("first"))
        assert (called, cuda.is_past) == ([], False)
        initialise()
        initialise()  # an initialisation that failed is tried again
        assert (called, cuda.is_past) == (["first"], True)
        cuda.then(lambda: called.append("later"))
    assert called == ["first", "later"]
    assert len(torch.cuda._queued_calls) == queued
    assert not torch.cuda.is_initialized()


def test_nothing_happens_after_the_watch_or_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, called = Beginning(), []
    with cuda.watching():
        cuda.then(lambda: called.append("never"))
        monkeypatch.setattr(os, "getpid", lambda: -1)
        initialise()
        monkeypatch.undo()
        (begin,) = [call for call, _ in torch.cuda._queued_calls[-1:]]
    begin()
    assert called == []


@pytest.mark.parametrize("device", [None, "cpu", torch.device("meta")])
def test_an_operation_elsewhere_does_not_initialise_it(device: object, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Beginning()
    cuda.before({"device": device})
    assert not cuda.is_past
    made: list[object] = []
    monkeypatch.setattr(torch.ops.aten.empty, "memory_format", lambda size, device: made.append(device))
    for _ in range(2):
        cuda.before({"device": "cuda:1"})
    assert (made, cuda.is_past) == (["cuda:1"], True)


def test_the_recorders_own_look_ups_do_not_initialise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", fail)
    monkeypatch.setattr(torch._C, "_cuda_init", fail, raising=False)
    records: list[Record] = []
    recorder = Recorder(records.append, 2, None)
    with recorder:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        recorder.close(Ending(Outcome.FINISHED, 0))
    kinds = {record.kind for record in records}
    assert "outcome" in kinds
    assert "events" not in kinds


def mapped(address: int, **more: object) -> dict[str, object]:
    return {"action": "segment_map", "addr": address, "size": MIB, "stream": 7, "time_us": 0, **more}


def held(address: int, size: int, pool: tuple[int, int], device: int = 0) -> dict[str, object]:
    return {"device": device, "address": address, "total_size": size, "segment_pool_id": pool}


def drained(monkeypatch: pytest.MonkeyPatch, trace: list[dict[str, Any]], *segments: dict[str, object]) -> EventsRecord:
    snapshot = {"device_traces": [trace], "segments": list(segments)}
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda mempool: snapshot, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: None)
    records: list[Record] = []
    history = AllocatorHistory(records.append, dict)
    history.drain()
    assert records == []  # nothing before it begins
    history.start()
    history.drain()
    (record,) = records
    assert isinstance(record, EventsRecord)
    return record


def test_events_without_a_pool_have_that_of_the_segment_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = (MIB, 4 * MIB, 5 * MIB, 6 * MIB, 9 * MIB)
    segments = held(9 * MIB, MIB, (2, 0)), held(4 * MIB, 2 * MIB, (1, 0)), held(MIB, MIB, (0, 0))
    frame = {"filename": "train.py", "line": 7, "name": "main"}
    trace = [mapped(address) for address in addresses]
    trace[1]["frames"] = [frame]
    record = drained(monkeypatch, trace, *segments)
    assert [*memoryview(record.stack).cast("i")] == [-1, 0, -1, -1, -1]  # most have no stack
    assert record.pools == [PoolRow(1, 1, 0), PoolRow(2, 1, 0), PoolRow(4, 2, 0)]
    assert drained(monkeypatch, [mapped(MIB)], held(MIB, MIB, (1, 0), device=1)).pools == []  # another device's
    named = drained(monkeypatch, [mapped(MIB, pool_id=(3, 1))], held(MIB, MIB, (1, 0)))
    assert named.pools == [PoolRow(0, 3, 1)]


def test_used_and_reserved_bytes_of_the_device_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 100) if device == 1 else (0, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 if device == 1 else 0)
    assert outside_record(1) == OutsideRecord(1, used_bytes=30, reserved_bytes=10)

    def failed(device: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", failed)
    assert outside_record(0) is None


def test_the_environment_is_the_one_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "8")
    record = nccl_record()
    assert record.environment["NCCL_MAX_NCHANNELS"] == "8"
    assert record.version.split(".")[0] == "2"


def snapshot_is(monkeypatch: pytest.MonkeyPatch, taken: Any) -> None:
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda mempool: taken(), raising=False)


@pytest.fixture
def inductor() -> ModuleType:
    module = ModuleType("torch._inductor")
    module.codecache = "the code cache"  # type: ignore[attr-defined]
    return module


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._inductor", raising=False)
    monkeypatch.delitem(torch.__dict__, "_inductor", raising=False)


@pytest.mark.usefixtures("without_inductor")
def test_inductor_is_not_imported_for_the_names_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    # py_symbolize asks so.
    snapshot_is(monkeypatch, lambda: {"asked": hasattr(torch, "_inductor") and hasattr(torch._inductor, "codecache")})
    assert take_snapshot() == {"asked": False}
    assert "torch._inductor" not in sys.modules
    assert "_inductor" not in torch.__dict__
    monkeypatch.setitem(sys.modules, "torch._inductor", None)  # another thread is importing it
    snapshot_is(monkeypatch, lambda: {"placeholder": "_inductor" in torch.__dict__})
    assert take_snapshot() == {"placeholder": False}


@pytest.mark.usefixtures("without_inductor")
def test_another_thread_has_inductor_meanwhile(monkeypatch: pytest.MonkeyPatch, inductor: ModuleType) -> None:
    imported: list[object] = []

    def take() -> dict[str, Any]:
        monkeypatch.setitem(sys.modules, "torch._inductor", inductor)
        thread = threading.Thread(target=lambda: imported.append(torch._inductor.codecache))
        thread.start()
        thread.join()
        return {}

    snapshot_is(monkeypatch, take)
    take_snapshot()
    assert imported == ["the code cache"]


def test_inductor_names_the_frames_once_it_is_imported(monkeypatch: pytest.MonkeyPatch, inductor: ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor", inductor)
    monkeypatch.setattr(torch, "_inductor", inductor, raising=False)
    snapshot_is(monkeypatch, lambda: {"codecache": torch._inductor.codecache})
    assert take_snapshot() == {"codecache": "the code cache"}
