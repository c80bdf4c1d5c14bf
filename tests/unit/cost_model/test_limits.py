"""The step if one part alone took time: exact, on schedules made by hand."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.hosts import HostCosts
from fakedist.cost_model.step import PricedStep, PriceList, StepInterval, StepLaunches, find_limits
from fakedist.cost_model.timeline import CriticalPath
from fakedist.gpu.models.catalogue import GPUS
from tests.unit.cost_model.launches_by_hand import Host
from tests.unit.cost_model.test_what_if import COLUMNS, NDR, PRICED, PRODUCT, WORK, call, waits

GROUPS = pd.DataFrame(
    [("5", "dp", "nccl", 8, 0, "0-7"), ("6", "tp", "nccl", 2, 0, "0-1"), ("7", "ep", "nccl", 4, 0, "0-3")],
    columns=["name", "description", "backend", "size", "group_rank", "ranks"],
)
#: sequence, group, time, nodes
CALLS = [(40, 0, 60.0, 4), (41, 0, 90.0, 4), (42, 1, 50.0, 1), (43, 2, 30.0, 2)]


def limits(
    rows: list[tuple[str, int, int, int, int]], host: HostCosts | None = None, **columns: Any
) -> dict[str, tuple[float, float, float]]:
    """The limits of some launches, by group or kind, in their order."""
    launches = pd.DataFrame(rows, columns=COLUMNS).assign(num_operations=0, graph=0, device=0, **columns)
    calls = pd.DataFrame(CALLS, columns=["sequence", "group", "time_us", "num_nodes"]).assign(operation="all_gather")
    calls = calls[calls["sequence"].isin(launches["call"])]
    prices = calls.set_index("sequence").assign(queue=calls["group"].to_numpy(), moved_bytes=0.0, sms=-1, kind="")
    prices = prices.assign(low_us=prices["time_us"] / 2, high_us=prices["time_us"] * 2, link_share=1.0)
    communication = Communication(prices, GPUS["h100-80g"], NDR, False)
    made = StepLaunches(launches, WORK, PRICED, communication)
    placed = made.place(host or Host())
    step = PricedStep(
        *(pd.DataFrame(), launches, communication, placed.placed.end_us, StepInterval(), [], [], {}),
        path=CriticalPath(np.zeros(0, "i8"), np.zeros(0, "i8"), np.zeros(0)),
        placed=placed.placed,
        price_list=PriceList(PRICED, communication),
        host=host or Host(),
        kernel_bounds_us=(0.9 * made.kernels_us, 1.5 * made.kernels_us),
    )
    tables = {"work": WORK, "calls": calls, "groups": GROUPS}
    return {
        limit.group or limit.kind: (limit.step_us, limit.low_us, limit.high_us) for limit in find_limits(step, tables)
    }


def test_each_part_is_as_long_as_the_step_with_nothing_else() -> None:
    # The step waits for 60 us of dp; its 90 us are behind a product, and those of tp before one.
    rows = [*call(40, 7), waits(40), PRODUCT, *call(41, 7), PRODUCT, *call(42, 0), PRODUCT]
    found = limits(rows, Host(launch_us=10.0))
    assert [*found] == ["kernels", "dp", "tp", "host"]
    assert found["kernels"] == pytest.approx((300.0, 270.0, 450.0))
    assert found["dp"] == pytest.approx((150.0, 75.0, 300.0))
    assert found["tp"] == pytest.approx((50.0, 25.0, 100.0))
    # Three launches; the calls' own are in the time of the calls where no clock says more.
    assert found["host"] == pytest.approx((30.0, 15.0, 195.0))


def test_a_host_that_waits_for_the_gpu_waits_for_nothing_if_it_alone_takes_time() -> None:
    rows = [PRODUCT, ("host_waits", -1, 0, 0, -1), PRODUCT, ("host_reads", 0, 0, 0, -1), PRODUCT]
    found = limits(rows, Host(launch_us=40.0))
    assert (found["kernels"][0], found["host"][0]) == (400.0, 160.0)


def test_the_host_that_a_tool_measured_has_no_interval_and_launches_kernels_alone_in_no_time() -> None:
    found = limits([PRODUCT, PRODUCT], Host(launch_us=40.0), host_us=170.0)
    assert found["host"] == (340.0, 340.0, 340.0)
    assert found["kernels"][0] == 200.0


def test_all_groups_over_the_nics_are_a_limit_of_their_own_where_there_are_several() -> None:
    one = [PRODUCT, *call(40, 7), *call(42, 8)]
    assert [*limits(one)] == ["kernels", "dp", "tp"]
    # Two groups on streams of their own run at once; one waits for the other here.
    several = [PRODUCT, *call(40, 7), *call(43, 7), *call(42, 8)]
    found = limits(several)
    assert (found["nics"][0], found["dp"][0], found["ep"][0]) == (90.0, 60.0, 30.0)


def test_a_step_without_collectives_has_kernels_and_a_host() -> None:
    assert [*limits([PRODUCT], Host(launch_us=1.0))] == ["kernels", "host"]


def test_what_takes_next_to_nothing_is_left_out() -> None:
    assert [*limits([PRODUCT], Host(launch_us=0.05))] == ["kernels"]
    assert not math.isnan(limits([PRODUCT])["kernels"][1])
