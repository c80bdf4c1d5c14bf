"""The step of a whole job as text, Markdown and an object: a row for each rank that stands for a stage."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rich.console import Console

from fakedist.report.text.job_what_if import job_what_if_objects, job_what_if_sheets
from fakedist.report.text.markdown import escaped, markdown_table
from fakedist.report.text.run_markdown import sheet_markdown
from fakedist.report.text.sheet import (
    SheetColumn,
    print_facts,
    print_figures,
    print_heading,
    print_remark,
    print_table,
)
from fakedist.report.text.terminal import print_sheets
from fakedist.report.text.wording import job_command
from fakedist.results.job_time import JobTime
from fakedist.run.job_time import JobStep
from fakedist.run.notes import share_text
from fakedist.run.plain import to_plain
from fakedist.units import format_bytes, format_us

_UNCHANGED: Mapping[str, JobTime] = MappingProxyType({})
TITLE = "Step of the job, estimated"
TABLE_TITLE = "Ranks of {world_size:,}: memory measured, times estimated"


def render_job(job: JobTime, console: Console, changed: Mapping[str, JobTime] = _UNCHANGED) -> None:
    """Print the job's step and a table with a row for each rank.

    Args:
        job: The job's step.
        console: Where to print.
        changed: The step with a what-if, by the what-if.
    """
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
    """What ``--json`` prints: the attributes of :class:`fakedist.run.job_time.JobStep`, and what-ifs if any."""
    found = to_plain(job.summary)
    assert isinstance(found, dict)
    return found | ({"what_ifs": job_what_if_objects(job, changed)} if changed else {})


def table_title(step: JobStep) -> str:
    """The title of the table of ranks."""
    return TABLE_TITLE.format(world_size=step.world_size)


def job_facts(job: JobTime) -> list[tuple[str, str]]:
    """What was priced, for what."""
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
        SheetColumn("peak reserved", [format_bytes(stage.peak_reserved_bytes) for stage in stages]),
        SheetColumn("peak allocated", [format_bytes(stage.peak_allocated_bytes) for stage in stages], rank=2),
        *(
            SheetColumn(name, [format_us(each) for each in column], rank=int(name == "other"))
            for name, column in times.items()
            if name != "other" or any(each > whole / 1000 for each in column)
        ),
        SheetColumn("bubble's share", [share_text(stage.bubble_us / whole) for stage in stages]),
        SheetColumn("done after", [format_us(stage.own_us) for stage in stages], rank=1),
    ]


def job_remarks(step: JobStep) -> list[str]:
    """What the table shows, and what limits what it means."""
    by_rank = {stage.rank: stage for stage in step.stages}
    slowest, memory = by_rank[step.slowest_rank], by_rank[step.memory_rank]
    found = []
    if len(by_rank) > 1:
        working = format_us(step.step_us - slowest.bubble_us)
        found.append(f"rank {slowest.rank} sets the pace: it waits least for the others, and works {working}")
        room = "" if not memory.capacity_bytes else f" of {format_bytes(memory.capacity_bytes)}"
        fits = "" if memory.fits else ", which does not fit"
        found.append(
            f"rank {memory.rank} binds memory: {format_bytes(memory.peak_reserved_bytes)} reserved{room}{fits}"
        )
    if step.throughput.tokens_from and step.throughput.tokens_from != "given":
        found.append(f"tokens: {step.throughput.tokens_from}")
    return found + [note.text for note in step.notes]
