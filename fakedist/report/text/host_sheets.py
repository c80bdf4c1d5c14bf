"""The host of a timed step as tables: what it does, where it waits for the GPU, and what it launches too late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fakedist.cost_model.gains import launch_bound
from fakedist.report.content.report_blocks import KEY, Sheet, SheetColumn, us_column
from fakedist.report.text.wording import MIN_SHARE, layer_label
from fakedist.results.verdict import short_line, wait_word
from fakedist.rundir.step_time import HostPart, LateLaunches, StepTime

_NUM_LINES = 8
_LOADING = "of these, data loading"
_Row = TypeVar("_Row")


def host_sheets(time: StepTime, cwd: str, word: str) -> list[Sheet]:
    """Tables of the host by phase, line and layer; none if the GPU hardly waits for it."""
    if time.launch_gap_us < MIN_SHARE * time.step_us or not time.host:
        return []
    sheets = [host_sheet(time, word)]
    sheets += [wait_sheet(time, cwd, word), late_sheet(time, cwd, word), launch_bound_sheet(time, word)]
    return [sheet for sheet in sheets if sheet.columns[0].cells]


def _largest(rows: Sequence[_Row], idle_us: Callable[[_Row], float], step_us: float) -> list[_Row]:
    return [row for row in rows if idle_us(row) >= MIN_SHARE * step_us][:_NUM_LINES]


def host_sheet(time: StepTime, word: str) -> Sheet:
    """The host's time by what it launches for, and its waits."""
    step_us = time.step_us or 1.0
    rows = [*time.host, *([HostPart(_LOADING, time.loading_us)] if time.loading_us else [])]
    return Sheet(
        f"Time of the host, {word}",
        [
            SheetColumn("for", [row.name for row in rows], is_text=True),
            us_column("time", [row.time_us for row in rows], rank=KEY),
            _share("of the step", [row.time_us / step_us for row in rows], 1),
        ],
        ["data loading: in DataLoaders' iterators, in the main thread"] if time.loading_us else [],
    )


def wait_sheet(time: StepTime, cwd: str, word: str) -> Sheet:
    """The lines at which the host waits for the GPU, and how long the GPU is then idle."""
    step_us = time.step_us or 1.0
    rows = _largest(time.host_waits, lambda row: row.idle_us, step_us)
    labels = [short_line(row.line, cwd) or "(no line)" for row in rows]
    return Sheet(
        f"Where the host waits for the GPU, {word}",
        [
            SheetColumn(
                "line",
                [f"after {label}" if row.is_after else label for row, label in zip(rows, labels, strict=True)],
                is_text=True,
            ),
            _count("times", [row.num_waits for row in rows], 1),
            us_column("host waits", [row.wait_us for row in rows], rank=3),
            us_column("GPU idle", [row.idle_us for row in rows], rank=KEY),
            _share("of the step", [row.idle_us / step_us for row in rows], 1),
            SheetColumn("waits in", [wait_word(row) for row in rows], is_text=True, rank=2),
            SheetColumn("layer", [layer_label(row.layer) for row in rows], is_text=True, rank=4),
        ],
        ["GPU idle: behind the late launches that follow; a part of host late"],
    )


def late_sheet(time: StepTime, cwd: str, word: str) -> Sheet:
    """The lines whose operations the host launches too late."""
    step_us = time.step_us or 1.0
    rows = _largest(time.late_launches, lambda row: row.late_us, step_us)
    return Sheet(
        f"Host late by line, {word}",
        [
            SheetColumn("line", [short_line(row.line, cwd) or "(no line)" for row in rows], is_text=True),
            _count("late launches", [row.num_launches for row in rows], 2),
            us_column("GPU idle", [row.late_us for row in rows], rank=KEY),
            _share("of the step", [row.late_us / step_us for row in rows], 1),
            SheetColumn("layer", [_layers_of(row) for row in rows], is_text=True, rank=3),
        ],
        ["the GPU is idle until the host launches what these lines run"],
    )


def _layers_of(row: LateLaunches) -> str:
    more = f" and {row.num_layers - 1:,} more" if row.num_layers > 1 else ""
    return layer_label(row.layer) + more


def launch_bound_sheet(time: StepTime, word: str) -> Sheet:
    """The layers whose kernels take less time than their launches."""
    rows, step_us = launch_bound(time.layers), time.step_us or 1.0
    return Sheet(
        f"Layers whose kernels are shorter than their launches, {word}, with children",
        [
            SheetColumn("layer", [layer_label(row.name, row.num_repeats) for row in rows], is_text=True),
            _count("kernels", [row.num_kernels for row in rows], 3),
            us_column("time of kernels", [row.total_us for row in rows], rank=1),
            us_column("time of the host", [row.host_us for row in rows], rank=1),
            us_column("host late", [row.launch_gap_us for row in rows], rank=KEY),
            _share("of the step", [row.launch_gap_us / step_us for row in rows], 2),
        ],
    )


def _share(name: str, shares: Sequence[float], rank: int) -> SheetColumn:
    return SheetColumn(
        name, [f"{share:.1%}" for share in shares], rank=rank, values=[100 * each for each in shares], unit="%"
    )


def _count(name: str, numbers: Sequence[int], rank: int) -> SheetColumn:
    return SheetColumn(name, [f"{number:,}" for number in numbers], rank=rank, values=[*map(float, numbers)])
