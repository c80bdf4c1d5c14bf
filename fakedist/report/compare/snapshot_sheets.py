"""The tables of a comparison with a memory snapshot of torch."""

from __future__ import annotations

import pandas as pd

from fakedist.report.compare.change_columns import (
    changed_bytes_sheet,
    num_column,
    relative_column,
    size_columns,
    text_column,
    what_column,
)
from fakedist.report.compare.snapshot_comparison import SnapshotComparison
from fakedist.report.text.reserved_sheets import UNUSED_NAMES
from fakedist.report.text.sheet import Sheet, SheetColumn
from fakedist.units import format_bytes

_LACKING = "a snapshot has no layers, phases, categories or times: the blocks are compared by source line"
_KINDS = {"appeared": "only in B", "gone": "only in A", "grew": "grew", "shrank": "shrank", "same": "same"}
_RESERVED = {"reserved": "reserved then", "allocated": "allocated then", **UNUSED_NAMES}


def snapshot_sheets(comparison: SnapshotComparison, *, all_rows: bool) -> list[Sheet]:
    """The tables that are not empty, with the figures first."""
    figures = comparison.figures
    first = [text_column("", figures["name"]), *size_columns(figures), relative_column(figures)]

    def line_columns(rows: pd.DataFrame) -> list[SheetColumn]:
        return [*size_columns(rows), num_column("blocks", rows), lines_of(rows), what_column(rows)]

    def block_columns(rows: pd.DataFrame) -> list[SheetColumn]:
        each = SheetColumn("each", [format_bytes(bytes_) for bytes_ in rows["block_bytes"].tolist()])
        return [each, num_column("blocks", rows), *size_columns(rows), lines_of(rows)]

    def lines_of(rows: pd.DataFrame) -> SheetColumn:
        return text_column("line", [comparison.shown(str(line)) for line in rows["line"]])

    found = [
        Sheet("Memory, measured", first, [_LACKING]),
        _kinds(comparison.kinds),
        changed_bytes_sheet("Blocks at the peak by source line", comparison.lines, line_columns, all_rows),
        changed_bytes_sheet(
            "Blocks at the peak that only one of them has, by size", comparison.sizes, block_columns, all_rows
        ),
        _reserved(comparison.reserved),
        changed_bytes_sheet("Segments when most was reserved", comparison.segments, _segment_columns, all_rows),
    ]
    return [sheet for sheet in found if sheet is not None]


def _kinds(rows: pd.DataFrame) -> Sheet | None:
    if rows.empty:
        return None
    names = text_column("lines", [_KINDS[str(what)] for what in rows["what"]])
    number = SheetColumn("number", [f"{number:,}" for number in rows["num_lines"].tolist()], rank=1)
    columns = [names, number, num_column("blocks", rows), *size_columns(rows)]
    return Sheet("What is allocated at the peak, by how its source lines changed", columns)


def _reserved(rows: pd.DataFrame) -> Sheet | None:
    if rows.empty:
        return None
    names = text_column("memory", [_RESERVED[str(name)] for name in rows["name"]])
    return Sheet("When most was reserved", [names, *size_columns(rows), relative_column(rows)])


def _segment_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    sizes = [format_bytes(bytes_) if bytes_ else "any" for bytes_ in rows["segment_bytes"].tolist()]
    free = [
        format_bytes(a) if a == b else f"{format_bytes(a)} -> {format_bytes(b)}"
        for a, b in zip(rows["a_free_bytes"].tolist(), rows["b_free_bytes"].tolist(), strict=True)
    ]
    return [
        text_column("pool", rows["kind"]),
        SheetColumn("each", sizes),
        num_column("segments", rows),
        *size_columns(rows),
        SheetColumn("free in them", free, rank=1),
        what_column(rows),
    ]
