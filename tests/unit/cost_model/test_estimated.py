"""A step's estimated times, and what is said about how close they are.

Advice for a late host: only where it applies, with what it follows from, and with its gain.
"""

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from fakedist.analysis.launches import launch_table, recorded_ranges, work_table
from fakedist.analysis.memory_tables import fold_layers
from fakedist.cost_model.accuracy import closest
from fakedist.cost_model.estimated import (
    Models,
    NetworkChoice,
    StepTimes,
    estimate_times,
    find_gains,
    launch_bound,
    network_of,
)
from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.cost_model.nccl.settings import Nccl
from fakedist.cost_model.timeline import Array
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options import Job
from fakedist.rundir.launch_records import WorkRow
from fakedist.rundir.step_time import GroupTime, LayerTime, PathPart, StepTime, TimeGain
from tests.unit.cost_model.launches_by_hand import COPY, PRODUCT, launch, record
from tests.unit.cost_model.times_by_hand import model

H100 = find_gpu("h100-80g")
LAYERS = pd.DataFrame({"name": ["", "a"], "class_name": ["", "A"], "parent": [-1, 0]})


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    made = record([launch(COPY, layer=1), *(launch(PRODUCT, layer=1) for _ in range(9))])
    known = {"launches": launch_table(made), "work": work_table(made), "layers": LAYERS}
    columns = ["sequence", "group", "operation", "bytes_in", "bytes_out", "peer"]
    known |= {"calls": pd.DataFrame(columns=columns), "groups": pd.DataFrame(columns=["ranks", "size", "group_rank"])}
    return known | {"ranges": recorded_ranges(made)}


def estimated(tables: dict[str, pd.DataFrame], prices: KernelTimes | None = None) -> StepTimes:
    models = Models(H100, prices or KernelTimes(H100), network_of(H100, None))
    return estimate_times(tables, fold_layers(LAYERS), models)


def test_the_source_says_what_the_step_was_priced_for(tables: dict[str, pd.DataFrame]) -> None:
    prices = KernelTimes(H100, 500)
    found = estimated(tables, prices)
    source, time = found.source, found.summary
    assert source is not None
    assert time is not None
    assert (source.source, source.tool, source.step, source.gpu) == ("estimated", "model", 2, H100.product)
    assert (source.fabric, source.calibrated_on) == ("dgx-h100-ndr", None)
    assert (source.clock, source.watts) == (prices.clock.fraction, 500)
    assert (source.step_us, source.step_low_us) == (time.step_us, time.step_low_us)
    assert source.step_low_us is not None
    assert source.step_high_us is not None
    assert source.step_low_us < source.step_us < source.step_high_us
    assert sum(part.share for part in source.uncertain) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("chosen", "job", "name", "gpus_per_node", "nics_per_node"),
    [
        ({}, None, "dgx-h100-ndr", 8, 8),
        ({}, {"gpus_per_node": 4}, "dgx-h100-ndr", 4, 4),
        ({"gpus_per_node": 2}, {"gpus_per_node": 4}, "dgx-h100-ndr", 2, 2),
        ({}, {"fabric": "dgx-b200-ndr"}, "dgx-b200-ndr", 8, 8),
        ({"fabric": "dgx-a100-hdr"}, {"fabric": "dgx-b200-ndr"}, "dgx-a100-hdr", 8, 8),
        ({"what_if": "fabric=dgx-b200-ndr", "fabric": "dgx-a100-hdr"}, None, "dgx-b200-ndr", 8, 8),
        ({"what_if": "gpus-per-node=16"}, {"gpus_per_node": 4}, "dgx-h100-ndr", 16, 16),
        ({"what_if": "no-overlap", "gpus_per_node": 2}, None, "dgx-h100-ndr", 2, 2),
        ({"fabric": "gb200-nvl72"}, {"gpus_per_node": 4}, "gb200-nvl72", 72, 72),
        ({"fabric": "gb200-nvl72"}, {"gpus_per_node": 4, "world_size": 128}, "gb200-nvl72", 64, 64),
        ({"fabric": "gb200-nvl72", "gpus_per_node": 72}, {"world_size": 128}, "gb200-nvl72", 72, 72),
    ],
)
def test_the_network_is_the_what_ifs_else_the_one_chosen_else_the_jobs_else_the_gpus(
    chosen: dict[str, Any], job: dict[str, Any] | None, name: str, gpus_per_node: int, nics_per_node: int
) -> None:
    made = None if job is None else Job(**{"world_size": 64, "rank": 0, "target": "x", **job})
    fabric = network_of(H100, made, NetworkChoice(**chosen)).fabric
    assert (fabric.name, fabric.gpus_per_node, fabric.nics_per_node) == (name, gpus_per_node, nics_per_node)
    recorded = Nccl({"A": "1", "B": "1"}, "2.27.5")
    found = network_of(H100, None, NetworkChoice(nccl={"A": "2"}), recorded).nccl
    assert found == Nccl({"A": "2", "B": "1"}, "2.27.5")


