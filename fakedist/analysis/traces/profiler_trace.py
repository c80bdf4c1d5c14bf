"""Reads torch.profiler's record of the timed step as a trace."""

from __future__ import annotations

import numpy as np

from fakedist.analysis.traces.intervals import Ints
from fakedist.analysis.traces.lookup import find_rows, taken
from fakedist.analysis.traces.range_meanings import IGNORED, PHASE, STEP, meaning
from fakedist.analysis.traces.step_trace import Activity, Ranges, Waits
from fakedist.analysis.traces.traced_kernels import Trace
from fakedist.run.encoding import columns_of
from fakedist.run.trace_records import (
    ProfilerRecord,
    TracedActivity,
    TracedCalls,
    TracedOperations,
    TracedWaits,
)


def profiler_trace(record: ProfilerRecord) -> Trace:
    """The trace of the timed step.

    Args:
        record: The journal's record of what torch.profiler saw.
    """
    operations, calls, device = (_columns(each) for each in (record.operations, record.calls, record.activity))
    texts = record.texts
    ranges, steps = _ranges(operations, texts)
    thread, launch = _launches(operations, calls, device)
    begin, step = steps[-1] if steps else (int(launch.min(initial=0)), 0)
    order = np.argsort(device["start"], kind="stable")
    activity = _activity(device, texts).where(order)
    none = np.full(len(order), -1, np.int64)
    return Trace(
        ranges=ranges.with_functions().told_by_us(),
        activity=activity,
        thread=thread[order],
        launch=launch[order],
        made_in=none,
        made_at=none,
        begin=begin,
        step=step,
        waits=_waits(record, calls) if record.has_events else None,
    )


def _waits(record: ProfilerRecord, calls: dict[str, Ints]) -> Waits:
    started = dict(zip(calls["correlation"].tolist(), calls["start"].tolist(), strict=True))
    found = _columns(record.waits)
    called = [started.get(each, -1) for each in found["correlation"].tolist()]
    found["start"] = np.where(np.array(called, np.int64) >= 0, called, found["start"])
    return Waits.of(found, started)


def _ranges(operations: dict[str, Ints], texts: list[str]) -> tuple[Ranges, list[tuple[int, int]]]:
    """The ranges (a phase lasts until the next one), and (start, number) of the steps."""
    said = [meaning(text) for text in texts]
    kinds = np.array([each.kind for each in said] or [IGNORED])[operations["text"]]
    start, end = operations["start"], operations["end"].copy()
    marks = np.flatnonzero(kinds == PHASE)
    ours = np.array([each.is_ours for each in said] or [False])
    marks = marks[ours[operations["text"][marks]]]
    marks = marks[np.argsort(start[marks], kind="stable")]
    end[marks] = np.append(start[marks[1:]], end.max(initial=0))[: len(marks)]
    steps = [
        (int(start[row]), said[operations["text"][row]].number)
        for row in np.flatnonzero(kinds == STEP)
        if said[operations["text"][row]].is_ours
    ]
    says = kinds != IGNORED
    thread, sequence = operations["thread"][says], operations["sequence"][says]
    said_by = operations["text"][says].astype(np.int32)
    ranges = Ranges(said, said_by, thread, start[says], end[says], sequence, flops=operations["flops"][says])
    return ranges, steps


def _columns(table: TracedOperations | TracedCalls | TracedActivity | TracedWaits) -> dict[str, Ints]:
    return {
        name: np.frombuffer(getattr(table, name), code).astype(np.int64)
        for name, code in columns_of(type(table)).items()
    }


def _launches(operations: dict[str, Ints], calls: dict[str, Ints], device: dict[str, Ints]) -> tuple[Ints, Ints]:
    """For each GPU activity, the thread and the time of its launch: from its CUDA call, else from its operation.

    A call has CUPTI's thread number. The operation around it has torch's number, which the ranges use too.
    """
    call = find_rows(calls["correlation"], device["correlation"])
    linked = np.where(call >= 0, taken(calls["operation"], call), device["operation"])
    linked = np.where(linked > 0, linked, device["operation"])
    operation = np.where(linked > 0, find_rows(operations["id"], linked), -1)
    thread = np.where(operation >= 0, taken(operations["thread"], operation), taken(calls["thread"], call))
    at = np.where(operation >= 0, taken(operations["start"], operation), device["start"])
    at = np.where(call >= 0, taken(calls["start"], call), at)
    return np.where((call >= 0) | (operation >= 0), thread, -1), at


def _activity(device: dict[str, Ints], texts: list[str]) -> Activity:
    names, name = np.unique(device["text"], return_inverse=True)
    shapes, shape = np.unique(np.stack([device["grid"], device["block"]]), axis=1, return_inverse=True)
    found = [texts[each] for each in names.tolist()]
    is_copy = np.array([each.startswith(("Memcpy", "Memset")) for each in found] or [False])
    both_ways = np.array(["DtoD" in each for each in found] or [False])
    bytes_ = device["size"]
    if len(name):
        bytes_ = np.where(is_copy[name], np.where(both_ways[name] & (bytes_ > 0), 2 * bytes_, bytes_), -1)
    return Activity(
        {
            "start": device["start"],
            "end": device["end"],
            "streamId": device["stream"],
            "correlationId": device["correlation"],
            "graphNodeId": device["node"],
            "bytes": bytes_,
        },
        name,
        shape.ravel(),
        is_copy[name] if len(name) else np.zeros(0, bool),
        np.zeros(len(name), bool),
        found,
        [(texts[grid], texts[block]) for grid, block in shapes.T.tolist()],
    )
