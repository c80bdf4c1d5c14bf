"""Several ranks of a job as text, Markdown and an object: their memory, the job's step, and its what-ifs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.text import Text

from fakedist.analysis.alike_ranks import AlikeRanks
from fakedist.rank_list import format_rank_list
from fakedist.report.compare.comparison import format_relative, format_us_change
from fakedist.report.content.report_blocks import Sheet, SheetColumn, bytes_column, us_column
from fakedist.report.render.markdown import escaped, markdown_table, sheet_markdown
from fakedist.report.render.terminal import (
    print_facts,
    print_figures,
    print_heading,
    print_remark,
    print_sheets,
    print_table,
)
from fakedist.report.text import host_memory_sheets
from fakedist.report.text.run_report import summary_object
from fakedist.report.text.wording import MFU_BASIS, job_command
from fakedist.results.job_time import JobTime
from fakedist.results.opening import open_run_directory
from fakedist.results.rank_kinds import JobKinds
from fakedist.results.run import Run
from fakedist.rundir.job_time import JobStep, StageTime
from fakedist.rundir.notes import share_text
from fakedist.rundir.outcome import Ending
from fakedist.rundir.plain import to_plain
from fakedist.units import format_bytes, format_us


@dataclass(frozen=True)
class RankRow:
    """One rank that has run. Its seconds ``wall_s`` include recording and tables; None if they are not known."""

    rank: int
    run_directory: Path | None
    exit: Ending
    wall_s: float | None = None


def ranks_sheet(rows: Sequence[RankRow], world_size: int) -> Sheet:
    """A table with a row for each rank, and the messages of those that did not end by themselves."""
    runs = [None if row.run_directory is None else open_run_directory(row.run_directory) for row in rows]
    endings = [row.exit if run is None else run.summary.exit for row, run in zip(rows, runs, strict=True)]
    columns = [
        SheetColumn("rank", [str(row.rank) for row in rows]),
        SheetColumn("outcome", [ending.outcome for ending in endings]),
        SheetColumn("peak allocated", ["-" if run is None else format_bytes(run.peak_allocated_bytes) for run in runs]),
        SheetColumn("reserved", ["-" if run is None else format_bytes(run.peak_reserved_bytes) for run in runs]),
        *_wall(rows),
        SheetColumn("run", [_shown(row.run_directory) for row in rows], is_text=True, rank=2),
    ]
    remarks = [
        f"rank {row.rank}: {ending.message}" for row, ending in zip(rows, endings, strict=True) if ending.message
    ]
    remarks += host_memory_sheets.node_remarks(run for run in runs if run is not None)
    return Sheet(f"Ranks of {world_size:,}, memory measured", columns, remarks)


def kinds_sheet(found: JobKinds, runs: Sequence[Run]) -> Sheet:
    """A table with a row for each kind of rank, those that reserve most first, and how they were checked."""
    by_rank = {run.summary.rank: run for run in runs}
    ran = {kind.ranks: [by_rank[rank] for rank in kind.ran if rank in by_rank] for kind in found.kinds}

    def most(kind: AlikeRanks, name: str) -> int:
        return max((getattr(run, name) for run in ran[kind.ranks]), default=0)

    kinds = sorted(found.kinds, key=lambda kind: (-most(kind, "peak_reserved_bytes"), kind.ranks))
    stages = ["" if kind.stage is None else str(kind.stage) for kind in kinds]
    places = [", ".join(kind.where) for kind in kinds]
    columns = [
        SheetColumn("ranks", [format_rank_list(kind.ranks) for kind in kinds], is_text=True),
        *([SheetColumn("stage", stages, rank=1)] if any(stages) else []),
        *([SheetColumn("where", places, is_text=True, rank=2)] if any(places) else []),
        SheetColumn("number", [f"{len(kind.ranks):,}" for kind in kinds], rank=1),
        SheetColumn("ran", [format_rank_list(kind.ran) or "none" for kind in kinds], is_text=True, rank=1),
        bytes_column("peak reserved", [most(kind, "peak_reserved_bytes") for kind in kinds]),
        bytes_column("peak allocated", [most(kind, "peak_allocated_bytes") for kind in kinds]),
        SheetColumn("fits", [_fitting(ran[kind.ranks]) for kind in kinds], is_text=True),
        SheetColumn("alike", ["checked" if kind.is_checked else "assumed" for kind in kinds], is_text=True, rank=1),
    ]
    return Sheet("Kinds of ranks, memory measured", columns, _kind_remarks(kinds, ran))


def _fitting(runs: Sequence[Run]) -> str:
    return "" if not runs else "yes" if all(run.fits for run in runs) else "no"


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


def groups_sheet(found: JobKinds) -> Sheet:
    """A table of the job's process groups: how many there are of each description and size."""
    rows = [(description, size, number) for (description, size), number in found.groups.sizes.items()]
    columns = [
        SheetColumn("group", [description for description, _, _ in rows], is_text=True),
        SheetColumn("ranks in one", [f"{size:,}" for _, size, _ in rows], values=[size for _, size, _ in rows]),
        SheetColumn("number", [f"{number:,}" for _, _, number in rows], values=[number for _, _, number in rows]),
    ]
    return Sheet("Process groups of the job", columns)


