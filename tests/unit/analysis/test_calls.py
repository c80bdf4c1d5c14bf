from __future__ import annotations

from pathlib import Path

from fakedist.analysis.recording import Recording
from fakedist.analysis.topology import call_table, collective_table, group_table
from tests.unit.analysis.recorded import HandMade


def talk(directory: Path) -> Recording:
    made = HandMade()
    layer = made.layer("head")
    made.op("forward", 1, layer)
    made.record(
        "groups",
        rows=[
            (1, "3", "tp", (0, 1), 0, 1, "nccl"),
            (0, "0", "default_pg", (0, 8), 1, 1, "cpu:gloo,cuda:nccl"),
        ],
    )
    rows = [
        (0, "broadcast", 0, 10, 10, "float32", False, 0, 0, -1, -1, 0, 0),
        (1, "all_reduce", 1, 100, 100, "bfloat16", True, 7, 1, 0, -1, 0, 0),
        (2, "all_reduce", 0, 1_000, 1_000, "float32", False, 0, 1, 0, -1, 0, 0),
        (3, "all_reduce", 1, 300, 300, "bfloat16", True, 7, 1, 0, -1, 0, 0),
        (4, "all_gather_into_tensor", 0, 500, 4_000, "float32", False, 0, 1, 0, -1, 0, 0),
        (5, "send", 0, 20, 0, "float32", False, 0, 1, 0, 3, 0, 0),
    ]
    made.record("calls", rows=rows[:2])
    made.record("calls", rows=rows[2:])
    return made.read(directory)


def test_calls_say_where_in_the_step_they_were(tmp_path: Path) -> None:
    calls = call_table(talk(tmp_path))
    assert calls["sequence"].tolist() == [0, 1, 2, 3, 4, 5]
    assert calls[["step", "phase", "layer"]].to_numpy().tolist() == [[0, "other", 0], *[[1, "forward", 1]] * 5]
    assert calls["peer"].tolist() == [-1, -1, -1, -1, -1, 3]


def test_bytes_are_summed_by_group_and_operation_most_first(tmp_path: Path) -> None:
    table = collective_table(call_table(talk(tmp_path)))
    assert table[["group", "operation", "num_calls", "bytes_in", "bytes_out"]].to_numpy().tolist() == [
        [0, "all_gather_into_tensor", 1, 500, 4_000],
        [0, "all_reduce", 1, 1_000, 1_000],
        [1, "all_reduce", 2, 400, 400],
        [0, "send", 1, 20, 0],
        [0, "broadcast", 1, 10, 10],
    ]


def test_groups_are_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    groups = group_table(talk(tmp_path))
    assert groups[["name", "description", "size", "group_rank", "ranks"]].to_numpy().tolist() == [
        ["0", "default_pg", 8, 1, "0-7"],
        ["3", "tp", 2, 1, "0,1"],
    ]


def test_a_rank_that_said_nothing_has_empty_tables(tmp_path: Path) -> None:
    recording = HandMade().read(tmp_path)
    assert call_table(recording).empty
    assert group_table(recording).empty
    assert collective_table(call_table(recording)).empty
