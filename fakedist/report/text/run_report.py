"""A run as tables on a terminal, as Markdown for a review, and as the object that ``--json`` prints.

A directory that is not a run directory, or is damaged, raises RunDirectoryError.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from fakedist.analysis.layer_table import unfolded
from fakedist.report.content.report_blocks import first_rows
from fakedist.report.render.markdown import escaped, sheet_markdown
from fakedist.report.render.terminal import (
    FACT_WIDTH,
    cut,
    print_facts,
    print_figures,
    print_heading,
    print_items,
    print_long,
    print_sheets,
    print_short_table,
    print_words,
)
from fakedist.report.text import host_memory_sheets
from fakedist.report.text.memory_sheets import (
    OUTSIDE_TITLE,
    category_sheet,
    communicator_sheet,
    layer_sheet,
    line_sheet,
    most_layers,
    outside_figures,
    run_sheets,
)
from fakedist.report.text.time_sheets import (
    family_sheet,
    group_time_sheet,
    layer_time_sheet,
    path_sheet,
    print_limits,
    print_time,
    time_markdown,
    time_sheets,
    top_sheet,
)
from fakedist.report.text.trace_sheets import operation_sheet, process_sheet, step_sheet
from fakedist.report.text.wording import (
    FINDINGS_TITLE,
    advice_line,
    advice_text,
    collector_text,
    ending,
    finding_text,
    gives_alone,
    note_texts,
    num_warnings,
    peak_moment,
    peaks_text,
    remedy_text,
    run_facts,
    run_title,
    short_facts,
    short_time_figures,
    source_word,
    time_figures,
    top_advice,
)
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.results.summing_up import layer_memory
from fakedist.results.verdict import (
    has_room,
    limit_text,
    refusal_stack,
    relative_time,
    step_verdict,
    timed_step_name,
    verdict,
)
from fakedist.rundir.finding import Finding
from fakedist.rundir.host_memory import HostMemory
from fakedist.rundir.notes import counted
from fakedist.rundir.plain import to_plain
from fakedist.rundir.step_time import KernelSource, StepTime
from fakedist.rundir.summary import Advice, Outside, Summary
from fakedist.units import format_bytes


def summary_object(run_directory: Path | Run, *, all_layers: bool = False) -> dict[str, object]:
    """The run's figures as one object: keys of :class:`fakedist.rundir.summary.Summary`, and ``run_directory``."""
    run = open_run(run_directory)
    summary = run.summary
    if all_layers:
        layers = run.table("layers")
        summary = replace(summary, layers=layer_memory(layers, unfolded(layers)))
    summary = replace(summary, notes=[*summary.notes, *run.finding_notes])
    return {**to_plain(summary), "findings": to_plain(run.findings), "run_directory": str(run.path)}


#: Parts of the report that can be printed alone, as can the communication, which has a report of its own.
SECTIONS = ("memory", "time", "findings", "advice", "notes")
_NUM_STEPS, _NUM_TRACED = 5, 6
_NUM_LAYERS, _NUM_LINES, _NUM_GAINS, _NUM_ADVICE = 5, 5, 3, 3
_NUM_FINDINGS = 5


def render(run_directory: Path | Run, *, all_layers: bool, console: Console, section: str = "") -> None:
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
        if summary.host_memory:
            _print_host_memory(console, summary.host_memory, run.manifest.cwd)
    if summary.timed and "time" in wanted:
        print_time(console, *summary.timed, timed_step_name(summary, summary.timed[1].step))
        print_sheets(console, time_sheets(run, all_layers=all_layers))
    if run.findings and "findings" in wanted:
        _print_findings(console, run)
    elif section == "findings":
        print_items(console, ["no rule of docs/findings.md saw a fault in this run"])
    if summary.advice and "advice" in wanted:
        _print_advice(console, summary)
    if "notes" in wanted:
        _notes(console, note_texts([*summary.notes, *run.finding_notes], run.manifest.cwd))


