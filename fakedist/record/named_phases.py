"""Phases of a script by name, from ``fakedist.phase`` or recognised, and what they used of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fakedist.record.memory_recording import Append
from fakedist.record.position import Position
from fakedist.record.timed_step import RangeTracer
from fakedist.rundir.encoding import Record
from fakedist.rundir.records import EngineCacheRecord, EngineSleepRecord, EngineUseRecord, NamedPhaseRecord


class NamedPhases:
    """Records phases, which may lie within each other.

    Args:
        in_use: What is in use of the virtual GPU: the most since it was called before, behind the allocator's segments,
            outside of it, by other processes.
        num_changes: How often that changed so far.
        tracer: What is given each as a range of the timed step; None without one.
    """

    def __init__(
        self,
        append: Append,
        position: Position,
        in_use: Callable[[], tuple[int, int, int, int]] | None,
        num_changes: Callable[[], int] | None = None,
        tracer: RangeTracer | None = None,
    ) -> None:
        self._append, self._position, self._in_use, self._tracer = append, position, in_use, tracer
        self._num_changes = num_changes
        #: Without vLLM's KV cache, and with it.
        self._most_of_open: list[list[int]] = []
        self._most_since_engine: list[int] | None = None
        self._has_cache = False
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
        self._restart_most()
        most = [0, 0]
        self._most_of_open.append(most)
        number = None if self._tracer is None else self._tracer.range_begins(name)
        first_change = self._next_change()
        try:
            yield
        finally:
            if self._tracer is not None and number is not None:
                self._tracer.range_ended(number)
            now = self._restart_most()
            self._most_of_open.pop()
            if not self._is_closed:
                ops, changes = (first_op, self._position.op), (first_change, self._next_change())
                used = (max(most), *now)
                self._append(NamedPhaseRecord(name, step, *ops, *used, self._position.step, *changes, *most))

    @contextmanager
    def engine_takes_cache(self) -> Iterator[None]:
        """Count what is in use from here on as with vLLM's KV cache, which takes its memory inside."""
        self._restart_most()
        self._has_cache = True
        if self._most_since_engine is None:
            self._most_since_engine = [0, 0]
        yield
        self._cache_since = self._next_change() - 1  # from the last change on

    @contextmanager
    def engine_sleeps(self, level: int) -> Iterator[None]:
        """Record what vLLM's engine frees inside. Then there is no KV cache in use."""
        before = sum(self._restart_most())
        yield
        now = sum(self._restart_most())
        self._cache_ends()
        self._has_cache = False
        self.append(EngineSleepRecord(level, before - now))

    def append(self, record: Record) -> None:
        """Record a fact about an engine."""
        if not self._is_closed:
            self._append(record)

    def close(self) -> None:
        """Record no more of them."""
        if self._most_since_engine is not None and not self._is_closed:
            self._restart_most()
            self._append(EngineUseRecord(*self._most_since_engine))
            self._cache_ends()
        self._is_closed = True

    def _cache_ends(self) -> None:
        if self._cache_since >= 0:
            self.append(EngineCacheRecord(self._cache_since, self._next_change()))
        self._cache_since = -1

    def _next_change(self) -> int:
        return -1 if self._num_changes is None else self._num_changes() + 1

    def _restart_most(self) -> tuple[int, int, int]:
        """Begin to look for the most anew. Return what is in use.

        The most so far counts for every phase that is open, whichever began within it.
        """
        most, *now = (0, 0, 0, 0) if self._in_use is None else self._in_use()
        for known in [*self._most_of_open, *([self._most_since_engine] if self._most_since_engine else [])]:
            known[self._has_cache] = max(known[self._has_cache], most)
        return now[0], now[1], now[2]
