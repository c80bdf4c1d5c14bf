"""What a sweep would run, without running it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fakedist.job import profile_command
from fakedist.report.text.sheet import print_heading, print_remark
from fakedist.sweep.command import PointRun, PricedFor
from fakedist.sweep.plan import RankChoice, SweepPlan
from fakedist.sweep.space import Point, all_points
from fakedist.visible import MOST_OF_A_TEXT, visible

_RANKS = {
    "ends": "rank 0, then the last stage of its pipeline",
    "stages": "rank 0, then the last stage of its pipeline; then every stage of {best}",
}


@dataclass(frozen=True)
class DryRun:
    """What a sweep would run.

    Attributes:
        plan: The sweep.
        points: What each point would run, in order; empty if a sampler chooses the points.
        num_runs: Different runs: points that differ only in what they are priced for share one.
    """

    plan: SweepPlan
    points: Sequence[PointRun]
    num_runs: int


def dry_run(plan: SweepPlan) -> DryRun:
    """What a sweep would run.

    Raises:
        SweepError: A point is not valid, no point meets the conditions, or there are too many.
    """
    points: Sequence[Point] = [] if plan.num_trials is not None else all_points(plan.space)
    found = [plan.command.at(plan.space, point) for point in points]
    return DryRun(plan, found, len({run.job for run in found}))


def render_dry_run(found: DryRun, directory: Path, console: Console) -> None:
    """Print the points, and what each would run."""
    plan = found.plan
    if plan.num_trials is not None:
        print_heading(console, f"{plan.num_trials:,} of {plan.space.size:,} points, chosen as results come")
        return
    print_heading(console, f"{len(found.points):,} points of {plan.space.size:,}, {found.num_runs:,} runs")
    for number, run in enumerate(found.points, 1):
        console.print(Text(f"{number}  {visible(run.point.label)}", style="bold"), soft_wrap=True)
        for line in _lines(run, directory):
            console.print(Text(f"   {visible(line, MOST_OF_A_TEXT)}"), soft_wrap=True)
    print_remark(console, f"ranks of each: {ranks_text(plan.ranks)}")
    print_remark(console, f"into {directory}; nothing was run")


def dry_run_object(found: DryRun, directory: Path) -> dict[str, object]:
    """What ``--json`` prints."""
    points = [
        {
            "values": dict(run.point.values),
            "command": command_of(run, directory),
            "pricing": dict(_pricing(run.pricing)),
            "files": {file.file_name: text for file, text in run.files},
        }
        for run in found.points
    ]
    return {"num_points": len(points), "num_runs": found.num_runs, "ranks": found.plan.ranks.text, "points": points}


def command_of(run: PointRun, directory: Path) -> str:
    """The command that runs rank 0 of a point."""
    return profile_command(run.placed(directory))


def ranks_text(ranks: RankChoice) -> str:
    """Which ranks of a point run, in words."""
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
