"""A run as Markdown, short enough for a comment on a pull request."""

from __future__ import annotations

from fakedist.report.text.facts import run_title
from fakedist.report.text.markdown import escaped, markdown_table
from fakedist.report.text.memory_sheets import run_sheets
from fakedist.report.text.outside_sheet import OUTSIDE_TITLE, communicator_sheet, outside_figures
from fakedist.report.text.sheet import Sheet
from fakedist.report.text.time_sheets import time_sheets
from fakedist.report.text.time_wording import accuracy_text, source_word, time_figures
from fakedist.report.text.wording import advice_text, ending, note_texts, peaks_text, top_advice, verdict
from fakedist.results.run import Run
from fakedist.run.step_time import KernelSource, StepTime
from fakedist.run.summary import Advice, Outside, Summary
from fakedist.units import format_bytes

#: GitHub refuses comments of more than 65,536 characters. The rest leaves a bot room for text of its own.
MAX_CHARACTERS = 60_000
_MAX_ROWS = 200
_OPEN = ("By category at the peak",)  # what a reader sees without opening anything


def run_markdown(run: Run, *, all_layers: bool = False) -> str:
    """The verdict, and every table collapsed under its title.

    Args:
        run: The run.
        all_layers: Whether repeated layers stay apart and small ones are shown.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    summary = run.summary
    lines = _verdict(run, summary)
    pieces = ["\n".join(lines)]
    pieces += ["\n".join(sheet_markdown(sheet)) for sheet in run_sheets(run, all_layers=all_layers)]
    if summary.estimated_outside:
        pieces.append("\n".join(_outside(summary.estimated_outside)))
    if summary.timed:
        pieces += time_markdown(run, *summary.timed, all_layers=all_layers)
    if summary.advice:
        pieces.append("\n".join(["**What would help**, estimated, each on its own", "", *map(_advice, summary.advice)]))
    if notes := note_texts(summary.notes, run.manifest.cwd):
        pieces.append("\n".join(["**Notes**", "", *(f"- {escaped(note)}" for note in notes)]))
    text = ""
    for number, piece in enumerate(pieces):
        if len(text) + len(piece) > MAX_CHARACTERS:
            return f"{text}{len(pieces) - number} more parts of the report did not fit here.\n"
        text += piece + "\n\n"
    return text.rstrip() + "\n"


def _verdict(run: Run, summary: Summary) -> list[str]:
    found = verdict(summary, run.manifest.cwd)
    says = f"**{found.word}**{escaped(found.more)}" if found else "allocated nothing on the GPU"
    if run.memory is None:
        return [f"### fakedist: {escaped(run_title(run)[:300])}", ""]
    if run.by_category is None:
        return [f"### fakedist: {escaped(run_title(run)[:300])}", "", f"Peak, measured: {peaks_text(summary)}."]
    rank = f"rank {summary.rank:,} of {summary.world_size:,}"
    lines = [f"### fakedist: {escaped(run_title(run)[:300])}", ""]
    lines.append(f"{rank} {says}. Peak, measured: {peaks_text(summary)}")
    if summary.capacity_bytes:
        lines[-1] += f" of {format_bytes(summary.capacity_bytes)}"
    ended = escaped(ending(summary, run.manifest.cwd)[:300])
    lines[-1] += f" ({summary.peak_phase} of step {summary.peak_step}; {ended})."
    if advice := top_advice(summary, run.manifest.cwd):
        lines += ["", f"{escaped(advice)}."]
    return lines


def time_markdown(run: Run, time: StepTime, source: KernelSource, *, all_layers: bool) -> list[str]:
    """The step's time, and its tables, each collapsed under its title.

    Args:
        run: The run.
        time: Where the step's time goes.
        source: Where its kernels come from.
        all_layers: Whether repeated layers stay apart and small ones are shown.
    """
    sheets = time_sheets(run, all_layers=all_layers)
    return ["\n".join(_time(time, source)), *("\n".join(sheet_markdown(sheet)) for sheet in sheets)]


def _time(time: StepTime, source: KernelSource) -> list[str]:
    lines = [f"**Time of step {source.step}**, {source_word(source)}", ""]
    lines += [
        f"- {name}: **{figure}**{', ' if more else ''}{escaped(more)}" for name, figure, more in time_figures(time)
    ]
    texts = [*(note.text for note in source.notes), accuracy_text(source)]
    return [*lines, *(f"- {escaped(text)}" for text in texts if text)]


def _outside(outside: Outside) -> list[str]:
    """Memory outside the caching allocator, with the communicators collapsed."""
    rows = [
        f"- {name}: **{escaped(figure)}**" + (f" ({escaped(more)})" if more else "")
        for name, figure, more in outside_figures(outside)
    ]
    sheet = communicator_sheet(outside)
    return [f"**{OUTSIDE_TITLE}**", "", *rows, *(["", *sheet_markdown(sheet)] if sheet else [])]


def sheet_markdown(sheet: Sheet) -> list[str]:
    """The lines of a table with its remarks, collapsed under its title."""
    rows = len(sheet.columns[0].cells)
    table = markdown_table(sheet.columns)[: _MAX_ROWS + 2]
    remarks = [*sheet.remarks]
    if rows > _MAX_ROWS:
        remarks.append(f"{rows - _MAX_ROWS} more rows are in the run")
    below = [line for remark in remarks for line in ("", f"_{escaped(remark)}_")]
    if sheet.title in _OPEN:
        return [f"**{sheet.title}**", "", *table, *below]
    return ["<details>", f"<summary>{sheet.title}</summary>", "", *table, *below, "", "</details>"]


def _advice(piece: Advice) -> str:
    told = advice_text(piece)
    return f"- **{told['gives']}** {told['of']}: {escaped(told['title'])} ({told['rule']}). {escaped(told['text'])}"
