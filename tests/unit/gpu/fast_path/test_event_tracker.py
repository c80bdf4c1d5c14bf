"""The tracker that numbers allocator events where torch keeps no metadata with them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest

from fakedist.errors import RecordingError
from fakedist.gpu.fast_path import build, event_tracker
from fakedist.gpu.fast_path.event_tracker import EventTracker


class Library:
    """Events of one device: (operation, TraceEntry::Action)."""

    def __init__(self, events: Sequence[tuple[int, int]]) -> None:
        self.flat = [number for event in events for number in event]
        self.operation: list[int] = []
        self.fakedist_operation = Function(self.operation.append)
        self.fakedist_events = Function(self._copy)
        self.fakedist_forget_events = Function(lambda: self.flat.clear())
        self.fakedist_track_allocator = Function(lambda: None)

    def _copy(self, device: int, out: ctypes.Array[ctypes.c_int64], capacity: int) -> int:
        for place, number in enumerate(self.flat[: 2 * capacity]):
            out[place] = number
        return len(self.flat) // 2


class Function:
    def __init__(self, call: object) -> None:
        self.call = call

    def __call__(self, *arguments: object) -> object:
        return self.call(*arguments)  # type: ignore[operator]


def tracked(monkeypatch: pytest.MonkeyPatch, *events: tuple[int, int]) -> tuple[EventTracker, Library]:
    library = Library(events)
    monkeypatch.setattr(build.Library, "ensure", lambda library: "x.so")
    monkeypatch.setattr(event_tracker.ctypes, "PyDLL", lambda path: library)
    return EventTracker(), library


@pytest.mark.parametrize(
    ("events", "actions", "operations"),
    [
        (
            [(4, 3), (4, 0), (7, 1), (-1, 2)],
            ["segment_alloc", "alloc", "free_requested", "free_completed"],
            [4, 4, 7, -1],
        ),
        ([(4, 0), (5, 1)], ["alloc"], [4]),  # events after the history was read are left
        ([(4, 0), (5, 1)], ["alloc", "snapshot", "free_requested", "snapshot"], [4, -1, 5, -1]),
    ],
)
def test_events_have_the_operation_that_ran(
    monkeypatch: pytest.MonkeyPatch, events: list[tuple[int, int]], actions: list[str], operations: list[int]
) -> None:
    found, _ = tracked(monkeypatch, *events)
    assert list(found.operations(0, actions)) == operations


@pytest.mark.parametrize("actions", [["alloc", "alloc"], ["free_requested", "alloc"], ["alloc"] * 3])
def test_a_history_of_other_events_is_refused(monkeypatch: pytest.MonkeyPatch, actions: list[str]) -> None:
    found, _ = tracked(monkeypatch, (4, 0), (4, 1))
    with pytest.raises(RecordingError, match="other events on cuda:0 than its tracker saw"):
        found.operations(0, actions)


def test_forgotten_events_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    found, library = tracked(monkeypatch, (4, 0))
    found.tell("12")
    found.forget()
    assert library.operation == [12]
    assert list(found.operations(0, [])) == []
