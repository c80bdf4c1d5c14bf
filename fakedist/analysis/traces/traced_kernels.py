"""Turns a trace into the journal's record of a timed step's kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from fakedist.analysis.traces.intervals import Ints
from fakedist.analysis.traces.joining import Places, find_places
from fakedist.analysis.traces.layer_numbers import LayerNumbers
from fakedist.analysis.traces.range_meanings import OPERATION
from fakedist.analysis.traces.step_trace import Activity, Ranges, Waits
from fakedist.run import time_notes
from fakedist.run.encoding import columns_of
from fakedist.run.families import kernel_family
from fakedist.run.notes import Note
from fakedist.run.schema import FAMILIES, PHASES
from fakedist.run.step_time import KernelSource
from fakedist.run.trace_records import KernelsRecord


@dataclass
class Trace:
    """The trace of one step.

    Attributes:
        ranges: Ranges of the step.
        activity: Activity on the GPU during the step.
        thread: For each activity, the thread that launched it; -1 if unknown.
        launch: When it was launched; if that is unknown, when it began.
        made_in: For nodes of a CUDA graph, the thread that captured them; -1 for everything else.
        made_at: When they were captured.
        begin: Start of the step.
        step: Its number.
        notes: What limits what these times mean.
        waits: Events and waits; None if the tool did not trace what streams wait for.
    """

    ranges: Ranges
    activity: Activity
    thread: Ints
    launch: Ints
    made_in: Ints
    made_at: Ints
    begin: int
    step: int
    notes: list[Note] = field(default_factory=list)
    waits: Waits | None = None


@dataclass(frozen=True)
class Tool:
    """Where a trace comes from.

    Attributes:
        name: cupti or nsys.
        gpu: The GPU's name.
        source: measured or simulated.
        version: Version of the tool, where it tells it.
        report: The tool's report.
    """

    name: str
    gpu: str
    source: Literal["measured", "simulated"] = "measured"
    version: str = ""
    report: str = ""


def kernel_record(trace: Trace, layers: LayerNumbers, tool: Tool) -> KernelsRecord:
    """The journal's record of a step's kernels.

    Args:
        trace: The step.
        layers: Numbers of layers. Unknown layers are added to it.
        tool: Where the trace comes from.
    """
    activity, ranges = trace.activity, trace.ranges
    captured = trace.made_in != -1
    places = find_places(
        ranges, np.where(captured, trace.made_in, trace.thread), np.where(captured, trace.made_at, trace.launch)
    )
    texts: dict[str, int] = {"": 0}
    phase = _phases(ranges, places)
    operation, family = _operations_and_families(activity, ranges, places, phase, texts)
    name = _numbered(activity.names, texts)[activity.name] if len(activity) else activity.name
    grid = _numbered([grid for grid, _ in activity.shapes], texts)[activity.shape]
    block = _numbered([block for _, block in activity.shapes], texts)[activity.shape]
    start, end = activity.columns["start"], activity.columns["end"]
    bytes_ = activity.columns["bytes"]
    columns: dict[str, npt.NDArray[np.generic]] = {
        "name": name,
        "family": family,
        "stream": activity.columns["streamId"],
        "start_us": (start - trace.begin) / 1000,
        "duration_us": (end - start) / 1000,
        "launch_us": np.where(trace.thread != -1, (trace.launch - trace.begin) / 1000, np.nan),
        "grid": grid,
        "block": block,
        "operation": operation,
        "op": np.full(len(activity), -1),
        "step": np.full(len(activity), trace.step),
        "phase": phase,
        "recompute": places.recompute,
        "layer": layers.of(ranges, places.layer),
        "call": places.call,
        "flops": _flops(ranges, places, family, end - start),
        "moved_bytes": np.where(bytes_ >= 0, bytes_, np.nan),
        "bound": np.zeros(len(activity)),
    }
    until = max(int(end.max(initial=trace.begin)), trace.begin)
    source = KernelSource(
        source=tool.source,
        tool=tool.name,
        step=trace.step,
        gpu=tool.gpu,
        step_us=(until - trace.begin) / 1000,
        notes=[*trace.notes, *_notes(trace, places, phase)],
        tool_version=tool.version,
        report=tool.report,
    )
    packed = {
        name: np.ascontiguousarray(columns[name], code).tobytes() for name, code in columns_of(KernelsRecord).items()
    }
    return KernelsRecord(source, list(texts), **packed)


def _numbered(found: list[str], texts: dict[str, int]) -> Ints:
    return np.array([texts.setdefault(text, len(texts)) for text in found], np.int64)


def _phases(ranges: Ranges, places: Places) -> npt.NDArray[np.uint8]:
    """Indices into ``PHASES``."""
    other = PHASES.index("other")
    of_meaning = np.array([PHASES.index(m.phase) if m.phase in PHASES else other for m in ranges.meanings] or [other])
    told = of_meaning[ranges.meaning][places.phase] if len(ranges.meaning) else np.full(len(places.phase), other)
    found = np.where(places.phase >= 0, told, other)
    return np.where(places.in_node, PHASES.index("backward"), found).astype(np.uint8)


def _operations_and_families(
    activity: Activity, ranges: Ranges, places: Places, phase: npt.NDArray[np.uint8], texts: dict[str, int]
) -> tuple[Ints, npt.NDArray[np.uint8]]:
    """Numbers of the operations' texts, and families. Each distinct kernel of an operation is classified once."""
    said = np.full(len(activity), -1, np.int64)
    known = places.operation >= 0
    said[known] = ranges.meaning[places.operation[known]]
    keys = np.stack([activity.name, said, phase.astype(np.int64), places.in_collective.astype(np.int64)])
    distinct, place = np.unique(keys, axis=1, return_inverse=True)
    operations, families = [], []
    for name, meaning, in_phase, in_collective in distinct.T.tolist():
        operation = "" if meaning < 0 else _operation(ranges.meanings[meaning].name)
        family = kernel_family(activity.names[name], operation, PHASES[in_phase])
        operations.append(texts.setdefault(operation, len(texts)))
        families.append(FAMILIES.index("communication" if in_collective else family))
    place = place.ravel()
    found = np.array(families, np.uint8)[place]
    found[activity.is_graph] = FAMILIES.index("other")  # whatever it contains
    return np.array(operations, np.int64)[place], found


