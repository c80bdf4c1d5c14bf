"""Virtual time: streams wait for events, the host for streams, and shares add up.

The step if one part alone took time: exact, on schedules made by hand.

The interval of a step: as wide as its kernels' where they fill it, and as the host's where that does.
"""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.analysis.launches import launch_table, work_table
from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.hosts import CONSTANT_RANGE as HOST_RANGE
from fakedist.cost_model.hosts import HostCosts
from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.cost_model.step import PricedStep, PriceList, StepInterval, StepLaunches, find_limits, price_step
from fakedist.cost_model.timeline import Array, CriticalPath
from fakedist.gpu.demand.launch_demand import Tagged
from fakedist.gpu.demand.operation_demand import Demand
from fakedist.gpu.demand.work_shapes import AttentionShape
from fakedist.gpu.launch_log import TO_HOST, Launch, LaunchKind
from fakedist.gpu.launch_rows import LaunchRows
from fakedist.gpu.models.catalogue import GPUS, find_gpu
from fakedist.rundir.rows import Location
from tests.unit.cost_model.launches_by_hand import COPY, UNKNOWN, Host, record
from tests.unit.cost_model.launches_by_hand import launch as launched
from tests.unit.cost_model.test_what_if import COLUMNS, NDR, PRICED, PRODUCT, WORK, call, waits

PRICES = KernelTimes(find_gpu("h100-80g"))
FORWARD = Location(2, "forward", 3, False)
LARGE = 1e9  # bytes, about 330 us
SIDE = 7


def launch(kind: LaunchKind, **fields: Any) -> Launch:
    made = Launch(kind=kind, tag=-1, call=-1)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def kernel(tag: int, blocks: int = 1, **fields: Any) -> Launch:
    return launch(LaunchKind.KERNEL, tag=tag, grid=(blocks, 1, 1), block=(128, 1, 1), **fields)


def tagged(moved_bytes: float = LARGE, flops: float = 0.0, operation: str = "aten.add.Tensor") -> Tagged:
    return Tagged(11, operation, FORWARD, Demand(flops, moved_bytes))


def rows_of(launches: list[Launch], tags: dict[int, Tagged]) -> tuple[list[dict[str, Any]], PricedStep]:
    """The kernels of a log, in the order in which they began, and the step."""
    record = LaunchRows(2, launches, tags, lambda each: "kernel").record()
    step = price_step(launch_table(record), work_table(record), PRICES)
    return step.kernels.to_dict("records"), step


def note_codes(step: PricedStep) -> list[str]:
    return [note.code for note in step.notes]


def end(row: dict[str, Any]) -> float:
    return float(row["start_us"] + row["duration_us"])


def test_a_stream_does_one_after_the_other_and_the_host_goes_on() -> None:
    (first, second), step = rows_of([kernel(0), kernel(1)], {0: tagged(), 1: tagged()})
    assert second["start_us"] == pytest.approx(end(first))
    assert second["launch_us"] == pytest.approx(2 * (PRICES.host.operation_us + PRICES.host.launch_us))
    assert step.step_us == pytest.approx(end(second))
    launches = [kernel(0), kernel(1, stream=SIDE)]
    (first, meanwhile), _ = rows_of(launches, {0: tagged(), 1: tagged()})
    assert meanwhile["start_us"] < end(first)
    waits = [
        kernel(0),
        launch(LaunchKind.STREAM_RECORDS, event=5),
        launch(LaunchKind.STREAM_WAITS, event=5, stream=SIDE),
    ]
    (first, after), _ = rows_of([*waits, kernel(1, stream=SIDE)], {0: tagged(), 1: tagged()})
    assert after["start_us"] == pytest.approx(end(first))


def test_a_row_says_where_it_comes_from() -> None:
    (row,), _ = rows_of([kernel(0, blocks=6)], {0: tagged()})
    assert {name: row[name] for name in ("operation", "op", "phase", "layer", "grid", "block", "bound", "call")} == {
        "operation": "aten.add.Tensor", "op": 11, "phase": "forward", "layer": 3, "grid": "6,1,1", "block": "128,1,1",
        "bound": "memory", "call": -1,
    }  # fmt: skip


