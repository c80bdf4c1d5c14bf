from __future__ import annotations

from pathlib import Path

import pytest

from fakedist import launch, ranks
from fakedist.errors import JobError, RecordingError, RunDirectoryError
from fakedist.job import Job
from fakedist.launch import Ending, Streams
from fakedist.ranks import exit_code, parse_ranks, profile_ranks

JOB = Job(world_size=16, rank=0, target="train.py")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0", (0,)),
        ("8,0,4", (8, 0, 4)),
        ("0-3", (0, 1, 2, 3)),
        ("5-5", (5,)),
        ("0-15:4", (0, 4, 8, 12)),
        ("0,8-12:2", (0, 8, 10, 12)),
    ],
)
def test_ranks_are_numbers_and_ranges(text: str, found: tuple[int, ...]) -> None:
    assert parse_ranks(text, 16) == found


@pytest.mark.parametrize("text", ["", "a", "-1", "3-1", "0-8:0", "4:2", "0,,1", "0, 1", "1-2-3", "0-"])
def test_what_is_no_list_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="is not a list of ranks"):
        parse_ranks(text, 16)


def test_ranks_that_do_not_exist_or_stand_there_twice_are_refused() -> None:
    with pytest.raises(JobError, match="rank 16 does not exist in a world of 16"):
        parse_ranks("0-16", 16)
    with pytest.raises(JobError, match="has rank 2 twice"):
        parse_ranks("0-3,2", 16)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that were run; rank 2 cannot begin, rank 3 is interrupted."""
    jobs: list[Job] = []

    def profile(job: Job, output: Path, force: bool, streams: Streams) -> tuple[Path, Ending]:
        jobs.append(job)
        if job.rank == 2:
            raise RecordingError("no memory")
        return output, Ending("interrupted", 130) if job.rank == 3 else Ending("stopped", 0)

    monkeypatch.setattr(launch, "profile", profile)
    monkeypatch.setattr(ranks, "find_tapes", lambda job: [])
    return jobs


def test_each_rank_has_the_tapes_of_those_before(asked: list[Job], tmp_path: Path) -> None:
    runs = list(profile_ranks(JOB, (4, 2, 0, 1), tmp_path, False, Streams()))
    assert [run.ending.outcome for run in runs] == ["stopped", "error", "stopped", "stopped"]
    names = [[Path(tape).name for tape in job.tapes] for job in asked]
    assert names == [[], ["rank4"], ["rank4"], ["rank4", "rank0"]]
    assert exit_code(runs) == 1


def test_an_interrupt_ends_all(asked: list[Job], tmp_path: Path) -> None:
    runs = list(profile_ranks(JOB, (0, 3, 5), tmp_path, False, Streams()))
    assert [run.rank for run in runs] == [0, 3]
    assert exit_code(runs) == 130


def test_nothing_runs_where_a_run_is_in_the_way(asked: list[Job], tmp_path: Path) -> None:
    (tmp_path / "rank5").mkdir()
    with pytest.raises(RunDirectoryError, match="rank5 is there already"):
        list(profile_ranks(JOB, (0, 5), tmp_path, False, Streams()))
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="is the run of one rank"):
        list(profile_ranks(JOB, (0, 1), tmp_path, True, Streams()))
    assert asked == []
