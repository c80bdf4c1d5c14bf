import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.breakdown import exposed_calls_us


def rows(*spans: tuple[float, float]) -> pd.DataFrame:
    return pd.DataFrame({"start_us": [span[0] for span in spans], "known_us": [span[1] - span[0] for span in spans]})


@pytest.mark.parametrize(
    ("calls", "kernels", "exposed"),
    [
        # What a kernel covers is hidden.
        ([(0, 10)], [(2, 5)], [7]),
        # A gap belongs to the call whose end lets the next kernel begin.
        ([(0, 100), (10, 20)], [(0, 10), (20, 100)], [0, 10]),
        # Before the call that is waited for the gap belongs to the one that ran.
        ([(10, 14), (14, 20)], [(0, 10), (20, 30)], [4, 6]),
        # A gap that no call ends belongs to the first that began.
        ([(0, 100), (5, 90)], [(0, 10), (20, 100)], [10, 0]),
        # After the last kernel the last call to end is waited for.
        ([(0, 30), (5, 12)], [(0, 10)], [20, 0]),
        # Nothing waits for a call without a time.
        ([(12, 12), (12, 18)], [(0, 10), (20, 30)], [0, 6]),
    ],
)
def test_a_gap_belongs_to_the_call_that_is_waited_for(
    calls: list[tuple[int, int]], kernels: list[tuple[int, int]], exposed: list[int]
) -> None:
    assert exposed_calls_us(rows(*calls), rows(*kernels)).tolist() == exposed


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