def test_a_stream_goes_on_after_the_events_that_it_waits_for_and_its_own_work() -> None:
    launches = [kernel(0), launch(LaunchKind.STREAM_RECORDS, event=5), kernel(1)]
    launches += [launch(LaunchKind.STREAM_WAITS, event=5, stream=SIDE), kernel(2, stream=SIDE)]
    (first, _, after), _ = rows_of(launches, {tag: tagged() for tag in range(3)})
    assert after["start_us"] == pytest.approx(end(first))
    launches = [kernel(0), launch(LaunchKind.STREAM_RECORDS, event=5), kernel(1, stream=SIDE), kernel(2, stream=SIDE)]
    launches += [launch(LaunchKind.STREAM_WAITS, event=5, stream=SIDE), kernel(3, stream=SIDE)]
    (first, _, own, after), _ = rows_of(launches, {tag: tagged() for tag in range(4)})
    assert end(own) > end(first)
    assert after["start_us"] == pytest.approx(end(own))
    (row,), _ = rows_of([launch(LaunchKind.STREAM_WAITS, event=1), kernel(0)], {0: tagged()})
    assert row["start_us"] == row["launch_us"]


@pytest.mark.parametrize("kind", [LaunchKind.HOST_WAITS, LaunchKind.HOST_WAITS_FOR_DEVICE])
def test_a_host_that_waits_launches_later(kind: LaunchKind) -> None:
    (first, second), _ = rows_of([kernel(0), launch(kind), kernel(1)], {0: tagged(), 1: tagged()})
    assert second["launch_us"] > end(first)


def test_the_hosts_own_copies_take_time_and_make_it_wait_but_once() -> None:
    item = tagged(8.0, operation="aten._local_scalar_dense.default")
    launches = [kernel(0), launch(LaunchKind.HOST_READS, tag=1, bytes=8), kernel(2)]
    (first, read, after), _ = rows_of(launches, {0: tagged(), 1: item, 2: tagged()})
    assert (read["name"], read["family"]) == ("Memcpy DtoH", "copy")
    assert read["start_us"] == pytest.approx(end(first))
    assert after["launch_us"] > end(read)
    launches = [
        launch(LaunchKind.COPY, tag=0, bytes=8, direction=TO_HOST),
        launch(LaunchKind.HOST_READS, tag=0, bytes=8),
    ]
    rows, _ = rows_of(launches, {0: tagged(8.0, operation="aten.copy_.default")})
    assert len(rows) == 1


def test_a_collective_is_one_row_without_a_duration_and_a_graph_one_launch() -> None:
    launches = [launch(LaunchKind.COLLECTIVE, tag=0, call=9), kernel(1, call=9), kernel(2)]
    (collective, after), step = rows_of(launches, {0: Tagged(12, "all_reduce", FORWARD), 1: tagged(), 2: tagged()})
    assert (collective["name"], collective["family"], collective["call"]) == ("all_reduce", "communication", 9)
    assert math.isnan(collective["duration_us"])
    assert after["start_us"] == after["launch_us"]
    assert note_codes(step) == ["from_measurements", "collectives_take_no_time"]
    launches = [kernel(0, graph=1), kernel(1, graph=1), kernel(0, graph=2), kernel(1, graph=2)]
    rows, _ = rows_of(launches, {0: tagged(), 1: tagged()})
    launched = [row["launch_us"] for row in rows]
    assert launched == [PRICES.host.graph_us] * 2 + [2 * PRICES.host.graph_us] * 2
    assert len({row["duration_us"] for row in rows}) == 1


def test_kernels_of_one_operation_share_its_work_by_their_threads_after_its_fills() -> None:
    rows, _ = rows_of([kernel(0, blocks=1), kernel(0, blocks=3)], {0: tagged(4e8)})
    assert [row["moved_bytes"] for row in rows] == [1e8, 3e8]
    rows, _ = rows_of([launch(LaunchKind.FILL, tag=0, bytes=300), kernel(0)], {0: tagged(400.0)})
    assert [row["moved_bytes"] for row in rows] == [300.0, 100.0]


