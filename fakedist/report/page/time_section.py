"""The page's section about a step's time, as text."""

from __future__ import annotations

import pandas as pd

from fakedist.analysis.layer_table import Fold
from fakedist.analysis.times.kernel_kinds import kind_family_us
from fakedist.analysis.times.layer_times import fold_times
from fakedist.analysis.times.totals import rows_of
from fakedist.report.page.time_drawings import LAYER_FIGURES
from fakedist.report.text.time_sheets import bound_of, family_columns, path_place, path_words
from fakedist.report.text.time_wording import (
    accuracy_text,
    communication_word,
    flops_rate,
    short_kernel,
    source_word,
    step_remark,
    step_text,
    step_word,
    time_figures,
    unknown_time,
    us_or_dash,
)
from fakedist.report.text.wording import MIN_SHARE, layer_label
from fakedist.results.run import Run
from fakedist.run.schema import FAMILIES, KINDS
from fakedist.run.step_time import KernelSource, KernelTime, LayerTime, StepTime
from fakedist.run.summary import Summary
from fakedist.units import format_bytes, format_us

_MOST_ROWS = 1_000  # of a table
_MOST_KERNELS = 200
_HEADINGS = ("generation", "forward", "recompute", "backward", "optimizer", "other", "total", "host late")


def time_section(run: Run, kernels: pd.DataFrame, layers: pd.DataFrame, folds: list[Fold]) -> dict[str, object]:
    """Where the time of the timed step goes.

    Args:
        run: The run.
        kernels: The result of :func:`fakedist.report.page.time_drawings.read_kernels`.
        layers: The table ``layers``.
        folds: Its layers, folded.
    """
    assert run.summary.timed is not None
    time, source = run.summary.timed
    told = source_word(source)
    names = run.table("kernel_names")
    names = names[names["family"] != "communication"]
    return {
        "word": source.source,
        "source": told[:1].upper() + told[1:],
        "step": source.step,
        "notes": [text for text in (*(note.text for note in source.notes), accuracy_text(source)) if text],
        "figures": time_figures(time),
        "shares": _shares(time),
        "kinds": _kinds(kernels),
        "families": _families(time),
        "communication_word": communication_word(time),
        "step_word": step_word(source),
        "path": _path(time),
        "groups": _groups(time),
        "ranges": _ranges(time),
        "num_more_ranges": max(len(time.ranges) - _MOST_KERNELS, 0),
        "layers": _layers(run.table("layer_times"), layers, folds, time.kernel_us or 1.0),
        "top": [_top(row, time) for row in rows_of(KernelTime, names.head(_MOST_KERNELS))],
        "num_more_names": max(len(names) - _MOST_KERNELS, 0),
        "min_share": f"{MIN_SHARE:.1%}",
    }


def layer_columns(run: Run, folds: list[Fold], source: KernelSource) -> dict[str, object]:
    """The columns of times in the table of layers at the peak, with their cells by number of the fold.

    Args:
        run: The run.
        folds: Its layers, folded.
        source: Where the kernels come from.
    """
    table = fold_times(run.table("layer_times"), run.table("layers"), folds)
    used = [name for name in ("generation_us", "forward_us", "recompute_us", "backward_us") if table[name].any()]
    columns = [table[name].tolist() for name in used]
    return {
        "word": source.source,
        "columns": [(name, name.removesuffix("_us")) for name in used],
        "cells": [[(us, us_or_dash(us)) for us in row] for row in zip(*columns, strict=True)] or [[]] * len(table),
    }


def step_figure(summary: Summary) -> dict[str, str] | None:
    """The step's time for the verdict; None if no step was timed."""
    if summary.timed is None:
        return None
    time, source = summary.timed
    return {
        "text": step_text(time),
        "word": source.source,
        "step": str(source.step),
        "more": step_remark(time) or f"communication {communication_word(time)}",
    }


def _shares(time: StepTime) -> list[dict[str, str]]:
    """The parts of the step, as a bar."""
    step_us = time.step_us or 1.0
    parts = {
        "busy": ("computes", time.busy_us),
        "communication": ("only communicates", time.communication_us),
        "launch_gap": ("host late", time.launch_gap_us),
        "wait": ("waits", time.wait_us),
    }
    return [
        {"key": key, "name": name, "text": format_us(us), "width": _percent(us, step_us)}
        for key, (name, us) in parts.items()
        if us
    ]


def _kinds(kernels: pd.DataFrame) -> list[dict[str, object]]:
    """Forward, backward and so on, each by family."""
    sums = kind_family_us(kernels)
    most = sums.sum(axis=1).max() or 1.0
    return [
        {
            "name": kind,
            "text": format_us(float(of_kind.sum())),
            "width": _percent(float(of_kind.sum()), most),
            "parts": [
                {"family": family, "text": format_us(float(us)), "width": _percent(float(us), float(of_kind.sum()))}
                for family, us in zip(FAMILIES, of_kind, strict=True)
                if us
            ],
        }
        for kind, of_kind in zip(KINDS, sums, strict=True)
        if of_kind.sum()
    ]


def _families(time: StepTime) -> dict[str, object]:
    """The terminal's table, with each cell's sort key."""
    columns = [column for column in family_columns(time) if set(column.cells) != {"-"}]
    rows = []
    for row, cells in zip(time.by_family, zip(*(column.cells for column in columns), strict=True), strict=True):
        figures = [(_number(cell), cell) for cell in cells[1:]]
        figures[1] = (row.time_us, cells[2])
        rows.append({"family": cells[0], "cells": figures})
    return {"columns": [column.name for column in columns], "rows": rows}


