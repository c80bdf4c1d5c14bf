"""docs/truth.md is made of the catalogue and the results, never by hand; a result has the figure that was published."""

import dataclasses
import os
import re

import pytest

from fakedist.rundir.summary import PhasePeak
from tests.truth import __main__ as runner
from tests.truth import page
from tests.truth.catalogue import (
    BYTES_NEED_CAUSE,
    WORKSPACE_BYTES,
    Made,
    Peak,
    Row,
    Step,
    catalogue,
    our_bytes,
    results,
)

MADE = Made("0123abcd", "2026-01-01", "2.15.0+cu132", 70.0)


def _row(**fields: object) -> Row:
    return dataclasses.replace(catalogue().row("gpt-tiny"), **fields)  # type: ignore[arg-type]


def test_the_page_and_its_picture_are_made_of_the_results() -> None:
    found = results()
    assert page.PAGE.read_text() == page.text(found), "make truth ARGS=--page"
    assert page.mark(page.picture(found)) in page.PICTURE.read_text(), "make truth ARGS=--page"


def test_every_row_has_a_place_on_the_page() -> None:
    found, text = results(), page.PAGE.read_text()
    assert len({*found.peaks, *found.steps}) >= 40
    assert [row.name for row in catalogue().rows if f"| `{row.name}` |" not in text] == []


def test_rows_are_told_apart_and_say_who_published_what() -> None:
    rows = catalogue().rows
    assert len({row.name for row in rows}) == len(rows)
    assert [row.name for row in rows if not (row.has_peak or row.published_s)] == []
    assert [row.name for row in rows if row.published_s and not row.fabric] == []
    assert {row.like for row in rows if row.like} <= {row.name for row in rows}
    assert {name for pair in catalogue().pairs for name in pair.rows} <= {row.name for row in rows}
    for row in rows:
        assert catalogue().script(row).job(0, row.gpu_model, is_timed=bool(row.published_s)).world_size == row.gpus


def test_flags_are_composed_of_named_lines() -> None:
    flags = catalogue().script(catalogue().row("gpt-tiny-pp4")).flags
    assert not [flag for flag in flags if flag.startswith("@")]
    assert flags[-2:] == ("--pipeline-model-parallel-size", "4")
    assert "--deterministic-mode" in flags


def test_a_kernel_runs_on_the_release_that_its_row_names() -> None:
    row = catalogue().row("liger-jsd-torch")
    job = catalogue().script(row).job(0, row.gpu_model, is_timed=False)
    assert job.arguments == ("jsd", "torch", "32768")
    assert dict(job.environment)["PYTHONPATH"].endswith("liger-kernel-0.4.2")


def test_a_model_with_mamba_layers_needs_their_kernels_and_has_the_flops_of_each_layer() -> None:
    row = _row(flags="@nemotron-h-56b --global-batch-size 96", gpus=32, environment=[])
    script, dense = catalogue().script(row), catalogue().script(catalogue().row("nemotron-15b"))
    assert set(script.needs) - set(dense.needs) == {"mamba-ssm", "causal-conv1d"}
    path = dict(script.job(0, row.gpu_model, is_timed=True).environment)["PYTHONPATH"].split(os.pathsep)
    assert any(place.endswith("mamba_kernels") for place in path)
    tokens, hidden, inner = 24 * 8192, 8192, 16_384
    mamba = hidden * (2 * inner + 2 * 8 * 256 + 256) + inner * hidden
    weights = 54 * (mamba + 2 * hidden * 32_768) + 10 * hidden * 128 * (2 * 64 + 2 * 8) + hidden * 131_072
    assert script.flops().products == 6 * tokens * weights / 8
    assert script.flops().attention == 7 * 2 * tokens * hidden * 10 * 8193 / 2 / 8


def test_the_scores_of_unfused_attention_are_products_and_sizes_have_megatrons_defaults() -> None:
    script = catalogue().script(catalogue().row("hybrid-tiny-tp2"))
    tokens, hidden, inner = 8 * 1024, 1024, 2048  # of a replica: 4 of them for 32 sequences
    mamba = hidden * (2 * inner + 2 * 8 * 128 + 32) + inner * hidden
    weights = 20 * (mamba + 8 * hidden * hidden) + 4 * hidden * 64 * (2 * 16 + 2 * 8) + hidden * 50_432
    scores = 4 * 2 * tokens * 1024 * hidden
    assert script.flops() == ((6 * tokens * weights + 6 * scores) / 2, 0.0)


def test_a_kind_whose_steps_were_not_recorded_has_no_verdict_on_them() -> None:
    kept = results()
    without = {name: step for name, step in kept.steps.items() if catalogue().row(name).kind != "hybrid"}
    lines = page.verdicts(dataclasses.replace(kept, steps=without))
    assert [line for line in lines if "hybrid" in line and "steps" in line] == []
    assert [line for line in lines if "hybrid, peak bytes: 3 of 3" in line]


