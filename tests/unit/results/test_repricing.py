"""A run's step on another GPU: the times change, the memory does not."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fakedist.errors import JobError, RunDirectoryError
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options.pricing import Pricing
from fakedist.results.building import build_tables
from fakedist.results.opening import open_run
from fakedist.results.repricing import check_measured, gpu_of, is_traced, times_of
from fakedist.results.run import Run
from fakedist.rundir.directory import load_manifest, write_manifest
from fakedist.rundir.summary import Summary
from fakedist.rundir.time_notes import not_timed
from tests.unit.analysis.recorded import GPU
from tests.unit.analysis.recorded import new_run as new_run_directory
from tests.unit.cost_model.launches_by_hand import ALL_REDUCE, COPY, PRODUCT, UNKNOWN, launch, record
from tests.unit.report.handmade import recorded

H100 = find_gpu("h100-80g")
STEP = [
    launch(PRODUCT, layer=4),
    launch(what="stream_records", event=1),
    launch(what="stream_waits", event=1, stream=7),
    launch(ALL_REDUCE, stream=7, call=0),
    launch(COPY, layer=4, phase="backward"),
    launch(UNKNOWN),
]


def priced_run(directory: Path, *launches: dict[str, Any], **job: Any) -> Run:
    """The run with one of everything, on a virtual H100, whose second step launched this."""
    made = recorded()
    made.gpu = replace(GPU, model=H100)
    if launches:
        made.others.append(record(launches))
    made.ended()
    run = made.write(new_run_directory(directory, **job))
    build_tables(run)
    return open_run(run)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return priced_run(tmp_path_factory.mktemp("priced") / "run", *STEP)


def test_the_times_of_a_run_are_estimated_from_its_launches(run: Run) -> None:
    kernels = run.table("kernels").set_index("name")
    assert list(kernels.index) == ["nvjet", "elementwise", "all_reduce", "mystery"]
    assert kernels["shape"].tolist() == ["4096 x 4096 x 4096 TN", "", "", ""]
    assert kernels["duration_us"].isna().tolist() == [False, False, True, True]
    assert kernels["start_us"]["all_reduce"] == kernels["duration_us"]["nvjet"] + kernels["start_us"]["nvjet"]
    assert run.summary.timed is not None
    time, source = run.summary.timed
    assert (source.source, source.step, source.gpu) == ("estimated", 2, H100.product)
    assert (time.num_kernels, time.num_unknown_kernels, time.num_calls) == (3, 1, 1)


def unpriced(run: Run) -> Summary:
    """The run's summary without what its advice costs on its own GPU."""
    no_price = dict.fromkeys(("price_us", "price_high_us", "step_share", "step_share_high"))
    return replace(run.summary, advice=[replace(piece, **no_price) for piece in run.summary.advice], remedy=None)


def test_its_own_gpu_prices_it_as_its_report_did_to_the_digit(run: Run) -> None:
    again = run.priced_for()
    assert run.summary.time is not None
    assert again.summary == replace(
        unpriced(run), time=replace(run.summary.time, gains=[])
    )  # only a run's end has them
    for name in ("kernels", "layer_times", "kernel_names"):
        stored, made = run.table(name), again.table(name)
        pd.testing.assert_frame_equal(
            made.reset_index(drop=True), stored, check_exact=True, check_dtype=False, check_categorical=False
        )


def test_what_would_shorten_the_step_is_what_its_option_gives(run: Run) -> None:
    time = run.summary.time
    assert time is not None
    steps = [gain.step_us for gain in time.gains]
    assert steps == sorted(steps)
    assert any(gain.option.startswith("--gpu ") for gain in time.gains)
    for gain in time.gains:
        option, value = gain.option.split()
        other = run.priced_for(value) if option == "--gpu" else run.priced_for(what_if=value)
        assert other.summary.time is not None
        assert other.summary.time.step_us == pytest.approx(gain.step_us, rel=1e-9), gain


def test_another_gpu_changes_the_times_and_nothing_else(run: Run) -> None:
    other = run.priced_for("b200")
    assert run.summary.time is not None
    assert other.summary.time is not None
    assert other.summary.kernels is not None
    assert other.summary.kernels.gpu == "NVIDIA B200"
    assert other.summary.time.step_us < 0.6 * run.summary.time.step_us
    assert other.summary.time.flops == run.summary.time.flops
    assert replace(other.summary, kernels=None, time=None) == replace(unpriced(run), kernels=None, time=None)
    assert other.time is not None
    assert other.time.names()["time_us"].sum() == pytest.approx(other.summary.time.kernel_us)
    pd.testing.assert_frame_equal(other.table("blocks"), run.table("blocks"))


