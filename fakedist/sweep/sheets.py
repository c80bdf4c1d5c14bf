"""The report of a sweep: its answer and its points; and what a dry run would run."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from fakedist.options import profile_command
from fakedist.report.content.report_blocks import (
    KEY,
    Block,
    Chart,
    Fact,
    Facts,
    Remark,
    Report,
    Sheet,
    SheetColumn,
    Verdict,
    bytes_column,
    count_column,
    us_column,
)
from fakedist.report.content.wording import MFU_BASIS, command_line
from fakedist.report.render.terminal import print_heading, print_remark
from fakedist.rundir.plain import to_plain
from fakedist.sweep.command import PointRun, PricedFor
from fakedist.sweep.plan import RankChoice, SweepPlan
from fakedist.sweep.point_rows import Row, Status, StepEstimate
from fakedist.sweep.ranking import AxisEffect, answer, counts_text, memory_text, rate_in, short_label, speed_text
from fakedist.sweep.space import text_of
from fakedist.sweep.sweep_directory import PAGE_NAME, TABLE_NAME, Sweep, reports_of
from fakedist.units import format_bytes, format_us
from fakedist.visible import MOST_OF_A_TEXT, visible

TITLE = "Points, fastest first: memory measured (NCCL and CUDA context estimated), times estimated"
EFFECTS_TITLE = "How much each axis matters: points that differ in it alone, in the median"
ON_FRONT = "*: no other point takes less memory and is faster"
_NUM_ROWS = 20
_LONGEST_WORD = 24
_NUM_REASONS = 5


def sweep_report(sweep: Sweep, *, folder: Path | None = None) -> Report:
    """A sweep: its answer, every point, what each axis matters, and why points failed.

    A page links to the points' pages if ``folder``, where it goes, is the sweep's own directory.
    """
    ranking = sweep.ranking
    rows = shown_rows(sweep)
    is_here = folder is not None and folder.resolve() == sweep.path.resolve()
    first, *sentences = answer(ranking)
    blocks: list[Block] = [Verdict(first, "answer"), Verdict(counts_text(ranking), "counts"), *_best(sweep)]
    blocks += [Remark(text) for text in (*sentences, *reasons(sweep.rows))]
    blocks += _charts(sweep)
    if rows:
        links = [pages_of(row, sweep) for row in rows] if is_here else None
        rest = f"{len(rows) - _NUM_ROWS:,} more are in {TABLE_NAME}, on the page and in --json"
        columns = columns_of(sweep, rows)
        sheet = Sheet(TITLE, columns, remarks_of(rows), links=links, is_open=True, label="Points")
        blocks.append(replace(sheet, most=_NUM_ROWS, rest=rest))
    if any(effect.num_groups for effect in ranking.effects):
        blocks.append(Sheet(EFFECTS_TITLE, effects_of(ranking.effects)))
    for label, title, chosen in (
        ("Misfits", MISFITS_TITLE, misfits(sweep.rows)),
        ("Failures", FAILURES_TITLE, failures(sweep.rows)),
    ):
        links = [pages_of(row, sweep) for row in chosen] if is_here else None
        blocks += [_point_sheet(label, title, chosen, links)] if chosen else []
    blocks.append(Remark(f"in {sweep.path}: {TABLE_NAME}, {PAGE_NAME} and the run directories"))
    return Report("sweep", [*blocks, _about(sweep)], partial(_sweep_object, sweep), sweep.frame)


def _charts(sweep: Sweep) -> list[Chart]:
    def draw(name: str) -> Callable[[], object]:
        def drawn() -> object:
            from fakedist.sweep import charts  # plotly takes a while to import

            return getattr(charts, name)(sweep)

        return drawn

    charts = []
    unit = sweep.ranking.unit
    if sweep.ranking.speeds:
        text = (
            "Each point with a step. The dotted line joins the points that no other beats in both. The band is the 90 "
            "% interval of the fastest that fits: points in it are about as fast. A click opens the point's report."
        )
        source = "memory measured, speed estimated"
        charts.append(Chart("front", "Memory against speed", draw("draw_front"), source, text, "Charts"))
    if sweep.varied_axes:
        text = (
            "A line for each point, the stronger the faster, grey where it has no step; the last axis is its speed"
            f"{f' in {unit}' if unit else ''}. The axes that matter most are on the right."
        )
        charts.append(Chart("parallel", "Points over all axes", draw("draw_parallel"), "speed estimated", text))
    if sweep.ranking.speeds and len(sweep.varied_axes) > 1:
        text = f"The fastest point that fits for each pair of values, in {unit}. Where there is no square, none fits."
        charts.append(Chart("map", "Two axes", draw("draw_maps"), "speed estimated", text))
    return charts


def pages_of(row: Row, sweep: Sweep) -> list[tuple[str, str]]:
    """The pages of a point's ranks, as (text, address)."""
    return [(f"rank {rank}", quote(page)) for rank, page in reports_of(sweep.path, row)]


