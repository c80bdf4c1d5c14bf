"""A comparison of runs: what was changed and why the figures did, with both timelines and both steps on one axis.

Why a real step is slower than the estimate: a trace against a run.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from math import isnan
from typing import Any

import pandas as pd

from fakedist.cost_model.breakdown import kind_family_us
from fakedist.errors import JobError, RunDirectoryError
from fakedist.report.content.change_sheets import calls_at_once, comparison_sheets
from fakedist.report.content.report_blocks import (
    KEY,
    Block,
    Chart,
    Drawing,
    Fact,
    Facts,
    Remark,
    Report,
    Sheet,
    SheetColumn,
    Verdict,
    us_column,
)
from fakedist.report.content.time import group_time_sheet
from fakedist.report.content.wording import run_facts, run_title, source_word, step_remark, us_or_dash
from fakedist.report.figures.look import STYLE_NAMES
from fakedist.report.figures.memory_figures import compared_timeline, curves_on_axis, have_steps
from fakedist.report.figures.time_figures import lanes_of, read_kernels
from fakedist.report.page.assets import figure_object
from fakedist.report.page.drawings import Pack, add_kernels
from fakedist.report.page.run_charts import BarChart, memory_bars, time_bars
from fakedist.results.compare import changed_times
from fakedist.results.compare.against_trace import slower_parts
from fakedist.results.compare.allocation_streams import StreamDifference
from fakedist.results.compare.change_tables import COLUMNS, ChangeTable
from fakedist.results.compare.layer_matching import on_axis
from fakedist.results.compare.reasons import changed_text
from fakedist.results.comparison import Compared, Comparison, SnapshotComparison, StepComparison
from fakedist.results.run import Run
from fakedist.results.verdict import step_text, timed_step_name, verdict
from fakedist.rundir.plain import to_plain
from fakedist.rundir.schema import FAMILIES, KINDS, MOMENTS
from fakedist.rundir.step_time import StepTime
from fakedist.units import format_bytes, format_relative, format_us, format_us_change
from fakedist.visible import shortened

_TITLES = {
    "part": ("The step", "step"),
    "layer": ("By layer, own kernels", "layer"),
    "operation": ("By operation", "operation"),
    "collective": ("By collective, exposed time", "collective"),
    "family": ("By family of kernels", "family of kernels"),
}
_NUM_ROWS = 12
#: An operation below this share of what the step is slower by explains nothing.
_MIN_SHARE = 0.02


def real_step_report(real: Run, run: Run, *, all_rows: bool) -> Report:
    """Compare the step of a trace with a run's, which is estimated or measured; of two traces, B's with A's."""
    sides = []
    for side in (real, run):
        if side.summary.timed is None:
            hint = "a trace is compared with a run of fakedist profile, without --no-kernels"
            raise RunDirectoryError(f"{side.path} has no timed step to compare", hint)
        sides.append(side.summary.timed)
    tables = slower_parts(real, run)
    names = ("B", "A") if run.manifest.job is None else ("real", "run")
    facts = [
        Fact(name, str(side.path), f"{timed_step_name(side.summary, timed[1].step)}, {source_word(timed[1])}")
        for name, side, timed in zip(names, (real, run), sides, strict=True)
    ]
    gpus = [timed[1].gpu or "unknown" for timed in sides]
    differ = f"the GPUs differ: {gpus[0]} and {gpus[1]}"
    if run.manifest.job is None:
        facts.reverse()
        differ = f"the GPUs differ: A's is {gpus[1]}, B's {gpus[0]}"
    elif not sides[0][1].gpu:
        differ = f"the real file does not name its GPU, which may not be the run's: {gpus[1]}"
    remarks = [Remark(differ, is_warning=True)] if gpus[0] != gpus[1] else []
    verdict = _verdict(tables, "B's" if names[0] == "B" else "The real")
    blocks: list[Block] = [Verdict(verdict), Facts(facts), *remarks]
    sheets = [_sheet(*_TITLES[name], table, names, all_rows=all_rows) for name, table in tables.items()]
    blocks += [sheet for sheet in sheets if sheet.columns[0].cells]
    if "layer" not in tables:
        blocks.append(Remark("no layer has the same name on both sides: operations are compared instead"))

    def data() -> dict[str, object]:
        tables_of = {name: table.to_dict("records") for name, table in tables.items()}
        return {"real": str(real.path), "run": str(run.path), "gpus": gpus, "why": verdict, **tables_of}

    return Report("compare", blocks, data)


def _verdict(tables: dict[str, pd.DataFrame], whose: str) -> str:
    step = tables["part"].iloc[0]
    slower = float(step["slower_us"])
    times = f"{format_us(float(step['real_us']))} against {format_us(float(step['run_us']))}"
    word = "slower" if slower > 0 else "faster"
    text = f"{whose} step is {format_us(abs(slower))} {word}: {times}"
    waits = tables["part"].set_index("name")["slower_us"].drop(["step", "all kernels", "generation"], errors="ignore")
    if slower > 0 and waits.max() > 0:
        text += f"; {format_us(float(waits.max()))} more: {waits.idxmax()}"
    operations = tables.get("operation")
    if slower > 0 and operations is not None and float(operations["slower_us"].iloc[0]) > _MIN_SHARE * slower:
        first = operations.iloc[0]
        text += f"; of kernels, {first['name']} most, {format_us(float(first['slower_us']))} more"
    return text


