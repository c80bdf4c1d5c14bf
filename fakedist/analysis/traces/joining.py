"""Joins kernels with the ranges that they were launched in.

A kernel belongs where the host launched it. The launch has a thread and a time, and the ranges open in that thread at
that time give the layer, the operation and the rest. In backward, autograd's own thread runs nodes. If ranges carry
autograd's sequence numbers, a node's layer is that of the forward operation that created the node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fakedist.analysis.traces.intervals import Intervals, Ints
from fakedist.analysis.traces.range_meanings import CALL, DERIVATIVE, LAYER, NODE, OPERATION, PHASE
from fakedist.analysis.traces.step_trace import Ranges

Bools = npt.NDArray[np.bool_]
_OURS = "fakedist::"
#: Marks a layer as unknown, as opposed to -1, outside of any range.
_UNKNOWN = -2


@dataclass
class Places:
    """Where launches happened.

    Attributes:
        layer: For each launch, the row of the innermost layer's range; -1 outside of any.
        operation: The innermost operation's or node's range; -1 outside of any.
        phase: The range that gives the phase; -1 without one. Inside a node the phase is backward in any case.
        in_node: Whether autograd was running a node.
        recompute: Whether the launch belongs to a forward that is recomputed inside a node.
        call: Number of fakedist's collective that it is part of; -1 if it is part of none.
        in_collective: Whether it is part of one of fakedist's collectives.
        unknown: Whether it was launched by a node whose forward operation is unknown.
    """

    layer: Ints
    operation: Ints
    phase: Ints
    in_node: Bools
    recompute: Bools
    call: Ints
    in_collective: Bools
    unknown: Bools


class _Chosen:
    """A subset of the ranges, for looking up which of them a launch is in."""

    def __init__(self, ranges: Ranges, lanes: Ints, mask: Bools, one_lane: bool = False) -> None:
        self.rows = np.flatnonzero(mask)
        self.lane = np.zeros(len(self.rows), np.int64) if one_lane else lanes[self.rows]
        self.start, self.end = ranges.start[self.rows], ranges.end[self.rows]
        self._one_lane = one_lane
        self._intervals = Intervals(self.lane, self.start, self.end)

    def innermost(self, lane: Ints, time: Ints) -> Ints:
        """For each launch, the row of its innermost range; -1 without one."""
        found = self._intervals.innermost(np.zeros_like(lane) if self._one_lane else lane, time)
        if not len(self.rows):
            return found
        return np.where(found >= 0, self.rows[found], -1)

    def is_inside(self) -> Bools:
        """Whether each chosen range is inside another chosen range."""
        return self._intervals.parents() >= 0

    def before(self, lane: Ints, time: Ints) -> Ints:
        """For each point, the row of the last range that began before it in its thread, ended or not; -1 if none."""
        found = np.full(len(lane), -1, np.int64)
        for each in np.unique(lane):
            mine, asked = np.flatnonzero(self.lane == each), lane == each
            order = mine[np.argsort(self.start[mine], kind="stable")]
            place = np.searchsorted(self.start[order], time[asked], side="left") - 1
            if len(order):
                found[asked] = np.where(place >= 0, self.rows[order[place]], -1)
        return found


def find_places(ranges: Ranges, thread: Ints, time: Ints) -> Places:
    """Where launches happened.

    Args:
        ranges: Ranges of the process.
        thread: Each launch's thread; -1 if the launch is unknown, and so without ranges.
        time: When each was launched, in nanoseconds like the ranges.
    """
    threads, lanes = np.unique(np.concatenate([ranges.thread, thread]), return_inverse=True)
    lanes, lane = lanes[: len(ranges.thread)].astype(np.int64), lanes[len(ranges.thread) :].astype(np.int64)
    lane[thread == -1] = len(threads)
    kind = ranges.kind
    layers = _Chosen(ranges, lanes, kind == LAYER)
    nodes = _Chosen(ranges, lanes, kind == NODE)
    operations = _Chosen(ranges, lanes, (kind == OPERATION) | (kind == DERIVATIVE))
    layer, node, operation = (each.innermost(lane, time) for each in (layers, nodes, operations))
    main = _busiest(lanes[kind == LAYER], lane)
    elsewhere = (node < 0) & ~np.isin(lane, layers.lane) & (thread != -1)
    layer[elsewhere] = layers.innermost(np.full(int(elsewhere.sum()), main), time[elsewhere])
    start = np.append(ranges.start, -1)  # row -1: before everything
    in_node = node >= 0
    # A layer deeper than the node belongs to a recomputed forward, which has its own ranges.
    of_node = in_node & (start[layer] < start[node])
    sequence = _numbers_of_nodes(ranges, lanes, nodes)
    made = _layers_of_nodes(_Forward(ranges, lanes, layers), nodes, sequence, node[of_node])
    unknown = of_node.copy()
    unknown[of_node] = made == _UNKNOWN
    layer[of_node] = np.where(made == _UNKNOWN, layer[of_node], made)
    with_gradient = _Chosen(ranges, lanes, _with_gradient(ranges)).innermost(lane, time)
    ours = _Chosen(ranges, lanes, _of_ours(ranges)).innermost(lane, time)
    return Places(
        layer=layer,
        operation=np.where(start[node] > start[operation], node, operation),
        phase=_phases(ranges, lanes, lane, time),
        in_node=in_node,
        recompute=in_node & (start[with_gradient] > start[node]),
        call=_calls(ranges, lanes, ours),
        in_collective=ours >= 0,
        unknown=unknown,
    )


def _busiest(ranges: Ints, launches: Ints) -> int:
    """The thread in which the program pushes its ranges: of the threads with ranges, the one with the most launches."""
    having = launches[np.isin(launches, ranges)]
    chosen = having if len(having) else ranges
    return int(np.bincount(chosen).argmax()) if len(chosen) else -1


def _with_gradient(ranges: Ranges) -> Bools:
    """Operations that autograd may create a node for. torch numbers no others.

    Inside a node these are the operations of a recomputed forward.
    """
    found: Bools = (ranges.kind == OPERATION) & (ranges.sequence >= 0)
    return found


def _numbers_of_nodes(ranges: Ranges, lanes: Ints, nodes: _Chosen) -> Ints:
    """For each range that is a node, the number of the forward operation that created it; -1 without one.

    torch.profiler writes the number on the node, emit_nvtx on the function that the node calls.
    """
    found = np.where(ranges.kind == NODE, ranges.sequence, -1)
    functions = np.flatnonzero((ranges.kind == DERIVATIVE) & (ranges.sequence >= 0))
    functions = functions[np.argsort(-ranges.start[functions], kind="stable")]  # a node's first function is its own
    node = nodes.innermost(lanes[functions], ranges.start[functions])
    found[node[node >= 0]] = ranges.sequence[functions[node >= 0]]
    return found


def _of_ours(ranges: Ranges) -> Bools:
    of_meaning: Bools = np.array([each.name.startswith(_OURS) for each in ranges.meanings] or [False])
    return of_meaning[ranges.meaning]


def _calls(ranges: Ranges, lanes: Ints, ours: Ints) -> Ints:
    """The number in the mark emitted just before each collective began."""
    marks = _Chosen(ranges, lanes, ranges.kind == CALL)
    number = np.array([each.number for each in ranges.meanings] or [-1], np.int64)
    found = np.full(len(ours), -1, np.int64)
    inside = ours >= 0
    mark = marks.before(lanes[ours[inside]], ranges.start[ours[inside]])
    found[inside] = np.where(mark >= 0, number[ranges.meaning[mark]], -1) if len(ranges.meaning) else -1
    return found


def _phases(ranges: Ranges, lanes: Ints, lane: Ints, time: Ints) -> Ints:
    """The range that gives the phase: in the launch's thread, else in any (threads wait for each other)."""
    says = np.array([each.phase != "" and each.kind in (PHASE, LAYER) for each in ranges.meanings] or [False])
    mask = says[ranges.meaning]
    found = _Chosen(ranges, lanes, mask).innermost(lane, time)
    none = found < 0
    found[none] = _Chosen(ranges, lanes, mask, one_lane=True).innermost(lane[none], time[none])
    return found


