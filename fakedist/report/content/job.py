"""Several ranks of a job: whether each fits, the job's step with its lanes, and its what-ifs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

from fakedist.analysis.alike_ranks import AlikeRanks
from fakedist.report.content.host_memory import node_remarks
from fakedist.report.content.report_blocks import (
    KEY,
    Block,
    Chart,
    Drawing,
    Fact,
    Facts,
    Items,
    Remark,
    Report,
    Sheet,
    SheetColumn,
    Verdict,
    bytes_column,
    us_column,
)
from fakedist.report.content.run import run_object
from fakedist.report.content.wording import (
    FINDINGS_TITLE,
    MFU_BASIS,
    command_line,
    ending,
    finding_text,
    job_command,
    note_texts,
)
from fakedist.report.figures.time_figures import lane_names, stage_label, stage_lanes
from fakedist.report.page.assets import figure_object
from fakedist.report.page.run_charts import BarChart, memory_bars, time_bars
from fakedist.results.job_ranks import JobKinds
from fakedist.results.job_time import JobRuns, JobTime
from fakedist.results.run import Run
from fakedist.results.verdict import verdict
from fakedist.rundir.directory import PAGE_NAME
from fakedist.rundir.job_time import JobStep
from fakedist.rundir.notes import share_text
from fakedist.rundir.outcome import Ending
from fakedist.rundir.plain import to_plain
from fakedist.units import format_bytes, format_rank_list, format_relative, format_us, format_us_change

_UNCHANGED: Mapping[str, JobTime] = MappingProxyType({})
#: The parts of a rank's step: what each is called, its field, and its class in the style sheet.
_BARS = {
    "computes": ("compute_us", "t-busy"),
    "exposed communication": ("communication_us", "t-communication"),
    "bubble": ("bubble_us", "rest"),
    "host": ("host_us", "t-launch_gap"),
    "other": ("wait_us", "t-wait"),
}


@dataclass(frozen=True)
class RankRow:
    """One rank that has run. Its seconds ``wall_s`` include recording and tables; None if they are not known."""

    rank: int
    run_directory: Path | None
    exit: Ending
    wall_s: float | None = None


def job_report(
    rows: Sequence[RankRow],
    world_size: int,
    found: JobRuns | None,
    changed: Mapping[str, JobTime] = _UNCHANGED,
    *,
    folder: Path | None = None,
    has_kinds: bool = False,
) -> Report:
    """Several ranks of a job: whether each fits, and the step of the whole job with what would change it.

    Args:
        rows: The ranks that ran, or could not start.
        world_size: Of the job.
        found: Their runs; None if none could start.
        changed: The job's step with each what-if.
        folder: The directory that a page goes to. It links to the pages of the runs below it.
        has_kinds: Its JSON has the kinds of ranks.
    """
    job = None if found is None else found.job
    ranks = _ranks_sheet(rows, found, world_size, folder)
    blocks: list[Block] = [ranks] if found is None else [*_about(found), *_memory(found), *_step(job, changed), ranks]
    if found is not None and found.kinds is not None:
        blocks += [_kinds_sheet(found.kinds, found.runs), _groups_sheet(found.kinds)]
    if found is not None and found.findings:
        texts = [finding_text(finding, found.runs[0].manifest.cwd) for finding in found.findings]
        blocks.append(Items(FINDINGS_TITLE, texts, label="Findings"))
    if notes := list(_notes(found, rows)):
        blocks.append(Items("Notes on these figures", notes, label="Notes"))
    blocks += [] if found is None else [_job_facts(found)]

    def data() -> dict[str, object]:
        exit_code = next((row.exit.code for row in rows if row.exit.code), 0)
        whole = {"world_size": world_size, "exit_code": exit_code, "ranks": [_rank_object(row) for row in rows]}
        whole["job"] = None if job is None else _job_object(job, changed)
        whole["findings"] = [] if found is None else to_plain(found.findings)
        kinds = None if found is None or not has_kinds else found.kinds
        return whole if kinds is None else whole | {"kinds": _kind_objects(kinds)}

    return Report("job", blocks, data)


def runs_report(found: JobRuns, *, folder: Path | None = None) -> Report:
    """The report of ranks that all ran."""
    rows = [RankRow(run.summary.rank or 0, run.path, run.summary.exit) for run in found.runs]
    return job_report(rows, found.runs[0].summary.world_size or 0, found, folder=folder)


def step_report(
    job: JobTime, changed: Mapping[str, JobTime], added: Sequence[Report] = (), *, folder: Path | None = None
) -> Report:
    """The report of ranks whose step was priced anew, and what is ``added``; its JSON is that of the step."""
    report = runs_report(JobRuns(None, job.runs, job), folder=folder)
    blocks = [*report.blocks, *_what_if_sheets(job, changed), *(block for one in added for block in one.blocks)]

    def data() -> dict[str, object]:
        return _job_object(job, changed) | {one.title: one.data() for one in added}

    return replace(report, blocks=blocks, data=data)


def _about(found: JobRuns) -> list[Block]:
    job = found.runs[0].manifest.job
    assert job is not None
    numbers = ", ".join(str(run.summary.rank) for run in found.runs)
    facts = [Fact("job", job_command(job), is_code=True), Fact("ranks", f"{numbers} of {job.world_size:,}")]
    return [Verdict(_fits(found.runs)), Facts([*facts, Fact("GPU", _device(found))])]


def _memory(found: JobRuns) -> list[Block]:
    bars = partial(memory_bars, [(f"rank {run.summary.rank}", run) for run in found.runs])
    chart = Chart("bars", "Memory at the peak of each rank", bars, "measured", label="Memory")
    return [chart] if found.job is not None else [Facts(_rank_figures(found.runs), "Each on its own"), chart]


def _step(job: JobTime | None, changed: Mapping[str, JobTime]) -> list[Block]:
    if job is None:
        return []
    step = job.summary
    remark = (
        "The ranks on one axis of time; each waits for what the others send. Drag to zoom in, double-click for all of "
        "it."
    )
    return [
        Facts(_step_figures(step), "Step of the job, estimated", label="Step"),
        *map(Remark, _remarks(step)),
        Chart("lanes", "The step by rank", partial(_lanes, job), "estimated", remark),
        Chart("bars", "The step of each rank in parts", partial(_times, step), "estimated", label="Time"),
        Sheet("The step in parts: memory measured, times estimated", _stage_columns(step), is_open=True),
        *_what_if_sheets(job, changed),
    ]


def _job_object(job: JobTime, changed: Mapping[str, JobTime]) -> dict[str, object]:
    """The attributes of :class:`fakedist.rundir.job_time.JobStep`, and what-ifs if any."""
    plain = to_plain(job.summary)
    assert isinstance(plain, dict)
    return plain | ({"what_ifs": _what_if_objects(job, changed)} if changed else {})


def _fits(runs: Sequence[Run]) -> str:
    """The verdict on all ranks: that of the first that does not fit, else of the first that may not."""
    found = [(run, verdict(run.summary, run.manifest.cwd)) for run in runs]
    known = [(run, one) for run, one in found if one is not None]
    if not known:
        return "Not known whether these ranks fit: none reached the GPU"
    run, worst = min(known, key=lambda pair: (pair[1].fits, pair[1].is_sure, _room(pair[0])))
    if worst.fits and worst.is_sure:
        least = f"rank {run.summary.rank} has least headroom: {format_bytes(_room(run))}"
        return f"Each of these {len(known)} ranks fits; {least}"
    return f"Rank {run.summary.rank} {worst.word}: {worst.more.lstrip(',: ')}"


def _room(run: Run) -> int:
    return run.capacity_bytes - run.peak_reserved_bytes


def _rank_figures(runs: Sequence[Run]) -> list[Fact]:
    """The figures of ranks without a step of the whole job."""
    peaks = [run.peak_allocated_bytes for run in runs]
    figures = [Fact("ranks", f"{len(runs)}")]
    if len(runs) > 1:
        figures.append(Fact("peaks, allocated", f"{format_bytes(min(peaks))} to {format_bytes(max(peaks))}"))
    timed = [run for run in runs if run.summary.timed]
    if timed:
        slowest = max(timed, key=_step_us)
        figures.append(Fact("longest step", format_us(_step_us(slowest)), f"rank {slowest.summary.rank}"))
    return figures


def _step_us(run: Run) -> float:
    return 0.0 if run.summary.timed is None else run.summary.timed[0].step_us


def _device(runs: JobRuns) -> str:
    if runs.job is not None:
        return f"{runs.job.summary.gpu}, fabric {runs.job.summary.fabric}"
    return runs.runs[0].summary.gpu or "no GPU reached"


def _ranks_sheet(rows: Sequence[RankRow], found: JobRuns | None, world_size: int, folder: Path | None) -> Sheet:
    """A row for each rank: how it ended, its memory, its step on its own; and the messages of those that failed."""
    by_rank = {} if found is None else {run.summary.rank: run for run in found.runs}
    runs = [by_rank.get(row.rank) for row in rows]
    summaries = [None if run is None else run.summary for run in runs]
    verdicts = [None if run is None else verdict(run.summary, run.manifest.cwd) for run in runs]
    steps = [None if one is None or one.timed is None else one.timed[0].step_us for one in summaries]
    columns = [
        SheetColumn("rank", values=[row.rank for row in rows], rank=KEY),
        SheetColumn("outcome", [str(row.exit.outcome) for row in rows], is_text=True),
        SheetColumn("", ["" if one is None else one.word for one in verdicts], is_text=True),
        bytes_column("peak allocated", [None if one is None else one.peak_allocated_bytes for one in summaries]),
        bytes_column("peak reserved", [None if one is None else one.peak_reserved_bytes for one in summaries]),
        bytes_column("GPU memory", [None if one is None else one.capacity_bytes for one in summaries], rank=3),
        *([us_column("its step, on its own", steps, rank=1)] if any(steps) else []),
        *_wall(rows),
        SheetColumn("run", [_shown(row.run_directory) for row in rows], is_text=True, rank=2),
    ]
    remarks = [f"rank {row.rank}: {row.exit.message}" for row in rows if row.exit.message]
    remarks += node_remarks(run for run in runs if run is not None)
    if by_rank:
        remarks.append("fakedist report RUN shows each")
    title = f"Ranks of {world_size:,}: memory measured" + (", times estimated" if any(steps) else "")
    links = [[] if run is None else _links(run, folder) for run in runs]
    return Sheet(title, columns, remarks, links=links if any(links) else None, label="Ranks", is_open=True)


def _links(run: Run, folder: Path | None) -> list[tuple[str, str]]:
    """The page of a run below a directory: its text, and its address relative to that."""
    page = run.path / PAGE_NAME
    if folder is None or not page.is_file() or not page.is_relative_to(folder.resolve()):
        return []
    return [("open", quote(page.relative_to(folder.resolve()).as_posix()))]


def _wall(rows: Sequence[RankRow]) -> list[SheetColumn]:
    known = [row.wall_s for row in rows if row.wall_s is not None]
    return [SheetColumn("wall", [f"{wall_s:.1f} s" for wall_s in known], rank=1)] if len(known) == len(rows) else []


def _shown(path: Path | None) -> str:
    if path is None:
        return "-"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _rank_object(row: RankRow) -> dict[str, object]:
    """One rank's object. For a rank that could not start, it has only how it ended."""
    if row.run_directory is None:
        return {"rank": row.rank, "exit": to_plain(row.exit), "wall_s": row.wall_s}
    return {**run_object(row.run_directory), **({} if row.wall_s is None else {"wall_s": row.wall_s})}


