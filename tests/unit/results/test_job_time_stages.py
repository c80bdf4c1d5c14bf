"""The stages to run follow from the groups of one rank's run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.errors import ExitCode, JobError
from fakedist.results.job_time import stages_of_job
from tests.unit.report.handmade import ended_well
from tests.unit.results.test_job_time import stage


def test_the_stages_are_the_ranks_of_the_pipelines_group(tmp_path: Path) -> None:
    found = stages_of_job(stage(tmp_path / "run", 4))
    assert (found.ranks, found.group, found.why) == ((0, 4), "PP", "its name is PP")


def test_a_rank_without_a_pipeline_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the groups of rank 1 show no pipeline") as raised:
        stages_of_job(ended_well(tmp_path / "run"))
    assert raised.value.hint == "name the ranks to run: --rank 0,64"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--with-peers"], "--with-peers is for one rank, and --rank stages runs several"),
        (["--format", "markdown"], "--format markdown is for one rank, and one of each stage was asked for"),
    ],
)
def test_options_of_one_rank_are_refused_for_stages(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["profile", "--world-size", "8", "--rank", "stages", "--device", "virtual", *options, "train.py"])
    assert code == ExitCode.USAGE
    assert says in capsys.readouterr().err
