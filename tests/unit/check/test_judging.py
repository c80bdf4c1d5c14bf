"""Figures against budgets and baselines: what is exceeded, by how much, and which layer is to blame."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakedist.check.baselines import baseline_path, baseline_text, read_baseline, settings_of, stale_settings
from fakedist.check.config import CheckConfig, CheckJob, Figure, read_config
from fakedist.check.judging import Finding, judge
from fakedist.check.measured import RankFigures, measure
from fakedist.errors import CheckError
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from tests.unit.analysis.recorded import GIB, KIB, MIB
from tests.unit.report.two_runs import run_of

HEAD = '[[check.jobs]]\nname = "net"\nscript = "train.py"\nworld_size = 8\nranks = [1]\n'
CHANGED = {"activation": 12 * MIB, "line": 212}


def config_of(folder: Path, text: str) -> tuple[CheckConfig, CheckJob]:
    (folder / "fakedist.toml").write_text(HEAD + text)
    config = read_config(folder / "fakedist.toml")
    return config, config.jobs[0]


def measured(job: CheckJob, run: Run) -> RankFigures:
    return measure(run, {limit.figure for limit in (*job.budgets, *job.tolerances)}, "job 'net', rank 1")


def judged(tmp_path: Path, text: str, now: dict[str, Any], before: dict[str, Any] | None = None) -> list[Finding]:
    _, job = config_of(tmp_path, text)
    run = open_run(run_of(tmp_path / "now", **now))
    was = None if before is None else measured(job, open_run(run_of(tmp_path / "before", **before)))
    return judge(job, 1, measured(job, run), was)


def only(findings: list[Finding]) -> Finding:
    (found,) = [finding for finding in findings if finding.is_exceeded]
    return found


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ('peak_allocated = "72 MiB"', 73 * MIB, "peak allocated is 73.00 MiB, 1.00 MiB over its budget of 72.00 MiB"),
        ('peak_reserved = "1 GB"', GIB, "peak reserved is 1.00 GiB, 70.33 MiB over its budget of 953.67 MiB"),
        ('headroom = "79.5 GiB"', 79 * GIB, "headroom is 79.00 GiB, 512.00 MiB under its budget of 79.50 GiB"),
        ('headroom = "99%"', 79 * GIB, "headroom is 79.00 GiB, 204.80 MiB under its budget of 79.20 GiB"),
        (
            'categories = { activation = "20 MiB" }',
            24 * MIB,
            "category activation is 24.00 MiB, 4.00 MiB over its budget of 20.00 MiB",
        ),
        (
            'layers = { "layers.*.mlp" = "71 MiB" }',
            72 * MIB,
            "layers layers.*.mlp is 72.00 MiB, 1.00 MiB over its budget of 71.00 MiB",
        ),
        (
            'layers = { "layers.1" = "1 MiB" }',
            24 * MIB,
            "layers layers.1 is 24.00 MiB, 23.00 MiB over its budget of 1.00 MiB",
        ),
        ('groups = { tp = "15 MiB" }', 16 * MIB, "group tp is 16.00 MiB, 1.00 MiB over its budget of 15.00 MiB"),
    ],
)
def test_a_budget_that_is_exceeded_says_by_how_much(tmp_path: Path, limit: str, value: int, message: str) -> None:
    finding = only(judged(tmp_path, f"budgets = {{ {limit} }}", {}))
    assert finding.value == value
    assert finding.message.startswith(f"net rank 1: {message}")


@pytest.mark.parametrize(
    "limit",
    [
        'peak_allocated = "73 MiB"',
        'peak_reserved = "1 GiB"',
        'headroom = "79 GiB"',
        'headroom = "98%"',
        'categories = { activation = "24 MiB" }',
        'layers = { "layers.*.mlp" = "72 MiB" }',
        'groups = { tp = "16 MiB" }',
    ],
)
def test_what_is_just_within_its_budget_is_within(tmp_path: Path, limit: str) -> None:
    findings = judged(tmp_path, f"budgets = {{ {limit} }}", {})
    assert not any(finding.is_exceeded for finding in findings)
    assert sum(finding.budget is not None for finding in findings) == 1


@pytest.mark.parametrize(
    ("limit", "blame", "line"),
    [
        ('peak_allocated = "1 MiB"', "parameters of layers.*.mlp, 48.00 MiB, made in mm.default (init)", ""),
        (
            'categories = { activation = "1 MiB" }',
            "activations of layers.*.mlp, 24.00 MiB, made at model.py:12 (forward)",
            "model.py:12 (forward)",
        ),
    ],
)
def test_without_a_baseline_the_blame_goes_to_what_is_there(tmp_path: Path, limit: str, blame: str, line: str) -> None:
    finding = only(judged(tmp_path, f"budgets = {{ {limit} }}", {}))
    assert (finding.blame, finding.line) == (blame, line)


@pytest.mark.parametrize(
    ("tolerance", "is_exceeded"), [("16%", True), ("17%", False), ("11 MiB", True), ("12 MiB", False), ("0%", True)]
)
def test_growth_is_held_against_the_baseline(tmp_path: Path, tolerance: str, is_exceeded: bool) -> None:
    findings = judged(tmp_path, f'max_increase = {{ peak_allocated = "{tolerance}" }}', CHANGED, {})
    assert any(finding.is_exceeded for finding in findings) is is_exceeded
    if is_exceeded:
        assert only(findings).message == (
            "net rank 1: peak allocated is 85.00 MiB, 12.00 MiB (+16.4%) more than its baseline of 73.00 MiB, where "
            f"{tolerance} is allowed: activations of layers.*.mlp, +12.00 MiB, made at model.py:212 (forward)"
        )


def test_what_shrank_is_never_exceeded(tmp_path: Path) -> None:
    findings = judged(tmp_path, 'max_increase = "0%"', {"activation": 700 * KIB}, {})
    assert not any(finding.is_exceeded for finding in findings)


def test_the_budget_names_its_baseline_and_blames_what_grew(tmp_path: Path) -> None:
    finding = only(judged(tmp_path, 'budgets = { peak_allocated = "80 MiB" }', CHANGED, {}))
    assert finding.message == (
        "net rank 1: peak allocated is 85.00 MiB, 5.00 MiB over its budget of 80.00 MiB (baseline 73.00 MiB): "
        "activations of layers.*.mlp, +12.00 MiB, made at model.py:212 (forward)"
    )


@pytest.mark.parametrize(
    ("limit", "told", "hint"),
    [
        ('layers = { "layers.*.mpl" = "1 GiB" }', "no layer is called 'layers.*.mpl'", "'layers.*.mlp'?"),
        ('groups = { pt = "1 GiB" }', "there is no group 'pt'", "'tp'"),
    ],
)
def test_a_part_that_the_model_does_not_have_is_refused(tmp_path: Path, limit: str, told: str, hint: str) -> None:
    with pytest.raises(CheckError) as raised:
        judged(tmp_path, f"budgets = {{ {limit} }}", {})
    assert told in raised.value.message
    assert hint in raised.value.hint


def baseline_of(job: CheckJob, run: Run) -> str:
    return baseline_text(settings_of(job, run.summary), {1: measured(job, run)})


def test_a_baseline_comes_back_as_it_was_written(tmp_path: Path) -> None:
    config, job = config_of(tmp_path, 'max_increase = { layers = { "layers.*.mlp" = "1%" }, groups = { tp = "1%" } }')
    run = open_run(run_of(tmp_path / "run"))
    path = baseline_path(config, job)
    path.parent.mkdir()
    path.write_text(baseline_of(job, run))
    found = read_baseline(config, job)
    assert found is not None
    now = measured(job, run)
    assert found.ranks[1].record == now.record
    assert found.ranks[1].parts.sort_values(["path", "category"]).values.tolist() == now.parts.values.tolist()
    assert now.parts["bytes"].sum() == 73 * MIB
    assert not any(finding.is_exceeded for finding in judge(job, 1, now, found.ranks[1]))
    assert stale_settings(found, settings_of(job, run.summary)) == []
    text = path.read_text()
    assert json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n" == text
    assert str(tmp_path) not in text


def test_another_torch_or_gpu_is_said(tmp_path: Path) -> None:
    config, job = config_of(tmp_path, "")
    run = open_run(run_of(tmp_path / "run"))
    path = baseline_path(config, job)
    path.parent.mkdir()
    path.write_text(baseline_of(job, run))
    found = read_baseline(config, job)
    assert found is not None
    now = settings_of(job, replace(run.summary, torch="2.99", gpu="NVIDIA B200"))
    assert stale_settings(found, now) == ["torch 2.15.0 -> 2.99", "GPU NVIDIA H100 80GB HBM3 -> NVIDIA B200"]


@pytest.mark.parametrize(
    ("change", "told", "hint"),
    [
        ({"schema_version": 2}, "has schema version 2; this fakedist reads up to 1", "pip install --upgrade fakedist"),
        ({"schema_version": None}, "is not a baseline", "fakedist check --update net"),
        ({"ranks": {"0": None}}, "is not a baseline", "fakedist check --update net"),
        ({"ranks": {}}, "has no rank 1 of job 'net'", "fakedist check --update net"),
        (None, "does not exist", "fakedist check --update net"),
    ],
)
def test_a_baseline_that_cannot_be_used_is_refused(
    tmp_path: Path, change: dict[str, Any] | None, told: str, hint: str
) -> None:
    config, job = config_of(tmp_path, 'max_increase = "1%"')
    if change is not None:
        path = baseline_path(config, job)
        path.parent.mkdir()
        good = json.loads(baseline_of(job, open_run(run_of(tmp_path / "run"))))
        path.write_text(json.dumps({**good, **change}))
    with pytest.raises(CheckError) as raised:
        read_baseline(config, job)
    assert told in raised.value.message
    assert raised.value.hint == hint
    assert raised.value.exit_code == 2


def test_a_job_without_tolerances_needs_no_baseline(tmp_path: Path) -> None:
    config, job = config_of(tmp_path, 'budgets = { peak_allocated = "1 GiB" }')
    assert read_baseline(config, job) is None


def test_times_are_times(tmp_path: Path) -> None:
    finding = Finding("net", 0, Figure("step_time"), 950_000.0, budget=900_000.0)
    assert finding.message == "net rank 0: step time is 950.0 ms, 50.0 ms over its budget of 900.0 ms"
