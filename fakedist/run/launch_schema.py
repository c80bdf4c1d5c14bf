"""The tables ``launches`` and ``work``: what the timed step on the virtual GPU launched, before any GPU prices it."""

from __future__ import annotations

import typing

from fakedist.run.columns import Column, Table, attributes
from fakedist.run.launch_records import LAUNCH_KINDS, WorkRow

_TYPES = {str: "string", int: "int64", float: "double", bool: "bool"}
_MEANINGS = attributes(WorkRow)

LAUNCHES = Table(
    "What the host gave to the streams in the timed step on the virtual GPU, in order: launches, and the events and "
    "waits between them. It says nothing of times, and so holds for any GPU.",
    (
        Column("what", "string", "What it is: " + ", ".join(LAUNCH_KINDS) + "."),
        Column("work", "int32", "Row of `work`; -1 for events and waits."),
        Column("stream", "uint64", "CUDA stream; 0 is the default one."),
        Column("event", "uint64", "The event that is recorded or waited for; 0 without one."),
        Column("num_operations", "int64", "Operations of torch that the host ran since the last row with work."),
        Column("graph", "int32", "Number of the launch of the CUDA graph that it belongs to; 0 outside of graphs."),
        Column("device", "int32", "Index of the device."),
        Column("grid", "string", "Blocks as x,y,z; empty if unknown."),
        Column("block", "string", "Threads of a block as x,y,z; empty if unknown."),
        Column("op", "int64", "Number of the operation that launched it, as in `blocks`; -1 if none was running."),
        Column("step", "int32", "Step."),
        Column("phase", "string", "init, forward, backward, optimizer or other."),
        Column("recompute", "bool", "Launched while backward ran a checkpointed forward again."),
        Column("layer", "int32", "Row of `layers`; 0 outside of modules."),
        Column("call", "int64", "Sequence number in `calls` of the collective that it stands for; -1 otherwise."),
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
