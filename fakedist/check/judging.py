"""Judges figures: which one exceeds which limit, by how much, and which layer is to blame."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd

from fakedist.check.config import CheckJob, Figure, Limit
from fakedist.check.measured import RankFigures, measure
from fakedist.results.compare.changed_memory import block_changes, path_changes
from fakedist.results.compare.layer_matching import names_layer
from fakedist.results.compare.reasons import Cause, find_cause, origin_of
from fakedist.results.run import Run
from fakedist.units import format_bytes, format_relative, format_us


@dataclass(frozen=True)
class JudgedFigure:
    """One figure of one rank, in bytes or microseconds. A limit or baseline that does not exist is None.

    Attributes:
        budget: Its upper limit, or lower limit for a headroom.
        allowed: The upper limit that follows from the baseline and its tolerance.
        blame: The layers that cause it and what allocates there, as one phrase. Empty if nothing is exceeded.
        source: "measured" or "estimated", of a time. Empty for bytes.
        line: The line that allocates those layers' blocks, ``file:line (function)``. Empty if not known.
    """

    job: str
    rank: int
    figure: Figure
    value: float
    budget: float | None = None
    baseline: float | None = None
    allowed: float | None = None
    tolerance: str = ""
    blame: str = ""
    line: str = ""
    source: str = ""

    @property
    def name(self) -> str:
        """The figure's name in tables. A time includes whether it is measured or estimated."""
        return f"{self.figure.name} ({self.source})" if self.source else self.figure.name

    @property
    def is_over_budget(self) -> bool:
        """True if the budget is exceeded."""
        if self.budget is None:
            return False
        return self.value < self.budget if self.figure.kind == "headroom" else self.value > self.budget

    @property
    def is_over_baseline(self) -> bool:
        """True if the figure grew by more than its tolerance."""
        return self.allowed is not None and self.value > self.allowed

    @property
    def is_exceeded(self) -> bool:
        """True if the budget or the baseline is exceeded."""
        return self.is_over_budget or self.is_over_baseline

    def amount(self, value: float) -> str:
        """A value of this figure, as text."""
        return format_us(value) if self.figure.is_time else format_bytes(value)

    @property
    def message(self) -> str:
        """The exceeded limit and the layers to blame, in one line."""
        parts = []
        if self.is_over_budget and self.budget is not None:
            gap, side = abs(self.value - self.budget), "under" if self.figure.kind == "headroom" else "over"
            was = f" (baseline {self.amount(self.baseline)})" if self.baseline is not None else ""
            parts.append(f"{self.amount(gap)} {side} its budget of {self.amount(self.budget)}{was}")
        if self.is_over_baseline and self.baseline is not None:
            grown = self.value - self.baseline
            relative = f" ({format_relative(int(grown), int(self.baseline))})" if self.baseline else ""
            was = f"its baseline of {self.amount(self.baseline)}"
            parts.append(f"{self.amount(grown)}{relative} more than {was}, where {self.tolerance} is allowed")
        message = f"{self.job} rank {self.rank}: {self.name} is {self.amount(self.value)}, {' and '.join(parts)}"
        return message + (f": {self.blame}" if self.blame else "")


def judge(job: CheckJob, rank: int, now: RankFigures, before: RankFigures | None) -> list[JudgedFigure]:
    """Judge every figure of a rank that has a budget or a tolerance, and always both peaks.

    ``before`` is the rank in its baseline; None without a baseline.
    """
    budgets = {limit.figure: limit for limit in job.budgets}
    tolerances = {limit.figure: limit for limit in job.tolerances}
    peaks = dict.fromkeys((Figure("peak_allocated"), Figure("peak_reserved")))
    findings = []
    for figure in {**peaks, **dict.fromkeys(budgets), **dict.fromkeys(tolerances)}:
        value = now.value(figure)
        if value is None:
            continue
        was = before.value(figure) if before is not None else None
        budget, tolerance = budgets.get(figure), tolerances.get(figure)
        finding = JudgedFigure(
            job.name,
            rank,
            figure,
            value,
            budget=None if budget is None else budget.of(now.record.capacity_bytes),
            baseline=was,
            allowed=_allowed(was, tolerance),
            tolerance="" if tolerance is None else tolerance.text,
            source=now.time_source if figure.is_time else "",
        )
        findings.append(_blamed(finding, now, before) if finding.is_exceeded else finding)
    return findings


def _allowed(was: float | None, tolerance: Limit | None) -> float | None:
    return None if was is None or tolerance is None else was + tolerance.of(was)


def _blamed(finding: JudgedFigure, now: RankFigures, before: RankFigures | None) -> JudgedFigure:
    figure = finding.figure
    if figure.is_time:
        return replace(finding, blame=_time_blame(figure, now, before))
    if figure.kind == "groups":
        return finding
    if figure.is_of_host:
        most = now.host_line
        if most is None:
            return finding
        at = f" at {most.line}" if most.line else ""
        blame = f"most of this rank's is {format_bytes(most.bytes)} of {most.kind} memory{at}"
        return replace(finding, blame=blame, line=most.line)
    nothing = now.parts.iloc[:0]
    changes = path_changes(nothing if before is None else before.parts, now.parts)
    cause = _cause(changes, figure)
    if cause is None or cause.part <= 0:  # it did not grow, so blame what most of it consists of
        cause = _cause(path_changes(nothing, now.parts), figure)
        before = None
    if cause is None:
        return finding
    was = now.blocks.iloc[:0] if before is None or before.blocks.empty else before.blocks
    origin = origin_of(cause, block_changes(was, now.blocks))
    blame = cause.phrase(is_change=before is not None) + origin.phrase("made")
    return replace(finding, blame=blame, line=origin.line)


def _time_blame(figure: Figure, now: RankFigures, before: RankFigures | None) -> str:
    of = [
        figures.times if figure.kind == "step_time" else figures.times[figures.times["category"] == figure.part]
        for figures in (now, before or now)
    ]
    if before is not None and len(of[1]):
        cause = find_cause(path_changes(of[1], of[0], unit="us"), "change_us")
        if cause is not None and cause.change > 0:
            return cause.phrase(is_time=True)
    cause = find_cause(of[0].assign(name=of[0]["path"]), "us") if len(of[0]) else None
    return "" if cause is None else cause.phrase(is_time=True, is_change=False)


def _cause(changes: pd.DataFrame, figure: Figure) -> Cause | None:
    if figure.kind == "categories":
        changes = changes[changes["category"] == figure.part]
    if figure.kind == "layers":
        changes = changes[[names_layer(figure.part, str(path)) for path in changes["path"]]]
    return find_cause(changes) if len(changes) else None


def say_makeup(run: Run) -> str:
    """The main part of a run's peak: "activations of layers.*.mlp, 2.88 GiB, made at model.py:212 (forward)"."""
    figures = measure(run, set(), "")
    nothing = figures.parts.iloc[:0], figures.blocks.iloc[:0]
    cause = find_cause(path_changes(nothing[0], figures.parts))
    if cause is None:
        return ""
    origin = origin_of(cause, block_changes(nothing[1], figures.blocks))
    return cause.phrase(is_change=False) + origin.phrase("made")
