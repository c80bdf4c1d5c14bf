"""The figures of a run that budgets and baselines refer to."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fakedist.analysis.compare.baseline import layers_bytes, pattern_parts, pattern_times
from fakedist.analysis.compare.changed_blocks import block_changes, peak_blocks
from fakedist.analysis.compare.changed_memory import layer_paths
from fakedist.analysis.compare.matching import match_layers
from fakedist.check.limits import Figure
from fakedist.errors import CheckError, did_you_mean
from fakedist.report.compare.comparison import BLOCK_COLUMNS
from fakedist.results.run import Run
from fakedist.run.schema import CATEGORIES
from fakedist.run.summary import CollectiveTotal, Summary
from fakedist.run.tables import read_table

_NO_TIMES = pd.DataFrame({"path": [], "category": [], "us": []})


@dataclass(frozen=True)
class RankFigures:
    """One rank of a configured job, as it ran or as in its baseline.

    Attributes:
        record: Plain figures, in the form that baselines hold.
        parts: Layers' own bytes at the peak, with columns path, category, bytes.
        times: Layers' own time in the timed step, with columns path, category (the family of kernels), us.
    """

    record: dict[str, Any]
    parts: pd.DataFrame
    times: pd.DataFrame

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> RankFigures:
        """Make a rank from a baseline's record."""
        rows = [(path, name, bytes_) for path, held in record["layers"].items() for name, bytes_ in held.items()]
        parts = pd.DataFrame(rows, columns=["path", "category", "bytes"]).astype({"bytes": "int64"})
        timed = record.get("time", {}).get("layers", {})
        rows = [(path, family, us) for path, taken in timed.items() for family, us in taken.items()]
        times = pd.DataFrame(rows, columns=["path", "category", "us"]).astype({"us": "float64"})
        return cls(record, parts, times)

    @property
    def time_source(self) -> str:
        """Whether its times are measured or estimated. Empty without times."""
        return str(self.record.get("time", {}).get("source", ""))

    def value(self, figure: Figure) -> float | None:
        """The value of a figure. None if it is not known."""
        record = self.record
        if figure.kind == "headroom":
            return float(record["capacity_bytes"] - record["peak_reserved_bytes"])
        if figure.kind == "step_time":
            return float(record["time"]["step_us"]) if "time" in record else None
        if figure.kind == "families":
            return (
                float(record["time"]["families"].get(figure.part, 0)) if "families" in record.get("time", {}) else None
            )
        if figure.kind == "categories":
            return float(record["by_category"].get(figure.part, 0))
        if figure.kind == "layers":
            return float(record["layer_limits"][figure.part]) if figure.part in record["layer_limits"] else None
        if figure.kind == "groups":
            calls = record["groups"].get(figure.part)
            return None if calls is None else float(sum(c["bytes_in"] + c["bytes_out"] for c in calls.values()))
        return float(record[f"{figure.kind}_bytes"])


def measure(run: Run, figures: set[Figure], where: str) -> RankFigures:
    """Read the figures of a run.

    Args:
        run: The run.
        figures: The figures to read. Parts that the model does not have are errors.
        where: Job and rank, for messages.

    Raises:
        CheckError: A layer pattern or a group matches nothing in this run.
    """
    summary, layers = run.summary, run.table("layers")
    parts = pattern_parts(layers)
    groups = _groups(summary.collectives)
    limits: dict[str, int] = {}
    for figure in sorted(figures, key=lambda each: (each.kind, each.part)):
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
    record = {
        "peak_allocated_bytes": summary.peak_allocated_bytes,
        "peak_reserved_bytes": summary.peak_reserved_bytes,
        "peak_step": summary.peak_step,
        "peak_phase": summary.peak_phase,
        "capacity_bytes": summary.capacity_bytes,
        "by_category": {name: summary.by_category[name] for name in CATEGORIES if summary.by_category[name]},
        "by_phase": {f"{row.step} {row.phase}": row.peak_allocated_bytes for row in summary.by_phase},
        "layers": dict(held),
        "layer_limits": limits,
        "groups": groups,
    }
    if not (asked := sorted(figure.kind for figure in figures if figure.is_time)):
        return RankFigures(record, parts, _NO_TIMES)
    times = pattern_times(layers, run.table("layer_times")) if summary.time else _NO_TIMES
    found = RankFigures(record | _time_record(summary, times), parts, times)
    if any(figure.is_time and found.value(figure) is None for figure in figures):
        told = f"{where}: no step of it was timed, so there is no {asked[-1]}"
        raise CheckError(told, "leave it out, or let it run to the end of a whole step")
    return found


def _time_record(summary: Summary, times: pd.DataFrame) -> dict[str, Any]:
    """The timed step or, on a GPU without a timed step, the wall time of the last step, without kernels."""
    if summary.timed is None:
        if summary.device != "cuda" or not summary.steps:
            return {}
        return {"time": {"source": "measured", "step_us": summary.steps[-1].wall_us}}
    time, source = summary.timed
    layers: dict[str, dict[str, float]] = defaultdict(dict)
    for path, family, us in times.itertuples(index=False):
        layers[str(path)][str(family)] = round(us, 1)
    families = {row.family: round(row.time_us, 1) for row in time.by_family if row.family != "communication"}
    told = {"source": source.source, "step_us": round(time.step_us, 1)}
    told |= {"num_unknown_calls": time.num_unknown_calls}
    return {"time": {**told, "families": families, "layers": dict(layers)}}


def peak_places(run: Run) -> pd.DataFrame:
    """Blocks at the peak, by place, as changes from zero. Columns: path, category, line, change_bytes and more."""
    layers = run.table("layers")
    paths, _ = layer_paths(layers, layers, match_layers(layers, layers))
    blocks = read_table(run.path, "blocks", BLOCK_COLUMNS).to_pandas()
    stacks = read_table(run.path, "stacks", ("line",)).to_pandas()
    found = peak_blocks(blocks, stacks, paths, cwd=run.manifest.cwd, script_folder=run.manifest.cwd)
    return block_changes(found.iloc[:0], found)


def _groups(rows: list[CollectiveTotal]) -> dict[str, dict[str, dict[str, int]]]:
    found: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    for row in rows:
        calls = found[row.group].setdefault(row.operation, {"bytes_in": 0, "bytes_out": 0, "num_calls": 0})
        for key in calls:
            calls[key] += getattr(row, key)
    return dict(found)
