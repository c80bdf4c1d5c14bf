"""Iterations of scripts whose steps are not one forward, one backward and one optimizer's step."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.conftest import RunFakedist

pytestmark = pytest.mark.integration

JOB = Path(__file__).parent / "jobs" / "in_turn.py"
#: These tests count the iterations that a recording takes.
WITHOUT_BARE_STEPS = {"FAKEDIST_HOST_CLOCK": "0"}
#: Of one model's forward, or of its backward to the weights alone.
FORWARD_FLOPS = 2 * 2 * 4096 * 1024 * 1024


def profile(run_fakedist: RunFakedist, *script: str | Path) -> tuple[dict[str, Any], str]:
    options = ("--world-size", "8", "--rank", "0", "--device", "virtual", "--json")
    finished = run_fakedist("profile", *options, *script, env=WITHOUT_BARE_STEPS)
    assert finished.code == 0, finished.stderr
    result: dict[str, Any] = finished.json()
    assert result["exit"]["outcome"] == "stopped"
    assert len(result["steps"]) == 2
    return result, finished.stderr


def test_two_steps_of_a_gan_are_two_iterations(run_fakedist: RunFakedist) -> None:
    result, output = profile(run_fakedist, JOB, "gan")
    assert output.count("ITERATION") == 3  # the third one's first forward ends the run
    phases = Counter((row["step"], row["phase"]) for row in result["by_phase"])
    assert {step for step, _ in phases} == {0, 1, 2}
    # Critic: both forward, critic backward but for its inputs. Generator: both forward, both backward but for inputs.
    assert result["time"]["flops"] == (2 + 1.5) * FORWARD_FLOPS + (2 + 3.5) * FORWARD_FLOPS


def test_forward_and_backward_of_a_closure_are_phases(run_fakedist: RunFakedist) -> None:
    result, output = profile(run_fakedist, JOB, "closure")
    assert output.count("ITERATION") == 3
    phases = {(row["step"], row["phase"]) for row in result["by_phase"]}
    assert {(step, phase) for step in (1, 2) for phase in ("forward", "backward", "optimizer")} <= phases
    assert result["time"]["flops"] == 2.5 * FORWARD_FLOPS


@pytest.mark.parametrize(
    ("options", "iterations", "flops", "codes"),
    [
        (("--updates-per-step", "3"), 3, 4 * 1 + 3 * 2.5, []),
        pytest.param((), 1, 2.5, ["rollout_in_first_step"], marks=pytest.mark.nightly),
    ],
)
def test_updates_on_one_rollout_are_one_step(
    run_fakedist: RunFakedist, options: tuple[str, ...], iterations: int, flops: float, codes: list[str]
) -> None:
    result, output = profile(run_fakedist, *options, JOB, "rollout")
    assert output.count("ITERATION") == iterations
    assert result["time"]["flops"] == flops * FORWARD_FLOPS
    assert [note["code"] for note in result["notes"] if note["code"] == "rollout_in_first_step"] == codes
    shown = run_fakedist("report", result["run_directory"]).stdout
    assert ("  updates  " in shown) is bool(options)


def test_a_step_holds_one_replay_of_a_graph(run_fakedist: RunFakedist) -> None:
    finished = run_fakedist(
        *("profile", "--world-size", "8", "--rank", "0", "--device", "virtual", "--steps", "4", "--json", JOB, "graph"),
        env=WITHOUT_BARE_STEPS,
    )
    result = finished.json()
    assert len(result["steps"]) == 4
    assert finished.stderr.count("ITERATION") == 4
    assert result["time"]["step_us"] > 0
    assert result["time"]["flops"] == 2.5 * FORWARD_FLOPS
    kernels = pyarrow.parquet.read_table(Path(result["run_directory"]) / "tables" / "kernels.parquet").to_pylist()
    assert {"forward", "backward", "optimizer"} <= {row["phase"] for row in kernels}


@pytest.mark.nightly  # the unit tests of check/ have how a stopped test leaves pytest
@pytest.mark.parametrize("runner", ["unittest", "pytest"])
def test_a_test_that_was_stopped_has_not_failed(run_fakedist: RunFakedist, tmp_path: Path, runner: str) -> None:
    script = shutil.copy(JOB, tmp_path / "test_in_turn.py")
    _, output = profile(run_fakedist, *((script, runner) if runner == "unittest" else ("-m", "pytest", "-s", script)))
    assert "torn down" in output or runner == "pytest"  # which leaves at once
    assert not [word for word in ("Traceback", "FAIL", "ERROR", "not reached") if word in output], output


@pytest.mark.parametrize("wrapped", [(), pytest.param(("ddp",), marks=pytest.mark.nightly)])
def test_work_before_any_optimizer_exists_is_init(run_fakedist: RunFakedist, wrapped: tuple[str, ...]) -> None:
    result, output = profile(run_fakedist, JOB.with_name("before_training.py"), *wrapped)
    assert output.count("ITERATION") == 3
    tables = Path(result["run_directory"]) / "tables"
    blocks = pyarrow.parquet.read_table(tables / "blocks.parquet").to_pylist()
    (loaded,) = [block for block in blocks if block["requested_bytes"] == 64 << 20]
    assert (loaded["step"], loaded["phase"]) == (0, "init")
    phases = {(row["step"], row["phase"]) for row in result["by_phase"]}
    assert {phase for step, phase in phases if step == 0} == {"init", "forward", "backward"}
    assert {phase for step, phase in phases if step == 1} >= {"forward", "backward", "optimizer"}
    layers = pyarrow.parquet.read_table(tables / "layers.parquet").to_pylist()
    held = {row["name"]: (row["peak_parameter_bytes"], row["peak_optimizer_state_bytes"]) for row in layers}
    bytes_ = 1024 * 1024 * 4 + 1024 * 4
    assert held["up"] == held["down"] == (bytes_, bytes_)  # the model that trains has the short names
    assert held["(Model#2).up"] == held["(Model#2).down"] == (bytes_, 0)
    assert set(held) == {"", "(Model)", "up", "down", "(Model#2)", "(Model#2).up", "(Model#2).down"}


@pytest.mark.parametrize("steps", ["auto", pytest.param("6", marks=pytest.mark.nightly)])
def test_the_timed_step_has_a_whole_batch_and_nothing_of_the_scripts_end(run_fakedist: RunFakedist, steps: str) -> None:
    finished = run_fakedist(
        *("profile", "--world-size", "8", "--rank", "0", "--device", "virtual", "--json", "--steps", steps),
        JOB.with_name("epochs.py"),
    )
    result = finished.json()
    assert result["exit"]["outcome"] == "finished"
    tables = Path(result["run_directory"]) / "tables"
    kernels = pyarrow.parquet.read_table(tables / "kernels.parquet").to_pylist()
    assert {kernel["step"] for kernel in kernels} == {5}
    assert result["time"]["flops"] == 2.5 * FORWARD_FLOPS
    assert not [kernel["name"] for kernel in kernels if "DtoH" in kernel["name"]]  # the checkpoint's copies
    assert "optimizer" in {kernel["phase"] for kernel in kernels}
    (feeds,) = [note["text"] for note in result["notes"] if note["code"] == "data_loader"]
    assert "epochs.py:25 (<module>): TensorDataset" in feeds


def test_generation_is_a_phase_of_its_own_and_its_time_is_told(run_fakedist: RunFakedist) -> None:
    result, _ = profile(run_fakedist, JOB.with_name("generating.py"))
    phases = {(row["step"], row["phase"]) for row in result["by_phase"]}
    assert {(step, phase) for step in (1, 2) for phase in ("generation", "forward", "backward", "optimizer")} <= phases
    tables = Path(result["run_directory"]) / "tables"
    launches = pyarrow.parquet.read_table(tables / "launches.parquet").to_pylist()
    layers = pyarrow.parquet.read_table(tables / "layers.parquet").to_pylist()
    work = pyarrow.parquet.read_table(tables / "work.parquet").to_pylist()
    ran = Counter(
        (layers[row["layer"]]["name"], row["phase"])
        for row in launches
        if row["work"] >= 0 and work[row["work"]]["family"] == "gemm"
    )
    assert ran["head", "generation"] == 6 + 2  # with the cache; without one, but for the first
    assert ran["head", "forward"] == 1 + 1  # that one, and training's
    assert ran["(Model#2).head", "forward"] == 1
    assert ("(Model#2).head", "generation") not in ran
    time = result["time"]
    assert 0 < time["by_kind"]["generation"] < time["generation_us"] < time["step_us"]
    shown = run_fakedist("report", result["run_directory"], "--full").stdout
    assert "the step decodes" in shown
