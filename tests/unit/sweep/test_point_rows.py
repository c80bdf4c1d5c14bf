from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import fakedist
from fakedist.launcher.executors.task import Task
from fakedist.options import Job
from fakedist.rundir.outcome import Outcome
from fakedist.sweep.command import PricedFor
from fakedist.sweep.point_rows import RankKind, RankResult, estimate_step, judge
from tests.unit.report.handmade import out_of_memory
from tests.unit.results.test_job_time import NUM_BATCHES, stage
from tests.unit.sweep.fake_executor import make_failed, result

PACKAGE = Path(fakedist.__file__).parent
MESSAGE = "WorldError: recv_object_list waits for an object from rank 4, which does not run"


def judged(place: Path, message: str, line: str) -> RankResult:
    """The judgement of a rank that ended with this error before its first step."""
    task = Task(key="k", job=Job(world_size=8, rank=6, target="train.py"), directory=place / "runs" / "k" / "rank6")
    task.directory.parent.mkdir(parents=True)
    make_failed(task.directory, 6, (Outcome.EXCEPTION, message, 0), line)
    return judge(result(task, Outcome.EXCEPTION, message), 6, task.directory, place, None)


def test_a_rank_without_enough_memory_says_where_and_how_much_was_asked_for(tmp_path: Path) -> None:
    run = out_of_memory(tmp_path / "rank6")
    task = Task(key="k", job=Job(world_size=8, rank=6, target="train.py"), directory=run)
    found = judge(result(task, Outcome.OUT_OF_MEMORY, "CUDA out of memory"), 6, run, tmp_path, None)
    assert found.kind is RankKind.OUT_OF_MEMORY
    assert found.reason == "out of memory in layers.2.mlp: 90.00 GiB were asked for"
    assert (found.layer, found.line) == ("layers.2.mlp", "/job/model.py:12 (forward)")


def test_a_rank_that_needs_another_says_how_to_run_it(tmp_path: Path) -> None:
    found = judged(tmp_path, MESSAGE, f"{PACKAGE}/world/objects.py:299 (_keep)")
    assert found.kind is RankKind.FAILED
    assert found.reason == f"{MESSAGE} (--rank stages:all or --with-peers runs more ranks)"
    assert found.line == ""  # fakedist's own line says nothing about the job


@pytest.mark.parametrize(
    ("line", "kind"),
    [("/job/train.py:7 (main)", RankKind.INVALID), (f"{PACKAGE}/world/groups.py:1 (new)", RankKind.FAILED)],
    ids=["job", "fakedist"],
)
def test_only_the_job_refuses_a_layout(tmp_path: Path, line: str, kind: RankKind) -> None:
    assert judged(tmp_path, "ValueError: 3 does not divide 8", line).kind is kind


RESULT = RankResult(rank=0, kind=RankKind.RAN, outcome=Outcome.STOPPED, pipeline=(0, 4))


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("stages")
    return [stage(folder / f"rank{rank}", rank) for rank in (0, 4)]


def test_the_formula_for_stages_that_did_not_run_agrees_with_placing_them(stages: list[Path]) -> None:
    """Two equal stages: placed together, and the first alone with the bubble of the formula."""
    placed, _ = estimate_step(stages, [RESULT, replace(RESULT, rank=4)], PricedFor(), None, None)
    formula, _ = estimate_step(stages[:1], [RESULT], PricedFor(), None, None)
    assert placed is not None
    assert formula is not None
    assert (placed.bubble_from, formula.bubble_from) == ("placed", "formula")
    assert formula.step_us == pytest.approx(placed.step_us, rel=0.05)
    assert formula.bubble_us == pytest.approx(formula.step_us / (NUM_BATCHES + 1), rel=0.1)
    assert formula.tokens_per_s_per_gpu == pytest.approx(placed.tokens_per_s_per_gpu, rel=0.05)
    assert formula.low_us is not None
    assert formula.high_us is not None
    assert formula.low_us < formula.step_us < formula.high_us


def test_the_formulas_bubble_is_shorter_by_the_number_of_chunks(stages: list[Path], tmp_path: Path) -> None:
    interleaved = stage(tmp_path / "rank0", 0, chunks=3)
    one, three = (estimate_step([run], [RESULT], PricedFor(), None, None)[0] for run in (stages[0], interleaved))
    assert one is not None
    assert three is not None
    assert three.bubble_us == pytest.approx(one.bubble_us / 3, rel=0.02)


def test_a_bubble_that_the_runs_do_not_show_is_not_known(stages: list[Path]) -> None:
    found, _ = estimate_step(stages[1:], [replace(RESULT, rank=4, pipeline=(0, 4))], PricedFor(), None, None)
    assert found is not None
    assert found.bubble_from == "not known"


def test_a_run_without_launches_has_no_step(tmp_path: Path) -> None:
    run = stage(tmp_path / "run", 0, kernels=False)
    found, why = estimate_step([run], [replace(RESULT, pipeline=())], PricedFor(), None, None)
    assert found is None
    assert why.startswith("the run has no launches to price: it was made with --no-kernels")
