"""The start of launches: after their stream, after their host, after their events.

The allocator's calls in a step: what they take, where they are placed_by, and when they count.

The critical path: what makes a step as long as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.analysis.launches import launch_table
from fakedist.analysis.memory_tables import fold_layers
from fakedist.cost_model.breakdown import path_parts
from fakedist.cost_model.host_times import host_table
from fakedist.cost_model.step import PricedStep, PriceList, StepInterval
from fakedist.cost_model.timeline import (
    COSTS,
    IDLE,
    ON_GPU,
    ON_HOST,
    CriticalPath,
    Placed,
    Timeline,
    allocator_time,
    allocator_us,
    find_critical_path,
    waits_of_allocator,
)
from fakedist.cost_model.what_if import changed_launches, read_what_if
from fakedist.errors import JobError, RunDirectoryError
from fakedist.rundir.step_time import PathPart
from fakedist.rundir.time_notes import allocator_retries
from tests.unit.cost_model.launches_by_hand import ALL_REDUCE, COPY, Host, launch, record
from tests.unit.cost_model.times_by_hand import model

HOST = Host(operation_us=4.0, launch_us=2.0, graph_us=10.0)


def placed(*rows: dict[str, Any], took: float = 100.0, host: Host | None = None) -> Placed:
    """The rows' positions if each with work takes ``took``."""
    launches = launch_table(record(rows))
    duration = np.where(launches["work"] >= 0, took, 0.0)
    return Timeline(launches).place(duration, host or HOST)


def test_a_busy_stream_delays_the_next_launch_and_a_slow_host_the_step() -> None:
    found = placed(launch(COPY), launch(COPY))
    assert found.start_us.tolist() == [6.0, 106.0]
    assert found.launch_us.tolist() == [6.0, 12.0]
    assert found.end_us == 206.0
    found = placed(launch(COPY, num_operations=100), launch(COPY, num_operations=100), took=1.0)
    assert found.start_us.tolist() == found.launch_us.tolist() == [402.0, 804.0]
    assert found.end_us == 805.0
    assert placed(launch(COPY), launch(COPY, device=1)).start_us.tolist() == [6.0, 12.0]
    found = placed(launch(what="host_waits_for_device"))
    assert (found.end_us, found.start_us.tolist()) == (0.0, [])


def test_streams_overlap_until_one_waits_for_the_others_event() -> None:
    side = [launch(COPY, stream=7), launch(what="stream_records", stream=7, event=5)]
    apart = placed(*side, launch(COPY))
    assert apart.start_us.tolist() == [6.0, 12.0]
    behind = placed(*side, launch(what="stream_waits", event=5), launch(COPY))
    assert behind.start_us.tolist() == [6.0, 106.0]
    rows = [
        launch(COPY, stream=7),
        launch(what="stream_records", stream=7, event=5),
        launch(COPY, stream=7),
        launch(what="stream_records", stream=7, event=6),
        launch(what="stream_waits", event=5),
        launch(COPY),
    ]
    assert placed(*rows).start_us.tolist() == [6.0, 106.0, 106.0]


@pytest.mark.parametrize(
    "wait",
    [
        launch(what="host_waits", stream=7),
        launch(what="host_waits", event=5),
        launch(what="host_waits_for_device"),
        launch(COPY._replace(kind="host_reads"), stream=7, num_operations=0),
    ],
)
def test_a_host_that_waits_launches_when_the_wait_is_over(wait: dict[str, Any]) -> None:
    side = [launch(COPY, stream=7), launch(what="stream_records", stream=7, event=5)]
    found = placed(*side, wait, launch(COPY))
    waited = 206.0 if wait["what"] == "host_reads" else 106.0  # a read is a copy of its own
    assert found.launch_us.tolist()[-1] == waited + 6.0
    assert found.start_us.tolist()[-1] == waited + 6.0


def test_the_host_pays_for_a_graph_once_each_time_and_nothing_to_launch_a_collective() -> None:
    kernel = launch(COPY, num_operations=0)
    rows = [kernel | {"graph": graph} for graph in (1, 1, 2)]
    found = placed(*rows, launch(COPY), took=1.0)
    assert found.launch_us.tolist() == [10.0, 10.0, 20.0, 26.0]
    assert placed(launch(ALL_REDUCE)).launch_us.tolist() == [4.0]


