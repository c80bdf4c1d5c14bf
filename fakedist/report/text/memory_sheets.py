"""The tables of a run as text, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from fakedist.analysis.layer_table import fold_layers, fold_table, unfolded
from fakedist.report.text.reserved_sheets import reserved_sheets
from fakedist.report.text.sheet import KEY, Sheet, SheetColumn
from fakedist.report.text.wording import LAYER_COLUMNS, MIN_SHARE, layer_label, or_dash, short_line, short_operation
from fakedist.results.run import Run
from fakedist.run.schema import CATEGORIES
from fakedist.run.summary import CollectiveTotal, LargeBlock, Summary
from fakedist.units import format_bytes, format_us

_EMPTY_RANK = 9  # empty columns are left out before all others
_NUM_LARGEST = 10
_NUM_CHANGES = 12
_NUM_STEPS = 4  # of more steps, only the first two, the one with the peak and the last are shown


#: Makes the columns of a table from its rows.
Columns = Callable[[pd.DataFrame], list[SheetColumn]]


def changed_sheet(
    title: str, changes: pd.DataFrame, columns: Columns, in_all: Callable[[pd.DataFrame], str], all_rows: bool
) -> Sheet | None:
    """A table of changes, without unchanged rows, and without small changes unless ``all_rows``.

    Args:
        title: The table's title.
        changes: The changes, largest first. ``what`` is "same" for unchanged rows.
        columns: Makes the table's columns.
        in_all: Puts the sum of some changes into words.
        all_rows: Whether small changes are shown too.
    """
    changed = changes[changes["what"] != "same"]
    if not len(changed):
        return None
    rows = changed if all_rows else changed.head(_NUM_CHANGES)
    rest = changed.iloc[len(rows) :]
    if not len(rest):
        return Sheet(title, columns(rows))
    return Sheet(title, columns(rows), [f"and {len(rest)} smaller changes, {in_all(rest)} in total; --all shows them"])


def run_sheets(run: Run, *, all_layers: bool) -> list[Sheet]:
    """Every table of a run that is not empty.

    Args:
        run: The run.
        all_layers: Whether repeated layers stay apart and small ones are shown.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    summary, cwd = run.summary, run.manifest.cwd
    found = []
    if summary.peak_reserved_bytes and run.by_category is not None:
        found.append(phase_sheet(summary))
    if summary.peak_allocated_bytes:
        if run.by_category is not None:
            found.append(category_sheet(summary))
            found.append(layer_sheet(run.table("layers"), summary, all_layers))
        sheet = largest_sheet(summary.largest_blocks, cwd)
        known = [column for column in sheet.columns if run.by_category is not None or column.name in ("bytes", "line")]
        found.append(replace(sheet, columns=known))
        found += reserved_sheets(run)
    if summary.collectives:
        found.append(collective_sheet(summary.collectives))
    return found


def phase_sheet(summary: Summary) -> Sheet:
    """The phases of the first steps, of the step with the peak and of the last."""
    rows = summary.by_phase if summary.peak_reserved_bytes else []
    steps = sorted({row.step for row in rows})
    shown = steps if len(steps) <= _NUM_STEPS else [*steps[:2], summary.peak_step, steps[-1]]
    rows = [row for row in rows if row.step in shown]
    peak = (summary.peak_step, summary.peak_phase)
    phases = [row.phase + (" <- peak" if (row.step, row.phase) == peak else "") for row in rows]
    figures = [
        SheetColumn(name, [format_bytes(getattr(row, key)) for row in rows], rank=rank)
        for name, key, rank in (
            ("peak allocated", "peak_allocated_bytes", KEY),
            ("peak reserved", "peak_reserved_bytes", 2),
            ("allocated at end", "end_allocated_bytes", 1),
        )
    ]
    step = SheetColumn("step", [str(row.step) for row in rows])
    remarks = []
    if left_out := [number for number in steps if number not in shown]:
        several = f"{len(left_out)} of the steps {left_out[0]} to {left_out[-1]} are"
        remarks.append(f"{f'step {left_out[0]} is' if len(left_out) == 1 else several} only in --json")
    if times := [f"{row.step}: {format_us(row.wall_us)}" for row in summary.steps if row.step in shown]:
        remarks.append(f"wall time of steps on this machine, recording included: {', '.join(times)}")
    return Sheet("By phase", [step, SheetColumn("phase", phases, is_text=True), *figures], remarks)


