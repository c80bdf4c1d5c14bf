from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.cost_model.breakdown import exposed_calls_us


def rows(*spans: tuple[float, float]) -> pd.DataFrame:
    return pd.DataFrame({"start_us": [span[0] for span in spans], "known_us": [span[1] - span[0] for span in spans]})


def test_what_a_kernel_covers_is_hidden() -> None:
    assert exposed_calls_us(rows((0, 10)), rows((2, 5))).tolist() == [7]


def test_a_gap_belongs_to_the_call_whose_end_lets_the_next_kernel_begin() -> None:
    long, blocking = (0, 100), (10, 20)
    assert exposed_calls_us(rows(long, blocking), rows((0, 10), (20, 100))).tolist() == [0, 10]


def test_before_the_call_that_is_waited_for_the_gap_belongs_to_the_one_that_ran() -> None:
    assert exposed_calls_us(rows((10, 14), (14, 20)), rows((0, 10), (20, 30))).tolist() == [4, 6]


def test_a_gap_that_no_call_ends_belongs_to_the_first_that_began() -> None:
    assert exposed_calls_us(rows((0, 100), (5, 90)), rows((0, 10), (20, 100))).tolist() == [10, 0]


def test_after_the_last_kernel_the_last_call_to_end_is_waited_for() -> None:
    assert exposed_calls_us(rows((0, 30), (5, 12)), rows((0, 10))).tolist() == [20, 0]


def test_parts_add_up_to_the_time_that_only_communicates() -> None:
    random = np.random.default_rng(3)
    calls = rows(*((float(a), float(a + b)) for a, b in random.integers(0, 50, (30, 2))))
    kernels = rows(*((float(a), float(a + b)) for a, b in random.integers(0, 40, (5, 2))))

    def moments(table: pd.DataFrame) -> set[int]:
        return {
            moment
            for start, took in zip(table["start_us"], table["known_us"], strict=True)
            for moment in range(int(start), int(start + took))
        }

    assert exposed_calls_us(calls, kernels).sum() == len(moments(calls) - moments(kernels))


def test_nothing_waits_for_a_call_without_a_time() -> None:
    assert exposed_calls_us(rows((12, 12), (12, 18)), rows((0, 10), (20, 30))).tolist() == [0, 6]
