"""Requests beyond the GPU's memory: granted unless the script handles the error, and the first is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from fakedist.record.beyond_capacity import beyond_capacity
from fakedist.record.position import Position
from fakedist.rundir.encoding import Record
from fakedist.rundir.memory_records import BeyondCapacityRecord
from tests.support.on_device import MadeUpCuda

GIB = 1 << 30
Decide = Callable[[int, int, int, int], bool]
SET, GET, BEGIN, END = (
    f"_cuda_{name}" for name in ("setMemoryFraction", "getMemoryFraction", "beginAllocateToPool", "endAllocateToPool")
)


class Driver:
    """The virtual GPUs' memory, which asks when a test does."""

    def __init__(self) -> None:
        self.decide: Decide | None = None
        self.limits: list[tuple[int, int]] = []
        self.asks_once = 0

    def go_beyond(self, decide: Decide | None) -> None:
        self.decide = decide

    def limit(self, device: int, bytes_: int) -> None:
        self.limits.append((device, bytes_))

    def asked_once(self, more: int) -> None:
        self.asks_once += more

    def request(self, bytes_: int, thread: int | None = None) -> bool:
        assert self.decide is not None
        return self.decide(1, bytes_, 80 * GIB, threading.get_ident() if thread is None else thread)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The allocator's settings. Its own functions note their calls there, and a device has 80 GiB."""
    MadeUpCuda(monkeypatch)
    settings: dict[str, object] = {}
    calls: list[tuple[object, ...]] = []

    def noted(name: str) -> Callable[..., float]:
        def call(*args: object) -> float:
            calls.append((name, *args))
            return 0.25

        return call

    for name in (SET, GET, BEGIN, END):
        monkeypatch.setattr(torch._C, name, noted(name))
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda pool: {"allocator_settings": settings})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    settings["calls"] = calls
    return settings


@pytest.fixture
def records() -> list[Record]:
    return []


@pytest.fixture
def driver(cuda: dict[str, object], records: list[Record]) -> Iterator[Driver]:
    driver, position = Driver(), Position()
    position.cells.op = 5
    with beyond_capacity(driver, records.append, position):
        yield driver
    assert driver.decide is None


def test_requests_that_nothing_handles_are_granted_and_the_first_is_recorded(
    driver: Driver, records: list[Record]
) -> None:
    assert [driver.request(2 * GIB), driver.request(3 * GIB)] == [True, True]
    (record,) = records
    assert isinstance(record, BeyondCapacityRecord)
    assert (record.device, record.requested_bytes, record.limit_bytes, record.op) == (1, 2 * GIB, 80 * GIB, 4)
    assert record.stack[0].startswith(__file__)


def test_a_request_whose_error_the_script_handles_is_refused_and_the_next_is_the_first(
    driver: Driver, records: list[Record]
) -> None:
    try:
        assert driver.request(2 * GIB) is False
    except torch.OutOfMemoryError:
        raise AssertionError from None
    assert records == []
    assert driver.request(3 * GIB, thread=0) is True  # a thread that runs no Python
    assert [record.requested_bytes for record in records if isinstance(record, BeyondCapacityRecord)] == [3 * GIB]
    assert records[0] == BeyondCapacityRecord(1, 3 * GIB, 80 * GIB, 4, [])


def test_the_driver_enforces_fractions_of_memory_until_the_end(cuda: dict[str, object]) -> None:
    driver = Driver()
    with beyond_capacity(driver, list[Record]().append, Position()):
        assert torch._C._cuda_getMemoryFraction(1) == 0.25
        torch._C._cuda_setMemoryFraction(0.5, 1)
        assert torch._C._cuda_getMemoryFraction(1) == 0.5
        assert driver.limits == [(1, 40 * GIB)]
        cuda["garbage_collection_threshold"] = 0.8  # by which the allocator itself needs to know the fraction
        torch._C._cuda_setMemoryFraction(0.75, 0)
    assert cuda["calls"] == [(GET, 1), (SET, 0.75, 0)]
    assert driver.limits == [(1, 40 * GIB), (1, 0)]


def test_the_driver_knows_while_allocations_go_to_a_private_pool(cuda: dict[str, object], driver: Driver) -> None:
    torch._C._cuda_beginAllocateToPool(0, (0, 1))
    assert driver.asks_once == 1
    torch._C._cuda_endAllocateToPool(0, (0, 1))
    assert driver.asks_once == 0
    assert cuda["calls"] == [(BEGIN, 0, (0, 1)), (END, 0, (0, 1))]
