"""A comparison of runs: what was changed and why the figures did, with both timelines and both steps on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from fakedist.cost_model.breakdown import kind_family_us
from fakedist.report.compare.change_sheets import comparison_sheets
from fakedist.report.compare.comparison import (
    Compared,
    TimeComparison,
    compared_object,
    format_relative,
    format_us_change,
    open_comparison,
)
from fakedist.report.compare.several_runs import SeveralRuns, several_object, several_sheets
from fakedist.report.content.report_blocks import Block, Chart, Drawing, Fact, Facts, Remark, Report, Verdict
from fakedist.report.figures.look import STYLE_NAMES
from fakedist.report.figures.memory_figures import compared_timeline, curves_on_axis, have_steps
from fakedist.report.figures.time_figures import read_kernels
from fakedist.report.page.assets import figure_object, kernels_figure
from fakedist.report.page.bars import BarChart, memory_bars, time_bars
from fakedist.report.page.drawings import Pack, add_kernels
from fakedist.report.text.wording import run_facts, run_title, step_remark, us_or_dash
from fakedist.results.compare import changed_times
from fakedist.results.compare.common_axis import Stretch, on_axis
from fakedist.results.run import Run
from fakedist.results.verdict import step_text, verdict
from fakedist.rundir.schema import FAMILIES, KINDS
from fakedist.rundir.step_time import StepTime
from fakedist.units import format_bytes, format_us
from fakedist.visible import shortened

_MOST_LAYERS = 14
_LONGEST = 24
#: Parts of a step, and their classes in the page's style sheet.
_PARTS = {
    "computes": "t-busy",
    "only communicates": "t-communication",
    "host late": "t-launch_gap",
    "waits": "t-wait",
}
_COLUMNS = ["path", "category", "a_us", "b_us"]
_NUM_COLUMNS = 8_000  # enough to zoom into one of several steps
_STEPS = (
    "Allocated bytes, the same phase of the same step at the same place; the run with more allocations in a phase sets "
    "its width. Drag to zoom in, double-click for all of it."
)
_HISTORIES = (
    "Allocated bytes after each event. A snapshot has no steps, so each history takes the whole width. Drag to zoom "
    "in, double-click for all of it."
)
_LANES = (
    "Phases and layers of the stream that computes most, then every stream, from the beginning of each step on. Drag "
    "to zoom into both, double-click for all of it. Collectives are faded while something computes; a short bar is one "
    "whose duration is not known."
)


def open_compared(paths: Sequence[Path]) -> Compared | SeveralRuns:
    """Compare two runs or snapshots, or more runs with the first of them.

    Raises:
        RunDirectoryError: One of them is neither, or is damaged; or a snapshot is compared with a run without memory.
    """
    return SeveralRuns(paths) if len(paths) > 2 else open_comparison(*paths)


def comparison_report(compared: Compared | SeveralRuns, *, all_rows: bool = False) -> Report:
    """Runs, each compared with the first: what was changed and what that gave, why, and every table of changes.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    runs = dict(zip(compared.names, compared.runs, strict=True))
    base = "the base" if len(runs) > 2 else ""
    facts = [Fact(name, str(run.path), base if name == "A" else "", is_code=True) for name, run in runs.items()]
    blocks: list[Block] = [Verdict(text, name) for name, text in compared.headlines]
    blocks += [Facts(facts), *(Remark(text, is_warning=True) for text in compared.warnings)]
    if isinstance(compared, SeveralRuns):
        blocks += [*_bars(compared), *several_sheets(compared, all_rows=all_rows)]
        blocks += [_details(name, run) for name, run in runs.items()]
        return Report("compare", blocks, partial(several_object, compared))
    blocks += [*map(Remark, compared.look_first), _timeline(compared.a, compared.b)]
    blocks += [*_time_charts(compared.time), *comparison_sheets(compared, all_rows=all_rows)]
    return Report(
        "compare", [*blocks, *(_details(name, run) for name, run in runs.items())], partial(compared_object, compared)
    )


def _details(name: str, run: Run) -> Facts:
    summary = run.summary
    if summary.rank is None:
        return Facts([Fact(*fact, is_code=fact[0] == "file") for fact in run_facts(run)], name, is_detail=True)
    when = f" in step {summary.peak_step}, {summary.peak_phase}" if summary.peak_phase else ""
    fits = verdict(summary, run.manifest.cwd)
    facts = [
        Fact("job", run_title(run), is_code=True),
        Fact("rank", f"{summary.rank:,} of {summary.world_size:,}"),
        Fact("device", f"{summary.device}: {summary.gpu}, torch {summary.torch}"),
        *([] if fits is None else [Fact("memory", fits.word)]),
        Fact("peak", f"{format_bytes(summary.peak_allocated_bytes)} allocated{when}"),
    ]
    return Facts(facts, name, is_detail=True)


