"""The tables of a run on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fakedist.analysis.layers import fold_layers, fold_table, unfolded
from fakedist.report.run import Run
from fakedist.report.sheet import Column, print_heading, print_lines, print_remark, print_table
from fakedist.report.wording import (
    LAYER_COLUMNS,
    MIN_SHARE,
    advice_text,
    ending,
    job_command,
    layer_label,
    or_dash,
    short_line,
    short_operation,
    verdict,
)
from fakedist.run.schema import CATEGORIES
from fakedist.units import format_bytes, format_us

_EMPTY_RANK = 9  # columns with nothing in them go before all others
_NUM_LARGEST = 10
_NUM_STEPS = 4  # of more steps only the first two, the one with the peak and the last are shown


def render(run_directory: Path, *, all_layers: bool, console: Console) -> None:
    """Print every table of a run.

    Args:
        run_directory: The run directory.
        all_layers: Whether repeated layers stay apart and small ones are shown.
        console: Where to.

    Raises:
        RunDirectoryError: It is not a run directory, or a damaged one.
    """
    run = Run(run_directory)
    summary = run.summary
    _facts(console, run, summary)
    _peak(console, summary, run.manifest["cwd"])
    if summary["peak_reserved_bytes"]:
        _phases(console, summary)
    if summary["peak_allocated_bytes"]:
        _categories(console, summary)
        _layers(console, run.table("layers"), summary, all_layers)
        _largest(console, summary["largest_blocks"][:_NUM_LARGEST], run.manifest["cwd"])
    if summary["collectives"]:
        _collectives(console, summary["collectives"])
    if summary["advice"]:
        _advice(console, summary["advice"])
    _notes(console, summary)


def _facts(console: Console, run: Run, summary: dict[str, Any]) -> None:
    job = run.manifest["job"]
    rows = [
        ("job", job_command(job)),
        ("rank", f"{summary['rank']:,} of {summary['world_size']:,} ({job['gpus_per_node']} GPUs a node)"),
        ("device", f"{summary['device']}: {summary['gpu'] or 'never reached'}, torch {summary['torch'] or 'unknown'}"),
        ("ended", ending(summary)),
        ("run", str(run.path)),
    ]
    for name, value in rows:
        console.print(Text(f"{name:<8}", style="dim") + Text(value, style="not dim"), soft_wrap=True)


def _peak(console: Console, summary: dict[str, Any], cwd: str) -> None:
    allocated, reserved = summary["peak_allocated_bytes"], summary["peak_reserved_bytes"]
    capacity = summary["capacity_bytes"]
    print_heading(console, "Peak memory, measured")
    rows = [
        ("allocated", format_bytes(allocated), f"step {summary['peak_step']}, {summary['peak_phase']}"),
        ("reserved", format_bytes(reserved), ""),
    ]
    if capacity:
        rows.append(("capacity", format_bytes(capacity), f"{reserved / capacity:.1%} of it reserved at the peak"))
    for name, figure, more in rows:
        console.print(Text(f"  {name:<10}{figure:>12}   {more}".rstrip()), soft_wrap=True)
    if found := verdict(summary, cwd):
        if found.fits:
            console.print(Text("  ") + Text(found.word, "bold green") + Text(found.more), soft_wrap=True)
        else:
            console.print(Text(f"  {found.word}{found.more}", "bold red"), soft_wrap=True)


def _phases(console: Console, summary: dict[str, Any]) -> None:
    rows = [row for row in summary["by_phase"] if row["peak_reserved_bytes"]]
    steps = sorted({row["step"] for row in rows})
    shown = steps if len(steps) <= _NUM_STEPS else [*steps[:2], summary["peak_step"], steps[-1]]
    rows = [row for row in rows if row["step"] in shown]
    peak = (summary["peak_step"], summary["peak_phase"])
    phases = [row["phase"] + (" <- peak" if (row["step"], row["phase"]) == peak else "") for row in rows]
    figures = [
        Column(name, [format_bytes(row[key]) for row in rows], rank=rank)
        for name, key, rank in (
            ("peak allocated", "peak_allocated_bytes", 0),
            ("peak reserved", "peak_reserved_bytes", 2),
            ("allocated at end", "end_allocated_bytes", 1),
        )
    ]
    step = Column("step", [str(row["step"]) for row in rows])
    print_table(console, "By phase", [step, Column("phase", phases, is_text=True), *figures])
    if left_out := [number for number in steps if number not in shown]:
        print_remark(console, f"{len(left_out)} of the steps {left_out[0]} to {left_out[-1]} are in --json only")
    if times := [f"{row['step']}: {format_us(row['wall_us'])}" for row in summary["steps"] if row["step"] in shown]:
        print_remark(console, f"wall time of steps here, recording included: {', '.join(times)}")


def _categories(console: Console, summary: dict[str, Any]) -> None:
    peak = summary["peak_allocated_bytes"]
    rows = sorted(
        ((name, bytes_) for name, bytes_ in summary["by_category"].items() if bytes_), key=lambda row: -row[1]
    )
    columns = [
        Column("category", [name.replace("_", " ") for name, _ in rows], is_text=True),
        Column("bytes", [format_bytes(bytes_) for _, bytes_ in rows]),
        Column("share", [f"{bytes_ / peak:.1%}" for _, bytes_ in rows]),
    ]
    print_table(console, "By category at the peak", columns)


def _layers(console: Console, layers: pd.DataFrame, summary: dict[str, Any], all_layers: bool) -> None:
    peak = summary["peak_allocated_bytes"]
    found = fold_table(layers, unfolded(layers) if all_layers else fold_layers(layers))
    kept = found[["peak_total_bytes", "most_total_bytes"]].max(axis=1) > (0 if all_layers else peak * MIN_SHARE)
    rows = found[kept].to_dict("records")
    names = [layer_label(row["name"], row["num_repeats"]) for row in rows]
    columns = [Column("layer", names, is_text=True)]
    for name, (categories, rank) in LAYER_COLUMNS.items():
        sums = [sum(row[f"peak_{category}_bytes"] for category in categories) for row in rows]
        columns.append(Column(name, [or_dash(bytes_) for bytes_ in sums], rank=rank if any(sums) else _EMPTY_RANK))
    for name, key, rank in (
        ("total", "peak_total_bytes", 0),
        ("own", "peak_own_bytes", 5),
        ("most", "most_total_bytes", 0),
    ):
        columns.append(Column(name, [or_dash(row[key]) for row in rows], rank=rank))
    print_table(console, "By layer at the peak, with children", columns)
    when = f"in step {summary['steps'][-1]['step']}" if summary["steps"] else "in the run"
    print_remark(console, f"most: what one such layer, with children, held at most {when}")
    if left_out := len(found) - len(rows):
        what = "with nothing in them" if all_layers else f"of less than {MIN_SHARE:.1%} of the peak"
        print_remark(console, f"left out: {left_out} {what}" + ("" if all_layers else "; --all-layers shows them"))


def _largest(console: Console, blocks: list[dict[str, Any]], cwd: str) -> None:
    columns = [
        Column("bytes", [format_bytes(row["bytes"]) for row in blocks]),
        Column("category", [row["category"].replace("_", " ") for row in blocks], is_text=True),
        Column("layer", [row["layer"] for row in blocks], is_text=True),
        Column("made in", [f"{row['step']} {row['phase']}" for row in blocks], is_text=True, rank=1),
        Column("operation", [short_operation(row["operation"]) for row in blocks], is_text=True, rank=2),
        Column("line", [short_line(row["line"], cwd) for row in blocks], is_text=True),
    ]
    print_table(console, "Largest blocks at the peak", columns)


def _collectives(console: Console, rows: list[dict[str, Any]]) -> None:
    columns = [
        Column("group", [row["group"] for row in rows], is_text=True),
        Column("operation", [row["operation"] for row in rows], is_text=True),
        Column("ranks", [f"{row['group_size']:,}" for row in rows], rank=1),
        Column("calls", [f"{row['num_calls']:,}" for row in rows]),
        Column("bytes in", [format_bytes(row["bytes_in"]) for row in rows]),
        Column("bytes out", [format_bytes(row["bytes_out"]) for row in rows]),
    ]
    print_table(console, "Collectives, simulated: this rank's calls", columns)


def _advice(console: Console, pieces: list[dict[str, Any]]) -> None:
    print_heading(console, "What would help, estimated: each by itself")
    told = Table.grid(padding=(0, 2))
    for piece in map(advice_text, pieces):
        told.add_row(f"{piece['gives']:>12}", Text(f"{piece['of']}: {piece['title']} (rule {piece['rule']})"))
        told.add_row("", Text(piece["text"], style="dim"))
    print_lines(console, told)


def _notes(console: Console, summary: dict[str, Any]) -> None:
    if not summary["notes"]:
        return
    print_heading(console, "Notes")
    notes = Table.grid(padding=(0, 1))
    for note in summary["notes"]:
        notes.add_row("  -", Text(note))
    print_lines(console, notes)


assert {category for of, _ in LAYER_COLUMNS.values() for category in of} == set(CATEGORIES)