DP, TP = (GroupTime(name, 8, nodes, "all_gather", 1, 0, 1e9, 2.0, 1.0, 1.0) for name, nodes in (("dp", 2), ("tp", 1)))
ALONE = replace(DP, group="me", group_size=1)
NICS, NVLINK, RACK = "bandwidth=2x", "bandwidth=nvlink:2x", "gpus-per-node=72"


@pytest.mark.parametrize(
    ("groups", "more", "gpu", "expected"),
    [
        ([DP, TP], {}, "h100-80g", {NICS, NVLINK, RACK, "no-overlap", "h200", "b200", "gb200"}),
        ([DP], {}, "h100-80g", {NICS, RACK, "no-overlap", "h200", "b200", "gb200"}),
        ([TP], {}, "h200", {NVLINK, "no-overlap", "b200", "gb200"}),
        ([ALONE], {}, "h200", {"no-overlap", "b200", "gb200"}),
        ([], {"launch_gap_us": 1.0}, "h200", {"no-host-waits", "host=2x", "b200", "gb200"}),
        ([], {"critical_path": [PathPart("host", "", "", "", 0, 1, 1.0)]}, "l40s", {"no-host-waits", "host=2x"}),
        ([], {"critical_path": [PathPart("idle", "", "", "", 0, 1, 1.0)]}, "l40s", set()),
    ],
)
def test_changes_are_tried_where_they_may_matter(
    tables: dict[str, pd.DataFrame], groups: list[GroupTime], more: dict[str, Any], gpu: str, expected: set[str]
) -> None:
    model = find_gpu(gpu)
    models = Models(model, KernelTimes(model), network_of(model, None))
    times = estimate_times(tables, fold_layers(LAYERS), models)
    own, prices = times.summary, times.prices
    assert own is not None
    assert prices is not None
    time = replace(own, by_group=groups, **{"launch_gap_us": 0.0, "critical_path": []} | more)
    gains = find_gains(tables, models, None, time, prices)
    assert [gain.step_us for gain in gains] == sorted(gain.step_us for gain in gains)
    found = {gain.option.split()[1] for gain in gains}
    assert expected <= found if "h200" in expected or "b200" in expected else found == expected
    assert found - expected <= {"gb300", "b300"}
    for gain in gains:
        assert gain.step_us == pytest.approx(own.step_us) or gain.option.startswith("--gpu") or "host" in gain.option
        assert gain.why.endswith("of the clock") == (gain.step_us >= 0.99 * own.step_us and gain.option == "--gpu h200")


def test_the_accuracy_is_of_the_families_that_take_most_of_the_step(tables: dict[str, pd.DataFrame]) -> None:
    source = estimated(tables).source
    assert source is not None
    found = source.accuracy
    families = [row.family for row in found]
    assert families[0].startswith("products bf16")
    assert families[1].startswith("elementwise")
    (row,) = closest(H100, families[:1])
    assert (found[0].gpu, found[0].median_error, found[0].p95_error) == (row.gpu, row.median, row.p95)


