"""A run as tables on a terminal, as Markdown for a review, and as the object that ``--json`` prints.

A directory that is not a run directory, or is damaged, raises RunDirectoryError.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fakedist.analysis.layer_table import unfolded
from fakedist.report.text.memory_sheets import (
    OUTSIDE_TITLE,
    communicator_sheet,
    layer_sheet,
    line_sheet,
    most_layers,
    outside_figures,
    run_sheets,
)
from fakedist.report.text.sheet import (
    escaped,
    print_facts,
    print_figures,
    print_heading,
    print_items,
    print_long,
    print_sheets,
    print_words,
    sheet_markdown,
)
from fakedist.report.text.time_sheets import print_time, time_markdown, time_sheets
from fakedist.report.text.wording import (
    advice_text,
    collector_text,
    ending,
    gives_alone,
    note_texts,
    peak_moment,
    peaks_text,
    refusal_stack,
    relative_time,
    remedy_text,
    run_facts,
    run_title,
    source_word,
    step_verdict,
    time_figures,
    timed_step_name,
    top_advice,
    verdict,
)
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.results.summing_up import layer_memory
from fakedist.rundir.notes import counted
from fakedist.rundir.plain import to_plain
from fakedist.rundir.summary import Advice, Outside, Summary
from fakedist.units import format_bytes


def summary_object(run_directory: Path, *, all_layers: bool = False) -> dict[str, object]:
    """The run's figures as one object: keys of :class:`fakedist.rundir.summary.Summary`, and ``run_directory``."""
    run = open_run(run_directory)
    summary = run.summary
    if all_layers:
        layers = run.table("layers")
        summary = replace(summary, layers=layer_memory(layers, unfolded(layers)))
    return {**to_plain(summary), "run_directory": str(run.path)}


#: Parts of the report that can be printed alone.
SECTIONS = ("memory", "time", "advice", "notes")
_NUM_LAYERS, _NUM_LINES, _NUM_GAINS, _NUM_ADVICE = 5, 5, 3, 3


def render(run_directory: Path, *, all_layers: bool, console: Console, section: str = "") -> None:
    """Print every table of a run, or those of one of ``SECTIONS``."""
    run = open_run(run_directory)
    summary = run.summary
    wanted = (section,) if section else SECTIONS
    print_facts(console, run_facts(run))
    if "memory" in wanted:
        if run.memory is not None:
            _peak(console, summary, run.manifest.cwd)
        print_sheets(console, run_sheets(run, all_layers=all_layers))
        if summary.estimated_outside:
            _print_outside(console, summary.estimated_outside)
    if summary.timed and "time" in wanted:
        print_time(console, *summary.timed, timed_step_name(summary, summary.timed[1].step))
        print_sheets(console, time_sheets(run, all_layers=all_layers))
    if summary.advice and "advice" in wanted:
        _print_advice(console, summary)
    if "notes" in wanted:
        _notes(console, note_texts(summary.notes, run.manifest.cwd))


def render_short(run_directory: Path, console: Console) -> None:
    """Print the verdict, the limits, five layers, five lines and the advice of a run, and how to see the rest."""
    run = open_run(run_directory).keeping_tables()
    summary = run.summary
    print_facts(console, run_facts(run))
    if run.memory is not None:
        _peak(console, summary, run.manifest.cwd, with_advice=False)
    if summary.peak_allocated_bytes and run.by_category is not None:
        layers = run.table("layers")
        print_sheets(console, [most_layers(layer_sheet(layers, summary, False), layers, _NUM_LAYERS)])
    if sheet := line_sheet(run, _NUM_LINES):
        print_sheets(console, [sheet])
    if summary.timed:
        time, source = summary.timed
        print_heading(console, f"Time of {timed_step_name(summary, source.step)}, {source_word(source)}")
        kept = [row for row in time_figures(time) if row[0] in ("step", "MFU", "tokens/s")]
        figures = [(name, figure, more.partition(":")[0]) for name, figure, more in kept]
        print_figures(console, figures, is_right=True)
    _print_outlook(console, summary)
    if not summary.peak_allocated_bytes:  # the notes say why
        _notes(console, note_texts(summary.notes, run.manifest.cwd))
    rest = f"fakedist report {shlex.quote(str(run_directory))}"
    notes = counted(len(summary.notes), "note")
    console.print()
    print_long(console, Text(f"{notes} and every table: {rest} --full"))
    print_words(console, Text(f"one part of them: --section {'|'.join(SECTIONS)}"), 0)


def _print_outlook(console: Console, summary: Summary) -> None:
    """One line for each change that would help most, of memory and of time."""
    pieces = [advice_text(advice, summary) for advice in summary.advice if gives_alone(advice)][:_NUM_ADVICE]
    lines = [
        f"{piece['gives']} {piece['of']}: {piece['title']}" + (f"; {piece['then']}" if piece["then"] else "")
        for piece in pieces
    ]
    if summary.timed:
        time = summary.timed[0]
        shorter = [gain for gain in time.gains if gain.step_us < time.step_us * (1 - _LEAST_GAIN)]
        lines += [f"step {relative_time(gain.step_us, time.step_us)}: {gain.title}" for gain in shorter[:_NUM_GAINS]]
        lines += filter(None, [collector_text(time)])
    if lines:
        print_heading(console, "What would help, estimated, each on its own")
    for line in lines:
        print_words(console, Text(line), 2)