def test_a_row_of_an_unknown_kind_is_damage() -> None:
    launches = launch_table(record([launch(COPY)]))
    with pytest.raises(RunDirectoryError, match="unknown kind 'telepathy'"):
        Timeline(launches.assign(what=["telepathy"]))


def test_a_queue_runs_one_launch_at_a_time_and_a_measured_host_takes_what_was_measured() -> None:
    launches = launch_table(record([launch(COPY, stream=stream) for stream in (7, 8, 9)]))
    found = Timeline(launches, np.array([3, 3, 4])).place(np.full(3, 100.0), Host())
    assert found.start_us.tolist() == [0.0, 100.0, 0.0]
    rows = [launch(COPY), launch(what="host_waits"), launch(COPY)]
    launches = launch_table(record(rows)).assign(host_us=[5.0, 200.0, 30.0])
    found = Timeline(launches).place(np.array([100.0, 0.0, 100.0]), HOST)
    assert found.start_us.tolist() == [5.0, 235.0]


MIB = 1 << 20
FREED = f"free 2 {300 * MIB}, malloc 1 {400 * MIB}"
RETRY = (
    launch(COPY),
    launch(what="host_waits_for_device", allocator=f"refused 1 {400 * MIB}"),
    launch(COPY, allocator=FREED),
)
#: 2 x 75 + 300 x 0.37 for cudaFree, 223 + 400 x 0.10 for cudaMalloc, 33 for the refusal.
FREED_US, REFUSED_US = 150.0 + 111.0 + 223.0 + 40.0, 33.0


def placed_by(timeline: Timeline, took: float = 1000.0) -> Placed:
    return timeline.place(np.where(timeline.has_work, took, 0.0), Host())


def test_calls_take_what_was_published_for_each_and_for_its_bytes() -> None:
    least, us, most = allocator_us(launch_table(record(RETRY)))
    assert us == pytest.approx([0.0, REFUSED_US, FREED_US])
    assert (least <= us).all()
    assert (us <= most).all()
    assert most[2] == pytest.approx(FREED_US + 3 * 775.0)
    assert [cost.least_us < cost.us < cost.most_us for cost in COSTS.values()] == [True] * 5


def test_a_step_in_which_nothing_is_given_back_only_grows_its_caches() -> None:
    rows = [launch(COPY, allocator=f"malloc 3 {MIB}"), launch(COPY, allocator=f"map 9 {180 * MIB}")]
    launches = launch_table(record(rows))
    assert not allocator_us(launches).any()
    assert allocator_time(launches, np.zeros(2)) is None
    rows.append(launch(COPY, allocator=f"unmap 9 {180 * MIB}"))
    assert (allocator_us(launch_table(record(rows)))[1] > 0).all()


def test_the_gpu_runs_dry_before_memory_is_given_back_and_idles_while_it_is() -> None:
    found = placed_by(Timeline(launch_table(record(RETRY))))
    assert found.start_us.tolist() == pytest.approx([0.0, 1000.0 + FREED_US])
    assert found.end_us == pytest.approx(2000.0 + FREED_US)
    room = [row | {"allocator": ""} for row in RETRY if row["work"]]
    assert placed_by(Timeline(launch_table(record(room)))).end_us == 2000.0


def test_a_host_of_any_speed_waits_as_long_for_the_driver() -> None:
    launches = launch_table(record(RETRY)).assign(host_speed=2.0, dispatch_us=10.0)
    slow = Timeline(launches.assign(host_speed=1.0)).host_before_us(Host())[0]
    fast = Timeline(launches).host_before_us(Host())[0]
    assert (slow - fast).tolist() == pytest.approx([5.0, 10.0])


def test_the_interval_has_the_calls_at_their_least_and_at_their_most() -> None:
    timeline = Timeline(launch_table(record(RETRY)))
    ends = [placed_by(each).end_us for each in (timeline, *timeline.allocator_bounds())]
    assert ends[1] < ends[0] < ends[2]
    assert ends[2] - ends[0] == pytest.approx(3 * 775.0)
    assert Timeline(launch_table(record([launch(COPY)]))).allocator_bounds() == []


