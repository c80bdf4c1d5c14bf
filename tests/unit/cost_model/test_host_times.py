"""The host on the time line: what it launches too late, and what follows from its waits, by hand arithmetic."""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

from fakedist.analysis.launches import launch_table, work_table
from fakedist.analysis.memory_tables import fold_layers
from fakedist.cost_model.host_times import (
    host_bars,
    host_parts,
    host_table,
    host_waits,
    late_launches,
    layers_host_us,
    thread_titles,
)
from fakedist.cost_model.step import StepLaunches
from fakedist.cost_model.timeline import Placed
from fakedist.cost_model.what_if import changed_launches, read_what_if
from fakedist.rundir.launch_records import WorkRow
from fakedist.rundir.schema import KINDS
from tests.unit.cost_model.launches_by_hand import COPY, PRODUCT, Host, launch, record
from tests.unit.cost_model.test_what_if import no_calls
from tests.unit.cost_model.times_by_hand import model

HOST = Host(operation_us=4.0, launch_us=6.0)
READ = WorkRow("Memcpy DtoH", "host_reads", "copy", "aten._local_scalar_dense.default", 0.0, 4.0, "")
UPLOAD = WorkRow("Memcpy HtoD", "copy", "copy", "aten._to_copy.default", 0.0, 4e6, "", over_host_link=True)
UP, DOWN = 4, 5  # rows of model(): layers.0.up and layers.0.down; further blocks every three rows


class HostStep(NamedTuple):
    """A step of launches by hand: its table ``host``, the idle time behind late launches, and its tables."""

    host: pd.DataFrame
    late_us: float
    end_us: float
    tables: dict[str, pd.DataFrame]


def step_of(rows: list[dict[str, Any]], took: dict[str, float], what_if: str = "", host: Host = HOST) -> HostStep:
    """Place rows; ``took`` has the time of each name of work. All of it runs on one stream."""
    made = record(rows)
    work = work_table(made)
    calls, tables = no_calls(), {"launches": launch_table(made), "work": work, "layers": model()}
    if what_if:
        tables["launches"], _ = changed_launches(read_what_if(what_if), tables["launches"], calls, tables)
    time_us = work["name"].map(took).to_numpy("f8")
    step = StepLaunches(tables["launches"], work, pd.DataFrame({"time_us": time_us, "bound": ""}), None)
    placed = step.place(host).placed
    gaps = np.maximum(placed.start_us - np.concatenate([[0.0], placed.ends_us[:-1]]), 0.0)
    late = np.zeros(len(rows))
    late[step.timeline.has_work] = gaps  # on one stream, nothing but the host makes the GPU wait
    tail = placed.end_us - float(placed.ends_us[-1])
    return HostStep(host_table(placed, tables["launches"], late, tail), float(gaps.sum()) + tail, placed.end_us, tables)


TOOK = {"elementwise": 100.0, "nvjet": 5.0, "Memcpy DtoH": 2.0, "Memcpy HtoD": 20.0}


def test_a_wait_leaves_the_gpu_idle_for_as_long_as_the_next_launch_takes() -> None:
    made = step_of([launch(COPY), launch(what="host_waits"), launch(COPY)], TOOK)
    # Launched at 10, it runs until 110; the host waits from 10 to 110 and launches again at 120.
    assert made.host["begin_us"].tolist() == [0, 10, 110]
    assert made.host["reached_us"].tolist() == [10, 10, 120]
    assert made.host["passed_us"].tolist() == [10, 110, 120]
    assert made.host["late_us"].tolist() == [10, 0, 10]
    assert made.host["idle_us"].tolist() == [0, 10, 0], "the first 10 us follow from no wait"


def test_a_wait_is_to_blame_for_no_more_than_the_host_stood_still() -> None:
    # The host takes 10 us for each launch of 5 us, so every launch is 5 us late, whether it waits or not.
    made = step_of([launch(PRODUCT), launch(what="host_waits"), *[launch(PRODUCT)] * 3], TOOK)
    assert made.host["passed_us"].tolist() == [10, 15, 25, 35, 45]
    assert made.host["late_us"].tolist() == [10, 0, 10, 5, 5]
    assert made.host["idle_us"].tolist() == [0, 5, 0, 0, 0]


