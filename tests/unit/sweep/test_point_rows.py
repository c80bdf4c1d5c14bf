from __future__ import annotations

from pathlib import Path

import pytest

from fakedist.launcher.executors.task import Task
from fakedist.options import Job
from fakedist.rundir.outcome import Outcome
from fakedist.sweep import point_rows
from fakedist.sweep.point_rows import RankKind, RankResult, judge
from tests.unit.sweep.fake_executor import make_failed, result

MESSAGE = "WorldError: recv_object_list waits for an object from rank 4, which does not run"


def judged(place: Path, message: str, line: str) -> RankResult:
    """How a rank that ended with this error before its first step is judged."""
    task = Task(key="k", job=Job(world_size=8, rank=6, target="train.py"), directory=place / "runs" / "k" / "rank6")
    task.directory.parent.mkdir(parents=True)
    make_failed(task.directory, 6, (Outcome.EXCEPTION, message, 0), line)
    return judge(result(task, Outcome.EXCEPTION, message), 6, task.directory, place, None)


def test_a_rank_that_needs_another_says_how_to_run_it(tmp_path: Path) -> None:
    found = judged(tmp_path, MESSAGE, f"{point_rows._PACKAGE}/world/objects.py:299 (_keep)")
    assert found.kind is RankKind.FAILED
    assert found.reason == f"{MESSAGE} (--rank stages:all or --with-peers runs more ranks)"
    assert found.line == ""  # fakedist's own line says nothing about the job


@pytest.mark.parametrize(
    ("line", "kind"),
    [("/job/train.py:7 (main)", RankKind.INVALID), (f"{point_rows._PACKAGE}/world/groups.py:1 (new)", RankKind.FAILED)],
    ids=["job", "fakedist"],
)
def test_only_the_job_refuses_a_layout(tmp_path: Path, line: str, kind: RankKind) -> None:
    assert judged(tmp_path, "ValueError: 3 does not divide 8", line).kind is kind
