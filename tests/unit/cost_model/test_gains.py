"""Advice for a late host: only where it applies, with what it follows from, and with its gain."""

from typing import Any

import pandas as pd
import pytest

from fakedist.analysis.launches import launch_table, recorded_ranges, work_table
from fakedist.analysis.memory_tables import fold_layers
from fakedist.cost_model.estimated import Models, estimate_times, find_gains, launch_bound, network_of
from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.models.spec import GpuSpec
from fakedist.rundir.launch_records import WorkRow
from fakedist.rundir.step_time import LayerTime, StepTime, TimeGain
from tests.unit.cost_model.launches_by_hand import PRODUCT, launch, record
from tests.unit.cost_model.times_by_hand import model

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
