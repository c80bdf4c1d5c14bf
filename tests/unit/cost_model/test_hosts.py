"""The host's time of a step: measured and scaled to a host model, or constant; and CUDA's own calls on top."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakedist.analysis.launches import launch_table
from fakedist.cost_model.hosts import (
    CONSTANT_RANGE,
    HOSTS,
    CallCosts,
    HostCosts,
    default_host,
    find_host,
    host_model,
    read_host,
    scaled,
)
from fakedist.cost_model.timeline import IDLE, ON_GPU, Placed, Timeline, find_critical_path
from fakedist.errors import JobError
from fakedist.gpu.models import catalogue
from fakedist.gpu.models.catalogue import GPUS
from fakedist.gpu.models.spec import QUEUE_DEPTH, queue_depth
from fakedist.rundir import time_notes
from fakedist.rundir.step_time import ClockSteadiness
from tests.unit.cost_model.launches_by_hand import ALL_REDUCE, COPY, PRODUCT, Host, launch, record

NAN = math.nan
STEADY = ClockSteadiness(num_repeats=3, spread=0.0, bound=0.0)
#: Powers of ten, so that a sum shows which of them it has.
CALLS = CallCosts(launch_us=1.0, graph_us=10.0, event_us=100.0, copy_us=1e3, product_us=1e4, collective_us=1e5)
MODELS = Path(catalogue.__file__).parent
ACCURACY = Path(__file__).parents[3] / "docs" / "accuracy"


def timeline_of(rows: list[dict[str, Any]], dispatch_us: list[float], **columns: Any) -> Timeline:
    return Timeline(launch_table(record(rows)).assign(dispatch_us=dispatch_us, **columns))


def host_us(row: dict[str, Any], dispatch_us: float, host: HostCosts, **columns: Any) -> float:
    """The time of the host before a row that another follows, which has a clock."""
    timeline = timeline_of([row, launch(COPY, num_operations=0)], [dispatch_us, 0.0], **columns)
    return timeline.place(np.zeros(2), host).launch_us[-1] - host.calls.launch_us


@pytest.mark.parametrize(
    ("row", "call_us"),
    [
        (launch(COPY), 1.0),
        (launch(COPY._replace(kind="library")), 1.0),
        (launch(PRODUCT), 1.0 + 1e4),
        (launch(COPY._replace(kind="copy")), 1e3),
        (launch(COPY._replace(kind="fill")), 1e3),
        (launch(COPY._replace(kind="host_reads")), 1e3),
        (launch(ALL_REDUCE, call=0), 1e5),
        (launch(what="stream_records", event=1), 100.0),
        (launch(what="stream_waits", event=1), 100.0),
        (launch(what="host_waits"), 100.0),
        (launch(what="host_waits_for_device"), 100.0),
    ],
    ids=lambda value: value["what"] if isinstance(value, dict) else "",
)
def test_a_measured_row_takes_the_clock_scaled_and_its_own_call(row: dict[str, Any], call_us: float) -> None:
    host = HostCosts(operation_us=7.0, dispatch=0.5, calls=CALLS)
    assert host_us(row, 40.0, host) == pytest.approx(20.0 + call_us)


def test_a_row_that_the_clock_missed_takes_the_constant_for_its_operations() -> None:
    host = HostCosts(operation_us=7.0, launch_us=1e6, dispatch=0.5, calls=CALLS)
    assert host_us(launch(PRODUCT, num_operations=3), NAN, host) == pytest.approx(3 * 7 + 1 + 1e4)


def test_what_a_tool_measured_is_the_whole_time() -> None:
    assert host_us(launch(PRODUCT), 40.0, HostCosts(dispatch=0.5, calls=CALLS), host_us=[9.0, NAN]) == 9.0


def test_a_graph_is_one_call_however_many_kernels_it_has() -> None:
    rows = [launch(PRODUCT, graph=1, num_operations=0) for _ in range(3)] + [launch(COPY, num_operations=0)]
    found = timeline_of(rows, [4.0, 0.0, 0.0, 6.0]).place(np.zeros(4), HostCosts(dispatch=0.5, calls=CALLS))
    assert found.launch_us.tolist() == [12.0, 12.0, 12.0, 16.0]


def test_without_a_clock_the_constant_is_all_there_is() -> None:
    """CUDA's own calls are in the constant, so none is added, whatever the host model says of them."""
    rows = [launch(PRODUCT), launch(what="stream_records", event=1), launch(ALL_REDUCE, call=0), launch(COPY)]
    found = timeline_of(rows, [NAN] * 4).place(np.zeros(4), HostCosts(4.0, 3.0, 5.0, dispatch=0.1, calls=CALLS))
    assert found.launch_us.tolist() == [7.0, 11.0, 18.0]


