"""The comparison page's drawings of two timed steps: both on one axis, and phases and layers side by side."""

from __future__ import annotations

import pandas as pd

from fakedist.analysis.times.kernel_kinds import kind_family_us
from fakedist.report.compare.comparison import format_relative
from fakedist.report.compare.time_comparison import TimeComparison, format_us_change
from fakedist.report.figures.kernel_figures import read_kernels
from fakedist.report.figures.look import STYLE_NAMES
from fakedist.report.page.pack import Pack
from fakedist.report.page.page_figures import kernels_figure
from fakedist.report.page.time_drawings import add_kernels
from fakedist.report.text.time_wording import step_remark, step_text, us_or_dash
from fakedist.results.run import Run
from fakedist.run.schema import FAMILIES, KINDS
from fakedist.run.step_time import StepTime
from fakedist.units import format_us

_MOST_LAYERS = 14
_COLUMNS = ["path", "category", "a_us", "b_us"]


def time_context(time: TimeComparison) -> dict[str, object]:
    """The page's variables for both steps.

    Args:
        time: The comparison.

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
        "why": time.why,
        "steps": [_step(name, run) for name, run in zip("AB", time.runs, strict=True)],
        "numbers": [
            _numbers(run, each, times) for run, each, times in zip(time.runs, kernels, time.times, strict=True)
        ],
        "charts": [
            {
                "title": "Kernels by phase",
                "rows": _rows(phases, kinds),
            },
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
        "more": step_remark(time),
    }


def _numbers(run: Run, kernels: pd.DataFrame, time: StepTime) -> str:
    pack = Pack()
    add_kernels(pack, run, kernels, run.table("layers"), time)
    pack.meta |= {"figures": {"kernels": kernels_figure(run, kernels)}, "style": STYLE_NAMES}
    return pack.text()


def _groups(changes: pd.DataFrame) -> list[dict[str, object]]:
    """Exposed and hidden communication of both runs by group and operation, the most exposed first.

    Args:
        changes: Rows of ``changed_times.group_changes``.
    """
    exposed = changes[["a_us", "b_us"]].max(axis=1)
    rows = changes.loc[exposed.sort_values(ascending=False, kind="stable").index].head(_MOST_LAYERS)
    most = float(rows[["whole_a_us", "whole_b_us"]].to_numpy().max(initial=0.0)) or 1.0
    found: list[dict[str, object]] = []
    for row in rows.to_dict("records"):
        sides = []
        for side in "ab":
            whole, part = float(row[f"whole_{side}_us"]), float(row[f"{side}_us"])
            parts = [("exposed", part), ("hidden", max(whole - part, 0.0))]
            bars = [{"key": key, "width": f"{100 * us / most:.3f}%", "text": format_us(us)} for key, us in parts if us]
            sides.append({"side": side.upper(), "parts": bars, "text": format_us(part)})
        change = float(row["change_us"])
        found.append(
            {
                "name": f"{row['operation']} on {row['group']}",
                "sides": sides,
                "change": format_us_change(change),
                "relative": format_relative(change, float(row["a_us"])),
            }
        )
    return found


def _by_phase(kernels: list[pd.DataFrame]) -> pd.DataFrame:
    """Columns path (the phase), category (the family), a_us, b_us."""
    a, b = (kind_family_us(each) for each in kernels)
    rows = [
        (kind, family, a[at, to], b[at, to])
        for at, kind in enumerate(KINDS)
        for to, family in enumerate(FAMILIES)
        if a[at, to] or b[at, to]
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


def layers_with_most(parts: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Merge all layers but those with the most time in either run under one name. Also returns the names in order.

    Args:
        parts: Columns path, category, a_us, b_us.
    """
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
    found: list[dict[str, object]] = []
    for name in names:
        a, b = (float(sums[f"{side}_us"][name]) for side in "ab")
        own = parts[parts["path"] == name].groupby("category", sort=False)[["a_us", "b_us"]].sum()
        sides = [_bar(side, us, own[f"{side.lower()}_us"], most) for side, us in (("A", a), ("B", b))]
        relative = format_relative(b - a, a)
        found.append({"name": name, "sides": sides, "change": format_us_change(b - a), "relative": relative})
    return found


def _bar(side: str, us: float, by_family: pd.Series, most: float) -> dict[str, object]:
    parts = [
        {"family": family, "width": f"{100 * by_family[family] / most:.3f}%", "text": format_us(by_family[family])}
        for family in FAMILIES
        if by_family.get(family)
    ]
    return {"side": side, "text": us_or_dash(us), "parts": parts}
