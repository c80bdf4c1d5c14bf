"""Prints the tables of a run on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fakedist.report.text.facts import run_facts
from fakedist.report.text.memory_sheets import run_sheets
from fakedist.report.text.outside_sheet import OUTSIDE_TITLE, communicator_sheet, outside_figures
from fakedist.report.text.sheet import (
    Sheet,
    print_facts,
    print_figures,
    print_heading,
    print_items,
    print_remark,
    print_table,
    print_words,
)
from fakedist.report.text.time_sheets import time_sheets
from fakedist.report.text.time_wording import accuracy_text, source_word, time_figures
from fakedist.report.text.wording import advice_text, note_texts, peak_place, top_advice, verdict
from fakedist.results.opening import open_run
from fakedist.run.step_time import KernelSource, StepTime
from fakedist.run.summary import Advice, Outside, Summary
from fakedist.units import format_bytes


def render(run_directory: Path, *, all_layers: bool, console: Console) -> None:
    """Print every table of a run.

    Args:
        run_directory: The run directory.
        all_layers: Whether repeated layers stay apart and small ones are shown.
        console: Where to print.

    Raises:
        RunDirectoryError: It is not a run directory, or is damaged.
    """
    run = open_run(run_directory)
    summary = run.summary
    print_facts(console, run_facts(run))
    if run.memory is not None:
        _peak(console, summary, run.manifest.cwd)
    print_sheets(console, run_sheets(run, all_layers=all_layers))
    if summary.estimated_outside:
        _outside(console, summary.estimated_outside)
    if summary.timed:
        print_time(console, *summary.timed)
        print_sheets(console, time_sheets(run, all_layers=all_layers))
    if summary.advice:
        _advice(console, summary.advice)
    _notes(console, note_texts(summary.notes, run.manifest.cwd))


def print_sheets(console: Console, sheets: Sequence[Sheet]) -> None:
    """Print tables with their remarks."""
    for sheet in sheets:
        print_table(console, sheet.title, sheet.columns)
        for remark in sheet.remarks:
            print_remark(console, remark)


def _peak(console: Console, summary: Summary, cwd: str) -> None:
    allocated, reserved = summary.peak_allocated_bytes, summary.peak_reserved_bytes
    capacity = summary.capacity_bytes
    print_heading(console, "Peak memory, measured")
    rows = [
        ("allocated", format_bytes(allocated), peak_place(summary)),
        ("reserved", format_bytes(reserved), ""),
    ]
    if capacity:
        rows.append(("capacity", format_bytes(capacity), f"{reserved / capacity:.1%} of it reserved at the peak"))
    print_figures(console, rows, is_right=True)
    if found := verdict(summary, cwd):
        colour = "bold red" if not found.fits else "bold green" if found.is_sure else "bold yellow"
        print_words(console, Text(found.word, colour) + Text(found.more, "" if found.fits else colour), 2)
    if advice := top_advice(summary, cwd):
        print_words(console, Text(advice), 2)


def _outside(console: Console, outside: Outside) -> None:
    """Memory outside the caching allocator, with a table by communicator."""
    print_heading(console, OUTSIDE_TITLE)
    print_figures(console, outside_figures(outside))
    if sheet := communicator_sheet(outside):
        print_sheets(console, [sheet])


def print_time(console: Console, time: StepTime, source: KernelSource) -> None:
    """The step's time and how it is spent."""
    print_heading(console, f"Time of step {source.step}, {source_word(source)}")
    print_figures(console, time_figures(time), is_right=True)
    for text in (*(note.text for note in source.notes), accuracy_text(source)):
        if text:
            print_remark(console, text)


def _advice(console: Console, pieces: list[Advice]) -> None:
    print_heading(console, "What would help, estimated, each on its own")
    for piece in map(advice_text, pieces):
        print_words(console, Text(f"{piece['gives']} {piece['of']}: {piece['title']} (rule {piece['rule']})"), 2)
        print_words(console, Text(piece["text"], style="dim"), 4)


def _notes(console: Console, texts: list[str]) -> None:
    if not texts:
        return
    print_heading(console, "Notes")
    print_items(console, texts)