def _best(sweep: Sweep) -> list[Block]:
    """The fastest point that fits: its speed, its memory and its step, and the command that runs it."""
    best, unit = sweep.ranking.best, sweep.ranking.unit
    if best is None:
        return []
    row = best.row
    speed = best.speed
    step = best.row.step
    interval = f"90 % interval {speed_text(speed.low)} to {speed_text(speed.high)}"
    figures = [Fact(unit, speed_text(speed.value), interval if speed.low < speed.high else "its interval is not known")]
    if row.fullest is not None:
        figures.append(Fact("memory", memory_text(row.fullest), "measured, NCCL and context estimated"))
    if step is not None:
        known = step.low_us is not None and step.high_us is not None
        interval = f"90 % interval {format_us(step.low_us or 0.0)} to {format_us(step.high_us or 0.0)}" if known else ""
        figures.append(Fact("step", format_us(step.step_us), interval))
        if step.mfu is not None:
            figures.append(Fact("MFU", f"{step.mfu:.1%}"))
    tied = len(sweep.ranking.as_fast)
    figures.append(Fact("statistically tied with it", f"{tied:,}", "other point" if tied == 1 else "other points"))
    command = [Fact("its command", command_line(shlex.split(row.command)), is_code=True)]
    return [Facts(figures, short_label(row.values)), *([Facts(command, is_detail=True)] if row.command else [])]


_MOST_NAMED = 6


def _about(sweep: Sweep) -> Facts:
    """The sweep's setting and its command. What no point knows is left out."""
    rows = sweep.rows
    steps = [row.step for row in rows if row.step is not None]
    worlds = sorted({row.world_size for row in rows if row.world_size})
    memory = sorted({rank.capacity_bytes for row in rows for rank in row.ranks if rank.capacity_bytes})
    gpus = list(dict.fromkeys(step.gpu for step in steps))
    sizes = _named([format_bytes(bytes_) for bytes_ in memory])
    facts = [
        ("world", f"{_named([f'{world:,}' for world in worlds])} rank{'s' * (worlds != [1])}" if worlds else "", False),
        ("GPU", ", ".join(filter(None, (_named(gpus), sizes and f"{sizes} of memory"))), False),
        ("fabric", _named(list(dict.fromkeys(step.fabric for step in steps))), False),
        ("script", sweep.about.program, True),
        ("ranks of a point", sweep.about.ranks, False),
        ("headroom asked for", f"{sweep.about.headroom:.0%}", False),
        ("command", command_line(sweep.about.command), True),
        ("directory", str(sweep.path), True),
    ]
    shown = [Fact(name, text, is_code=is_code) for name, text, is_code in facts if text]
    return Facts(shown, "This sweep", label="Sweep", is_detail=True)


