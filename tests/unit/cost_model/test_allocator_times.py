"""The allocator's calls in a step: what they take, where they are placed, and when they count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fakedist.analysis.launches import launch_table
from fakedist.cost_model.host_times import host_table
from fakedist.cost_model.timeline import COSTS, Placed, Timeline, allocator_time, allocator_us, waits_of_allocator
from fakedist.cost_model.what_if import changed_launches, read_what_if
from fakedist.errors import JobError
from fakedist.rundir.time_notes import allocator_retries
from tests.unit.cost_model.launches_by_hand import COPY, Host, launch, record

MIB = 1 << 20
FREED = f"free 2 {300 * MIB}, malloc 1 {400 * MIB}"
RETRY = (
    launch(COPY),
    launch(what="host_waits_for_device", allocator=f"refused 1 {400 * MIB}"),
    launch(COPY, allocator=FREED),
)
#: 2 x 75 + 300 x 0.37 for cudaFree, 223 + 400 x 0.10 for cudaMalloc, 33 for the refusal.
FREED_US, REFUSED_US = 150.0 + 111.0 + 223.0 + 40.0, 33.0


def placed(timeline: Timeline, took: float = 1000.0) -> Placed:
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
    found = placed(Timeline(launch_table(record(RETRY))))
    assert found.start_us.tolist() == pytest.approx([0.0, 1000.0 + FREED_US])
    assert found.end_us == pytest.approx(2000.0 + FREED_US)
    room = [row | {"allocator": ""} for row in RETRY if row["work"]]
    assert placed(Timeline(launch_table(record(room)))).end_us == 2000.0


def test_a_host_of_any_speed_waits_as_long_for_the_driver() -> None:
    launches = launch_table(record(RETRY)).assign(host_speed=2.0, dispatch_us=10.0)
    slow = Timeline(launches.assign(host_speed=1.0)).host_before_us(Host())[0]
    fast = Timeline(launches).host_before_us(Host())[0]
    assert (slow - fast).tolist() == pytest.approx([5.0, 10.0])


def test_the_interval_has_the_calls_at_their_least_and_at_their_most() -> None:
    timeline = Timeline(launch_table(record(RETRY)))
    ends = [placed(each).end_us for each in (timeline, *timeline.allocator_bounds())]
    assert ends[1] < ends[0] < ends[2]
    assert ends[2] - ends[0] == pytest.approx(3 * 775.0)
    assert Timeline(launch_table(record([launch(COPY)]))).allocator_bounds() == []


def test_the_calls_are_counted_with_what_the_host_waits_for_them() -> None:
    launches = launch_table(record(RETRY))
    found = placed(Timeline(launches))
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
    found = placed(Timeline(launches))
    host = host_table(found, launches, np.zeros(3), 0.0)
    assert (host["passed_us"] - host["reached_us"]).tolist() == pytest.approx([0.0, 1000.0 - REFUSED_US, 0.0])
    assert (host["reached_us"] - host["begin_us"]).tolist() == pytest.approx([0.0, REFUSED_US, FREED_US])