class _Forward:
    """Looks up the layer that created an autograd node by its sequence number. Each thread counts separately."""

    def __init__(self, ranges: Ranges, lanes: Ints, layers: _Chosen) -> None:
        rows = np.flatnonzero(_with_gradient(ranges))
        # The last operation with a number created the node. Those before it created none.
        rows = rows[np.lexsort((ranges.start[rows], ranges.sequence[rows], lanes[rows]))]
        last = np.ones(len(rows), bool)
        last[:-1] = (lanes[rows[1:]] != lanes[rows[:-1]]) | (ranges.sequence[rows[1:]] != ranges.sequence[rows[:-1]])
        self._rows = rows[last]
        self.ranges, self.lanes, self._layers = ranges, lanes, layers
        self._main = int(np.bincount(lanes[rows]).argmax()) if len(rows) else -1

    def layer(self, node: Ints, sequence: Ints, inner: Bools) -> Ints:
        """The layer's range for each node. ``inner`` marks nodes that run inside another node."""
        lane = np.where(inner, self.lanes[node], self._main)  # an inner backward is of what was recomputed there
        key = self._keys(lane, sequence)
        known = self._keys(self.lanes[self._rows], self.ranges.sequence[self._rows])
        place = np.minimum(np.searchsorted(known, key), max(len(known) - 1, 0))
        found = np.full(len(node), _UNKNOWN, np.int64)
        if not len(known):
            return found
        hit = (known[place] == key) & (sequence >= 0)
        row = self._rows[place[hit]]
        found[hit] = self._layers.innermost(self.lanes[row], self.ranges.start[row])
        return found

    @staticmethod
    def _keys(lane: Ints, sequence: Ints) -> Ints:
        return (lane << 44) | np.maximum(sequence, 0)


def _layers_of_nodes(forward: _Forward, nodes: _Chosen, sequence: Ints, node: Ints) -> Ints:
    """For each launch from a node, its layer's range. Gradient accumulation counts for the node that ran before it.

    Args:
        forward: Layers by sequence number.
        nodes: All nodes.
        sequence: The sequence number of each range that is a node.
        node: The node of each launch.
    """
    asked, place = np.unique(node, return_inverse=True)
    ranges, lanes = forward.ranges, forward.lanes
    numbered = _Chosen(ranges, lanes, sequence >= 0)
    bare = sequence[asked] < 0
    before = numbered.before(lanes[asked[bare]], ranges.start[asked[bare]])
    asked[bare] = np.where(before >= 0, before, asked[bare])
    inner = nodes.is_inside()[np.searchsorted(nodes.rows, asked)]
    return forward.layer(asked, sequence[asked], inner)[place]
