from dataclasses import astuple

import numpy as np
import pytest

from fakedist.cost_model.job.job_times import LANES, Parts, RankRows, lanes_of, parts_of


def rows_of(*rows: tuple[str, float, float, float, float]) -> RankRows:
    """Rows of lane, start, end, time alone, and launch."""
    lane, start, end, alone, launch = zip(*rows, strict=True)
    codes = np.array([LANES.index(name) for name in lane])
    return RankRows(np.array(start), np.array(launch), np.array(end), np.array(alone), codes)


STEP = rows_of(
    ("communication", 0.0, 30.0, 10.0, 0.0),  # waits 20, then receives
    ("forward", 30.0, 50.0, 20.0, 1.0),
    ("communication", 40.0, 60.0, 20.0, 2.0),  # half of it is hidden
    ("backward", 65.0, 90.0, 25.0, 65.0),  # the host is late
)


def test_the_parts_are_compute_communication_bubble_and_host() -> None:
    assert parts_of(STEP, 90.0, 100.0) == Parts(
        own_us=90.0, compute_us=45.0, communication_us=20.0, bubble_us=30.0, host_us=5.0, wait_us=0.0
    )
    rows = rows_of(("forward", 0.0, 50.0, 50.0, 0.0), ("communication", 5.0, 50.0, 10.0, 0.0))
    found = parts_of(rows, 50.0, 50.0)
    assert (found.compute_us, found.communication_us, found.bubble_us) == (50.0, 0.0, 0.0)


def test_the_parts_add_up_to_the_jobs_step() -> None:
    random = np.random.default_rng(3)
    for _ in range(50):
        start = np.sort(random.uniform(0, 90, 12))
        end = start + random.uniform(0, 20, 12)
        alone = (end - start) * random.uniform(0, 1, 12)
        lane = random.integers(0, len(LANES) - 1, 12)
        lane[0] = LANES.index("communication")
        alone[lane != LANES.index("communication")] = (end - start)[lane != LANES.index("communication")]
        rows = RankRows(start, start - random.uniform(0, 5, 12), end, alone, lane)
        own = float(end.max())
        _, *parts = astuple(parts_of(rows, own, own + 7.0))
        assert sum(parts) == pytest.approx(own + 7.0)
        assert min(parts) >= 0


def test_lanes_show_waits_apart_from_transfers_and_join_what_lies_close() -> None:
    found = lanes_of(STEP, 90.0, 100.0).set_index("lane")
    bubble = found.loc["bubble"]
    assert bubble[["start_us", "end_us"]].to_numpy().tolist() == [[0.0, 20.0], [90.0, 100.0]]
    assert found.loc["communication"].to_numpy().tolist() == [[20.0, 30.0], [40.0, 60.0]]
    close = rows_of(("forward", 0.0, 10.0, 10.0, 0.0), ("forward", 10.001, 20.0, 10.0, 0.0))
    assert lanes_of(close, 20.0, 20.0)[["start_us", "end_us"]].to_numpy().tolist() == [[0.0, 20.0]]
