"""Points that need not run: they hold no less than a point that does not fit, or are not faster than one that does.

Both follow the order of the axes that grow (:attr:`~fakedist.sweep.plan.SweepPlan.grows`). A recorded pair of points
that contradicts an order refutes it. One that does not follow from numbers alone counts once a recorded pair shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fakedist.sweep.command import PointRun
from fakedist.sweep.plan import SweepPlan
from fakedist.sweep.point_rows import RankKind, Row, Status
from fakedist.sweep.ranking import rank_rows, speed_text
from fakedist.sweep.space import Point
from fakedist.units import format_bytes

#: Points that compute as much may differ by so much: shards of other sizes are copied by other kernels.
_AS_MUCH = 0.99


class _Move(NamedTuple):
    """From one level of an axis to another."""

    axis: str
    start: int
    end: int

    @property
    def pair(self) -> _Move:
        return _Move(self.axis, min(self.start, self.end), max(self.start, self.end))


class Pruning:
    """Points of a sweep that ended, and conclusions from them about the others.

    Attributes:
        refuted: By status and axis, in words, the pair of points by which none gets it along that axis any more.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self._plan = plan
        self._ended: list[Row] = []
        self._ranking = rank_rows([], plan.headroom)
        self._shown: dict[Status, set[_Move]] = {Status.PRUNED: set(), Status.SLOWER: set()}
        self.refuted: dict[tuple[Status, str], str] = {}

    def in_order(self, runs: Sequence[PointRun]) -> list[PointRun]:
        """Runs in the order in which they prove most: few shards, then few sequences, then little recomputation."""
        signs = sorted(self._plan.grows.items(), key=lambda item: -item[1])
        axes = {axis.name: axis for axis in self._plan.space.axes}

        def key(run: PointRun) -> list[int]:
            values = dict(run.point.values)
            return [(sign or 1) * axes[name].level(values[name]) for name, sign in signs]

        return sorted(runs, key=key)

    def take(self, row: Row) -> set[Status]:
        """Take a point that ended. Returns the statuses that it refutes."""
        if not self._plan.grows:
            return set()
        before = set(self.refuted)
        for other in self._ended:
            for one, its in ((row, other), (other, row)):
                if moves := self._moves(Point(one.values), its):
                    self._compare(one, its, moves)
        self._ended.append(row)
        self._ranking = rank_rows(self._ended, self._plan.headroom)
        return {status for status, _ in set(self.refuted) - before}

    def may_depend(self, run: PointRun, others: Iterable[PointRun]) -> bool:
        """True if one of the other points may prove something of a point."""
        return any(self._moves(run.point, other.point) for other in others)

    def row_without_run(self, run: PointRun, *, row_id: str, key: str) -> Row | None:
        """The row of a point that need not run; None if nothing is proved of it."""
        for other in self._ended:
            if not (moves := self._moves(run.point, other)):
                continue
            for status, why in ((Status.PRUNED, _why_too_large), (Status.SLOWER, self._why_slower)):
                if self._is_proved(status, moves) and (reason := why(run.point, other, moves)):
                    return Row(
                        id=row_id, key=key, values=run.point.values, pricing=run.pricing, status=status, reason=reason
                    )
        return None

    def _moves(self, point: Point, other: Point | Row) -> list[_Move]:
        """The way from another point to a point; empty if they are one, or differ on an axis that does not grow."""
        rows = zip(self._plan.space.axes, point.values, other.values, strict=True)
        differing = [(axis, own, its) for axis, (_, own), (_, its) in rows if own != its]
        if any(axis.name not in self._plan.grows for axis, _, _ in differing):
            return []
        return [_Move(axis.name, axis.level(its), axis.level(own)) for axis, own, its in differing]

    def _is_up(self, status: Status, move: _Move) -> bool:
        """True if along a move nothing that a rank holds, or that it computes for the same tokens, shrinks."""
        is_up = move.end > move.start
        return is_up if status is Status.PRUNED else self._plan.grows[move.axis] == (1 if is_up else -1)

    def _is_proved(self, status: Status, moves: Sequence[_Move]) -> bool:
        """True if nothing shrinks along the moves: no pair refutes it, and pairs show what numbers alone do not."""
        if self._is_refuted(status, moves) or not all(self._is_up(status, move) for move in moves):
            return False
        doubtful = [move for move in moves if status is Status.SLOWER or self._plan.grows[move.axis] < 0]
        return all(move.pair in self._shown[status] for move in doubtful)

    def _is_refuted(self, status: Status, moves: Sequence[_Move]) -> bool:
        return any((status, move.axis) in self.refuted for move in moves)

    def _compare(self, one: Row, other: Row, moves: Sequence[_Move]) -> None:
        """Take what two points show of the orders in which the first is above the other."""
        least_us = [0.0 if row.step is None else row.step.least_us for row in (one, other)]
        own, its = (
            {rank.rank: rank.peak_allocated_bytes for rank in row.ranks if rank.kind is RankKind.RAN}
            for row in (one, other)
        )
        ranks = own.keys() & its.keys()
        for status, is_known, is_less, does in (
            (Status.PRUNED, ranks, any(own[rank] < its[rank] for rank in ranks), "holds"),
            (Status.SLOWER, all(least_us), least_us[0] < _AS_MUCH * least_us[1], "computes"),
        ):
            if not is_known or not all(self._is_up(status, move) for move in moves):
                continue
            if is_less:
                if not self._is_refuted(status, moves):  # else by that axis
                    why = f"a rank {does} less at {one.label} than at {other.label}"
                    self.refuted |= {(status, move.axis): why for move in moves}
            elif len(moves) == 1:
                self._shown[status].add(moves[0].pair)

    def _why_slower(self, point: Point, other: Row, moves: Sequence[_Move]) -> str:
        """Why a point that computes no less than another cannot win; empty if it may.

        More recomputation delays all that follows it. Other shards communicate otherwise, so that only the kernels are
        certain to take as long.
        """
        best, speed, unit = self._ranking.best, self._ranking.speeds.get(other.id), self._ranking.unit
        if best is None or speed is None or other.step is None:
            return ""
        if self._plan.counts_at(point) != self._plan.counts_at(Point(other.values)):
            return ""
        is_ranked = any(entry.row.id == other.id for entry in self._ranking.ranked)
        if is_ranked and all(self._plan.grows[move.axis] < 0 for move in moves):
            return f"computes no less than {other.label}, which fits with {speed_text(speed.value)} {unit}"
        most = speed.value * other.step.step_us / (_AS_MUCH * other.step.least_us or other.step.step_us)
        if not other.step.least_us or most >= best.speed.value:
            return ""
        return (
            f"computes no less than {other.label}, whose kernels alone allow {speed_text(most)} {unit}; "
            f"{best.row.label} has {speed_text(best.speed.value)}"
        )


def _why_too_large(point: Point, other: Row, moves: Sequence[_Move]) -> str:
    """Why a point that holds no less than another cannot fit; empty if it may."""
    rank = other.lacking
    if rank is None:
        return ""
    held = f"{format_bytes(rank.peak_allocated_bytes + rank.context_bytes)} of {format_bytes(rank.capacity_bytes)}"
    return f"holds no less than {other.label}, whose tensors and CUDA context take {held}"
