"""Three or more runs side by side: tables with a column for each, as text, Markdown, an object and a page.

The first is the base; the others have their change from it. Access to a table that is missing or damaged raises
RunDirectoryError.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase

import pandas as pd
from rich.console import Console
from rich.text import Text

from fakedist.report.compare.change_sheets import left_out_text
from fakedist.report.compare.comparison import (
    format_change,
    format_number,
    format_relative,
    format_us_change,
    noise_us,
    rate_text,
)
from fakedist.report.content.report_blocks import KEY, Sheet, SheetColumn
from fakedist.report.figures.look import STYLE_NAMES
from fakedist.report.page.bars import BarChart, memory_bars, time_bars
from fakedist.report.page.drawings import Pack
from fakedist.report.page.run_page import template_text
from fakedist.report.render.markdown import escaped, markdown_table
from fakedist.report.render.terminal import print_long, print_sheets, print_words
from fakedist.report.text.wording import or_dash, run_title, step_text, unknown_time, verdict
from fakedist.results.compare import changed_memory, changed_times, reasons
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.rundir.plain import to_plain
from fakedist.rundir.schema import CATEGORIES, KINDS
from fakedist.rundir.step_time import StepTime
from fakedist.units import format_bytes, format_us

_NUM_ROWS = 12
#: Parts of a step, and their classes in the page's style sheet.
_PARTS = {
    "computes": "t-busy",
    "only communicates": "t-communication",
    "host late": "t-launch_gap",
    "waits": "t-wait",
}
_STEP = "Time of the step"
_SETTINGS = "Differences in job and machine"


@dataclass(frozen=True)
class RunFigure:
    """A figure of one run. ``unknown`` of its kernels or calls have no duration, so that it is a lower bound."""

    value: float
    unknown: int = 0


@dataclass(frozen=True)
class FigureTable:
    """A table with a column of figures for each run.

    Attributes:
        keys: Names of the columns that name a row.
        unit: "bytes", "us" or "number".
        rows: The figures by the row's names, None where a run has no such row.
        is_whole: Every row is shown, in this order; otherwise those that differ, those that differ most first.
    """

    title: str
    keys: tuple[str, ...]
    unit: str
    rows: Mapping[tuple[str, ...], Sequence[RunFigure | None]]
    is_whole: bool = False


class SeveralRuns:
    """Runs side by side, the first of them the base. ``names`` are A, B, ...

    Raises:
        RunDirectoryError: One of them is not a run, or is damaged.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.runs = [open_run(path).keeping_tables() for path in paths]
        self.names = list(itertools.islice(_letters(), len(self.runs)))
        self.timed = [None if run.summary.timed is None else run.summary.timed[0] for run in self.runs]

    @cached_property
    def differences(self) -> dict[str, list[str]]:
        """Settings that differ: for each the value of every run."""
        base, *others = self.runs
        found: dict[str, dict[int, str]] = {}
        for at, other in enumerate(others, 1):
            for row in _different(base, other):
                found.setdefault(row["name"], {0: row["a"]})[at] = row["b"]
        return {name: [values.get(at, values[0]) for at in range(len(self.runs))] for name, values in found.items()}

    @cached_property
    def changes(self) -> list[str]:
        """The changed settings of each run in one phrase; empty for the base."""
        base = self.runs[0]
        return [
            reasons.changed_text(reasons.changed_names(base.manifest, run.manifest, _different(base, run)))
            for run in self.runs
        ]

    @property
    def headlines(self) -> list[str]:
        """A line for each run but the base: "B --tp 4: peak -7.32 GiB (-62.1%), step +10.1 ms (+4.2%)"."""
        base, *_ = self.runs
        lines = []
        for at, (name, run) in enumerate(zip(self.names, self.runs, strict=True)):
            if not at:
                continue
            peaks = base.peak_allocated_bytes, run.peak_allocated_bytes
            said = [f"peak {_moved(format_change, peaks[0], peaks[1])}"]
            before, after = self.timed[0], self.timed[at]
            if before is not None and after is not None:
                said += filter(None, [rate_text(before, after)])
                said.append(f"step {_moved(format_us_change, before.step_us, after.step_us)}")
            changed = f" {self.changes[at]}" if self.changes[at] else ""
            lines.append(f"{name}{changed}: {', '.join(said)}")
        return lines

    @cached_property
    def warnings(self) -> list[str]:
        """Limits of the figures, one sentence each."""
        sides = list(zip(self.names, self.runs, strict=True))
        ended = [(name, run) for name, run in sides if run.summary.rank is not None]
        found = [f"{name} {phrase}" for name, run in ended if (phrase := reasons.incomplete(run.summary))]
        for name, run in sides[1:]:
            told = reasons.unlike_times(self.runs[0].summary, run.summary)
            found += [f"{self.names[0]} and {name}: {text.replace(' of B ', f' of {name} ')}" for text in told]
        return found

    @property
    def of_time(self) -> str:
        """Source of the times: "estimated", or that of each run if they differ."""
        words = [None if run.summary.timed is None else run.summary.timed[1].source for run in self.runs]
        known = {word for word in words if word}
        if len(known) == 1:
            return known.pop()
        return ", ".join(f"{name} {word}" for name, word in zip(self.names, words, strict=True) if word)

    @property
    def noise_us(self) -> float:
        """Smaller differences of times are left out, in microseconds."""
        return noise_us([time for time in self.timed if time is not None])

    @cached_property
    def tables(self) -> list[FigureTable]:
        """Every table, with all its rows."""
        made = [*self._memory()]
        if sum(time is not None for time in self.timed) > 1:
            made += self._time()
        return [table for table in made if table.rows]

    def _memory(self) -> Iterator[FigureTable]:
        sizes: list[dict[tuple[str, ...], float]] = [
            {
                ("peak allocated",): run.peak_allocated_bytes,
                ("peak reserved",): run.peak_reserved_bytes,
                ("capacity",): run.capacity_bytes,
                ("headroom",): run.capacity_bytes - run.peak_reserved_bytes,
            }
            for run in self.runs
        ]
        yield FigureTable("Memory, measured", ("",), "bytes", _joined(sizes), is_whole=True)
        held: list[dict[tuple[str, ...], float]] = [
            {(name.replace("_", " "),): run.summary.by_category.get(name, 0) for name in CATEGORIES}
            for run in self.runs
        ]
        yield FigureTable("By category at the peak", ("category",), "bytes", _without_empty(_joined(held)))
        if all(run.by_category is not None for run in self.runs):
            layers = [_layer_bytes(run) for run in self.runs]
            yield FigureTable("By layer at the peak, own bytes", ("layer", "category"), "bytes", _joined(layers))

    def _time(self) -> Iterator[FigureTable]:
        of = self.of_time

        def each(read: Callable[[StepTime], Mapping[tuple[str, ...], float | RunFigure]]) -> _Rows:
            return _joined([{} if time is None else read(time) for time in self.timed])

        parts = each(lambda time: {(name,): getattr(time, key) for key, name in changed_times.PARTS.items()})
        yield FigureTable(f"{_STEP}, {of}", ("",), "us", _without_empty(parts), is_whole=True)
        rates = each(lambda time: {(name,): value for name, value in changed_times.rates_of(time).items()})
        yield FigureTable(f"Work of the step, {of}", ("",), "number", rates, is_whole=True)
        kinds = each(lambda time: {(name,): time.by_kind[name] for name in KINDS if name in time.by_kind})
        yield FigureTable(f"Kernels by phase, {of}", ("phase",), "us", kinds)
        families = each(lambda time: {(row.family,): RunFigure(row.time_us, row.num_unknown) for row in time.by_family})
        yield FigureTable(f"By family of kernels, {of}", ("family",), "us", families)
        yield FigureTable("Exposed communication by group", ("group", "operation"), "us", each(_exposed))
        layers = [{} if run.summary.timed is None else _layer_times(run) for run in self.runs]
        yield FigureTable(f"Time by layer, own, {of}", ("layer", "family"), "us", _joined(layers))