def render_short(run_directory: Path | Run, console: Console) -> None:
    """Print a screen of a run: its verdict, its limits, five layers, five lines and as much advice as has room.

    The gravest warning of figures that are made up or may be wrong follows. The last line says how to see the rest.
    """
    run = open_run(run_directory).keeping_tables()
    summary, cwd = run.summary, run.manifest.cwd
    with console.capture() as captured:
        _print_figures(console, run)
    console.file.write(captured.get())
    left = _SCREEN - sum(_num_rows(line, console.width) for line in captured.get().splitlines())
    left -= 2  # the last line, and an empty one
    if not summary.peak_allocated_bytes:  # the notes say why
        _notes(console, note_texts(summary.notes, cwd))
    warnings = _warnings(summary, cwd) if summary.peak_allocated_bytes else []
    advice, gains = _advice_lines(summary, run.findings), _gain_lines(summary, run.findings)
    least = [*([] if summary.remedy else advice[:1]), *gains[:1]]
    room = left - sum(_num_folded(piece, console) for piece in least) - 2
    num_rows = _print_findings(console, run, room - 2)
    left -= num_rows
    room -= num_rows
    shown = warnings[: min(max(room, 1), _NUM_WARNINGS)]
    _print_outlook(console, advice, gains, least, left - len(shown), is_time_first=has_room(summary))
    console.print()
    for warning in shown:
        print_long(console, Text(cut(warning, console.width), style="yellow"))
    notes = f"{counted(len(summary.notes), 'note')} and " if summary.notes else ""
    if more := len(warnings) - len(shown):
        notes = f"{len(summary.notes)} notes, {more} more of them {'a warning' if more == 1 else 'warnings'}, and "
    given = run.path if isinstance(run_directory, Run) else run_directory
    rest = f"{notes}every table: fakedist report {shlex.quote(str(given))} --full"
    parts = f"; a part: --section {'|'.join(SECTIONS)}"
    print_long(console, Text(rest + (parts if len(rest + parts) <= console.width else "")))


#: Lines of a short report, which what it always has may exceed.
_SCREEN = 40
_NUM_WARNINGS = 1


