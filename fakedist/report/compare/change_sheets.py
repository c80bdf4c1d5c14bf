"""The tables of a comparison of two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isnan

import pandas as pd

from fakedist.analysis.stack_lines import NO_STACK
from fakedist.report.compare.comparison import (
    Compared,
    Comparison,
    SnapshotComparison,
    TimeComparison,
    format_change,
    format_number,
    format_relative,
    format_us_change,
    noise_text,
)
from fakedist.report.content.report_blocks import KEY, Sheet, SheetColumn, bytes_column
from fakedist.report.content.topology import AT_ONCE, stream_columns
from fakedist.report.text.memory_sheets import UNUSED_NAMES
from fakedist.report.text.wording import or_dash, short_kernel, unknown_time, us_or_dash
from fakedist.units import format_bytes

#: Makes the columns of a table from its rows.
_Columns = Callable[[pd.DataFrame], list[SheetColumn]]
_NUM_CHANGES = 12


def _changed_sheet(title: str, changes: pd.DataFrame, columns: _Columns, all_rows: bool) -> Sheet | None:
    """A table of changes, largest first, without unchanged rows, and without small changes unless ``all_rows``."""
    changed = changes[changes["what"] != "same"]
    if not len(changed):
        return None
    rest = changed.iloc[_NUM_CHANGES:]
    if "change_us" in rest:
        total = format_us_change(float(rest["change_us"].sum()))
    else:
        total = format_change(int(rest["change_bytes"].sum()))
    text = f"and {len(rest)} smaller changes, {total} in total; --all-rows shows them"
    return Sheet(title, columns(changed), most=0 if all_rows else _NUM_CHANGES, rest=text)


def _pairs(name: str, a: pd.Series, b: pd.Series, rank: int) -> SheetColumn:
    """Numbers of both sides: "4", or "4 -> 6" where they differ."""
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    return SheetColumn(
        name, [f"{one:,}" if one == other else f"{one:,} -> {other:,}" for one, other in pairs], rank=rank
    )


def num_column(name: str, rows: pd.DataFrame, rank: int = 1) -> SheetColumn:
    """The numbers num_a and num_b."""
    return _pairs(name, rows["num_a"], rows["num_b"], rank)


def text_column(name: str, cells: Iterable[object]) -> SheetColumn:
    """A column of text."""
    return SheetColumn(name, [str(cell) for cell in cells], is_text=True)


def size_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    """A, B and the change."""
    columns = [
        SheetColumn(name, [or_dash(bytes_) for bytes_ in rows[f"{name.lower()}_bytes"].tolist()]) for name in "AB"
    ]
    changes = [format_change(bytes_) for bytes_ in rows["change_bytes"].tolist()]
    return [*columns, SheetColumn("change", changes, rank=KEY)]


def relative_column(rows: pd.DataFrame) -> SheetColumn:
    """The change in percent."""
    pairs = zip(rows["change_bytes"].tolist(), rows["a_bytes"].tolist(), strict=True)
    return SheetColumn("%", [format_relative(change, of) for change, of in pairs], rank=1)


def what_column(rows: pd.DataFrame) -> SheetColumn:
    """The kind of change: grew, appeared, ..."""
    return SheetColumn("", [str(kind) for kind in rows["what"]], is_text=True, rank=1)


_LACKING = "layers, phases and categories of a snapshot are inferred at best: blocks are compared by source line"
_KINDS = {"appeared": "only in B", "gone": "only in A", "grew": "grew", "shrank": "shrank", "same": "same"}
_RESERVED = {"reserved": "reserved then", "allocated": "allocated then", **UNUSED_NAMES}


def snapshot_sheets(comparison: SnapshotComparison, *, all_rows: bool) -> list[Sheet]:
    """The tables that are not empty, with the figures first."""
    figures = comparison.figures
    first = [text_column("", figures["name"]), *size_columns(figures), relative_column(figures)]

    def line_columns(rows: pd.DataFrame) -> list[SheetColumn]:
        return [*size_columns(rows), num_column("blocks", rows), lines_of(rows), what_column(rows)]

    def block_columns(rows: pd.DataFrame) -> list[SheetColumn]:
        size = SheetColumn("each", [format_bytes(bytes_) for bytes_ in rows["block_bytes"].tolist()])
        return [size, num_column("blocks", rows), *size_columns(rows), lines_of(rows)]

    def lines_of(rows: pd.DataFrame) -> SheetColumn:
        return text_column("line", [comparison.shown(str(line)) for line in rows["line"]])

    sheets = [
        Sheet("Memory, measured", first, [_LACKING], is_open=True),
        *stream_sheets(comparison, all_rows=all_rows),
        _kinds(comparison.kinds),
        _changed_sheet("Blocks at the peak by source line", comparison.lines, line_columns, all_rows),
        _changed_sheet(
            "Blocks at the peak that only one of them has, by size", comparison.sizes, block_columns, all_rows
        ),
        _reserved(comparison.reserved),
        _changed_sheet("Segments when most was reserved", comparison.segments, _segment_columns, all_rows),
    ]
    return [sheet for sheet in sheets if sheet is not None]


_NUM_STREAM_LINES = 12


def stream_sheets(comparison: SnapshotComparison, *, all_rows: bool) -> list[Sheet]:
    """The first allocations that differ, and the lines of all that do."""
    stream = comparison.stream
    if stream.first is None:
        return []
    before, *sides = stream.first
    steps = zip("AB", (stream.step_a, stream.step_b), strict=True)
    names = [f"{side}, step {step}" if step else f"{side}, all of it" for side, step in steps]
    columns = [
        SheetColumn("", names, is_text=True),
        SheetColumn("allocations", [f"{stream.num_a:,}", f"{stream.num_b:,}"]),
        SheetColumn("after", [f"{before:,}" if side else "-" for side in sides], rank=1),
        SheetColumn("requests", [format_bytes(side.bytes_) if side else "-" for side in sides]),
        SheetColumn("in", [side.phase if side else "nothing" for side in sides], is_text=True, rank=1),
        SheetColumn("line", [comparison.shown(side.line) if side else "" for side in sides], is_text=True),
    ]
    same = f"{stream.num_same:,} allocations have the same size in the same order"
    halves = f"much of what {stream.half_of} alone allocates is twice as large as what the other does: another dtype"
    remarks = [same, *([f"{halves}, for example without autocast"] if stream.half_of else [])]
    sheets = [Sheet("The first allocations that differ", columns, remarks)]
    rows = stream.lines if all_rows else stream.lines.head(_NUM_STREAM_LINES)
    columns = [
        SheetColumn("phase", rows["phase"].tolist(), is_text=True, rank=2),
        *(column for side in "ab" for column in _stream_columns(rows, side)),
        SheetColumn("line", [line or NO_STACK for line in rows["line"]], is_text=True),
    ]
    left = [f"not shown: {len(stream.lines) - len(rows):,} more lines"] if len(stream.lines) > len(rows) else []
    return [*sheets, Sheet("Allocations that only one of them makes, by source line", columns, left)]


def _stream_columns(rows: pd.DataFrame, side: str) -> list[SheetColumn]:
    return [
        SheetColumn(f"only in {side.upper()}", [f"{number:,}" for number in rows[f"num_{side}"]], rank=1),
        bytes_column("bytes", rows[f"{side}_bytes"].tolist()),
        bytes_column("at peak", rows[f"{side}_peak_bytes"].tolist(), 1),
    ]


def _kinds(rows: pd.DataFrame) -> Sheet | None:
    if rows.empty:
        return None
    names = text_column("lines", [_KINDS[str(kind)] for kind in rows["what"]])
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


def time_change_sheets(time: TimeComparison, *, all_rows: bool) -> list[Sheet]:
    """Tables of what changed in the timed step. Tables without a change are left out.

    So are changes below ``time.noise_us``, unless ``all_rows``.
    """
    chosen: list[tuple[str, pd.DataFrame, _Columns]] = [
        (f"Kernels by phase, {time.of}", time.phases, _time_phase_columns),
        (f"By family of kernels, {time.of}", time.families, _family_columns),
        (f"Exposed communication by group, {time.of_communication}", time.groups, group_columns),
        (f"Time by layer, own, {time.of}", time.layers, _time_layer_columns),
        (f"Kernels by name, {time.of}", time.names, _name_columns),
    ]
    least_us = 0.0 if all_rows else time.noise_us
    sheets, num_left_out = [], 0
    for title, changes, columns in chosen:
        is_noise = (changes["change_us"].abs() < least_us) & ~changes["what"].isin(("same", *_NO_NOISE))
        num_left_out += int(is_noise.sum())
        sheets.append(_changed_sheet(title, changes[~is_noise], columns, all_rows))
    remarks = [left_out_text(num_left_out, least_us)] if num_left_out else []
    first = Sheet(f"Time of the step, {time.of}", [text_column("", time.parts["name"]), *_times(time.parts)], remarks)
    rates = [] if time.rates.empty else [Sheet(f"Work of the step, {time.of}", _rate_columns(time.rates))]
    return [first, *rates, *(sheet for sheet in sheets if sheet is not None)]


def _rate_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    sides = [rows[side].tolist() for side in "ab"]
    columns = [
        SheetColumn(name, ["-" if isnan(value) else format_number(value) for value in values])
        for name, values in zip("AB", sides, strict=True)
    ]
    changes = ["" if isnan(b - a) else format_relative(b - a, a) for a, b in zip(*sides, strict=True)]
    return [text_column("", rows["name"]), *columns, SheetColumn("%", changes, rank=KEY)]


#: Changes that are worth a row though the time is the same: other kernels or calls, or unknown durations.
_NO_NOISE = ("recounted", "not known")


def left_out_text(number: int, least_us: float) -> str:
    """The number of rows that are left out of tables of times, and why."""
    rows = "1 row that differs" if number == 1 else f"{number:,} rows that differ"
    return f"left out below: {rows} by {noise_text(least_us)}; --all-rows shows them"


def _time_phase_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    return [text_column("phase", rows["name"]), *_times(rows), text_column("", rows["what"])]


def _family_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    return [
        text_column("family", rows["family"]),
        num_column("kernels", rows, 2),
        *_times(rows),
        text_column("", rows["what"]),
    ]


def group_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    """The columns of exposed communication by group, from rows of ``changed_times.group_changes``."""
    whole = zip(rows["whole_a_us"].tolist(), rows["whole_b_us"].tolist(), strict=True)
    texts = [(us_or_dash(a), us_or_dash(b)) for a, b in whole]
    return [
        text_column("group", rows["group"]),
        text_column("operation", rows["operation"]),
        num_column("calls", rows, 2),
        SheetColumn("time", [a if a == b else f"{a} -> {b}" for a, b in texts], rank=3),
        *_times(rows),
        text_column("", rows["what"]),
    ]


def _time_layer_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    return [
        text_column("layer", rows["path"]),
        text_column("family", rows["category"]),
        *_times(rows),
        text_column("", rows["what"]),
    ]


def _name_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    names = text_column("kernel", [short_kernel(str(name)) for name in rows["name"]])
    return [names, num_column("kernels", rows, 2), *_times(rows), text_column("", rows["what"])]


def _times(rows: pd.DataFrame) -> list[SheetColumn]:
    columns = []
    for side in "ab":
        unknown = rows[f"unknown_{side}"].tolist() if f"unknown_{side}" in rows else [0] * len(rows)
        pairs = zip(rows[f"{side}_us"].tolist(), unknown, strict=True)
        columns.append(SheetColumn(side.upper(), [unknown_time(us, num) for us, num in pairs]))
    columns.append(SheetColumn("change", [format_us_change(us) for us in rows["change_us"].tolist()], rank=KEY))
    pairs = zip(rows["change_us"].tolist(), rows["a_us"].tolist(), strict=True)
    return [*columns, SheetColumn("%", [format_relative(change, of) for change, of in pairs], rank=1)]


def comparison_sheets(comparison: Compared, *, all_rows: bool) -> list[Sheet]:
    """The tables of a comparison that are not empty, with the figures first. See :func:`time_change_sheets`."""
    if not isinstance(comparison, Comparison):
        return snapshot_sheets(comparison, all_rows=all_rows)
    figures = comparison.figures
    first = [text_column("", figures["name"]), *size_columns(figures), relative_column(figures)]
    sheets = [
        Sheet("Memory, measured", first, is_open=True),
        _differences(comparison),
        _renamed(comparison),
        _changed_sheet("By phase, most allocated", comparison.phases, _phase_columns, all_rows),
        _changed_sheet("By category at the peak", comparison.categories, _category_columns, all_rows),
        _changed_sheet("By layer at the peak, own bytes", comparison.layers, _layer_columns, all_rows),
        _changed_sheet(
            "Most that one layer held in the last step, with children", comparison.most, _most_columns, all_rows
        ),
        _changed_sheet("Blocks at the peak, by where they are allocated", comparison.blocks, _block_columns, all_rows),
        _changed_sheet(
            "Collectives, simulated: this rank's calls", comparison.collectives, _collective_columns, all_rows
        ),
        _streams(comparison),
    ]
    shown = [sheet for sheet in sheets if sheet is not None]
    if comparison.time:
        shown += time_change_sheets(comparison.time, all_rows=all_rows)
    return shown


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
        columns.append(_pairs(name, rows[f"a_{key}"], rows[f"b_{key}"], rank))
    for side in "ab":
        carried = (rows[f"{side}_bytes_in"] + rows[f"{side}_bytes_out"]).tolist()
        columns.append(SheetColumn(side.upper(), [format_bytes(bytes_) for bytes_ in carried]))
    changes = [format_change(bytes_) for bytes_ in rows["change_bytes"].tolist()]
    return [*columns, SheetColumn("in and out", changes), what_column(rows)]
