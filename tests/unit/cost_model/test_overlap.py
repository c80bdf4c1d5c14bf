"""Kernels and collectives at once: how each slows the other, and what is hidden or exposed."""

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.breakdown import exposed_calls_us, timed
from fakedist.cost_model.overlap import (
    Contender,
    Floats,
    SharedLinks,
    exposed_us,
    filled_sms,
    rates_with,
    settle,
    shared_us,
    union,
    union_us,
)
from fakedist.cost_model.step_axis import hidden_parts, hidden_us
from tests.unit.cost_model.times_by_hand import NAN, kernel, table

SMS, BANDWIDTH = 132, 3.35e12


def floats(*values: float) -> Floats:
    return np.array(values, np.float64)


def work(*rows: tuple[str, int, int]) -> pd.DataFrame:
    return pd.DataFrame([(*row, 1) for row in rows], columns=["kind", "m", "n", "batch"])


def rates(table: pd.DataFrame, bound: int, contender: Contender) -> list[float]:
    return rates_with(table, floats(*[bound] * len(table)), SMS, BANDWIDTH, contender).tolist()


def test_a_kernel_loses_sms_or_traffic_only_while_the_collective_runs() -> None:
    exact, small = ("product", 132 * 128, 256), ("product", 60 * 128, 256)
    assert rates(work(exact, small), 0, Contender(24, 0.0)) == [0.5, 1.0]
    assert rates(work(("kernel", 0, 0)), 1, Contender(24, 335e9)) == [pytest.approx(0.8)]
    assert rates(work(("kernel", 0, 0)), 0, Contender(33, 335e9)) == [pytest.approx(0.75)]
    kernel, call = two_streams(100.0, 10.0, 0.8)
    assert (kernel, call) == (pytest.approx(102.0, rel=1e-4), 10.0)


def two_streams(kernel_us: float, call_us: float, rate: float) -> tuple[float, float]:
    """A kernel and a collective that begin together: how long each takes."""
    members = np.array([False, True])
    groups = [SharedLinks(members, floats(rate, 1), floats(0, 1))]
    found = settle(lambda durations: floats(0, 0), floats(kernel_us, call_us), groups)
    return float(found[0]), float(found[1])


def two_calls(begins_us: float, shares: Floats) -> Floats:
    """Two collectives of 10 us over one link, the second of which begins later: how long each takes."""
    links = SharedLinks(np.array([True, True]), floats(1, 1), shares)
    return settle(lambda durations: floats(0, begins_us), floats(10, 10), [links])


def test_collectives_at_once_share_the_links_that_their_latency_does_not_leave_idle() -> None:
    assert two_calls(0.0, floats(1, 1)) == pytest.approx([20.0, 20.0], rel=0.05)
    assert two_calls(0.0, floats(0.5, 0.5)).tolist() == [10.0, 10.0]
    assert two_calls(0.0, floats(0.75, 0.75)) == pytest.approx([15.0, 15.0])  # they ask for 1.5 times the link
    assert two_calls(0.0, floats(1.0, 0.2)) == pytest.approx([12.0, 12.0])
    assert two_calls(10.0, floats(1, 1)).tolist() == [10.0, 10.0]
    found = settle(lambda durations: floats(0, 5), floats(5, 7), [])
    assert found.tolist() == [5, 7]


def at_once(filled: Floats, *alone: float) -> list[float]:
    """Kernels on streams of their own that begin together: how long each takes."""
    begins = np.zeros(len(alone))
    return settle(lambda durations: begins, floats(*alone), [], filled).tolist()


def test_products_that_fill_the_gpu_with_their_tiles_take_turns() -> None:
    assert at_once(floats(1, 1), 10, 10) == [20, 20]
    assert at_once(floats(1, 1, 1, 1), 10, 10, 10, 10) == [40] * 4
    assert at_once(floats(1, 1), 10, 20) == pytest.approx([20, 30], rel=0.03)
    assert at_once(floats(0.5, 0.5), 10, 10) == [10, 10]
    assert at_once(floats(1, 0), 10, 10) == [10, 10]  # memory limits the other one
    table = work(("product", 33 * 128, 256), ("product", 132 * 128, 512), ("kernel", 0, 0)).assign(groups=0)
    assert filled_sms(table, SMS).tolist() == [0.25, 1.0, 1.0]
    assert filled_sms(table.assign(batch=2), SMS).tolist() == [0.5, 1.0, 1.0]
    assert filled_sms(table.assign(groups=3), SMS).tolist() == [0.75, 1.0, 1.0]


def test_only_what_no_kernel_covers_is_exposed_and_unions_join_what_touches() -> None:
    assert exposed_us(floats(0, 4, 20), floats(10, 6, 30), floats(3), floats(8)).tolist() == [5, 0, 10]
    assert exposed_us(floats(2), floats(5), floats(), floats()).tolist() == [3]
    assert exposed_us(floats(0), floats(10), floats(1, 2, 9), floats(5, 4, 12)).tolist() == [5]
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


def kernels() -> pd.DataFrame:
    """Compute from 0 to 20 and from 20.5 to 40 on two streams; collectives from 10 to 50, from 60 on, and unknown."""
    return timed(
        table(
            kernel(0, 15),
            kernel(5, 15, stream=3),
            kernel(20.5, 19.5),
            kernel(10, 40, "communication", stream=9),
            kernel(60, 10, "communication", stream=9),
            kernel(12, NAN, "communication", stream=9),
        )
    )


def test_parts_are_where_something_computes_during_a_collective_and_can_be_seen() -> None:
    exact = hidden_parts(kernels(), 0.1)
    assert exact.to_numpy("f8").tolist() == [[9, 10, 20], [9, 20.5, 40]]
    assert hidden_parts(kernels(), 1.0).to_numpy("f8").tolist() == [[9, 10, 40]]
    assert len(hidden_parts(kernels(), 31.0)) == 0
    bars = pd.DataFrame({"start_us": [10.0, 60.0, 18.0], "end_us": [50.0, 70.0, 21.0]})
    assert hidden_us(bars, kernels()).tolist() == [29.5, 0.0, 2.5]
    collectives, compute = kernels()[lambda rows: ~rows["is_compute"]], kernels()[lambda rows: rows["is_compute"]]
    assert len(hidden_parts(collectives, 0.1)) == 0
    assert len(hidden_parts(compute, 0.1)) == 0


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
