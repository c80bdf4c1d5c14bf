"""Two runs on one axis: phases meet, and no peak is lost."""

import numpy as np
import pandas as pd

from fakedist.results.compare.layer_matching import common_axis, on_axis


def spans(*rows: tuple[int, str, int]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=["step", "phase", "first_event"])


def test_phases_meet_or_a_step_of_other_phases_is_stretched_as_a_whole() -> None:
    a = spans((0, "init", 0), (1, "forward", 10), (1, "backward", 20))
    b = spans((0, "init", 0), (1, "forward", 10), (1, "backward", 40))
    pieces = common_axis((a, b), (30, 60))
    assert [(piece.step, piece.phase) for piece in pieces] == [(0, "init"), (1, "forward"), (1, "backward")]
    assert [piece.events for piece in pieces] == [((0, 10), (0, 10)), ((10, 20), (10, 40)), ((20, 30), (40, 60))]
    widths = [round((piece.at[1] - piece.at[0]) * 60) for piece in pieces]
    assert widths == [10, 30, 20]
    assert pieces[-1].at[1] == 1.0
    a = spans((1, "forward", 0), (1, "backward", 10), (1, "forward", 20), (1, "backward", 30))
    b = spans((1, "forward", 0), (1, "backward", 30), (2, "forward", 50))
    pieces = common_axis((a, b), (40, 70))
    assert [(piece.step, piece.phase, piece.events) for piece in pieces] == [
        (1, "", ((0, 40), (0, 50))),
        (2, "", ((0, 0), (50, 70))),
    ]


def test_runs_without_spans_and_without_events() -> None:
    nothing = pd.DataFrame()
    (piece,) = common_axis((nothing, nothing), (5, 9))
    assert (piece.events, piece.at) == (((0, 5), (0, 9)), (0.0, 1.0))
    assert common_axis((nothing, nothing), (0, 0)) == []
    least, most = on_axis(np.zeros(0, "i8"), [], 0, 4)
    assert least.tolist() == most.tolist() == [0, 0, 0, 0]


def test_no_peak_is_lost_and_gaps_hold_what_was_before() -> None:
    generator = np.random.default_rng(0)
    curve = np.abs(generator.integers(-3, 4, 10_000).cumsum())
    pieces = common_axis((pd.DataFrame(), pd.DataFrame()), (len(curve), 3))
    least, most = on_axis(curve, pieces, 0, 100)
    assert most.max() == curve.max()
    assert most.tolist() == [int(part.max()) for part in np.split(curve, 100)]
    assert least.tolist() == [int(part.min()) for part in np.split(curve, 100)]
    least, most = on_axis(np.array([5, 9, 2]), pieces, 1, 12)
    assert most.tolist() == least.tolist() == [0, 0, 5, 5, 5, 5, 9, 9, 9, 9, 2, 2]
