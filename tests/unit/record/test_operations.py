from __future__ import annotations

from typing import Any

import torch

from fakedist.record.operations import Operations
from fakedist.record.position import Position


class OperationLog:
    """A timer that remembers the places of operations."""

    def __init__(self) -> None:
        self.places: list[tuple[int, Any]] = []

    def operation(self, op: int, operation: str, place: Any) -> int:
        self.places.append((op, place))
        return 0

    def done(self, *_: Any) -> None:
        pass


def test_a_timed_step_goes_on_when_the_numbers_are_taken_away_in_it() -> None:
    position = Position()
    operations = Operations(position, lambda f, args, kwargs: f(*args, **kwargs), lambda: drained(), lambda text: None)
    taken: list[bytes] = []

    def drained() -> None:
        taken.append(operations.numbering.take().operation)

    tracer = OperationLog()
    operations.trace(tracer)  # type: ignore[arg-type]
    x = torch.ones(2)
    with operations:
        for _ in range(600):
            x.add_(1)
    assert len(taken) == 3
    assert [op for op, _ in tracer.places] == list(range(600))
    assert {place.phase for _, place in tracer.places} == {"init"}
