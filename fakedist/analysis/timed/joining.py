"""Kernels joined with the ranges that they were launched in.

A kernel belongs where the host launched it: the launch has a thread and a time, and the ranges of that thread which are
open then say the layer, the operation and the rest. In a backward, autograd's own thread runs nodes; where ranges carry
autograd's sequence numbers, a node's layer is that of the forward operation which made it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fakedist.analysis.timed.events import Ranges
from fakedist.analysis.timed.intervals import Intervals, Ints
from fakedist.analysis.timed.names import CALL, DERIVATIVE, LAYER, NODE, OPERATION, PHASE

Bools = npt.NDArray[np.bool_]
_OURS = "fakedist::"
#: Beside -1, outside of any range.
_UNKNOWN = -2


@dataclass
class Places:
    """Where launches happened.

    Attributes:
        layer: For each launch the innermost layer's range, a row of the ranges; -1 outside of any.
        operation: The innermost operation's or node's range; -1 outside of any.
        phase: The range that says the phase; -1 where none does. Inside of a node it is backward, whatever ranges say.
        in_node: Whether autograd ran a node.
        recompute: Whether the launch is of a forward that runs again inside of a node.
        call: Number of the collective of ours that it is part of; -1 if it is of none.
        in_collective: Whether it is part of a collective of ours.
        unknown: Whether a node launched it of which no forward operation is known.
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
    """Some of the ranges, for looking up which of them a launch is in."""

    def __init__(self, ranges: Ranges, lanes: Ints, mask: Bools, one_lane: bool = False) -> None:
        self.rows = np.flatnonzero(mask)
        self.lane = np.zeros(len(self.rows), np.int64) if one_lane else lanes[self.rows]
        self.start, self.end = ranges.start[self.rows], ranges.end[self.rows]
        self._one_lane = one_lane
        self._intervals = Intervals(self.lane, self.start, self.end)

    def innermost(self, lane: Ints, time: Ints) -> Ints:
        """Row of the ranges for each launch; -1 without any."""
        found = self._intervals.innermost(np.zeros_like(lane) if self._one_lane else lane, time)
        if not len(self.rows):
            return found
        return np.where(found >= 0, self.rows[found], -1)

    def is_inside(self) -> Bools:
        """Whether each of the chosen is inside of another one."""
        return self._intervals.parents() >= 0

    def before(self, lane: Ints, time: Ints) -> Ints:
        """Row of the last range that began before each point in its thread, closed or not; -1 without any."""
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
        thread: Each launch's thread; -1 where no launch is known, and so no range.
        time: When; in nanoseconds, as the ranges.
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
    # Deeper than the node: a forward that runs again, with ranges of its own.
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
    """The thread that the program pushes its ranges in: of those with any, the one that launches most."""
    having = launches[np.isin(launches, ranges)]
    chosen = having if len(having) else ranges
    return int(np.bincount(chosen).argmax()) if len(chosen) else -1


def _with_gradient(ranges: Ranges) -> Bools:
    """Operations that autograd may make a node of: torch numbers no others.

    Inside of a node those are the operations of a forward that runs again.
    """
    found: Bools = (ranges.kind == OPERATION) & (ranges.sequence >= 0)
    return found


def _numbers_of_nodes(ranges: Ranges, lanes: Ints, nodes: _Chosen) -> Ints:
    """For each range that is a node the number of the forward operation which made it, -1 if it has none.

    torch.profiler writes it at the node, emit_nvtx at the function that the node calls.
    """
    found = np.where(ranges.kind == NODE, ranges.sequence, -1)
    functions = np.flatnonzero((ranges.kind == DERIVATIVE) & (ranges.sequence >= 0))
    functions = functions[np.argsort(-ranges.start[functions], kind="stable")]  # the first of a node is its own
    node = nodes.innermost(lanes[functions], ranges.start[functions])
    found[node[node >= 0]] = ranges.sequence[functions[node >= 0]]
    return found


def _of_ours(ranges: Ranges) -> Bools:
    of_meaning: Bools = np.array([each.name.startswith(_OURS) for each in ranges.meanings] or [False])
    return of_meaning[ranges.meaning]


def _calls(ranges: Ranges, lanes: Ints, ours: Ints) -> Ints:
    """The number that was written down just before a collective began."""
    marks = _Chosen(ranges, lanes, ranges.kind == CALL)
    number = np.array([each.number for each in ranges.meanings] or [-1], np.int64)
    found = np.full(len(ours), -1, np.int64)
    inside = ours >= 0
    mark = marks.before(lanes[ours[inside]], ranges.start[ours[inside]])
    found[inside] = np.where(mark >= 0, number[ranges.meaning[mark]], -1) if len(ranges.meaning) else -1
    return found


def _phases(ranges: Ranges, lanes: Ints, lane: Ints, time: Ints) -> Ints:
    """The range that says the phase: of the launch's own thread, else of any: they wait for one another."""
    says = np.array([each.phase != "" and each.kind in (PHASE, LAYER) for each in ranges.meanings] or [False])
    mask = says[ranges.meaning]
    found = _Chosen(ranges, lanes, mask).innermost(lane, time)
    none = found < 0
    found[none] = _Chosen(ranges, lanes, mask, one_lane=True).innermost(lane[none], time[none])
    return found


class _Forward:
    """Which layer made the autograd node of a sequence number. Each thread counts for itself."""

    def __init__(self, ranges: Ranges, lanes: Ints, layers: _Chosen) -> None:
        rows = np.flatnonzero(_with_gradient(ranges))
        # The last operation that was given a number made the node; those before it made none.
        rows = rows[np.lexsort((ranges.start[rows], ranges.sequence[rows], lanes[rows]))]
        last = np.ones(len(rows), bool)
        last[:-1] = (lanes[rows[1:]] != lanes[rows[:-1]]) | (ranges.sequence[rows[1:]] != ranges.sequence[rows[:-1]])
        self._rows = rows[last]
        self.ranges, self.lanes, self._layers = ranges, lanes, layers
        self._main = int(np.bincount(lanes[rows]).argmax()) if len(rows) else -1

    def layer(self, node: Ints, sequence: Ints, inner: Bools) -> Ints:
        """The layer's range for each node; ``inner``: those that run inside of another one."""
        lane = np.where(inner, self.lanes[node], self._main)  # a backward in a backward is of what ran again there
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
    """Ranges of the layers of what nodes launched; gradients that are accumulated count for the node that ran before.

    Args:
        forward: Layers by number.
        nodes: All nodes.
        sequence: The number of each range that is a node.
        node: Of each launch.
    """
    asked, place = np.unique(node, return_inverse=True)
    ranges, lanes = forward.ranges, forward.lanes
    numbered = _Chosen(ranges, lanes, sequence >= 0)
    bare = sequence[asked] < 0
    before = numbered.before(lanes[asked[bare]], ranges.start[asked[bare]])
    asked[bare] = np.where(before >= 0, before, asked[bare])
    inner = nodes.is_inside()[np.searchsorted(nodes.rows, asked)]
    return forward.layer(asked, sequence[asked], inner)[place]