def _bars(several: SeveralRuns) -> list[Chart]:
    """The memory of each run at its peak, and its step in parts."""
    is_told = len({run.path.name for run in several.runs}) == len(several.runs)
    named = [
        (f"{name} {shortened(run.path.name, _LONGEST)}" if is_told else name, run)
        for name, run in zip(several.names, several.runs, strict=True)
    ]
    memory = Chart("bars", "Memory at the peak of each run", partial(memory_bars, named), "measured", label="Memory")
    if not any(several.timed):
        return [memory]
    steps = partial(_step_bars, several, [label for label, _ in named])
    return [memory, Chart("bars", "The timed step of each run", steps, several.of_time, label="Time")]


def _step_bars(several: SeveralRuns, labels: Sequence[str]) -> BarChart:
    keys = {name: key for key, name in changed_times.PARTS.items()}
    timed = [(label, time) for label, time in zip(labels, several.timed, strict=True) if time is not None]
    rows = [
        (label, {part: float(getattr(time, keys[part])) for part in _PARTS}, format_us(time.step_us), "")
        for label, time in timed
    ]
    return time_bars(rows, _PARTS, max(time.step_us for _, time in timed))


def _timeline(a: Run, b: Run) -> Chart:
    has_steps = have_steps(a, b)
    title, remark = ("Both runs over the steps", _STEPS) if has_steps else ("Both histories", _HISTORIES)

    def draw() -> Drawing:
        curves, pieces = curves_on_axis(a, b)
        arrays = {
            f"{name}_most": on_axis(curve, pieces, side, _NUM_COLUMNS)[1]
            for side, (name, curve) in enumerate(zip("ab", curves, strict=True))
        }
        figures = {"compared": figure_object(compared_timeline(a, b, num_points=_NUM_COLUMNS))}
        return Drawing(figures, {"has_steps": has_steps, "pieces": [_piece(piece) for piece in pieces]}, {}, arrays)

    return Chart("compared", title, draw, "measured", remark, "Memory")


def _time_charts(time: TimeComparison | None) -> list[Chart]:
    if time is None:
        return []

    def draw() -> Drawing:
        sides = zip("AB", time.runs, time.times, strict=True)
        steps = [_drawn_step(name, run, _step_numbers(run, read_kernels(run), of)) for name, run, of in sides]
        return Drawing({}, {}, {"steps": steps})

    charts = [Chart("steps", "Both timed steps on one axis", draw, time.of, _LANES, "Time")]
    charts += [Chart("pairs", str(pairs["title"]), partial(dict, pairs), time.of) for pairs in time_pairs(time)]
    if groups := group_pairs(time):
        legend = [
            ("exposed: the step waits for it", "f-communication"),
            ("hidden: something computes", "f-communication hidden"),
        ]
        pairs = {"legend": legend, "rows": groups}
        charts.append(Chart("pairs", "Communication by group", partial(dict, pairs), time.of_communication))
    return charts


def time_pairs(time: TimeComparison) -> list[dict[str, Any]]:
    """The bars of both runs by phase and by layer, divided by family.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    phases, layers = _by_phase([read_kernels(run) for run in time.runs]), time.layers[_COLUMNS]
    kinds = [name for name in KINDS if name in set(phases["path"])]
    seen = {*phases["category"], *layers["category"]}
    legend = [(family, f"f-{family}") for family in FAMILIES if family in seen]
    return [
        {"title": "Kernels by phase", "legend": legend, "rows": _rows(phases, kinds)},
        {"title": "Kernels by layer, its own", "legend": legend, "rows": _rows(*layers_with_most(layers))},
    ]


def _drawn_step(name: str, run: Run, numbers: str) -> dict[str, str]:
    assert run.summary.timed is not None
    time, source = run.summary.timed
    return {
        "name": name,
        "numbers": numbers,
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


def group_pairs(time: TimeComparison) -> list[dict[str, Any]]:
    """Exposed and hidden communication of both runs by group and operation, the most exposed first."""
    changes = time.groups
    exposed = changes[["a_us", "b_us"]].max(axis=1)
    rows = changes.loc[exposed.sort_values(ascending=False, kind="stable").index].head(_MOST_LAYERS)
    most = float(rows[["whole_a_us", "whole_b_us"]].to_numpy().max(initial=0.0)) or 1.0
    groups: list[dict[str, Any]] = []
    for row in rows.to_dict("records"):
        sides = []
        for side in "ab":
            whole, part = float(row[f"whole_{side}_us"]), float(row[f"{side}_us"])
            parts = [("exposed", "", part), ("hidden", " hidden", max(whole - part, 0.0))]
            sides.append(
                {
                    "side": side.upper(),
                    "parts": [_part(name, f"f-communication{style}", us, most) for name, style, us in parts if us],
                    "text": format_us(part),
                }
            )
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
    parts = [_part(family, f"f-{family}", by_family[family], most) for family in FAMILIES if by_family.get(family)]
    return {"side": side, "text": us_or_dash(us), "parts": parts}


def _part(name: str, style: str, us: float, most: float) -> dict[str, str]:
    return {"name": name, "style": style, "width": f"{100 * us / most:.3f}%", "text": format_us(us)}


def _piece(piece: Stretch) -> dict[str, object]:
    return {"step": piece.step, "phase": piece.phase, "from": round(piece.at[0], 6), "to": round(piece.at[1], 6)}
