"""A comparison as text: on a terminal, and as Markdown for a review."""

from __future__ import annotations

import pandas as pd
from rich.console import Console
from rich.text import Text

from fakedist.report.compare.change_columns import (
    changed_bytes_sheet,
    num_column,
    relative_column,
    size_columns,
    text_column,
    what_column,
)
from fakedist.report.compare.compared import Compared
from fakedist.report.compare.comparison import Comparison, format_change
from fakedist.report.compare.snapshot_sheets import snapshot_sheets
from fakedist.report.compare.time_change_sheets import time_change_sheets
from fakedist.report.text.group_sheets import AT_ONCE, stream_columns
from fakedist.report.text.markdown import escaped, markdown_table
from fakedist.report.text.sheet import Sheet, SheetColumn, print_long, print_remark, print_table, print_words
from fakedist.units import format_bytes


def render_comparison(comparison: Compared, *, all_rows: bool, console: Console) -> None:
    """Print a comparison, what was changed and the reason first.

    Args:
        comparison: What to print.
        all_rows: Whether small changes are shown too.
        console: Where to print.
    """
    print_words(console, Text(comparison.headline, style="bold"), 0)
    if comparison.time:
        print_words(console, Text(comparison.time.why, style="bold"), 0)
    for side, run in (("A", comparison.a), ("B", comparison.b)):
        print_long(console, Text(f"{side}  ", style="dim") + Text(f"{run.path}", style="not dim"))
    for warning in comparison.warnings:
        print_words(console, Text(warning, style="yellow"), 0)
    for remark in comparison.look_first:
        print_words(console, Text(remark), 0)
    for sheet in comparison_sheets(comparison, all_rows=all_rows):
        print_table(console, sheet.title, sheet.columns)
        for remark in sheet.remarks:
            print_remark(console, remark)


def comparison_markdown(comparison: Compared, *, all_rows: bool = False) -> str:
    """A comparison as Markdown: what was changed and why, the figures, and the rest in collapsed sections."""
    first, *rest = comparison_sheets(comparison, all_rows=all_rows)
    lines = [f"**{escaped(comparison.headline)}**", ""]
    if comparison.time:
        lines += [f"**{escaped(comparison.time.why)}**", ""]
    lines += [f"A: `{comparison.a.path.name}`, B: `{comparison.b.path.name}`", ""]
    if told := [f"- {escaped(remark)}" for remark in (*comparison.warnings, *comparison.look_first)]:
        lines += [*told, ""]
    lines += [*markdown_table(first.columns), ""]
    lines += [line for remark in first.remarks for line in (remark, "")]
    for sheet in rest:
        lines += ["<details>", f"<summary>{sheet.title}</summary>", "", *markdown_table(sheet.columns), ""]
        lines += [*(line for remark in sheet.remarks for line in (remark, "")), "</details>", ""]
    return "\n".join(lines).rstrip() + "\n"


def comparison_sheets(comparison: Compared, *, all_rows: bool) -> list[Sheet]:
    """The tables of a comparison that are not empty, with the figures first."""
    if not isinstance(comparison, Comparison):
        return snapshot_sheets(comparison, all_rows=all_rows)
    figures = comparison.figures
    sheets = [
        Sheet("Memory, measured", [text_column("", figures["name"]), *size_columns(figures), relative_column(figures)]),
        _differences(comparison),
        _renamed(comparison),
        changed_bytes_sheet("By phase, most allocated", comparison.phases, _phase_columns, all_rows),
        changed_bytes_sheet("By category at the peak", comparison.categories, _category_columns, all_rows),
        changed_bytes_sheet("By layer at the peak, own bytes", comparison.layers, _layer_columns, all_rows),
        changed_bytes_sheet(
            "Most that one layer held in the last step, with children", comparison.most, _most_columns, all_rows
        ),
        changed_bytes_sheet(
            "Blocks at the peak, by where they are allocated", comparison.blocks, _block_columns, all_rows
        ),
        changed_bytes_sheet(
            "Collectives, simulated: this rank's calls", comparison.collectives, _collective_columns, all_rows
        ),
        _streams(comparison),
    ]
    found = [sheet for sheet in sheets if sheet is not None]
    return found + (time_change_sheets(comparison.time, all_rows=all_rows) if comparison.time else [])


def _differences(comparison: Comparison) -> Sheet | None:
    if not (rows := comparison.differences):
        return None
    columns = [text_column(name, [row[key] for row in rows]) for name, key in (("", "name"), ("A", "a"), ("B", "b"))]
    return Sheet("Differences in job and machine", columns)


def _renamed(comparison: Comparison) -> Sheet | None:
    if not (rows := comparison.renamed):
        return None
    columns = [
        text_column(name, [row[key] for row in rows]) for name, key in (("A", "was"), ("B", "name"), ("", "how"))
    ]
    return Sheet("Layers matched under another name", columns)


def _streams(comparison: Comparison) -> Sheet | None:
    if not (rows := comparison.streams):
        return None
    columns = [text_column("", [side for side, _ in rows]), *stream_columns([row for _, row in rows])]
    return Sheet("What can run at once in a step, simulated", columns, [AT_ONCE])


def _phase_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    step = SheetColumn("step", [str(number) for number in rows["step"]])
    return [step, text_column("phase", rows["phase"]), *size_columns(rows), relative_column(rows), what_column(rows)]


def _category_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    return [
        text_column("category", rows["category"].str.replace("_", " ")),
        *size_columns(rows),
        relative_column(rows),
        what_column(rows),
    ]


def _layer_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    times = [f" x{number}" if number > 1 else "" for number in rows["num_layers"]]
    names = [f"{name}{many}" for name, many in zip(rows["name"], times, strict=True)]
    was = [SheetColumn("was", list(rows["was"]), is_text=True, rank=1)] if any(rows["was"]) else []
    category = text_column("category", rows["category"].str.replace("_", " "))
    return [text_column("layer", names), *was, category, *size_columns(rows), what_column(rows)]


def _most_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    return [
        text_column("layer", rows["name"]),
        num_column("layers", rows),
        *size_columns(rows),
        relative_column(rows),
        what_column(rows),
    ]


def _block_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    operations = [name.removeprefix("aten.") for name in rows["operation"]]
    return [
        *size_columns(rows),
        num_column("blocks", rows),
        text_column("category", rows["category"].str.replace("_", " ")),
        text_column("layer", rows["path"]),
        SheetColumn("operation", operations, is_text=True, rank=2),
        text_column("line", rows["line"]),
        what_column(rows),
    ]


def _collective_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    columns = [text_column("group", rows["group"]), text_column("operation", rows["operation"])]
    for name, key, rank in (("ranks", "group_size", 1), ("calls", "num_calls", 0)):
        pairs = zip(rows[f"a_{key}"].tolist(), rows[f"b_{key}"].tolist(), strict=True)
        columns.append(SheetColumn(name, [f"{a:,}" if a == b else f"{a:,} -> {b:,}" for a, b in pairs], rank=rank))
    for side in "ab":
        carried = (rows[f"{side}_bytes_in"] + rows[f"{side}_bytes_out"]).tolist()
        columns.append(SheetColumn(side.upper(), [format_bytes(bytes_) for bytes_ in carried]))
    changes = [format_change(bytes_) for bytes_ in rows["change_bytes"].tolist()]
    return [*columns, SheetColumn("in and out", changes), what_column(rows)]
