"""The tables of a run on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fakedist.analysis.layers import fold_layers, fold_table, unfolded
from fakedist.report.run import Run
from fakedist.run.schema import CATEGORIES
from fakedist.units import format_bytes, format_us

#: Categories in the layer table; the other three are in `other`.
_LAYER_COLUMNS = {
    "params": ("parameter",),
    "grads": ("gradient",),
    "opt state": ("optimizer_state",),
    "activations": ("activation",),
    "temps": ("temporary",),
    "other": ("workspace", "communication", "other"),
}
_WIDE, _NARROW = 125, ("params", "activations")  # below this many columns of text, only these categories
_MIN_SHARE = 0.001  # layers below a thousandth of the peak are left out of the folded table, and counted


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
    _peak(console, summary)
    if summary["by_phase"]:
        _phases(console, summary)
        _categories(console, summary)
        _layers(console, run.table("layers"), summary["peak_allocated_bytes"], all_layers)
        _largest(console, summary["largest_blocks"], run.manifest["cwd"])
    if summary["collectives"]:
        _collectives(console, summary["collectives"])
    _notes(console, summary)


def _table(title: str, *columns: str, numbers_from: int = 1) -> Table:
    """A table whose first columns are text and the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        if index < numbers_from:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def _print(console: Console, table: Table) -> None:
    console.print()
    console.print(table)


def _facts(console: Console, run: Run, summary: dict[str, Any]) -> None:
    job = run.manifest["job"]
    command = " ".join([("-m " if job["is_module"] else "") + job["target"], *job["arguments"]])
    ending, steps = summary["exit"], summary["steps"]
    message = ending["message"].split(". ")[0]
    how = ending["outcome"].replace("_", " ") + (f" ({message})" if message else "")
    rows = [
        ("job", command),
        ("rank", f"{summary['rank']} of {summary['world_size']} ({job['gpus_per_node']} GPUs a node)"),
        ("device", f"{summary['device']}: {summary['gpu'] or 'never reached'}, torch {summary['torch'] or 'unknown'}"),
        ("ended", f"{how} after {len(steps)} step{'' if len(steps) == 1 else 's'}"),
        ("run", str(run.path)),
    ]
    for name, value in rows:
        console.print(Text(f"{name:<8}", style="dim") + Text(value), soft_wrap=True)


def _peak(console: Console, summary: dict[str, Any]) -> None:
    capacity, reserved = summary["capacity_bytes"], summary["peak_reserved_bytes"]
    console.print()
    console.print(Text("Peak memory, measured", style="bold"))
    where = f"step {summary['peak_step']}, {summary['peak_phase']}"
    rows = [
        ("allocated", format_bytes(summary["peak_allocated_bytes"]), where),
        ("reserved", format_bytes(reserved), ""),
    ]
    if capacity:
        rows.append(("capacity", format_bytes(capacity), f"{reserved / capacity:.1%} of it reserved at the peak"))
    for name, figure, more in rows:
        console.print(f"  {name:<10}{figure:>12}   {more}".rstrip(), highlight=False)
    if failed := summary["out_of_memory"]:
        by = failed["operation"] or "an allocation"
        of = f" of {failed['layer']}" if failed["layer"] else ""
        at = f" at {failed['line']}" if failed["line"] else ""
        text = f"does not fit: {by}{of} asked for {format_bytes(failed['requested_bytes'])} more{at}"
        console.print(f"  [bold red]{escape(text)}[/]", highlight=False, soft_wrap=True)
    elif not summary["fits"]:
        missing = (
            f"does not fit: {format_bytes(reserved - capacity)} more than the GPU has" if capacity else "does not fit"
        )
        console.print(f"  [bold red]{missing}[/]", highlight=False)
    elif capacity and summary["by_phase"]:
        console.print(f"  [bold green]fits[/], headroom {format_bytes(capacity - reserved)}", highlight=False)


def _phases(console: Console, summary: dict[str, Any]) -> None:
    table = _table("By phase", "step", "phase", "peak allocated", "peak reserved", "allocated at end", numbers_from=2)
    longest = _longest(pd.DataFrame(summary["by_phase"]))
    for row in longest.to_dict("records"):
        at_peak = (row["step"], row["phase"]) == (summary["peak_step"], summary["peak_phase"])
        table.add_row(
            str(row["step"]),
            row["phase"] + (" <- peak" if at_peak else ""),
            *(format_bytes(row[f"{name}_bytes"]) for name in ("peak_allocated", "peak_reserved", "end_allocated")),
        )
    _print(console, table)
    if summary["steps"]:
        times = ", ".join(f"{row['step']}: {format_us(row['wall_us'])}" for row in summary["steps"])
        console.print(f"  wall time of steps here, recording included: {times}", style="dim", highlight=False)


