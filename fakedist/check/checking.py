"""A whole check. It checks every input before any job runs, and writes nothing before every job has run.

Baselines: the figures with which a job is compared, one small file per job, readable in a code review.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from fakedist.bounded import MOST_JSON_BYTES, UnreadableError, read_bytes, read_json
from fakedist.check.config import CheckConfig, CheckJob
from fakedist.check.judging import JudgedFigure, RankFigures, RankRecord, judge, measure
from fakedist.check.running import RankToRun, run_ranks, see_that_it_can_run
from fakedist.errors import CheckError, ExitCode, FakedistError, JobError, ScriptError
from fakedist.launcher.executors.local import LocalExecutor
from fakedist.launcher.executors.task import Executor
from fakedist.options import Job
from fakedist.report.content.report_blocks import Block, Items, Remark, Sheet, SheetColumn
from fakedist.report.content.wording import ending
from fakedist.results.compare import reasons
from fakedist.results.compare.changed_times import rates_of
from fakedist.results.comparison import Comparison
from fakedist.results.job_time import JobRuns
from fakedist.results.opening import open_run_directory
from fakedist.results.run import Run
from fakedist.results.verdict import line_in_file, need_text
from fakedist.rundir.finding import Finding
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
    source = "" if now.summary.timed is None else now.summary.timed[1].source
    return RankDifference(
        name,
        [text for _, text in compared.headlines],
        reasons.warnings({f"{name} before": before.summary, f"{name} now": now.summary}),
        figures,
        lines.reset_index(),
        compared.collectives,
        source,
    )


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
    blocks += [Remark(text, is_warning=True) for rank in differences for text in rank.warnings]
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


@dataclass(frozen=True)
class Mismatch:
    """Calls of a job's ranks that do not match, in one text. ``line`` made one of them; it may be empty."""

    job: str
    text: str
    line: str


@dataclass(frozen=True)
class RankFinding:
    """A finding of one rank of a job; without a rank of several together."""

    job: str
    rank: int | None
    finding: Finding

    @property
    def text(self) -> str:
        """The rank and the finding, one line."""
        whose = self.job if self.rank is None else f"{self.job} rank {self.rank}"
        line = line_in_file(self.finding.line, str(Path.cwd()))
        where = f" ({line})" if line else ""
        return f"{whose}: {self.finding.code} {self.finding.text}: {self.finding.change}{where}"


