"""The figures of a run that budgets and baselines refer to."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import pandas as pd

from fakedist import extras
from fakedist.check.config import SHARES, CheckJob, Figure
from fakedist.errors import CheckError, did_you_mean
from fakedist.results.compare.changed_memory import (
    BLOCK_COLUMNS,
    LINE,
    block_changes,
    path_changes,
    pattern_parts,
    peak_blocks,
)
from fakedist.results.compare.changed_times import pattern_times
from fakedist.results.compare.layer_matching import layer_paths, layers_bytes, match_layers, names_layer
from fakedist.results.compare.reasons import Cause, find_cause, origin_of
from fakedist.results.run import Run
from fakedist.rundir.host_memory import HostLine
from fakedist.rundir.plain import LEFT_OUT_IF_EMPTY, to_plain
from fakedist.rundir.schema import CATEGORIES
from fakedist.rundir.summary import CollectiveTotal, Summary
from fakedist.units import format_bytes, format_relative, format_us

#: Columns of :attr:`RankFigures.blocks` that tell blocks apart.
_SITE = ["path", "category", "phase", "operation", "line"]
_NO_TIMES = pd.DataFrame({"path": [], "category": [], "us": []})


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Times of a rank, in microseconds.

    Attributes:
        source: "measured" or "estimated".
        step_us: Duration of the timed step or, without one, of the last step.
        num_unknown_calls: Collectives in it whose duration is not known.
        families: Time of the kernels of each family. None if no kernels were timed.
    """

    source: str
    step_us: float
    num_unknown_calls: int = 0
    families: dict[str, float] | None = None
    layers: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Figures of a rank, as a baseline holds them. All are in bytes.

    Attributes:
        layers: Own bytes of each layer at the peak, by category.
        lines: Bytes at the peak by line, or "operation (phase)" where no line is known, then by layer and category.
        layer_limits: Bytes at the peak of each layer pattern that has a limit.
        groups: For each group and operation ``bytes_in``, ``bytes_out`` and ``num_calls``.
        time: None if the job has no limit on a time.
        host_bytes: The rank's most of the host's memory; None if the job has no limit on it.
        node_host_bytes: The node's, if all of its ranks hold what this one holds.
        shares: By name, those that have a limit.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_step: int
    peak_phase: str
    capacity_bytes: int
    by_category: dict[str, int]
    by_phase: dict[str, int]
    layers: dict[str, dict[str, int]]
    layer_limits: dict[str, int]
    groups: dict[str, dict[str, dict[str, int]]]
    time: RankTimes | None = None
    lines: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    host_bytes: int | None = None
    node_host_bytes: int | None = None
    shares: dict[str, float] = field(default_factory=dict, metadata=LEFT_OUT_IF_EMPTY)

    def to_plain(self) -> dict[str, object]:
        """The record as a baseline holds it, without what is not known."""
        plain = to_plain(self)
        assert isinstance(plain, dict)
        for name in ("host_bytes", "node_host_bytes"):
            if plain[name] is None:
                del plain[name]
        if self.time is None:
            del plain["time"]
        elif self.time.families is None:
            plain["time"] = {"source": self.time.source, "step_us": self.time.step_us}
        return plain


