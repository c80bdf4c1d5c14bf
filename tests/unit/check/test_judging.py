"""Figures against budgets and baselines: what is exceeded, by how much, and which layer or kernels are to blame."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakedist.check.checking import (
    Checked,
    baseline_path,
    baseline_text,
    judge_job,
    read_baseline,
    settings_of,
    stale_settings,
)
from fakedist.check.config import CheckConfig, CheckJob, Figure, read_config
from fakedist.check.judging import JudgedFigure, RankFigures, RankRecord, judge, measure
from fakedist.check.outputs import check_report, figure_columns
from fakedist.errors import CheckError, JobError
from fakedist.report.render.markdown import report_markdown
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from tests.unit.analysis.recorded import GIB, KIB, MIB
from tests.unit.check.conftest import Runs
from tests.unit.report.content.test_host_memory import MEMORY
from tests.unit.report.two_runs import run_of

SITE = ["path", "category", "phase", "operation", "line"]
HEAD = '[[check.jobs]]\nname = "net"\nscript = "train.py"\nworld_size = 8\nranks = [1]\n'
CHANGED = {"activation": 12 * MIB, "line": 212}
STEP = 'max_increase = { step_time = "2%" }'


def config_of(folder: Path, text: str) -> tuple[CheckConfig, CheckJob]:
    (folder / "fakedist.toml").write_text(HEAD + text)
    config = read_config(folder / "fakedist.toml")
    return config, config.jobs[0]


def measured(job: CheckJob, run: Run) -> RankFigures:
    return measure(run, {limit.figure for limit in (*job.budgets, *job.tolerances)}, "job 'net', rank 1")


def baseline_of(job: CheckJob, run: Run) -> str:
    return baseline_text(settings_of(job, run.summary), {1: measured(job, run)})


def write_baseline(config: CheckConfig, text: str) -> Path:
    path = baseline_path(config, config.jobs[0])
    path.parent.mkdir()
    path.write_text(text)
    return path


def checked(folder: Path, text: str, now: Run, before: Run | None = None) -> Checked:
    """Judge a run as `fakedist check` does once it has run, against a baseline that was written and read."""
    config, job = config_of(folder, text)
    found = Checked(config)
    if before is not None:
        write_baseline(config, baseline_of(job, before))
    judge_job(found, job, {1: now}, None if before is None else read_baseline(config, job))
    return found


def only(found: Checked) -> JudgedFigure:
    (finding,) = found.exceeded
    return finding


BUDGETS = [
    ('peak_allocated = "{} MiB"', 72, 73, 73 * MIB, "peak allocated is 73.00 MiB, 1.00 MiB over"),
    ('peak_reserved = "{} GB"', 1, 1.08, GIB, "peak reserved is 1.00 GiB, 70.33 MiB over its budget of 953.67 MiB"),
    ('headroom = "{} GiB"', 79.5, 79, 79 * GIB, "headroom is 79.00 GiB, 512.00 MiB under its budget of 79.50 GiB"),
    ('headroom = "{}%"', 99, 98, 79 * GIB, "headroom is 79.00 GiB, 204.80 MiB under its budget of 79.20 GiB"),
    (
        'categories = {{ activation = "{} MiB" }}',
        *(20, 24, 24 * MIB),
        "category activation is 24.00 MiB, 4.00 MiB over its budget of 20.00 MiB",
    ),
    (
        'layers = {{ "layers.*.mlp" = "{} MiB" }}',
        *(71, 72, 72 * MIB),
        "layers layers.*.mlp is 72.00 MiB, 1.00 MiB over its budget of 71.00 MiB",
    ),
    ('layers = {{ "layers.1" = "{} MiB" }}', 1, 24, 24 * MIB, "layers layers.1 is 24.00 MiB, 23.00 MiB over"),
    ('groups = {{ tp = "{} MiB" }}', 15, 16, 16 * MIB, "group tp is 16.00 MiB, 1.00 MiB over"),
]


@pytest.mark.parametrize(("limit", "exceeded", "within", "value", "message"), BUDGETS)
def test_a_budget_that_is_exceeded_says_by_how_much_and_one_that_is_just_met_is_within(
    tmp_path: Path, run: Runs, limit: str, exceeded: float, within: float, value: int, message: str
) -> None:
    finding = only(checked(tmp_path, f"budgets = {{ {limit.format(exceeded)} }}", run()))
    assert finding.value == value
    assert finding.message.startswith(f"net rank 1: {message}")
    found = checked(tmp_path, f"budgets = {{ {limit.format(within)} }}", run())
    assert found.exceeded == []
    assert sum(finding.budget is not None for finding in found.judged) == 1


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
def test_without_a_baseline_the_blame_goes_to_what_is_there(
    tmp_path: Path, run: Runs, limit: str, blame: str, line: str
) -> None:
    finding = only(checked(tmp_path, f"budgets = {{ {limit} }}", run()))
    assert (finding.blame, finding.line) == (blame, line)


@pytest.mark.parametrize(
    ("tolerance", "is_exceeded"),
    [("16%", True), ("17%", False), ("11 MiB", True), ("12 MiB", False), ("0%", True), ("0 B", True)],
)
def test_growth_is_held_against_the_baseline(tmp_path: Path, run: Runs, tolerance: str, is_exceeded: bool) -> None:
    found = checked(tmp_path, f'max_increase = {{ peak_allocated = "{tolerance}" }}', run(**CHANGED), run())
    message = (
        "net rank 1: peak allocated is 85.00 MiB, 12.00 MiB (+16.4%) more than its baseline of 73.00 MiB, where "
        f"{tolerance} is allowed: activations of layers.*.mlp, +12.00 MiB, made at model.py:212 (forward)"
    )
    assert [finding.message for finding in found.exceeded] == [message] * is_exceeded


def held(**bytes_of_line: int) -> RankFigures:
    """A rank whose layer ``mlp`` saves these bytes at these lines of one function."""
    sites = {f"model.py:{name.removeprefix('line')} (forward)": bytes_ for name, bytes_ in bytes_of_line.items()}
    total = sum(sites.values())
    by_line = {line: {"mlp": {"activation": bytes_}} for line, bytes_ in sites.items()}
    return RankFigures.from_record(
        RankRecord(
            peak_allocated_bytes=total,
            peak_reserved_bytes=total,
            peak_step=2,
            peak_phase="forward",
            capacity_bytes=GIB,
            by_category={"activation": total},
            by_phase={},
            layers={"mlp": {"activation": total}},
            layer_limits={},
            groups={},
            lines=by_line,
        )
    )


@pytest.mark.parametrize(
    ("now", "grown"),
    [
        (held(line43=100 * MIB, line44=60 * MIB), 44),  # 43 holds more, and is as it was
        (held(line48=100 * MIB, line49=60 * MIB), 49),  # the function moved down
        (held(line43=100 * MIB, line44=10 * MIB, line45=50 * MIB), 45),  # it is new
    ],
    ids=["next", "moved", "new"],
)
def test_the_line_that_grew_is_named_and_not_the_one_that_holds_most(
    tmp_path: Path, now: RankFigures, grown: int
) -> None:
    _, job = config_of(tmp_path, 'max_increase = { peak_allocated = "1%" }')
    findings = judge(job, 1, now, held(line43=100 * MIB, line44=10 * MIB))
    (finding,) = [finding for finding in findings if finding.is_exceeded]
    assert finding.line == f"model.py:{grown} (forward)"


def test_what_shrank_is_never_exceeded(tmp_path: Path, run: Runs) -> None:
    assert checked(tmp_path, 'max_increase = "0%"', run(activation=700 * KIB), run()).exceeded == []


def test_the_budget_names_its_baseline_and_blames_what_grew(tmp_path: Path, run: Runs) -> None:
    limits = 'budgets = { peak_allocated = "80 MiB" }\nmax_increase = "100%"'
    assert only(checked(tmp_path, limits, run(**CHANGED), run())).message == (
        "net rank 1: peak allocated is 85.00 MiB, 5.00 MiB over its budget of 80.00 MiB (baseline 73.00 MiB): "
        "activations of layers.*.mlp, +12.00 MiB, made at model.py:212 (forward)"
    )


@pytest.mark.parametrize(
    ("limit", "told", "hint"),
    [
        ('layers = { "layers.*.mpl" = "1 GiB" }', "no layer is called 'layers.*.mpl'", "'layers.*.mlp'?"),
        ('groups = { pt = "1 GiB" }', "there is no group 'pt'", "'tp'"),
        ('step_time = "1 s"', "no step was timed, so there is no step_time", ""),
    ],
)
def test_a_figure_that_the_run_does_not_have_is_refused(
    tmp_path: Path, run: Runs, limit: str, told: str, hint: str
) -> None:
    with pytest.raises(CheckError) as raised:
        checked(tmp_path, f"budgets = {{ {limit} }}", run())
    assert told in raised.value.message
    assert hint in raised.value.hint


def test_a_baseline_comes_back_as_it_was_written(tmp_path: Path, run: Runs) -> None:
    assert read_baseline(*config_of(tmp_path, 'budgets = { peak_allocated = "1 GiB" }')) is None  # it needs none
    config, job = config_of(tmp_path, 'max_increase = { layers = { "layers.*.mlp" = "1%" }, groups = { tp = "1%" } }')
    path = write_baseline(config, baseline_of(job, run()))
    found = read_baseline(config, job)
    assert found is not None
    now = measured(job, run())
    assert found.ranks[1].record == now.record
    assert found.ranks[1].parts.sort_values(["path", "category"]).values.tolist() == now.parts.values.tolist()
    assert now.parts["bytes"].sum() == now.blocks["bytes"].sum() == 73 * MIB
    sides = [figures.blocks[[*SITE, "bytes"]] for figures in (found.ranks[1], now)]
    assert sorted(sides[0].to_numpy().tolist()) == sorted(sides[1].to_numpy().tolist())
    assert not any(finding.is_exceeded for finding in judge(job, 1, now, found.ranks[1]))
    assert stale_settings(found, settings_of(job, run().summary)) == []
    other = settings_of(job, replace(run().summary, torch="2.99", gpu="NVIDIA B200"))
    assert stale_settings(found, other) == ["torch 2.15.0 -> 2.99", "GPU NVIDIA H100 80GB HBM3 -> NVIDIA B200"]
    text = path.read_text()
    assert json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n" == text
    assert str(run().path.parent) not in text


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
    tmp_path: Path, run: Runs, change: dict[str, Any] | None, told: str, hint: str
) -> None:
    config, job = config_of(tmp_path, 'max_increase = "1%"')
    if change is not None:
        write_baseline(config, json.dumps({**json.loads(baseline_of(job, run())), **change}))
    with pytest.raises(CheckError) as raised:
        read_baseline(config, job)
    assert told in raised.value.message
    assert raised.value.hint == hint
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ('step_time = "400 us"', "step time (estimated) is 450 µs, 50.0 µs over its budget of 400 µs"),
        ('families = { gemm = "400 us" }', "kernels of gemm (estimated) is 420 µs, 20.0 µs over its budget of 400 µs"),
    ],
)
def test_a_budget_says_that_the_time_is_estimated_and_what_takes_most(
    tmp_path: Path, run: Runs, limit: str, message: str
) -> None:
    found = checked(tmp_path, f"budgets = {{ {limit} }}", run(gemm_us=140))
    assert only(found).message == f"net rank 1: {message}: gemm of layers.*.mlp, 420 µs"


def test_a_step_that_grew_beyond_its_baseline_is_blamed_on_the_kernels_that_grew(tmp_path: Path, run: Runs) -> None:
    found = checked(tmp_path, STEP, run(gemm_us=140), run(gemm_us=100))
    told = "120 µs (+36.4%) more than its baseline of 330 µs, where 2% is allowed: gemm of layers.*.mlp, +120 µs"
    assert only(found).message == f"net rank 1: step time (estimated) is 450 µs, {told}"
    assert (found.exit_code, found.warnings) == (3, [])


def test_a_shorter_step_passes_and_over_its_budget_is_blamed_on_what_it_takes_now(tmp_path: Path, run: Runs) -> None:
    found = checked(tmp_path, f'budgets = {{ step_time = "1 us" }}\n{STEP}', run(gemm_us=90), run(gemm_us=100))
    assert only(found).message.endswith("its budget of 1.0 µs (baseline 330 µs): gemm of layers.*.mlp, 270 µs")


def test_every_output_says_where_the_time_is_from(tmp_path: Path, run: Runs) -> None:
    found = checked(tmp_path, 'budgets = { step_time = "1 s" }', run(gemm_us=100))
    figures = next(column for column in figure_columns(found.judged) if column.name == "figure")
    assert "step time (estimated)" in figures.cells
    assert "step time (estimated)" in report_markdown(check_report(found)).replace("\\", "")
    sources = {row["figure"]: row["source"] for row in check_report(found).data()["findings"]}
    assert sources == {"peak_allocated": "measured", "peak_reserved": "measured", "step_time": "estimated"}


def test_measured_times_are_not_compared_with_estimated_ones_without_a_word(tmp_path: Path, run: Runs) -> None:
    found = checked(tmp_path, STEP, run(gemm_us=100), run(gemm_us=100, source="measured"))
    assert found.warnings == ["the baseline of net rank 1: its times are measured, and this run's are estimated"]


def test_collectives_that_are_of_unknown_duration_now_are_told(tmp_path: Path, run: Runs) -> None:
    config, job = config_of(tmp_path, STEP)
    timed = run(gemm_us=100)
    plain = json.loads(baseline_of(job, timed))
    plain["ranks"]["1"]["time"]["num_unknown_calls"] = 0
    write_baseline(config, json.dumps(plain))
    found = Checked(config)
    judge_job(found, job, {1: timed}, read_baseline(config, job))
    (warning,) = found.warnings
    assert "collectives of unknown duration were 0 and are 1" in warning


def test_a_baseline_from_before_times_were_asked_for_is_told(tmp_path: Path, run: Runs) -> None:
    timed = run(gemm_us=100)
    _, plain = config_of(tmp_path, "")
    assert measured(plain, timed).record.time is None
    config, job = config_of(tmp_path, STEP)
    write_baseline(config, baseline_of(plain, timed))
    with pytest.raises(CheckError, match="has no step time"):
        judge_job(Checked(config), job, {1: timed}, read_baseline(config, job))


def test_a_gpu_without_kernels_has_the_wall_time_of_its_last_step(tmp_path: Path, run: Runs) -> None:
    found = checked(tmp_path, 'device = "cuda"\nbudgets = { step_time = "1 us" }', run(device="cuda", num_steps=1))
    assert only(found).message == "net rank 1: step time (measured) is 900 µs, 899 µs over its budget of 1.0 µs"


def test_the_same_run_twice_gives_the_same_baseline(tmp_path: Path, run: Runs) -> None:
    _, job = config_of(tmp_path, STEP)
    again = open_run(run_of(tmp_path / "again", gemm_us=100))
    assert baseline_of(job, again) == baseline_of(job, run(gemm_us=100))


def test_times_are_written_as_times() -> None:
    finding = JudgedFigure("net", 0, Figure("step_time"), 950_000.0, budget=900_000.0)
    assert finding.message == "net rank 0: step time is 950.0 ms, 50.0 ms over its budget of 900.0 ms"


def test_a_share_is_exceeded_where_it_is_not_reached(tmp_path: Path, run: Runs) -> None:
    _, job = config_of(tmp_path, 'budgets = { fitting_draws = "99.9%" }')
    now = run()
    figures = measure(now, set(), "")
    for share, messages in (
        (0.999, []),
        (0.98, ["fitting draws (simulated) is 98.0%, 1.9% under its budget of 99.9%"]),
    ):
        record = replace(figures.record, shares={"fitting_draws": share})
        found = judge(job, 1, replace(figures, record=record), None)
        assert [one.message.partition(": ")[2] for one in found if one.is_exceeded] == messages
    with pytest.raises(JobError, match="no load of experts to draw again"):
        measured(job, now)


def with_host_memory(folder: Path) -> Run:
    now = open_run(run_of(folder / "run"))
    now.summary = replace(now.summary, host_memory=MEMORY)
    return now


def test_host_memory_has_budgets_and_the_line_with_most_is_to_blame(tmp_path: Path) -> None:
    now = with_host_memory(tmp_path)
    text = 'budgets = {{ host_bytes = "{} GiB", node_host_bytes = "700 GiB" }}'
    assert checked(tmp_path, text.format(81), now).exceeded == []
    finding = only(checked(tmp_path, text.format(80), now))
    assert finding.message == (
        "net rank 1: host memory is 81.00 GiB, 1.00 GiB over its budget of 80.00 GiB: most of this rank's is 64.00 GiB "
        "of pageable memory at /job/train.py:40 (main)"
    )
    assert finding.line == "/job/train.py:40 (main)"
    finding = only(checked(tmp_path, 'host_memory = "480 GiB"', now))
    assert "host memory of the node is 648.00 GiB, 168.00 GiB over its budget of 480.00 GiB" in finding.message
    own = 'host_memory = "480 GiB"\nbudgets = { node_host_bytes = "1 TiB" }'
    assert checked(tmp_path, own, now).exceeded == []


def test_host_memory_is_in_a_baseline_that_needs_it_and_an_error_where_it_is_not_known(
    tmp_path: Path, run: Runs
) -> None:
    now = with_host_memory(tmp_path)
    grown = 'max_increase = { host_bytes = "1%" }'
    assert checked(tmp_path, grown, now, now).exceeded == []
    kept = json.loads((tmp_path / "fakedist-baselines/net.json").read_text())
    assert kept["ranks"]["1"]["host_bytes"] == MEMORY.peak.peak_bytes
    with pytest.raises(CheckError, match="the host's memory was not recorded"):
        checked(tmp_path, 'budgets = { host_bytes = "1 GiB" }', run())
