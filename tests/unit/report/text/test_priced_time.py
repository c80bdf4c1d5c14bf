"""A run that was priced for a GPU, in each format."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fakedist.errors import RunDirectoryError
from fakedist.report.text.time_sheets import priced_markdown, priced_object, render_priced
from fakedist.results.building import build_tables
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.rundir.plain import to_plain
from tests.unit.report.handmade import recorded
from tests.unit.results.test_repricing import STEP, new_run_directory, priced_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return priced_run(tmp_path_factory.mktemp("priced") / "run", *STEP)


def text_of(run: Run) -> str:
    text = io.StringIO()
    render_priced(run, Console(file=text, width=160), all_layers=False)
    return text.getvalue()


def test_the_text_names_both_gpus_and_what_stays_and_then_has_the_reports_tables(run: Run) -> None:
    text = text_of(run.priced_for("b200"))
    assert "priced for NVIDIA B200, run for NVIDIA H100 80GB HBM3; its memory" in text
    for title in ("Time of step 2, estimated", "Time by layer", "Time by family", "Kernels that take the most time"):
        assert title in text


def test_the_runs_own_gpu_is_named_once(run: Run) -> None:
    assert "priced for NVIDIA H100 80GB HBM3\n" in text_of(run.priced_for())


def test_markdown_has_the_same_facts(run: Run) -> None:
    text = priced_markdown(run.priced_for("b200"), all_layers=False)
    assert "- GPU: priced for NVIDIA B200, run for" in text
    assert "<summary>Time by layer, estimated, with children</summary>" in text


def test_the_object_has_the_summarys_keys(run: Run) -> None:
    priced = run.priced_for("b200")
    assert priced_object(priced) == {
        "run_directory": str(run.path),
        "kernels": to_plain(priced.summary.kernels),
        "time": to_plain(priced.summary.time),
    }


def test_a_run_without_times_is_an_error(tmp_path: Path) -> None:
    made = recorded()
    made.ended()
    run = made.write(new_run_directory(tmp_path / "run"))
    build_tables(run)
    with pytest.raises(RunDirectoryError, match="has no times"):
        priced_object(open_run(run))
