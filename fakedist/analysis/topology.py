"""The rank's position in its groups, its calls on each in one step, and which of them can run at the same time.

Calls can run at once if they are on different groups and different streams. Sends to and receives from different ranks
have separate streams. Dependencies between calls are not considered: this is the most that can run at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Recording
from fakedist.analysis.typed_tables import rows_of, table_of
from fakedist.rank_list import format_rank_list, parse_rank_list
from fakedist.rundir.rows import CallRow, ScopeRow
from fakedist.rundir.table_rows import TABLES

_OF_HOSTS = ("gloo", "mpi")
#: Calls whose host reads the size of every rank's object.
_SIZES_FIRST = ("all_gather_object", "gather_object")


class _Wait(NamedTuple):
    before: float
    stream: float


_NEVER = _Wait(math.nan, math.nan)


def call_table(recording: Recording) -> pd.DataFrame:
    """The table ``calls``: one row per call, in order."""
    calls = pd.DataFrame(recording.calls, columns=CallRow._fields)
    scopes = pd.DataFrame(recording.scopes, columns=ScopeRow._fields)
    merged = calls.merge(scopes, on="scope", how="left")
    merged["phase"] = merged["phase"].fillna("other")
    merged[["step", "layer"]] = merged[["step", "layer"]].fillna(0).astype("int32")
    return merged[TABLES["calls"].names]


def term_table(recording: Recording) -> pd.DataFrame:
    """The table ``call_terms``: one row per call, in order."""
    begun: set[tuple[int, int]] = set()
    waits = {wait.call: wait for wait in reversed(recording.call_waits)}
    backends = {group.number: group.backend for group in recording.groups}
    rows = []
    for call, terms in zip(recording.calls, recording.call_terms, strict=False):
        *agreed, on_host, lines, parts, join = terms
        on_host |= _is_of_hosts(backends.get(call.group, "nccl"), has_tensors=call.dtype != "")
        own_pair = call.peer >= 0 and not terms.batch and not on_host and call.group not in recording.bound
        communicator = call.group, call.peer if own_pair else -1
        is_made = communicator not in begun and call.group not in recording.bound and not on_host
        begun.add(communicator)
        is_blocking = call.peer < 0 and ("barrier" in call.operation or (on_host and not call.asynchronous))
        is_blocking |= call.operation in _SIZES_FIRST
        host_waits = call.operation != "symm_mem_barrier" and (is_blocking or is_made)
        wait = waits.get(call.sequence, _NEVER)
        text = "\n".join(recording.call_lines[lines]) if lines >= 0 else ""
        row = (*agreed, on_host, own_pair, host_waits, text, "\n".join(parts))
        rows.append((*row, join, wait.before, wait.stream))
    return table_of("call_terms", rows)


def _is_of_hosts(backend: str, *, has_tensors: bool) -> bool:
    """Whether the host makes the calls of a group, even those of the GPU's tensors; or its calls without tensors."""
    by_device = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    of_gpus = by_device.get("cuda", backend)
    return of_gpus in _OF_HOSTS or (not has_tensors and by_device.get("cpu") in _OF_HOSTS)


def group_table(recording: Recording) -> pd.DataFrame:
    """The table ``groups``: one row per process group, in order of creation."""
    rows = [
        (row.name, row.description, row.backend, len(row.members), row.group_rank, format_rank_list(row.members))
        for row in sorted(recording.groups)
    ]
    return table_of("groups", rows)


def other_group_table(recording: Recording) -> pd.DataFrame:
    """The table ``other_groups``: one row per process group without this rank, in order of creation."""
    rows = [(row.after, row.description, format_rank_list(row.members)) for row in recording.other_groups]
    return table_of("other_groups", rows)


def collective_table(calls: pd.DataFrame) -> pd.DataFrame:
    """The table ``collectives``: one row per group and operation, most bytes first."""
    groups = calls.groupby(["group", "operation"], sort=False)
    table = groups.agg(
        num_calls=("op", "size"), bytes_in=("bytes_in", "sum"), bytes_out=("bytes_out", "sum")
    ).reset_index()
    order = table[["bytes_in", "bytes_out"]].max(axis=1).sort_values(ascending=False, kind="stable").index
    return table.loc[order].reset_index(drop=True)


def ranks_of(text: str) -> tuple[int, ...]:
    """Ranks from their text in the table ``groups``, which is empty if the ranks are not known."""
    return parse_rank_list(text) if text else ()


#: Values of ``stream``: where a row's calls run. Other streams are numbered in order of their first call.
OWN, COMPUTE, HOST = "own", "compute", "host"
_POINT_TO_POINT = ("send", "recv")
_BLOCK = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")  # layers.12 of layers.12.attention.wq
_WORKING = ("forward", "backward", "optimizer")