def _kinds_sheet(found: JobKinds, runs: Sequence[Run]) -> Sheet:
    """A row for each kind of rank, those that reserve most first, and how they were checked."""
    by_rank = {run.summary.rank: run for run in runs}
    ran = {kind.ranks: [by_rank[rank] for rank in kind.ran if rank in by_rank] for kind in found.kinds}

    def most(kind: AlikeRanks, name: str) -> int:
        return max((getattr(run, name) for run in ran[kind.ranks]), default=0)

    kinds = sorted(found.kinds, key=lambda kind: (-most(kind, "peak_reserved_bytes"), kind.ranks))
    stages = ["" if kind.stage is None else str(kind.stage) for kind in kinds]
    places = [", ".join(kind.where) for kind in kinds]
    runs_of = (ran[kind.ranks] for kind in kinds)
    fits = ["" if not runs else "yes" if all(run.fits for run in runs) else "no" for runs in runs_of]
    columns = [
        SheetColumn("ranks", [format_rank_list(kind.ranks) for kind in kinds], is_text=True),
        *([SheetColumn("stage", stages, rank=1)] if any(stages) else []),
        *([SheetColumn("where", places, is_text=True, rank=2)] if any(places) else []),
        SheetColumn("number", [f"{len(kind.ranks):,}" for kind in kinds], rank=1),
        SheetColumn("ran", [format_rank_list(kind.ran) or "none" for kind in kinds], is_text=True, rank=1),
        bytes_column("peak reserved", [most(kind, "peak_reserved_bytes") for kind in kinds]),
        bytes_column("peak allocated", [most(kind, "peak_allocated_bytes") for kind in kinds]),
        SheetColumn("fits", fits, is_text=True),
        SheetColumn("alike", ["checked" if kind.is_checked else "assumed" for kind in kinds], is_text=True, rank=1),
    ]
    return Sheet("Kinds of ranks, memory measured", columns, _kind_remarks(kinds, ran))