def test_the_calls_are_counted_with_what_the_host_waits_for_them() -> None:
    launches = launch_table(record(RETRY))
    found = placed_by(Timeline(launches))
    time = allocator_time(launches, found.passed_us - found.reached_us)
    assert time is not None
    assert (time.num_retries, time.refused_bytes) == (1, 400 * MIB)
    assert (time.num_given_back, time.given_back_bytes) == (2, 300 * MIB)
    assert (time.num_taken, time.taken_bytes) == (1, 400 * MIB)
    assert time.time_us == pytest.approx(REFUSED_US + FREED_US)
    assert time.wait_us == pytest.approx(1000.0 - REFUSED_US)
    text = allocator_retries(time).text
    assert "ran out of memory 1 time in the timed step" in text
    assert "gave back what it cached and asked again: 300.00 MiB in 2 calls; it took 400.00 MiB in 1 call" in text
    assert "empty_cache" not in text
    assert "empty_cache" in allocator_retries(replace(time, num_retries=0)).text


def test_rows_of_old_runs_have_no_calls() -> None:
    launches = launch_table(record(RETRY))
    old: Any = launches.drop(columns="allocator")
    assert not allocator_us(old).any()
    assert not waits_of_allocator(old).any()
    assert launch_table(replace(record(RETRY), allocator=b""))["allocator"].tolist() == [""] * 3


def test_the_scripts_waits_can_go_and_the_allocators_cannot() -> None:
    own = launch(what="host_waits")
    launches = launch_table(record([launch(COPY), own, *RETRY]))
    changed, _ = changed_launches(read_what_if("no-sync"), launches, None, {})
    assert changed["what"].astype(str).tolist()[1:4:2] == ["stream_waits", "host_waits_for_device"]
    with pytest.raises(JobError, match="waits for nothing"):
        changed_launches(read_what_if("no-sync"), launch_table(record(RETRY)), None, {})


def test_the_hosts_table_shows_the_wait_and_the_calls_as_its_own_time() -> None:
    launches = launch_table(record(RETRY))
    found = placed_by(Timeline(launches))
    host = host_table(found, launches, np.zeros(3), 0.0)
    assert (host["passed_us"] - host["reached_us"]).tolist() == pytest.approx([0.0, 1000.0 - REFUSED_US, 0.0])
    assert (host["reached_us"] - host["begin_us"]).tolist() == pytest.approx([0.0, REFUSED_US, FREED_US])


SLOW_HOST = Host(launch_us=2.0, graph_us=10.0)


def path_of(rows: list[dict[str, Any]], took: list[float], queues: list[int] | None = None) -> CriticalPath:
    launches = launch_table(record(rows))
    timeline = Timeline(launches, None if queues is None else np.array(queues))
    return find_critical_path(timeline, timeline.place(np.array(took), SLOW_HOST), SLOW_HOST)


def parts(path: CriticalPath) -> list[tuple[int, int, float]]:
    return [(int(row), int(what), float(us)) for row, what, us in zip(path.row, path.what, path.us, strict=True)][::-1]


def test_one_stream_is_its_kernels_or_the_hosts_launches() -> None:
    found = path_of([launch(COPY), launch(COPY)], [100.0, 50.0])
    assert parts(found) == [(0, ON_HOST, 2.0), (0, ON_GPU, 100.0), (1, ON_GPU, 50.0)]
    found = path_of([launch(COPY), launch(COPY)], [1.0, 1.0])
    assert parts(found) == [(0, ON_HOST, 2.0), (1, ON_HOST, 2.0), (1, ON_GPU, 1.0)]
    found = path_of([launch(COPY), launch(what="host_waits"), launch(COPY)], [100.0, 0.0, 5.0])
    assert parts(found) == [(0, ON_HOST, 2.0), (0, ON_GPU, 100.0), (2, ON_HOST, 2.0), (2, ON_GPU, 5.0)]
    assert not len(path_of([], []).row)


