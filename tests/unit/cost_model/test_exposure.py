import numpy as np
import pytest

from fakedist.cost_model.overlap import exposed_us, shared_us, union, union_us


def floats(*values: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array(values, np.float64)


def test_only_the_part_of_an_interval_that_no_kernel_covers_is_exposed() -> None:
    assert exposed_us(floats(0, 4, 20), floats(10, 6, 30), floats(3), floats(8)).tolist() == [5, 0, 10]
    assert exposed_us(floats(2), floats(5), floats(), floats()).tolist() == [3]
    assert exposed_us(floats(0), floats(10), floats(1, 2, 9), floats(5, 4, 12)).tolist() == [5]


def test_union_joins_what_overlaps_or_touches() -> None:
    starts, ends = union(floats(5, 0, 1, 9, 3), floats(6, 2, 4, 9, 4))
    assert (starts.tolist(), ends.tolist()) == ([0, 5], [4, 6])
    assert union_us(floats(5, 0, 1, 9, 3), floats(6, 2, 4, 9, 4)) == 5
    assert union_us(floats(), floats()) == 0


@pytest.mark.parametrize("seed", range(5))
def test_exposed_equals_counting_moment_by_moment(seed: int) -> None:
    random = np.random.default_rng(seed)
    starts, busy_starts = random.integers(0, 100, 40), random.integers(0, 100, 15)
    ends, busy_ends = starts + random.integers(0, 12, 40), busy_starts + random.integers(0, 9, 15)
    busy = {moment for begin, end in zip(busy_starts, busy_ends, strict=True) for moment in range(begin, end)}
    counted = [len(set(range(begin, end)) - busy) for begin, end in zip(starts, ends, strict=True)]
    arguments = [each.astype(float) for each in (starts, ends, busy_starts, busy_ends)]
    assert exposed_us(*arguments).tolist() == counted
    assert (exposed_us(*arguments) + shared_us(*arguments)).tolist() == (ends - starts).tolist()