def kind_objects(found: JobKinds) -> list[dict[str, object]]:
    """The kinds for ``--json``."""
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


def render_ranks(rows: Sequence[RankRow], world_size: int, console: Console) -> None:
    """Print a table with a row for each rank."""
    print_sheets(console, [ranks_sheet(rows, world_size)])
    if any(row.run_directory for row in rows):
        console.print(Text("  fakedist report RUN shows each", style="dim"), soft_wrap=True)


def ranks_markdown(rows: Sequence[RankRow], world_size: int, job: JobTime | None) -> str:
    """The same as Markdown, below the job's step if that is known."""
    sheet = ranks_sheet(rows, world_size)
    lines = [f"**{sheet.title}**", "", *markdown_table(sheet.columns), ""]
    lines += [f"- {escaped(remark)}" for remark in sheet.remarks]
    return ("" if job is None else job_markdown(job) + "\n") + "\n".join(lines).rstrip() + "\n"


def _wall(rows: Sequence[RankRow]) -> list[SheetColumn]:
    known = [row.wall_s for row in rows if row.wall_s is not None]
    return [SheetColumn("wall", [f"{wall_s:.1f} s" for wall_s in known], rank=1)] if len(known) == len(rows) else []


def ranks_object(rows: Sequence[RankRow], world_size: int, exit_code: int) -> dict[str, object]:
    """The object of ``--json`` for several ranks. ``ranks`` has each rank's own, with ``wall_s``."""
    return {"world_size": world_size, "exit_code": exit_code, "ranks": [rank_object(row) for row in rows]}


def rank_object(row: RankRow) -> dict[str, object]:
    """One rank's object. For a rank that could not start, it has only how it ended."""
    if row.run_directory is None:
        return {"rank": row.rank, "exit": to_plain(row.exit), "wall_s": row.wall_s}
    return {**summary_object(row.run_directory), **({} if row.wall_s is None else {"wall_s": row.wall_s})}


def _shown(path: Path | None) -> str:
    if path is None:
        return "-"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


#: The parts of a stage's step, and what they are called.
_PARTS = {
    "compute_us": "computing",
    "communication_us": "exposed communication",
    "bubble_us": "bubble",
    "host_us": "host",
    "wait_us": "other",
}


def job_what_if_sheets(job: JobTime, changed: Mapping[str, JobTime]) -> list[Sheet]:
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


def job_what_if_objects(job: JobTime, changed: Mapping[str, JobTime]) -> list[dict[str, object]]:
    """The same as plain objects: the step, its change, and the stages with it."""
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
    stages = [_stage(step, before.slowest_rank) for step in (before, after)]
    changes = {name: getattr(stages[1], part) - getattr(stages[0], part) for part, name in _PARTS.items()}
    changed = [
        f"{name} {format_us_change(change)}"
        for name, change in changes.items()
        if abs(change) > before.step_us / 10_000
    ]
    return f"{text}, rank {before.slowest_rank}: {', '.join(changed)}" if changed else ""


def _stage(step: JobStep, rank: int) -> StageTime:
    return next(stage for stage in step.stages if stage.rank == rank)


_UNCHANGED: Mapping[str, JobTime] = MappingProxyType({})
TITLE = "Step of the job, estimated"
TABLE_TITLE = "Ranks of {world_size:,}: memory measured, times estimated"