class _OfUnknownAccuracy(KernelTimes):
    def price(self, work: pd.DataFrame, counts: Array) -> pd.DataFrame:
        return super().price(work, counts).assign(accuracy="")


def test_a_model_that_was_not_measured_has_no_accuracy(tables: dict[str, pd.DataFrame]) -> None:
    source = estimated(tables, _OfUnknownAccuracy(H100)).source
    assert source is not None
    assert source.accuracy == []


def test_each_kernel_tells_what_its_time_is_from(tables: dict[str, pd.DataFrame]) -> None:
    kernels = estimated(tables).tables["kernels"]
    is_product = (kernels["family"] == "gemm").to_numpy()
    basis = kernels["basis"].astype(str)
    assert basis[is_product].str.startswith("measured: bf16 products on h100-sxm").all()
    assert basis[~is_product].str.startswith("measured: elementwise on h100-sxm; assumed: ").all()


L40S = find_gpu("l40s")  # no data centre's: no other GPU is tried
UP, DOWN = 4, 5
SMALL = WorkRow("add", "kernel", "elementwise", "aten.add.Tensor", 0.0, 1e3, "bf16", threads=128)
TRITON = SMALL._replace(name="triton_poi_fused_add_0")
SQRT = WorkRow("sqrt", "kernel", "optimizer", "aten.sqrt.default", 0.0, 1e3, "fp32", threads=128)
READ = WorkRow("Memcpy DtoH", "host_reads", "copy", "aten._local_scalar_dense.default", 0.0, 4.0, "")
UPLOAD = WorkRow("Memcpy HtoD", "copy", "copy", "aten._to_copy.default", 0.0, 4e6, "", over_host_link=True)


def advice(rows: list[dict[str, Any]], *lines: str, gpu: GpuSpec = L40S) -> tuple[StepTime, dict[str, TimeGain]]:
    """The step of some launches, and what is advised for it by option; operation n has the n-th line."""
    made = record(rows)
    tables = {"launches": launch_table(made), "work": work_table(made), "layers": model()}
    columns = ["sequence", "group", "operation", "bytes_in", "bytes_out", "peer"]
    tables |= {"calls": pd.DataFrame(columns=columns), "groups": pd.DataFrame(columns=["ranks", "size", "group_rank"])}
    tables |= {"ranges": recorded_ranges(made), "stacks": pd.DataFrame({"line": [*lines]})}
    tables["operation_stacks"] = pd.DataFrame({"op": range(len(lines)), "stack": range(len(lines))})
    models = Models(gpu, KernelTimes(gpu), network_of(gpu, None))
    times = estimate_times(tables, fold_layers(model()), models)
    time, prices = times.summary, times.prices
    assert time is not None
    assert prices is not None
    gains = {gain.option.removeprefix("--what-if "): gain for gain in find_gains(tables, models, None, time, prices)}
    for name in ("no-host-waits", "host=2x", "no-sync"):
        gains.pop(name, None)
    return time, gains


def test_layers_whose_kernels_are_shorter_than_their_launches_are_advised_to_be_graphs_or_compiled() -> None:
    blocks = [launch(SMALL, layer=layer) for layer in (UP, DOWN, UP + 3, DOWN + 3, UP + 6, DOWN + 6) * 10]
    time, gains = advice(blocks)
    (bound,) = launch_bound(time.layers)
    assert (bound.name, bound.num_repeats, bound.num_kernels) == ("layers", 1, 60)
    assert bound.host_us == 60 * 7.0
    assert set(gains) == {"cuda-graphs=layers", "compile=layers"}
    for gain in gains.values():
        assert gain.step_us < time.step_us
        assert gain.why.startswith("layers: the host takes 420 µs to launch ")
    # Either way the kernels follow each other, behind the launch of a graph or of the first of them.
    assert gains["cuda-graphs=layers"].step_us == pytest.approx(5.0 + bound.total_us)
    assert gains["compile=layers"].step_us == pytest.approx(3.0 + bound.total_us)