def test_rows_are_chosen_by_patterns_and_an_unknown_one_is_refused() -> None:
    names = [row.name for row in catalogue().chosen("gpt-7b-* eager-8")]
    assert names == ["eager-8", "gpt-7b-tp4", "gpt-7b-tp4-a100", "gpt-7b-pp4"]
    with pytest.raises(LookupError, match=r"no row is called eager-9"):
        catalogue().chosen("eager-9")


def test_the_first_iteration_is_told_apart_from_those_with_the_optimizers_state() -> None:
    phases = [PhasePeak(step, "forward", peak, peak, 0) for step, peak in ((0, 5), (1, 9), (1, 8), (2, 12), (3, 11))]
    assert runner.peak_of(phases, 20, MADE, True) == Peak((9, 12), 20, MADE, True)


def test_workspaces_count_where_the_published_torch_kept_them() -> None:
    peak = Peak((9, 12), 20, MADE)
    assert our_bytes(_row(peak_bytes=[1, 2], num_workspaces=[1, 2]), peak) == 12 + 2 * WORKSPACE_BYTES
    assert our_bytes(_row(peak_bytes=[], reserved_gib=1.0), peak) == 20
    assert our_bytes(_row(peak_bytes=[], label="fits", peak_gb=1.0), peak) == 9, "by the end of the first iteration"


def test_a_label_that_is_told_wrong_stands_out() -> None:
    row = _row(peak_bytes=[], label="out of memory", peak_gb=1e-8)
    assert page._label_line(row, Peak((9, 12), 20, MADE, False))[4:6] == ("out of memory", "out of memory")
    assert page._label_line(row, Peak((9, 12), 20, MADE, True))[5] == "**fits**"


def test_only_ranks_without_a_result_are_run() -> None:
    found, row = results(), catalogue().row("eager-8")
    assert runner.needed([row], found.peaks, again=False, record=False) == []
    assert [run.name for run in runner.needed([row], found.peaks, again=True, record=True)] == [
        "eager-8-peak-0",
        "eager-8-step-0",
    ]
    del found.peaks["eager-8"]
    assert [run.is_timed for run in runner.needed([row], found.peaks, again=False, record=False)] == [False]


def test_a_missed_goal_comes_first_and_a_difference_without_a_cause_is_called_not_known() -> None:
    found = results()
    lines = page.verdicts(found)[2:]
    assert [line.startswith("- **missed:**") for line in lines] == sorted(
        (line.startswith("- **missed:**") for line in lines), reverse=True
    )
    for name, peak in found.peaks.items():
        row = catalogue().row(name)
        if row.peak_bytes:
            found.peaks[name] = dataclasses.replace(peak, allocated_bytes=(1, row.peak_bytes[-1] - 2 * WORKSPACE_BYTES))
    met = next(line for line in page.verdicts(found) if "dense, peak bytes" in line)
    assert re.search(r"(\d+) of", met)
    far = dataclasses.replace(catalogue().row("gpt-tiny-unfused"), peak_bytes=[1, 10**12], why_bytes="")
    assert abs(page.bytes_error(far, Peak((1, 1), 0, MADE))) > BYTES_NEED_CAUSE
    assert "**not known**" in page.table(("cause",), [page._peak_line(far, Peak((1, 1), 0, MADE))])


def test_a_step_is_inside_of_its_interval_up_to_both_ends() -> None:
    row, step = catalogue().row("gpt-tiny"), Step(1.0, 0.9, 1.2, None, None, MADE)
    for published_s, inside in ((0.9, "yes"), (1.2, "yes"), (0.89, "no"), (1.21, "no")):
        assert page._host_line(dataclasses.replace(row, step_s=published_s), step)[8] == inside


def test_a_pair_is_the_ratio_of_its_rows() -> None:
    found = results()
    pair = next(pair for pair in catalogue().pairs if pair.name == "async-8b")
    published, ours = page._pair_ratios(pair, found) or (0.0, 0.0)
    assert published == pytest.approx(4378 / 4809.4)
    assert ours == found.steps["compiled-64-async-tp8"].step_s / found.steps["compiled-64-tp8"].step_s


def test_a_change_of_a_pair_within_a_few_percent_is_met_but_of_one_gpu_model() -> None:
    found = results()
    errors = {pair.name: error for pair in catalogue().pairs if (error := page._pair_error(pair, found)) is not None}
    assert len(errors) >= 30
    off = {name: error for name, error in errors.items() if abs(error) > page.PAIR_WITHIN}
    assert len(off) == 1
    assert all("GB300 instead of GB200" in pair.change for pair in catalogue().pairs if pair.name in off)
    assert max(off.values()) < 0.12
