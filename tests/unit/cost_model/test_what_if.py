"""Changes of a job's communication: exact, on schedules made by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.analysis.launches import launch_table, work_table
from fakedist.cost_model.collectives.collective_times import FABRICS
from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.step import StepLaunches
from fakedist.cost_model.what_if import (
    changed_fabric,
    changed_launches,
    loop_of_optimizer,
    read_what_if,
    read_what_ifs,
)
from fakedist.errors import JobError
from fakedist.gpu.models.catalogue import GPUS
from fakedist.rundir.launch_records import WorkRow
from tests.unit.cost_model.launches_by_hand import Host, launch, record
from tests.unit.cost_model.times_by_hand import model

NDR = FABRICS["dgx-h100-ndr"]
WORK = pd.DataFrame([("product", 64, 64, 1), ("collective", 0, 0, 0)], columns=["kind", "m", "n", "batch"])
PRICED = pd.DataFrame({"time_us": [100.0, np.nan], "bound": ["compute", ""]})
GROUPS = pd.DataFrame([("0", ""), ("5", "dp"), ("6", "tp"), ("7", "idle")], columns=["name", "description"])
#: sequence, kind, queue (row of GROUPS), time.
CALLS = [(40, "all_gather", 1, 60.0), (41, "reduce_scatter", 1, 90.0), (42, "all_reduce", 2, 50.0)]
COLUMNS = ["what", "work", "stream", "event", "call"]


def call(number: int, stream: int) -> list[tuple[str, int, int, int, int]]:
    """A call as ProcessGroupNCCL makes it: its stream waits for stream 0, which can wait for the event ``number``."""
    return [
        ("stream_records", -1, 0, 100 + number, -1),
        ("stream_waits", -1, stream, 100 + number, -1),
        ("collective", 1, stream, 0, number),
        ("stream_records", -1, stream, number, -1),
    ]


PRODUCT = ("product", 0, 0, 0, -1)


def waits(number: int) -> tuple[str, int, int, int, int]:
    return ("stream_waits", -1, 0, number, -1)


def no_calls() -> Communication:
    """The communication of a step without calls."""
    columns = ["call", "kind", "queue", "time_us", "low_us", "high_us", "num_nodes", "moved_bytes", "link_share"]
    return Communication(pd.DataFrame(columns=columns).set_index("call"), GPUS["h100-80g"], NDR, False)


def end_us(
    rows: list[tuple[str, int, int, int, int]],
    what_if: str = "",
    link_share: float | None = None,
    launch_us: float = 0.0,
) -> float:
    """The end of the step with a change. Calls interfere if they keep the links busy for a share of their time."""
    launches = pd.DataFrame(rows, columns=COLUMNS).assign(num_operations=0, graph=0, device=0)
    table = pd.DataFrame(CALLS, columns=["call", "kind", "queue", "time_us"]).set_index("call")
    table = table.assign(low_us=table["time_us"], high_us=table["time_us"], num_nodes=1, moved_bytes=0.0)
    table = table.assign(link_share=0.0 if link_share is None else link_share, algorithm="ring", sms=-1)
    communication = Communication(table, GPUS["h100-80g"], NDR, link_share is not None)
    for change in read_what_ifs(what_if) if what_if else ():
        launches, communication = changed_launches(change, launches, communication, {"groups": GROUPS})
    return StepLaunches(launches, WORK, PRICED, communication).place(Host(launch_us=launch_us)).placed.end_us


def test_separate_calls_of_one_group_run_at_once_if_streams_allow() -> None:
    assert end_us([*call(40, 7), *call(41, 8)], "separate=dp") == 90.0


def test_separate_gives_each_kind_a_stream_and_keeps_its_waits_and_events() -> None:
    rows = [*call(40, 7), PRODUCT, *call(41, 7), waits(41), PRODUCT]
    # As it is: 60 us next to a product of 100, then 90 after the product, then a product.
    assert end_us(rows) == 290.0
    assert end_us(rows, "separate=dp") == 290.0
    behind = [PRODUCT, *call(40, 7), *call(41, 7), waits(41), PRODUCT]
    assert end_us(behind) == 100 + 60 + 90 + 100
    assert end_us(behind, "separate=dp") == 100 + 90 + 100


def test_a_gather_no_longer_waits_behind_the_reduction_of_the_block_before() -> None:
    """Backward as Megatron-FSDP runs it: a block's gradients go out, and the next block's weights come in."""
    backward = [PRODUCT, *call(41, 8), *call(40, 7), waits(40), PRODUCT, waits(41), PRODUCT]
    # One communicator: the reduction (90), then the gather (60), then the block that waits for it.
    assert end_us(backward) == 100 + 90 + 60 + 100 + 100
    # Two of half-idle links: the gather runs at once, and the reduction during it and the block.
    assert end_us(backward, "separate=dp", 0.5) == 100 + 60 + 100 + 100
    # Links that one collective fills are shared: less is gained.
    assert 100 + 60 + 100 + 100 < end_us(backward, "separate=dp", 1.0) < end_us(backward, "", 1.0)
    assert end_us(backward, "", 1.0) == end_us(backward)


def test_merged_groups_queue_and_without_overlap_everything_does() -> None:
    rows = [*call(41, 7), *call(42, 8)]
    assert end_us(rows) == 90.0
    assert end_us(rows, "merge=dp,tp") == 140.0
    assert end_us(rows, "merge=5,6") == 140.0
    rows = [*call(40, 7), PRODUCT, *call(42, 8), PRODUCT]
    assert end_us(rows) == 200.0
    assert end_us(rows, "no-overlap") == 60 + 100 + 50 + 100


def test_with_perfect_overlap_nothing_waits_for_a_collective_but_its_communicator() -> None:
    rows = [*call(40, 7), waits(40), PRODUCT, *call(41, 7), waits(41), PRODUCT]
    assert end_us(rows) == 60 + 100 + 90 + 100
    assert end_us(rows, "overlap") == 200.0
    # A call on the products' own stream, and the last one, which nothing can hide.
    own_stream = [PRODUCT, ("collective", 1, 0, 0, 42), PRODUCT, *call(41, 7)]
    assert end_us(own_stream) == 100 + 50 + 100 + 90
    assert end_us(own_stream, "overlap") == 200 + 90
    # One communicator runs its calls one by one: they take longer than the products.
    calls = [PRODUCT, *call(40, 7), *call(41, 7), *call(40, 7), waits(40), PRODUCT]
    assert end_us(calls, "overlap") == 100 + 60 + 90 + 60 < end_us(calls)
    with pytest.raises(JobError, match="no collectives"):
        end_us([PRODUCT], "overlap")


def test_several_changes_are_made_one_after_the_other() -> None:
    calls = [PRODUCT, *call(40, 7), *call(41, 7), *call(40, 7), waits(40), PRODUCT]
    assert end_us(calls, "overlap+separate=dp") == 100 + 60 + 60 < end_us(calls, "overlap")
    assert end_us(calls, "separate=dp + overlap") == 220
    with pytest.raises(JobError, match="no collectives on a group 'dp'"):  # a change leaves no group of that name
        end_us([*calls, *call(42, 8)], "separate=dp+merge=dp,tp")
    assert [change.groups for change in read_what_ifs("separate=dp+tp+merge=a+b,c")] == [("dp+tp",), ("a+b", "c")]
    for text in ("overlap+", "overlap+nothing", "+"):
        with pytest.raises(JobError, match="there is no what-if"):
            read_what_ifs(text)


@pytest.mark.parametrize("wait", ["host_waits", "host_waits_for_device"])
def test_a_faster_host_launches_sooner_and_one_that_never_waits_launches_ahead(wait: str) -> None:
    rows = [PRODUCT, (wait, -1, 0, 0, -1), PRODUCT, ("host_reads", 0, 0, 0, -1), PRODUCT]
    assert end_us(rows, launch_us=40) == 3 * 40 + 400
    assert end_us(rows, "host=2x", launch_us=40) == 3 * 20 + 400
    assert end_us(rows, "host=0.5", launch_us=40) == 3 * 80 + 400
    assert end_us(rows, "no-sync", launch_us=40) == 40 + 400
    assert end_us(rows, "no-host-waits", launch_us=40) == 400
    with pytest.raises(JobError, match="the step's host waits for nothing"):
        end_us([PRODUCT], "no-sync")


def test_a_host_that_waits_for_no_event_changes_no_event() -> None:
    rows = [*call(41, 7), ("host_waits", -1, 0, 41, -1), PRODUCT, waits(41), PRODUCT]
    assert end_us(rows) == 90 + 200
    assert end_us(rows, "no-sync") == 200


UP, DOWN = 4, 5  # rows of model(): layers.0.up and layers.0.down; further blocks every three rows
NORM = WorkRow("norm", "kernel", "norm", "aten.native_layer_norm.default")
SQRT = WorkRow("sqrt", "kernel", "optimizer", "aten.sqrt.default")
FOREACH = WorkRow("multi_tensor_apply_kernel", "kernel", "optimizer", "aten._foreach_sqrt.default")
HOST = Host(operation_us=4.0, launch_us=6.0, graph_us=7.0)


def host_end_us(rows: list[dict[str, Any]], what_if: str = "", **columns: object) -> float:
    """When the host has made launches that take no time on the GPU."""
    made = record(rows)
    launches, work = launch_table(made).assign(**columns), work_table(made)
    tables = {"layers": model(), "work": work}
    tables["operation_stacks"] = pd.DataFrame({"op": [1, 2, 3], "stack": [0, 1, 2]})
    lines = ["/job/train.py:57 (main)", "/job/train.py:5 (main)", "/job/moe/dispatch.py:41 (route, backward)"]
    tables["stacks"] = pd.DataFrame({"line": lines})
    if what_if:
        launches, _ = changed_launches(read_what_if(what_if), launches, no_calls(), tables)
    time_us = np.where(work["name"] == "slow", 1000.0, 0.0)
    priced = pd.DataFrame({"time_us": time_us, "bound": ""})
    return StepLaunches(launches, work, priced, None).place(HOST).placed.end_us


def of(layer: int, **fields: Any) -> dict[str, Any]:
    return launch(NORM, layer=layer, **fields)


def test_a_run_of_launches_of_some_layers_is_one_graph() -> None:
    rows = [of(0), of(UP), of(DOWN), of(UP + 3), of(0)]
    assert host_end_us(rows) == 5 * 10
    assert host_end_us(rows, "cuda-graphs=layers.*") == 10 + 7 + 10
    assert host_end_us(rows, "cuda-graphs=layers") == 10 + 7 + 10, "with all that a layer contains"
    assert host_end_us(rows, "cuda-graphs=layers.0-2") == 10 + 7 + 10, "as the report names repeated layers"
    assert host_end_us(rows, "cuda-graphs=layers.0") == 10 + 7 + 10 + 10
    assert host_end_us(rows, "cuda-graphs=layers.*.up") == 10 + 7 + 10 + 7 + 10
    assert host_end_us(rows, "cuda-graphs=layers.0.up,layers.0.down") == 10 + 7 + 10 + 10


@pytest.mark.parametrize(("option", "later_us"), [("cuda-graphs=layers.*", 0), ("compile=layers.*", 2 * 5)])
def test_work_between_two_steps_stays_before_the_first_launch(option: str, later_us: float) -> None:
    measured = {"dispatch_us": [3000.0, 40.0, 40.0]}
    end_us = host_end_us([of(UP), of(DOWN), of(UP + 3)], option, **measured)
    assert end_us == pytest.approx(3000 + later_us, abs=10)


def test_a_graph_ends_where_the_host_waits_another_layer_launches_or_the_phase_changes() -> None:
    phases = [of(UP), of(DOWN), of(UP, phase="backward"), of(UP, phase="backward", recompute=True)]
    assert host_end_us(phases, "cuda-graphs=layers.*") == 3 * 7
    for end in (launch(what="host_waits"), launch(what="host_waits_for_device"), of(0)):
        own = 10 if end["work"] else 0
        assert host_end_us([of(UP), end, of(UP)], "cuda-graphs=layers.*") == 7 + own + 7
    events = [launch(what="stream_records", event=1), launch(what="stream_waits", event=1, layer=UP)]
    assert host_end_us([of(UP), *events, of(UP)], "cuda-graphs=layers.*") == 7
    replayed = [of(UP, graph=3), of(DOWN, graph=3)]
    assert host_end_us([*replayed, of(UP)], "cuda-graphs=layers.*") == host_end_us(replayed) + 7, "graphs stay"


def test_what_a_graph_launches_takes_no_measured_time_of_the_host() -> None:
    rows = [of(0), of(UP), of(DOWN)]
    assert host_end_us(rows, host_us=[30.0, 40.0, 50.0]) == 120
    assert host_end_us(rows, "cuda-graphs=layers.*", host_us=[30.0, 40.0, 50.0]) == 30 + 7
    assert host_end_us(rows, "host=2x", host_us=[30.0, 40.0, 50.0]) == 60
    assert host_end_us(rows, "compile=layers.*", host_us=[30.0, 40.0, 50.0]) == 30 + 6 + 6


def test_compiled_layers_launch_without_torchs_operations() -> None:
    assert host_end_us([of(0), of(UP), of(DOWN), of(0)], "compile=layers.*") == 10 + 6 + 6 + 10


@pytest.mark.parametrize("what_if", ["cuda-graphs=layers.9", "compile=block"])
def test_a_layer_that_launches_nothing_is_an_error(what_if: str) -> None:
    with pytest.raises(JobError, match="no such layer launches anything outside of CUDA graphs") as raised:
        host_end_us([of(UP)], what_if)
    assert "layers.*" in raised.value.hint


def test_an_optimizer_in_lists_launches_once_for_thirty_parameters() -> None:
    alone = [launch(SQRT, phase="optimizer") for _ in range(90)]
    # One of the 30 has an operation, and the launch of a list takes as long as a graph's.
    assert host_end_us([of(UP), *alone], "foreach") == 10 + 3 * (4 + 7)
    launches = launch_table(record(alone))
    assert loop_of_optimizer(launches, work_table(record(alone)))[1] == 1.0
    for rows in ([launch(FOREACH, phase="optimizer")] * 90, alone[:59], [launch(SQRT)] * 90):
        with pytest.raises(JobError, match="no optimizer that runs operations for each parameter"):
            host_end_us(rows, "foreach")


@pytest.mark.parametrize(("twice", "in_all"), [(40, 8.0), (20, 7.5)])
def test_an_operation_that_runs_twice_for_each_parameter_does_not_halve_the_kernels_of_one(
    twice: int, in_all: float
) -> None:
    names = ("lerp_", "addcmul_", "sqrt", "div", "add_", "addcdiv_", "mul_")
    once = [SQRT._replace(operation=f"aten.{name}.Tensor") for name in names]
    works = [*once * 40, *[once[-1]] * twice]  # AdamW of 40 parameters, of which some decay
    rows = record([launch(work, phase="optimizer") for work in works])
    assert loop_of_optimizer(launch_table(rows), work_table(rows))[1] == in_all


def test_the_host_stops_waiting_at_one_line_alone() -> None:
    slow = launch(SQRT._replace(name="slow"))
    waits = [launch(what="host_waits", op=1), launch(what="host_waits", op=2)]
    rows = [slow, waits[0], of(UP), slow, waits[1], of(UP)]
    assert host_end_us(rows) == 10 + 1000 + 20 + 1000 + 10
    assert host_end_us(rows, "no-sync=train.py:57") == 10 + 2000 + 10
    assert host_end_us(rows, "no-sync=train.py:5") == 10 + 1000 + 20 + 1000, "not 57 as well"
    assert host_end_us(rows, "no-sync=/job/train.py:*") == host_end_us(rows, "no-sync") == 10 + 2000
    # A wait outside of any operation is behind the line of the operation before it.
    behind = [launch(SQRT._replace(name="slow"), op=3), launch(what="host_waits_for_device"), of(UP)]
    assert host_end_us(behind, "no-sync=dispatch.py:41") == 10 + 1000
    for no_line in ("train.py", "rain.py:57", "train.py:7"):
        with pytest.raises(JobError, match="waits for the GPU at no such line"):
            host_end_us(rows, f"no-sync={no_line}")


@pytest.mark.parametrize(
    ("what_if", "message", "hint"),
    [
        ("merge=dp,moe", "no collectives on a group 'moe'", "dp, tp"),
        ("separate=idle", "no collectives on a group 'idle'", "dp, tp"),
        ("separate=tp", "every call on it is of one kind, all_reduce", "nothing to separate"),
    ],
)
def test_a_group_that_nothing_changes_for_is_an_error(what_if: str, message: str, hint: str) -> None:
    with pytest.raises(JobError, match=message) as raised:
        end_us([*call(40, 7), *call(41, 7), *call(42, 8)], what_if)
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "merge=dp",
        "merge=dp,dp",
        "separate=a,b",
        *(f"bandwidth={by}" for by in ("fast", "0x", "2000x")),
        *(f"host={by}" for by in ("", "fast", "0x", "nic:2x")),
        "cuda-graphs",
        "compile=",
        *(f"{name}=1" for name in ("foreach", "no-overlap", "overlap", "no-host-waits")),
    ],
)
def test_anything_else_is_no_what_if(text: str) -> None:
    with pytest.raises(JobError, match="there is no what-if") as raised:
        read_what_if(text)
    assert "merge=A,B" in raised.value.hint


def test_bandwidth_is_that_of_the_nics_or_of_nvlink() -> None:
    nics = changed_fabric(read_what_if("bandwidth=2x"), NDR, 450e9)
    assert (nics.nic_bandwidth, nics.send_bandwidth) == (2 * NDR.nic_bandwidth, 2 * NDR.send_bandwidth)
    nvlink = changed_fabric(read_what_if("bandwidth=nvlink:0.5"), NDR, 450e9)
    assert (nvlink.nvlink_bandwidth, nvlink.nic_bandwidth) == (225e9, NDR.nic_bandwidth)
    assert replace(nvlink, name=NDR.name, nvlink_bandwidth=0.0) == NDR
    with pytest.raises(JobError, match="has no NVLink"):
        changed_fabric(read_what_if("bandwidth=nvlink:2x"), NDR, 0.0)
    assert read_what_if("fabric=p5-efa").fabric == "p5-efa"
    assert read_what_if("gpus-per-node=72").gpus_per_node == 72
