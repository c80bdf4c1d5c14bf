"""A step that is timed as on a GPU, with torch.profiler and the virtual GPU's CUPTI: where each kernel belongs.

The estimate logs the same launches in another way, so layer, phase and family must agree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.conftest import RunFakedist
from tests.support.runs import ProfileOnce

pytestmark = pytest.mark.long

JOBS = Path(__file__).parent / "jobs"
REHEARSAL = {"FAKEDIST_REHEARSE": "cupti"}


@dataclass(frozen=True)
class Run:
    path: Path
    summary: dict[str, Any]
    kernels: pd.DataFrame
    tables: dict[str, pd.DataFrame]

    def places(self) -> Counter[tuple[str, ...]]:
        """How many kernels there are of each phase, layer, family and name; copies have other names."""
        kernels = self.kernels[~self.kernels["family"].isin(["copy", "communication"])]
        # What fills a tensor: the profiler tells fill_, the estimate the operation that made the tensor.
        kernels = kernels[~kernels["name"].str.contains("FillFunctor")]
        columns = ["phase", "recompute", "layer_name", "family", "name"]
        return Counter(tuple(map(str, row)) for row in kernels[columns].to_numpy())


def run_job(profile_once: ProfileOnce, job: str, *arguments: str, measured: bool) -> Run:
    options = ("--json", "--steps", "2")
    ran = profile_once(JOBS / job, *arguments, options=options, env=REHEARSAL if measured else None)
    tables = {name: ran.table(name) for name in ("kernels", "launches", "layers", "calls", "layer_times")}
    kernels = tables["kernels"]
    kernels["layer_name"] = tables["layers"]["name"].to_numpy()[kernels["layer"]]
    return Run(ran.path, ran.summary, kernels, tables)


@pytest.fixture(scope="module")
def measured(profile_once: ProfileOnce) -> Run:
    return run_job(profile_once, "timed.py", "checkpoint", measured=True)


@pytest.fixture(scope="module")
def graphed(profile_once: ProfileOnce) -> Run:
    return run_job(profile_once, "graphed.py", measured=True)


def test_every_kernel_is_where_the_estimate_has_it(measured: Run, profile_once: ProfileOnce) -> None:
    estimated = run_job(profile_once, "timed.py", "checkpoint", measured=False)
    assert sum(measured.places().values()) > 200
    assert measured.places() == estimated.places()
    assert order_of_waits(measured) == order_of_waits(estimated)


def order_of_waits(run: Run) -> list[str]:
    """The asynchronous calls of a step, and the waits around them, in the order of the host."""
    launches, calls = run.tables["launches"], run.tables["calls"].set_index("sequence")
    main = launches["stream"][launches["what"] == "product"].iloc[0]
    is_backward = launches["call"].map(calls["phase"]) == "backward"
    first = int(np.flatnonzero(is_backward)[0]) - 1  # what the first of them waits for
    return [
        f"{what} on {'the compute stream' if stream == main else 'its own'}"
        for what, stream in launches.iloc[first:][["what", "stream"]].itertuples(index=False, name=None)
        if what in ("collective", "stream_waits")
    ]


def test_collectives_are_priced_and_the_copies_that_stood_for_them_are_out(
    measured: Run, run_fakedist: RunFakedist
) -> None:
    communication = measured.kernels[measured.kernels["family"] == "communication"]
    assert set(communication["name"]) == {"all_reduce"}
    assert communication["call"].is_unique
    assert (communication["duration_us"] > 20).all(), "each copy took 1 µs"
    (group,) = measured.summary["time"]["by_group"]
    assert group["time_us"] == pytest.approx(communication["duration_us"].sum())
    slower = run_fakedist("time", measured.path, "--nccl-env", "NCCL_NVLS_ENABLE=0", "--json").json()
    assert slower["time"]["by_group"][0]["time_us"] > group["time_us"]
    assert slower["kernels"]["source"] == "simulated"
    refused = run_fakedist("time", measured.path, "--gpu", "h200")
    assert "the run's kernels were measured on a GPU" in refused.stderr


def test_what_no_operation_launches_is_in_the_phase_that_it_is_launched_in(
    graphed: Run, profile_once: ProfileOnce
) -> None:
    estimated = run_job(profile_once, "graphed.py", measured=False)
    for run in (graphed, estimated):
        own = run.kernels[run.kernels["name"] == "decay"]
        assert own["phase"].tolist() == ["optimizer"] * 6  # three blocks, a weight and a bias each
        assert set(own["layer_name"]) == {""}


def test_its_times_are_never_called_measured(measured: Run) -> None:
    source = measured.summary["kernels"]
    assert (source["source"], source["tool"], source["step"]) == ("simulated", "cupti", 4)
    assert any(note["code"] == "times_are_not_a_gpus" for note in source["notes"])
    assert measured.summary["time"]["peaks"] is None
    assert measured.summary["time"]["model_flops_utilisation"] is None


def test_rows_add_up_and_the_timeline_covers_the_step(measured: Run) -> None:
    kernels, time = measured.kernels, measured.summary["time"]
    compute = kernels[kernels["family"] != "communication"]
    assert time["kernel_us"] == pytest.approx(compute["duration_us"].sum())
    assert measured.tables["layer_times"]["own_us"].sum() == pytest.approx(time["kernel_us"])
    parts = ("busy_us", "communication_us", "launch_gap_us", "wait_us")
    assert sum(time[part] for part in parts) == pytest.approx(time["step_us"])
    assert (kernels["start_us"] >= kernels["launch_us"]).all()
    assert set(kernels["step"]) == {4}
    for _, stream in kernels.sort_values("start_us").groupby("stream"):
        ends = (stream["start_us"] + stream["duration_us"]).to_numpy()
        assert (stream["start_us"].to_numpy()[1:] >= ends[:-1] - 0.01).all(), "a stream does one after the other"


def test_copies_that_stand_for_collectives_are_no_compute(measured: Run) -> None:
    communication = measured.kernels[measured.kernels["family"] == "communication"]
    calls = measured.tables["calls"].set_index("sequence")
    timed = calls.loc[communication["call"].unique()]
    assert set(timed["step"]) == {4}
    assert set(timed["operation"]) == {"all_reduce"}
    assert len(timed) == (calls["step"] == 4).sum()
    assert (measured.kernels.loc[measured.kernels["family"] != "communication", "call"] == -1).all()


def test_kernels_have_the_grid_that_they_were_launched_with(measured: Run) -> None:
    adds = measured.kernels[measured.kernels["operation"] == "aten.add"]
    assert len(adds)
    assert (adds["grid"].str.split(",").str[0].astype(int) > 1).all()
    assert set(adds["block"]) == {"128,1,1"}


def test_compiled_kernels_belong_to_the_module_that_was_compiled(graphed: Run) -> None:
    triton = graphed.kernels[graphed.kernels["name"].str.startswith("triton_")]
    assert set(triton["phase"]) == {"forward", "backward"}
    assert set(triton["layer_name"]) == {"compiled"}


def test_kernels_of_a_graph_belong_to_the_module_that_launched_it(graphed: Run) -> None:
    """In backward too: an autograd function of the script is an operation that made its node."""
    notes = graphed.summary["kernels"]["notes"]
    assert any(note["code"] == "kernels_of_graphs" for note in notes)
    captured = graphed.kernels[graphed.kernels["layer_name"].str.startswith("captured")]
    assert {phase: (family == "gemm").sum() for phase, family in captured.groupby("phase")["family"]} == {
        "forward": 1, "backward": 2,
    }  # fmt: skip
    assert not any(note["code"] == "forward_not_traced" for note in notes)


def test_what_comes_after_the_optimizer_is_not_the_optimizers(graphed: Run) -> None:
    assert set(graphed.kernels.loc[graphed.kernels["operation"] == "aten.normal_", "phase"]) == {"other"}
