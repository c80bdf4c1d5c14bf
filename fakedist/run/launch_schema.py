"""The tables ``launches`` and ``work``: what the timed step launched, before any GPU or fabric prices it."""

from __future__ import annotations

import typing

from fakedist.run.columns import Column, Table, attributes
from fakedist.run.launch_records import LAUNCH_KINDS, WorkRow

_TYPES = {str: "string", int: "int64", float: "double", bool: "bool"}
_MEANINGS = attributes(WorkRow)

LAUNCHES = Table(
    "What the host gave to the streams in the timed step, in order: launches, and the events and waits between them. "
    "On the virtual GPU it says nothing of times, and so holds for any GPU.",
    (
        Column("what", "string", "What it is: " + ", ".join(LAUNCH_KINDS) + ".", words=LAUNCH_KINDS),
        Column("work", "int32", "Row of `work`; -1 for events and waits.", row_of="work", least=-1),
        Column("stream", "uint64", "CUDA stream; 0 is the default one."),
        Column("event", "uint64", "The event that is recorded or waited for; 0 without one."),
        Column("num_operations", "int64", "Operations of torch that the host ran since the last row with work."),
        Column("graph", "int32", "Number of the launch of the CUDA graph that it belongs to; 0 outside of graphs."),
        Column("device", "int32", "Index of the device."),
        Column("grid", "string", "Blocks as x,y,z; empty if unknown."),
        Column("block", "string", "Threads of a block as x,y,z; empty if unknown."),
        Column("op", "int64", "Number of the operation that launched it, as in `blocks`; -1 if none was running."),
        Column("step", "int32", "Step."),
        Column("phase", "string", "init, generation, forward, backward, optimizer or other."),
        Column("recompute", "bool", "Launched while backward ran a checkpointed forward again."),
        Column("layer", "int32", "Row of `layers`; 0 outside of modules.", row_of="layers"),
        Column("call", "int64", "Sequence number in `calls` of the collective that it stands for; -1 otherwise."),
        Column("measured_us", "double", "How long it took on a real GPU; NaN for collectives, and on the virtual GPU."),
        Column("host_us", "double", "Time of the host before it, waits left out; NaN on the virtual GPU."),
    ),
)

RANGES = Table(
    "A range that the script opened in the timed step: torch.cuda.nvtx, torch.profiler's record_function. In the order "
    "in which they began, outer ones first. None of an imported trace.",
    (
        Column("name", "string", "Its name."),
        Column("thread", "int64", "The thread that opened it, numbered as they come."),
        Column("depth", "int64", "Ranges of that thread around it."),
        Column(
            "first_launch",
            "int64",
            "Row of `launches`: the first after the range began, whatever its thread.",
            row_of="launches",
            may_end=True,
        ),
        Column(
            "end_launch",
            "int64",
            "Row of `launches`: the first after the range ended.",
            row_of="launches",
            may_end=True,
        ),
        Column("begin_us", "double", "When the host launched the first kernel in it; NaN without one."),
        Column("end_us", "double", "When it launched the last one."),
        Column("gpu_begin_us", "double", "When the first of those began on the GPU."),
        Column("gpu_end_us", "double", "When the last of them ended, as far as durations are known."),
        Column("num_kernels", "int64", "How many, communication left out."),
        Column("num_unknown", "int64", "How many of them are of unknown duration."),
        Column("kernel_us", "double", "How long the others took, ranges inside included."),
        Column("num_calls", "int64", "Collective calls in it."),
    ),
)

WORK = Table(
    "What launches of the timed step have to do; launches with the same to do share a row. 0 where a size does not "
    "apply.",
    tuple(
        Column(name, _TYPES[hint], _MEANINGS.get(name, "").replace("``", "`"))
        for name, hint in typing.get_type_hints(WorkRow).items()
    ),
)