def _kind_remarks(kinds: Sequence[AlikeRanks], ran: Mapping[tuple[int, ...], Sequence[Run]]) -> list[str]:
    remarks = []
    if any(kind.is_checked and len(kind.ranks) > len(kind.ran) for kind in kinds):
        remarks.append("checked: the first and the last of these ranks ran and made the same calls on their own groups")
    if assumed := [kind for kind in kinds if not kind.is_checked]:
        remarks.append(
            f"assumed: too few of the ranks of {len(assumed):,} kinds ran; --rank distinct checks or divides them"
        )
    for kind in kinds:
        peaks = [run.peak_reserved_bytes for run in ran[kind.ranks]]
        least, most = format_bytes(min(peaks, default=0)), format_bytes(max(peaks, default=0))
        if kind.is_checked and least != most:
            ranks = format_rank_list(kind.ran)
            remarks.append(f"ranks {ranks} made the same calls and reserved {least} to {most}")
    return remarks


def _groups_sheet(found: JobKinds) -> Sheet:
    """A table of the job's process groups: how many there are of each description and size."""
    rows = [(description, size, number) for (description, size), number in found.groups.sizes.items()]
    columns = [
        SheetColumn("group", [description for description, _, _ in rows], is_text=True),
        SheetColumn("ranks in one", values=[size for _, size, _ in rows]),
        SheetColumn("number", values=[number for _, _, number in rows]),
    ]
    return Sheet("Process groups of the job", columns)


