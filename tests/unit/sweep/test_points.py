"""The order of points on monotone axes, and what is skipped beyond one that does not fit."""

from __future__ import annotations

from fakedist.options import JobProgram
from fakedist.sweep.command import PointRun, SweptCommand
from fakedist.sweep.point_rows import Status
from fakedist.sweep.points import MonotonePoints, Wait, sample_to_check
from fakedist.sweep.space import Axis, Scalar, Space, all_points
from tests.unit.sweep.rows_by_hand import row

SPACE = Space((Axis("tp", (1, 2)), Axis("mbs", (1, 2, 4), is_monotone=True)))
COMMAND = SweptCommand(JobProgram("train.py", ("{tp}{mbs}",)), {"world_size": 8}, (), {})
RUNS = [COMMAND.at(SPACE, point) for point in all_points(SPACE)]


def values(run: PointRun | Wait) -> list[Scalar]:
    assert isinstance(run, PointRun)
    return [value for _, value in run.point.values]


def test_a_point_waits_for_the_one_before_it_and_is_skipped_beyond_one_that_does_not_fit() -> None:
    points = MonotonePoints(SPACE, RUNS)
    first, second = points.next(), points.next()
    assert (values(first), values(second)) == ([1, 1], [2, 1])
    assert points.next() is Wait.FOR_A_ROW
    assert isinstance(first, PointRun)
    assert isinstance(second, PointRun)
    points.done(first, row(tp=1, mbs=1))
    after = points.next()
    assert values(after) == [1, 2]
    points.done(second, row(tp=2, mbs=1, status=Status.DOES_NOT_FIT))
    assert [(values(run), why) for run, why in points.skipped] == [([2, 2], "tp=2 mbs=1"), ([2, 4], "tp=2 mbs=1")]
    assert points.next() is Wait.FOR_A_ROW
    assert isinstance(after, PointRun)
    points.done(after, row(tp=1, mbs=2, status=Status.MAY_NOT_FIT))  # what is not known skips nothing
    last = points.next()
    assert values(last) == [1, 4]
    assert isinstance(last, PointRun)
    points.done(last, row(tp=1, mbs=4))
    assert points.next() is Wait.NO_MORE


def test_a_point_that_conditions_leave_out_is_not_waited_for() -> None:
    points = MonotonePoints(SPACE, [run for run in RUNS if values(run) in ([1, 1], [1, 4])])
    first = points.next()
    assert isinstance(first, PointRun)
    points.done(first, row(tp=1, mbs=1, status=Status.DOES_NOT_FIT))
    assert [values(run) for run, _ in points.skipped] == [[1, 4]]


def test_one_in_ten_skipped_points_is_checked_and_at_least_one() -> None:
    skipped = [(RUNS[0], "")] * 21
    assert [len(sample_to_check(skipped[:number], seed=0)) for number in (0, 1, 10, 11, 21)] == [0, 1, 1, 2, 3]
