from dataclasses import fields, replace
from typing import Any

import pytest

from fakedist.results.compare.changed_times import collective_changes, group_changes
from fakedist.rundir.step_time import GroupTime, StepTime
from fakedist.rundir.summary import CollectiveTotal

ROW = GroupTime("dp", 8, 2, "all_gather", 10, 0, 1e9, time_us=100.0, hidden_us=70.0, exposed_us=30.0)


def step(*rows: GroupTime) -> StepTime:
    figures: dict[str, Any] = {field.name: 0 for field in fields(StepTime) if field.default is field.default_factory}
    return StepTime(**figures | {"step_us": 1000.0, "by_group": list(rows)})


def test_exposed_communication_is_compared_by_group_and_operation_largest_change_first() -> None:
    reduce = replace(ROW, operation="reduce_scatter", exposed_us=5.0)
    found = group_changes(
        step(ROW, reduce), step(replace(ROW, exposed_us=50.0, num_calls=12, time_us=90.0), replace(ROW, group="tp"))
    )
    assert found[["group", "operation", "change_us", "what"]].to_numpy().tolist() == [
        ["tp", "all_gather", 30.0, "appeared"],
        ["dp", "all_gather", 20.0, "grew"],
        ["dp", "reduce_scatter", -5.0, "gone"],
    ]
    assert found[["whole_a_us", "whole_b_us", "num_a", "num_b"]].to_numpy().tolist() == [
        [0.0, 100.0, 0, 10],
        [100.0, 90.0, 10, 12],
        [100.0, 0.0, 10, 0],
    ]


def test_groups_of_one_name_count_together_and_only_what_both_steps_know_is_compared() -> None:
    found = group_changes(step(ROW, ROW), step(ROW))
    assert found["change_us"].tolist() == [-30.0]
    assert len(group_changes(step(ROW), step())) == 0
    found = group_changes(step(ROW), step(replace(ROW, num_unknown=1, exposed_us=9.0)))
    assert found[["change_us", "what"]].to_numpy().tolist() == [[0.0, "not known"]]
    assert found["a_us"].tolist() == pytest.approx([30.0])


def test_of_collectives_that_change_as_much_those_with_more_calls_come_first() -> None:
    after = [CollectiveTotal(name, 8, "all_reduce", calls, *bytes_) for name, calls, bytes_ in (
        ("few", 2, (5, 5)), ("many", 9, (5, 5)), ("large", 1, (50, 50)))]  # fmt: skip
    assert collective_changes([], after)["group"].tolist() == ["large", "many", "few"]