def test_compiled_layers_are_not_advised_to_be_compiled() -> None:
    _, gains = advice([launch(SMALL, layer=UP) for _ in range(30)] + [launch(TRITON, layer=UP)])
    assert [option.partition("=")[0] for option in gains] == ["cuda-graphs"]


def test_a_step_of_long_kernels_needs_no_advice() -> None:
    time, gains = advice([launch(PRODUCT, layer=UP) for _ in range(9)])
    assert launch_bound(time.layers) == []
    assert gains == {}


def test_a_gpu_that_helps_little_because_of_the_host_is_not_said_to_be_held_by_its_power() -> None:
    time, gains = advice([launch(SMALL, layer=UP) for _ in range(30)], gpu=find_gpu("h100-80g"))
    others = [gain for option, gain in gains.items() if option.startswith("--gpu ")]
    assert [gain.why for gain in others if gain.step_us > 0.99 * time.step_us] == [""] * len(others) != []


def test_a_value_that_is_read_a_blocking_copy_and_a_synchronize_are_named_by_their_lines() -> None:
    rows = [launch(PRODUCT, op=0), launch(READ, op=1), launch(PRODUCT, op=0), launch(PRODUCT, op=0)]
    rows += [launch(UPLOAD, op=2), launch(what="host_waits", op=2), launch(PRODUCT, op=0)]
    rows += [launch(PRODUCT, op=3), launch(what="host_waits_for_device"), launch(PRODUCT, op=0)]
    lines = ["/job/train.py:5 (main)", "/job/train.py:57 (main)", "/job/train.py:20 (load)", "/job/train.py:30 (main)"]
    time, gains = advice(rows, *lines)
    assert {option: gain.title for option, gain in gains.items()} == {
        "no-sync=train.py:57": "no value of the GPU is read at train.py:57",
        "no-sync=train.py:20": "the copy at train.py:20 is pinned and non-blocking",
        "no-sync=train.py:30": "the host does not synchronize after train.py:30",
    }
    # Each makes the host late by one operation and its launch.
    for option, gain in gains.items():
        assert time.step_us - gain.step_us == pytest.approx(7.0), option
        assert (
            gain.why == f"{option.partition('=')[2]}: the host waits once, and the GPU is idle for 7.0 µs because of it"
        )


def test_a_wait_that_the_gpu_does_not_notice_is_no_advice() -> None:
    rows = [launch(PRODUCT, op=0), launch(what="stream_records", event=1), *[launch(PRODUCT, op=0)] * 3]
    _, gains = advice(
        [*rows, launch(what="host_waits", event=1, op=0), launch(PRODUCT, op=0)], "/job/train.py:5 (main)"
    )
    assert gains == {}, "there is work left when the host goes on"


def test_an_optimizer_that_runs_each_operation_for_each_parameter_is_advised_to_use_lists() -> None:
    time, gains = advice([launch(PRODUCT), *[launch(SQRT, phase="optimizer")] * 300])
    assert set(gains) == {"foreach"}
    assert gains["foreach"].why == "the optimizer launches 300 kernels, 1 for each parameter"
    assert gains["foreach"].step_us < time.step_us


def test_only_the_outermost_layers_below_a_model_are_launch_bound() -> None:
    def layer(name: str, depth: int, host_us: float) -> LayerTime:
        numbers = [0.0] * 9 + [1, 0.0, 0.0, 0, 9.0, 0, 0, 0.0, 100.0, 0.0, 0.0, 0.0, 0.0, host_us]
        return LayerTime(name, "", depth, 1, *numbers)  # type: ignore[arg-type]

    rows = [layer("", 0, 500.0), layer("(Net)", 0, 500.0), layer("layers", 1, 50.0), layer("layers.0", 2, 200.0)]
    rows += [layer("layers.0.up", 3, 150.0), layer("layers.1", 2, 101.0), layer("head", 1, 99.0)]
    assert [row.name for row in launch_bound(rows)] == ["layers.0", "layers.1"]


