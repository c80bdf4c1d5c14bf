from __future__ import annotations

import itertools

import pytest

from fakedist.errors import SweepError
from fakedist.sweep.space import (
    Axis,
    Expression,
    Point,
    Scalar,
    Space,
    all_points,
    axis_of_text,
    axis_of_toml,
    drawn_points,
    read_scalar,
    read_values,
)

AXES = (Axis("tp", (1, 2, 4)), Axis("pp", (1, 2, 4)), Axis("mbs", (1, 2)))


def space(*conditions: str, derived: tuple[tuple[str, str], ...] = (), axes: tuple[Axis, ...] = AXES) -> Space:
    return Space(
        axes,
        tuple((name, Expression(text, "let:")) for name, text in derived),
        tuple(Expression(text, "where:") for text in conditions),
        {"world_size": 8},
    )


def test_points_are_all_combinations_and_the_last_axis_changes_fastest() -> None:
    found = [tuple(value for _, value in point.values) for point in all_points(space())]
    assert found == list(itertools.product((1, 2, 4), (1, 2, 4), (1, 2)))


def test_points_meet_every_condition_as_a_test_of_each_would_find() -> None:
    one = space("tp * pp <= 4", "dp >= mbs", derived=(("dp", "world_size // (tp * pp)"),))
    expected = [
        (tp, pp, mbs)
        for tp, pp, mbs in itertools.product((1, 2, 4), (1, 2, 4), (1, 2))
        if tp * pp <= 4 and 8 // (tp * pp) >= mbs
    ]
    assert [tuple(value for _, value in point.values) for point in all_points(one)] == expected
    assert all(one.allows(point) for point in one.points())


def test_conditions_are_tested_before_later_axes_have_values() -> None:
    many = tuple(Axis(f"x{number}", tuple(range(100))) for number in range(6))
    assert len(all_points(space("x0 + x1 == 0", "x2 + x3 == 0", "x4 + x5 == 0", axes=many))) == 1


def test_a_condition_on_constants_alone_is_tested() -> None:
    with pytest.raises(SweepError, match="no point of 18 meets the conditions: world_size == 9"):
        all_points(space("world_size == 9"))


def test_too_many_points_and_a_search_without_an_end_are_refused() -> None:
    wide = (Axis("a", tuple(range(11))), Axis("b", tuple(range(10))))
    with pytest.raises(SweepError, match="more than 100 points") as raised:
        all_points(space(axes=wide), max_points=100)
    assert "--trials" in raised.value.hint
    assert len(all_points(space("a < 10", axes=wide), max_points=100)) == 100
    deep = tuple(Axis(f"x{number}", tuple(range(1000))) for number in range(4))
    with pytest.raises(SweepError, match="more than 1,000 combinations would have to be looked at"):
        all_points(space("x0 + x1 + x2 + x3 < 0", axes=deep), max_looked_at=1_000)


def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SweepError, match="uses tpp, which is not an axis") as raised:
        space("tpp < 8")
    assert raised.value.hint == "did you mean 'tp'?"
    with pytest.raises(SweepError, match="tp is named twice"):
        space(derived=(("tp", "2"),))


def test_derived_values_follow_in_order() -> None:
    one = space(derived=(("mp", "tp * pp"), ("dp", "world_size // mp")))
    point = Point((("tp", 2), ("pp", 2), ("mbs", 1)))
    assert one.named_values(point) == {"world_size": 8, "tp": 2, "pp": 2, "mbs": 1, "mp": 4, "dp": 2}
    assert one.axes_behind(iter(["dp"])) == {"tp", "pp"}
    with pytest.raises(SweepError, match="uses dp"):
        space(derived=(("mp", "8 // dp"), ("dp", "tp")))


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
        ("0.1..0.3+0.1", [0.1, 0.2, 0.3]),
        ("-0.3..0+0.1", [-0.3, -0.2, -0.1, 0.0]),
        ("0.00001..0.01*10", [0.00001, 0.0001, 0.001, 0.01]),
        ("8,16..32+8", [8, 16, 24, 32]),
        ("1..10000", list(range(1, 10_001))),
    ],
)
def test_values_are_read_from_text(text: str, values: list[Scalar]) -> None:
    found = read_values(text, "--axis tp")
    assert found == values
    assert list(map(type, found)) == list(map(type, values)) or text == "0..1+0.25"


