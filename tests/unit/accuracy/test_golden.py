"""Megatron-LM's golden values: which figures of a run stand beside them."""

from __future__ import annotations

from typing import Any

from tests.accuracy.golden import GOLDEN, STEPS, row


def test_the_end_is_that_of_the_second_iteration_whose_optimizer_state_is_there() -> None:
    phases: list[dict[str, Any]] = [
        {"step": 1, "phase": "optimizer", "end_allocated_bytes": 5},
        {"step": STEPS - 1, "phase": "backward", "end_allocated_bytes": 9},
        {"step": STEPS - 1, "phase": "other", "end_allocated_bytes": 7},
        {"step": STEPS, "phase": "other", "end_allocated_bytes": 1},
    ]
    found = row(GOLDEN[0], {"peak_allocated_bytes": 11, "by_phase": phases})
    assert (found["peak_bytes"], found["end_bytes"]) == (11, 7)


def test_cases_are_told_apart_and_say_where_they_were_read() -> None:
    assert len({golden.name for golden in GOLDEN}) == len({golden.case for golden in GOLDEN}) == len(GOLDEN)
    assert all(len(golden.commit) == 40 for golden in GOLDEN)
    assert all(golden.peak_bytes > golden.end_bytes for golden in GOLDEN)
