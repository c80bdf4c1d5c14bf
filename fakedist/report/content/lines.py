"""Memory and time by line of source: tables, and the object that editors read."""

from __future__ import annotations

from pathlib import PurePosixPath

import pandas as pd

from fakedist.report.content.report_blocks import (
    KEY,
    Block,
    Fact,
    Facts,
    Report,
    Sheet,
    SheetColumn,
    bytes_column,
    us_column,
)
from fakedist.report.content.wording import peak_moment, run_facts, source_word
from fakedist.results.lines import Lines, lines_of
from fakedist.results.run import Run
from fakedist.results.verdict import short_line
from fakedist.rundir.notes import counted
from fakedist.rundir.step_time import KernelSource
from fakedist.units import format_bytes, format_us

#: Version of the object; one that reads differently has another.
SCHEMA = 1
_NUM_SHOWN = 20
_TIMES = ("kernel_us", "backward_us", "num_kernels", "num_unknown", "total_kernel_us", "kernel_share")


def lines_report(run: Run, *, all_rows: bool = False) -> Report:
    """The lines with the most bytes, and those with the most time.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    lines = lines_of(run)
    blocks: list[Block] = [Facts([Fact(name, text) for name, text in run_facts(run)])]
    if run.peak_allocated_bytes:
        blocks.append(_memory_sheet(run, lines, all_rows))
    if lines.source is not None:
        blocks.append(_time_sheet(run, lines, lines.source, all_rows))
    return Report("lines", blocks, lambda: _object(run, lines))


def _object(run: Run, lines: Lines) -> dict[str, object]:
    """Every line of a run, as docs/editors.md describes it."""
    summary = run.summary
    cwd = run.manifest.cwd
    peak_bytes = summary.peak_allocated_bytes
    kernel_us = _kernel_us(lines)
    rows = []
    for record in lines.table.to_dict("records"):
        row = {str(name): value for name, value in record.items()} | {
            "relative": _relative(str(record["file"]), cwd),
            "allocated_share": record["allocated_bytes"] / peak_bytes if peak_bytes else None,
            "kernel_share": record["kernel_us"] / kernel_us if kernel_us else None,
        }
        rows.append(_without_times(row) if lines.source is None else row)
    without: dict[str, object] = {**lines.without_line}
    return {
        "schema": SCHEMA,
        "run": str(run.path),
        "cwd": cwd,
        "peak_allocated_bytes": peak_bytes if run.memory is not None else None,
        "peak_step": summary.peak_step if summary.peak_phase else None,
        "peak_phase": summary.peak_phase or None,
        "timed_step": None if lines.source is None else lines.source.step,
        "times": None if lines.source is None else lines.source.source,
        "why_no_times": lines.why_no_time or None,
        "kernel_us": None if lines.source is None else kernel_us,
        "lines": rows,
        "without_line": _without_times(without) if lines.source is None else without,
    }


def _without_times(row: dict[str, object]) -> dict[str, object]:
    return {**row, **{name: None for name in _TIMES if name in row}}


def _kernel_us(lines: Lines) -> float:
    return float(lines.table["kernel_us"].sum()) + lines.without_line["kernel_us"]


def _relative(file: str, cwd: str) -> str | None:
    """The file from the working directory; None if it is elsewhere."""
    path = PurePosixPath(file)
    return str(path.relative_to(cwd)) if cwd and path.is_relative_to(cwd) else None


def _memory_sheet(run: Run, lines: Lines, all_rows: bool) -> Sheet:
    table = lines.table.sort_values(["allocated_bytes", "total_allocated_bytes"], ascending=False, kind="stable")
    table = table[table["total_allocated_bytes"] > 0]
    shown = table if all_rows else table.head(_NUM_SHOWN)
    peak = run.peak_allocated_bytes
    columns = [
        _label_column(run, shown),
        bytes_column("bytes", _or_none(shown["allocated_bytes"]), KEY),
        SheetColumn("share", rank=1, values=(shown["allocated_bytes"] / peak).tolist(), unit="%"),
        bytes_column("in backward", _or_none(shown["backward_bytes"]), 2),
        SheetColumn("blocks", rank=3, values=shown["num_blocks"].tolist()),
        bytes_column("with its calls", _or_none(shown["total_allocated_bytes"])),
    ]
    remarks = _left_out(len(table) - len(shown))
    if without := int(lines.without_line["allocated_bytes"]):
        remarks.append(f"without a line: {format_bytes(without)}")
    if lines.source is None:
        remarks.append(f"no times: {lines.why_no_time}")
    when = f", {peak_moment(run.summary)}" if run.summary.peak_phase else ""
    return Sheet(f"Memory by line at the peak{when}, measured", columns, remarks)


def _time_sheet(run: Run, lines: Lines, source: KernelSource, all_rows: bool) -> Sheet:
    table = lines.table.sort_values(["kernel_us", "total_kernel_us"], ascending=False, kind="stable")
    table = table[(table["total_kernel_us"] > 0) | (table["num_kernels"] > 0)]
    shown = table if all_rows else table.head(_NUM_SHOWN)
    whole = _kernel_us(lines)
    columns = [
        _label_column(run, shown),
        us_column("time", _or_none(shown["kernel_us"]), KEY),
        SheetColumn("share", rank=1, values=[us / whole if whole else None for us in shown["kernel_us"]], unit="%"),
        us_column("in backward", _or_none(shown["backward_us"]), 2),
        SheetColumn("kernels", rank=3, values=shown["num_kernels"].tolist()),
        us_column("with its calls", _or_none(shown["total_kernel_us"])),
    ]
    remarks = ["sums of kernels, without collectives", *_left_out(len(table) - len(shown))]
    unknown = int(lines.table["num_unknown"].sum() + lines.without_line["num_unknown"])
    if unknown:
        remarks.append(f"{counted(unknown, 'kernel')} of unknown duration left out")
    if without := lines.without_line["kernel_us"]:
        remarks.append(f"without a line: {format_us(without)}")
    return Sheet(f"Time of kernels by line, step {source.step}, {source_word(source)}", columns, remarks)


def _or_none(figures: pd.Series) -> list[float | None]:
    return [figure or None for figure in figures.tolist()]


def _label_column(run: Run, shown: pd.DataFrame) -> SheetColumn:
    rows = shown[["file", "line", "function"]].itertuples(index=False, name=None)
    labels = [short_line(f"{file}:{line} ({function})", run.manifest.cwd) for file, line, function in rows]
    return SheetColumn("line", labels, is_text=True)


def _left_out(num: int) -> list[str]:
    return [f"{counted(num, 'more line')} (--all-rows shows them)"] if num else []