@dataclass
class Checked:
    """The result of a check, in the order of the configuration.

    Attributes:
        judged: Every figure that was judged.
        notes: Ranks that left the job and use no GPU memory.
        warnings: Baselines whose settings differ from what ran. Printed before the findings.
        failures: Scripts that failed. Their figures are not judged.
        misfits: Ranks that did not fit the GPU: job and rank, with what was requested.
        mismatches: Jobs whose ranks' calls do not match.
        findings: Findings that the configuration selects.
        differences: What changed in each rank since the other check, if there is one.
    """

    config: CheckConfig
    judged: list[JudgedFigure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failures: list[ScriptError] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    findings: list[RankFinding] = field(default_factory=list)
    differences: list[RankDifference] = field(default_factory=list)
    updated: list[Path] = field(default_factory=list)

    @property
    def exceeded(self) -> list[JudgedFigure]:
        """The figures that exceed their budget or their baseline."""
        return [figure for figure in self.judged if figure.is_exceeded]

    @property
    def problems(self) -> list[str]:
        """Misfits, mismatches and findings."""
        texts = [mismatch.text for mismatch in self.mismatches]
        return [*self.misfits, *texts, *(found.text for found in self.findings)]

    @property
    def exit_code(self) -> ExitCode:
        """1 if a script failed, 4 if a rank does not fit, 5 if calls do not match, 3 if a figure exceeds its budget or
        baseline, or a rule that is selected finds a fault, else 0.
        """
        if self.failures:
            return ExitCode.ERROR
        if self.misfits:
            return ExitCode.OUT_OF_MEMORY
        if self.mismatches:
            return ExitCode.MISMATCH
        return ExitCode.EXCEEDED if self.exceeded or self.findings else ExitCode.DONE


@dataclass(frozen=True)
class Running:
    """The executor of jobs, closed afterwards.

    Attributes:
        finished: Gets every rank that ended, with its seconds.
        can_run: Checks that a job can run where the executor runs it.
        against: Directory of another check's run directories, which these are compared with.
    """

    directory: Path
    executor: Executor = field(default_factory=LocalExecutor)
    finished: Callable[[RankToRun, float], None] = lambda rank, seconds: None
    can_run: Callable[[Job], None] = see_that_it_can_run
    against: Path | None = None


def check(config: CheckConfig, running: Running, *, update: bool) -> Checked:
    """Run all jobs and judge them.

    Raises:
        FakedistError: The configuration, a baseline or this machine does not allow the check. Nothing was written.
    """
    directory = running.directory.resolve()
    against = running.against and running.against.resolve()
    with contextlib.chdir(config.root):
        for job in config.jobs:
            _see_that_it_can_run(job, running.can_run)
        former = {} if against is None else former_runs(_ranks(config, against).values(), against)
        before = {job.name: None if update else read_baseline(config, job) for job in config.jobs}
        ranks = _ranks(config, directory)
        failures = run_ranks(list(ranks.values()), config.root, running.executor, running.finished)
        checked = Checked(config, failures=failures)
        if not failures:
            for job in config.jobs:
                runs = {
                    rank_job.rank: open_run_directory(ranks[job.name, rank_job.rank].run_directory)
                    for rank_job in job.jobs
                }
                checked.failures += _wrongly_empty(job, runs, before[job.name])
        if checked.failures:
            return checked
        texts = {}
        for job in config.jobs:
            runs = {
                rank_job.rank: open_run_directory(ranks[job.name, rank_job.rank].run_directory) for rank_job in job.jobs
            }
            figures = judge_job(checked, job, runs, before[job.name])
            found = [RankFinding(job.name, rank, finding) for rank, run in runs.items() for finding in run.findings]
            found += [RankFinding(job.name, None, finding) for finding in JobRuns(None, list(runs.values())).findings]
            if against is not None:
                named = {ranks[job.name, rank].name: run for rank, run in runs.items()}
                checked.differences += [
                    difference(name, former[name], run) for name, run in named.items() if name in former
                ]
                checked.notes += [
                    f"{name} has no complete run in {against}, so it is not compared"
                    for name in named
                    if name not in former
                ]
            checked.findings += [piece for piece in found if job.selection.takes(piece.finding, config.root)]
            if job.match:
                checked.mismatches += _mismatches(job, [run.path for run in runs.values()])
            texts[baseline_path(config, job)] = baseline_text(
                settings_of(job, next(iter(runs.values())).summary), figures
            )
        if update and not checked.exit_code:
            checked.updated = [path for path, text in texts.items() if not _is_text(path, text)]
            write_baselines({path: texts[path] for path in checked.updated})
    return checked


def _ranks(config: CheckConfig, directory: Path) -> dict[tuple[str, int], RankToRun]:
    """Every rank of every job, by its job's name and its number."""
    return {
        (job.name, one.rank): RankToRun(
            f"{job.name} rank {one.rank}", one, directory / f"{job.name}-rank{one.rank}", may_leave=len(job.jobs) > 1
        )
        for job in config.jobs
        for one in job.jobs
    }


def _wrongly_empty(job: CheckJob, runs: dict[int, Run], baseline: Baseline | None) -> list[ScriptError]:
    empty = {rank: ending(run.summary, run.manifest.cwd) for rank, run in runs.items() if _takes_nothing(run)}
    if len(empty) == len(runs):
        message = f"{job.name}: no rank allocated anything on the GPU"
        return [ScriptError(message, f"fakedist check {job.name}")]
    failures = []
    for rank, how in empty.items():
        was = baseline.ranks.get(rank) if baseline is not None else None
        if was is not None and (peak := was.record.peak_allocated_bytes):
            message = f"{job.name} rank {rank}: {how}, but in its baseline it took {format_bytes(peak)}"
            failures.append(ScriptError(message, f"fakedist check --update {job.name}, if the rank is meant to leave"))
    return failures


def _takes_nothing(run: Run) -> bool:
    return not run.summary.peak_allocated_bytes and run.summary.exit.outcome is not Outcome.OUT_OF_MEMORY


def _see_that_it_can_run(job: CheckJob, can_run: Callable[[Job], None]) -> None:
    where = f"job {job.name!r}"
    try:
        for rank_job in job.jobs:
            can_run(rank_job)
    except ScriptError as error:
        raise ScriptError(f"{where}: {error.message}", error.hint, error.output) from None
    except JobError as error:
        raise CheckError(f"{where}: {error.message}", error.hint) from None
    except FakedistError as error:
        raise type(error)(f"{where}: {error.message}", error.hint) from None


def judge_job(
    checked: Checked, job: CheckJob, runs: dict[int, Run], baseline: Baseline | None
) -> dict[int, RankFigures]:
    """Judge every rank of a job, and return the ranks' figures."""
    figures = {limit.figure for limit in (*job.budgets, *job.tolerances)}
    ranks = {
        rank: measure(run, set() if _takes_nothing(run) else figures, f"job {job.name!r}, rank {rank}")
        for rank, run in runs.items()
    }
    checked.notes += [
        f"{job.name} rank {rank} {ending(run.summary, run.manifest.cwd)}, and takes no memory"
        for rank, run in runs.items()
        if _takes_nothing(run)
    ]
    first = next(iter(runs.values()))
    if baseline is not None and (stale := stale_settings(baseline, settings_of(job, first.summary))):
        checked.warnings.append(f"the baseline of {job.name} was made with other settings: {', '.join(stale)}")
    for rank, run in runs.items():
        if run.summary.exit.outcome is Outcome.OUT_OF_MEMORY:
            why = need_text(run.summary) if run.summary.out_of_memory else run.summary.exit.message
            checked.misfits.append(f"{job.name} rank {rank} does not fit the GPU: {why}")
        before = baseline.ranks.get(rank) if baseline is not None else None
        if before is not None and (difference := _unlike_times(ranks[rank], before)):
            checked.warnings.append(f"the baseline of {job.name} rank {rank}: {difference}")
        unknown = [
            limit.figure.name
            for limit in job.tolerances
            if before is not None and ranks[rank].value(limit.figure) is not None and before.value(limit.figure) is None
        ]
        if unknown:
            message = f"the baseline of {job.name!r} rank {rank} has no {unknown[0]}"
            raise CheckError(message, f"fakedist check --update {job.name}")
        checked.judged += judge(job, rank, ranks[rank], before)
    return ranks


def _mismatches(job: CheckJob, runs: list[Path]) -> list[Mismatch]:
    from fakedist.report.content.match import sections, verdict
    from fakedist.results.job_ranks import match_runs

    match = match_runs(runs)
    if match.matched.is_matched:
        return []
    items = [item for _, items in sections(match) for item in items]
    lines = [line for made in match.at_fault for line in match.placed(made).lines[:1]]
    return [Mismatch(job.name, f"{job.name}: {verdict(match)}: {'; '.join(items)}", next(iter(lines), ""))]


def _unlike_times(now: RankFigures, before: RankFigures) -> str:
    """The reason why times of a run and of its baseline do not compare directly. Empty if they do."""
    if not (now.time_source and before.time_source):
        return ""
    if now.time_source != before.time_source:
        return f"its times are {before.time_source}, and this run's are {now.time_source}"
    unknown = [figures.record.time.num_unknown_calls for figures in (before, now) if figures.record.time is not None]
    if unknown[0] != unknown[1]:
        return (
            f"collectives of unknown duration were {unknown[0]:,} and are {unknown[1]:,}; no step's time includes them"
        )
    return ""


def _is_text(path: Path, text: str) -> bool:
    try:
        return read_bytes(path, MOST_JSON_BYTES) == text.encode()
    except (OSError, UnreadableError):
        return False
