"""Several ranks of a job as one page: whether each fits, the job's step with its lanes, and a link to each rank's page.

If a rank of each pipeline stage ran, it has the step of the whole job. The page needs no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

from fakedist.report.content.report_blocks import Sheet, SheetColumn
from fakedist.report.figures.look import STYLE_NAMES
from fakedist.report.figures.time_figures import lane_names, stage_label, stage_lanes
from fakedist.report.page.assets import figure_object
from fakedist.report.page.bars import BarChart, memory_bars, time_bars
from fakedist.report.page.drawings import Pack
from fakedist.report.page.run_page import template_text
from fakedist.report.text.job_sheets import (
    groups_sheet,
    job_columns,
    job_figures,
    job_remarks,
    job_what_if_sheets,
    kinds_sheet,
    table_title,
)
from fakedist.report.text.wording import (
    command_line,
    ending,
    job_command,
    note_texts,
    or_dash,
    peak_moment,
    step_text,
    verdict,
)
from fakedist.report.writing import replace_text
from fakedist.results.job_time import JobRuns, JobTime
from fakedist.results.run import Run
from fakedist.rundir.directory import PAGE_NAME
from fakedist.rundir.job_time import JobStep
from fakedist.rundir.outcome import Ending
from fakedist.units import format_bytes, format_us

_NONE: Mapping[str, JobTime] = MappingProxyType({})
_ALL_STARTED: Mapping[int, Ending] = MappingProxyType({})
#: The parts of a rank's step, and their classes in the style sheet.
_PARTS = {
    "computes": ("compute_us", "t-busy"),
    "exposed communication": ("communication_us", "t-communication"),
    "bubble": ("bubble_us", "rest"),
    "host": ("host_us", "t-launch_gap"),
    "other": ("wait_us", "t-wait"),
}


def write_job_page(runs: JobRuns, path: Path, not_started: Mapping[int, Ending] = _ALL_STARTED) -> None:
    """Write the page of several ranks, with links to the ranks' pages below it. An existing file is replaced.

    Raises:
        RunDirectoryError: A table is missing or damaged.
        JobError: The file cannot be written.
        OSError: The disk is full.
    """
    replace_text(path, job_page(runs, folder=path.parent, not_started=not_started))


def job_page(
    runs: JobRuns,
    changed: Mapping[str, JobTime] = _NONE,
    *,
    folder: Path | None = None,
    not_started: Mapping[int, Ending] = _ALL_STARTED,
    plotly_file: str = "",
) -> str:
    """The page as text.

    Args:
        runs: The ranks' runs, at least one.
        changed: The job's step with each what-if.
        folder: The directory that the page goes to. It links to the pages of the runs below it.
        not_started: How ranks without a run ended.
        plotly_file: As in :func:`fakedist.report.page.run_page.page`.
    """
    first, step = runs.runs[0], None if runs.job is None else runs.job.summary
    job = first.manifest.job
    assert job is not None
    pack = Pack()
    name = runs.path.name if runs.path else "job"
    pack.meta |= {"style": STYLE_NAMES, "figures": {}, "run": name}
    if runs.job is not None:
        lanes = figure_object(stage_lanes(runs.job.summary, runs.job.lanes))
        pack.meta |= {"figures": {"lanes": lanes}, "step_ms": runs.job.summary.step_us / 1e3}
    ranks = ", ".join(str(run.summary.rank) for run in runs.runs)
    context: dict[str, object] = {
        "title": job_command(job),
        "about": [f"ranks {ranks} of {job.world_size:,}", _device(runs), f"torch {first.summary.torch or 'unknown'}"],
        "command": bool(first.manifest.command),
        "big": _largest(runs.runs) if step is None else _step(step),
        "fits": _fits(runs.runs),
        "sentences": [] if step is None else job_remarks(step)[: len(job_remarks(step)) - len(step.notes)],
        "figures": _figures(runs.runs) if step is None else job_figures(step)[1:],
        "notes": list(_notes(runs, not_started)),
        "lanes": [] if runs.job is None else lane_names(runs.job.lanes),
        "memory": memory_bars([(f"rank {run.summary.rank}", run) for run in runs.runs]),
        "times": None if step is None else _times(step),
        "sheets": [] if runs.job is None else [_stages(runs.job.summary), *job_what_if_sheets(runs.job, changed)],
        "ranks": _ranks(runs.runs, not_started),
        "kinds": [] if runs.kinds is None else [kinds_sheet(runs.kinds, runs.runs), groups_sheet(runs.kinds)],
        "links": [*(_links(run, folder) for run in runs.runs), *([] for _ in not_started)],
        "facts": _facts(runs),
        "numbers": pack.text(),
    }
    return template_text("job.html.j2", "job", context, plotly_file)


def _device(runs: JobRuns) -> str:
    if runs.job is not None:
        return f"{runs.job.summary.gpu}, fabric {runs.job.summary.fabric}"
    return runs.runs[0].summary.gpu or "no GPU reached"


def _step(step: JobStep) -> dict[str, str]:
    _, figure, more = job_figures(step)[0]
    return {"name": "step of the job", "word": "estimated", "figure": "step_time", "text": figure, "more": more}


def _largest(runs: Sequence[Run]) -> dict[str, str]:
    run = max(runs, key=lambda run: run.peak_allocated_bytes)
    more = ", ".join(filter(None, (f"rank {run.summary.rank}", peak_moment(run.summary))))
    figure = {"figure": "peak_allocated", "text": format_bytes(run.peak_allocated_bytes), "more": more}
    return {"name": "largest peak of these ranks, allocated", "word": "measured", **figure}


def _fits(runs: Sequence[Run]) -> dict[str, str]:
    """The verdict on all ranks: that of the first that does not fit, else of the first that may not."""
    found = [(run, verdict(run.summary, run.manifest.cwd)) for run in runs]
    known = [(run, one) for run, one in found if one is not None]
    if not known:
        return {"word": "not known", "style": " maybe", "more": "no rank reached the GPU"}
    run, worst = min(known, key=lambda pair: (pair[1].fits, pair[1].is_sure, _room(pair[0])))
    if worst.fits and worst.is_sure:
        least = f"rank {run.summary.rank} has least headroom: {format_bytes(_room(run))}"
        return {"word": "fits", "style": "", "more": f"each of these {len(known)} ranks; {least}"}
    style = " no" if not worst.fits else " maybe"
    return {"word": worst.word, "style": style, "more": f"rank {run.summary.rank}: {worst.more.lstrip(',: ')}"}


def _room(run: Run) -> int:
    return run.capacity_bytes - run.peak_reserved_bytes


def _figures(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """The figures of ranks without a step of the whole job."""
    peaks = [run.peak_allocated_bytes for run in runs]
    figures = [("ranks", f"{len(runs)}", "each ran on its own")]
    if len(runs) > 1:
        figures.append(("least peak", format_bytes(min(peaks)), "allocated"))
    timed = [run for run in runs if run.summary.timed]
    if timed:
        slowest = max(timed, key=_step_us)
        figures.append(("longest step", format_us(_step_us(slowest)), f"rank {slowest.summary.rank}, on its own"))
    return figures


def _step_us(run: Run) -> float:
    return 0.0 if run.summary.timed is None else run.summary.timed[0].step_us


def _notes(runs: JobRuns, not_started: Mapping[int, Ending]) -> Iterator[str]:
    if runs.job is not None:
        yield from (note.text for note in runs.job.summary.notes)
    elif runs.why_no_step:
        yield f"There is no step of the whole job: {runs.why_no_step}."
    yield from (f"Rank {rank} did not start: {ended.message}" for rank, ended in not_started.items())
    for run in runs.runs:
        if not run.summary.exit.ended_well:
            yield f"Rank {run.summary.rank} ended early: {ending(run.summary, run.manifest.cwd)}."
        if num := len(note_texts(run.summary.notes, run.manifest.cwd)):
            yield f"Rank {run.summary.rank} has {num} {'note' if num == 1 else 'notes'} on its own page."


def _times(step: JobStep) -> BarChart:
    """The parts of the job's step on each rank."""
    rows = [
        (
            stage_label(stage),
            {name: float(getattr(stage, field)) for name, (field, _) in _PARTS.items()},
            format_us(step.step_us - stage.bubble_us),
            "of work",
        )
        for stage in step.stages
    ]
    return time_bars(rows, {name: style for name, (_, style) in _PARTS.items()}, step.step_us)


