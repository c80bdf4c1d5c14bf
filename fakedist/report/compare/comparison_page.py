"""A comparison as one page: both timelines and both timed steps on one axis, and every table of changes."""

from __future__ import annotations

import pandas as pd

from fakedist.cost_model.breakdown import kind_family_us
from fakedist.report.compare.change_sheets import comparison_sheets
from fakedist.report.compare.comparison import (
    Compared,
    TimeComparison,
    format_relative,
    format_us_change,
)
from fakedist.report.figures.look import STYLE_NAMES
from fakedist.report.figures.memory_figures import compared_timeline, curves_on_axis, have_steps
from fakedist.report.figures.time_figures import read_kernels
from fakedist.report.page.assets import figure_object, kernels_figure
from fakedist.report.page.drawings import Pack, add_kernels
from fakedist.report.page.run_page import template_text
from fakedist.report.text.wording import run_facts, run_title, step_remark, step_text, us_or_dash
from fakedist.results.compare.common_axis import Stretch, on_axis
from fakedist.results.run import Run
from fakedist.rundir.schema import FAMILIES, KINDS
from fakedist.rundir.step_time import StepTime
from fakedist.units import format_bytes, format_us

_MOST_LAYERS = 14
_COLUMNS = ["path", "category", "a_us", "b_us"]


def time_context(time: TimeComparison) -> dict[str, object]:
    """The page's variables for both steps.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    kernels = [read_kernels(run) for run in time.runs]
    phases = _by_phase(kernels)
    kinds = [name for name in KINDS if name in set(phases["path"])]
    layers = time.layers[_COLUMNS]
    seen = [family for family in FAMILIES if family in {*phases["category"], *layers["category"]}]
    return {
        "of": time.of,
        "steps": [_step(name, run) for name, run in zip("AB", time.runs, strict=True)],
        "numbers": [
            _step_numbers(run, layer_kernels, times)
            for run, layer_kernels, times in zip(time.runs, kernels, time.times, strict=True)
        ],
        "charts": [
            {"title": "Kernels by phase", "rows": _rows(phases, kinds)},
            {"title": "Kernels by layer, its own", "rows": _rows(*layers_with_most(layers))},
        ],
        "groups": _groups(time.groups),
        "of_groups": time.of_communication,
        "families": seen,
    }


def _step(name: str, run: Run) -> dict[str, str]:
    assert run.summary.timed is not None
    time, source = run.summary.timed
    return {
        "name": name,
        "text": step_text(time),
        "word": source.source,
        "number": str(source.step),
        "more": step_remark(time, source),
    }


def _step_numbers(run: Run, kernels: pd.DataFrame, time: StepTime) -> str:
    pack = Pack()
    add_kernels(pack, run, kernels, run.table("layers"), time)
    pack.meta |= {"figures": {"kernels": kernels_figure(run, kernels)}, "style": STYLE_NAMES}
    return pack.text()


def _groups(changes: pd.DataFrame) -> list[dict[str, object]]:
    """Exposed and hidden communication of both runs by group and operation, the most exposed first."""
    exposed = changes[["a_us", "b_us"]].max(axis=1)
    rows = changes.loc[exposed.sort_values(ascending=False, kind="stable").index].head(_MOST_LAYERS)
    most = float(rows[["whole_a_us", "whole_b_us"]].to_numpy().max(initial=0.0)) or 1.0
    groups: list[dict[str, object]] = []
    for row in rows.to_dict("records"):
        sides = []
        for side in "ab":
            whole, part = float(row[f"whole_{side}_us"]), float(row[f"{side}_us"])
            parts = [("exposed", part), ("hidden", max(whole - part, 0.0))]
            bars = [{"key": key, "width": f"{100 * us / most:.3f}%", "text": format_us(us)} for key, us in parts if us]
            sides.append({"side": side.upper(), "parts": bars, "text": format_us(part)})
        change = float(row["change_us"])
        groups.append(
            {
                "name": f"{row['operation']} on {row['group']}",
                "sides": sides,
                "change": format_us_change(change),
                "relative": format_relative(change, float(row["a_us"])),
            }
        )
    return groups


def _by_phase(kernels: list[pd.DataFrame]) -> pd.DataFrame:
    """Columns path (the phase), category (the family), a_us, b_us."""
    a, b = (kind_family_us(kernel) for kernel in kernels)
    rows = [
        (kind, family, a[at, to], b[at, to])
        for at, kind in enumerate(KINDS)
        for to, family in enumerate(FAMILIES)
        if a[at, to] or b[at, to]
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


def layers_with_most(parts: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Merge all layers but those with the most time in either run under one name. Also returns the names in order."""
    sums = parts.groupby("path", sort=True)[["a_us", "b_us"]].sum()
    order = sums.max(axis=1).sort_values(ascending=False, kind="stable").index.tolist()
    if len(order) <= _MOST_LAYERS + 1:
        return parts, order
    rest = f"{len(order) - _MOST_LAYERS:,} more"
    kept = set(order[:_MOST_LAYERS])
    return parts.assign(path=[path if path in kept else rest for path in parts["path"]]), [*order[:_MOST_LAYERS], rest]