GATHER, SCATTER = (
    WorkRow(name, "collective", "communication", name, float("nan"), float("nan"))
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor")
)


def shared(num_layers: int, num_bytes: int) -> tuple[StepTime, list[TimeGain]]:
    """A backward as FSDP runs it on 64 nodes, with calls of so many bytes between products, and its gains."""
    gpu = find_gpu("h100-80g")
    rows: list[dict[str, Any]] = []
    calls: list[tuple[Any, ...]] = []
    for number in range(num_layers):
        for kind, work, stream in (("reduce_scatter_tensor", SCATTER, 8), ("all_gather_into_tensor", GATHER, 7)):
            sequence = len(calls) + 1
            small, large = num_bytes // 512, num_bytes
            sizes = (large, small) if work is SCATTER else (small, large)
            calls.append((sequence, 0, kind, *sizes, -1))
            if work is SCATTER:
                rows.append(launch(what="stream_records", event=100 + number))
                rows.append(launch(what="stream_waits", event=100 + number, stream=stream))
            rows.append(launch(work, stream=stream, call=sequence, num_operations=0))
            rows.append(launch(what="stream_records", event=sequence, stream=stream))
        rows.append(launch(what="stream_waits", event=len(calls)))
        rows += [launch(PRODUCT, layer=UP)] * 20
    made = record(rows)
    tables = {"launches": launch_table(made), "work": work_table(made), "layers": model()}
    names = ["sequence", "group", "operation", "bytes_in", "bytes_out", "peer"]
    tables |= {"calls": pd.DataFrame(calls, columns=names), "ranges": recorded_ranges(made)}
    tables["groups"] = pd.DataFrame(
        [("0", "dp", "nccl", 512, 0, "0-511")],
        columns=["name", "description", "backend", "size", "group_rank", "ranks"],
    )
    models = Models(gpu, KernelTimes(gpu), network_of(gpu, None))
    times = estimate_times(tables, fold_layers(model()), models)
    assert times.summary is not None
    assert times.prices is not None
    return times.summary, find_gains(tables, models, None, times.summary, times.prices)


def test_the_best_two_of_the_three_best_changes_are_priced_together() -> None:
    time, gains = shared(6, 300_000_000)
    (pair,) = [gain for gain in gains if gain.is_pair]
    singles = {gain.title: gain for gain in gains if not gain.is_pair}
    parts = [singles[title] for title in pair.title.split(" and ")]
    assert pair.step_us < min(gain.step_us for gain in parts) < time.step_us
    assert [option.split()[0] for option in pair.option.split(" --")] == ["--gpu", "what-if"]
    best = [gain for gain in gains if gain.step_us < 0.99 * time.step_us and not gain.is_pair]
    levers = {gain.option.partition(" ")[0] + gain.option.partition("=")[0] for gain in parts}
    assert len(levers) == 2, "two GPUs, or two bandwidths of one link, do not pair"
    assert all(gain in best for gain in parts)
    assert gains == sorted(gains, key=lambda gain: gain.step_us)


def test_perfect_overlap_is_the_most_of_all_changes_of_overlap() -> None:
    time, gains = shared(6, 300_000_000)
    gains = [gain for gain in gains if not gain.is_pair]
    of_overlap = [gain for gain in gains if "overlap" in gain.option or "separate=" in gain.option]
    (bound,) = [gain for gain in gains if gain.title.startswith("at most, with perfect overlap")]
    (apart,) = [gain for gain in gains if gain.title.startswith("a communicator per kind of collective")]
    assert bound.step_us == min(gain.step_us for gain in of_overlap) < apart.step_us < time.step_us
    assert bound.option == "--what-if overlap+separate=dp"
    assert "fairscale#897" in apart.why, "its gain has a published one next to it"
