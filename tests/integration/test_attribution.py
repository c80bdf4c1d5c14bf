"""Where the blocks of jobs/attribution.py belong, a job with everything that is hard to attribute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.conftest import RunFakedist
from tests.support.runs import ProfileOnce

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).parent / "jobs" / "attribution.py"
MIB = 1 << 20


@pytest.fixture(scope="module")
def run(profile_once: ProfileOnce) -> dict[str, Any]:
    """The job's summary and tables; its steps 1 and 2 are recorded, the third is not run."""
    ran = profile_once(JOB, world_size=1)
    blocks, layers = ran.table("blocks"), ran.table("layers")
    blocks["name"] = layers["name"].to_numpy()[blocks["layer"]]
    timed = {name: ran.table(name) for name in ("kernels", "operation_stacks")}
    tables = timed | {"blocks": blocks, "layers": layers.set_index("name"), "lines": ran.table("stacks")["line"]}
    return {"summary": ran.summary, "path": ran.path, **tables}


def block(run: dict[str, Any], step: int, name: str, **wanted: object) -> pd.DataFrame:
    blocks = run["blocks"]
    found = blocks[(blocks["step"] == step) & (blocks["name"] == name)]
    for column, value in wanted.items():
        found = found[found[column] == value]
    return found


def test_the_replayed_history_is_the_allocators_own(run: dict[str, Any]) -> None:
    assert not [note for note in run["summary"]["notes"] if note["code"] == "peak_differs"]


def test_categories_at_the_peak_add_up_to_it_exactly(run: dict[str, Any]) -> None:
    summary = run["summary"]
    assert sum(summary["by_category"].values()) == summary["peak_allocated_bytes"]
    assert run["layers"]["peak_own_bytes"].sum() == summary["peak_allocated_bytes"]


def test_two_steps_were_run_and_the_second_is_the_steady_one(run: dict[str, Any]) -> None:
    assert [step["step"] for step in run["summary"]["steps"]] == [1, 2]
    assert run["summary"]["exit"] == {"outcome": "stopped", "code": 0, "message": ""}


def test_a_tied_weight_is_owned_once_by_the_layer_that_has_it_first(run: dict[str, Any]) -> None:
    layers = run["layers"]
    for column in ("most_parameter_bytes", "most_gradient_bytes"):
        assert 0 <= layers.loc["embedding", column] - 8000 * 512 * 4 <= MIB  # a rest of up to 1 MiB is not split off
        assert layers.loc["head", column] == 0


def test_a_frozen_layer_has_parameters_but_no_gradient_and_no_state(run: dict[str, Any]) -> None:
    frozen = run["layers"].loc["frozen"]
    assert frozen["most_parameter_bytes"] == 512 * 512 * 4
    assert frozen["most_gradient_bytes"] == 0
    assert frozen["most_optimizer_state_bytes"] == 0


def test_every_trained_layer_has_two_moments_of_optimizer_state(run: dict[str, Any]) -> None:
    for name in ("plain.up", "plain.down", "checkpointed.up", "reentrant.down", "shared.up"):
        assert run["layers"].loc[name, "peak_optimizer_state_bytes"] == 2 * 512 * 3072 * 4, name


def test_activations_are_what_the_forward_left_alive(run: dict[str, Any]) -> None:
    saved = block(run, 2, "plain", phase="forward", category="activation")
    assert sorted(saved["bytes"]) == [4 * 1024 * 512 * 4, 4 * 1024 * 3072 * 4]


@pytest.mark.parametrize("name", ["checkpointed", "reentrant"])
def test_a_checkpointed_layer_saves_its_output_alone_and_recomputes_under_its_own_name(
    run: dict[str, Any], name: str
) -> None:
    forward = block(run, 2, name, phase="forward", category="activation")
    assert list(forward["bytes"]) == [4 * 1024 * 512 * 4]
    again = block(run, 2, name, phase="backward", recompute=True, category="activation")
    assert 4 * 1024 * 3072 * 4 in set(again["bytes"])
    assert set(block(run, 2, f"{name}.up", phase="backward")["recompute"]) == {True, False}


