from __future__ import annotations

from dataclasses import replace

import pytest

from fakedist.sweep.point_rows import Row, Status
from fakedist.sweep.ranking import Speed, answer, rank_rows
from fakedist.units import GIB
from tests.unit.sweep.rows_by_hand import row


def order(rows: list[Row], headroom: float = 0.0) -> list[tuple[object, int]]:
    return [(dict(each.row.values)["tp"], each.place) for each in rank_rows(rows, headroom).ranked]


def test_the_fastest_that_fits_comes_first() -> None:
    rows = [row(500, tp=1), row(900, tp=2), row(700, tp=4), row(2000, tp=8, status=Status.DOES_NOT_FIT)]
    assert order(rows) == [(2, 1), (4, 2), (1, 3)]


def test_points_within_each_others_intervals_share_a_place() -> None:
    rows = [row(1000, spread=0.05, tp=1), row(980, spread=0.05, tp=2), row(930, spread=0.05, tp=4)]
    assert order(rows) == [(1, 1), (2, 1), (4, 3)]
    ranking = rank_rows(rows, 0.0)
    assert [each.row for each in ranking.as_fast] == [rows[1]]


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (Speed(10, 9, 11), Speed(9.5, 9.4, 9.6), False),
        (Speed(10, 9.9, 10.1), Speed(9.5, 9, 11), False),
        (Speed(10, 9, 11), Speed(8.5, 8, 9.5), True),
        (Speed(10, 10, 10), Speed(9.99, 9.99, 9.99), True),
    ],
)
def test_two_speeds_are_told_apart_if_neither_lies_within_the_others_interval(
    one: Speed, other: Speed, apart: bool
) -> None:
    assert one.differs_from(other) is apart
    assert other.differs_from(one) is apart


def test_a_point_without_enough_room_is_counted_and_not_ranked() -> None:
    rows = [row(900, 77, tp=1), row(500, 76, tp=2)]
    ranking = rank_rows(rows, 0.05)
    assert [each.row for each in ranking.ranked] == [rows[1]]
    assert ranking.num_too_full == 1
    assert rank_rows(rows, 0.0).num_too_full == 0
    ranking = rank_rows([row(900, tp=1, status=Status.MAY_NOT_FIT), row(None, tp=2)], 0.0)
    assert (ranking.best, ranking.num_without_step) == (None, 1)
    assert ranking.counts == {Status.MAY_NOT_FIT: 1, Status.FITS: 1}


def test_the_front_has_what_no_other_point_beats() -> None:
    rows = [row(500, 20, tp=1), row(900, 40, tp=2), row(800, 50, tp=4), row(500, 21, tp=8), row(1000, 60, tp=16)]
    ranking = rank_rows(rows, 0.0)
    assert ranking.front == {rows[0].id, rows[1].id, rows[4].id}


def test_an_axis_matters_as_much_as_points_that_differ_in_it_alone() -> None:
    rows = [
        row(speed * (2 if mbs == 2 else 1), 20 + 10 * mbs, tp=tp, mbs=mbs)
        for tp, speed in ((1, 100), (2, 100.01))
        for mbs in (1, 2)
    ]
    first, second = rank_rows(rows, 0.0).effects
    assert (first.axis, first.best, first.num_groups, first.memory_bytes) == ("mbs", "2", 2, 10 * GIB)
    assert first.speed_ratio == pytest.approx(2.0)
    assert (second.axis, second.best, second.memory_bytes) == ("tp", "", 0)


def test_an_axis_whose_points_always_differ_elsewhere_too_is_not_compared() -> None:
    effects = rank_rows([row(100, tp=1, mbs=1), row(200, tp=2, mbs=2)], 0.0).effects
    assert [(each.num_groups, each.speed_ratio) for each in effects] == [(0, None)] * 2


def known(one: Row, **figures: float | str | None) -> Row:
    """A point whose step shows these figures, and no other that could rank it."""
    assert one.step is not None
    none = dict.fromkeys(("tokens_per_s_per_gpu", "samples_per_s_per_gpu", "tflops_per_gpu"))
    return replace(one, step=replace(one.step, **(none | figures)))  # type: ignore[arg-type]


def test_without_tokens_samples_are_compared_not_steps() -> None:
    small = known(row(900, tp=1), samples_per_s_per_gpu=10.0, tflops_per_gpu=50.0)
    large = known(row(500, tp=2), samples_per_s_per_gpu=30.0, tflops_per_gpu=40.0)
    ranking = rank_rows([small, large], 0.0)
    assert ranking.unit == "samples/s per GPU"
    assert [each.row for each in ranking.ranked] == [large, small]


def test_samples_of_several_shapes_do_not_compare_so_the_models_flops_do() -> None:
    short = known(row(900, tp=1), samples_per_s_per_gpu=90.0, sample_shape="128", tflops_per_gpu=40.0)
    long = known(row(500, tp=2), samples_per_s_per_gpu=10.0, sample_shape="8192", tflops_per_gpu=50.0)
    ranking = rank_rows([short, long], 0.0)
    assert ranking.unit == "model TFLOP/s per GPU"
    assert [each.row for each in ranking.ranked] == [long, short]


def test_the_unit_that_more_points_know_ranks_them_and_the_others_are_counted() -> None:
    rows = [known(row(900, tp=1), tflops_per_gpu=50.0), known(row(800, tp=2), tflops_per_gpu=60.0)]
    ranking = rank_rows([*rows, known(row(700, tp=4), tokens_per_s_per_gpu=700.0)], 0.0)
    assert ranking.unit == "model TFLOP/s per GPU"
    assert (len(ranking.ranked), ranking.num_without_speed, ranking.num_without_step) == (2, 1, 0)
    assert "not ranked, because model TFLOP/s per GPU are not known: 1 point" in list(answer(ranking))


def test_steps_of_unknown_work_are_not_ranked() -> None:
    ranking = rank_rows([known(row(500, tp=1)), known(row(900, tp=2))], 0.0)
    assert (ranking.unit, ranking.ranked, ranking.num_without_speed) == ("", [], 2)
    assert next(iter(answer(ranking))).startswith("no ranking: steps of unequal work do not compare")
