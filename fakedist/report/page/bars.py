"""Horizontal bars of a page, one for each run: memory at the peak by category, and the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fakedist.report.figures.look import spoken
from fakedist.results.run import Run
from fakedist.rundir.schema import CATEGORIES
from fakedist.rundir.summary import Summary
from fakedist.units import format_bytes, format_us


@dataclass(frozen=True)
class Part:
    """A part of a bar: its name, its class in the style sheet, its figure, and its width in percent of the chart."""

    name: str
    style: str
    text: str
    width: str


@dataclass(frozen=True)
class Bar:
    """A bar, with what stands at its ends. ``limit`` is where a mark stands on it; empty for none."""

    name: str
    parts: Sequence[Part]
    text: str
    more: str
    limit: str = ""

    @property
    def aloud(self) -> str:
        """All of it in words."""
        return f"{self.name}: {', '.join(f'{part.name} {part.text}' for part in self.parts)}"


@dataclass(frozen=True)
class BarChart:
    """Bars on one scale, and the names and classes of their parts; ``limit`` is the text of the mark on each."""

    bars: Sequence[Bar]
    legend: Sequence[tuple[str, str]]
    limit: str = ""


_REST = "reserved, not allocated"


def memory_bars(runs: Sequence[tuple[str, Run]]) -> BarChart:
    """Memory of named runs: allocated at the peak by category, what is reserved beyond that, and the GPU's memory."""
    whole = max(max(run.capacity_bytes, run.peak_reserved_bytes) for _, run in runs) or 1
    bars = []
    for name, run in runs:
        held = run.summary.by_category or {"other": run.peak_allocated_bytes}
        sizes = {spoken(kind): (f"k-{kind}", bytes_) for kind, bytes_ in held.items()}
        sizes[_REST] = ("rest", run.peak_reserved_bytes - run.peak_allocated_bytes)
        parts = [
            Part(kind, style, format_bytes(bytes_), _percent(bytes_, whole))
            for kind, (style, bytes_) in sizes.items()
            if bytes_ > 0
        ]
        reserved = f"{format_bytes(run.peak_reserved_bytes)} reserved"
        limit = f"calc({_percent(run.capacity_bytes, whole)} - 3px)" if run.capacity_bytes else ""
        bars.append(Bar(name, parts, format_bytes(run.peak_allocated_bytes), reserved, limit))
    seen = {part.style for bar in bars for part in bar.parts}
    legend = [(spoken(kind), f"k-{kind}") for kind in CATEGORIES if f"k-{kind}" in seen]
    capacities = sorted({run.capacity_bytes for _, run in runs if run.capacity_bytes})
    return BarChart(bars, [*legend, (_REST, "rest")], ", ".join(map(format_bytes, capacities)))


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
    most, capacity = known[by_use[0]].peak_used_bytes, summary.capacity_bytes
    has_limit = most < capacity < 2 * most
    whole = capacity if has_limit else most
    bars = []
    for row in rows:
        sizes = [(name, style, getattr(row, key)) for name, style, key in _IN_USE]
        at_end = sum(size for *_, size in sizes)
        sizes.append((*_AT_PEAK, row.peak_used_bytes - at_end))
        parts = [
            Part(name, style, format_bytes(size), _percent(size, whole)) for name, style, size in sizes if size > 0
        ]
        limit = f"calc({_percent(capacity, whole)} - 3px)" if has_limit else ""
        text, more = format_bytes(row.peak_used_bytes), f"{format_bytes(at_end)} at its end"
        bars.append(Bar(f"{row.phase}, step {row.step}", parts, text, more, limit))
    seen = {part.style for bar in bars for part in bar.parts}
    legend = [(name, style) for name, style in (*(entry[:2] for entry in _IN_USE), _AT_PEAK) if style in seen]
    return BarChart(bars, legend, format_bytes(capacity) if has_limit else ""), len(known) - len(rows)


def time_bars(
    rows: Sequence[tuple[str, Mapping[str, float], str, str]], styles: Mapping[str, str], whole_us: float
) -> BarChart:
    """Steps of ``whole_us`` at most: for each its name, its parts in microseconds, and the figure and words at its end.

    ``styles`` has the class of each part.
    """
    bars = [
        Bar(
            name,
            [
                Part(part, styles[part], format_us(us), _percent(us, whole_us or 1.0))
                for part, us in parts.items()
                if us > 0
            ],
            text,
            more,
        )
        for name, parts, text, more in rows
    ]
    seen = {part.name for bar in bars for part in bar.parts}
    return BarChart(bars, [(name, style) for name, style in styles.items() if name in seen])


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3f}%"