def _num_rows(line: str, width: int) -> int:
    """The rows of a terminal that a printed line takes."""
    return max(-(-Text.from_ansi(line).cell_len // width), 1)


def _print_figures(console: Console, run: Run) -> None:
    """Print the verdict, the limits, the layers and the lines of a short report."""
    summary, cwd = run.summary, run.manifest.cwd
    job, *facts = short_facts(run)
    print_facts(console, [(job[0], cut(job[1], console.width - FACT_WIDTH)), *facts])
    if run.memory is not None:
        _peak(console, summary, cwd, is_short=True)
    if summary.timed:
        time, source = summary.timed
        print_heading(console, f"Time of {timed_step_name(summary, source.step)}, {source_word(source)}")
        is_imported = run.manifest.imported is not None
        figures = time_figures if is_imported else short_time_figures
        print_figures(console, figures(time, source), is_right=True)
        print_limits(console, time)
        if is_imported:  # another program's report
            print_items(console, [note.text for note in source.notes])
            _print_traced(console, run, time, source)
    if run.memory is not None and run.is_inferred and run.by_category is not None:
        print_short_table(console, replace(category_sheet(summary), title="category at the peak, inferred"))
    if summary.peak_allocated_bytes and run.by_category is not None and run.num_rows("layers") > 1:
        layers = run.table("layers")
        sheet = most_layers(layer_sheet(layers, summary, False), layers, _NUM_LAYERS)
        inferred = ", inferred" if run.is_inferred else ""
        print_short_table(console, replace(sheet, title=f"layer at the peak, with children{inferred}"))
    if sheet_of_lines := line_sheet(run, _NUM_LINES, has_inner=False):
        print_short_table(console, replace(sheet_of_lines, title="line at the peak"))


def _print_traced(console: Console, run: Run, time: StepTime, source: KernelSource) -> None:
    """Print what a tool traced of another program: its steps, and where one of them goes."""
    if len(source.processes) > 1:
        print_short_table(console, replace(process_sheet(source), title="process"))
    if source.steps:
        sheet = step_sheet(replace(source, steps=source.steps[-_NUM_STEPS:]))
        print_short_table(console, replace(sheet, title="step"))
    if time.by_group:
        print_short_table(console, replace(group_time_sheet(time, "measured"), title="collective"))
    if time.critical_path:
        sheet = replace(path_sheet(time, source.source), title="critical path", remarks=[])
        print_short_table(console, first_rows(sheet, _NUM_TRACED))
    print_short_table(console, replace(family_sheet(time, source.source), title="family of kernels"))
    times, layers = run.table("layer_times"), run.table("layers", ["name", "class_name", "parent"])
    sheet = layer_time_sheet(times, layers, time, source.source, all_layers=False)
    if len(sheet.columns[0].cells) > 1:
        print_short_table(console, first_rows(replace(sheet, title="layer, with children"), _NUM_TRACED))
    print_short_table(console, replace(operation_sheet(run, _NUM_TRACED), title="operation"))
    print_short_table(console, first_rows(replace(top_sheet(time, source.source), title="kernel"), _NUM_TRACED))


def _warnings(summary: Summary, cwd: str) -> list[str]:
    """The notes on figures that are made up or may be wrong, the gravest first."""
    return note_texts(summary.notes, cwd)[: num_warnings(summary.notes)]


def _print_outlook(
    console: Console, advice: list[str], gains: list[str], least: list[str], num_rows: int, *, is_time_first: bool
) -> None:
    """Print ``least`` of the changes of memory and time, and as many others as ``num_rows`` have room for."""
    shown, left = list(least), num_rows - 2 - sum(_num_folded(piece, console) for piece in least)  # a heading
    for piece in filter(None, (piece for pair in zip_longest(advice, gains) for piece in pair)):
        if piece not in least and (takes := _num_folded(piece, console)) <= left:
            shown.append(piece)
            left -= takes
    if shown:
        print_heading(console, "What would help, estimated, each on its own")
    for piece in [*gains, *advice] if is_time_first else [*advice, *gains]:
        if piece in shown:
            print_words(console, Text(piece), 2)


def _num_folded(piece: str, console: Console) -> int:
    """The rows of a change that :func:`print_words` prints."""
    return len(Text(piece).wrap(console, console.width - 2))


def _advice_lines(summary: Summary, findings: list[Finding]) -> list[str]:
    """One line for each change that lowers the peak most, and that neither the verdict nor a finding names."""
    remedied = summary.remedy.titles if summary.remedy else []
    explained = {finding.advice for finding in findings[:_NUM_FINDINGS]}
    kept = [
        piece
        for piece in summary.advice
        if gives_alone(piece) and [piece.title] != remedied and piece.rule not in explained
    ]
    return [advice_line(piece, summary) for piece in kept[:_NUM_ADVICE]]


def _gain_lines(summary: Summary, findings: list[Finding]) -> list[str]:
    """One line for each change that shortens the step most, and that neither the limit nor a finding names."""
    if not summary.timed:
        return []
    time = summary.timed[0]
    limit = limit_text(time)
    named = {finding.change for finding in findings[:_NUM_FINDINGS]}
    pieces = [
        (gain.step_us, f"step {relative_time(gain.step_us, time.step_us)}: {gain.title}")
        for gain in time.gains
        if gain.step_us < time.step_us * (1 - _LEAST_GAIN)
        and f"; {gain.title}: " not in limit
        and gain.title not in named
    ]
    if text := collector_text(time):
        pieces.append((time.step_us - time.collector_us, text.partition("; ")[0]))
    return [text for _, text in sorted(pieces)[:_NUM_GAINS]]


#: A shorter step than this is not worth a line.
_LEAST_GAIN = 0.001


#: What some notes say of the reserved peak.
_BOUNDS = {
    "streams_keep_least": ", at least (--gpu-lag full: at most)",
    # Of runs of earlier versions.
    "streams_keep_estimated": ", estimated (--gpu-lag none: at least; full: at most)",
    "streams_keep_most": ", at most (--gpu-lag none: at least)",
}


def _peak(console: Console, summary: Summary, cwd: str, *, is_short: bool = False) -> None:
    allocated, reserved = summary.peak_allocated_bytes, summary.peak_reserved_bytes
    capacity = summary.capacity_bytes
    print_heading(console, "Peak memory, measured")
    of = f"{reserved / capacity:.1%} of the GPU's {format_bytes(capacity)}" if capacity else ""
    if summary.asleep_bytes:
        of += f"; {format_bytes(summary.asleep_bytes)} of it without memory behind it (asleep)"
    of = "".join((of, *(text for note in summary.notes if (text := _BOUNDS.get(note.code)))))
    rows = [("allocated", format_bytes(allocated), peak_moment(summary)), ("reserved", format_bytes(reserved), of)]
    if is_short and summary.host_memory:
        rows += host_memory_sheets.short_figures(summary.host_memory.node)
    print_figures(console, rows, is_right=True)
    if fit := verdict(summary, cwd):
        colour = "bold red" if not fit.fits else "bold green" if fit.is_sure else "bold yellow"
        print_words(console, Text(fit.word, colour) + Text(fit.more, "" if fit.fits else colour), 2)
    if not is_short and (stack := refusal_stack(summary, cwd)):
        print_words(console, Text(f"called by {', '.join(stack)}", style="dim"), 4)
    if remedy := remedy_text(summary, is_short=is_short):
        print_words(console, Text(f"what would make it fit, estimated: {remedy}"), 2)
    if is_short:
        return
    for text in _outlook(summary, cwd):
        print_words(console, Text(text), 2)


def _print_outside(console: Console, outside: Outside) -> None:
    print_heading(console, OUTSIDE_TITLE)
    print_figures(console, outside_figures(outside))
    if sheet := communicator_sheet(outside):
        print_sheets(console, [sheet])


def _print_host_memory(console: Console, memory: HostMemory, cwd: str) -> None:
    print_heading(console, host_memory_sheets.TITLE)
    print_figures(console, host_memory_sheets.host_figures(memory))
    print_items(console, memory.unknown)
    print_sheets(console, host_memory_sheets.host_memory_sheets(memory, cwd))


def _print_findings(console: Console, run: Run, room: int | None = None) -> int:
    """Print findings, the gravest first: all, or as many of five as a number of rows has room for. Returns the rows."""
    texts = [finding_text(finding, run.manifest.cwd) for finding in run.findings]
    if room is not None:
        rows = np.cumsum([_num_folded(text, console) for text in texts])
        texts = texts[: max(min(int((rows <= room - 2).sum()), _NUM_FINDINGS), min(len(texts), 1))]
    if not texts:
        return 0
    left = len(run.findings) - len(texts)
    print_heading(console, FINDINGS_TITLE + (f", {left} more" if left else ""))
    for text in texts:
        print_words(console, Text(text), 2)
    return 2 + sum(_num_folded(text, console) for text in texts)


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
    if memory := summary.host_memory:
        figures = host_memory_sheets.host_figures(memory)
        items = [f"- {name}: **{figure}** ({escaped(more)})" for name, figure, more in figures]
        pieces.append("\n".join([f"**{host_memory_sheets.TITLE}**", "", *items]))
        sheets = host_memory_sheets.host_memory_sheets(memory, run.manifest.cwd)
        pieces += ["\n".join(sheet_markdown(sheet)) for sheet in sheets]
    if summary.timed:
        pieces += time_markdown(run, *summary.timed, all_layers=all_layers)
    if run.findings:
        rows = [f"- {escaped(finding_text(finding, run.manifest.cwd))}" for finding in run.findings]
        pieces.append("\n".join([f"**{FINDINGS_TITLE}**", "", *rows]))
    if summary.advice:
        rows = [_advice(piece, summary) for piece in summary.advice]
        pieces.append("\n".join(["**What would help**, estimated, each on its own", "", *rows]))
    if notes := note_texts(summary.notes, run.manifest.cwd):
        items, num = [f"- {escaped(note)}" for note in notes], num_warnings(summary.notes)
        pieces.append("\n".join(["**Notes**", "", *items[:num]]) if num else "**Notes**")
        if harmless := items[num:]:
            title = f"<details><summary>{counted(len(harmless), 'note')}: no figure is in doubt</summary>"
            pieces.append("\n".join([title, "", *harmless, "", "</details>"]))
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
    if run.is_inferred:
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
    for text in _outlook(summary, run.manifest.cwd):
        lines += ["", f"{escaped(text[0].upper() + text[1:])}."]
    return lines


def _outlook(summary: Summary, cwd: str) -> list[str]:
    """The first advice, unless the verdict has a remedy, and what limits the step: that first where memory has room."""
    advice = "" if remedy_text(summary) else top_advice(summary, cwd)
    texts = [advice, step_verdict(summary)]
    return [text for text in (texts[::-1] if has_room(summary) else texts) if text]


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