def _rows(parts: pd.DataFrame, names: list[str]) -> list[dict[str, object]]:
    """Bars of both runs for each name, divided by family, with widths relative to the longest time."""
    sums = parts.groupby("path")[["a_us", "b_us"]].sum()
    most = float(sums.to_numpy().max(initial=0.0)) or 1.0
    rows: list[dict[str, object]] = []
    for name in names:
        a, b = (float(sums[f"{side}_us"][name]) for side in "ab")
        own = parts[parts["path"] == name].groupby("category", sort=False)[["a_us", "b_us"]].sum()
        sides = [_bar(side, us, own[f"{side.lower()}_us"], most) for side, us in (("A", a), ("B", b))]
        relative = format_relative(b - a, a)
        rows.append({"name": name, "sides": sides, "change": format_us_change(b - a), "relative": relative})
    return rows


def _bar(side: str, us: float, by_family: pd.Series, most: float) -> dict[str, object]:
    parts = [
        {"family": family, "width": f"{100 * by_family[family] / most:.3f}%", "text": format_us(by_family[family])}
        for family in FAMILIES
        if by_family.get(family)
    ]
    return {"side": side, "text": us_or_dash(us), "parts": parts}


_NUM_COLUMNS = 8_000  # enough to zoom into one of several steps


def comparison_page(comparison: Compared, *, plotly_file: str = "") -> str:
    """The page as text. ``plotly_file``, next to the page, has plotly.js; empty to have it in the page."""
    peaks = [summary.peak_allocated_bytes for summary in comparison.summaries]
    sheets = comparison_sheets(comparison, all_rows=True, with_noise=False)
    context: dict[str, object] = {
        "changed": comparison.changed,
        "whys": comparison.whys,
        "time": time_context(comparison.time) if comparison.time else None,
        "sides": [_side("A", comparison.a, peaks[0]), _side("B", comparison.b, peaks[1])],
        "warnings": comparison.warnings,
        "look_first": comparison.look_first,
        "has_steps": have_steps(comparison.a, comparison.b),
        "sheets": sheets,
        "numbers": _numbers(comparison).text(),
    }
    return template_text("compare.html.j2", "compare", context, plotly_file)


def _side(name: str, run: Run, peak: int) -> dict[str, object]:
    summary = run.summary
    return {
        "name": name,
        "peak": format_bytes(peak),
        "when": f"step {summary.peak_step}, {summary.peak_phase}" if summary.peak_phase else "",
        "facts": _facts(run),
    }


def _facts(run: Run) -> list[tuple[str, str, bool]]:
    summary = run.summary
    if summary.rank is None:
        return [(name, text, name == "file") for name, text in run_facts(run)]
    return [
        ("run", str(run.path), True),
        ("job", run_title(run), True),
        ("rank", f"{summary.rank:,} of {summary.world_size:,}", False),
        ("device", f"{summary.device}: {summary.gpu}, torch {summary.torch}", False),
    ]


def _numbers(comparison: Compared) -> Pack:
    runs = (comparison.a, comparison.b)
    curves, pieces = curves_on_axis(*runs)
    pack = Pack()
    for side, (name, curve) in enumerate(zip("ab", curves, strict=True)):
        pack.add(f"{name}_most", on_axis(curve, pieces, side, _NUM_COLUMNS)[1])
    figure = compared_timeline(*runs, num_points=_NUM_COLUMNS)
    names = "-".join(run.path.name for run in runs)
    pack.meta |= {"figures": {"compared": figure_object(figure)}, "style": STYLE_NAMES, "run": names}
    pack.meta["has_steps"] = have_steps(*runs)
    pack.meta["pieces"] = [_piece(piece) for piece in pieces]
    return pack


def _piece(piece: Stretch) -> dict[str, object]:
    return {"step": piece.step, "phase": piece.phase, "from": round(piece.at[0], 6), "to": round(piece.at[1], 6)}
