import numpy as np
import pytest

from fakedist.analysis.traces.step_trace import Intervals


def by_hand(lane: int, time: int, ranges: list[tuple[int, int, int]]) -> int:
    """The range that began last of those the point is in; of two that began together, the shorter one."""
    inside = [row for row, (of, start, end) in enumerate(ranges) if of == lane and start <= time <= end]
    return max(inside, key=lambda row: (ranges[row][1], -ranges[row][2]), default=-1)


def intervals(ranges: list[tuple[int, int, int]]) -> Intervals:
    lane, start, end = np.array(ranges, np.int64).reshape(-1, 3).T
    return Intervals(lane, start, end)


@pytest.mark.parametrize("seed", range(20))
def test_the_innermost_of_any_ranges_is_what_a_loop_finds(seed: int) -> None:
    random = np.random.default_rng(seed)
    num = int(random.integers(1, 60))
    start = random.integers(0, 50, num)
    length = random.integers(0, 50, num)
    lane = random.integers(0, 3, num)
    ranges = list({(int(of), int(at), int(at + more)) for of, at, more in zip(lane, start, length, strict=True)})
    asked = [(of, at) for of in range(5) for at in range(-3, 110)]
    found = intervals(ranges).innermost(np.array([of for of, _ in asked]), np.array([at for _, at in asked]))
    assert found.tolist() == [by_hand(of, at, ranges) for of, at in asked]


def test_the_range_around_a_range_is_of_its_own_thread() -> None:
    ranges = [(0, 0, 100), (0, 10, 20), (0, 12, 13), (0, 30, 40), (1, 11, 19), (1, 200, 300)]
    assert intervals(ranges).parents().tolist() == [-1, 0, 1, 0, -1, -1]


def test_no_ranges_hold_no_point() -> None:
    assert intervals([]).innermost(np.array([0]), np.array([5])).tolist() == [-1]


def test_ranges_need_not_be_sorted() -> None:
    ranges = [(0, 12, 13), (0, 0, 100), (0, 10, 20)]
    found = intervals(ranges)
    assert found.innermost(np.array([0, 0, 0]), np.array([12, 15, 50])).tolist() == [0, 2, 1]
    assert found.parents().tolist() == [2, -1, 1]


def test_of_two_that_begin_together_the_shorter_one_is_inside_in_any_order() -> None:
    for ranges, rows in (([(0, 5, 8), (0, 5, 20)], [0, 1]), ([(0, 5, 20), (0, 5, 8)], [1, 0])):
        assert intervals(ranges).innermost(np.zeros(2, np.int64), np.array([6, 10])).tolist() == rows