def step_with_a_call(kernel_us: float, call_us: float) -> CriticalPath:
    """A kernel, an all_reduce of what the kernel before it made, and a kernel that waits for both."""
    rows = [
        launch(COPY),
        launch(what="stream_records", event=1),
        launch(what="stream_waits", stream=7, event=1),
        launch(ALL_REDUCE, stream=7, call=3),
        launch(what="stream_records", stream=7, event=2),
        launch(COPY),
        launch(what="stream_waits", event=2),
        launch(COPY),
    ]
    return path_of(rows, [100.0, 0, 0, call_us, 0, kernel_us, 0, 10.0])


def test_only_collectives_that_something_waits_for_are_on_the_path() -> None:
    assert [row for row, what, _ in parts(step_with_a_call(40, 70)) if what == ON_GPU] == [0, 3, 7]
    assert [row for row, what, _ in parts(step_with_a_call(70, 40)) if what == ON_GPU] == [0, 5, 7]
    rows = [launch(ALL_REDUCE, stream=7, call=0), launch(ALL_REDUCE, stream=8, call=1), launch(COPY)]
    found = path_of(rows, [100.0, 100.0, 1.0], queues=[3, 3, -1])
    assert [row for row, what, _ in parts(found) if what == ON_GPU] == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_add_up_to_the_step(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for number in range(60):
        stream = int(random.integers(3))
        kind = random.random()
        if kind < 0.15:
            rows.append(launch(what="stream_records", stream=stream, event=number + 1))
        elif kind < 0.3:
            rows.append(launch(what="stream_waits", stream=stream, event=int(random.integers(1, number + 2))))
        elif kind < 0.36:
            rows.append(launch(what=str(random.choice(["host_waits", "host_waits_for_device"])), stream=stream))
        else:
            rows.append(launch(COPY, stream=stream))
    took = [float(random.integers(0, 9)) if row["work"] else 0.0 for row in rows]
    launches = launch_table(record(rows))
    timeline = Timeline(launches)
    placed = timeline.place(np.array(took), SLOW_HOST)
    found = find_critical_path(timeline, placed, SLOW_HOST)
    assert found.us.sum() == pytest.approx(placed.end_us)
    assert not (found.what == IDLE).any(), "everything waits for something here"
    assert (np.diff(found.row) <= 0).all(), "a launch waits only for earlier ones"


def test_parts_are_summed_by_layer_and_group_the_longest_first() -> None:
    layers = model()
    ups = [row for row, name in enumerate(layers["name"]) if name.endswith(".up")]
    rows = [launch(COPY, layer=ups[0]), launch(COPY, layer=ups[1]), launch(ALL_REDUCE, call=4), launch(COPY)]
    tables = {
        "calls": pd.DataFrame({"sequence": [4], "group": [0], "operation": ["all_reduce"]}),
        "groups": pd.DataFrame(
            [("0", "dp", "0-7", 8, 0, "nccl")],
            columns=["name", "description", "ranks", "size", "group_rank", "backend"],
        ),
    }
    path = CriticalPath(
        np.array([3, 3, 2, 1, 0, -1]),
        np.array([ON_GPU, ON_HOST, ON_GPU, ON_GPU, ON_GPU, IDLE]),
        np.array([5.0, 1.0, 30.0, 20.0, 21.0, 2.0]),
    )
    placed = Placed(*(np.zeros(0) for _ in range(3)), 79.0, *(np.zeros(0) for _ in range(3)))
    prices = PriceList(pd.DataFrame(), None)
    launches = launch_table(record(rows))
    step = PricedStep(pd.DataFrame(), launches, None, 79.0, StepInterval(), [], [], {}, path, placed, prices)
    assert path_parts(step, tables, fold_layers(layers)) == [
        PathPart("kernels", "layers.0-2.up", "", "", 3, 2, 41.0),
        PathPart("collectives", "", "dp", "all_reduce", 0, 1, 30.0),
        PathPart("kernels", "", "", "", 1, 1, 5.0),
        PathPart("idle", "", "", "", 0, 0, 2.0),
        PathPart("host", "", "", "", 1, 1, 1.0),
    ]
