"""Several parts follow CUDA graphs by one patch."""

from __future__ import annotations

import pytest
import torch

from fakedist.graph_captures import GraphObserver, watched_graphs

GRAPH = torch.cuda.CUDAGraph


class Observer(GraphObserver):
    def __init__(self, name: str, seen: list[str]) -> None:
        self.name = name
        self.seen = seen

    def capture_begins(self) -> None:
        self.seen.append(f"{self.name} begins")

    def capture_ended(self, graph: object) -> None:
        self.seen.append(f"{self.name} ended")

    def replay_begins(self, graph: object) -> None:
        self.seen.append(f"{self.name} before replay")

    def replayed(self, graph: object) -> None:
        self.seen.append(f"{self.name} after replay")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    for name in ("capture_begin", "capture_end", "replay"):
        monkeypatch.setattr(GRAPH, name, lambda graph, name=name: seen.append(name))
    return seen


def test_a_later_observer_is_around_an_earlier_one_and_may_leave_first(seen: list[str]) -> None:
    original = GRAPH.replay
    with watched_graphs(Observer("values", seen)):
        with watched_graphs(Observer("steps", seen)):
            GRAPH.capture_begin(object())
            GRAPH.capture_end(object())
            GRAPH.replay(object())
        assert seen == [
            *("steps begins", "values begins", "capture_begin", "capture_end", "values ended", "steps ended"),
            *("steps before replay", "values before replay", "replay", "values after replay", "steps after replay"),
        ]
        seen.clear()
        GRAPH.replay(object())
        assert seen == ["values before replay", "replay", "values after replay"]
    assert GRAPH.replay is original


def test_a_capture_that_fails_to_begin_has_ended(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(GRAPH, "capture_begin", fail)
    with watched_graphs(Observer("values", seen)), pytest.raises(RuntimeError, match="no memory"):
        GRAPH.capture_begin(object())
    assert seen == ["values begins", "values ended"]
