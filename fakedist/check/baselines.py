"""Baselines: the figures with which a job is compared, one small file per job, readable in a code review."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fakedist.bounded import UnreadableError, read_json
from fakedist.check.config import CheckConfig, CheckJob
from fakedist.check.judging import RankFigures, RankRecord
from fakedist.check.running import RankToRun
from fakedist.errors import CheckError
from fakedist.report.content.report_blocks import Block, Items, Remark, Sheet, SheetColumn
from fakedist.results.compare.changed_times import rates_of
from fakedist.results.comparison import Comparison
from fakedist.results.opening import open_run_directory
from fakedist.results.run import Run
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.plain import PlainValueError, from_plain
from fakedist.rundir.summary import Summary
from fakedist.temporary import replacing
from fakedist.units import format_bytes, format_change, format_number, format_relative, format_us

#: Lines of one rank that are shown.
_MOST_LINES = 5
#: The figures of a rank, as columns of the first table.
_FIGURES: Mapping[str, Callable[[float], str]] = {
    "peak": format_bytes,
    "reserved": format_bytes,
    "step": format_us,
    "tokens/s per GPU": format_number,
    "samples/s per GPU": format_number,
    "collectives": format_bytes,
}


@dataclass(frozen=True)
class RankDifference:
    """Changes of one rank since the other check.

    Attributes:
        name: The job and the rank.
        whys: Why the peak and the step changed, one line each.
        warnings: Limits of the figures.
        figures: What ``_FIGURES`` names, before and now; None where it is not known.
        lines: Lines that hold more at the peak: columns line (or operation and phase), path (a layer),
            change_bytes; most first.
        calls: The collectives that changed, as :attr:`Comparison.collectives` has them.
        source: "measured" or "estimated", of the times. Empty without times.
    """

    name: str
    whys: list[str]
    warnings: list[str]
    figures: dict[str, tuple[float | None, float | None]]
    lines: pd.DataFrame
    calls: pd.DataFrame
    source: str

    def to_plain(self) -> dict[str, object]:
        """The difference as JSON has it."""
        tables = {"lines": self.lines.to_dict("records"), "collectives": self.calls.to_dict("records")}
        figures = {name: {"before": before, "now": now} for name, (before, now) in self.figures.items()}
        return {"rank": self.name, "why": self.whys, "warnings": self.warnings, "figures": figures, **tables}


def former_runs(ranks: Iterable[RankToRun], where: Path) -> dict[str, Run]:
    """The runs of these ranks' names in the other check's directory, without those that failed.

    Raises:
        CheckError: It has none of them.
        RunDirectoryError: One is damaged.
    """
    ranks = list(ranks)
    runs = {rank.name: open_run_directory(rank.run_directory) for rank in ranks if rank.directory.is_dir()}
    if not runs:
        names = f"{ranks[0].directory.name}" + (" and others" if len(ranks) > 1 else "")
        message = f"{where} has no run of these jobs: expected {names}"
        raise CheckError(message, f"fakedist check --runs {where}   on the commit to compare with makes them")
    endings = {name: run.summary.exit for name, run in runs.items()}
    return {
        name: run
        for name, run in runs.items()
        if endings[name].ended_well or endings[name].outcome is Outcome.OUT_OF_MEMORY
    }


def difference(name: str, before: Run, now: Run) -> RankDifference:
    """Compare a rank with its run of the other check.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    compared = Comparison(before, now)
    sides = [_figures(run) for run in (before, now)]
    blocks = compared.blocks
    without = blocks["operation"] + " (" + blocks["phase"] + ")"
    by_line = (
        blocks.assign(line=blocks["line"].where(blocks["line"] != "", without))
        .groupby("line", sort=False)
        .agg(path=("path", "first"), change_bytes=("change_bytes", "sum"))
    )
    lines = by_line[by_line["change_bytes"] > 0].sort_values("change_bytes", ascending=False, kind="stable")
    figures = {figure: (sides[0].get(figure), sides[1].get(figure)) for figure in _FIGURES}
    whys = [text for _, text in compared.headlines]
    source = "" if now.summary.timed is None else now.summary.timed[1].source
    return RankDifference(name, whys, compared.warnings, figures, lines.reset_index(), compared.collectives, source)


