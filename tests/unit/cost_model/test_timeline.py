"""The start of launches: after their stream, after their host, after their events."""

from typing import Any

import numpy as np
import pytest

from fakedist.analysis.launches import launch_table
from fakedist.cost_model.timeline import Placed, Timeline
from fakedist.errors import RunDirectoryError
from tests.unit.cost_model.launches_by_hand import ALL_REDUCE, COPY, Host, launch, record

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