def test_late_launches_use_up_the_delay_of_the_waits_before_them() -> None:
    long, short = launch(COPY), launch(PRODUCT)
    made = step_of([long, launch(READ), short, short, short, launch(what="host_waits"), short], TOOK)
    # The read waits from 20 until 112: a delay of 92. Launches at 122, 132 and 142 are late by 10, 5 and 5.
    assert made.host["late_us"].tolist() == [10, 0, 10, 5, 5, 0, 10]
    # The second wait stands still for 5 us, and has what is left of the first one's delay.
    assert made.host["idle_us"].tolist() == [0, 20, 0, 0, 0, 10, 0]
    assert (
        made.end_us
        - step_of([long, launch(READ), *[short] * 3, launch(what="host_waits"), short], TOOK, "no-sync").end_us
        == 30
    )


def moments(reached: list[float], passed: list[float]) -> Placed:
    """A placed step of which only the host's moments are known."""
    nothing = np.zeros(0)
    return Placed(nothing, nothing, nothing, 0.0, nothing, np.array(reached), np.array(passed))


def test_the_end_of_the_step_follows_from_the_last_wait() -> None:
    # After its last kernel only the host works; rows without work have operations of a measured host.
    launches = launch_table(record([launch(COPY), launch(what="host_waits")]))
    placed = moments([10.0, 10.0], [10.0, 60.0])
    assert host_table(placed, launches, np.array([10.0, 0.0]), 30.0)["idle_us"].tolist() == [0, 30]
    assert host_table(placed, launches, np.array([10.0, 0.0]), 80.0)["idle_us"].tolist() == [0, 50], (
        "it stood still for 50"
    )


def test_a_host_behind_a_full_launch_queue_has_no_delay_left_and_waits_for_no_value() -> None:
    rows = [launch(COPY), launch(READ, op=1), launch(COPY, op=2), launch(what="host_waits"), launch(COPY)]
    launches, work = launch_table(record(rows)), work_table(record(rows))
    # The read waits 90 us, the third launch 200 for a place in the queue, the last wait 5. Then the host is 9 us late.
    placed = moments([10.0, 20.0, 120.0, 330.0, 345.0], [10.0, 110.0, 320.0, 335.0, 345.0])
    host = host_table(placed, launches, np.array([10.0, 0.0, 0.0, 0.0, 9.0]), 0.0)
    assert host["idle_us"].tolist() == [0, 0, 0, 5, 0], "without the wait, the host is 5 us earlier"
    tables = {"launches": launches, "work": work}
    assert host_waits(host, tables, fold_layers(model()))["wait_us"].tolist() == [5.0, 90.0]
    parts = {part.name: part.time_us for part in host_parts(host, launches)}
    assert parts == {"forward": 50.0, "waits for the GPU": 95.0, "waits for a place in the launch queue": 200.0}
    assert "waits for a place in the launch queue" in host_bars(host, launches, work)["name"].tolist()


@pytest.mark.parametrize("seed", range(30))
def test_on_one_stream_the_idle_time_behind_waits_is_what_a_host_that_never_waits_saves(seed: int) -> None:
    random = np.random.default_rng(seed)
    took = {name: float(random.integers(1, 40)) for name in TOOK}
    kinds = [
        launch(COPY),
        launch(PRODUCT),
        launch(READ),
        launch(what="host_waits"),
        launch(what="host_waits_for_device"),
    ]
    rows = [launch(PRODUCT), *(kinds[at] for at in random.choice(5, 50, p=[0.3, 0.4, 0.1, 0.1, 0.1]))]
    rows += [launch(READ), launch(PRODUCT)]
    made = step_of(rows, took)
    saved = made.end_us - step_of(rows, took, "no-sync").end_us
    assert made.host["idle_us"].sum() == pytest.approx(saved)
    assert made.host["late_us"].sum() == pytest.approx(made.late_us)
    assert saved > 0


def stacks(*lines: str, ops: dict[int, int]) -> dict[str, pd.DataFrame]:
    called = pd.DataFrame([*ops.items()], columns=["op", "stack"])
    return {"operation_stacks": called, "stacks": pd.DataFrame({"line": lines})}