def _sheet(title: str, name: str, table: pd.DataFrame, sides: tuple[str, str], *, all_rows: bool) -> Sheet:
    is_step = (title, name) == _TITLES["part"]
    rows = table if all_rows or is_step else table[table["slower_us"] > 0].head(_NUM_ROWS)
    left = len(table) - len(rows)
    ratios = [real / run if real and run else None for real, run in zip(rows["real_us"], rows["run_us"], strict=True)]
    own = {f"{side}_us": rows[f"num_{side}"].tolist() for side in ("real", "run")}
    amounts = [(side, (rows[us].tolist(), nums)) for side, (us, nums) in zip(sides, own.items(), strict=True)]
    amounts.sort(key=lambda amount: amount[0] == "B")
    columns = [
        SheetColumn(name, rows["name"].tolist(), is_text=True),
        us_column(f"{sides[0]} slower by", rows["slower_us"].tolist(), KEY),
        *(us_column(side, [us if us or num else None for us, num in zip(*own, strict=True)]) for side, own in amounts),
        SheetColumn("times", ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios], rank=1),
    ]
    if not is_step:
        columns += [
            SheetColumn(f"{sides[0]}'s kernels", [f"{count:,}" for count in rows["num_real"]], rank=3),
            SheetColumn(f"{sides[1]}'s", [f"{count:,}" for count in rows["num_run"]], rank=4),
        ]
    remarks = [f"not shown: {left} that take no longer, or are minor (--all-rows shows them)"] if left else []
    return Sheet(title, columns, remarks, is_open=True)


def collectives_report(run: Run) -> Report:
    """The collectives of a file of a real GPU, as its tool measured them; JobError if it has none."""
    if run.summary.timed is None or not run.summary.timed[0].by_group:
        hint = f"fakedist report {shlex.quote(str(run.path))} --full   shows what it has"
        raise JobError(f"{run.path} has no collectives", hint)
    time, source = run.summary.timed
    exposed = f"{format_us(sum(row.exposed_us for row in time.by_group))} of collectives while nothing computes"
    return Report(
        "topology",
        [Verdict(exposed, "groups"), group_time_sheet(time, source_word(source))],
        lambda: {"run_directory": str(run.path), "groups": to_plain(time.by_group)},
    )


_MOST_LAYERS = 14
_LONGEST = 24
#: Parts of a step, and their classes in the page's style sheet.
_PARTS = {
    "computes": "t-busy",
    "only communicates": "t-communication",
    "host late": "t-launch_gap",
    "waits": "t-wait",
}
#: Parts of the object of two runs that a comparison with a snapshot lacks.
_LACKS = ["differences", "phases", "categories", "layers", "collectives", "time"]
_COLUMNS = ["path", "category", "a_us", "b_us"]
_FEW = 50  # bars of a figure whose numbers are packed
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


