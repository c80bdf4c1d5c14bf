"""The critical path: what makes a step as long as it is."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.analysis.launches import launch_table
from fakedist.analysis.memory_tables import fold_layers
from fakedist.cost_model.breakdown import path_parts
from fakedist.cost_model.step import PricedStep, PriceList, StepInterval
from fakedist.cost_model.timeline import IDLE, ON_GPU, ON_HOST, CriticalPath, Placed, Timeline, find_critical_path
from fakedist.rundir.step_time import PathPart
from tests.unit.cost_model.launches_by_hand import ALL_REDUCE, COPY, Host, launch, record
from tests.unit.cost_model.times_by_hand import model

HOST = Host(launch_us=2.0, graph_us=10.0)


def path_of(rows: list[dict[str, Any]], took: list[float], queues: list[int] | None = None) -> CriticalPath:
    launches = launch_table(record(rows))
    timeline = Timeline(launches, None if queues is None else np.array(queues))
    return find_critical_path(timeline, timeline.place(np.array(took), HOST), HOST)


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
    placed = timeline.place(np.array(took), HOST)
    found = find_critical_path(timeline, placed, HOST)
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
