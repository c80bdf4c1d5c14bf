"""Lines are found again after the code, the script or the whole checkout moved, and never two for one."""

import pandas as pd
import pytest

from fakedist.analysis.stack_lines import IN_TORCH
from fakedist.results.compare.changed_memory import (
    blocks_by_line,
    line_changes,
    most_changes,
    same_files,
    same_lines,
)
from fakedist.results.compare.layer_matching import match_layers
from tests.unit.results.compare.test_layer_matching import table


def line(number: int, file: str = "/job/model.py", function: str = "forward") -> str:
    return f"{file}:{number} ({function})"


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({12: 8}, {12: 8, 40: 8}, {12: 12}),  # a new line below
        ({12: 8, 14: 2}, {15: 8, 17: 3}, {12: 15, 14: 17}),  # code above the function
        ({12: 8, 14: 2}, {12: 8, 13: 1, 15: 2}, {12: 12, 14: 15}),  # a new line between
        ({11: 8, 12: 8}, {13: 9, 15: 12}, {11: 13, 12: 15}),  # code above, and a line between that holds nothing
        ({12: 8, 13: 8}, {14: 8}, {13: 14}),  # of one of two lines, the one that is nearer
        ({12: 8}, {90: 1}, {12: 90}),  # the function's only line
        ({12: 8}, {}, {}),
        ({}, {12: 8}, {}),
    ],
)
def test_lines_of_a_function_move_together(a: dict[int, int], b: dict[int, int], same: dict[int, int]) -> None:
    found = same_lines(*({line(at): held for at, held in side.items()} for side in (a, b)))
    assert found == {line(at): line(to) for at, to in same.items()}


def test_lines_of_a_backward_move_with_those_of_its_forward() -> None:
    """By themselves, the first line of the backward would be the one that holds as much: the last."""
    backward = "forward, backward"
    a = {line(11): 32, line(11, function=backward): 16, line(13, function=backward): 2}
    b = {line(13): 38, line(16, function=backward): 16}
    assert same_lines(a, b) == {line(11): line(13), line(13, function=backward): line(16, function=backward)}


def test_a_line_is_another_one_in_another_function_or_file() -> None:
    assert same_lines({line(12): 8}, {line(12, function="loss"): 8}) == {}
    assert same_lines({line(3, "/p/train.py"): 1}, {line(3, ""): 1}) == {}
    assert same_lines({"(no stack recorded)": 1, "x": 2}, {"(no stack recorded)": 5}) == {
        "(no stack recorded)": "(no stack recorded)"
    }
    many = {line(number): 1 for number in range(50_000)}
    assert same_lines(many, many) == {text: text for text in many}


def test_a_file_is_the_same_in_another_folder_once() -> None:
    files = same_files(
        {"/home/me/job/model.py", "/home/me/job/sub/model.py"}, {"/tmp/x/model.py", "/tmp/x/sub/model.py"}
    )
    assert files == {"/home/me/job/model.py": "/tmp/x/model.py", "/home/me/job/sub/model.py": "/tmp/x/sub/model.py"}
    assert same_files({"/p/model.py", "/job/model.py"}, {"/job/model.py"}) == {"/job/model.py": "/job/model.py"}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"/p/a/model.py", "/p/b/model.py"}, {"/q/model.py"}),  # either could be it
        ({"/p/a/__init__.py"}, {"/q/b/__init__.py"}),  # a name that says nothing
        ({"/p/model.py"}, {"/p/train.py"}),
    ],
)
def test_a_file_that_may_be_another_one_is_not_matched(a: set[str], b: set[str]) -> None:
    assert same_files(a, b) == {}


def test_lines_of_a_backwards_forward_count_only_if_both_sides_know_them() -> None:
    """A memory snapshot from a real GPU and a run from before they were recorded do not."""
    forward, backward = "/job/a.py:3 (loss)", "/job/a.py:3 (loss, backward)"

    def side(line: str) -> pd.DataFrame:
        return pd.DataFrame({"line": [forward, line], "bytes": [4, 8]})

    unchanged = [[IN_TORCH, 0], [forward, 0]]
    for one, other in ((side(IN_TORCH), side(backward)), (side(backward), side(IN_TORCH))):
        changes = line_changes(*blocks_by_line(one, other))
        assert changes[["line", "change_bytes"]].sort_values("line").to_numpy().tolist() == unchanged
    changes = line_changes(*blocks_by_line(side(backward), side(backward).assign(bytes=[4, 12])))
    assert changes[["line", "change_bytes"]].to_numpy().tolist() == [[backward, 4], [forward, 0]]


def test_layers_that_grew_alike_are_in_the_order_of_the_model() -> None:
    layers = table([("(Net)", "Net", 0), ("up", "Linear", 1), ("down", "Linear", 1)])
    a, b = (layers.assign(most_total_bytes=held) for held in ([9, 9, 3, 3], [11, 11, 4, 4]))
    assert most_changes(a, b, match_layers(a, b))["name"].tolist() == ["(Net)", "up", "down"]
