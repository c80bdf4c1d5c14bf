"""Published steps: what is kept is what the model says today, and it is as close as promised."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

from fakedist.cost_model.accuracy import StepRow, step_accuracy
from fakedist.cost_model.kernels.clocks import HEAT
from fakedist.errors import SetupError
from fakedist.rundir.step_time import ClockSteadiness, HostTime
from tests.support.bench import ROOT, bench_module

EIGHT_STAGES = "nemotron-340b"
#: Their launches take seconds to price.
LARGE = (EIGHT_STAGES, "compiled-256-70b-tp8", "compiled-256-70b-async-tp8")


@pytest.fixture(scope="module")
def judge() -> ModuleType:
    return bench_module("accuracy_steps")


def test_published_steps_are_met_and_held_by_their_intervals() -> None:
    rows = step_accuracy().filled
    assert len(rows) == 16
    assert [row.name for row in rows if abs(row.error) > 0.15] == []
    assert sorted(abs(row.error) for row in rows)[len(rows) // 2] <= 0.08
    wide = [row.name for row in rows if row.low_s < 0.88 * row.step_s or row.high_s > 1.12 * row.step_s]
    assert wide == []
    outside = {row.name: row.published_s / row.high_s for row in rows if not row.is_inside}
    assert outside == {"compiled-64-tp8": pytest.approx(1.0, abs=0.01)}


def test_the_gain_of_asynchronous_tensor_parallelism_is_met() -> None:
    by_name = {row.name: row for row in step_accuracy().filled}
    for job in ("compiled-64", "compiled-256-70b"):
        before, after = by_name[f"{job}-tp8"], by_name[f"{job}-async-tp8"]
        assert before.step_s / after.step_s == pytest.approx(before.published_s / after.published_s, rel=0.03)


def test_communication_matters_and_rows_left_out_of_the_fit_are_as_close() -> None:
    by_name = {row.name: row for row in step_accuracy().filled}
    assert [name for name, row in by_name.items() if row.kernels_s is None] == ["gpt-7b-pp4", EIGHT_STAGES]
    assert all(row.kernels_s < row.step_s for row in by_name.values() if row.kernels_s is not None)
    assert (by_name["gpt-7b-tp4"].error_without_communication or 0.0) < -0.15
    fitted = [row for row in step_accuracy().filled if row.is_fitted]
    assert len(fitted) == 3
    assert [row.name for row in fitted if abs((row.left_out_s or 0.0) / row.published_s - 1) > 0.15] == []


@pytest.mark.parametrize(
    ("gpu", "number", "median", "most", "inside"), [("h100-80g", 12, 0.27, 0.37, 11), ("gb200", 10, 0.35, 0.7, 10)]
)
def test_steps_that_the_host_limits_are_as_close_as_the_docs_say(
    gpu: str, number: int, median: float, most: float, inside: int
) -> None:
    rows = [row for row in step_accuracy().host_bound if row.gpu == gpu]
    assert len(rows) == number
    errors = sorted(abs(row.error) for row in rows)
    assert errors[number // 2] <= median
    assert errors[-1] <= most
    assert sum(row.is_inside for row in rows) == inside
    assert [row.name for row in rows if row.is_inside and row.high_s > 7 * row.low_s] == []


def test_a_row_is_inside_of_its_interval_up_to_both_ends() -> None:
    row = step_accuracy().host_bound[0]
    for published_s, is_inside in ((row.low_s, True), (row.high_s, True), (0.99 * row.low_s, False), (9.0, False)):
        assert replace(row, published_s=published_s).is_inside == is_inside


def test_the_recorded_launches_have_the_work_of_the_model_of_the_job(judge: ModuleType) -> None:
    for step in judge.STEPS:
        if not step.like:
            judge.check_work(judge.Run(step))
    run = judge.Run(judge.STEPS[0])
    launches = run.tables[0]["launches"]
    run.tables[0]["launches"] = launches[~launches["recompute"]]
    with pytest.raises(SystemExit, match=r"gemm: .* TFLOP recorded"):
        judge.check_work(run)


@pytest.mark.parametrize(
    "is_chosen",
    [
        pytest.param(lambda row: not (row.is_host_bound or row.name in LARGE), id="GPU"),
        pytest.param(lambda row: row.name.startswith("gpt-tiny-tp2"), id="host"),
        pytest.param(lambda row: row.is_host_bound, id="every host", marks=pytest.mark.nightly),
        pytest.param(lambda row: row.name in LARGE, id="large", marks=pytest.mark.nightly),
    ],
)
def test_the_kept_estimates_are_those_of_the_model_today(
    judge: ModuleType, is_chosen: Callable[[StepRow], bool]
) -> None:
    kept = step_accuracy()
    for row in filter(is_chosen, kept.rows):
        run = judge.Run(next(step for step in judge.STEPS if step.name == row.name))
        assert run.estimate(kept.heat) == pytest.approx((row.step_s, row.low_s, row.high_s), rel=1e-6)
        assert run.kernels(kept.heat) == (row.kernels_s and pytest.approx(row.kernels_s, rel=1e-6))


def test_a_host_without_a_clock_is_constant_and_one_of_several_ranks_has_the_mean_score_and_the_worst_clock(
    judge: ModuleType, tmp_path: Path
) -> None:
    gpu, ranks = judge.find_gpu("h100-80g"), [tmp_path / "0", tmp_path / "1"]
    assert judge.host_of(ranks, gpu).time.source == "constant"
    for rank, (machine_us, clock) in zip(
        ranks, ((20.0, ClockSteadiness(3, 0.2, 0.0)), (15.0, ClockSteadiness(2, 0.1, 0.3))), strict=True
    ):
        rank.mkdir()
        kept = HostTime("measured", "dgx-h100", 1.0, 0.5, 2.0, machine_us, 6.0, clock)
        (rank / judge.HOST).write_text(json.dumps(asdict(kept)))
    host = judge.host_of(ranks, gpu).time
    assert (host.source, host.machine_us) == ("measured", 17.5)
    assert host.clock == ClockSteadiness(2, 0.2, 0.3)


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