def comparison_report(compared: Compared, *, all_rows: bool = False) -> Report:
    """Runs, each compared with the first: what was changed and what that gave, why, and every table of changes.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    runs = compared.runs
    base = "the base" if len(runs) > 2 else ""
    facts = [Fact(name, str(run.path), base if name == "A" else "", is_code=True) for name, run in runs.items()]
    blocks: list[Block] = [Verdict(text, name) for name, text in compared.headlines]
    blocks += [Facts(facts), *(Remark(text, is_warning=True) for text in compared.warnings)]
    blocks += map(Remark, compared.look_first)
    blocks += _bars(compared) if len(runs) > 2 else [_timeline(*runs.values()), *_time_charts(compared.time)]
    blocks += [*comparison_sheets(compared, all_rows=all_rows), *(_details(name, run) for name, run in runs.items())]
    return Report("compare", blocks, partial(comparison_object, compared))


def comparison_object(compared: Compared) -> dict[str, object]:
    """The object that ``fakedist compare --json`` prints: every row of every table."""
    if isinstance(compared, Comparison) and len(compared.runs) > 2:
        return _object_of_several(compared)
    a, b = (str(run.path) for run in compared.runs.values())
    if isinstance(compared, SnapshotComparison):
        names = ("figures", "kinds", "lines", "sizes", "reserved", "segments")
        more = {"look_first": compared.look_first, "lacks": _LACKS, "moment": MOMENTS[0]}
        common = {"a": a, "b": b, **dict(compared.headlines), "warnings": compared.warnings}
        return common | more | {"stream": _stream_object(compared.stream)} | _records(compared, names)
    return {
        "a": a,
        "b": b,
        "changes": compared.changes[0],
        "why": compared.why,
        "warnings": compared.warnings,
        "differences": [{"name": name, "a": a, "b": b} for name, (a, b) in compared.differences.items()],
        "renamed_layers": compared.renamed,
        "streams": [{"side": name, **to_plain(row)} for name, row in calls_at_once(compared)],
        **_records(compared, ("figures", "categories", "phases", "layers", "most", "blocks", "collectives")),
        "time": None if compared.time is None else _time_object(compared.time),
    }


def _records(compared: object, names: Sequence[str]) -> dict[str, object]:
    return {name: getattr(compared, name).to_dict("records") for name in names}


def _time_object(time: StepComparison) -> dict[str, object]:
    tables = _records(time, ("parts", "phases", "families", "groups", "layers", "names"))
    rates = time.rates.astype(object).where(time.rates.notna(), None).to_dict("records")
    return {"sources": [source.source for source in time.sources.values()], "why": time.why, **tables, "rates": rates}


def _stream_object(stream: StreamDifference) -> dict[str, object]:
    facts = {name: getattr(stream, name) for name in ("step_a", "step_b", "num_a", "num_b", "num_same", "same_lines")}
    first = None
    if stream.first is not None:
        before, *sides = stream.first
        first = {"num_before": before} | {
            side: None if row is None else {"bytes": row.bytes_, "line": row.line, "phase": row.phase}
            for side, row in zip("ab", sides, strict=True)
        }
    return {**facts, "first": first, "lines": stream.lines.to_dict("records")}


def _object_of_several(compared: Comparison) -> dict[str, object]:
    changes = ["", *map(changed_text, compared.changes)]
    tables = [*compared.memory_tables, *([] if compared.time is None else compared.time.tables)]
    return {
        "runs": [
            {"name": name, "path": str(run.path), "changes": changed}
            for (name, run), changed in zip(compared.runs.items(), changes, strict=True)
        ],
        "warnings": compared.warnings,
        "differences": compared.differences,
        "tables": [
            {"title": table.title, "unit": table.unit, "rows": _rows_of_several(table, [*compared.runs])}
            for table in tables
            if len(table.rows)
        ],
    }


def _rows_of_several(table: ChangeTable, names: Sequence[str]) -> list[dict[str, object]]:
    figure, whole = COLUMNS[table.unit][0], int if table.unit == "bytes" else float
    rows = []
    for row in table.rows.to_dict("records"):
        figures = [(row[figure.format(name.lower())], row.get(f"unknown_{name.lower()}", 0)) for name in names]
        spoken = [str(row[key]).replace("_", " ") if key == "category" else row[key] for key in table.keys.values()]
        known = [None if isnan(value) else {"value": whole(value), "unknown": unknown} for value, unknown in figures]
        rows.append({"name": spoken, "figures": known})
    return rows


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


def _bars(compared: Compared) -> list[Chart]:
    """The memory of each run at its peak, and its step in parts."""
    are_told = len({run.path.name for run in compared.runs.values()}) == len(compared.runs)
    labels = {
        name: f"{name} {shortened(run.path.name, _LONGEST)}" if are_told else name
        for name, run in compared.runs.items()
    }
    named = [(labels[name], run) for name, run in compared.runs.items()]
    charts = [Chart("bars", "Memory at the peak of each run", partial(memory_bars, named), "measured", label="Memory")]
    if (time := compared.time) is not None:
        steps = partial(_step_bars, {labels[name]: step for name, step in time.times.items()})
        charts.append(Chart("bars", "The timed step of each run", steps, time.of, label="Time"))
    return charts


def _step_bars(times: dict[str, StepTime]) -> BarChart:
    keys = {name: key for key, name in changed_times.PARTS.items()}
    rows = [
        (label, {part: float(getattr(time, keys[part])) for part in _PARTS}, format_us(time.step_us), "")
        for label, time in times.items()
    ]
    return time_bars(rows, _PARTS, max(time.step_us for time in times.values()))


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
        parts = [
            {"step": piece.step, "phase": piece.phase, "from": round(piece.at[0], 6), "to": round(piece.at[1], 6)}
            for piece in pieces
        ]
        return Drawing(figures, {"has_steps": has_steps, "pieces": parts}, {}, arrays)

    return Chart("compared", title, draw, "measured", remark, "Memory")


def _time_charts(time: StepComparison | None) -> list[Chart]:
    if time is None:
        return []

    def draw() -> Drawing:
        steps = [
            _drawn_step(name, run, _step_numbers(run, read_kernels(run), time.times[name]))
            for name, run in time.runs.items()
        ]
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


def time_pairs(time: StepComparison) -> list[dict[str, Any]]:
    """The bars of both runs by phase and by layer, divided by family.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    phases, layers = _by_phase([read_kernels(run) for run in time.runs.values()]), time.layers[_COLUMNS]
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
    pack.meta |= {"figures": {"kernels": figure_object(lanes_of(run, kernels, most=_FEW))}, "style": STYLE_NAMES}
    return pack.text()


def group_pairs(time: StepComparison) -> list[dict[str, Any]]:
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
