"""The tables of a comparison of times as text."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from fakedist.report.compare.comparison import format_relative
from fakedist.report.compare.time_comparison import TimeComparison, format_us_change
from fakedist.report.text.memory_sheets import Columns, changed_sheet
from fakedist.report.text.sheet import KEY, Sheet, SheetColumn
from fakedist.report.text.time_wording import short_kernel, unknown_time, us_or_dash


def time_change_sheets(time: TimeComparison, *, all_rows: bool) -> list[Sheet]:
    """Tables of what changed in the timed step. Tables without a change are left out.

    Args:
        time: The comparison.
        all_rows: Whether small changes are shown too.
    """
    found = [
        Sheet(f"Time of the step, {time.of}", [_text("", time.parts["name"]), *_times(time.parts)]),
        _shown(f"Kernels by phase, {time.of}", time.phases, _phase_columns, all_rows),
        _shown(f"By family of kernels, {time.of}", time.families, _family_columns, all_rows),
        _shown(f"Exposed communication by group, {time.of_communication}", time.groups, group_columns, all_rows),
        _shown(f"Time by layer, own, {time.of}", time.layers, _layer_columns, all_rows),
        _shown(f"Kernels by name, {time.of}", time.names, _name_columns, all_rows),
    ]
    return [sheet for sheet in found if sheet is not None]


def _shown(title: str, changes: pd.DataFrame, columns: Columns, all_rows: bool) -> Sheet | None:
    return changed_sheet(title, changes, columns, _in_all, all_rows)


def _in_all(rows: pd.DataFrame) -> str:
    return format_us_change(float(rows["change_us"].sum()))


def _phase_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    return [_text("phase", rows["name"]), *_times(rows), _text("", rows["what"])]


def _family_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    return [_text("family", rows["family"]), _counts(rows), *_times(rows), _text("", rows["what"])]


def group_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    """The columns of exposed communication by group.

    Args:
        rows: Rows of ``changed_times.group_changes``.
    """
    whole = zip(rows["whole_a_us"].tolist(), rows["whole_b_us"].tolist(), strict=True)
    texts = [(us_or_dash(a), us_or_dash(b)) for a, b in whole]
    return [
        _text("group", rows["group"]),
        _text("operation", rows["operation"]),
        _counts(rows, "calls"),
        SheetColumn("time", [a if a == b else f"{a} -> {b}" for a, b in texts], rank=3),
        *_times(rows),
        _text("", rows["what"]),
    ]


def _layer_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    return [_text("layer", rows["path"]), _text("family", rows["category"]), *_times(rows), _text("", rows["what"])]


def _name_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    names = _text("kernel", [short_kernel(str(name)) for name in rows["name"]])
    return [names, _counts(rows), *_times(rows), _text("", rows["what"])]


def _counts(rows: pd.DataFrame, name: str = "kernels") -> SheetColumn:
    pairs = zip(rows["num_a"].tolist(), rows["num_b"].tolist(), strict=True)
    return SheetColumn(name, [f"{a:,}" if a == b else f"{a:,} -> {b:,}" for a, b in pairs], rank=2)


def _times(rows: pd.DataFrame) -> list[SheetColumn]:
    """Columns for A, B and the change, absolute and in percent."""
    found = []
    for side in "ab":
        unknown = rows[f"unknown_{side}"].tolist() if f"unknown_{side}" in rows else [0] * len(rows)
        pairs = zip(rows[f"{side}_us"].tolist(), unknown, strict=True)
        found.append(SheetColumn(side.upper(), [unknown_time(us, num) for us, num in pairs]))
    found.append(SheetColumn("change", [format_us_change(us) for us in rows["change_us"].tolist()], rank=KEY))
    pairs = zip(rows["change_us"].tolist(), rows["a_us"].tolist(), strict=True)
    return [*found, SheetColumn("%", [format_relative(change, of) for change, of in pairs], rank=1)]


def _text(name: str, cells: Iterable[object]) -> SheetColumn:
    return SheetColumn(name, [str(cell) for cell in cells], is_text=True)
