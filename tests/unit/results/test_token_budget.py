"""A token budget by the arithmetic of a step, and in every form."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.errors import ExitCode, JobError
from fakedist.results.job_time import time_job
from fakedist.results.opening import open_run
from fakedist.results.token_budget import budget_of
from fakedist.rundir.directory import load_manifest, write_manifest
from tests.unit.report.subjects import full_run
from tests.unit.results.test_job_time import stage

TOKENS = 1_000_000


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("stages")
    return [stage(folder / f"rank{rank}", rank) for rank in (0, 4)]


def figures(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert main(["time", *map(str, arguments), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out)["token_budget"])


def test_a_run_stands_for_all_ranks_and_its_interval_for_that_of_every_figure(tmp_path: Path) -> None:
    run = open_run(full_run(tmp_path / "run"))
    assert run.summary.time is not None
    step_us, world = run.summary.time.step_us, run.manifest.job.world_size if run.manifest.job else 0
    budget = budget_of(run, 700.0, TOKENS, 2.5)
    assert budget.num_steps == math.ceil(TOKENS / 8_192) == 123
    assert budget.hours.value == pytest.approx(123 * step_us / 3.6e9)
    assert budget.gpu_hours.value == pytest.approx(budget.hours.value * world)
    assert budget.most_kwh.value == pytest.approx(budget.gpu_hours.value * 0.7)
    assert budget.cost is not None
    assert budget.cost.value == pytest.approx(budget.gpu_hours.value * 2.5)
    for estimate in (budget.hours, budget.gpu_hours, budget.most_kwh, budget.cost):
        assert (estimate.low, estimate.high) == pytest.approx((0.9 * estimate.value, 1.2 * estimate.value))


def test_a_step_without_an_interval_or_a_price_has_none(tmp_path: Path) -> None:
    path = full_run(tmp_path / "run")
    manifest = load_manifest(path)
    summary = manifest.summary
    assert summary is not None
    assert summary.time is not None
    time = replace(summary.time, step_low_us=None, step_high_us=None)
    write_manifest(path, replace(manifest, summary=replace(summary, time=time)))
    budget = budget_of(open_run(path), 700.0, TOKENS)
    assert (budget.gpu_hours.low, budget.gpu_hours.high, budget.cost) == (None, None, None)


def test_a_job_is_priced_by_all_of_its_stages_at_the_given_power(
    stages: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = figures(capsys, *stages, "--tokens", "1.5B", "--price", "2", "--gpu-power", "500W")
    assert main(["time", *map(str, stages), "--gpu-power", "500W", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)
    hours = math.ceil(1_500_000_000 / step["throughput"]["tokens_per_step"]) * step["step_us"] / 3.6e9
    assert (found["tokens"], found["num_gpus"], found["is_alone"]) == (1_500_000_000, 8, False)
    assert found["gpu_hours"]["value"] == pytest.approx(8 * hours)  # type: ignore[index]
    assert found["most_kwh"]["value"] == pytest.approx(4 * hours)  # type: ignore[index]
    assert found["cost"]["value"] == pytest.approx(16 * hours)  # type: ignore[index]


def test_the_step_of_one_stage_is_not_the_jobs(stages: list[Path]) -> None:
    for alone, missing in zip(stages, ("4", "0"), strict=True):
        with pytest.raises(JobError, match=rf"each stage of its pipeline: {missing} is missing"):
            budget_of(time_job([alone], tokens_per_step=100), 700.0, TOKENS)


def test_tokens_that_are_not_known_are_asked_for(stages: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["time", str(stages[1]), "--tokens", "2T"]) == ExitCode.USAGE
    assert "the tokens of a step are not known from one rank\n  --tokens-per-step N" in capsys.readouterr().err


def test_text_and_markdown_name_the_bound_of_the_energy_and_what_is_not_in_it(
    stages: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for form in ("text", "markdown"):
        assert main(["time", *map(str, stages), "--tokens", "2T", "--price", "2.5", "--format", form]) == 0
        shown = capsys.readouterr().out
        assert "Training on 2T tokens, estimated" in shown
        assert "energy, at most" in shown
        assert "each GPU at its power limit of 700 W; hosts, network and cooling not included" in shown
        assert "at 2.50 for a GPU-hour" in shown
        assert "without checkpoints, evaluation, failures and restarts." in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--price", "2.5"], "--price needs --tokens"),
        (["--tokens", "2X"], "--tokens is a number like 300B or 2T, not '2X'"),
        (["--tokens", "0.0000001K"], "--tokens is a number like 300B or 2T, not '0.0000001K'"),
        (["--tokens", "2T", "--price", "-1"], "--price must be 0 to 1,000,000, not -1"),
        (["--tokens", "2T", "--format", "csv"], "--tokens is not for --format csv"),
        (["--tokens", "2T", "--gpu", "h100,b200"], "--tokens is for one GPU and fabric, each at its own price"),
    ],
)
def test_a_wrong_budget_is_refused_in_a_line(
    stages: list[Path], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["time", str(stages[0]), *options]) == ExitCode.USAGE
    assert capsys.readouterr().err.splitlines()[0] == f"fakedist: error: {message}"
