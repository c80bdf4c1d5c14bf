"""Several ranks of a job: the table of those that ran, and the job's step with its what-ifs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from fakedist.options import Job
from fakedist.report.content.job import RankRow, _job_object, job_report, runs_report
from fakedist.report.content.report_blocks import Facts, Items, Remark, Sheet
from fakedist.results.job_time import JobRuns, JobTime, open_job_runs
from fakedist.rundir.job_time import FlopsRate, JobStep, StageTime, Throughput
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.units import GIB
from tests.unit.report.two_runs import run_of

STAGE = StageTime(
    rank=0,
    stage=0,
    run_directory="/runs/rank0",
    peak_allocated_bytes=60 * GIB,
    peak_reserved_bytes=62 * GIB,
    capacity_bytes=80 * GIB,
    fits=True,
    compute_us=80_000.0,
    communication_us=9_000.0,
    bubble_us=10_000.0,
    host_us=1_000.0,
    wait_us=0.0,
    own_us=99_000.0,
    num_exchanged=8,
    num_unmatched=0,
)
LAST = replace(STAGE, rank=4, stage=1, peak_reserved_bytes=81 * GIB, fits=False, compute_us=85_000.0, bubble_us=5_000.0)
WORK = Throughput(16_000, "given", 20_000.0, None, "", None, 8, [FlopsRate("torchtitan", 412.34, 0.4168)])
STEP = JobStep(
    world_size=8,
    gpu="NVIDIA H100",
    fabric="dgx-h100-ndr",
    step_us=100_000.0,
    step_low_us=90_000.0,
    step_high_us=120_000.0,
    stages=[STAGE, LAST],
    slowest_rank=4,
    memory_rank=4,
    throughput=WORK,
)


def job_of(step: JobStep = STEP) -> JobTime:
    """A job's time of which only the facts of the first run are read."""
    job = Job(world_size=8, rank=0, target="train.py", arguments=("--pp", "2"))
    run = SimpleNamespace(manifest=SimpleNamespace(job=job))
    lanes = pd.DataFrame(
        [(0, "forward", 0.0, 80_000.0), (4, "bubble", 0.0, 5_000.0)], columns=["rank", "lane", "start_us", "end_us"]
    )
    return JobTime(step, [cast(Any, run)], lanes)


def faster() -> JobTime:
    """The job with a change that saves communication on the rank that sets the pace."""
    return job_of(replace(STEP, step_us=96_000.0, stages=[STAGE, replace(LAST, communication_us=5_000.0)]))


def placed(directory: Path, step: JobStep = STEP) -> JobRuns:
    """The runs of a directory with the step of a whole job."""
    runs = open_job_runs(directory).runs
    return JobRuns(directory, runs, JobTime(step, runs, job_of().lanes))


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """A directory with the runs of ranks 0 and 4."""
    run_of(tmp_path / "runs" / "rank0", rank=0)
    run_of(tmp_path / "runs" / "rank4", rank=4)
    return tmp_path / "runs"


def figures(ranks: Path, step: JobStep) -> dict[str, tuple[str, str]]:
    """The job's figures and what is said of each."""
    blocks = runs_report(placed(ranks, step)).blocks
    (found,) = [block for block in blocks if isinstance(block, Facts) and block.label == "Step"]
    return {row.name: (row.text, row.more) for row in found.rows}


def test_a_figure_that_is_not_known_is_not_shown(ranks: Path) -> None:
    unknown = replace(STEP, step_low_us=None, throughput=replace(WORK, tokens_per_s_per_gpu=None, rates=[]))
    assert figures(ranks, unknown) == {"step": ("100.0 ms", "its interval is not known")}
    pictures = replace(unknown.throughput, samples_per_step=64, samples_per_s_per_gpu=80.0)
    shown = figures(ranks, replace(unknown, throughput=pictures))
    assert shown["samples/s per GPU"] == ("80", "640 of all GPUs, 64 samples a step")


def test_one_rank_alone_sets_no_pace(ranks: Path) -> None:
    alone = replace(STEP, stages=[LAST], throughput=replace(WORK, tokens_from="the arithmetic"))
    blocks = runs_report(placed(ranks, alone)).blocks
    assert [block.text for block in blocks if isinstance(block, Remark)] == ["tokens: the arithmetic"]


def test_json_of_the_step_has_the_what_ifs_if_any() -> None:
    whole = cast(dict[str, Any], _job_object(job_of(), {"bandwidth=2x": faster()}))
    (change,) = whole["what_ifs"]
    assert (change["change_us"], whole["step_us"]) == (-4_000.0, 100_000.0)
    assert "what_ifs" not in _job_object(job_of(), {})


def test_a_rank_that_could_not_start_is_a_row_too() -> None:
    failed = RankRow(3, None, Ending(Outcome.ERROR, 1, "no such GPU"), 0.25)
    report = job_report([failed], 8, None)
    sheet, notes = report.blocks
    assert isinstance(sheet, Sheet)
    assert sheet.remarks == ["rank 3: no such GPU"]  # and no run to report
    assert isinstance(notes, Items)
    assert notes.texts == ["Rank 3 did not start: no such GPU"]
    shown = {"rank": 3, "exit": {"outcome": "error", "code": 1, "message": "no such GPU"}, "wall_s": 0.25}
    assert report.data() == {"world_size": 8, "exit_code": 1, "ranks": [shown], "job": None, "findings": []}