def test_a_library_has_all_of_its_operations_work() -> None:
    shape = AttentionShape("forward", "cudnn", 2, 32, 8, 4096, 4096, 128, 128)
    attention = Tagged(1, "aten._scaled_dot_product_cudnn_attention.default", FORWARD,
                       Demand(1e12, 1e6, "bf16", shape))  # fmt: skip
    rows, _ = rows_of([kernel(0, blocks=999), launch(LaunchKind.LIBRARY, tag=0)], {0: attention})
    assert [row["flops"] for row in rows] == [0.0, 1e12]
    assert [row["bound"] for row in rows] == ["launch", "compute"]


def test_a_product_is_timed_by_the_sizes_that_the_library_got_and_copies_have_none_of_its_flops() -> None:
    product = launch(LaunchKind.PRODUCT, tag=0, m=4096, n=2048, k=1024, batch=3, a_type=14, b_type=14, d_type=0)
    (row,), _ = rows_of([product], {0: tagged()})
    assert row["flops"] == 2 * 4096 * 2048 * 1024 * 3
    assert row["moved_bytes"] == 3 * (2 * (4096 * 1024 + 2048 * 1024) + 4 * 4096 * 2048)
    assert row["family"] == "gemm"
    product = launch(LaunchKind.PRODUCT, tag=0, m=8, n=8, k=8, batch=1, a_type=14, b_type=14, d_type=14)
    (copy, multiply), _ = rows_of([kernel(0), product], {0: tagged(1e6, 1024.0, "aten.mm.default")})
    assert (copy["flops"], multiply["flops"]) == (0.0, 1024.0)
    assert copy["duration_us"] > 0


def test_a_launch_without_a_tag_has_no_estimate_and_is_counted() -> None:
    (row,), step = rows_of([kernel(-1)], {})
    assert math.isnan(row["duration_us"])
    assert (row["op"], row["operation"], row["bound"]) == (-1, "", "")
    assert step.notes[-1].text == "1 launch has no estimate, because the work is unknown: kernel"


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


def test_no_step_is_shorter_than_the_kernels_of_its_busiest_stream() -> None:
    rows = [PRODUCT, PRODUCT, ("product", 0, 3, 0, -1), *call(41, 7), *call(41, 7)]
    launches = pd.DataFrame(rows, columns=COLUMNS).assign(num_operations=0, graph=0, device=0)
    made = StepLaunches(launches, WORK, PRICED, None)
    assert (made.least_us, made.kernels_us) == (200.0, 300.0)
    assert StepLaunches(launches.iloc[3:], WORK, PRICED, None).least_us == 0.0


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


class HalfToDouble(KernelTimes):
    """Kernels that together may take half or twice as long."""

    def step_interval(self, priced: pd.DataFrame, counts: Array) -> tuple[float, float]:
        whole = float((priced["time_us"] * counts).sum())
        return whole / 2, whole * 2


def step_of(*rows: dict[str, Any]) -> PricedStep:
    made = record(rows)
    return price_step(launch_table(made), work_table(made), HalfToDouble(find_gpu("h100-80g")))


def test_a_step_is_as_uncertain_as_its_kernels_or_as_the_host_that_fills_it() -> None:
    step = step_of(*[launched(COPY)] * 20)
    assert step.step_low_us == pytest.approx(step.step_us / 2, rel=0.01)
    assert step.step_high_us == pytest.approx(step.step_us * 2, rel=0.01)
    tiny = COPY._replace(moved_bytes=1024.0)
    step = step_of(*[launched(tiny, num_operations=1000)] * 20)
    assert step.step_low_us == pytest.approx(step.step_us * HOST_RANGE[0], rel=0.01)
    assert step.step_high_us == pytest.approx(step.step_us * HOST_RANGE[1], rel=0.01)
    step = step_of(launched(UNKNOWN))
    assert (step.step_low_us, step.step_high_us) == (None, None)