_Rows = dict[tuple[str, ...], list[RunFigure | None]]


def _letters() -> Iterator[str]:
    """A, B, ..., Z, AA, AB, ..."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(ascii_uppercase, repeat=length))


def _different(a: Run, b: Run) -> list[dict[str, str]]:
    return reasons.different_settings(a.manifest, b.manifest, (a.summary, b.summary))


def _moved(change: Callable[[float], str], before: float, after: float) -> str:
    relative = format_relative(after - before, before)
    return change(after - before) + (f" ({relative})" if relative else "")


def _joined(sides: Sequence[Mapping[tuple[str, ...], float | RunFigure]]) -> _Rows:
    names = list(dict.fromkeys(name for side in sides for name in side))
    return {name: [_figure(side.get(name)) for side in sides] for name in names}


def _figure(value: float | RunFigure | None) -> RunFigure | None:
    return value if value is None or isinstance(value, RunFigure) else RunFigure(value)


def _without_empty(rows: _Rows) -> _Rows:
    return {name: row for name, row in rows.items() if any(one is not None and one.value for one in row)}


def _layer_bytes(run: Run) -> dict[tuple[str, ...], float]:
    return _summed(changed_memory.pattern_parts(run.table("layers")), "bytes")


def _layer_times(run: Run) -> dict[tuple[str, ...], float]:
    return _summed(changed_times.pattern_times(run.table("layers"), run.table("layer_times")), "us")


def _summed(parts: pd.DataFrame, column: str) -> dict[tuple[str, ...], float]:
    """Sums of a column by path and category."""
    sums = parts.groupby(["path", "category"], sort=False, observed=True)[column].sum().reset_index()
    names = zip(sums["path"].astype(str), sums["category"].astype(str).str.replace("_", " "), strict=True)
    return dict(zip(names, sums[column].tolist(), strict=True))


def _exposed(time: StepTime) -> dict[tuple[str, ...], RunFigure]:
    sums: dict[tuple[str, ...], RunFigure] = {}
    for row in time.by_group:
        name = row.group, row.operation
        before = sums.get(name, RunFigure(0.0))
        sums[name] = RunFigure(before.value + row.exposed_us, before.unknown + row.num_unknown)
    return sums


def several_sheets(several: SeveralRuns, *, all_rows: bool, with_noise: bool | None = None) -> list[Sheet]:
    """The tables. Rows that all runs share are left out, as are differences of times that are noise.

    ``with_noise`` shows the latter; None for the same as ``all_rows``.
    """
    least_us = 0.0 if (all_rows if with_noise is None else with_noise) or not any(several.timed) else several.noise_us
    sheets, num_left_out = [], 0
    for table in several.tables:
        rows = dict(table.rows)
        if table.unit == "us" and not table.is_whole:
            rows = {name: row for name, row in rows.items() if not 0 < spread(row) < least_us}
        num_left_out += len(table.rows) - len(rows)
        sheets.append(_sheet(several, replace(table, rows=rows), all_rows))
    if several.differences:
        texts = {"": list(several.differences)} | {
            name: [values[at] for values in several.differences.values()] for at, name in enumerate(several.names)
        }
        columns = [SheetColumn(name, cells, is_text=True) for name, cells in texts.items()]
        sheets.insert(1, Sheet(_SETTINGS, columns))
    shown = [sheet for sheet in sheets if sheet is not None]
    if not num_left_out:
        return shown
    remark = left_out_text(num_left_out, least_us)
    return [replace(sheet, remarks=[remark]) if sheet.title.startswith(_STEP) else sheet for sheet in shown]


def _sheet(several: SeveralRuns, table: FigureTable, all_rows: bool) -> Sheet | None:
    if table.is_whole:
        return Sheet(table.title, _columns(several, table, table.rows))
    spreads = {name: spread(row) for name, row in table.rows.items()}
    order = sorted((name for name in table.rows if spreads[name]), key=lambda name: -spreads[name])
    shown = order if all_rows else order[:_NUM_ROWS]
    if not shown:
        return None
    remarks = []
    if len(order) > len(shown):
        remarks.append(f"and {len(order) - len(shown)} more rows that differ; --all-rows shows them")
    if same := len(table.rows) - len(order):
        remarks.append(f"the same in all runs: {same:,} {'row' if same == 1 else 'rows'}")
    return Sheet(table.title, _columns(several, table, {name: table.rows[name] for name in shown}), remarks)


def spread(row: Sequence[RunFigure | None]) -> float:
    """The most less the least of a row; infinite if the duration of only some runs' kernels is known."""
    figures = [one or RunFigure(0.0) for one in row]
    if len({bool(one.unknown) for one in figures}) > 1:
        return float("inf")
    values = [one.value for one in figures]
    return max(values) - min(values)