def test_a_faster_host_is_faster_in_all_that_was_measured() -> None:
    host = HostCosts(dispatch=0.5, calls=CALLS)
    whole = host_us(launch(PRODUCT), 40.0, host)
    both = timeline_of([launch(PRODUCT), launch(COPY)], [40.0, 0.0], host_speed=2.0).place(np.zeros(2), host)
    assert both.launch_us[0] == pytest.approx(whole / 2)
    assert host_us(launch(PRODUCT), 40.0, scaled(host, 3.0)) == pytest.approx(3 * whole)


# ---- the launch queue


def queued(num_launches: int, took: float, **last: Any) -> tuple[Timeline, Placed, np.ndarray[Any, Any]]:
    """Launches on the default stream that the host makes in no time, then one more row."""
    rows = [*(launch(COPY, num_operations=0) for _ in range(num_launches)), launch(COPY, num_operations=0, **last)]
    duration = np.full(len(rows), took)
    timeline = Timeline(launch_table(record(rows)))
    return timeline, timeline.place(duration, Host()), duration


def test_the_host_stops_where_the_launch_queue_is_full() -> None:
    _, found, _ = queued(QUEUE_DEPTH + 5, 10.0)
    assert found.launch_us[: QUEUE_DEPTH + 1].tolist() == [0.0] * QUEUE_DEPTH + [10.0]
    assert found.launch_us[-1] == 10.0 * 6  # the sixth launch beyond the queue waits for the sixth kernel
    assert found.end_us == 10.0 * (QUEUE_DEPTH + 6)
    assert (found.queued_behind[:QUEUE_DEPTH] == -1).all()
    assert found.queued_behind[QUEUE_DEPTH:].tolist() == list(range(6))


@pytest.mark.parametrize(
    ("variable", "depth"), [("", 1022), ("4x", 4094), ("2x", 2046), ("0.5x", 510), ("0.25x", 254), ("8x", 1022)]
)
def test_the_depth_of_launch_queues_is_the_scripts_own(variable: str, depth: int) -> None:
    assert queue_depth(variable) == depth
    model = host_model(GPUS["h100-80g"], None, 12.96, STEADY, depth=depth)
    assert model.next_to(GPUS["gb200"]).costs.queue_depth == model.time.queue_depth == depth
    assert scaled(host_model(GPUS["gb200"], depth=depth).costs, 2.0).queue_depth == depth
    timeline, _, duration = queued(depth, 10.0)
    assert timeline.place(duration, Host(queue_depth=depth)).launch_us[-2:].tolist() == [0.0, 10.0]
    assert timeline.place(duration, Host(queue_depth=depth + 1)).launch_us[-1] == 0.0


def test_each_stream_has_a_launch_queue_and_the_host_stops_for_all_of_them() -> None:
    _, within, _ = queued(QUEUE_DEPTH, 10.0, stream=7)
    assert within.launch_us[-1] == 0.0
    _, beyond, _ = queued(QUEUE_DEPTH + 5, 10.0, stream=7)
    assert (beyond.launch_us[-1], beyond.start_us[-1]) == (50.0, 50.0)
    rows = [launch(COPY, num_operations=0, graph=1 + number) for number in range(QUEUE_DEPTH + 9)]
    graphs = Timeline(launch_table(record(rows))).place(np.full(len(rows), 10.0), Host())
    assert graphs.launch_us[-9:].tolist() == [10.0 * number for number in range(1, 10)]
    rows = [launch(COPY, num_operations=0, graph=1) for _ in range(QUEUE_DEPTH + 9)]
    graph = Timeline(launch_table(record(rows))).place(np.full(len(rows), 10.0), Host())
    assert graph.launch_us.max() == 0.0, "the launches of one graph have one place"