def test_a_module_called_twice_saves_twice(run: dict[str, Any]) -> None:
    assert len(block(run, 2, "shared", phase="forward", category="activation")) == 4


def test_a_forward_without_grad_leaves_no_activations(run: dict[str, Any]) -> None:
    small = block(run, 2, "plain", phase="forward", operation="aten.relu.default")
    by_size = dict(zip(small["bytes"], small["category"], strict=True))
    assert by_size == {1024 * 3072 * 4: "temporary", 4 * 1024 * 3072 * 4: "activation"}


def test_gradients_belong_to_the_layer_of_their_parameter(run: dict[str, Any]) -> None:
    for name in ("plain.up", "checkpointed.down", "reentrant.up", "shared.down"):
        assert list(block(run, 2, name, category="gradient")["requested_bytes"]) == [512 * 3072 * 4], name


def test_the_optimizers_scratch_is_temporary(run: dict[str, Any]) -> None:
    scratch = run["blocks"].query("step == 2 and phase == 'optimizer' and operation == 'aten._foreach_sqrt.default'")
    assert set(scratch["category"]) == {"temporary"}


def test_what_a_gemm_takes_in_addition_to_its_output_is_workspace(run: dict[str, Any]) -> None:
    """Some torch releases keep a workspace for good, others take one for each call."""
    gemms = run["blocks"].query("operation == 'aten.mm.default'")
    workspaces = gemms.query("category == 'workspace'")
    assert len(workspaces) > 0
    assert not set(workspaces["requested_bytes"]) & set(gemms.query("category == 'activation'")["requested_bytes"])
    same_size = gemms[gemms["requested_bytes"].isin(workspaces["requested_bytes"])]
    assert set(same_size["category"]) == {"workspace"}


def test_lines_are_the_scripts_own(run: dict[str, Any]) -> None:
    lines = [block["line"] for block in run["summary"]["largest_blocks"] if block["phase"] == "forward"]
    assert lines
    assert all(Path(line.partition(":")[0]) == JOB for line in lines)


@pytest.mark.parametrize(
    ("operation", "comments"),
    [
        ("aten.nll_loss_backward.default", ["loss"]),
        ("aten._log_softmax_backward_data.default", ["loss"]),
        ("aten.exp.default", ["function of torch"]),
        ("aten.new_empty_strided.default", ["write to a view"]),
        ("aten.sigmoid_backward.default", ["gate"]),
        ("aten.threshold_backward.default", ["in place"]),
        ("aten.cat.default", ["split"]),
    ],
)
def test_what_a_backward_allocates_has_the_line_of_its_forward(
    run: dict[str, Any], operation: str, comments: list[str]
) -> None:
    blocks = run["blocks"].query(f"step == 2 and phase == 'backward' and operation == '{operation}' and name == ''")
    wanted = [f"{line_with(comment)} (by_lines, backward)" for comment in comments]
    assert list(run["lines"].iloc[blocks["stack"]]) == wanted


@pytest.mark.parametrize(("comment", "function"), [("own backward", "backward"), ("hook", "<lambda>")])
def test_what_the_script_allocates_in_a_backward_has_its_own_line(
    run: dict[str, Any], comment: str, function: str
) -> None:
    blocks = run["blocks"].query("step == 2 and phase == 'backward'")
    lines = list(run["lines"].iloc[blocks["stack"]])
    assert lines.count(f"{line_with(comment)} ({function})") == 1


def test_a_recomputed_layer_keeps_the_lines_of_its_forward(run: dict[str, Any]) -> None:
    for name in ("checkpointed", "reentrant"):
        again = block(run, 2, name, phase="backward", recompute=True, operation="aten.relu.default")
        assert {text.partition(" (")[2] for text in run["lines"].iloc[again["stack"]]} == {"forward)"}
        backward = block(run, 2, name, phase="backward", operation="aten.threshold_backward.default")
        assert {text.partition(" (")[2] for text in run["lines"].iloc[backward["stack"]]} == {"forward, backward)"}