@dataclass(frozen=True)
class RankFigures:
    """One rank of a configured job, as it ran or as in its baseline.

    Attributes:
        parts: Layers' own bytes at the peak, with columns path, category, bytes.
        blocks: The same by what allocates them, with columns path, category, phase, operation, line, bytes. Operation
            and phase are empty where the line is known.
        times: Layers' own time in the timed step, with columns path, category (the family of kernels), us.
        host_line: The line that holds most of the host's memory at its peak; None if that is not known.
    """

    record: RankRecord
    parts: pd.DataFrame
    blocks: pd.DataFrame
    times: pd.DataFrame
    host_line: HostLine | None = None

    @classmethod
    def from_record(cls, record: RankRecord) -> RankFigures:
        """Make a rank from a baseline's record."""
        rows = [(path, name, bytes_) for path, held in record.layers.items() for name, bytes_ in held.items()]
        parts = pd.DataFrame(rows, columns=["path", "category", "bytes"]).astype({"bytes": "int64"})
        blocks = [
            (path, category, *_site(text), bytes_)
            for text, layers in record.lines.items()
            for path, held in layers.items()
            for category, bytes_ in held.items()
        ]
        timed = {} if record.time is None else record.time.layers
        rows_us = [(path, family, us) for path, taken in timed.items() for family, us in taken.items()]
        times = pd.DataFrame(rows_us, columns=["path", "category", "us"]).astype({"us": "float64"})
        return cls(record, parts, pd.DataFrame(blocks, columns=[*_SITE, "bytes"]).astype({"bytes": "int64"}), times)

    @property
    def time_source(self) -> str:
        """Source of its times: "measured" or "estimated". Empty without times."""
        return "" if self.record.time is None else self.record.time.source

    def value(self, figure: Figure) -> float | None:
        """The value of a figure. None if it is not known."""
        record = self.record
        time = self.record.time
        match figure.kind:
            case "peak_allocated":
                return float(record.peak_allocated_bytes)
            case "peak_reserved":
                return float(record.peak_reserved_bytes)
            case "headroom":
                return float(record.capacity_bytes - record.peak_reserved_bytes)
            case "step_time":
                return None if time is None else float(time.step_us)
            case "families":
                return None if time is None or time.families is None else float(time.families.get(figure.part, 0))
            case "host_bytes":
                return _as_float(record.host_bytes)
            case "node_host_bytes":
                return _as_float(record.node_host_bytes)
            case share if share in SHARES:
                return record.shares.get(share)
            case "categories":
                return float(record.by_category.get(figure.part, 0))
            case "layers":
                return _as_float(record.layer_limits.get(figure.part))
            case _:
                calls = record.groups.get(figure.part)
                return None if calls is None else float(sum(c["bytes_in"] + c["bytes_out"] for c in calls.values()))


def _as_float(value: int | None) -> float | None:
    return None if value is None else float(value)


def measure(run: Run, figures: set[Figure], where: str) -> RankFigures:
    """Read these figures of a run.

    Raises:
        CheckError: A layer pattern or a group matches nothing in this run.
    """
    summary = run.summary
    layers = run.table("layers")
    parts = pattern_parts(layers)
    groups = _groups(summary.collectives)
    limits: dict[str, int] = {}
    for figure in sorted(figures, key=lambda figure: (figure.kind, figure.part)):
        if figure.kind == "groups" and figure.part not in groups:
            hint = did_you_mean(figure.part, groups) or "this rank called no collective: leave out groups"
            raise CheckError(f"{where}: there is no group {figure.part!r}", hint)
        if figure.kind == "layers":
            if (bytes_ := layers_bytes(layers, figure.part)) is None:
                known = sorted(set(parts["path"]))
                raise CheckError(f"{where}: no layer is called {figure.part!r}", did_you_mean(figure.part, known))
            limits[figure.part] = bytes_
    held: dict[str, dict[str, int]] = defaultdict(dict)
    for path, category, bytes_ in parts.itertuples(index=False):
        held[str(path)][str(category)] = int(bytes_)
    blocks = _peak_blocks(run)
    is_timed = any(figure.is_time for figure in figures)
    times = pattern_times(layers, run.table("layer_times")) if is_timed and summary.time else _NO_TIMES
    host = summary.host_memory if any(figure.is_of_host for figure in figures) else None
    record = RankRecord(
        peak_allocated_bytes=summary.peak_allocated_bytes,
        peak_reserved_bytes=summary.peak_reserved_bytes,
        peak_step=summary.peak_step,
        peak_phase=summary.peak_phase,
        capacity_bytes=summary.capacity_bytes,
        by_category={name: summary.by_category[name] for name in CATEGORIES if summary.by_category[name]},
        by_phase={f"{row.step} {row.phase}": row.peak_allocated_bytes for row in summary.by_phase},
        layers=dict(held),
        layer_limits=limits,
        groups=groups,
        time=_times(summary, times) if is_timed else None,
        lines=_lines(blocks),
        host_bytes=None if host is None else host.peak.peak_bytes,
        node_host_bytes=None if host is None else host.node.high_bytes,
        shares={figure.kind: extras.shares()[figure.kind](run) for figure in figures if figure.is_share},
    )
    lines = [] if host is None else host.lines
    rank_figures = RankFigures(record, parts, blocks, times, next(iter(lines), None))
    if any(figure.is_of_host for figure in figures) and host is None:
        raise CheckError(f"{where}: the host's memory was not recorded", "remove the limit, or install a C++ compiler")
    unknown = sorted(figure.kind for figure in figures if figure.is_time and rank_figures.value(figure) is None)
    if unknown:
        message = f"{where}: no step was timed, so there is no {unknown[-1]}"
        raise CheckError(message, "remove the limit, or let the job run a complete step")
    return rank_figures


