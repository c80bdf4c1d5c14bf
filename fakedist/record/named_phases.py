"""Phases of a script by name, from ``fakedist.phase`` or recognised, and what they used of the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from fakedist.record.memory_recording import Append
from fakedist.record.position import Position
from fakedist.record.timed_step import RangeTracer
from fakedist.rundir.encoding import Record
from fakedist.rundir.records import (
    AsleepRecord,
    EngineCacheRecord,
    EngineSleepRecord,
    EngineUseRecord,
    NamedPhaseRecord,
)


class DeviceInUse(Protocol):
    """The rank's virtual GPU, whose memory its processes share; sizes are in bytes."""

    def in_use(self) -> Sequence[int]:
        """The most since it was called before, without an engine's KV cache and with one; and what is used now behind
        the allocator's segments, outside of it, and by other processes.
        """

    def kept(self) -> tuple[dict[str, int], list[tuple[int, int]]]:
        """Memory of it that this process has in use, by kind; and segments without any, by address and size."""

    def num_changes(self) -> int:
        """How often what is in use changed so far."""

    def engine(self, *, is_awake: bool) -> None:
        """Say whether an engine of this process has its KV cache from here on."""

    def most_of_engine(self) -> tuple[int, int]:
        """The most in use without an engine's KV cache and with one, since one first had it; (0, 0): none had."""


class NamedPhases:
    """Records phases, which may lie within each other.

    Args:
        device: None without a virtual GPU.
        tracer: What is given each as a range of the timed step; None without one.
    """

    def __init__(
        self,
        append: Append,
        position: Position,
        device: DeviceInUse | None,
        tracer: RangeTracer | None = None,
    ) -> None:
        self._append, self._position, self._device, self._tracer = append, position, device, tracer
        #: The most of each that is open, without an engine's KV cache and with one.
        self._most_of_open: list[list[int]] = []
        self._cache_since = -1  # the first change with its memory; -1 without
        self._num_of_script = 0
        self._is_closed = False

    @property
    def is_named(self) -> bool:
        """Whether the script itself has named what runs now. Then nothing is recognised."""
        return self._num_of_script > 0

    @contextmanager
    def of_script(self, name: str) -> Iterator[None]:
        """Record what runs inside as a phase that the script named."""
        self._num_of_script += 1
        try:
            with self.named(name):
                yield
        finally:
            self._num_of_script -= 1

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Record what runs inside as a phase of this name, with what is in use of the device meanwhile."""
        if self._is_closed:
            yield
            return
        step, first_op = self._position.step, self._position.op
        self._in_use()
        most = [0, 0]
        self._most_of_open.append(most)
        number = None if self._tracer is None else self._tracer.range_begins(name)
        first_change = self._next_change()
        try:
            yield
        finally:
            if self._tracer is not None and number is not None:
                self._tracer.range_ended(number)
            now = self._in_use()
            self._most_of_open.pop()
            if not self._is_closed:
                ops, changes = (first_op, self._position.op), (first_change, self._next_change())
                used = (max(most), *now)
                self._append(NamedPhaseRecord(name, step, *ops, *used, self._position.step, *changes, *most))

    @contextmanager
    def engine_takes_cache(self) -> Iterator[None]:
        """Count what is in use from here on as with vLLM's KV cache, which takes its memory inside."""
        if self._device is not None:
            self._device.engine(is_awake=True)
        yield
        self._cache_since = self._next_change() - 1  # from the last change on
        self.append(EngineCacheRecord(self._cache_since, -1))  # a process that is killed says no more

    @contextmanager
    def engine_sleeps(self, how: str) -> Iterator[None]:
        """Record what an engine frees inside, and what its process keeps."""
        before = sum(self._in_use())
        yield
        self.append(EngineSleepRecord(how, before - sum(self._in_use()), self._look()))

    @contextmanager
    def engine_wakes(self) -> Iterator[None]:
        """Record that what takes memory inside no longer sleeps."""
        yield
        self._look()

    def engine_has_no_cache(self) -> None:
        """Count what is in use from here on as without vLLM's KV cache, which has given back its memory."""
        if self._device is not None:
            self._device.engine(is_awake=False)
        self._cache_ends()

    def append(self, record: Record) -> None:
        """Record a fact about an engine."""
        if not self._is_closed:
            self._append(record)

    def close(self) -> None:
        """Record no more of them."""
        if not self._is_closed and self._device is not None and any(most := self._device.most_of_engine()):
            self._append(EngineUseRecord(*most))
            self._cache_ends()
        self._is_closed = True

    def _cache_ends(self) -> None:
        if self._cache_since >= 0:
            self.append(EngineCacheRecord(self._cache_since, self._next_change()))
        self._cache_since = -1

    def _look(self) -> dict[str, int]:
        """Record which segments sleep now. Return what this process has in use, by kind."""
        if self._device is None:
            return {}
        kinds, segments = self._device.kept()
        columns = (array("Q", column).tobytes() for column in zip(*segments, strict=True))
        self.append(AsleepRecord(self._position.op, *(columns if segments else (b"", b""))))
        return kinds

    def _next_change(self) -> int:
        return -1 if self._device is None else self._device.num_changes() + 1

    def _in_use(self) -> tuple[int, int, int]:
        """Memory in use. The most so far counts for every phase that is open, whichever began within it."""
        asleep, awake, *now = (0,) * 5 if self._device is None else self._device.in_use()
        for most in self._most_of_open:
            most[:] = max(most[0], asleep), max(most[1], awake)
        return now[0], now[1], now[2]