def _flops(ranges: Ranges, places: Places, family: npt.NDArray[np.uint8], time: Ints) -> npt.NDArray[np.float64]:
    """Each matrix product's share, by time, of its operation's floating-point operations; NaN if not counted."""
    found = np.full(len(time), np.nan)
    if ranges.flops is None or not len(ranges.flops):
        return found
    known = (places.operation >= 0) & (ranges.flops[places.operation] > 0)
    known &= family == FAMILIES.index("gemm")  # excludes kernels that fill a product's workspace
    operation, share = places.operation[known], np.maximum(time[known], 1)
    whole = np.bincount(operation, share)
    found[known] = ranges.flops[operation] * share / whole[operation]
    return found


def _operation(name: str) -> str:
    """``aten::mm`` as the recorder writes it."""
    return name.replace("::", ".", 1) if name.startswith("aten::") else name


def _notes(trace: Trace, places: Places, phase: npt.NDArray[np.uint8]) -> list[Note]:
    """Notes that count the kernels whose attribution is coarse."""
    found: list[Note] = []
    columns, count = trace.activity.columns, len(trace.activity)
    if unknown := int((trace.thread == -1).sum()):
        found.append(time_notes.kernels_without_launch(unknown, count))
    in_graph = (columns["graphNodeId"] > 0) & (trace.made_in == -1)
    if coarse := int(in_graph.sum()):
        found.append(time_notes.kernels_of_graphs(coarse))
    if graphs := int(trace.activity.is_graph.sum()):
        found.append(time_notes.graphs_as_a_whole(graphs))
    if count and not (places.layer >= 0).any():
        found.append(time_notes.no_layers_traced())
    if unknown := int((places.unknown & (places.layer < 0)).sum()):
        found.append(time_notes.forward_not_traced(unknown))
    if count and bool((phase == PHASES.index("other")).all()):
        found.append(time_notes.no_phases_traced())
    if count and not (trace.ranges.kind == OPERATION).any():
        found.append(time_notes.no_operations_traced())
    return found
