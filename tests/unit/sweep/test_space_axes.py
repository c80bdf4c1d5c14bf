from __future__ import annotations

import pytest

from fakedist.errors import SweepError
from fakedist.sweep.space import Scalar, axis_of_text, axis_of_toml, read_scalar, read_values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,4", [1, 2, 4]),
        ("1..4", [1, 2, 3, 4]),
        ("1..8*2", [1, 2, 4, 8]),
        ("0..100+50", [0, 50, 100]),
        ("1..7*2", [1, 2, 4]),
        ("none,full", ["none", "full"]),
        ("true,false", [True, False]),
        ("0.5,1e-3", [0.5, 1e-3]),
        ("0..1+0.25", [0, 0.25, 0.5, 0.75, 1]),
        ("8,16..32+8", [8, 16, 24, 32]),
        ("a..b,1", None),
    ],
)
def test_values_are_read_from_text(text: str, values: list[Scalar] | None) -> None:
    if values is None:
        with pytest.raises(SweepError, match="a range goes from a number to a number"):
            read_values(text, "--axis tp")
    else:
        found = read_values(text, "--axis tp")
        assert found == values
        assert list(map(type, found)) == list(map(type, values)) or text == "0..1+0.25"


def test_a_text_that_is_no_number_stays_a_text() -> None:
    assert [read_scalar(text) for text in ("8b", "1_000", "0x10", "nan", "inf", "")] == [
        "8b",
        "1_000",
        "0x10",
        "nan",
        "inf",
        "",
    ]


@pytest.mark.parametrize(
    ("plain", "values"),
    [
        ([1, 2], (1, 2)),
        ("1..4*2", (1, 2, 4)),
        ({"from": 1, "to": 3}, (1, 2, 3)),
        ({"from": 1, "to": 9, "step": 4}, (1, 5, 9)),
        ({"from": 1, "to": 8, "factor": 2, "monotone": True}, (1, 2, 4, 8)),
        ({"values": ["a", "b"]}, ("a", "b")),
    ],
)
def test_an_axis_of_a_sweep_file_has_its_values(plain: object, values: tuple[Scalar, ...]) -> None:
    axis = axis_of_toml("x", plain, "sweep.toml")
    assert axis.values == values
    assert axis.is_monotone is (isinstance(plain, dict) and "monotone" in plain)


def test_a_named_value_stands_for_arguments() -> None:
    axis = axis_of_toml("rec", {"named": {"none": [], "full": ["--recompute", "full"], "one": "--x"}}, "sweep.toml")
    assert axis.values == ("none", "full", "one")
    assert axis.arguments == {"none": (), "full": ("--recompute", "full"), "one": ("--x",)}


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ([], "has no values"),
        ([1, 1], "names 1 twice"),
        ([1, "1"], "names 1 twice"),
        ([[1]], "is not a value"),
        ({}, "has one of values, named, or from and to"),
        ({"values": [1], "from": 1}, "has one of values"),
        ({"from": 1, "to": 8, "step": 1, "factor": 2}, "both a step and a factor"),
        ({"from": 1, "to": 1e12}, "has more than 10,000 values"),
        ({"from": 8, "to": 1}, "goes upwards"),
        ({"from": 1, "to": 8, "step": 0}, "a range grows"),
        ({"from": 0, "to": 8, "factor": 2}, "a range grows"),
        ({"from": 1, "to": "x"}, "from a number to a number"),
        ({"values": [1], "monoton": True}, "unknown key 'monoton'"),
        ({"named": {"a": {}}}, "arguments are a list of texts"),
    ],
)
def test_an_axis_that_is_not_valid_is_refused(plain: object, message: str) -> None:
    with pytest.raises(SweepError, match=message):
        axis_of_toml("x", plain, "sweep.toml")


@pytest.mark.parametrize("name", ["", "1x", "a-b", "_x", "__class__", "and", "a b", "<script>"])
def test_a_name_that_no_placeholder_could_have_is_refused(name: str) -> None:
    with pytest.raises(SweepError, match="cannot be a name"):
        axis_of_toml(name, [1], "sweep.toml")


def test_an_axis_of_the_command_line_has_a_name_and_values() -> None:
    assert axis_of_text("mbs=1,2", ["mbs"]).is_monotone
    with pytest.raises(SweepError, match="has no values"):
        axis_of_text("tp")