def _figures(run: Run) -> dict[str, float]:
    summary = run.summary
    figures = {
        "peak": float(summary.peak_allocated_bytes),
        "reserved": float(summary.peak_reserved_bytes),
        "collectives": float(sum(total.bytes_in + total.bytes_out for total in summary.collectives)),
    }
    if summary.timed is not None:
        step = summary.timed[0]
        figures |= {"step": step.step_us, **rates_of(step)}
    return figures


def difference_blocks(differences: Sequence[RankDifference]) -> list[Block]:
    """A table with a row for each rank, the reasons, the lines that grew and the collectives that changed."""
    if not differences:
        return []
    columns = [SheetColumn("rank", [rank.name for rank in differences], is_text=True)]
    for figure, text in _FIGURES.items():
        pairs = [rank.figures[figure] for rank in differences]
        if any(value is not None for pair in pairs for value in pair):
            columns.append(SheetColumn(figure, [_moved(text, *pair) for pair in pairs]))
    sources = sorted({rank.source for rank in differences if rank.source})
    remarks = [f"memory is measured{''.join(f', times are {source}' for source in sources)}"]
    remarks.append("collectives: bytes in and out of the rank's calls in the steps that ran")
    blocks: list[Block] = [Sheet("Since the other check", columns, remarks, is_open=True)]
    blocks += [
        Remark(text, is_warning=True) for text in dict.fromkeys(w for rank in differences for w in rank.warnings)
    ]
    blocks += [
        Items(rank.name, rank.whys)
        for rank in differences
        if len(rank.lines) or any(before != now for before, now in rank.figures.values())
    ]
    blocks += _line_sheets(differences)
    calls = pd.concat([rank.calls.assign(rank=rank.name) for rank in differences])
    if len(calls):
        texts = {"rank": "rank", "group": "group", "operation": "operation"}
        names = [SheetColumn(title, calls[key].tolist(), is_text=True) for title, key in texts.items()]
        sides = zip(calls["a_num_calls"].tolist(), calls["b_num_calls"].tolist(), strict=True)
        moved = SheetColumn("calls", [_moved(format_number, *side) for side in sides])
        blocks.append(Sheet("Collectives that changed", [*names, moved, _changes(calls)]))
    return blocks


def _line_sheets(differences: Sequence[RankDifference]) -> list[Sheet]:
    shown = pd.concat([rank.lines.head(_MOST_LINES).assign(rank=rank.name) for rank in differences])
    if shown.empty:
        return []
    texts = {"rank": "rank", "line": "line", "layer": "path"}
    columns = [SheetColumn(title, shown[key].tolist(), is_text=True) for title, key in texts.items()]
    num_more = sum(len(rank.lines) for rank in differences) - len(shown)
    remarks = [f"not shown: {num_more:,} more lines that grew less"] if num_more else []
    return [Sheet("Lines that hold more at the peak", [*columns, _changes(shown)], remarks, is_open=True)]


def _changes(rows: pd.DataFrame) -> SheetColumn:
    changes = rows["change_bytes"].tolist()
    return SheetColumn("change", [format_change(change) for change in changes], values=changes, unit="bytes")


def _moved(text: Callable[[float], str], before: float | None, now: float | None) -> str:
    """A figure that is the same, or "4.0 GiB -> 5.0 GiB (+25.0%)"."""
    shown = ["-" if value is None else text(value) for value in (before, now)]
    if shown[0] == shown[1]:
        return shown[1]
    relative = "" if before is None or now is None else format_relative(now - before, before)
    return f"{shown[0]} -> {shown[1]}" + (f" ({relative})" if relative else "")


SCHEMA_VERSION = 1
_MAKES_ONE = "fakedist check --update {}"
#: Settings of the job that determine its figures.
_SETTINGS = (
    "target",
    "arguments",
    "world_size",
    "gpus_per_node",
    "device",
    "gpu_memory_bytes",
    "reserve_bytes",
    "steps",
    "launcher",
    "collectives",
    "values",
    "environment",
    "seed",
)


@dataclass(frozen=True)
class Baseline:
    """A job's figures when its baseline was made, and its settings then, with ``torch`` and ``gpu``."""

    settings: dict[str, object]
    ranks: dict[int, RankFigures]