def category_sheet(summary: Summary) -> Sheet:
    """Bytes at the peak by category, most first."""
    peak = summary.peak_allocated_bytes
    rows = sorted(((name, bytes_) for name, bytes_ in summary.by_category.items() if bytes_), key=lambda row: -row[1])
    columns = [
        SheetColumn("category", [name.replace("_", " ") for name, _ in rows], is_text=True),
        SheetColumn("bytes", [format_bytes(bytes_) for _, bytes_ in rows]),
        SheetColumn("share", [f"{bytes_ / peak:.1%}" for _, bytes_ in rows]),
    ]
    return Sheet("By category at the peak", columns)


def layer_sheet(layers: pd.DataFrame, summary: Summary, all_layers: bool) -> Sheet:
    """Bytes at the peak by layer. ``terminal.render`` documents ``all_layers``."""
    peak = summary.peak_allocated_bytes
    found = fold_table(layers, unfolded(layers) if all_layers else fold_layers(layers))
    kept = found[["peak_total_bytes", "most_total_bytes"]].max(axis=1) > (0 if all_layers else peak * MIN_SHARE)
    rows = found[kept].to_dict("records")
    names = [layer_label(row["name"], row["num_repeats"]) for row in rows]
    columns = [SheetColumn("layer", names, is_text=True)]
    for name, (categories, rank) in LAYER_COLUMNS.items():
        sums = [sum(row[f"peak_{category}_bytes"] for category in categories) for row in rows]
        columns.append(SheetColumn(name, [or_dash(bytes_) for bytes_ in sums], rank=rank if any(sums) else _EMPTY_RANK))
    for name, key, rank in (
        ("total", "peak_total_bytes", KEY),
        ("own", "peak_own_bytes", 5),
        ("most", "most_total_bytes", 0),
    ):
        columns.append(SheetColumn(name, [or_dash(row[key]) for row in rows], rank=rank))
    when = f"in step {summary.steps[-1].step}" if summary.steps else "in the run"
    remarks = [f"most: the most that one such layer held, with children, {when}"]
    if left_out := len(found) - len(rows):
        num = f"{left_out} layer{'' if left_out == 1 else 's'}"
        what = "without memory" if all_layers else f"below {MIN_SHARE:.1%} of the peak (--all-layers shows them)"
        remarks.append(f"not shown: {num} {what}")
    return Sheet("By layer at the peak, with children", columns, remarks)


def largest_sheet(blocks: list[LargeBlock], cwd: str) -> Sheet:
    """The largest blocks at the peak."""
    blocks = blocks[:_NUM_LARGEST]
    columns = [
        SheetColumn("bytes", [format_bytes(row.bytes) for row in blocks]),
        SheetColumn("category", [row.category.replace("_", " ") for row in blocks], is_text=True),
        SheetColumn("layer", [row.layer for row in blocks], is_text=True),
        SheetColumn("made in", [f"{row.step} {row.phase}" for row in blocks], is_text=True, rank=1),
        SheetColumn("operation", [short_operation(row.operation) for row in blocks], is_text=True, rank=2),
        SheetColumn("line", [short_line(row.line, cwd) for row in blocks], is_text=True, rank=KEY),
    ]
    return Sheet("Largest blocks at the peak", columns)


def collective_sheet(rows: list[CollectiveTotal]) -> Sheet:
    """This rank's collective calls."""
    columns = [
        SheetColumn("group", [row.group for row in rows], is_text=True),
        SheetColumn("operation", [row.operation for row in rows], is_text=True),
        SheetColumn("ranks", [f"{row.group_size:,}" for row in rows], rank=1),
        SheetColumn("calls", [f"{row.num_calls:,}" for row in rows]),
        SheetColumn("bytes in", [format_bytes(row.bytes_in) for row in rows]),
        SheetColumn("bytes out", [format_bytes(row.bytes_out) for row in rows]),
    ]
    return Sheet("Collectives, simulated: this rank's calls", columns)


assert {category for of, _ in LAYER_COLUMNS.values() for category in of} == set(CATEGORIES)
