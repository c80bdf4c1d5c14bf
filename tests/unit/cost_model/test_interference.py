"""Kernels during collectives: exact on two streams of known durations."""

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.overlap import Contender, Floats, SharedLinks, filled_sms, rates_with, settle

SMS, BANDWIDTH = 132, 3.35e12


def floats(*values: float) -> Floats:
    return np.array(values, np.float64)


def work(*rows: tuple[str, int, int]) -> pd.DataFrame:
    return pd.DataFrame([(*row, 1) for row in rows], columns=["kind", "m", "n", "batch"])


def rates(table: pd.DataFrame, bound: int, contender: Contender) -> list[float]:
    return rates_with(table, floats(*[bound] * len(table)), SMS, BANDWIDTH, contender).tolist()


def test_a_kernel_loses_the_sms_or_the_traffic_of_a_collective_next_to_it() -> None:
    exact, small = ("product", 132 * 128, 256), ("product", 60 * 128, 256)
    assert rates(work(exact, small), 0, Contender(24, 0.0)) == [0.5, 1.0]
    assert rates(work(("kernel", 0, 0)), 1, Contender(24, 335e9)) == [pytest.approx(0.8)]
    assert rates(work(("kernel", 0, 0)), 0, Contender(33, 335e9)) == [pytest.approx(0.75)]


def two_streams(kernel_us: float, call_us: float, rate: float) -> tuple[float, float]:
    """A kernel and a collective that begin together: how long each takes."""
    members = np.array([False, True])
    groups = [SharedLinks(members, floats(rate, 1), floats(0, 1))]
    found = settle(lambda durations: floats(0, 0), floats(kernel_us, call_us), groups)
    return float(found[0]), float(found[1])


def test_a_kernel_loses_only_while_the_collective_runs() -> None:
    kernel, call = two_streams(100.0, 10.0, 0.8)
    assert (kernel, call) == (pytest.approx(102.0, rel=1e-4), 10.0)


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


def test_products_that_fill_the_gpu_take_turns_and_others_run_side_by_side() -> None:
    assert at_once(floats(1, 1), 10, 10) == [20, 20]
    assert at_once(floats(1, 1, 1, 1), 10, 10, 10, 10) == [40] * 4
    assert at_once(floats(1, 1), 10, 20) == pytest.approx([20, 30], rel=0.03)
    assert at_once(floats(0.5, 0.5), 10, 10) == [10, 10]
    assert at_once(floats(1, 0), 10, 10) == [10, 10]  # memory limits the other one


def test_a_product_fills_as_many_sms_as_it_has_tiles() -> None:
    table = work(("product", 33 * 128, 256), ("product", 132 * 128, 512), ("kernel", 0, 0)).assign(groups=0)
    assert filled_sms(table, SMS).tolist() == [0.25, 1.0, 1.0]
    assert filled_sms(table.assign(batch=2), SMS).tolist() == [0.5, 1.0, 1.0]
    assert filled_sms(table.assign(groups=3), SMS).tolist() == [0.75, 1.0, 1.0]