@dataclass(frozen=True)
class _Plain:
    settings: dict[str, object]
    ranks: dict[str, RankRecord]


def baseline_path(config: CheckConfig, job: CheckJob) -> Path:
    """The path of a job's baseline."""
    return config.baselines / f"{job.name}.json"


def read_baseline(config: CheckConfig, job: CheckJob) -> Baseline | None:
    """Read a job's baseline. None if it does not exist.

    Raises:
        CheckError: The baseline is damaged or has a newer schema. Or the job has tolerances, and the baseline is
            missing or lacks a rank.
    """
    path = baseline_path(config, job)
    again = _MAKES_ONE.format(job.name)
    try:
        values = read_json(path)
        if not isinstance(values, dict) or not isinstance(version := values.get("schema_version"), int):
            raise PlainValueError("it has no schema_version")
    except FileNotFoundError:
        if job.tolerances:
            raise CheckError(
                f"job {job.name!r} has max_increase but no baseline: {path} does not exist", again
            ) from None
        return None
    except OSError as error:
        raise CheckError(f"{path} cannot be read: {error.strerror}", again) from None
    except (UnreadableError, PlainValueError) as error:
        raise CheckError(f"{path} is not a baseline: {error}", again) from None
    if version > SCHEMA_VERSION:
        raise CheckError(
            f"{path} has schema version {version}; this fakedist reads up to {SCHEMA_VERSION}",
            "pip install --upgrade fakedist",
        )
    try:
        plain = from_plain(_Plain, values)
        baseline = Baseline(
            plain.settings, {int(rank): RankFigures.from_record(record) for rank, record in plain.ranks.items()}
        )
    except ValueError as error:  # PlainValueError is one; or a rank is not a number
        raise CheckError(f"{path} is not a baseline: {error}", again) from None
    for rank_job in job.jobs:
        if job.tolerances and rank_job.rank not in baseline.ranks:
            raise CheckError(f"{path} has no rank {rank_job.rank} of job {job.name!r}", again)
    return baseline


def settings_of(job: CheckJob, summary: Summary) -> dict[str, object]:
    """The settings that determine a job's figures."""
    values = job.jobs[0].to_dict()
    if values["steps"] == "auto":
        values["steps"] = len(summary.steps)  # the number of recorded steps
    return {
        **json.loads(json.dumps({key: values[key] for key in _SETTINGS})),
        "torch": summary.torch,
        "gpu": summary.gpu,
    }


def stale_settings(baseline: Baseline, settings: Mapping[str, object]) -> list[str]:
    """The settings in which a baseline differs from what ran, one phrase each. Torch and GPU come first."""
    keys = ["torch", "gpu", *(key for key in _SETTINGS if key in settings)]
    return [
        f"{key.replace('_', ' ').replace('target', 'script').replace('gpu', 'GPU')} {_text(was)} -> {_text(now)}"
        for key in keys
        if (was := baseline.settings.get(key)) != (now := settings.get(key))
    ]


def baseline_text(settings: Mapping[str, object], ranks: Mapping[int, RankFigures]) -> str:
    """The text of a baseline's file: sorted, one figure per line."""
    values = {
        "schema_version": SCHEMA_VERSION,
        "settings": settings,
        "ranks": {str(rank): figures.record.to_plain() for rank, figures in ranks.items()},
    }
    return json.dumps(values, indent=1, sort_keys=True) + "\n"


def write_baselines(texts: Mapping[Path, str]) -> None:
    """Replace baselines. All new files are written next to the old ones before the first old one is replaced.

    Raises:
        CheckError: They cannot be written. The old ones are unchanged.
    """
    try:
        with ExitStack() as stack:  # on exit the new files replace the old ones, unless one could not be written
            for path, text in texts.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(replacing(path)).write_text(text, encoding="utf-8")
    except OSError as error:
        path = error.filename2 or error.filename
        raise CheckError(
            f"{path} cannot be written: {error.strerror}", "make room on the disk, or check its permissions"
        ) from error


def _text(value: object) -> str:
    if isinstance(value, list):
        return repr(" ".join(map(str, value)))
    return "none" if value is None else str(value)