def _columns(
    several: SeveralRuns, table: FigureTable, rows: Mapping[tuple[str, ...], Sequence[RunFigure | None]]
) -> list[SheetColumn]:
    columns = [
        SheetColumn(key, [name[at] for name in rows], is_text=True, rank=KEY) for at, key in enumerate(table.keys)
    ]
    for at, name in enumerate(several.names):
        figures = [(row[0], row[at]) for row in rows.values()]
        cells = [_cell(table.unit, base if at else None, figure) for base, figure in figures]
        values = [None if figure is None else figure.value for _, figure in figures]
        unit = "" if table.unit == "number" else table.unit
        columns.append(SheetColumn(name, cells, rank=at or KEY, values=values, unit=unit))
    return columns


def _cell(unit: str, base: RunFigure | None, figure: RunFigure | None) -> str:
    """A figure, and its change from the base's; the base's own has none."""
    if figure is None:
        return "-"
    value = figure.value
    if unit == "number":
        moved = "" if base is None or value == base.value else format_relative(value - base.value, base.value)
        return f"{format_number(value)} ({moved})" if moved else format_number(value)
    text = or_dash(int(value)) if unit == "bytes" else unknown_time(value, figure.unknown)
    if base is None or figure.unknown or base.unknown or value == base.value:
        return text
    change = format_change(int(value - base.value)) if unit == "bytes" else format_us_change(value - base.value)
    return text if change.startswith("0 ") else f"{text} ({change})"