def _named(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return ", ".join(texts[:_MOST_NAMED]) + more


def shown_rows(sweep: Sweep) -> list[Row]:
    """The points that ran to the end: those ranked, fastest first, then the others in the order of the points."""
    ranked = [entry.row for entry in sweep.ranking.ranked]
    ids = {row.id for row in ranked}
    return [*ranked, *(row for row in sweep.rows if row.id not in ids and row.fullest is not None)]


def columns_of(sweep: Sweep, rows: Sequence[Row]) -> list[SheetColumn]:
    """The table of points."""
    entries = {entry.row.id: entry for entry in sweep.ranking.ranked}
    same = {name for name, count in Counter(entry.place for entry in sweep.ranking.ranked).items() if count > 1}

    def place(row: Row) -> str:
        if row.id not in entries:
            return "-"
        number = entries[row.id].place
        return f"{number}{'=' if number in same else ''}{'*' if row.id in sweep.ranking.front else ''}"

    fullest = [rank for row in rows if (rank := row.fullest) is not None]
    steps = [row.step for row in rows]
    return [
        SheetColumn("place", [place(row) for row in rows]),
        *(
            _values(name, [text_of(dict(row.values)[name]) for row in rows])
            for name, values in sweep.about.axes.items()
            if len(values) > 1
        ),
        SheetColumn("", [str(row.status) for row in rows], is_text=True),
        bytes_column("memory", [rank.total_bytes for rank in fullest]),
        bytes_column("free", [rank.capacity_bytes - rank.total_bytes for rank in fullest], rank=1),
        bytes_column("reserved", [rank.peak_reserved_bytes for rank in fullest], rank=2),
        bytes_column("allocated", [rank.peak_allocated_bytes for rank in fullest], rank=4),
        bytes_column("NCCL up to", [rank.nccl_high_bytes for rank in fullest], rank=3),
        us_column("step", [None if step is None else step.step_us for step in steps]),
        SheetColumn(
            "90 % interval",
            [
                "-"
                if step is None or step.low_us is None or step.high_us is None
                else f"{format_us(step.low_us)} to {format_us(step.high_us)}"
                for step in steps
            ],
            rank=3,
        ),
        *([_rates(unit, steps)] if (unit := sweep.ranking.unit) else []),
        SheetColumn("MFU", ["-" if step is None or step.mfu is None else f"{step.mfu:.1%}" for step in steps], rank=2),
        us_column("exposed", [None if step is None else step.communication_us for step in steps], rank=2),
        count_column("tokens a step", [None if step is None else step.tokens_per_step for step in steps], 5),
        SheetColumn("bubble", [_bubble(step) for step in steps], rank=2),
        *(
            _share(name, rows)
            for name in dict.fromkeys(name for row in rows for rank in row.ranks for name in rank.shares)
        ),
    ]


def _share(name: str, rows: Sequence[Row]) -> SheetColumn:
    parts = [row.share(name) for row in rows]
    cells = ["-" if part is None else f"{part:.1%}" for part in parts]
    return SheetColumn(f"{name.replace('_', ' ')} (simulated)", cells, values=parts)


def remarks_of(rows: Sequence[Row]) -> list[str]:
    """Explain the columns of the table of points."""
    has_mfu = any(row.step is not None and row.step.mfu is not None for row in rows)
    parts = ((name, part) for row in rows for rank in row.ranks for name, part in rank.shares.items())
    whys = {name: part for name, part in parts if isinstance(part, str)}
    unknown = [f"no {name.replace('_', ' ')}: {why}" for name, why in whys.items()]
    return [ON_FRONT, *([f"MFU: {MFU_BASIS}"] if has_mfu else []), *unknown]


def _values(axis: str, cells: list[str]) -> SheetColumn:
    """The points' values on an axis; long ones fold."""
    return SheetColumn(axis, cells, is_text=max(map(len, cells), default=0) > _LONGEST_WORD, rank=KEY)


def effects_of(effects: Sequence[AxisEffect]) -> list[SheetColumn]:
    """The table of axes."""
    shown = [effect for effect in effects if effect.num_groups]
    ratios = ["-" if row.speed_ratio is None else f"{row.speed_ratio:.2f}x" for row in shown]
    memory = ["-" if row.memory_bytes is None else format_bytes(row.memory_bytes) for row in shown]
    return [
        SheetColumn("axis", [row.axis for row in shown], is_text=True),
        SheetColumn("fastest over slowest", ratios),
        SheetColumn("fastest most often", [row.best or "-" for row in shown]),
        SheetColumn("memory", memory),
        SheetColumn("groups", [f"{row.num_groups:,}" for row in shown], rank=1),
    ]


def reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Reasons why points are invalid, failed or were pruned, the most frequent first."""
    for status in (Status.INVALID, Status.FAILED, Status.PRUNED, Status.SLOWER):
        counted = Counter((row.reason, row.line) for row in rows if row.status is status)
        for (reason, line), number in counted.most_common(_NUM_REASONS):
            first = next(row for row in rows if row.status is status and row.reason == reason)
            at = f" at {line}" if line else ""
            times = f"{number:,} x " if number > 1 else ""
            yield f"{times}{status}: {reason}{at} (first {first.label})"
        if len(counted) > _NUM_REASONS:
            yield f"{status}: {len(counted) - _NUM_REASONS} other reasons"
    again = [result for row in rows for result in row.ranks if result.first_try]
    for why, number in Counter(result.first_try for result in again).most_common(_NUM_REASONS):
        yield f"{number:,} {'rank' if number == 1 else 'ranks'} ran a second time: the first was {why}"
    without = Counter(row.why_no_step for row in rows if row.why_no_step)
    for why, number in without.most_common(_NUM_REASONS):
        yield f"{number:,} without a step: {why}"


MISFITS_TITLE = "Points that do not fit, and why: memory measured (NCCL and CUDA context estimated)"
FAILURES_TITLE = "Points that did not run to the end"


def misfits(rows: Sequence[Row]) -> list[Row]:
    """The points that do not fit, or may not, those that come closest first."""
    order = {Status.MAY_NOT_FIT: 0, Status.DOES_NOT_FIT: 1, Status.SKIPPED: 2, Status.PRUNED: 3}
    chosen = [row for row in rows if row.status in order]
    return sorted(chosen, key=lambda row: (order[row.status], -(row.headroom_bytes or float("-inf"))))


def failures(rows: Sequence[Row]) -> list[Row]:
    """The points that were refused or failed."""
    return [row for row in rows if row.status in (Status.INVALID, Status.FAILED)]


def _point_sheet(
    label: str, title: str, rows: Sequence[Row], links: Sequence[Sequence[tuple[str, str]]] | None
) -> Sheet:
    """Points with the reasons for their status."""
    texts = {
        "point": [row.label for row in rows],
        "": [str(row.status) for row in rows],
        "why": [row.reason for row in rows],
        "layer": [row.layer for row in rows],
        "line": [row.line for row in rows],
    }
    columns = [SheetColumn(name, cells, is_text=True) for name, cells in texts.items() if any(cells)]
    return Sheet(title, columns, links=links, label=label, is_detail=True)


def _sweep_object(sweep: Sweep) -> dict[str, object]:
    ranking = sweep.ranking
    best = ranking.best
    return {
        "directory": str(sweep.path),
        "command": sweep.about.program,
        "ranks": sweep.about.ranks,
        "headroom": ranking.headroom,
        "counts": {str(status): number for status, number in ranking.counts.items()},
        "answer": list(answer(ranking)),
        "best": None if best is None else best.row.id,
        "statistically_tied": [entry.row.id for entry in ranking.as_fast],
        "unit": ranking.unit,
        "ranking": [{"id": entry.row.id, "place": entry.place, **_plain(entry.speed)} for entry in ranking.ranked],
        "front": sorted(ranking.front),
        "axes": to_plain(ranking.effects),
        "points": [_point(row) for row in sweep.rows],
    }


def _point(row: Row) -> dict[str, object]:
    total_bytes = None if row.fullest is None else row.fullest.total_bytes
    more = {"values": dict(row.values), "total_bytes": total_bytes, "headroom_bytes": row.headroom_bytes}
    return to_plain(row) | more


def _plain(record: object) -> dict[str, object]:
    plain = to_plain(record)
    assert isinstance(plain, dict)
    return plain


def _rates(unit: str, steps: Sequence[StepEstimate | None]) -> SheetColumn:
    speeds = [None if step is None else rate_in(unit, step) for step in steps]
    return SheetColumn(unit, ["-" if speed is None else speed_text(speed) for speed in speeds], values=speeds)


def _bubble(step: StepEstimate | None) -> str:
    if step is None:
        return "-"
    if step.bubble_from == "not known":
        return "?"
    return f"{'~' if step.bubble_from == 'formula' else ''}{format_us(step.bubble_us)}"


_RANKS = {
    "ends": "rank 0, then the last stage of its pipeline",
    "stages": "rank 0, then the last stage of its pipeline; then every stage of {best}",
}


@dataclass(frozen=True)
class DryRun:
    """The points and runs of a sweep that does not run.

    Points that differ only in what they are priced for share one of the ``num_runs``.
    """

    plan: SweepPlan
    points: Sequence[PointRun]
    num_runs: int


def dry_run(plan: SweepPlan) -> DryRun:
    """The points and runs of a sweep that does not run.

    Raises:
        SweepError: A point is not valid, no point meets the conditions, or there are too many.
    """
    runs = [plan.command.at(plan.space, point) for point in plan.points()]
    return DryRun(plan, runs, len({run.job for run in runs}))


def render_dry_run(dry: DryRun, directory: Path, console: Console) -> None:
    """Print the points, and what each would run."""
    plan = dry.plan
    print_heading(console, f"{len(dry.points):,} points of {plan.space.size:,}, {dry.num_runs:,} runs")
    for number, run in enumerate(dry.points, 1):
        console.print(Text(f"{number}  {visible(run.point.label)}", style="bold"), soft_wrap=True)
        for line in _lines(run, directory):
            console.print(Text(f"   {visible(line, MOST_OF_A_TEXT)}"), soft_wrap=True)
    print_remark(console, f"ranks of each: {ranks_text(plan.ranks)}")
    print_remark(console, f"into {directory}; nothing was run")


def dry_run_object(dry: DryRun, directory: Path) -> dict[str, object]:
    """The object of ``--json``."""
    points = [
        {
            "values": dict(run.point.values),
            "command": command_of(run, directory),
            "pricing": dict(_pricing(run.pricing)),
            "files": {file.file_name: text for file, text in run.files},
        }
        for run in dry.points
    ]
    return {"num_points": len(points), "num_runs": dry.num_runs, "ranks": dry.plan.ranks.text, "points": points}


def command_of(run: PointRun, directory: Path) -> str:
    """The command that runs rank 0 of a point."""
    return profile_command(run.placed(directory))


def ranks_text(ranks: RankChoice) -> str:
    """The ranks of a point that run, in words."""
    if ranks.which == "listed":
        return ", ".join(map(str, ranks.ranks))
    return _RANKS[ranks.which].format(best="all points" if ranks.num_best is None else f"the best {ranks.num_best}")


def _lines(run: PointRun, directory: Path) -> Iterator[str]:
    yield command_of(run, directory)
    if priced := " ".join(f"{name}={value}" for name, value in _pricing(run.pricing)):
        yield f"priced for {priced}"
    for file, text in run.files:
        yield f"{file.file_name}:"
        yield from (f"  {line}" for line in text.splitlines()[:_MOST_LINES])
        if len(text.splitlines()) > _MOST_LINES:
            yield "  ..."


#: Lines of a point's file that are shown.
_MOST_LINES = 40


def _pricing(pricing: PricedFor) -> Iterator[tuple[str, object]]:
    for field in fields(pricing):
        if (value := getattr(pricing, field.name)) not in (None, field.default):
            yield field.name, value
