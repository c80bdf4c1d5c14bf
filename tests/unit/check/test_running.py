"""Whether a rank ran: what is said of one that was killed, failed, or never used the GPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakedist.check.running import RankToRun, see_that_it_ran
from fakedist.errors import ScriptError
from fakedist.launcher.executors.task import TaskResult
from fakedist.options import Job
from fakedist.rundir.directory import load_manifest, write_manifest
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.summary import LeftDuringInit
from tests.unit.report.handmade import ended_well


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ended_well(tmp_path_factory.mktemp("rank") / "run")


LEFT = LeftDuringInit("/job/train.py:12 (main)")


def ended(directory: Path, outcome: Outcome, code: int, failure: str) -> TaskResult:
    known: dict[str, Any] = {"host": "", "worker": "", "wall_s": 1.0, "peak_rss_bytes": 0, "output": "printed"}
    return TaskResult(key="k", outcome=outcome, code=code, failure=failure, directory=directory, **known)


def rank_in(directory: Path, *, may_leave: bool = False) -> RankToRun:
    return RankToRun("net rank 3", Job(world_size=8, rank=3, target="train.py"), directory, may_leave)


@pytest.mark.parametrize(
    ("outcome", "summary", "may_leave", "message"),
    [
        (Outcome.STOPPED, {}, False, ""),
        (Outcome.FINISHED, {}, False, ""),
        (Outcome.STOPPED, {"peak_allocated_bytes": 0}, False, "the script allocated nothing on the GPU"),
        (Outcome.STOPPED, {"peak_allocated_bytes": 0}, True, "the script allocated nothing on the GPU"),
        (Outcome.FINISHED, {"peak_allocated_bytes": 0, "left_during_init": LEFT}, True, ""),
        (Outcome.FINISHED, {"peak_allocated_bytes": 0, "left_during_init": LEFT}, False, "allocated nothing"),
        (Outcome.OUT_OF_MEMORY, {"peak_allocated_bytes": 0}, False, ""),
        (Outcome.STOPPED, None, False, "the run was killed before it ended (exit 7)"),
        (Outcome.ERROR, {}, False, "the run could not start (exit 7)"),
        (Outcome.EXCEPTION, {}, False, "the script failed: KeyError"),
        (Outcome.FAULT, {}, False, "fakedist failed, not the script: this is a bug in fakedist: KeyError"),
        (Outcome.EXIT, {}, False, "the script failed with exit code 7: KeyError"),
        (Outcome.INTERRUPTED, {}, False, "the script was interrupted: KeyError"),
        (Outcome.HOST_MEMORY, {}, False, "the script ended as host_memory: KeyError"),
    ],
)
def test_a_rank_ran_if_its_script_ended_and_used_the_gpu(
    directory: Path, outcome: Outcome, summary: dict[str, Any] | None, may_leave: bool, message: str
) -> None:
    before = load_manifest(directory)
    assert before.summary is not None
    changed = None if summary is None else replace(before.summary, **summary)
    failure = "" if outcome in (Outcome.STOPPED, Outcome.FINISHED) else "KeyError"
    result = ended(directory, outcome, 7, failure)
    write_manifest(directory, replace(before, summary=changed))
    try:
        with pytest.raises(ScriptError) if message else nullcontext() as raised:
            see_that_it_ran(rank_in(directory, may_leave=may_leave), result)
    finally:
        write_manifest(directory, before)
    if raised is not None:
        assert raised.value.message.startswith("net rank 3: ")
        assert message in raised.value.message
        assert raised.value.output == "printed"
        assert "--rank=3" in raised.value.hint


def test_the_runs_own_words_of_its_end_come_before_the_executors(directory: Path) -> None:
    before = load_manifest(directory)
    for own, message in ((Outcome.EXIT, "exit code 5: said no"), (Outcome.FINISHED, "exit code 1: exit")):
        write_manifest(directory, replace(before, exit=Ending(own, 5, "said no")))
        with pytest.raises(ScriptError, match=message):
            see_that_it_ran(rank_in(directory), ended(directory, Outcome.EXIT, 1, "exit"))
    write_manifest(directory, before)
