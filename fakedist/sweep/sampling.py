"""Points that a sampler of Optuna chooses, for spaces that are too large to run as a whole.

The sampler learns from each point: its speed, and by how much it does not fit, which is a constraint that it breaks.
"""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from fakedist.errors import SweepError
from fakedist.sweep.command import PointRun
from fakedist.sweep.plan import SweepPlan
from fakedist.sweep.point_rows import RankKind, Row, Status, StepEstimate
from fakedist.sweep.points import Wait
from fakedist.sweep.ranking import UNITS, rate_in
from fakedist.sweep.space import Axis, Point, Scalar, text_of
from fakedist.sweep.sweep_directory import STORAGE_NAME
from fakedist.units import GIB

#: How a trial says by how much it breaks its constraint.
_EXCESS = "excess_gib"
#: Assumed for a point whose script got the error of too little memory, so that its need is not known.
_UNKNOWN_EXCESS_GIB = 8.0
#: Suggestions in a row that lead to no new point, after which the space counts as used up.
_MOST_IN_VAIN = 500


class SampledPoints:
    """Points as a sampler suggests them. Optuna's storage is in ``directory``; trials of an earlier session count."""

    def __init__(self, plan: SweepPlan, directory: Path) -> None:
        self._plan = plan
        self._axes = {axis.name: axis for axis in plan.space.axes}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(directory / STORAGE_NAME))),
            sampler=_sampler(plan.sampler, plan.seed),
            study_name=f"sweep {sorted((axis.name, axis.values) for axis in plan.space.axes)}",
            direction="maximize",
            load_if_exists=True,
        )
        self._unit = ""
        self._running: dict[Point, Trial] = {}
        self._seen: set[Point] = set()
        self._earlier = deque(self._earlier_points())
        self._num_left = (plan.num_trials or 0) - len(self._earlier)

    def next(self) -> PointRun | Wait:
        """The next point to run. Those of an earlier session come first; their rows are known."""
        if self._earlier:
            return self._at(self._earlier.popleft())
        if self._num_left <= 0:
            return Wait.NO_MORE
        for _ in range(_MOST_IN_VAIN):
            trial = self._study.ask()
            point = Point(tuple((name, self._suggested(trial, name)) for name in self._axes))
            if point in self._seen or not self._plan.space.allows(point):
                self._study.tell(trial, state=TrialState.PRUNED)
                continue
            self._num_left -= 1
            self._running[point] = trial
            return self._at(point)
        if not self._seen:
            raise SweepError(
                f"no suggestion of {_MOST_IN_VAIN} meets the conditions", "change or leave out a condition"
            )
        self._num_left = 0
        return Wait.NO_MORE

    def done(self, run: PointRun, row: Row) -> None:
        """Report the result of a point to the sampler."""
        trial = self._running.pop(run.point, None)
        if trial is None:
            return
        step = row.step
        if row.status is Status.FITS and step is not None and (rate := self._rate(step)) is not None:
            trial.set_user_attr(_EXCESS, 0.0)
            self._study.tell(trial, rate)
        elif row.status in (Status.DOES_NOT_FIT, Status.MAY_NOT_FIT):
            trial.set_user_attr(_EXCESS, _excess_gib(row))
            self._study.tell(trial, 0.0)
        else:
            self._study.tell(trial, state=TrialState.FAIL)

    def _rate(self, step: StepEstimate) -> float | None:
        self._unit = self._unit or next((unit for unit in UNITS if rate_in(unit, step) is not None), "")
        return rate_in(self._unit, step) if self._unit else None

    def _at(self, point: Point) -> PointRun:
        self._seen.add(point)
        return self._plan.command.at(self._plan.space, point)

    def _suggested(self, trial: Trial, name: str) -> Scalar:
        values = self._axes[name].values
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            return _value_of(self._axes[name], trial.suggest_int(name, 0, len(values) - 1))
        return _value_of(self._axes[name], trial.suggest_categorical(name, [text_of(value) for value in values]))

    def _earlier_points(self) -> list[Point]:
        """The points of an earlier session that are still in the space. What it left running is given up."""
        points = []
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state is TrialState.RUNNING:
                self._study.tell(trial.number, state=TrialState.FAIL)
            elif trial.state in (TrialState.COMPLETE, TrialState.FAIL) and set(trial.params) == set(self._axes):
                points.append(
                    Point(tuple((name, _value_of(axis, trial.params[name])) for name, axis in self._axes.items()))
                )
        return [point for point in dict.fromkeys(points) if self._plan.space.allows(point)]


def _excess_gib(row: Row) -> float:
    """By how much the fullest rank of a point that does not fit, or may not, exceeds its GPU.

    A rank that went on beyond its GPU's memory reserved more than that, and so its need is known.
    """
    known = [
        result
        for result in row.ranks
        if result.kind is RankKind.RAN or result.peak_reserved_bytes > result.capacity_bytes
    ]
    excess_gib = max((result.total_bytes - result.capacity_bytes for result in known), default=0) / GIB
    return excess_gib if len(known) == len(row.ranks) else max(excess_gib, _UNKNOWN_EXCESS_GIB)


def _value_of(axis: Axis, suggested: object) -> Scalar:
    """The value of an axis for what a sampler suggested: a place among numbers, or a text."""
    if isinstance(suggested, int):
        return sorted(axis.values, key=float)[suggested]
    return next(value for value in axis.values if text_of(value) == suggested)


def _sampler(which: str, seed: int) -> BaseSampler:
    if which == "random":
        return RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constraints are experimental in Optuna
        return TPESampler(seed=seed, constant_liar=True, constraints_func=_constraints)


def _constraints(trial: FrozenTrial) -> tuple[float]:
    return (float(trial.user_attrs.get(_EXCESS, 0.0)),)
