"""Points that a sampler chooses: what it learns from each, and where it stops. Optuna itself is real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from fakedist.errors import SweepError
from fakedist.sweep import sampling
from fakedist.sweep.command import PointRun
from fakedist.sweep.plan import CommandLineSettings, SweepPlan, sweep_of_file
from fakedist.sweep.point_rows import RankKind, Row, Status
from fakedist.sweep.points import Wait
from fakedist.sweep.sampling import SampledPoints
from fakedist.sweep.sweep_directory import STORAGE_NAME
from fakedist.units import GIB
from tests.unit.sweep.rows_by_hand import CAPACITY, row

SWEEP = """
script = "train.py"
arguments = ["{mbs}", "{kind}"]
world_size = 8
[axes]
mbs = [4, 1, 2]
kind = ["a", "b"]
"""


@pytest.fixture(autouse=True)
def few_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each suggestion is written to the disk, so these tests let the sampler give up early."""
    monkeypatch.setattr(sampling, "_MOST_IN_VAIN", 40)


def plan_of(directory: Path, text: str = SWEEP, **settings: object) -> SweepPlan:
    (directory / "sweep.toml").write_text(text)
    return sweep_of_file(directory / "sweep.toml", CommandLineSettings(settings=settings))


def chosen(points: SampledPoints) -> PointRun:
    run = points.next()
    assert isinstance(run, PointRun)
    return run


def trials(directory: Path) -> list[Any]:
    backend = optuna.storages.journal.JournalFileBackend(str(directory / STORAGE_NAME))
    storage = optuna.storages.JournalStorage(backend)
    (study,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=study, storage=storage).get_trials()


def ran_out(reserved_gib: float) -> Row:
    """A point whose rank ran out of memory, having reserved so much; 1 GiB is outside."""
    one = row(None, reserved_gib + 1, status=Status.DOES_NOT_FIT)
    return replace(one, ranks=(replace(one.ranks[0], kind=RankKind.OUT_OF_MEMORY),))


@pytest.mark.parametrize(
    ("ended", "excess_gib"),
    [
        (row(1000.0, 40.0), 0.0),
        (row(1000.0, 83.0, status=Status.DOES_NOT_FIT), 3.0),
        (row(1000.0, 79.5, status=Status.MAY_NOT_FIT), -0.5),  # it just fits with all of NCCL, but for the headroom
        (ran_out(99.0), 20.0),  # it went on beyond the GPU's memory
        (ran_out(78.0), 8.0),  # its script got the error: the need is not known
        (replace(ran_out(78.0), ranks=(*ran_out(78.0).ranks, *ran_out(99.0).ranks)), 20.0),
    ],
)
def test_the_sampler_learns_by_how_much_a_point_does_not_fit(tmp_path: Path, ended: Row, excess_gib: float) -> None:
    assert CAPACITY == 80 * GIB
    points = SampledPoints(plan_of(tmp_path, trials=1), tmp_path)
    points.done(chosen(points), ended)
    (trial,) = trials(tmp_path)
    assert trial.state is optuna.trial.TrialState.COMPLETE
    assert trial.user_attrs["excess_gib"] == pytest.approx(excess_gib)
    assert trial.value == (1000.0 if ended.status is Status.FITS else 0.0)


def test_a_sampler_avoids_what_does_not_fit(tmp_path: Path) -> None:
    """Half of the space does not fit. A sampler that did not learn from that would choose from it half of the time."""
    wide = SWEEP.replace("[4, 1, 2]", '"1..64"').replace('["a", "b"]', '"1..64"')
    points, fits = SampledPoints(plan_of(tmp_path, wide, trials=40), tmp_path), []
    while isinstance(run := points.next(), PointRun):
        fits.append(dict(run.point.values)["mbs"] in range(33))
        points.done(run, row(1000.0) if fits[-1] else row(None, 99.0, status=Status.DOES_NOT_FIT))
    assert fits[30:].count(False) < 3


def test_a_point_that_failed_teaches_nothing(tmp_path: Path) -> None:
    points = SampledPoints(plan_of(tmp_path, trials=2), tmp_path)
    points.done(chosen(points), row(status=Status.FAILED))
    points.done(chosen(points), row(None))  # it fits, but its speed is not known
    assert [trial.state.name for trial in trials(tmp_path)] == ["FAIL", "FAIL"]


def test_no_point_comes_twice_and_a_space_that_is_used_up_ends_the_sampler(tmp_path: Path) -> None:
    points = SampledPoints(plan_of(tmp_path, trials=50, sampler="random"), tmp_path)
    seen = []
    while isinstance(run := points.next(), PointRun):
        seen.append(tuple(value for _, value in run.point.values))
        points.done(run, row(1000.0))
    assert sorted(seen) == [(mbs, kind) for mbs in (1, 2, 4) for kind in "ab"]
    assert run is Wait.NO_MORE
    assert points.next() is Wait.NO_MORE


def test_an_earlier_sessions_points_come_first_and_count(tmp_path: Path) -> None:
    before = SampledPoints(plan_of(tmp_path, trials=3), tmp_path)
    ended, left_running = chosen(before), chosen(before)
    before.done(ended, row(1000.0))
    after = SampledPoints(plan_of(tmp_path, trials=3), tmp_path)
    assert chosen(after).point == ended.point
    later = [chosen(after).point, chosen(after).point]
    assert ended.point not in later
    assert after.next() is Wait.NO_MORE
    assert left_running.point is not None
    assert [trial.state.name for trial in trials(tmp_path)][:2] == ["COMPLETE", "FAIL"]


def test_conditions_that_no_suggestion_meets_are_an_error(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 'where = "mbs > 9"\n' + SWEEP, trials=1)
    with pytest.raises(SweepError, match="no suggestion of 40 meets the conditions"):
        SampledPoints(plan, tmp_path).next()
