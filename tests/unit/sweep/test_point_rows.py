from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import fakedist
from fakedist.launcher.executors.task import Task
from fakedist.options import Job
from fakedist.rundir.outcome import Outcome
from fakedist.sweep.command import PricedFor
from fakedist.sweep.point_rows import RankKind, RankResult, Row, Status, estimate_step, judge
from fakedist.sweep.ranking import Speed, answer, rank_rows
from fakedist.units import GIB
from tests.unit.report.handmade import out_of_memory
from tests.unit.results.test_job_time import NUM_BATCHES, stage
from tests.unit.sweep.fake_executor import make_failed, result
from tests.unit.sweep.rows_by_hand import row

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


def order(rows: list[Row], headroom: float = 0.0) -> list[tuple[object, int]]:
    return [(dict(each.row.values)["tp"], each.place) for each in rank_rows(rows, headroom).ranked]


def test_the_fastest_that_fits_comes_first() -> None:
    rows = [row(500, tp=1), row(900, tp=2), row(700, tp=4), row(2000, tp=8, status=Status.DOES_NOT_FIT)]
    assert order(rows) == [(2, 1), (4, 2), (1, 3)]


def test_points_within_each_others_intervals_share_a_place() -> None:
    rows = [row(1000, spread=0.05, tp=1), row(980, spread=0.05, tp=2), row(930, spread=0.05, tp=4)]
    assert order(rows) == [(1, 1), (2, 1), (4, 3)]
    ranking = rank_rows(rows, 0.0)
    assert [each.row for each in ranking.as_fast] == [rows[1]]


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (Speed(10, 9, 11), Speed(9.5, 9.4, 9.6), False),
        (Speed(10, 9.9, 10.1), Speed(9.5, 9, 11), False),
        (Speed(10, 9, 11), Speed(8.5, 8, 9.5), True),
        (Speed(10, 10, 10), Speed(9.99, 9.99, 9.99), True),
    ],
)
def test_two_speeds_are_told_apart_if_neither_lies_within_the_others_interval(
    one: Speed, other: Speed, apart: bool
) -> None:
    assert one.differs_from(other) is apart
    assert other.differs_from(one) is apart


def test_a_point_without_enough_room_is_counted_and_not_ranked() -> None:
    rows = [row(900, 77, tp=1), row(500, 76, tp=2)]
    ranking = rank_rows(rows, 0.05)
    assert [each.row for each in ranking.ranked] == [rows[1]]
    assert ranking.num_too_full == 1
    assert rank_rows(rows, 0.0).num_too_full == 0
    ranking = rank_rows([row(900, tp=1, status=Status.MAY_NOT_FIT), row(None, tp=2)], 0.0)
    assert (ranking.best, ranking.num_without_step) == (None, 1)
    assert ranking.counts == {Status.MAY_NOT_FIT: 1, Status.FITS: 1}


def test_the_front_has_what_no_other_point_beats() -> None:
    rows = [row(500, 20, tp=1), row(900, 40, tp=2), row(800, 50, tp=4), row(500, 21, tp=8), row(1000, 60, tp=16)]
    ranking = rank_rows(rows, 0.0)
    assert ranking.front == {rows[0].id, rows[1].id, rows[4].id}


def test_an_axis_matters_as_much_as_points_that_differ_in_it_alone() -> None:
    rows = [
        row(speed * (2 if mbs == 2 else 1), 20 + 10 * mbs, tp=tp, mbs=mbs)
        for tp, speed in ((1, 100), (2, 100.01))
        for mbs in (1, 2)
    ]
    first, second = rank_rows(rows, 0.0).effects
    assert (first.axis, first.best, first.num_groups, first.memory_bytes) == ("mbs", "2", 2, 10 * GIB)
    assert first.speed_ratio == pytest.approx(2.0)
    assert (second.axis, second.best, second.memory_bytes) == ("tp", "", 0)


def test_an_axis_whose_points_always_differ_elsewhere_too_is_not_compared() -> None:
    effects = rank_rows([row(100, tp=1, mbs=1), row(200, tp=2, mbs=2)], 0.0).effects
    assert [(each.num_groups, each.speed_ratio) for each in effects] == [(0, None)] * 2


def known(one: Row, **figures: float | str | None) -> Row:
    """A point whose step shows these figures, and no other that could rank it."""
    assert one.step is not None
    none = dict.fromkeys(("tokens_per_s_per_gpu", "samples_per_s_per_gpu", "tflops_per_gpu"))
    return replace(one, step=replace(one.step, **(none | figures)))  # type: ignore[arg-type]


def test_without_tokens_samples_are_compared_not_steps() -> None:
    small = known(row(900, tp=1), samples_per_s_per_gpu=10.0, tflops_per_gpu=50.0)
    large = known(row(500, tp=2), samples_per_s_per_gpu=30.0, tflops_per_gpu=40.0)
    ranking = rank_rows([small, large], 0.0)
    assert ranking.unit == "samples/s per GPU"
    assert [each.row for each in ranking.ranked] == [large, small]


def test_samples_of_several_shapes_do_not_compare_so_the_models_flops_do() -> None:
    short = known(row(900, tp=1), samples_per_s_per_gpu=90.0, sample_shape="128", tflops_per_gpu=40.0)
    long = known(row(500, tp=2), samples_per_s_per_gpu=10.0, sample_shape="8192", tflops_per_gpu=50.0)
    ranking = rank_rows([short, long], 0.0)
    assert ranking.unit == "model TFLOP/s per GPU"
    assert [each.row for each in ranking.ranked] == [long, short]


def test_the_unit_that_more_points_know_ranks_them_and_the_others_are_counted() -> None:
    rows = [known(row(900, tp=1), tflops_per_gpu=50.0), known(row(800, tp=2), tflops_per_gpu=60.0)]
    ranking = rank_rows([*rows, known(row(700, tp=4), tokens_per_s_per_gpu=700.0)], 0.0)
    assert ranking.unit == "model TFLOP/s per GPU"
    assert (len(ranking.ranked), ranking.num_without_speed, ranking.num_without_step) == (2, 1, 0)
    assert "not ranked, because model TFLOP/s per GPU are not known: 1 point" in list(answer(ranking))


def test_steps_of_unknown_work_are_not_ranked() -> None:
    ranking = rank_rows([known(row(500, tp=1)), known(row(900, tp=2))], 0.0)
    assert (ranking.unit, ranking.ranked, ranking.num_without_speed) == ("", [], 2)
    assert next(iter(answer(ranking))).startswith("no ranking: steps of unequal work do not compare")