#: A shorter step than this is not worth a line.
_LEAST_GAIN = 0.001


def _peak(console: Console, summary: Summary, cwd: str, *, with_advice: bool = True) -> None:
    allocated, reserved = summary.peak_allocated_bytes, summary.peak_reserved_bytes
    capacity = summary.capacity_bytes
    print_heading(console, "Peak memory, measured")
    rows = [("allocated", format_bytes(allocated), peak_moment(summary)), ("reserved", format_bytes(reserved), "")]
    if capacity:
        rows.append(("capacity", format_bytes(capacity), f"{reserved / capacity:.1%} of it reserved at the peak"))
    print_figures(console, rows, is_right=True)
    if fit := verdict(summary, cwd):
        colour = "bold red" if not fit.fits else "bold green" if fit.is_sure else "bold yellow"
        print_words(console, Text(fit.word, colour) + Text(fit.more, "" if fit.fits else colour), 2)
    if stack := refusal_stack(summary, cwd):
        print_words(console, Text(f"called by {', '.join(stack)}", style="dim"), 4)
    if remedy := remedy_text(summary):
        print_words(console, Text(f"what would make it fit, estimated: {remedy}"), 2)
    elif with_advice and (advice := top_advice(summary, cwd)):
        print_words(console, Text(advice), 2)
    if limit := step_verdict(summary):
        print_words(console, Text(limit), 2)


def _print_outside(console: Console, outside: Outside) -> None:
    print_heading(console, OUTSIDE_TITLE)
    print_figures(console, outside_figures(outside))
    if sheet := communicator_sheet(outside):
        print_sheets(console, [sheet])


def _print_advice(console: Console, summary: Summary) -> None:
    print_heading(console, "What would help, estimated, each on its own")
    for piece in (advice_text(advice, summary) for advice in summary.advice):
        print_words(console, Text(f"{piece['gives']} {piece['of']}: {piece['title']} (rule {piece['rule']})"), 2)
        if piece["then"]:
            print_words(console, Text(piece["then"]), 4)
        print_words(console, Text(piece["text"], style="dim"), 4)


def _notes(console: Console, texts: list[str]) -> None:
    if not texts:
        return
    print_heading(console, "Notes")
    print_items(console, texts)


#: GitHub refuses comments of more than 65,536 characters. The rest leaves a bot room for text of its own.
MAX_CHARACTERS = 60_000


def run_markdown(run: Run, *, all_layers: bool = False) -> str:
    """The verdict, and every table collapsed under its title."""
    summary = run.summary
    lines = _verdict(run, summary)
    pieces = ["\n".join(lines)]
    pieces += ["\n".join(sheet_markdown(sheet)) for sheet in run_sheets(run, all_layers=all_layers)]
    if summary.estimated_outside:
        pieces.append("\n".join(_outside(summary.estimated_outside)))
    if summary.timed:
        pieces += time_markdown(run, *summary.timed, all_layers=all_layers)
    if summary.advice:
        rows = [_advice(piece, summary) for piece in summary.advice]
        pieces.append("\n".join(["**What would help**, estimated, each on its own", "", *rows]))
    if notes := note_texts(summary.notes, run.manifest.cwd):
        pieces.append("\n".join(["**Notes**", "", *(f"- {escaped(note)}" for note in notes)]))
    text = ""
    for number, piece in enumerate(pieces):
        if len(text) + len(piece) > MAX_CHARACTERS:
            return f"{text}{len(pieces) - number} more parts of the report did not fit here.\n"
        text += piece + "\n\n"
    return text.rstrip() + "\n"


def _verdict(run: Run, summary: Summary) -> list[str]:
    fit = verdict(summary, run.manifest.cwd)
    says = (
        f"**{fit.word}**{' ' * fit.more.startswith(' ')}{escaped(fit.more)}" if fit else "allocated nothing on the GPU"
    )
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
    if remedy := remedy_text(summary):
        lines += ["", f"What would make it fit, estimated: {escaped(remedy)}."]
    elif advice := top_advice(summary, run.manifest.cwd):
        lines += ["", f"{escaped(advice)}."]
    if limit := step_verdict(summary):
        lines += ["", f"{escaped(limit[0].upper() + limit[1:])}."]
    return lines


def _outside(outside: Outside) -> list[str]:
    rows = [
        f"- {name}: **{escaped(figure)}**" + (f" ({escaped(more)})" if more else "")
        for name, figure, more in outside_figures(outside)
    ]
    sheet = communicator_sheet(outside)
    return [f"**{OUTSIDE_TITLE}**", "", *rows, *(["", *sheet_markdown(sheet)] if sheet else [])]


def _advice(piece: Advice, summary: Summary) -> str:
    texts = advice_text(piece, summary)
    then = f" {texts['then']}." if texts["then"] else ""
    title = f"**{texts['gives']}** {texts['of']}: {escaped(texts['title'])} ({texts['rule']})"
    return f"- {title}.{then} {escaped(texts['text'])}"
