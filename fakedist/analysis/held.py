"""Memory inside compiled graphs: the layer that each block was allocated for, and the layer that held it at the peak.

Inductor reuses a buffer that is no longer needed for the next one of its size. To the allocator that is one block, but
several layers held it in turn. The generated code shows at which line a block changes hands (``record/generated.py``).
The line that ran at the peak is in the stack of the peak's allocation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array, Recording
from fakedist.run.rows import HeldRow

_NEVER = 1 << 40


@dataclass
class Held:
    """What compiled graphs show about each block.

    Attributes:
        layer: The layer that the block was for, at the peak or when the graph that allocated it ended; -1 if no graph
            shows it.
        is_saved: Whether the block's contents then are what it held when the graph that allocated it ended.
        is_last: Whether they are the last thing it held.
    """

    layer: Array
    is_saved: Array
    is_last: Array


@dataclass(frozen=True)
class _Point:
    """A moment: a call of a graph (its row in ``graphs``) and a line of the graph's code."""

    graph: int
    line: int


def held_blocks(frame: pd.DataFrame, recording: Recording, peak_event: int) -> Held:
    """Which layer each block was for.

    Args:
        frame: Columns op, stack, address, alloc_event, free_event of the blocks, in order of allocation.
        recording: The recording.
        peak_event: Event of the peak; -1 without events.
    """
    num = len(frame)
    held = Held(np.full(num, -1, "i8"), np.ones(num, bool), np.ones(num, bool))
    graphs = recording.graphs
    if not graphs or not num:
        return held
    code_of, line_of = _lines(recording)
    op, stack = frame["op"].to_numpy(), frame["stack"].to_numpy()
    of_op = np.array([row.op for row in graphs])
    graph = np.searchsorted(of_op, op, side="right") - 1
    code = np.where(stack >= 0, code_of[stack], -1)
    is_inside = (code >= 0) & (graph >= 0) & (code == np.array([row.code for row in graphs])[graph])
    peak = _peak(recording, peak_event, of_op=of_op, code=code_of, line=line_of)
    alive = ((frame["alloc_event"] <= peak_event) & (frame["free_event"] > peak_event)).to_numpy()
    placings = {row.number: row.layers for row in recording.placings}
    lines = {code.number: {row.line: row.module for row in code.lines} for code in recording.generated}
    chains = _chains(recording)
    for block in np.flatnonzero(is_inside):
        number, of_graph = int(code[block]), int(graph[block])
        line = int(line_of[stack[block]])
        layers = placings[graphs[of_graph].placing]
        held.layer[block] = _layer(layers, lines[number].get(line))
        for at, module in chains.get((number, line), ()):
            if not alive[block] or _is_before(of_graph, at, peak):
                held.layer[block] = _layer(layers, module)
            else:
                held.is_saved[block] = held.is_last[block] = False
    _inputs(frame, recording, held, alive=alive, peak=peak, of_op=of_op)
    return held


def _layer(layers: tuple[int, ...], module: int | None) -> int:
    return -1 if module is None else int(layers[module])


def _is_before(graph: int, line: int, moment: _Point) -> bool:
    return graph < moment.graph or (graph == moment.graph and line <= moment.line)


def _lines(recording: Recording) -> tuple[Array, Array]:
    """For each stack, the generated code that it is in and the line there; -1 if it is in none."""
    codes = {code.filename: code.number for code in recording.generated}
    of_frame = [codes.get(frame.filename, -1) for frame in recording.frames]
    code, line = np.full(len(recording.stacks) + 1, -1, "i8"), np.full(len(recording.stacks) + 1, -1, "i8")
    for number, stack in enumerate(recording.stacks):
        inside = next((frame for frame in stack if of_frame[frame] >= 0), None)
        if inside is not None:
            code[number], line[number] = of_frame[inside], recording.frames[inside].line
    return code, line


def _chains(recording: Recording) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(code, line that allocates) -> the lines from which another buffer has the memory, and its module."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for code in recording.generated:
        for root, line, module in code.holders:
            if root >= 0:
                found.setdefault((code.number, root), []).append((line, module))
    return {key: sorted(each) for key, each in found.items()}


def _peak(recording: Recording, peak_event: int, *, of_op: Array, code: Array, line: Array) -> _Point:
    """The peak: inside a graph if its allocation's stack is inside one, else after the last graph that began."""
    events = recording.device_events
    op = int(np.maximum.accumulate(events["op"][: peak_event + 1])[-1]) if peak_event >= 0 else -1
    graph = int(np.searchsorted(of_op, op, side="right")) - 1
    stack = int(events["stack"][peak_event]) if peak_event >= 0 else -1
    inside = graph >= 0 and code[stack] >= 0 and code[stack] == recording.graphs[graph].code
    return _Point(graph, int(line[stack]) if inside else _NEVER)


def _inputs(frame: pd.DataFrame, recording: Recording, held: Held, *, alive: Array, peak: _Point, of_op: Array) -> None:
    """Handle inputs whose memory a graph reuses: mostly what a forward saved and its backward no longer needs."""
    rows = pd.DataFrame(recording.held, columns=HeldRow._fields)
    if not len(rows):
        return
    rows = rows.astype({"op": "int64", "address": "uint64", "line": "int64", "layer": "int64"})
    made = np.maximum.accumulate(frame["op"].to_numpy())
    blocks = pd.DataFrame({"op": made, "address": frame["address"], "block": np.arange(len(frame))})
    blocks = blocks.astype({"op": "int64", "address": "uint64"})
    matched = pd.merge_asof(
        rows.sort_values(["op", "line"], kind="stable"),
        blocks.sort_values(["op", "block"], kind="stable"),
        on="op",
        by="address",
        direction="backward",
    ).dropna(subset=["block"])
    freed, event_op = frame["free_event"].to_numpy(), np.maximum.accumulate(recording.device_events["op"])
    for op, line, layer, block in matched[["op", "line", "layer", "block"]].astype("int64").itertuples(index=False):
        end = freed[block]
        if not alive[block] or (end < len(event_op) and event_op[end] < op):
            continue  # the block was gone by then: the input's memory is not one of these blocks
        if _is_before(int(np.searchsorted(of_op, op, side="right")) - 1, line, peak):
            held.layer[block], held.is_saved[block] = layer, False
        else:
            held.is_last[block] = False
