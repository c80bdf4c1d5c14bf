"""Megatron-LM's golden values: which figures of a run are compared with them."""

from typing import Any

from tests.accuracy.golden import GOLDEN, WORKSPACE_BYTES, rows_of


def test_the_first_iteration_is_told_apart_from_those_with_the_optimizers_state() -> None:
    phases: list[dict[str, Any]] = [
        {"step": 0, "phase": "init", "peak_allocated_bytes": 5},
        {"step": 1, "phase": "forward", "peak_allocated_bytes": 9},
        {"step": 1, "phase": "backward", "peak_allocated_bytes": 8},
        {"step": 2, "phase": "forward", "peak_allocated_bytes": 12},
        {"step": 3, "phase": "forward", "peak_allocated_bytes": 11},
    ]
    first, later = rows_of(GOLDEN[0], {"by_phase": phases})
    assert (first["iteration"], first["bytes"], first["golden_bytes"]) == ("1", 9, GOLDEN[0].peak_bytes[0])
    assert (later["bytes"], later["golden_bytes"]) == (12, GOLDEN[0].peak_bytes[1])
    assert (first["workspaces_bytes"], later["workspaces_bytes"]) == (WORKSPACE_BYTES, 2 * WORKSPACE_BYTES)


def test_cases_are_told_apart_and_say_where_they_were_read() -> None:
    assert len({golden.name for golden in GOLDEN}) == len({golden.case for golden in GOLDEN}) == len(GOLDEN)
    assert all(len(golden.commit) == 40 for golden in GOLDEN)