def render_several(several: SeveralRuns, *, all_rows: bool, console: Console) -> None:
    """Print what changed from the base, and the tables."""
    for line in several.headlines:
        print_words(console, Text(line, style="bold"), 0)
    for name, run in zip(several.names, several.runs, strict=True):
        base = ", the base" if run is several.runs[0] else ""
        print_long(console, Text(f"{name}  ", style="dim") + Text(f"{run.path}{base}", style="not dim"))
    for warning in several.warnings:
        print_words(console, Text(warning, style="yellow"), 0)
    print_sheets(console, several_sheets(several, all_rows=all_rows))


def several_markdown(several: SeveralRuns, *, all_rows: bool) -> str:
    """The same as Markdown: the figures, and the rest in collapsed sections."""
    first, *rest = several_sheets(several, all_rows=all_rows)
    lines = [part for line in several.headlines for part in (f"**{escaped(line)}**", "")]
    names = [f"{name}: `{run.path.name}`" for name, run in zip(several.names, several.runs, strict=True)]
    lines += [", ".join(names), "", *(f"- {escaped(text)}" for text in several.warnings)]
    lines += ["", *markdown_table(first.columns), ""]
    for sheet in rest:
        lines += ["<details>", f"<summary>{sheet.title}</summary>", "", *markdown_table(sheet.columns), ""]
        lines += [*(line for remark in sheet.remarks for line in (remark, "")), "</details>", ""]
    return "\n".join(lines).rstrip() + "\n"


