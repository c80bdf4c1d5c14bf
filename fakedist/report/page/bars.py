"""Horizontal bars of a page, one for each run: memory at the peak by category, and the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fakedist.report.figures.look import spoken
from fakedist.results.run import Run
from fakedist.rundir.schema import CATEGORIES
from fakedist.rundir.summary import Summary
from fakedist.units import format_bytes, format_us


@dataclass(frozen=True)
class Part:
    """A part of a bar: its name, its class in the style sheet, and its figure."""

    name: str
    style: str
    value: float


@dataclass(frozen=True)
class Bar:
    """A bar, with what stands at its ends. A mark stands on it at ``limit``, unless that is 0."""

    name: str
    parts: Sequence[Part]
    text: str
    more: str = ""
    limit: float = 0


@dataclass(frozen=True)
class BarChart:
    """Bars on one scale.

    Attributes:
        legend: The names and classes of their parts.
        unit: "bytes", "us", or what is counted.
        whole: The figure of a bar as wide as the chart; 0 for that of the longest.
        limit: The text of the mark on each.
    """

    bars: Sequence[Bar]
    legend: Sequence[tuple[str, str]]
    unit: str = "bytes"
    whole: float = 0
    limit: str = ""

    def text(self, value: float) -> str:
        """A figure with its unit."""
        formats = {"bytes": format_bytes, "us": format_us}
        return formats[self.unit](value) if self.unit in formats else f"{value:,} {self.unit}"

    @cached_property
    def widest(self) -> float:
        """The figure of a bar as wide as the chart."""
        return self.whole or max(sum(part.value for part in bar.parts) for bar in self.bars) or 1.0


_REST = "reserved, not allocated"


def memory_bars(runs: Sequence[tuple[str, Run]]) -> BarChart:
    """Memory of named runs: allocated at the peak by category, what is reserved beyond that, and the GPU's memory."""
    whole = max(max(run.capacity_bytes, run.peak_reserved_bytes) for _, run in runs) or 1
    bars = []
    for name, run in runs:
        held = run.summary.by_category or {"other": run.peak_allocated_bytes}
        sizes = {spoken(kind): (f"k-{kind}", bytes_) for kind, bytes_ in held.items()}
        sizes[_REST] = ("rest", run.peak_reserved_bytes - run.peak_allocated_bytes)
        parts = [Part(kind, style, bytes_) for kind, (style, bytes_) in sizes.items()]
        reserved = f"{format_bytes(run.peak_reserved_bytes)} reserved"
        bars.append(Bar(name, parts, format_bytes(run.peak_allocated_bytes), reserved, run.capacity_bytes))
    seen = _styles(bars)
    legend = [(spoken(kind), f"k-{kind}") for kind in CATEGORIES if f"k-{kind}" in seen]
    capacities = sorted({run.capacity_bytes for _, run in runs if run.capacity_bytes})
    limit = ", ".join(map(format_bytes, capacities))
    return BarChart(bars, [*legend, (_REST, "rest")], whole=whole, limit=limit)


_IN_USE = (
    ("at its end behind the allocator's segments", "k-parameter", "end_backed_bytes"),
    ("at its end outside of the allocator", "k-communication", "end_outside_bytes"),
    ("at its end by other processes", "k-optimizer_state", "end_others_bytes"),
)
_AT_PEAK = ("more at its peak", "rest")
_MOST_PHASES = 40


def phase_bars(summary: Summary) -> tuple[BarChart, int] | None:
    """The most that each of the script's phases used of the GPU, and how many are left out: those that used least.

    None if that is not known.
    """
    known = [row for row in summary.named_phases if row.peak_used_bytes]
    if not known:
        return None
    by_use = sorted(range(len(known)), key=lambda at: -known[at].peak_used_bytes)
    rows = [known[at] for at in sorted(by_use[:_MOST_PHASES])]
    most = known[by_use[0]].peak_used_bytes
    capacity = summary.capacity_bytes
    has_limit = most < capacity < 2 * most
    whole = capacity if has_limit else most
    bars = []
    for row in rows:
        sizes = [(name, style, getattr(row, key)) for name, style, key in _IN_USE]
        at_end = sum(size for *_, size in sizes)
        sizes.append((*_AT_PEAK, row.peak_used_bytes - at_end))
        text = format_bytes(row.peak_used_bytes)
        more = f"{format_bytes(at_end)} at its end"
        parts = [Part(*size) for size in sizes]
        bars.append(Bar(f"{row.phase}, step {row.step}", parts, text, more, capacity if has_limit else 0))
    seen = _styles(bars)
    legend = [(name, style) for name, style in (*(entry[:2] for entry in _IN_USE), _AT_PEAK) if style in seen]
    limit = format_bytes(capacity) if has_limit else ""
    return BarChart(bars, legend, whole=whole, limit=limit), len(known) - len(rows)


def time_bars(
    rows: Sequence[tuple[str, Mapping[str, float], str, str]], styles: Mapping[str, str], whole_us: float
) -> BarChart:
    """Steps of ``whole_us`` at most: for each its name, its parts in microseconds, and the figure and words at its end.

    ``styles`` has the class of each part.
    """
    bars = [
        Bar(name, [Part(part, styles[part], us) for part, us in parts.items()], text, more)
        for name, parts, text, more in rows
    ]
    seen = _styles(bars)
    return BarChart(bars, [(name, style) for name, style in styles.items() if style in seen], "us", whole_us)


def _styles(bars: Sequence[Bar]) -> set[str]:
    return {part.style for bar in bars for part in bar.parts if part.value > 0}