def _groups(time: StepTime) -> list[dict[str, object]]:
    """Collectives by group and operation: names, and figures with their sort keys."""
    return [
        {
            "group": row.group,
            "operation": row.operation,
            "ranks": (row.group_size, f"{row.group_size:,} on {row.num_nodes:,}"),
            "num_calls": row.num_calls,
            "bytes": (row.moved_bytes, format_bytes(row.moved_bytes)),
            "time": (row.time_us, unknown_time(row.time_us, row.num_unknown)),
            "hidden": (row.hidden_us, format_us(row.hidden_us)),
            "exposed": (row.exposed_us, format_us(row.exposed_us)),
            "share": (row.exposed_us, f"{row.exposed_us / (time.step_us or 1.0):.1%}"),
        }
        for row in time.by_group
    ]


_PATH_CHIPS = {"kernels": "t-busy", "collectives": "t-communication", "host": "t-launch_gap", "idle": "t-wait"}


def _path(time: StepTime) -> list[dict[str, object]]:
    """The critical path, as :func:`_groups`."""
    return [
        {
            "what": path_words(row),
            "place": path_place(row),
            "chip": _PATH_CHIPS[row.kind],
            "time": (row.time_us, format_us(row.time_us)),
            "share": (row.time_us, f"{row.time_us / (time.step_us or 1.0):.1%}"),
            "num_launches": row.num_launches,
        }
        for row in time.critical_path
    ]


def _ranges(time: StepTime) -> list[dict[str, object]]:
    """The script's own ranges by name, as :func:`_groups`."""
    return [
        {
            "name": row.name,
            "num_ranges": row.num_ranges,
            "num_kernels": row.num_kernels,
            "time": (row.kernel_us, unknown_time(row.kernel_us, row.num_unknown)),
            "share": (row.kernel_us, f"{row.kernel_us / (time.kernel_us or 1.0):.1%}"),
            "gpu": (row.gpu_us, us_or_dash(row.gpu_us)),
            "num_calls": row.num_calls,
        }
        for row in time.ranges[:_MOST_KERNELS]
    ]


def _number(text: str) -> float:
    """The sort key of a cell of figures."""
    digits = text.replace(",", "").rstrip("%")
    try:
        return float(digits)
    except ValueError:
        return 0.0


def _layers(times: pd.DataFrame, layers: pd.DataFrame, folds: list[Fold], whole: float) -> dict[str, object]:
    table = fold_times(times, layers, folds)
    found = table[(table["total_us"] > 0) | (table["num_calls"] > 0)]
    shown = found.loc[found["total_us"].nlargest(_MOST_ROWS).index.sort_values()]
    used = [(name, title) for name, title in zip(LAYER_FIGURES, _HEADINGS, strict=True) if shown[name].any()]
    used.sort(key=lambda column: column[0] != "total_us")  # the most important column first
    most = {name: float(shown[name].max()) or 1.0 for name, _ in used}
    rows = rows_of(LayerTime, shown)
    return {
        "columns": used,
        "rows": [
            {
                "fold": fold,
                "label": layer_label(row.name),
                "class_name": row.class_name,
                "num_repeats": row.num_repeats,
                "is_small": row.total_us <= whole * MIN_SHARE,
                "figures": [(us := getattr(row, name), us_or_dash(us), _percent(us, most[name])) for name, _ in used],
                "own": (row.own_us, us_or_dash(row.own_us)),
                "each": _each(row),
                "rate": (row.flops / (row.total_us or 1.0), flops_rate(row.flops, row.total_us)),
                "bound": bound_of(row),
                "calls": (row.num_calls, _calls(row)),
            }
            for fold, row in zip(shown.index.tolist(), rows, strict=True)
        ],
        "has_bound": any(bound_of(row) for row in rows),
        "has_rate": any(row.flops for row in rows),
        "has_calls": any(row.num_calls for row in rows),
        "num_small": sum(row.total_us <= whole * MIN_SHARE for row in rows),
        "num_more": len(found) - len(shown),
    }


def _each(row: LayerTime) -> tuple[float, str]:
    """The sort key, and the least, median and largest time of one repeat."""
    if row.num_repeats < 2:
        return row.total_us, ""
    return row.median_us, " / ".join(map(us_or_dash, (row.least_us, row.median_us, row.largest_us)))


def _calls(row: LayerTime) -> str:
    if not row.num_calls:
        return "-"
    return f"{row.num_calls:,}: {unknown_time(row.communication_us, row.num_unknown_calls)}"


def _top(row: KernelTime, time: StepTime) -> dict[str, object]:
    return {
        "name": short_kernel(row.name, 200),
        "family": row.family,
        "num": row.num_kernels,
        "time": (row.time_us, unknown_time(row.time_us, row.num_unknown)),
        "share": f"{row.time_us / (time.kernel_us or 1.0):.1%}",
        "median": (row.median_us or 0.0, "-" if row.median_us is None else format_us(row.median_us)),
        "shape": row.shape,
        "layer": layer_label(row.layer, row.num_layers),
        "rate": (row.flops / (row.flops_us or 1.0), flops_rate(row.flops, row.flops_us)),
        "bound": row.bound,
    }


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / (whole or 1.0):.3f}%"