def _times(summary: Summary, times: pd.DataFrame) -> RankTimes | None:
    if summary.timed is None:
        if summary.device != "cuda" or not summary.steps:
            return None
        return RankTimes("measured", summary.steps[-1].wall_us)
    time, source = summary.timed
    layers: dict[str, dict[str, float]] = defaultdict(dict)
    for path, family, us in times.itertuples(index=False):
        layers[str(path)][str(family)] = round(us, 1)
    families = {row.family: round(row.time_us, 1) for row in time.by_family if row.family != "communication"}
    return RankTimes(source.source, round(time.step_us, 1), time.num_unknown_calls, families, dict(layers))


def _peak_blocks(run: Run) -> pd.DataFrame:
    layers = run.table("layers")
    paths, _ = layer_paths(layers, layers, match_layers(layers, layers))
    blocks = run.table("blocks", BLOCK_COLUMNS)
    stacks = run.table("stacks", ("line",))
    held = peak_blocks(blocks, stacks, paths, cwd=run.manifest.cwd)
    has_line = held["line"] != ""
    held = held.assign(**{name: held[name].mask(has_line, "") for name in ("operation", "phase")})
    return held.groupby(_SITE, sort=False)["bytes"].sum().reset_index()


def _lines(blocks: pd.DataFrame) -> dict[str, dict[str, dict[str, int]]]:
    lines: dict[str, dict[str, dict[str, int]]] = {}
    for path, category, phase, operation, line, bytes_ in blocks.itertuples(index=False):
        layers = lines.setdefault(line or f"{operation} ({phase})", {})
        layers.setdefault(path, {})[category] = int(bytes_)
    return lines


def _site(text: str) -> tuple[str, str, str]:
    """Phase, operation and line."""
    if LINE.fullmatch(text):
        return "", "", text
    operation, _, phase = text.rpartition(" (")
    return phase.removesuffix(")"), operation, ""


def _groups(rows: list[CollectiveTotal]) -> dict[str, dict[str, dict[str, int]]]:
    groups: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    for row in rows:
        calls = groups[row.group].setdefault(row.operation, {"bytes_in": 0, "bytes_out": 0, "num_calls": 0})
        for key in calls:
            calls[key] += getattr(row, key)
    return dict(groups)


@dataclass(frozen=True)
class JudgedFigure:
    """One figure of one rank, in bytes or microseconds, or a share. A limit or baseline that does not exist is None.

    Attributes:
        budget: Its upper limit, or lower limit for a headroom or a share.
        allowed: The upper limit that follows from the baseline and its tolerance.
        blame: The layers that cause it and what allocates there, as one phrase. Empty if nothing is exceeded.
        source: "measured" or "estimated", of a time; "simulated", of a share. Empty for bytes.
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
        """The figure's name in tables. A time or a share includes its source."""
        return f"{self.figure.name} ({self.source})" if self.source else self.figure.name

    @property
    def is_over_budget(self) -> bool:
        """True if the budget is exceeded."""
        if self.budget is None:
            return False
        return self.value < self.budget if self.figure.has_least else self.value > self.budget

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
        if self.figure.is_share:
            return f"{value:.1%}"
        return format_us(value) if self.figure.is_time else format_bytes(value)

    @property
    def message(self) -> str:
        """The exceeded limit and the layers to blame, in one line."""
        parts = []
        if self.is_over_budget and self.budget is not None:
            gap = abs(self.value - self.budget)
            side = "under" if self.figure.has_least else "over"
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
            allowed=None if was is None or tolerance is None else was + tolerance.of(was),
            tolerance="" if tolerance is None else tolerance.text,
            source="simulated" if figure.is_share else now.time_source if figure.is_time else "",
        )
        findings.append(_blamed(finding, now, before) if finding.is_exceeded else finding)
    return findings


def _blamed(finding: JudgedFigure, now: RankFigures, before: RankFigures | None) -> JudgedFigure:
    figure = finding.figure
    if figure.is_time:
        return replace(finding, blame=_time_blame(figure, now, before))
    if figure.kind == "groups" or figure.is_share:
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
