from __future__ import annotations

import itertools

import pytest

from fakedist.errors import SweepError
from fakedist.sweep.space import Axis, Expression, Point, Space, all_points

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


def test_too_many_points_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakedist.sweep.space.MAX_POINTS", 100)
    wide = (Axis("a", tuple(range(11))), Axis("b", tuple(range(10))))
    with pytest.raises(SweepError, match="more than 100 points") as raised:
        all_points(space(axes=wide))
    assert "--trials" in raised.value.hint
    assert len(all_points(space("a < 10", axes=wide))) == 100


def test_a_search_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakedist.sweep.space._MAX_LOOKED_AT", 1_000)
    wide = tuple(Axis(f"x{number}", tuple(range(1000))) for number in range(4))
    with pytest.raises(SweepError, match="combinations would have to be looked at"):
        all_points(space("x0 + x1 + x2 + x3 < 0", axes=wide))


def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SweepError, match="uses tpp, which is not an axis") as raised:
        space("tpp < 8")
    assert raised.value.hint == "did you mean 'tp'?"


def test_two_things_of_one_name_are_refused() -> None:
    with pytest.raises(SweepError, match="tp is named twice"):
        space(derived=(("tp", "2"),))


def test_derived_values_follow_in_order() -> None:
    one = space(derived=(("mp", "tp * pp"), ("dp", "world_size // mp")))
    point = Point((("tp", 2), ("pp", 2), ("mbs", 1)))
    assert one.named_values(point) == {"world_size": 8, "tp": 2, "pp": 2, "mbs": 1, "mp": 4, "dp": 2}
    assert one.axes_behind(iter(["dp"])) == {"tp", "pp"}
    with pytest.raises(SweepError, match="uses dp"):
        space(derived=(("mp", "8 // dp"), ("dp", "tp")))