def _longest(phases: pd.DataFrame) -> pd.DataFrame:
    """Phases in which memory was used at all."""
    return phases[(phases["peak_allocated_bytes"] > 0) | (phases["peak_reserved_bytes"] > 0)]


def _categories(console: Console, summary: dict[str, Any]) -> None:
    peak = summary["peak_allocated_bytes"]
    table = _table("By category at the peak", "category", "bytes", "share")
    for name, bytes_ in sorted(summary["by_category"].items(), key=lambda item: -item[1]):
        if bytes_:
            table.add_row(name.replace("_", " "), format_bytes(bytes_), f"{bytes_ / peak:.1%}")
    _print(console, table)


def _layers(console: Console, layers: pd.DataFrame, peak: int, all_layers: bool) -> None:
    rows = fold_table(layers, unfolded(layers) if all_layers else fold_layers(layers))
    shown = rows if all_layers else rows[rows[["peak_total_bytes", "most_total_bytes"]].max(axis=1) > peak * _MIN_SHARE]
    categories = {name: of for name, of in _LAYER_COLUMNS.items() if console.width >= _WIDE or name in _NARROW}
    title = "By layer: bytes at the peak with children; own; most of one layer with children during the last step"
    table = _table(title, "layer", *categories, "total", *(["own"] if console.width >= _WIDE else []), "most")
    for row in shown.to_dict("records"):
        name = row["name"] or "(outside of modules)"
        times = f" x{row['num_repeats']}" if row["num_repeats"] > 1 else ""
        figures = [sum(row[f"peak_{category}_bytes"] for category in of) for of in categories.values()]
        figures += [row["peak_total_bytes"], *([row["peak_own_bytes"]] if console.width >= _WIDE else [])]
        figures.append(row["most_total_bytes"])
        table.add_row(Text(name + times), *(format_bytes(value) if value else "-" for value in figures))
    _print(console, table)
    if left_out := len(rows) - len(shown):
        text = (
            f"  {left_out} rows of less than {_MIN_SHARE:.1%} of the peak are left out; --all-layers shows everything"
        )
        console.print(text, style="dim", highlight=False)


def _largest(console: Console, blocks: Iterable[dict[str, Any]], cwd: str) -> None:
    made_in = ["made in"] if console.width >= _WIDE else []
    table = _table("Largest blocks at the peak", "bytes", "category", "layer", *made_in, "line", numbers_from=5)
    table.columns[0].justify = "right"
    table.columns[0].no_wrap = True
    for row in list(blocks)[:10]:
        made = f"{row['step']} {row['phase']}, {row['operation'].removeprefix('aten.') or 'no operation'}"
        line = row["line"].removeprefix(cwd.rstrip("/") + "/")
        cells = (
            format_bytes(row["bytes"]),
            row["category"].replace("_", " "),
            row["layer"],
            *[made][: len(made_in)],
            line,
        )
        table.add_row(*(Text(cell) for cell in cells))
    _print(console, table)


def _collectives(console: Console, collectives: Iterable[dict[str, Any]]) -> None:
    title = "Collectives, simulated: this rank's calls by group and operation"
    table = _table(title, "group", "operation", "ranks", "calls", "bytes in", "bytes out", numbers_from=2)
    for row in collectives:
        figures = (row["group_size"], row["num_calls"])
        table.add_row(
            Text(row["group"]),
            Text(row["operation"]),
            *(f"{value:,}" for value in figures),
            format_bytes(row["bytes_in"]),
            format_bytes(row["bytes_out"]),
        )
    _print(console, table)


def _notes(console: Console, summary: dict[str, Any]) -> None:
    if not summary["notes"]:
        return
    console.print()
    console.print(Text("Notes", style="bold"))
    for note in summary["notes"]:
        console.print(Padding(Text(f"- {note}"), (0, 0, 0, 2)))


assert {category for of in _LAYER_COLUMNS.values() for category in of} == set(CATEGORIES)
