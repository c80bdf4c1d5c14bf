"""A step of jobs/timed.py on the virtual GPU, estimated: against hand-made formulas, and its sums."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.conftest import RunFakedist
from tests.integration.jobs import timed as job
from tests.support.runs import ProfileOnce

JOB = Path(__file__).parent / "jobs" / "timed.py"
STEPS = ("--steps", "2")  # as in test_measured_path.py, which then takes the same run
TOKENS = job.BATCH * job.TOKENS
#: Weights of products in a block, and of all blocks and the output.
BLOCK_WEIGHTS = 4 * job.WIDTH**2 + 3 * job.WIDTH * job.HIDDEN
WEIGHTS = job.LAYERS * BLOCK_WEIGHTS + job.WIDTH * job.WORDS
#: Two products over the pairs of tokens that a causal mask leaves.
ATTENTION = 2 * 2 * job.BATCH * job.WIDTH * job.TOKENS * (job.TOKENS + 1) / 2


@dataclass(frozen=True)
class Timed:
    directory: Path
    summary: dict[str, Any]
    kernels: pd.DataFrame
    events: pd.DataFrame
    calls: pd.DataFrame


def run_job(profile_once: ProfileOnce, *arguments: str, options: tuple[str, ...] = ()) -> Timed:
    ran = profile_once(JOB, *arguments, options=("--json", *options))
    kernels = ran.table("kernels")
    kernels["layer_name"] = ran.table("layers")["name"].to_numpy()[kernels["layer"]]
    return Timed(ran.path, ran.summary, kernels, ran.table("events"), ran.table("calls"))


@pytest.fixture(scope="module")
def run(profile_once: ProfileOnce) -> Timed:
    return run_job(profile_once)


@pytest.fixture(scope="module")
def checkpointed(profile_once: ProfileOnce) -> Timed:
    return run_job(profile_once, "checkpoint", options=STEPS)


def flops(kernels: pd.DataFrame, family: str) -> float:
    return float(kernels.loc[kernels["family"] == family, "flops"].sum())


def test_the_arithmetic_is_that_of_the_formulas(run: Timed) -> None:
    assert flops(run.kernels, "gemm") == 6 * TOKENS * WEIGHTS
    assert flops(run.kernels, "attention") == pytest.approx(3.5 * job.LAYERS * ATTENTION)
    forward = run.kernels[run.kernels["phase"] == "forward"]
    assert flops(forward, "gemm") == 2 * TOKENS * WEIGHTS


def test_a_checkpointed_forward_is_computed_twice(checkpointed: Timed) -> None:
    again = checkpointed.kernels[checkpointed.kernels["recompute"]]
    all_but_the_last = BLOCK_WEIGHTS - job.WIDTH * job.HIDDEN  # whose result no backward needs
    assert flops(again, "gemm") == 2 * TOKENS * job.LAYERS * all_but_the_last
    assert flops(again, "attention") == pytest.approx(job.LAYERS * ATTENTION)
    assert set(again["phase"]) == {"backward"}
    assert set(again["layer_name"].str.split(".").str[0]) == {"layers"}


def test_equal_layers_take_equally_long(run: Timed) -> None:
    inside = run.kernels[run.kernels["layer_name"].str.startswith("layers.")]
    forward = inside[inside["phase"] == "forward"]
    layer = forward["layer_name"].str.extract(r"layers\.(\d+)")[0]
    times = forward.groupby(layer)["duration_us"].agg(["sum", "size"])
    assert len(times) == job.LAYERS
    assert times["size"].nunique() == 1
    assert times["sum"].max() == pytest.approx(times["sum"].min())


def test_every_launch_is_in_one_step_and_one_layer_and_has_an_operation(run: Timed) -> None:
    assert set(run.kernels["step"]) == {2}
    assert (run.kernels["operation"] != "").all()
    assert set(run.kernels["phase"]) == {"forward", "backward", "optimizer", "other"}
    products = run.kernels[(run.kernels["family"] == "gemm")]
    assert set(products["layer_name"].str.split(".").str[-1]) == {"qkv", "out", "gate", "up", "down", "output"}
    assert set(run.kernels.loc[run.kernels["family"] == "optimizer", "phase"]) == {"optimizer"}


def test_the_timeline_covers_the_step(run: Timed) -> None:
    kernels, source = run.kernels, run.summary["kernels"]
    assert (kernels["start_us"] >= kernels["launch_us"]).all()
    known = kernels.dropna(subset=["duration_us"])
    for _, stream in known.groupby("stream"):
        ends = (stream["start_us"] + stream["duration_us"]).to_numpy()
        assert (stream["start_us"].to_numpy()[1:] >= ends[:-1] - 1e-6).all(), "a stream does one after the other"
    assert (known["start_us"] + known["duration_us"]).max() <= source["step_us"]
    busy = known["duration_us"].sum()
    assert busy <= source["step_us"] * known["stream"].nunique()


def test_it_is_called_an_estimate_and_says_what_it_is_not(run: Timed) -> None:
    source = run.summary["kernels"]
    assert {name: source[name] for name in ("source", "tool", "step", "gpu", "calibrated_on")} == {
        "source": "estimated", "tool": "model", "step": 2, "gpu": "NVIDIA H100 80GB HBM3", "calibrated_on": None,
    }  # fmt: skip
    measurements = "kernel times are estimated from published measurements of the NVIDIA H100 80GB HBM3"
    assert any(note["text"].startswith(measurements) for note in source["notes"])
    assert source["step_low_us"] < source["step_us"] < source["step_high_us"]
    assert not any("have no estimate" in note["text"] for note in source["notes"])


def test_collectives_stand_where_they_were_called_and_are_priced_for_the_fabric(run: Timed) -> None:
    collectives = run.kernels[run.kernels["family"] == "communication"]
    calls = run.calls[(run.calls["step"] == 2) & (run.calls["dtype"] != "")].set_index("sequence")
    assert sorted(collectives["call"]) == sorted(calls.index)
    assert list(collectives["name"]) == list(calls.loc[collectives["call"], "operation"])
    assert (collectives["duration_us"] > 0).all()
    assert (collectives["low_us"] < collectives["high_us"]).all()
    assert run.summary["kernels"]["fabric"] == "dgx-h100-ndr"
    groups = run.summary["time"]["by_group"]
    assert sum(group["num_calls"] for group in groups) == len(collectives)
    assert sum(group["exposed_us"] for group in groups) == pytest.approx(run.summary["time"]["communication_us"])
    assert collectives["flops"].isna().all()
    assert (run.kernels["call"] >= 0).sum() == len(collectives)
    assert set(collectives["phase"]) >= {"backward"}, "DistributedDataParallel's gradients"


def test_what_limits_follows_from_the_size(run: Timed) -> None:
    output = run.kernels[(run.kernels["layer_name"] == "output") & (run.kernels["family"] == "gemm")]
    assert set(output["bound"]) == {"compute"}
    update = run.kernels.loc[run.kernels["operation"] == "aten._fused_adamw_.default"]
    assert set(update["bound"]) == {"memory"}
    tiny = run.kernels[(run.kernels["moved_bytes"] < 1e5) & ~run.kernels["name"].str.contains("HtoD|DtoH")]
    assert len(tiny)
    assert set(tiny["bound"]) == {"launch"}


def test_the_loss_that_the_script_reads_makes_the_host_wait(run: Timed) -> None:
    read = run.kernels[run.kernels["operation"] == "aten._local_scalar_dense.default"]
    assert list(read["name"]) == ["Memcpy DtoH"]
    before = run.kernels[run.kernels["operation"] == "aten._fused_adamw_.default"].iloc[-1]
    assert read["start_us"].iloc[0] >= before["start_us"] + before["duration_us"] - 1e-6


def test_memory_is_the_same_with_and_without(run: Timed, profile_once: ProfileOnce) -> None:
    without = run_job(profile_once, options=("--no-kernels",))
    assert without.summary["kernels"] is None
    assert len(without.kernels) == 0
    columns = ["action", "address", "size_bytes", "allocated_bytes", "reserved_bytes"]
    pd.testing.assert_frame_equal(run.events[columns], without.events[columns])
    # Views have a number only in the step that is timed. What allocates is the same, in the same order.
    assert (run.events["op"].rank(method="dense") == without.events["op"].rank(method="dense")).all()


def test_fakedist_time_prices_the_same_run_again_to_the_digit(run: Timed, run_fakedist: RunFakedist) -> None:
    again = run_fakedist("time", run.directory, "--json").json()
    assert again["kernels"] == run.summary["kernels"]
    assert again["time"] == run.summary["time"]
    assert again["time"]["gains"]


def test_fakedist_time_for_another_gpu_leaves_the_run_as_it_was(run: Timed, run_fakedist: RunFakedist) -> None:
    other = run_fakedist("time", run.directory, "--gpu", "b200", "--json").json()
    assert other["kernels"]["gpu"] == "NVIDIA B200"
    assert other["time"]["kernel_us"] < run.summary["time"]["kernel_us"]
    assert run_fakedist("report", run.directory, "--json").json() == run.summary
    text = run_fakedist("time", run.directory, "--gpu", "b200").stdout
    assert "its memory and its choice of kernels stay those of the run" in text


def test_a_complete_step_has_times_if_the_script_ends_before_the_timed_one(profile_once: ProfileOnce) -> None:
    """That is the first after step 1: later ones are not traced, as the script should have reached the timed one."""
    early = run_job(profile_once, options=("--steps=9",))
    assert early.summary["kernels"]["step"] == 2  # the script ended in step 4
    assert len(early.kernels)
    assert any("the times are those of step 2" in note["text"] for note in early.summary["notes"])


def test_an_extensions_kernel_has_the_work_of_its_function(tmp_path: Path, profile_once: ProfileOnce) -> None:
    job = JOB.parent / "beside_dispatcher.py"
    work = profile_once(job, world_size=1).table("work")
    spinning = work[work["name"].str.contains("spin_kernel")].set_index("operation")
    assert set(spinning.index) == {"transformer_engine.swiglu", ""}
    assert spinning.loc["transformer_engine.swiglu", "moved_bytes"] == 256 * 512 * 3 * 2
    assert np.isnan(spinning.loc["", "moved_bytes"]), "nothing tells what it has to do"