Read = Callable[..., pd.DataFrame]


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process group that the rank is in; a row of the table ``groups``."""

    name: str
    description: str
    backend: str
    size: int
    group_rank: int
    ranks: str

    @property
    def label(self) -> str:
        """Its description, or its name."""
        return self.description or self.name


def read_groups(table: pd.DataFrame) -> list[ProcessGroup]:
    """The rows of the table ``groups``."""
    return rows_of(ProcessGroup, table)


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """The calls of one operation on one group and one stream.

    Attributes:
        when: forward, backward, optimizer, "after backward" and so on, most calls first.
        num_layers: Repeated blocks of the model that make them, out of ``of_layers``.
        peers: Group ranks of sends and receives, sorted.
        stream: ``own``: the group's; ``compute``: the forward's; ``host``; else the stream's number.
    """

    group: int
    operation: str
    num_calls: int
    bytes_in: int
    bytes_out: int
    when: list[str]
    num_layers: int
    of_layers: int
    peers: list[int]
    stream: str


@dataclass(frozen=True, slots=True)
class Overlap:
    """The compute and the calls (rows of ``Topology.calls``) that can run at the same time as some calls."""

    compute: bool
    calls: list[int]


@dataclass(frozen=True, slots=True)
class Topology:
    """The groups of a rank and its calls in one step, by group, operation and stream, in order of first call.

    The step is the last one that ended; if none did, 0, everything before the first step.
    """

    step: int
    groups: list[ProcessGroup]
    calls: list[GroupCalls]
    overlaps: list[Overlap]


def find_topology(read: Read) -> Topology:
    """The topology of a run, whose tables ``read(name, columns)`` returns."""
    steps, groups = read("steps", ("step",)), read_groups(read("groups", None))
    step = int(steps["step"].max()) if len(steps) else 0
    calls = read("calls", None).astype({"operation": str, "phase": str})
    calls = calls[calls["step"] == step].reset_index(drop=True)
    names = read("layers", ("name",))["name"].astype(str)
    blocks = names.map(_block)
    calls["block"] = calls["layer"].map(blocks).fillna("")
    calls["when"] = _when(calls, read, step)
    calls["lane"] = _lanes(calls, groups, _compute_stream(read, step))
    grouped = _grouped(calls, num_blocks=blocks[blocks != ""].nunique())
    return Topology(step, groups, grouped, _overlaps(grouped, [group.size for group in groups]))


def _block(name: str) -> str:
    match = _BLOCK.match(name)
    return match[0] if match else ""


def _when(calls: pd.DataFrame, read: Read, step: int) -> list[str]:
    """Each call's phase, or for ``other``, the phase that it came after."""
    spans = read("spans", None).astype({"phase": str})
    spans = spans[(spans["step"] == step) & spans["phase"].isin(_WORKING)]
    if not len(spans) or not len(calls):
        return list(calls["phase"])
    op = np.maximum.accumulate(read("events", ("op",))["op"].to_numpy())
    begins = op[spans["first_event"].to_numpy()]
    before = np.searchsorted(begins, calls["op"].to_numpy(), side="right") - 1
    names = ["after " + phase for phase in spans["phase"]] + ["before forward"]
    return [
        phase if phase != "other" else names[position]
        for phase, position in zip(calls["phase"], before.tolist(), strict=True)
    ]


def _compute_stream(read: Read, step: int) -> int:
    """The stream on which forward and backward allocated the most memory; the default stream if they allocated none."""
    blocks = read("blocks", ("bytes", "stream", "phase", "step", "category"))
    working = blocks["phase"].isin(("forward", "backward")) & blocks["category"].isin(("activation", "temporary"))
    sums = blocks[working & (blocks["step"] == step)].groupby("stream")["bytes"].sum()
    return int(sums.index[int(sums.to_numpy().argmax())]) if len(sums) else 0


def _lanes(calls: pd.DataFrame, groups: list[ProcessGroup], compute: int) -> list[str]:
    numbers: dict[int, str] = {compute: COMPUTE}
    on_host = [set(group.backend.split(",")) <= {"gloo", "mpi", "cpu:gloo"} for group in groups]
    lanes = []
    columns = (calls[name].tolist() for name in ("operation", "group", "asynchronous", "stream"))
    for operation, group, asynchronous, stream in zip(*columns, strict=True):
        if on_host[group] or "object" in operation:
            lanes.append(HOST)
        elif asynchronous or operation in _POINT_TO_POINT:
            lanes.append(OWN)
        else:
            lanes.append(numbers.setdefault(stream, str(len(numbers))))
    return lanes


def _grouped(calls: pd.DataFrame, num_blocks: int) -> list[GroupCalls]:
    rows = []
    for _, part in calls.groupby(["group", "operation", "lane"], sort=False):
        group, operation, lane = part[["group", "operation", "lane"]].iloc[0]
        rows.append(
            GroupCalls(
                group=int(group),
                operation=operation,
                num_calls=len(part),
                bytes_in=int(part["bytes_in"].sum()),
                bytes_out=int(part["bytes_out"].sum()),
                when=part["when"].value_counts().index.tolist(),
                num_layers=int(part.loc[part["block"] != "", "block"].nunique()),
                of_layers=num_blocks,
                peers=sorted(peer for peer in part["peer"].unique().tolist() if peer >= 0),
                stream=lane,
            )
        )
    return rows


def _overlaps(calls: list[GroupCalls], sizes: list[int]) -> list[Overlap]:
    """The phases and calls that can run at the same time as each call. A rank's calls with itself overlap nothing."""
    overlaps = []
    for row in calls:
        if sizes[row.group] == 1:
            overlaps.append(Overlap(compute=False, calls=[]))
            continue
        apart = [
            index
            for index, other in enumerate(calls)
            if sizes[other.group] > 1 and other is not row and _are_apart(row, other)
        ]
        overlaps.append(Overlap(compute=row.stream != COMPUTE, calls=apart))
    return overlaps


def _are_apart(row: GroupCalls, other: GroupCalls) -> bool:
    if row.group != other.group:
        return row.stream == other.stream == OWN or row.stream != other.stream
    # Sends and receives on one group: different peers have different streams.
    return bool(row.peers and other.peers and set(row.peers) != set(other.peers))