def _kind_objects(found: JobKinds) -> list[dict[str, object]]:
    return [
        {
            "ranks": format_rank_list(kind.ranks),
            "num_ranks": len(kind.ranks),
            "ran": list(kind.ran),
            "stage": kind.stage,
            "where": list(kind.where),
            "checked": kind.is_checked,
        }
        for kind in found.kinds
    ]


def _step_figures(step: JobStep) -> list[Fact]:
    known = step.step_low_us is not None and step.step_high_us is not None
    interval = f"{format_us(step.step_low_us or 0.0)} to {format_us(step.step_high_us or 0.0)}" if known else ""
    rows = [
        Fact("step", format_us(step.step_us), f"90 % interval {interval}" if interval else "its interval is not known")
    ]
    done = step.throughput
    if done.tokens_per_s_per_gpu is not None:
        whole = (
            f"{done.tokens_per_s_per_gpu * step.world_size:,.0f} of all GPUs, {done.tokens_per_step:,} tokens a step"
        )
        rows.append(Fact("tokens/s per GPU", f"{done.tokens_per_s_per_gpu:,.0f}", whole))
    elif done.samples_per_s_per_gpu is not None:
        whole = (
            f"{done.samples_per_s_per_gpu * step.world_size:,.0f} of all GPUs, {done.samples_per_step:,} samples a step"
        )
        rows.append(Fact("samples/s per GPU", f"{done.samples_per_s_per_gpu:,.0f}", whole))
    if done.mfu is not None:
        rows.append(Fact("MFU", f"{done.mfu:.1%}", MFU_BASIS))
    for rate in done.rates:
        mfu = "" if rate.mfu is None else f"MFU {rate.mfu:.1%}, "
        how = "attention by half of the keys" if rate.convention == "Megatron-LM" else "attention by all keys"
        rows.append(Fact("TFLOP/s per GPU", f"{rate.tflops_per_gpu:,.1f}", f"{mfu}as {rate.convention} counts: {how}"))
    return rows


def _remarks(step: JobStep) -> list[str]:
    """Sentences that read the table, and the limits of its figures."""
    by_rank = {stage.rank: stage for stage in step.stages}
    slowest, memory = by_rank[step.slowest_rank], by_rank[step.memory_rank]
    remarks = []
    if len(by_rank) > 1:
        working = format_us(step.step_us - slowest.bubble_us)
        remarks.append(f"rank {slowest.rank} sets the pace: it waits least for the others, and works {working}")
        room = "" if not memory.capacity_bytes else f" of {format_bytes(memory.capacity_bytes)}"
        fits = "" if memory.fits else ", which does not fit"
        remarks.append(
            f"rank {memory.rank} binds memory: {format_bytes(memory.peak_reserved_bytes)} reserved{room}{fits}"
        )
    if step.throughput.tokens_from and step.throughput.tokens_from != "given":
        remarks.append(f"tokens: {step.throughput.tokens_from}")
    return remarks


def _lanes(job: JobTime) -> Drawing:
    figures = {"lanes": figure_object(stage_lanes(job.summary, job.lanes))}
    return Drawing(figures, {"step_ms": job.summary.step_us / 1e3}, {"names": lane_names(job.lanes)})