def test_the_path_goes_through_the_launch_that_made_room_in_the_queue() -> None:
    """The last kernel, alone on its stream, began late because the host stood at the full queue of the other one."""
    timeline, found, duration = queued(QUEUE_DEPTH + 5, 10.0, stream=7)
    duration[-1] = 1e6
    found = timeline.place(duration, Host())
    path = find_critical_path(timeline, found, Host())
    assert path.us.sum() == found.end_us == 50.0 + 1e6
    assert set(path.what.tolist()) == {ON_GPU}
    assert path.row.tolist() == [QUEUE_DEPTH + 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("seed", range(5))
def test_the_parts_of_a_path_with_full_queues_add_up(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = [
        launch(COPY, stream=int(random.integers(2)), num_operations=int(random.integers(2)))
        for _ in range(3 * QUEUE_DEPTH)
    ]
    timeline, host = Timeline(launch_table(record(rows))), Host(operation_us=1.0, launch_us=0.5)
    found = timeline.place(random.exponential(20.0, len(rows)), host)
    assert (found.queued_behind >= 0).any()
    path = find_critical_path(timeline, found, host)
    assert path.us.sum() == pytest.approx(found.end_us)
    assert IDLE not in path.what


# ---- host models


@pytest.mark.parametrize("name", HOSTS)
def test_every_figure_of_a_host_model_has_a_source(name: str) -> None:
    lines = (MODELS / f"{name}.host.toml").read_text().splitlines()
    figures = [line for line in lines if re.match(r"(?!least|most|calls_scale|linear_us)\w+ = [\d.]", line)]
    assert len(figures) == 6
    shared = next((at for at, line in enumerate(figures) if "the next" in line), len(figures))
    for line in figures[:shared]:
        assert re.search(r"#.*(#\d+|NVIDIA, \")", line), line
    host = HOSTS[name]
    assert 0 < host.dispatch_us < host.linear_us
    assert host.least < 1 < host.most


def test_the_hosts_have_the_numbers_that_were_fitted_and_intervals_that_reach_the_bounds() -> None:
    fits = {row["host"]: row for row in json.loads((ACCURACY / "host-fits.json").read_text())["rows"]}
    widths = json.loads((ACCURACY / "interval-widths.json").read_text())["rows"]
    width = next(row for row in widths if row["kind"] == "host")
    assert set(fits) == set(HOSTS)
    for name, host in HOSTS.items():
        in_step = (host.dispatch_us, host.calls_scale * host.calls.launch_us)
        assert in_step == pytest.approx((fits[name]["dispatch_us"], fits[name]["launch_us"]), rel=0.01)
        furthest = max(fits[name]["broken"].values(), default=1.0)
        assert host.most == width["factor"]
        assert 1 / max(furthest, width["factor"]) - 0.01 < host.least <= 1 / max(furthest, width["factor"]) + 0.005


def test_the_usual_host_is_grace_for_the_gb_models_alone() -> None:
    found = {name: default_host(name).name for name in GPUS}
    assert {name for name, host in found.items() if host == "grace"} == {"gb200", "gb300"}
    assert set(found.values()) == {"grace", "dgx-h100"}


def test_the_clock_is_scaled_by_the_machines_score() -> None:
    """The forward without CUDA's own calls, 12.6 - 2 - 5, over this machine's."""
    found = host_model(GPUS["h100-80g"], None, 11.2, STEADY)
    assert found.costs.dispatch == pytest.approx(5.6 / 11.2)
    assert found.costs.calls.launch_us == pytest.approx(5.0 * 2.0)
    assert found.costs.calls.collective_us == pytest.approx(20.0)
    assert found.costs.range == pytest.approx((HOSTS["dgx-h100"].least, HOSTS["dgx-h100"].most))
    assert (found.time.source, found.time.model) == ("measured", "dgx-h100")
    assert host_model(GPUS["gb200"], None, 12.9, STEADY).costs.dispatch == pytest.approx(7.8 / 12.9)
    assert host_model(GPUS["h100-80g"], None, None, STEADY).costs.dispatch == 1.0


def test_this_machine_takes_what_was_measured_and_a_factor_so_many_times_that() -> None:
    this = host_model(GPUS["h100-80g"], "this", 11.2, STEADY).costs
    assert this.dispatch == 1.0
    assert this.calls.launch_us == pytest.approx(10.0 * 2)  # twice as slow as a DGX H100
    twice = host_model(GPUS["h100-80g"], "2", 11.2, STEADY).costs
    assert (twice.dispatch, twice.calls.launch_us) == (2.0, pytest.approx(40.0))
    assert host_model(GPUS["h100-80g"], "2x", None, STEADY).costs.dispatch == 2.0


def test_without_a_clock_only_a_chosen_host_changes_the_constant() -> None:
    for gpu in ("h100-80g", "gb200"):
        found = host_model(GPUS[gpu], None, 12.96, None)
        assert found.costs == HostCosts()
        assert (found.time.source, found.time.low, found.time.high) == ("constant", *CONSTANT_RANGE)
    grace = host_model(GPUS["gb200"], "grace", None, None).costs
    assert grace.operation_us == pytest.approx(4.0 * 7.8 / 5.6)


@pytest.mark.parametrize(
    ("num_repeats", "spread", "counted"), [(3, 0.1, 0.1), (6, 0.3, 0.3), (1, 0.0, 0.14), (2, 0.01, 0.14), (2, 0.4, 0.4)]
)
def test_the_interval_widens_with_the_error_of_the_mean_and_the_bound(
    num_repeats: int, spread: float, counted: float
) -> None:
    clock = ClockSteadiness(num_repeats, spread, bound=0.1)
    low, high = host_model(GPUS["h100-80g"], None, 12.96, clock).costs.range
    own = math.hypot(1.645 * math.log1p(counted) / math.sqrt(num_repeats), math.log(1.1))
    reference = HOSTS["dgx-h100"]
    assert low == pytest.approx(math.exp(-math.hypot(math.log(reference.least), own)))
    assert high == pytest.approx(math.exp(math.hypot(math.log(reference.most), own)))


def test_a_host_next_to_another_gpu_keeps_the_choice() -> None:
    usual = host_model(GPUS["h100-80g"], None, 12.96, STEADY)
    assert usual.next_to(GPUS["gb200"]) == host_model(GPUS["gb200"], None, 12.96, STEADY)
    chosen = host_model(GPUS["h100-80g"], "dgx-h100", 12.96, STEADY)
    assert chosen.next_to(GPUS["gb200"]).time.model == "dgx-h100"


def test_a_host_file_is_like_a_known_host(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('like = "dgx-h100"\nlinear_us = 20\ncpu = "mine"\n')
    host = find_host(str(file), None)
    assert (host.name, host.cpu, host.linear_us, host.calls) == ("mine", "mine", 20.0, HOSTS["dgx-h100"].calls)
    assert host.dispatch_us == 13.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('like = "grave"', "names no known host"),
        ("linear_us = 20", "launch_us is missing"),
        ('like = "grace"\nlinear_us = 5', "is not more than launch_us and product_us"),
        ('like = "grace"\nlinear_us = "x"', "is not a number from 0.1"),
        ('like = "grace"\nspeed = 1', "unknown key 'speed'"),
        ("x", "is not TOML"),
    ],
)
def test_a_host_file_that_is_wrong_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "host.toml").write_text(text)
    with pytest.raises(JobError, match=message):
        read_host(tmp_path / "host.toml", HOSTS)


@pytest.mark.parametrize("text", ["foo", "0", "-1", "nan", "1e9", ""])
def test_an_unknown_host_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="there is no host"):
        find_host(text, None)


def test_the_note_says_where_the_hosts_time_comes_from() -> None:
    constant = time_notes.host_time(host_model(GPUS["gb200"], None, None, None).time).text
    assert "a constant, not measured: 4 µs an operation of torch and 3 µs a launch; it may be 0.5 to 6.5" in constant
    measured = time_notes.host_time(host_model(GPUS["h100-80g"], None, 11.2, STEADY).time).text
    assert "3 steps" in measured
    assert "0.5 times for the host dgx-h100" in measured
    assert "5.6 µs, and 11.2 µs here" in measured
    unscored = time_notes.host_time(host_model(GPUS["h100-80g"], None, None, STEADY).time).text
    assert "speed is not known" in unscored
