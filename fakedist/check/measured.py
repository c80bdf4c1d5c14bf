"""The figures of a run that budgets and baselines refer to."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pandas as pd

from fakedist.check.config import Figure
from fakedist.errors import CheckError, did_you_mean
from fakedist.results.compare.changed_memory import BLOCK_COLUMNS, LINE, pattern_parts, peak_blocks
from fakedist.results.compare.changed_times import pattern_times
from fakedist.results.compare.layer_matching import layer_paths, layers_bytes, match_layers
from fakedist.results.run import Run
from fakedist.rundir.host_memory import HostLine
from fakedist.rundir.plain import to_plain
from fakedist.rundir.schema import CATEGORIES
from fakedist.rundir.summary import CollectiveTotal, Summary

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
        record, time = self.record, self.record.time
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
    summary, layers = run.summary, run.table("layers")
    parts = pattern_parts(layers)
    groups = _groups(summary.collectives)
    limits: dict[str, int] = {}
    for figure in sorted(figures, key=lambda figure: (figure.kind, figure.part)):
        if figure.kind == "groups" and figure.part not in groups:
            raise CheckError(f"{where}: there is no group {figure.part!r}", did_you_mean(figure.part, groups))
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
