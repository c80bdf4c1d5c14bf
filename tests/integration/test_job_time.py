"""The step of a whole job from one command: examples/three_d.py on 2 x 2 x 2, a rank of each pipeline stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakedist.cost_model.job.micro_batches import Recorded, with_micro_batches
from fakedist.cost_model.job.stages import from_first_transfer, num_stages_of
from fakedist.results.job_time import open_job_runs, time_job
from fakedist.results.opening import open_run
from fakedist.units import format_us
from tests.conftest import ROOT, RunFakedist
from tests.support.runs import made_once
from tests.unit.report.reading import read_page

pytestmark = pytest.mark.long

SIZES = ("--layers", "4", "--hidden", "512", "--heads", "8", "--vocab", "512", "--seq-len", "1024", "--batch", "16")


def profile_stages(run_fakedist: RunFakedist) -> tuple[Path, dict[str, Any]]:
    """The runs of ranks 0 and 2, one of each stage, and what was printed of them. All files share them."""
    script = ROOT / "examples" / "three_d.py"

    def make(folder: Path) -> None:
        job = ("--world-size", "8", "--rank", "stages", "--device", "virtual", "--gpu", "h100-80g", "-o", "runs")
        layout = ("--tp", "2", "--pp", "2", "--dp", "2")
        finished = run_fakedist("profile", *job, "--json", script, *layout, *SIZES, cwd=folder, page=True)
        assert finished.code == 0, finished.stderr
        assert "pipeline of 2 stages: group PP, as its name is PP" in finished.stderr
        assert "fakedist: the page of these ranks: runs/report.html" in finished.stderr
        (folder / "printed.json").write_text(finished.stdout)

    folder = made_once(f"stages {SIZES} {script.read_text()}", make)
    return folder / "runs", json.loads((folder / "printed.json").read_text())


@pytest.fixture(scope="module")
def profiled(run_fakedist: RunFakedist) -> tuple[Path, dict[str, Any]]:
    return profile_stages(run_fakedist)


def test_a_rank_of_each_stage_runs_and_the_job_is_priced(profiled: tuple[Path, dict[str, Any]]) -> None:
    made = profiled[1]
    job = made["job"]
    assert [each["rank"] for each in made["ranks"]] == [stage["rank"] for stage in job["stages"]] == [0, 2]
    assert [stage["num_exchanged"] for stage in job["stages"]] == [16, 16]
    assert [note["code"] for note in job["notes"]] == ["host_time"]
    for stage, run in zip(job["stages"], made["ranks"], strict=True):
        assert stage["peak_reserved_bytes"] == run["peak_reserved_bytes"]
        parts = [stage[f"{name}_us"] for name in ("compute", "communication", "bubble", "host", "wait")]
        assert sum(parts) == pytest.approx(job["step_us"])
        assert stage["bubble_us"] > 0


def test_the_page_of_the_job_has_its_step_and_leads_to_the_ranks(profiled: tuple[Path, dict[str, Any]]) -> None:
    folder, made = profiled
    page = read_page((folder / "report.html").read_text())
    assert page.figures["step"].startswith(format_us(made["job"]["step_us"]))
    assert [row[0] for row in page.tables["ranks-table"]] == ["rank", "0", "2"]
    assert {"rank0/report.html", "rank2/report.html"} <= set(page.fetched)
    found = open_job_runs(folder)
    assert found.job is not None
    assert found.job.summary.step_us == pytest.approx(made["job"]["step_us"])


def test_the_tokens_of_the_job_are_those_of_its_batch(profiled: tuple[Path, dict[str, Any]]) -> None:
    done = profiled[1]["job"]["throughput"]
    assert done["tokens_per_step"] == 16 * 1024
    assert done["num_micro_batches"] == 8


def test_the_flops_are_those_of_the_models_matrices(profiled: tuple[Path, dict[str, Any]]) -> None:
    """Six FLOPs a token for each parameter of a matrix, and the attention; the embeddings are looked up."""
    job = profiled[1]["job"]
    rates = {rate["convention"]: rate["tflops_per_gpu"] for rate in job["throughput"]["rates"]}
    tokens, seconds = 16 * 1024, job["step_us"] * 1e-6
    products = 6 * (4 * 12 * 512 * 512 + 512 * 512 * 2) * tokens  # each tensor parallel rank computes all logits
    attention = 12 * 4 * 512 * 1024 * tokens
    assert rates["torchtitan"] * 1e12 * 8 * seconds == pytest.approx(products + attention, rel=1e-6)
    assert rates["Megatron-LM"] * 1e12 * 8 * seconds == pytest.approx(products + attention / 2, rel=1e-6)


def test_a_stage_that_is_priced_again_alone_waits_for_nobody(profiled: tuple[Path, dict[str, Any]]) -> None:
    runs = profiled[0]
    both, alone = (time_job([runs / name for name in names], host="0.01") for names in (("rank0", "rank2"), ("rank2",)))
    assert alone.summary.step_us < both.summary.step_us
    assert alone.summary.notes[0].code == "exchanges_elsewhere"


@pytest.fixture(scope="module")
def pipelines(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Path]]:
    """Both ranks of torch.distributed.pipelining's interleaved 1F1B, two stages each, by number of micro-batches."""
    folder = tmp_path_factory.mktemp("pipelines")
    script = ROOT / "tests" / "integration" / "jobs" / "pipeline_model.py"
    job = ("--world-size", "4", "--rank", "stages", "--device", "virtual", "--gpu", "h100-80g")
    for number in (8, 12):
        arguments = ("Interleaved1F1B", str(number), "4", "64")
        finished = run_fakedist("profile", *job, "-o", str(number), script, *arguments, cwd=folder)
        assert finished.code == 0, finished.stderr
    return {number: [folder / str(number) / f"rank{rank}" for rank in (0, 1)] for number in (8, 12)}