def test_a_text_that_is_no_number_stays_a_text() -> None:
    for text in ("8b", "1_000", "0x10", "nan", "inf", ""):
        assert read_scalar(text) == text
    with pytest.raises(SweepError, match="a range goes from a number to a number"):
        read_values("a..b,1", "--axis tp")


@pytest.mark.parametrize(
    ("plain", "values"),
    [
        ([1, 2], (1, 2)),
        ("1..4*2", (1, 2, 4)),
        ({"from": 1, "to": 3}, (1, 2, 3)),
        ({"from": 1, "to": 9, "step": 4}, (1, 5, 9)),
        ({"from": 1, "to": 8, "factor": 2}, (1, 2, 4, 8)),
        ({"values": ["a", "b"]}, ("a", "b")),
    ],
)
def test_an_axis_of_a_sweep_file_has_its_values(plain: object, values: tuple[Scalar, ...]) -> None:
    axis = axis_of_toml("x", plain, "sweep.toml")
    assert axis.values == values


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
    assert axis_of_text("mbs=1,2").values == (1, 2)
    with pytest.raises(SweepError, match="has no values"):
        axis_of_text("tp")


NAMES: dict[str, Scalar] = {"tp": 4, "pp": 8, "kind": "full", "on": True}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("tp * pp", 32),
        ("tp * pp <= 32", True),
        ("80 % pp == 0 and tp in (1, 2)", False),
        ("tp in [1, 4]", True),
        ("kind == 'full' or on", True),
        ("not on", False),
        ("64 // (tp * pp)", 2),
        ("2 ** tp", 16),
        ("min(tp, pp) + max(1, abs(-2))", 6),
        ("pp if on else tp", 8),
        ("ceil_div(61, 16)", 4),
        ("1 < tp < 8", True),
        ("on == true", True),
        ("'x' + kind", "xfull"),
    ],
)
def test_an_expression_computes_and_compares(text: str, value: Scalar) -> None:
    assert Expression(text, "where:").value(NAMES) == value


def test_an_expression_names_what_it_uses() -> None:
    assert Expression("min(tp, 8) * pp and true", "where:").names == {"tp", "pp"}


REFUSED = """
__import__('os').system('touch x')
().__class__.__bases__
tp.real
kind.format(tp)
[x for x in (1, 2)]
(lambda: 1)()
open('/etc/passwd')
eval('1')
exec('1')
print(1)
f'{tp}'
{'a': 1}
tp[0]
min(*[1, 2])
min(1, 2, key=abs)
x := 1
import os
tp = 8
1; 2

tp <=
b'x'
await tp
..."""
WITHOUT_VALUE = """1 / (tp - 4)
kind < 1
9 ** 9 ** 9
10 ** 64 ** 64
'a' * 10 ** 9
'%999999999d' % 1
[1] * 9 ** 9
(1, 2)
log2(0)
kind % 1"""


@pytest.mark.parametrize("text", [*REFUSED[1:].split("\n"), "1 + " * 300 + "1", "(" * 500 + "1" + ")" * 500])
def test_an_expression_runs_nothing(text: str) -> None:
    with pytest.raises(SweepError):
        Expression(text, "where:").value(NAMES)


def test_a_text_that_no_reader_would_follow_is_too_long() -> None:
    with pytest.raises(SweepError, match="is too long"):
        Expression("1 + " * 100 + "1", "where:")


@pytest.mark.parametrize("text", WITHOUT_VALUE.split("\n"))
def test_an_expression_without_a_value_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(SweepError, match=r"has no value|gives no number"):
        Expression(text, "where:").value(NAMES)


def test_drawn_points_are_different_and_meet_the_conditions_and_the_seed_decides() -> None:
    wide = Space((Axis("a", tuple(range(50))), Axis("b", (1, 2))), conditions=(Expression("a % 2 == 0", "--where"),))
    drawn = drawn_points(wide, 10, 0)
    assert len(set(drawn)) == 10
    assert all(wide.allows(point) for point in drawn)
    assert drawn_points(wide, 20, 0)[:10] == drawn
    assert drawn_points(wide, 10, 1) != drawn
    assert len(drawn_points(wide, 99, 0)) == 50
    with pytest.raises(SweepError, match="no draw of 2,000 meets the conditions"):
        drawn_points(Space(wide.axes, conditions=(Expression("a > 99", "--where"),)), 1, 0)
