"""Published steps: what is kept is what the model says today, and it is as close as promised."""

from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from fakedist.cost_model.accuracy import step_accuracy
from fakedist.cost_model.kernels.clocks import HEAT
from fakedist.errors import SetupError
from tests.support.bench import ROOT, bench_module


@pytest.fixture(scope="module")
def judge() -> ModuleType:
    return bench_module("accuracy_steps")


def test_published_steps_are_met_and_held_by_their_intervals() -> None:
    rows = step_accuracy().filled
    assert len(rows) == 11
    assert [row.name for row in rows if abs(row.error) > 0.15] == []
    assert sorted(abs(row.error) for row in rows)[len(rows) // 2] <= 0.08
    assert [row.name for row in rows if row.low_s < 0.88 * row.step_s or row.high_s > 1.12 * row.step_s] == []
    assert [row.name for row in step_accuracy().filled if not row.low_s <= row.published_s <= row.high_s] == []


def test_communication_matters_and_rows_left_out_of_the_fit_are_as_close() -> None:
    by_name = {row.name: row for row in step_accuracy().filled}
    assert [name for name, row in by_name.items() if row.kernels_s is None] == ["gpt-7b-pp4"]
    assert all(row.kernels_s < row.step_s for row in by_name.values() if row.kernels_s is not None)
    assert (by_name["gpt-7b-tp4"].error_without_communication or 0.0) < -0.15
    fitted = [row for row in step_accuracy().filled if row.is_fitted]
    assert len(fitted) == 3
    assert [row.name for row in fitted if abs((row.left_out_s or 0.0) / row.published_s - 1) > 0.15] == []


def test_the_intervals_of_steps_that_the_host_limits_are_wide_enough() -> None:
    rows = [row for row in step_accuracy().rows if row.is_host_bound]
    assert len(rows) == 3
    assert [row.name for row in rows if not row.low_s <= row.published_s <= row.high_s] == []
    assert all(row.high_s > 3 * row.step_s for row in rows)


def test_the_recorded_launches_have_the_work_of_the_model_of_the_job(judge: ModuleType) -> None:
    for step in judge.STEPS:
        judge.check_work(judge.Run(step))
    run = judge.Run(judge.STEPS[0])
    launches = run.tables[0]["launches"]
    run.tables[0]["launches"] = launches[~launches["recompute"]]
    with pytest.raises(SystemExit, match=r"gemm: .* TFLOP recorded"):
        judge.check_work(run)


def test_the_kept_estimates_are_those_of_the_model_today(judge: ModuleType) -> None:
    kept = step_accuracy()
    for row in kept.rows:
        run = judge.Run(next(step for step in judge.STEPS if step.name == row.name))
        assert run.estimate(kept.heat) == pytest.approx((row.step_s, row.low_s, row.high_s), rel=1e-6)
        assert run.kernels(kept.heat) == (row.kernels_s and pytest.approx(row.kernels_s, rel=1e-6))


def test_the_docs_show_what_is_kept_and_the_parameter(judge: ModuleType) -> None:
    page = (ROOT / "docs" / "accuracy" / "results.md").read_text()
    assert judge.table(step_accuracy()) in page
    assert judge.host_table(step_accuracy()) in page
    row = next(
        line for line in (ROOT / "docs" / "estimates.md").read_text().splitlines() if line.startswith("| `HEAT`")
    )
    assert f"| {HEAT:g} |" in row
    assert pytest.approx(step_accuracy().heat, abs=0.02) == HEAT


def test_a_missing_or_damaged_file_says_which_command_writes_it(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="missing") as missing:
        step_accuracy(tmp_path / "none.json")
    assert missing.value.hint == "make accuracy-steps writes it"
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"heat": "warm", "rows": []}')
    with pytest.raises(SetupError, match="damaged"):
        step_accuracy(damaged)
    assert asdict(step_accuracy())["rows"]