@pytest.mark.nightly
@pytest.mark.parametrize("number", [8, 12])
def test_an_interleaved_pipeline_idles_as_the_formula_says(pipelines: dict[int, list[Path]], number: int) -> None:
    step = time_job(pipelines[number]).summary
    for stage in step.stages:
        assert stage.bubble_us / step.step_us == pytest.approx(1 / (2 * number + 1), abs=0.01)
        assert stage.num_unmatched == 0


@pytest.mark.nightly
def test_further_micro_batches_of_a_real_schedule_are_those_of_a_longer_run(pipelines: dict[int, list[Path]]) -> None:
    found, longer = time_job(pipelines[8], micro_batches=12).summary, time_job(pipelines[12]).summary
    # Joining the outputs of all micro-batches is the one thing that is as large as it was recorded.
    assert found.step_us == pytest.approx(longer.step_us, rel=1e-4)
    assert [each.num_exchanged for each in found.stages] == [each.num_exchanged for each in longer.stages]
    for few, many in zip(pipelines[8], pipelines[12], strict=True):
        assert order(few, 8, 12) == order(many, 12, 12)


def order(path: Path, recorded: int, wanted: int) -> list[tuple[object, ...]]:
    """A rank's launches that have work, in order, with further micro-batches."""
    run = open_run(path)
    work, calls, groups = (run.table(name) for name in ("work", "calls", "groups"))
    launches = from_first_transfer(run.table("launches"), calls)
    step = Recorded(0, launches, work, calls, num_stages_of(launches, calls, groups), recorded)
    rows = with_micro_batches(step, wanted)
    rows = rows[rows["work"] >= 0]
    operations = work["operation"].iloc[rows["work"]].astype(str)
    called = calls.set_index("sequence")[["operation", "peer"]].reindex(rows["call"]).astype(str)
    columns = [rows[name].astype(str).tolist() for name in ("what", "phase", "layer")]
    return list(zip(*columns, operations, called["operation"], called["peer"], strict=True))