def test_the_run_keeps_the_whole_gpu_model_and_its_power_limit_can_be_changed(run: Run) -> None:
    assert run.manifest.gpu_model == H100
    slower = replace(H100, memory_bandwidth=H100.memory_bandwidth / 2, name="mine", product="mine")
    write_manifest(run.path, replace(load_manifest(run.path), gpu_model=slower))
    try:
        mine = open_run(run.path).priced_for(power_watts=500.0)
    finally:
        write_manifest(run.path, run.manifest)
    durations = [each.table("kernels").set_index("name")["duration_us"]["elementwise"] for each in (run, mine)]
    assert durations[1] > 1.9 * durations[0]


@pytest.mark.parametrize(
    ("gpu", "given", "job", "table"),
    [
        (H100, "given.toml", {"times": "own.toml"}, "given.toml"),
        (H100, None, {"times": "own.toml"}, "own.toml"),
        (H100, None, {}, None),
        (find_gpu("h200"), None, {"times": "own.toml"}, None),  # measured on another GPU than this
        (find_gpu("h200"), "given.toml", {"times": "own.toml"}, "given.toml"),
        (H100, None, None, None),
    ],
)
def test_the_jobs_calibration_table_counts_for_its_own_gpu(
    run: Run, gpu: GpuSpec, given: str | None, job: dict[str, Any] | None, table: str | None
) -> None:
    own = None if job is None or run.manifest.job is None else replace(run.manifest.job, **job)
    assert times_of(replace(run.manifest, job=own), gpu, given) == table


def test_the_gpu_is_the_runs_own_with_the_power_that_is_asked_for(run: Run) -> None:
    assert gpu_of(run.manifest, None, None) == H100
    assert gpu_of(run.manifest, None, 450.0) == replace(H100, watts=450.0)
    assert gpu_of(run.manifest, "h200", 450.0) == replace(find_gpu("h200"), watts=450.0)
    unknown = replace(run.manifest, gpu_model=None)
    assert gpu_of(unknown, "h200", None) == find_gpu("h200")
    with pytest.raises(RunDirectoryError, match="own GPU model is not known") as raised:
        gpu_of(unknown, None, 450.0)
    assert "--gpu" in raised.value.hint


@pytest.mark.parametrize(
    ("changed", "is_refused"),
    [
        ({}, False),
        ({"fabric": "p5-efa", "what_if": "nvl72"}, False),
        ({"gpu": "h200"}, True),
        ({"power_watts": 450.0}, True),
        ({"times": "own.toml"}, True),
        ({"host": "grace"}, True),
    ],
)
def test_kernels_that_a_gpu_ran_keep_their_times_and_collectives_may_change(
    run: Run, changed: dict[str, Any], is_refused: bool
) -> None:
    assert run.summary.kernels is not None
    traced = replace(run.summary, kernels=replace(run.summary.kernels, tool="cupti"))
    pricing = replace(Pricing(), **changed)
    check_measured(run.summary, pricing)
    assert [is_traced(summary) for summary in (run.summary, traced)] == [False, True]
    with pytest.raises(RunDirectoryError, match="measured on a GPU") if is_refused else nullcontext():
        check_measured(traced, pricing)


def test_an_unknown_gpu_lists_the_known_ones(run: Run) -> None:
    with pytest.raises(JobError, match="does not know the GPU 'b20'") as raised:
        run.priced_for("b20")
    assert "h200, b200, gb200" in raised.value.hint


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({}, "no step was timed"),
        ({"kernels": False}, "made with --no-kernels"),
        ({"device": "cuda"}, "no step was timed on its GPU"),
    ],
)
def test_a_run_without_launches_says_why_it_has_none(tmp_path: Path, job: dict[str, Any], why: str) -> None:
    with pytest.raises(RunDirectoryError, match=f"has no launches to price: .*{why}"):
        priced_run(tmp_path / "run", **job).priced_for("b200")


def test_a_run_of_an_older_version_says_so_and_one_that_lost_its_launches_is_damaged(tmp_path: Path) -> None:
    run = priced_run(tmp_path / "run", *STEP)
    (run.path / "tables" / "launches.parquet").unlink()
    with pytest.raises(RunDirectoryError, match="no table launches"):
        run.priced_for("b200")
    write_manifest(run.path, replace(load_manifest(run.path), gpu_model=None))
    with pytest.raises(RunDirectoryError, match="an older fakedist made it"):
        open_run(run.path).priced_for("b200")
    untimed = priced_run(tmp_path / "untimed")
    told = replace(untimed.summary, notes=[not_timed("there was no training step")])
    write_manifest(untimed.path, replace(load_manifest(untimed.path), summary=told))
    with pytest.raises(RunDirectoryError, match="no kernel times: there was no training step"):
        open_run(untimed.path).priced_for("b200")
