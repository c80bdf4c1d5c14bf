"""The charts of a run's page, each from one pack of data, and the tables next to them.

Horizontal bars of a page, one for each run: memory at the peak by category, and the parts of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import pandas as pd
import plotly.graph_objects as go

from fakedist.analysis.memory_tables import Fold, fold_layers
from fakedist.analysis.topology import ranks_of, read_groups
from fakedist.cost_model.breakdown import kind_family_us
from fakedist.report.content.memory import MOMENT_NAMES
from fakedist.report.content.report_blocks import (
    Block,
    Chart,
    Drawing,
    Sheet,
    bytes_column,
    text_column,
)
from fakedist.report.content.time import timed
from fakedist.report.content.topology import AT_ONCE, RunTopology, stream_columns
from fakedist.report.figures.look import spoken
from fakedist.report.figures.memory_figures import (
    MemoryCurve,
    device_timeline,
    has_segments,
    peak_by_layer,
    read_curve,
    segment_map,
    shows_device,
    timeline_of,
)
from fakedist.report.figures.run_figures import Calls, calls_of, read_calls
from fakedist.report.figures.time_figures import has_roofline, lanes_of, read_kernels, roofline
from fakedist.report.page import drawings
from fakedist.report.page.assets import figure_object
from fakedist.report.page.drawings import Pack, Switch, add_stacks, add_switches
from fakedist.results.run import Run
from fakedist.results.verdict import interval_text, limit_name, step_word
from fakedist.rundir.schema import CATEGORIES, FAMILIES, KINDS
from fakedist.rundir.step_time import StepTime
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


# Charts that zoom compute what they show from the page's numbers, so their figures carry a few points only.
_FEW = 50
#: Rows of the chart of segments: enough to see what fragments, and half a screen.
MOST_SEGMENTS = 16
_STEPS_SHOWN, _MOST_GROUPS, _MOST_PLACES = 8, 12, 200


class RunCharts:
    """The charts of a run; none of what it has nothing for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pack = Pack()  # of the switches

    @cached_property
    def _curve(self) -> MemoryCurve:
        return read_curve(self._run)

    @cached_property
    def _folds(self) -> list[Fold]:
        return fold_layers(self._run.table("layers"))

    @cached_property
    def _calls(self) -> Calls:
        return read_calls(self._run, self._curve)

    @cached_property
    def switches(self) -> list[Switch]:
        """The advised changes that a page can show together."""
        return add_switches(self._pack, self._run, self._curve) if self._run.peak_allocated_bytes else []

    def gauge(self) -> list[Block]:
        """Memory at the peak by category, in that of the GPU."""
        bars = partial(memory_bars, [("the peak", self._run)])
        return [Chart("gauge", "", bars)] if self._run.peak_allocated_bytes else []

    def timeline(self) -> list[Block]:
        """Memory over the steps."""
        return [Chart("timeline", "Every allocation and free", self._timeline, "measured", _TIMELINE)] * bool(
            self._run.peak_allocated_bytes
        )

    def _timeline(self) -> Drawing:
        run = self._run
        curve = self._curve
        pack = self._pack
        summary = self._run.summary
        self.switches  # noqa: B018  (they are in the pack)
        drawings.add_layers(pack, run.table("layers"), self._folds)
        drawings.add_timeline(pack, run, curve)
        drawings.add_reserved(pack, curve)
        drawings.add_spans(pack, run, curve)
        drawings.add_named_phases(pack, run, curve)
        drawings.add_times(pack, run, curve)
        refusal = drawings.add_refusal(pack, run, curve)
        pack.meta["capacity"] = summary.capacity_bytes
        steps = sorted({row.step for row in summary.by_phase if row.step > 0}) if summary.peak_reserved_bytes else []
        colouring = curve.colouring
        legend = [
            {"colour": colour, "name": name}
            for at, (colour, name) in enumerate(zip(colouring.colours, colouring.names, strict=True))
            if (colouring.of_block == at).any()
        ]
        shown = steps if len(steps) <= _STEPS_SHOWN else [*steps[:3], *steps[-3:]]
        figures = {"timeline": figure_object(timeline_of(run, curve, axis="event", num_points=_FEW))}
        return _drawing(pack, figures, refusal=refusal, steps=shown, legend=legend)

    def device(self) -> list[Block]:
        """Use of the GPU by processes and phases."""
        blocks: list[Block] = []
        if shows_device(self._run):
            remark = (
                "After each change of it. Of several changes that share a point, the one with the most in use is drawn."
            )
            drawn = _figure("device", partial(device_timeline, self._run))
            blocks.append(Chart("device-use", "Over the run, by process", drawn, remark=remark))
        if found := phase_bars(self._run.summary):
            chart, left_out = found
            more = f" {left_out:,} phases that used less are not drawn." if left_out else ""
            remark = f"In the order in which the phases ended; the figure is the peak.{more}"
            blocks.append(Chart("bars", "By the script's phases", lambda: chart, remark=remark))
        return blocks

    def peak(self) -> list[Block]:
        """Memory at the peak, by layer and by stack."""
        blocks: list[Block] = []
        if self._run.by_category is not None:
            remark = "By layer and category; an area is its share. Click a layer to look inside."
            drawn = _figure("peak", partial(peak_by_layer, self._run, kind="treemap"))
            blocks.append(Chart("peak", "By layer", drawn, remark=remark))
        pack = Pack()
        if add_stacks(pack, self._run, self._curve):
            blocks.append(Chart("flame", "By stack", lambda: _drawing(pack, {}), remark=_FLAME))
        return blocks

    def segments(self) -> list[Block]:
        """Blocks and holes of the segments with the most free memory."""
        moment = self._run.summary.reserved[0]
        left_out = max(moment.num_segments - MOST_SEGMENTS, 0)
        more = f" {left_out:,} segments with less free memory are not drawn." if left_out else ""
        remark = f"A row is a segment from its first byte to its last: blocks by category, and the holes between.{more}"
        title = f"Segments {MOMENT_NAMES[moment.moment]}, those with the most free memory"
        drawn = _figure("segments", partial(segment_map, self._run, most=MOST_SEGMENTS))
        return [Chart("segment-map", title, drawn, "measured", remark)] if has_segments(self._run) else []

    def time(self) -> list[Block]:
        """Where the time of a step goes: its parts, its limits, its lanes, its kinds, and its roofline."""
        run, (time, source) = self._run, timed(self._run)
        word = source.source
        step_us = time.step_us or 1.0
        kernels = read_kernels(run)
        shares = {
            "computes": time.busy_us,
            "only communicates": time.communication_us,
            "host late": time.launch_gap_us,
            "waits": time.wait_us,
        }
        parts = {name: us for name, us in shares.items() if us}
        bars = time_bars([("the step", parts, format_us(time.step_us), "")], _SHARES, step_us)

        def lanes() -> Drawing:
            pack = Pack()
            layers = run.table("layers")
            drawings.add_kernels(pack, run, kernels, layers, time)
            drawings.add_layer_times(pack, run.table("layer_times"), layers)
            drawings.add_folds(pack, self._folds)
            return _drawing(pack, {"kernels": figure_object(lanes_of(run, kernels, most=_FEW))})

        side_by_side = partial(limit_bars, time)
        limits = Chart("bars", "Limits side by side", side_by_side, step_word(source), _LIMITS, is_narrow=True)
        rooflines = _figure("roofline", partial(roofline, run))
        return [
            Chart("bars", "Its parts", lambda: bars, word, is_narrow=True),
            *([limits] if time.limits else []),
            Chart("kernels", "Kernels by stream", lanes, word, _LANES),
            Chart("bars", "By purpose, and in it by family", partial(_kinds, kernels), word, is_narrow=True),
            *([Chart("roofline", "Roofline", rooflines, word, _ROOFLINE, is_narrow=True)] if has_roofline(run) else []),
        ]  # fmt: skip

    def groups(self) -> list[Block]:
        """The groups of the rank, its place in each, and what can run at once."""
        run = self._run
        job = self._run.manifest.job
        groups = read_groups(run.table("groups"))
        if job is None or not groups:
            return []
        topology = RunTopology(run)
        pictures = []
        for group in groups[:_MOST_GROUPS]:
            nodes = {rank // job.gpus_per_node for rank in ranks_of(group.ranks)}
            where = "within one node" if len(nodes) == 1 else f"across {len(nodes):,} nodes"
            text = f"{group.size:,} ranks {where}; this one is {group.group_rank:,}"
            pictures.append({"name": group.label, "ranks": group.ranks, "text": text})
        remark = (
            f"Each picture shows all {job.world_size:,} ranks, a column for each node of {job.gpus_per_node} GPUs. The "
            "group's members are filled, this rank is marked."
        )
        more = f" And {len(groups) - _MOST_GROUPS} more groups." if len(groups) > _MOST_GROUPS else ""
        world = {"worldSize": job.world_size, "perNode": job.gpus_per_node, "rank": run.summary.rank}
        drawing = Drawing({}, {"world": world}, {"groups": pictures})
        shown = groups[:_MOST_PLACES]
        places = [
            text_column("group", [group.label for group in shown]),
            text_column("place", [f"{group.group_rank:,} of {group.size:,}" for group in shown], kind="word"),
            text_column("ranks", [group.ranks for group in shown]),
            text_column("backend", [group.backend for group in shown], kind="word"),
        ]
        rows = topology.rows()
        sizes = [
            bytes_column("bytes in", [row.bytes_in for row in rows]),
            bytes_column("bytes out", [row.bytes_out for row in rows]),
        ]
        columns = [
            shown for column in stream_columns(rows) for shown in (sizes if column.name == "bytes" else [column])
        ]
        streams = Sheet(
            f"What can run at once in {topology.when}", columns, name="streams", intro=f"{AT_ONCE.capitalize()}."
        )
        return [
            Chart("groups", "Its groups", lambda: drawing, remark=remark + more),
            Sheet("This rank's place in each of its groups", places, name="places"),
            *([streams] if rows else []),
        ]

    def calls_over_time(self) -> list[Block]:
        """Calls over the steps, which follow the memory timeline."""
        if not self._run.peak_allocated_bytes or not self._calls.lanes:
            return []

        def drawn() -> Drawing:
            pack = Pack()
            drawings.add_calls(pack, self._calls)
            return _drawing(pack, {"calls": figure_object(calls_of(self._calls, self._curve.num_moves))})

        remark = "It follows the memory timeline above. A bar is a call; its height is the cube root of its bytes."
        return [Chart("calls", "Calls over the steps", drawn, remark=remark)]


def _figure(name: str, draw: Callable[[], go.Figure]) -> Callable[[], Drawing]:
    return lambda: Drawing({name: figure_object(draw())}, {}, {})


def _drawing(pack: Pack, figures: Mapping[str, object], **context: object) -> Drawing:
    return Drawing(figures, pack.meta, context, pack.numbers)


_TIMELINE = (
    "Every allocation and free of this rank in order; point at a block to see what it is. Drag to zoom in, "
    "double-click for all of it."
)
_FLAME = (
    "Callers above, what they call below, the operations last; a width is its bytes. Click to look inside. Take two "
    "moments of the timeline as A and B to see what is held at B, or only there."
)
_LIMITS = (
    "The step, and how long it would be if all but one of its parts took no time. No change to the other parts makes "
    "it shorter than that. Where two lie in each other's intervals, either may be the limit."
)
_LANES = (
    "Phases and layers of the stream that computes most, then the host, then every stream. Drag to zoom in, "
    "double-click for all of it. Your ranges reach from their first kernel to their last. Collectives are faded while "
    "something computes; a short bar is one whose duration is not known. A click keeps what it says; drag with Shift "
    "to sum a part."
)
_ROOFLINE = (
    "Kernels by name, shape and layer: FLOPs per byte moved, and the rate reached; an area is a time. The roofs are "
    "the GPU's peaks."
)
_SHARES = {"computes": "t-busy", "only communicates": "t-communication", "host late": "t-launch_gap", "waits": "t-wait"}
_LIMIT_STYLES = {
    "step": "t-wait",
    "kernels": "t-busy",
    "collectives": "t-communication",
    "nics": "t-communication",
    "host": "t-launch_gap",
}


def limit_bars(time: StepTime) -> BarChart:
    """The step, and what it would be if all but one of its parts took no time."""
    span = interval_text(time.step_us, time.step_low_us, time.step_high_us)
    rows: list[tuple[str, Mapping[str, float], str, str]]
    rows = [("the step", {"step": time.step_us}, format_us(time.step_us), span)]
    for limit in time.limits:
        span = interval_text(limit.step_us, limit.low_us, limit.high_us)
        rows.append((limit_name(limit), {limit.kind: limit.step_us}, format_us(limit.step_us), span))
    return replace(time_bars(rows, _LIMIT_STYLES, max(time.step_us, time.limits[0].step_us)), legend=[])


def _kinds(kernels: pd.DataFrame) -> BarChart:
    sums = kind_family_us(kernels)
    rows = [
        (kind, dict(zip(FAMILIES, map(float, of_kind), strict=True)), format_us(float(of_kind.sum())), "")
        for kind, of_kind in zip(KINDS, sums, strict=True)
        if of_kind.sum()
    ]
    styles = {family: f"f-{family}" for family in FAMILIES}
    return time_bars(rows, styles, float(sums.sum(axis=1).max()) or 1.0)