def test_waits_are_summed_by_line_with_the_layer_that_the_gpu_is_idle_in() -> None:
    rows = [
        launch(COPY, op=1, layer=UP),
        launch(READ, op=2, layer=UP),
        launch(COPY, op=3, layer=DOWN),
        launch(READ, op=4, layer=DOWN),
        launch(COPY, op=5),
        launch(what="host_waits_for_device"),
        launch(UPLOAD, op=6),
        launch(what="host_waits", op=6),
        launch(PRODUCT, op=7),
    ]
    made = step_of(rows, TOOK)
    lines = stacks("/job/moe.py:5 (route)", "/job/train.py:9 (main)", ops={2: 0, 4: 0, 5: 1, 6: 1})
    found = host_waits(made.host, made.tables | lines, fold_layers(model()))
    assert found.to_dict("records") == [
        {
            "line": "/job/moe.py:5 (route)",
            "is_after": False,
            "kind": "read",
            "operation": "aten._local_scalar_dense.default",
            "layer": "layers.0-2.up",
            "num_layers": 2,
            "num_waits": 2,
            "wait_us": 184.0,  # launched 10 us after what they read, they end 92 us later
            "idle_us": 20.0,
        },
        {
            "line": "/job/train.py:9 (main)",
            "is_after": True,
            "kind": "synchronize",
            "operation": "synchronize (device)",
            "layer": "",
            "num_layers": 1,
            "num_waits": 1,
            "wait_us": 100.0,
            "idle_us": 10.0,
        },
        {
            "line": "/job/train.py:9 (main)",
            "is_after": False,
            "kind": "copy",
            "operation": "aten._to_copy.default",
            "layer": "",
            "num_layers": 1,
            "num_waits": 1,
            "wait_us": 20.0,
            "idle_us": 10.0,
        },
    ]
    assert host_waits(made.host, made.tables, fold_layers(model()))["line"].unique().tolist() == [""]


def test_late_launches_are_summed_by_the_line_of_what_is_launched() -> None:
    rows = [launch(PRODUCT, op=1, layer=UP), launch(PRODUCT, op=2, layer=DOWN), launch(COPY, op=3), launch(COPY, op=4)]
    made = step_of(rows, TOOK)
    lines = stacks("a.py:1 (up)", "a.py:2 (down)", ops={1: 0, 2: 1, 3: 1, 4: 1})
    found = late_launches(made.host, made.tables | lines, fold_layers(model()))
    # Launched at 10, 20 and 30, behind kernels of 5 us; the last one comes in time.
    assert found[["line", "num_launches", "late_us", "layer", "num_layers"]].to_numpy().tolist() == [
        ["a.py:2 (down)", 2, 10.0, "layers.0-2.down", 2],
        ["a.py:1 (up)", 1, 10.0, "layers.0-2.up", 1],
    ]


def test_the_hosts_time_by_phase_and_its_waits_add_up_to_when_it_is_done() -> None:
    rows = [launch(COPY, layer=UP), launch(READ), launch(COPY, phase="backward", recompute=True, layer=UP)]
    made = step_of([*rows, launch(PRODUCT, phase="optimizer")], TOOK)
    parts = {part.name: part.time_us for part in host_parts(made.host, made.tables["launches"])}
    assert parts == {"forward": 20.0, "recompute": 10.0, "optimizer": 10.0, "waits for the GPU": 92.0}
    assert sum(parts.values()) == made.host["passed_us"].iloc[-1]
    assert layers_host_us(made.host, made.tables["launches"], 12)[[0, UP]].tolist() == [20.0, 20.0]


def test_the_hosts_bars_are_operations_with_their_launches_and_waits() -> None:
    rows = [launch(COPY, op=1, layer=UP), launch(COPY, op=1, layer=UP, num_operations=0), launch(READ, op=2)]
    made = step_of([*rows, launch(what="stream_records", event=3)], TOOK)
    bars = host_bars(made.host, made.tables["launches"], made.tables["work"])
    columns = ["start_us", "known_us", "name", "layer", "is_compute", "num_launches"]
    item = "aten._local_scalar_dense.default"
    assert bars[columns].to_numpy().tolist() == [
        [0.0, 16.0, "aten.add.Tensor", UP, True, 2],
        [16.0, 10.0, item, 0, True, 1],
        [26.0, 186.0, f"waits for the GPU: {item}", 0, False, 0],
    ]
    assert {KINDS[kind] for kind in bars["kind"]} == {"forward"}
    assert bars["stream"].tolist() == [0, 0, 0]


def test_each_thread_of_the_host_has_bars_of_its_own() -> None:
    rows = [launch(COPY, op=1), launch(COPY, op=1, thread=3), launch(READ, op=2, thread=3)]
    made = step_of(rows, TOOK)
    bars = host_bars(made.host, made.tables["launches"], made.tables["work"])
    assert bars[["stream", "is_compute"]].to_numpy().tolist() == [[0, True], [3, True], [3, True], [3, False]]
    assert thread_titles(bars["stream"].to_numpy("u8")) == {0: "host", 3: "host, thread 3"}
    earlier = made.tables["launches"].assign(thread=np.nan)
    assert host_bars(made.host, earlier, made.tables["work"])["stream"].tolist() == [0, 0, 0]
