"""All that a tool traced of one process on one GPU, from any number of steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fakedist.analysis.traces.intervals import Intervals, Ints
from fakedist.analysis.traces.range_meanings import CALL, IGNORED, NODE, PHASE, SCRIPTS, SCRIPTS_END, STEP
from fakedist.analysis.traces.step_trace import Activity, Ranges

_NO_OPERATIONS = (IGNORED, STEP, PHASE, CALL, NODE, SCRIPTS, SCRIPTS_END)


@dataclass
class ProcessTrace:
    """The trace of one process on one GPU. Times are in nanoseconds.

    Attributes:
        tool: torch.profiler or nsys.
        gpu: The GPU's name; empty if the trace does not give it.
        ranges: Operations and ranges on the host.
        activity: What the GPU did.
        thread: For each activity, the thread that launched it; -1 if unknown.
        launch: When it was launched; if that is unknown, when it began.
        linked: The row of ``ranges`` that the tool itself links with each activity; -1 without one.
        made_in: For nodes of a CUDA graph, the thread that captured them; -1 for everything else.
        made_at: When they were captured.
        inputs: For each range, the row of ``shapes`` of an operation's arguments; -1 if they were not traced.
        shapes: Sizes of arguments that are tensors.
        tool_version: The tool's version; empty if unknown.
        driver: The driver's or CUDA's version; empty if unknown.
        torch: The version of torch; empty if unknown.
        rank: The rank that the trace names; -1 without one.
        num_elsewhere: Activities of other processes and GPUs, which are left out.
        num_unreadable: Events that are damaged.
    """

    tool: str
    gpu: str
    ranges: Ranges
    activity: Activity
    thread: Ints
    launch: Ints
    linked: Ints
    made_in: Ints
    made_at: Ints
    inputs: Ints
    shapes: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    tool_version: str = ""
    driver: str = ""
    torch: str = ""
    rank: int = -1
    num_elsewhere: int = 0
    num_unreadable: int = 0

    def operations(self) -> tuple[Ints, list[tuple[str, ...]], Ints]:
        """The operations around each launch.

        Returns:
            The row of ``ranges`` of the innermost one (-1 without any); distinct chains of names, innermost first, of
            which the first is empty; the row of the chains of each launch.
        """
        ranges = self.ranges
        rows = np.flatnonzero(~np.isin(ranges.kind, _NO_OPERATIONS))
        captured = self.made_in != -1
        thread = np.where(captured, self.made_in, self.thread)
        time = np.where(captured, self.made_at, self.launch)
        threads, lanes = np.unique(np.concatenate([ranges.thread[rows], thread]), return_inverse=True)
        lane = np.where(thread == -1, len(threads), lanes[len(rows) :])
        intervals = Intervals(lanes[: len(rows)], ranges.start[rows], ranges.end[rows])
        places = np.full(len(ranges.meaning), -1, np.int64)
        places[rows] = np.arange(len(rows))
        found = intervals.innermost(lane, time)
        linked = np.where(self.linked >= 0, places[self.linked], -1) if len(places) else self.linked
        found = np.where(linked >= 0, linked, found)
        chains, chain = self._chains(rows, intervals.parents(), found)
        innermost = np.where(found >= 0, rows[found], -1) if len(rows) else found
        return innermost, chains, chain

    def _chains(self, rows: Ints, parents: Ints, found: Ints) -> tuple[list[tuple[str, ...]], Ints]:
        meaning = self.ranges.meaning[rows]
        numbers: dict[tuple[str, ...], int] = {(): 0}
        of_range = {-1: 0}
        for place in np.unique(found).tolist():
            names: list[str] = []
            at = place
            while at >= 0:
                name = self.ranges.meanings[meaning[at]].name
                if name not in names:
                    names.append(name)
                at = int(parents[at])
            of_range[place] = numbers.setdefault(tuple(names), len(numbers))
        distinct, where = np.unique(found, return_inverse=True)
        chain = np.array([of_range[each] for each in distinct.tolist()], np.int64)
        return list(numbers), chain[where] if len(found) else np.zeros(0, np.int64)
