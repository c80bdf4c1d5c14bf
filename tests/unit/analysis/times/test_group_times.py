"""Communication by group: what is hidden, what is exposed."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.times.group_times import exposed_calls_us


def rows(*spans: tuple[float, float]) -> pd.DataFrame:
    return pd.DataFrame({"start_us": [span[0] for span in spans], "known_us": [span[1] - span[0] for span in spans]})


def test_what_a_kernel_covers_is_hidden() -> None:
    assert exposed_calls_us(rows((0, 10)), rows((2, 5))).tolist() == [7]


def test_calls_that_overlap_share_the_time_that_nothing_covers() -> None:
    found = exposed_calls_us(rows((4, 12), (0, 6), (5, 8)), rows((0, 1)))
    assert found.tolist() == [6, 5, 0]
    assert found.sum() == 12 - 1


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