def several_object(several: SeveralRuns) -> dict[str, object]:
    """The object that ``fakedist compare A B C --json`` prints: every row of every table."""
    return {
        "runs": [
            {"name": name, "path": str(run.path), "changes": changed}
            for name, run, changed in zip(several.names, several.runs, several.changes, strict=True)
        ],
        "warnings": several.warnings,
        "differences": several.differences,
        "tables": [
            {
                "title": table.title,
                "unit": table.unit,
                "rows": [
                    {"name": list(name), "figures": [None if one is None else to_plain(one) for one in row]}
                    for name, row in table.rows.items()
                ],
            }
            for table in several.tables
        ],
    }


def several_page(several: SeveralRuns) -> str:
    """The page as text."""
    pack = Pack()
    pack.meta |= {"style": STYLE_NAMES, "figures": {}, "run": several.runs[0].path.name}
    is_told = len({run.path.name for run in several.runs}) == len(several.runs)
    labelled = [
        (f"{name} {_short(run)}" if is_told else name, run)
        for name, run in zip(several.names, several.runs, strict=True)
    ]
    context: dict[str, object] = {
        "title": f"{len(several.runs)} runs of {run_title(several.runs[0])}",
        "headlines": several.headlines,
        "warnings": several.warnings,
        "runs": _runs_sheet(several),
        "memory": memory_bars(labelled),
        "times": _times(several, [label for label, _ in labelled]),
        "of_time": several.of_time,
        "sheets": several_sheets(several, all_rows=True, with_noise=False),
        "numbers": pack.text(),
    }
    return template_text("several.html.j2", "job", context, "")


_LONGEST = 24


def _short(run: Run) -> str:
    name = run.path.name
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _runs_sheet(several: SeveralRuns) -> Sheet:
    """A row for each run: where it is, what was changed, and its main figures with their change from the base."""
    runs = several.runs
    steps = several.timed
    base = steps[0]
    verdicts = [verdict(run.summary, run.manifest.cwd) for run in runs]
    peaks = [run.peak_allocated_bytes for run in runs]
    texts = ["-" if time is None else step_text(time) for time in steps]
    moved = [
        "" if not at or time is None or base is None else _moved(format_us_change, base.step_us, time.step_us)
        for at, time in enumerate(steps)
    ]
    columns = [
        SheetColumn("", several.names, is_text=True),
        SheetColumn("run", [str(run.path) for run in runs], is_text=True),
        SheetColumn("changed from A", [text or "-" for text in several.changes], is_text=True),
        SheetColumn("fits", ["" if one is None else one.word for one in verdicts], is_text=True),
        SheetColumn("peak allocated", [format_bytes(peak) for peak in peaks], values=peaks, unit="bytes"),
        SheetColumn("change", ["", *(_moved(format_change, peaks[0], peak) for peak in peaks[1:])]),
    ]
    if any(steps):
        values = [None if time is None else time.step_us for time in steps]
        columns += [SheetColumn("step", texts, values=values, unit="us"), SheetColumn("change", moved)]
    return Sheet("Runs: memory measured" + (f", times {several.of_time}" if any(steps) else ""), columns)


def _times(several: SeveralRuns, labels: Sequence[str]) -> BarChart | None:
    keys = {name: key for key, name in changed_times.PARTS.items()}
    rows = [
        (label, {part: float(getattr(time, keys[part])) for part in _PARTS}, format_us(time.step_us), "")
        for label, time in zip(labels, several.timed, strict=True)
        if time is not None
    ]
    longest = max((time.step_us for time in several.timed if time is not None), default=0.0)
    return time_bars(rows, _PARTS, longest) if rows else None
