"""The tables of a comparison: of two runs A, B and their change, of more each run's figures and change from A."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import isnan

import pandas as pd

from fakedist.analysis.stack_lines import NO_STACK
from fakedist.report.content.report_blocks import KEY, Sheet, SheetColumn, bytes_column
from fakedist.report.content.topology import AT_ONCE, CallsText, RunTopology, stream_columns
from fakedist.report.content.wording import or_dash, short_kernel, unknown_time
from fakedist.results.compare.allocation_streams import plain_line
from fakedist.results.compare.change_tables import COLUMNS, ChangeTable, Unit, run_names
from fakedist.results.comparison import Compared, Comparison, SnapshotComparison, StepComparison
from fakedist.rundir.notes import counted
from fakedist.units import format_bytes, format_change, format_number, format_relative, format_us_change

_NUM_ROWS, _NUM_NAMED = 12, 8
#: Changes that are worth a row though the time is the same: other kernels or calls, or unknown durations.
_NO_NOISE = ("same", "recounted", "not known")
_CHANGES: dict[Unit, Callable[[float], str]] = {
    "bytes": format_change,
    "us": format_us_change,
    "number": lambda value: "",
}
#: Texts of the cells of a column that names rows.
_NAMES: dict[str, Callable[[str], str]] = {
    "category": lambda name: name.replace("_", " "),
    "kernel": short_kernel,
    "operation": lambda name: name.removeprefix("aten."),
}


def comparison_sheets(comparison: Compared, *, all_rows: bool) -> list[Sheet]:
    """The tables of a comparison that are not empty, with the figures first.

    Rows that are the same in all runs are left out; so are small changes, and changes of times that are noise, unless
    ``all_rows``.
    """
    num_runs = len(comparison.runs)
    first, *memory = (_sheet(table, num_runs, all_rows=all_rows) for table in comparison.memory_tables)
    sheets = [first]
    if isinstance(comparison, SnapshotComparison):
        return [sheet for sheet in (first, *stream_sheets(comparison, all_rows=all_rows), *memory) if sheet is not None]
    sheets += [_differences(comparison), _renamed(comparison), *memory, _at_once(comparison)]
    if comparison.time is not None:
        sheets += time_change_sheets(comparison.time, all_rows=all_rows)
    return [sheet for sheet in sheets if sheet is not None]


def time_change_sheets(time: StepComparison, *, all_rows: bool) -> list[Sheet]:
    """The tables of the timed step. Changes below ``time.noise_us`` are left out and counted, unless ``all_rows``."""
    sheets, num_left_out = [], 0
    for table in time.tables:
        rows = table.rows
        if not table.is_whole and not all_rows:
            is_noise = (rows["change_us"].abs() < time.noise_us) & ~rows["what"].isin(_NO_NOISE)
            num_left_out += int(is_noise.sum())
            rows = rows[~is_noise]
        sheets.append(_sheet(replace(table, rows=rows), len(time.runs), all_rows=all_rows))
    first, *others = (sheet for sheet in sheets if sheet is not None)
    if num_left_out:
        number = "1 row that differs" if num_left_out == 1 else f"{num_left_out:,} rows that differ"
        first = replace(first, remarks=[f"left out below: {number} by {time.noise_text}; --all-rows shows them"])
    return [first, *others]


def _sheet(table: ChangeTable, num_runs: int, *, all_rows: bool) -> Sheet | None:
    remarks = [table.remark] if table.remark else []
    if table.is_whole:
        is_open = table.title.startswith("Memory")
        columns = change_columns(table, num_runs)
        return Sheet(table.title, columns, remarks, is_open=is_open) if len(table.rows) else None
    changed = table.rows[table.rows["what"] != "same"]
    if changed.empty:
        return None
    if same := len(table.rows) - len(changed):
        remarks.append(f"the same in {'both' if num_runs == 2 else 'all'} runs: {counted(same, 'row')}")
    rest = changed.iloc[_NUM_ROWS:]
    total = f", {_CHANGES[table.unit](rest[COLUMNS[table.unit][1]].sum())} in total" if num_runs == 2 else ""
    text = f"and {len(rest)} smaller changes{total}; --all-rows shows them"
    columns = change_columns(replace(table, rows=changed), num_runs)
    return Sheet(table.title, columns, remarks, most=0 if all_rows else _NUM_ROWS, rest=text)


def change_columns(table: ChangeTable, num_runs: int) -> list[SheetColumn]:
    """The names of the rows, and each run's figures.

    Of two runs A, B, the change in figures, percent and a word; of more each run's change behind its figure.
    """
    rows, (figure, change) = table.rows, COLUMNS[table.unit]
    columns = [
        _key_column(heading, rows[column], 2 if at > 2 else 0)
        for at, (heading, column) in enumerate(table.keys.items())
    ]
    if num_runs == 2:
        columns += [_pair_column(heading, template, rows) for heading, template in table.pairs.items()]
    base: list[float] = rows[figure.format("a")].tolist()
    for at, name in enumerate(run_names(num_runs)):
        side = name.lower()
        number = int if table.unit == "bytes" else float
        values = [None if isnan(value) else number(value) for value in rows[figure.format(side)].tolist()]
        unknown = rows[f"unknown_{side}"].tolist() if f"unknown_{side}" in rows else [0] * len(rows)
        cells = [_cell(table.unit, *one) for one in zip(values, unknown, strict=True)]
        rank = 0
        if num_runs > 2:
            texts = _changes_from(table, base, side) if at else [""] * len(rows)
            cells = [f"{cell} ({moved})" if moved else cell for cell, moved in zip(cells, texts, strict=True)]
            rank = at or KEY
        unit = "" if table.unit == "number" else table.unit
        columns.append(SheetColumn(name, cells, rank=rank, values=values, unit=unit))
    if num_runs > 2:
        return columns
    changes: list[float] = rows[change].tolist()
    relative = ["" if isnan(by) else format_relative(by, of) for by, of in zip(changes, base, strict=True)]
    if table.unit == "number":
        return [*columns, SheetColumn("%", relative, rank=KEY)]
    moved = [_CHANGES[table.unit](by) for by in changes]
    columns.append(SheetColumn("change", moved, rank=KEY, values=changes, unit=table.unit))
    columns.append(SheetColumn("%", relative, rank=1))
    what = [] if table.is_whole else [SheetColumn("", [str(word) for word in rows["what"]], is_text=True, rank=1)]
    return [*columns, *what]


def _changes_from(table: ChangeTable, base: list[float], side: str) -> list[str]:
    """The change of each of a run's figures from the base's; empty where it is none, or is not known."""
    figure, rows = COLUMNS[table.unit][0], table.rows
    no = pd.Series(0, rows.index)
    unknown = rows.get("unknown_a", no) + rows.get(f"unknown_{side}", no)
    changes = []
    for before, after, is_unknown in zip(base, rows[figure.format(side)].tolist(), unknown, strict=True):
        is_same = isnan(before) or isnan(after) or after == before or is_unknown
        by = 0.0 if is_same else after - before
        text = format_relative(by, before) if table.unit == "number" else _CHANGES[table.unit](by)
        changes.append("" if is_same or text.startswith("0 ") else text)
    return changes


def _cell(unit: Unit, value: float | None, num_unknown: int) -> str:
    if value is None:
        return "-"
    if unit == "number":
        return format_number(value)
    return or_dash(int(value)) if unit == "bytes" else unknown_time(value, num_unknown)


def _key_column(heading: str, names: pd.Series, rank: int) -> SheetColumn:
    values = names.tolist()
    if str(names.name).endswith("_bytes"):
        return bytes_column(heading, [value or None for value in values])
    if any(isinstance(value, int) for value in values):
        return SheetColumn(heading, values=values)
    text = _NAMES.get(heading, str)
    return SheetColumn(heading, [text(str(value)) for value in values], is_text=True, rank=rank)


def _pair_column(heading: str, template: str, rows: pd.DataFrame) -> SheetColumn:
    """Figures of both sides: "4", or "4 -> 6" where they differ."""
    unit: Unit = "us" if template.endswith("_us") else "bytes" if template.endswith("_bytes") else "number"

    def text(value: float) -> str:
        return f"{value:,}" if unit == "number" else _cell(unit, value, 0)

    pairs = zip(rows[template.format("a")].tolist(), rows[template.format("b")].tolist(), strict=True)
    cells = [text(a) if a == b else f"{text(a)} -> {text(b)}" for a, b in pairs]
    return SheetColumn(heading, cells, rank=1)


def _texts(columns: dict[str, Iterable[object]]) -> list[SheetColumn]:
    return [SheetColumn(name, [str(cell) for cell in cells], is_text=True) for name, cells in columns.items()]


def _differences(comparison: Comparison) -> Sheet | None:
    if not (rows := comparison.differences):
        return None
    sides = {name: [values[at] for values in rows.values()] for at, name in enumerate(comparison.runs)}
    return Sheet("Differences in job and machine", _texts({"": rows, **sides}))


def _renamed(comparison: Comparison) -> Sheet | None:
    if len(comparison.runs) > 2 or not (rows := comparison.renamed):
        return None
    keys = {"A": "was", "B": "name", "": "how"}
    return Sheet(
        "Layers matched under another name", _texts({name: [row[key] for row in rows] for name, key in keys.items()})
    )


def calls_at_once(comparison: Comparison) -> list[tuple[str, CallsText]]:
    """Calls of a step of two runs, their streams and what can run at once, by run; empty if both are the same."""
    if len(comparison.runs) > 2:
        return []
    calls = {name: RunTopology(run).rows() for name, run in comparison.runs.items()}
    before, after = ([(row.group, row.operation, row.stream, row.beside) for row in rows] for rows in calls.values())
    return [] if before == after else [(name, row) for name, rows in calls.items() for row in rows]


def _at_once(comparison: Comparison) -> Sheet | None:
    if not (rows := calls_at_once(comparison)):
        return None
    columns = [*_texts({"": [name for name, _ in rows]}), *stream_columns([row for _, row in rows])]
    return Sheet("What can run at once in a step, simulated", columns, [AT_ONCE])


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
    remarks = [f"{stream.num_same:,} allocations have the same size in the same order"]
    if any(num for num, _ in stream.workspaces):
        (num_a, a), (num_b, b) = stream.workspaces
        remarks.append(
            f"left out: workspaces of cuBLAS and the like, in which releases of torch differ: {num_a:,} in A, "
            f"{format_bytes(a)}, and {num_b:,} in B, {format_bytes(b)}"
        )
    if stream.same_lines:
        pairs = [
            f"{plain_line(line)} is {plain_line(same)}" for line, same in [*stream.same_lines.items()][:_NUM_NAMED]
        ]
        remarks.append(f"lines of A under other names in B, by their allocations: {', '.join(pairs)}")
    sheets = [Sheet("The first allocations that differ", columns, remarks)]
    rows = stream.lines if all_rows else stream.lines.head(_NUM_ROWS)
    columns = [
        SheetColumn("phase", rows["phase"].tolist(), is_text=True, rank=2),
        *(column for side in "ab" for column in _stream_columns(rows, side)),
        SheetColumn("line", [line or NO_STACK for line in rows["line"]], is_text=True),
    ]
    left = [f"not shown: {len(stream.lines) - len(rows):,} more lines"] if len(stream.lines) > len(rows) else []
    return [*sheets, Sheet("Allocations that only one of them makes, by source line", columns, left)]


def _stream_columns(rows: pd.DataFrame, side: str) -> list[SheetColumn]:
    return [
        SheetColumn(f"only in {side.upper()}", values=rows[f"num_{side}"].tolist(), rank=1),
        bytes_column("bytes", rows[f"{side}_bytes"].tolist()),
        bytes_column("at peak", rows[f"{side}_peak_bytes"].tolist(), 1),
    ]