def _stages(step: JobStep) -> Sheet:
    return Sheet(table_title(step), job_columns(step))


def _ranks(runs: Sequence[Run], not_started: Mapping[int, Ending]) -> Sheet:
    """A row for each rank: how it ended, its memory, and its step on its own."""
    summaries = [run.summary for run in runs]
    lost = [None] * len(not_started)

    def sizes(name: str, values: Sequence[int]) -> SheetColumn:
        cells = [*map(or_dash, values), *("-" for _ in lost)]
        return SheetColumn(name, cells, values=[*values, *lost], unit="bytes")

    steps = [("-", None) if one.timed is None else (step_text(one.timed[0]), one.timed[0].step_us) for one in summaries]
    verdicts = [verdict(run.summary, run.manifest.cwd) for run in runs]
    numbers = [*(one.rank or 0 for one in summaries), *not_started]
    columns = [
        SheetColumn("rank", [f"{number:,}" for number in numbers], values=numbers),
        SheetColumn("outcome", [*(str(one.exit.outcome) for one in summaries), *("error" for _ in lost)], is_text=True),
        SheetColumn("", ["" if one is None else one.word for one in verdicts] + ["" for _ in lost], is_text=True),
        sizes("peak allocated", [one.peak_allocated_bytes for one in summaries]),
        sizes("peak reserved", [one.peak_reserved_bytes for one in summaries]),
        sizes("GPU memory", [one.capacity_bytes for one in summaries]),
        SheetColumn(
            "its step, on its own",
            [*(text for text, _ in steps), *("-" for _ in lost)],
            values=[*(us for _, us in steps), *lost],
            unit="us",
        ),
    ]
    return Sheet("Ranks: memory measured, times estimated", columns)


def _links(run: Run, folder: Path | None) -> list[tuple[str, str]]:
    """The page of a run below a directory: its text, and its address relative to that."""
    page = run.path / PAGE_NAME
    if folder is None or not page.is_file() or not page.is_relative_to(folder.resolve()):
        return []
    return [("open", quote(page.relative_to(folder.resolve()).as_posix()))]


def _facts(runs: JobRuns) -> list[tuple[str, str, bool]]:
    first = runs.runs[0]
    manifest, job = first.manifest, first.manifest.job
    assert job is not None
    world = f"{job.world_size:,} ranks, {job.gpus_per_node} GPUs a node"
    rows = [
        ("command", command_line(manifest.command), True),
        ("in", manifest.cwd, True),
        ("job", job_command(job), True),
        ("world", world, False),
        ("GPU", _device(runs), False),
        ("versions", f"torch {first.summary.torch or 'unknown'}, fakedist {manifest.fakedist}", False),
        ("git commit", manifest.git_commit, True),
        ("when", manifest.created, False),
        ("runs", str(runs.path) if runs.path else ", ".join(str(run.path) for run in runs.runs), True),
    ]
    return [row for row in rows if row[1]]
