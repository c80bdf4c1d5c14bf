"""A whole check. It checks every input before any job runs, and writes nothing before every job has run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fakedist.bounded import MOST_JSON_BYTES, UnreadableError, read_bytes
from fakedist.check.baselines import (
    Baseline,
    RankDifference,
    baseline_path,
    baseline_text,
    difference,
    former_runs,
    read_baseline,
    settings_of,
    stale_settings,
    write_baselines,
)
from fakedist.check.config import CheckConfig, CheckJob
from fakedist.check.judging import JudgedFigure, RankFigures, judge, measure
from fakedist.check.running import RankToRun, run_ranks, see_that_it_can_run
from fakedist.errors import CheckError, ExitCode, FakedistError, JobError, ScriptError
from fakedist.launcher.executors.local import LocalExecutor
from fakedist.launcher.executors.task import Executor
from fakedist.options import Job
from fakedist.report.content.wording import ending
from fakedist.results.job_time import JobRuns
from fakedist.results.opening import open_run_directory
from fakedist.results.run import Run
from fakedist.results.verdict import line_in_file, need_text
from fakedist.rundir.finding import Finding
from fakedist.rundir.outcome import Outcome
from fakedist.units import format_bytes


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
    from fakedist.results.matched import match_runs

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
