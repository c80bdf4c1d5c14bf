"""Turns a trace into the journal's record of what the host did in a timed step, besides launching kernels."""

from __future__ import annotations

import numpy as np

from fakedist.analysis.traces.range_meanings import CALL, SCRIPTS, SCRIPTS_END
from fakedist.analysis.traces.step_trace import Ranges, Waits
from fakedist.analysis.traces.traced_kernels import Trace
from fakedist.run.encoding import Columns
from fakedist.run.trace_records import HostCalls, HostRanges, HostRecord, HostWaits

_NONE = np.zeros(0, np.int64)


def host_record(trace: Trace) -> HostRecord:
    """The journal's record of what the host did.

    Args:
        trace: The step.
    """
    ranges = trace.ranges
    waits, calls = Columns(HostWaits), Columns(HostCalls)
    known = trace.waits or Waits(_NONE, _NONE, _NONE, _NONE, _NONE)
    times = [((each - trace.begin) / 1000).tolist() for each in (known.start, known.end)]
    streams = np.maximum(known.stream, 0).tolist()
    waits.extend(list(zip(known.what.tolist(), streams, known.event.tolist(), *times, strict=True)))
    marks = np.flatnonzero(ranges.kind == CALL)
    numbers = [ranges.meanings[each].number for each in ranges.meaning[marks].tolist()]
    calls.extend(list(zip(numbers, ((ranges.start[marks] - trace.begin) / 1000).tolist(), strict=True)))
    texts: dict[str, int] = {}
    inside = _script_ranges(trace, ranges, texts)
    made = (waits.made(), calls.made(), inside.made())
    return HostRecord(trace.step, trace.waits is not None, list(texts), *made)


def _script_ranges(trace: Trace, ranges: Ranges, texts: dict[str, int]) -> Columns[HostRanges]:
    """Ranges in the order in which they began. One that does not end lasts until the last range does."""
    begins: dict[int, tuple[int, int, str]] = {}
    ends: dict[int, int] = {}
    for row in np.flatnonzero(np.isin(ranges.kind, (SCRIPTS, SCRIPTS_END))).tolist():
        said, at = ranges.meanings[ranges.meaning[row]], int(ranges.start[row])
        if said.kind == SCRIPTS:
            begins[said.number] = at, int(ranges.thread[row]), said.name
        else:
            ends[said.number] = at
    threads: dict[int, int] = {}
    found, last = Columns(HostRanges), int(ranges.end.max(initial=trace.begin))
    for number, (at, thread, name) in sorted(begins.items(), key=lambda each: each[1][0]):
        found.add(
            name=texts.setdefault(name, len(texts)),
            thread=threads.setdefault(thread, len(threads)),
            begin_us=(at - trace.begin) / 1000,
            end_us=(max(ends.get(number, last), at) - trace.begin) / 1000,
        )
    return found
