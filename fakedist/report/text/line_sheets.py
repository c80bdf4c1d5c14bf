"""Memory and time by line of source, as a table and as one object for editors."""

from __future__ import annotations

from pathlib import PurePosixPath

import pandas as pd
from rich.console import Console

from fakedist.report.content.report_blocks import KEY, Sheet, SheetColumn
from fakedist.report.render.terminal import print_facts, print_sheets
from fakedist.report.text.wording import or_dash, peak_moment, run_facts, source_word, us_or_dash
from fakedist.results.lines import Lines, lines_of
from fakedist.results.run import Run
from fakedist.results.verdict import short_line
from fakedist.rundir.notes import counted
from fakedist.units import format_bytes, format_us

#: Version of the object; one that reads differently has another.
SCHEMA = 1
_NUM_SHOWN = 20
_TIMES = ("kernel_us", "backward_us", "num_kernels", "num_unknown", "total_kernel_us", "kernel_share")


def lines_object(run: Run) -> dict[str, object]:
    """Every line of a run, as docs/editors.md describes it.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    lines, summary, cwd = lines_of(run), run.summary, run.manifest.cwd
    peak_bytes, kernel_us = summary.peak_allocated_bytes, _kernel_us(lines)
    rows = []
    for record in lines.table.to_dict("records"):
        row = {str(name): value for name, value in record.items()}
        row["relative"] = _relative(str(row["file"]), cwd)
        row["allocated_share"] = row["allocated_bytes"] / peak_bytes if peak_bytes else None
        row["kernel_share"] = row["kernel_us"] / kernel_us if kernel_us else None
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


def render_lines(run: Run, console: Console, *, all_rows: bool) -> None:
    """Print the lines with the most bytes, and those with the most time.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    lines = lines_of(run)
    print_facts(console, run_facts(run))
    sheets = [_memory_sheet(run, lines, all_rows)] if run.peak_allocated_bytes else []
    if lines.source is not None:
        sheets.append(_time_sheet(run, lines, all_rows))
    elif sheets:
        sheets[0] = Sheet(sheets[0].title, sheets[0].columns, [*sheets[0].remarks, f"no times: {lines.why_no_time}"])
    print_sheets(console, sheets)


def _memory_sheet(run: Run, lines: Lines, all_rows: bool) -> Sheet:
    table = lines.table.sort_values(["allocated_bytes", "total_allocated_bytes"], ascending=False, kind="stable")
    table = table[table["total_allocated_bytes"] > 0]
    shown = table if all_rows else table.head(_NUM_SHOWN)
    peak = run.peak_allocated_bytes
    columns = [
        _label_column(run, shown),
        SheetColumn("bytes", [or_dash(bytes_) for bytes_ in shown["allocated_bytes"]], rank=KEY),
        SheetColumn("share", [f"{bytes_ / peak:.1%}" for bytes_ in shown["allocated_bytes"]], rank=1),
        SheetColumn("in backward", [or_dash(bytes_) for bytes_ in shown["backward_bytes"]], rank=2),
        SheetColumn("blocks", [f"{num:,}" for num in shown["num_blocks"]], rank=3),
        SheetColumn("with its calls", [or_dash(bytes_) for bytes_ in shown["total_allocated_bytes"]]),
    ]
    remarks = _left_out(len(table) - len(shown))
    if without := int(lines.without_line["allocated_bytes"]):
        remarks.append(f"without a line: {format_bytes(without)}")
    when = f", {peak_moment(run.summary)}" if run.summary.peak_phase else ""
    return Sheet(f"Memory by line at the peak{when}, measured", columns, remarks)


def _time_sheet(run: Run, lines: Lines, all_rows: bool) -> Sheet:
    assert lines.source is not None
    table = lines.table.sort_values(["kernel_us", "total_kernel_us"], ascending=False, kind="stable")
    table = table[(table["total_kernel_us"] > 0) | (table["num_kernels"] > 0)]
    shown = table if all_rows else table.head(_NUM_SHOWN)
    whole = _kernel_us(lines)
    columns = [
        _label_column(run, shown),
        SheetColumn("time", [us_or_dash(us) for us in shown["kernel_us"]], rank=KEY),
        SheetColumn("share", [f"{us / whole:.1%}" if whole else "-" for us in shown["kernel_us"]], rank=1),
        SheetColumn("in backward", [us_or_dash(us) for us in shown["backward_us"]], rank=2),
        SheetColumn("kernels", [f"{num:,}" for num in shown["num_kernels"]], rank=3),
        SheetColumn("with its calls", [us_or_dash(us) for us in shown["total_kernel_us"]]),
    ]
    remarks = ["sums of kernels, without collectives", *_left_out(len(table) - len(shown))]
    unknown = int(lines.table["num_unknown"].sum() + lines.without_line["num_unknown"])
    if unknown:
        remarks.append(f"{counted(unknown, 'kernel')} of unknown duration left out")
    if without := lines.without_line["kernel_us"]:
        remarks.append(f"without a line: {format_us(without)}")
    return Sheet(f"Time of kernels by line, step {lines.source.step}, {source_word(lines.source)}", columns, remarks)


def _label_column(run: Run, shown: pd.DataFrame) -> SheetColumn:
    rows = shown[["file", "line", "function"]].itertuples(index=False, name=None)
    labels = [short_line(f"{file}:{line} ({function})", run.manifest.cwd) for file, line, function in rows]
    return SheetColumn("line", labels, is_text=True)


def _left_out(num: int) -> list[str]:
    return [f"{counted(num, 'more line')} (--all-rows shows them)"] if num else []