def test_every_block_that_a_node_allocates_has_a_line(run: dict[str, Any]) -> None:
    blocks = run["blocks"].query("step == 2 and phase == 'backward'")
    assert len(blocks) > 50
    assert (run["lines"].iloc[blocks["stack"]] != "").all()


def test_what_the_timed_step_launches_has_a_line_also_where_nothing_is_allocated(run: dict[str, Any]) -> None:
    kernels = run["kernels"].merge(run["operation_stacks"], on="op", how="left")
    assert kernels["stack"].notna().mean() > 0.95
    kernels["source"] = [run["lines"].iloc[int(stack)] if stack >= 0 else "" for stack in kernels["stack"]]
    wanted = {
        ("aten.relu_.default", "forward"): f"{line_with('in place')} (by_lines)",
        ("aten.sigmoid_backward.default", "backward"): f"{line_with('gate')} (by_lines, backward)",
    }
    for (operation, phase), line in wanted.items():
        rows = kernels[(kernels["operation"] == operation) & (kernels["phase"] == phase)]
        assert line in set(rows["source"]), operation
    optimizer = kernels[kernels["phase"] == "optimizer"]
    assert len(optimizer) > 0
    assert all(" (main)" in line or "(<module>)" in line for line in optimizer["source"]), set(optimizer["source"])


def line_with(comment: str) -> str:
    numbers = [at for at, line in enumerate(JOB.read_text().splitlines(), 1) if line.endswith(f"# {comment}")]
    assert len(numbers) == 1, comment
    return f"{JOB}:{numbers[0]}"


def test_a_reader_without_torch_shows_the_same_figures(
    run: dict[str, Any], tmp_path: Path, run_fakedist: RunFakedist
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('the reading half must not need torch')")
    again = run_fakedist("report", run["path"], "--json", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}).json()
    assert again == run["summary"]


@pytest.mark.long
def test_a_parameter_that_no_module_has_is_one_and_a_copy_for_the_optimizer_is_its_state(
    profile_once: ProfileOnce,
) -> None:
    ran = profile_once(JOB.with_name("bare_parameters.py"))
    found, blocks, layers = ran.summary, ran.table("blocks"), ran.table("layers")["name"].to_numpy()
    made = blocks[(blocks["phase"] == "init") & (blocks["bytes"] >= 2 * MIB)]
    told = list(zip(made["category"].astype(str), layers[made["layer"]], made["bytes"] // MIB, strict=True))
    assert told == [
        ("parameter", "(Linear)", 4),
        ("parameter", "", 8),
        ("parameter", "", 2),
        ("optimizer_state", "", 4),
    ]
    assert sum(found["by_category"].values()) == found["peak_allocated_bytes"]


def test_threads_that_train_at_once_have_phases_and_layers_of_their_own(profile_once: ProfileOnce) -> None:
    job = JOB.parent / "trains_in_threads.py"
    ran = profile_once(job, world_size=1, options=("--until", "end", "--json"))
    blocks, layers = ran.table("blocks"), ran.table("layers")
    blocks["layer"] = layers["name"].to_numpy()[blocks["layer"]]
    kinds = blocks[blocks["operation"].astype(str).str.contains("mm|gelu")]
    counts = kinds.groupby(["operation", "phase", "layer"], observed=True).size().to_dict()
    once = {("gelu", "forward", "1"): 1, ("gelu_backward", "backward", "1"): 1}
    with_workspace = {("addmm", "forward", name): 2 for name in "02"}
    with_workspace |= {("mm", "backward", "0"): 2, ("mm", "backward", "2"): 4}
    assert counts == {
        (f"aten.{operation}.default", phase, prefix + name): 12 * number
        for prefix in ("", "(Sequential#2).")
        for (operation, phase, name), number in (once | with_workspace).items()
    }
    held = blocks.groupby(["category", "layer"], observed=True)["requested_bytes"].sum()
    parameters = [65 * 128 * 4, 129 * 8 * 4, 65 * 256 * 4, 257 * 8 * 4]
    assert sorted(held["parameter"]) == sorted(parameters)
    assert (held["optimizer_state"] == 2 * held["parameter"]).all()
