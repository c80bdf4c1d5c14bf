"""The journal's records of a step that torch.profiler traced."""

from __future__ import annotations

from fakedist.analysis.traces.layer_numbers import LayerNumbers
from fakedist.analysis.traces.profiler_trace import profiler_trace
from fakedist.analysis.traces.traced_host import host_record
from fakedist.analysis.traces.traced_kernels import Tool, kernel_record
from fakedist.run import time_notes
from fakedist.run.encoding import Record
from fakedist.run.records import NoteRecord
from fakedist.run.rows import LayerRow
from fakedist.run.trace_records import ProfilerRecord


def traced_records(profiled: ProfilerRecord, layers: list[LayerRow]) -> list[Record]:
    """The kernels, and what else the host did; a note if torch.profiler saw no kernels.

    Args:
        profiled: What it saw.
        layers: The recording's layers.
    """
    if not profiled.activity.start:
        return [NoteRecord(time_notes.profiler_saw_no_kernels())]
    trace = profiler_trace(profiled)
    if profiled.source == "simulated":
        trace.notes.append(time_notes.times_are_not_a_gpus())
    tool = Tool("cupti", profiled.gpu, profiled.source)
    return [kernel_record(trace, LayerNumbers(layers), tool), host_record(trace)]
