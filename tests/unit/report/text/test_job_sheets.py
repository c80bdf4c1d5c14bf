"""Several ranks of a job as text: the table of those that ran, and the job's step with its what-ifs."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
from rich.console import Console

from fakedist.options import Job
from fakedist.report.text import job_sheets
from fakedist.report.text.job_sheets import RankRow
from fakedist.results.job_time import JobTime
from fakedist.rundir.job_time import FlopsRate, JobStep, StageTime, Throughput
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.units import GIB

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


def printed(draw: Any, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    draw(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_jobs_step_has_its_figures_its_ranks_and_who_sets_the_pace() -> None:
    text = printed(lambda console: job_sheets.render_job(job_of(), console))
    for part in (
        "train.py --pp 2",
        "0, 4 of 8",
        "NVIDIA H100, fabric dgx-h100-ndr",
        "90 % interval 90.0 ms to 120.0 ms",
        "160,000 of all GPUs, 16,000 tokens a step",
        "MFU 41.7%, as torchtitan counts: attention by all keys",
        "rank 4 sets the pace: it waits least for the others, and works 95.0 ms",
        "rank 4 binds memory: 81.00 GiB reserved of 80.00 GiB, which does not fit",
    ):
        assert part in text, part
    assert "other" not in text.split("done after")[0].split("rank")[-1]  # no rank spends time on it
    assert "tokens: given" not in text


def test_a_figure_that_is_not_known_is_not_shown() -> None:
    unknown = replace(STEP, step_low_us=None, throughput=replace(WORK, tokens_per_s_per_gpu=None, rates=[]))
    (figure,) = job_sheets.job_figures(unknown)
    assert figure == ("step", "100.0 ms", "its interval is not known")
    pictures = replace(unknown.throughput, samples_per_step=64, samples_per_s_per_gpu=80.0)
    assert job_sheets.job_figures(replace(unknown, throughput=pictures))[1] == (
        "samples/s per GPU",
        "80",
        "640 of all GPUs, 64 samples a step",
    )
    alone = replace(STEP, stages=[LAST], throughput=replace(WORK, tokens_from="the arithmetic"))
    assert job_sheets.job_remarks(alone) == ["tokens: the arithmetic"]


def test_what_ifs_name_the_change_of_each_part_of_the_rank_that_sets_the_pace() -> None:
    assert job_sheets.job_what_if_sheets(job_of(), {}) == []
    (sheet,) = job_sheets.job_what_if_sheets(job_of(), {"bandwidth=2x": faster()})
    assert {column.name: column.cells[0] for column in sheet.columns} == {
        "what if": "bandwidth=2x",
        "step": "96.0 ms",
        "change": "-4.00 ms",
        "%": "-4.0%",
        "rank that sets the pace": "4",
    }
    assert sheet.remarks[1] == "bandwidth=2x, rank 4: exposed communication -4.00 ms"
    whole = job_sheets.job_object(job_of(), {"bandwidth=2x": faster()})
    (change,) = cast(list[dict[str, object]], whole["what_ifs"])
    assert (change["change_us"], whole["step_us"]) == (-4_000.0, 100_000.0)
    assert "what_ifs" not in job_sheets.job_object(job_of())
    markdown = job_sheets.job_markdown(job_of(), {"bandwidth=2x": faster()})
    assert markdown.startswith("### fakedist: train.py --pp 2\n")
    assert "- step: 100.0 ms (90 % interval 90.0 ms to 120.0 ms)" in markdown
    assert "| bandwidth=2x |" in markdown


def test_a_rank_that_could_not_start_is_a_row_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = RankRow(3, None, Ending(Outcome.ERROR, 1, "no such GPU"), 0.25)
    text = printed(lambda console: job_sheets.render_ranks([failed], 8, console))
    assert "Ranks of 8, memory measured" in text
    assert "rank 3: no such GPU" in text
    assert "fakedist report RUN" not in text  # nothing to report
    shown = {"rank": 3, "exit": {"outcome": "error", "code": 1, "message": "no such GPU"}, "wall_s": 0.25}
    assert job_sheets.ranks_object([failed], 8, 1) == {"world_size": 8, "exit_code": 1, "ranks": [shown]}