def render_job(job: JobTime, console: Console, changed: Mapping[str, JobTime] = _UNCHANGED) -> None:
    """Print the job's step and a table with a row for each rank."""
    print_facts(console, job_facts(job))
    print_heading(console, TITLE)
    print_figures(console, job_figures(job.summary), is_right=True)
    print_table(console, table_title(job.summary), job_columns(job.summary))
    for text in job_remarks(job.summary):
        print_remark(console, text)
    print_sheets(console, job_what_if_sheets(job, changed))


def job_markdown(job: JobTime, changed: Mapping[str, JobTime] = _UNCHANGED) -> str:
    """The same as Markdown."""
    (_, title), *facts = job_facts(job)
    lines = [f"### fakedist: {escaped(title[:300])}", "", *(f"- {name}: {escaped(value)}" for name, value in facts), ""]
    lines += [f"**{TITLE}**", ""]
    for name, figure, more in job_figures(job.summary):
        lines.append(f"- {name}: {figure}" + (f" ({escaped(more)})" if more else ""))
    lines += ["", f"**{table_title(job.summary)}**", "", *markdown_table(job_columns(job.summary)), ""]
    lines += [f"- {escaped(text)}" for text in job_remarks(job.summary)]
    for sheet in job_what_if_sheets(job, changed):
        lines += ["", *sheet_markdown(sheet)]
    return "\n".join(lines) + "\n"


def job_object(job: JobTime, changed: Mapping[str, JobTime] = _UNCHANGED) -> dict[str, object]:
    """The object of ``--json``: the attributes of :class:`fakedist.rundir.job_time.JobStep`, and what-ifs if any."""
    plain = to_plain(job.summary)
    assert isinstance(plain, dict)
    return plain | ({"what_ifs": job_what_if_objects(job, changed)} if changed else {})


def table_title(step: JobStep) -> str:
    """The title of the table of ranks."""
    return TABLE_TITLE.format(world_size=step.world_size)


def job_facts(job: JobTime) -> list[tuple[str, str]]:
    """The job, the ranks that were priced, and the GPU."""
    made_by = job.runs[0].manifest.job
    assert made_by is not None
    return [
        ("job", job_command(made_by)),
        ("ranks", f"{', '.join(str(stage.rank) for stage in job.summary.stages)} of {job.summary.world_size:,}"),
        ("GPU", f"{job.summary.gpu}, fabric {job.summary.fabric}"),
    ]


def job_figures(step: JobStep) -> list[tuple[str, str, str]]:
    """The job's figures: name, figure, what is said about it."""
    known = step.step_low_us is not None and step.step_high_us is not None
    interval = f"{format_us(step.step_low_us or 0.0)} to {format_us(step.step_high_us or 0.0)}" if known else ""
    rows = [("step", format_us(step.step_us), f"90 % interval {interval}" if interval else "its interval is not known")]
    done = step.throughput
    if done.tokens_per_s_per_gpu is not None:
        whole = (
            f"{done.tokens_per_s_per_gpu * step.world_size:,.0f} of all GPUs, {done.tokens_per_step:,} tokens a step"
        )
        rows.append(("tokens/s per GPU", f"{done.tokens_per_s_per_gpu:,.0f}", whole))
    elif done.samples_per_s_per_gpu is not None:
        whole = (
            f"{done.samples_per_s_per_gpu * step.world_size:,.0f} of all GPUs, {done.samples_per_step:,} samples a step"
        )
        rows.append(("samples/s per GPU", f"{done.samples_per_s_per_gpu:,.0f}", whole))
    if done.mfu is not None:
        rows.append(("MFU", f"{done.mfu:.1%}", MFU_BASIS))
    for rate in done.rates:
        mfu = "" if rate.mfu is None else f"MFU {rate.mfu:.1%}, "
        how = "attention by half of the keys" if rate.convention == "Megatron-LM" else "attention by all keys"
        rows.append(("TFLOP/s per GPU", f"{rate.tflops_per_gpu:,.1f}", f"{mfu}as {rate.convention} counts: {how}"))
    return rows


def job_columns(step: JobStep) -> list[SheetColumn]:
    """The table of ranks."""
    stages, whole = step.stages, step.step_us or 1.0
    times = {
        "computes": [stage.compute_us for stage in stages],
        "exposed communication": [stage.communication_us for stage in stages],
        "bubble": [stage.bubble_us for stage in stages],
        "host": [stage.host_us for stage in stages],
        "other": [stage.wait_us for stage in stages],
    }
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


def job_remarks(step: JobStep) -> list[str]:
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
    return remarks + [note.text for note in step.notes]
