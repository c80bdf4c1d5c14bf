"""A step's time against budgets and baselines: estimated or measured, and which kernels are to blame."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakedist.check.baselines import baseline_text, read_baseline, settings_of
from fakedist.check.checking import Checked, judge_job
from fakedist.check.config import CheckConfig, CheckJob, read_config
from fakedist.check.judging import Finding
from fakedist.check.measured import RankFigures, measure
from fakedist.check.outputs import checked_markdown, checked_object, finding_columns
from fakedist.errors import CheckError
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from tests.unit.report.two_runs import run_of

HEAD = '[[check.jobs]]\nname = "net"\nscript = "train.py"\nworld_size = 8\nranks = [1]\n'
STEP = 'max_increase = { step_time = "2%" }'


def config_of(folder: Path, text: str) -> tuple[CheckConfig, CheckJob]:
    (folder / "fakedist.toml").write_text(HEAD + text)
    config = read_config(folder / "fakedist.toml")
    return config, config.jobs[0]


def measured(job: CheckJob, run: Run) -> RankFigures:
    return measure(run, {limit.figure for limit in (*job.budgets, *job.tolerances)}, "job 'net', rank 1")


def checked(tmp_path: Path, text: str, now: dict[str, Any], before: dict[str, Any] | None = None) -> Checked:
    """Judge a run as `fakedist check` does once it has run, against a baseline that was written and read."""
    config, job = config_of(tmp_path, text)
    found = Checked(config)
    baseline = None
    if before is not None:
        run = open_run(run_of(tmp_path / "before", **before))
        path = config.baselines / "net.json"
        path.parent.mkdir()
        path.write_text(baseline_text(settings_of(job, run.summary), {1: measured(job, run)}))

        baseline = read_baseline(config, job)
    judge_job(found, job, {1: open_run(run_of(tmp_path / "now", **now))}, baseline)
    return found


def only(found: Checked) -> Finding:
    (one,) = found.exceeded
    return one


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ('step_time = "400 us"', "step time (estimated) is 450 µs, 50.0 µs over its budget of 400 µs"),
        ('families = { gemm = "400 us" }', "kernels of gemm (estimated) is 420 µs, 20.0 µs over its budget of 400 µs"),
    ],
)
def test_a_budget_says_that_the_time_is_estimated_and_what_takes_most(tmp_path: Path, limit: str, message: str) -> None:
    found = checked(tmp_path, f"budgets = {{ {limit} }}", {"gemm_us": 140})
    assert only(found).message == f"net rank 1: {message}: gemm of layers.*.mlp, 420 µs"


def test_what_grew_beyond_its_baseline_is_blamed_on_the_kernels_that_grew(tmp_path: Path) -> None:
    found = checked(tmp_path, STEP, {"gemm_us": 140}, {"gemm_us": 100})
    told = "120 µs (+36.4%) more than its baseline of 330 µs, where 2% is allowed: gemm of layers.*.mlp, +120 µs"
    assert only(found).message == f"net rank 1: step time (estimated) is 450 µs, {told}"
    assert found.exit_code == 3
    assert found.warnings == []


def test_the_same_time_passes_and_so_does_less(tmp_path: Path) -> None:
    assert checked(tmp_path, STEP, {"gemm_us": 90}, {"gemm_us": 100}).exit_code == 0


def test_every_output_says_where_the_time_is_from(tmp_path: Path) -> None:
    found = checked(tmp_path, 'budgets = { step_time = "1 s" }', {"gemm_us": 100})
    figures = next(column for column in finding_columns(found.findings) if column.name == "figure")
    assert "step time (estimated)" in figures.cells
    assert "step time (estimated)" in checked_markdown(found).replace("\\", "")
    rows = checked_object(found)["findings"]
    assert {row["figure"]: row["source"] for row in rows} == {
        "peak_allocated": "measured",
        "peak_reserved": "measured",
        "step_time": "estimated",
    }


def test_a_baseline_of_measured_times_is_not_compared_with_estimated_ones_without_a_word(tmp_path: Path) -> None:
    found = checked(tmp_path, STEP, {"gemm_us": 100}, {"gemm_us": 100, "source": "measured"})
    assert found.warnings == ["the baseline of net rank 1: its times are measured, and this run's are estimated"]


def test_collectives_that_are_of_unknown_duration_now_are_told(tmp_path: Path) -> None:
    config, job = config_of(tmp_path, STEP)
    run = open_run(run_of(tmp_path / "run", gemm_us=100))
    record = json.loads(json.dumps(measured(job, run).record.to_plain()))
    record["time"]["num_unknown_calls"] = 0
    path = config.baselines / "net.json"
    path.parent.mkdir()
    text = json.loads(baseline_text(settings_of(job, run.summary), {1: measured(job, run)}))
    path.write_text(json.dumps({**text, "ranks": {"1": record}}))

    found = Checked(config)
    judge_job(found, job, {1: run}, read_baseline(config, job))
    (warning,) = found.warnings
    assert "collectives of unknown duration were 0 and are 1" in warning


def test_a_run_without_a_timed_step_is_told_before_it_is_judged(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="no step was timed, so there is no step_time"):
        checked(tmp_path, 'budgets = { step_time = "1 s" }', {})


def test_a_baseline_from_before_times_were_asked_for_is_told(tmp_path: Path) -> None:
    _, job = config_of(tmp_path, "")
    assert measured(job, open_run(run_of(tmp_path / "plain", gemm_us=100))).record.time is None
    config, job = config_of(tmp_path, STEP)
    run = open_run(run_of(tmp_path / "now", gemm_us=100))
    now = measured(job, run)
    record = replace(now.record, time=None)
    path = config.baselines / "net.json"
    path.parent.mkdir()
    path.write_text(baseline_text(settings_of(job, run.summary), {1: RankFigures.from_record(record)}))

    with pytest.raises(CheckError, match="has no step time"):
        judge_job(Checked(config), job, {1: run}, read_baseline(config, job))


def test_a_gpu_without_kernels_has_the_wall_time_of_its_last_step(tmp_path: Path) -> None:
    found = checked(tmp_path, 'device = "cuda"\nbudgets = { step_time = "1 us" }', {"device": "cuda"})
    assert only(found).message == "net rank 1: step time (measured) is 900 µs, 899 µs over its budget of 1.0 µs"


def test_the_same_run_twice_gives_the_same_baseline(tmp_path: Path) -> None:
    _, job = config_of(tmp_path, STEP)
    texts = set()
    for name in ("one", "other"):
        run = open_run(run_of(tmp_path / name, gemm_us=100))
        texts.add(baseline_text(settings_of(job, run.summary), {1: measured(job, run)}))
    assert len(texts) == 1