def _times(step: JobStep) -> BarChart:
    """The parts of the job's step on each rank."""
    rows = [
        (
            stage_label(stage),
            {name: float(getattr(stage, field)) for name, (field, _) in _BARS.items()},
            format_us(step.step_us - stage.bubble_us),
            "of work",
        )
        for stage in step.stages
    ]
    return time_bars(rows, {name: style for name, (_, style) in _BARS.items()}, step.step_us)


def _stage_columns(step: JobStep) -> list[SheetColumn]:
    stages, whole = step.stages, step.step_us or 1.0
    times = {name: [float(getattr(stage, part)) for stage in stages] for name, (part, _) in _BARS.items()}
    known = [SheetColumn("stage", ["" if stage.stage is None else str(stage.stage) for stage in stages], rank=1)]
    return [
        SheetColumn("rank", [str(stage.rank) for stage in stages]),
        *(known if any(stage.stage is not None for stage in stages) else []),
        bytes_column("peak reserved", [stage.peak_reserved_bytes for stage in stages]),
        bytes_column("peak allocated", [stage.peak_allocated_bytes for stage in stages], rank=2),
        *(
            us_column(name, column, rank=int(name == "other"))
            for name, column in times.items()
            if name != "other" or any(value_us > whole / 1000 for value_us in column)
        ),
        SheetColumn("bubble's share", [share_text(stage.bubble_us / whole) for stage in stages]),
        us_column("done after", [stage.own_us for stage in stages], rank=1),
    ]


def _what_if_sheets(job: JobTime, changed: Mapping[str, JobTime]) -> list[Sheet]:
    """A table of all changes, each on its own, with the change of each part of the stage that sets the pace."""
    if not changed:
        return []
    before, steps = job.summary, {text: changed_job.summary for text, changed_job in changed.items()}
    columns = [
        SheetColumn("what if", list(steps), is_text=True),
        SheetColumn("step", [format_us(step.step_us) for step in steps.values()]),
        SheetColumn("change", [format_us_change(step.step_us - before.step_us) for step in steps.values()]),
        SheetColumn("%", [format_relative(step.step_us - before.step_us, before.step_us) for step in steps.values()]),
        SheetColumn("rank that sets the pace", [str(step.slowest_rank) for step in steps.values()], rank=1),
    ]
    remarks = [f"the step as it is: {format_us(before.step_us)}"]
    remarks += [said for text, step in steps.items() if (said := _parts(text, before, step))]
    return [Sheet("What if, estimated, each on its own", columns, remarks)]


def _what_if_objects(job: JobTime, changed: Mapping[str, JobTime]) -> list[dict[str, object]]:
    return [
        {
            "what_if": text,
            "step_us": changed_job.summary.step_us,
            "change_us": changed_job.summary.step_us - job.summary.step_us,
            "slowest_rank": changed_job.summary.slowest_rank,
            "stages": to_plain(changed_job.summary.stages),
        }
        for text, changed_job in changed.items()
    ]


def _parts(text: str, before: JobStep, after: JobStep) -> str:
    stages = [stage for step in (before, after) for stage in step.stages if stage.rank == before.slowest_rank]
    changes = {name: getattr(stages[1], part) - getattr(stages[0], part) for name, (part, _) in _BARS.items()}
    changed = [
        f"{name} {format_us_change(change)}"
        for name, change in changes.items()
        if abs(change) > before.step_us / 10_000
    ]
    return f"{text}, rank {before.slowest_rank}: {', '.join(changed)}" if changed else ""


def _notes(runs: JobRuns | None, rows: Sequence[RankRow]) -> Iterator[str]:
    yield from (f"Rank {row.rank} did not start: {row.exit.message}" for row in rows if row.run_directory is None)
    if runs is None:
        return
    yield from (note.text for note in runs.finding_notes)
    if runs.job is not None:
        yield from (note.text for note in runs.job.summary.notes)
    elif runs.why_no_step:
        yield f"There is no step of the whole job: {runs.why_no_step}."
    for run in runs.runs:
        if not run.summary.exit.ended_well:
            yield f"Rank {run.summary.rank} ended early: {ending(run.summary, run.manifest.cwd)}."
        if num := len(note_texts(run.summary.notes, run.manifest.cwd)):
            yield f"Rank {run.summary.rank} has {num} {'note' if num == 1 else 'notes'} on its own page."


def _job_facts(runs: JobRuns) -> Facts:
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
    facts = [Fact(name, text, is_code=is_code) for name, text, is_code in rows if text]
    return Facts(facts, "This job", label="Job", is_detail=True)
