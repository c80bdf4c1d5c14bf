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
from fakedist.errors import JobError
from fakedist.rundir.notes import counted
from fakedist.rundir.rows import CallRow, ScopeRow
from fakedist.rundir.table_rows import TABLES, GroupsTable
from fakedist.units import format_rank_list, parse_rank_list

_OF_HOSTS = ("gloo", "mpi")
#: Calls whose host reads the sizes of objects that it gets.
_SIZES_FIRST = ("all_gather_object", "gather_object", "recv_object_list")


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
    begun: set[tuple[int, int, bool]] = set()
    waits = {wait.call: wait for wait in reversed(recording.call_waits)}
    backends = {group.number: group.backend for group in recording.groups}
    rows = []
    for call, terms in zip(recording.calls, recording.call_terms, strict=False):
        *agreed, on_host, lines, parts, join = terms
        on_host |= _is_of_hosts(backends.get(call.group, "nccl"), has_tensors=call.dtype != "")
        own_pair = call.peer >= 0 and not terms.batch and not on_host and call.group not in recording.bound
        communicator = call.group, call.peer if own_pair else -1, on_host
        is_made = communicator not in begun and call.group not in recording.bound and not on_host
        begun.add(communicator)
        is_blocking = "barrier" in call.operation or call.operation in _SIZES_FIRST
        is_blocking |= on_host and not call.asynchronous and (call.peer < 0 or "object" in call.operation)
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


class ProcessGroup(GroupsTable):
    """A process group that the rank is in; a row of the table ``groups``."""

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
    steps = read("steps", ("step",))
    groups = read_groups(read("groups", None))
    step = int(steps["step"].max()) if len(steps) else 0
    calls = read("calls", None).astype({"operation": str, "phase": str})
    calls = calls[calls["step"] == step].reset_index(drop=True)
    names = read("layers", ("name",))["name"].astype(str)
    blocks = names.map(_block)
    calls = calls.assign(
        block=calls["layer"].map(blocks).fillna(""),
        when=lambda rows: _when(rows, read, step),
        lane=lambda rows: _lanes(rows, groups, _compute_stream(read, step)),
    )
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


#: Axes by the words of a group's label. A label with words of several axes is of a group that joins them.
_WORDS = {
    "pipeline": {"pp", "pipe", "pipeline", "stage", "stages"},
    "tensor": {"tp", "tensor"},
    "context": {"cp", "context", "sp", "sequence", "ulysses", "ring"},
    "data": {"dp", "ddp", "data", "fsdp", "hsdp", "shard", "replicate", "replica", "zero", "batch"},
    "expert": {"ep", "etp", "edp", "efsdp", "expert", "experts", "moe"},
    "model": {"model"},
    "other": {"embedding", "optimizer", "loss"},
}
_FILLER = re.compile(r"tensor_model_parallel|pipeline_model_parallel|expert_model_parallel")
#: Axes whose ranks read tokens of their own.
_SINGLE = ({"data"}, {"context"})
#: Operations by which FSDP and DDP use a group in the forward pass. Others would be tensor parallelism.
_DATA_FORWARD_CALLS = ("all_gather", "allgather", "broadcast", "barrier")


@dataclass(frozen=True)
class Pipeline:
    """A pipeline that a rank is in: one rank of each stage, in its group's order."""

    group: str
    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Replicas:
    """Ranks of a job that read tokens of their own.

    Attributes:
        number: 0 if the groups do not show it.
        text: The arithmetic: "8 ranks / (2 tensor x 2 pipeline)"; or why it is not known.
    """

    number: int
    text: str


def find_pipeline(groups: pd.DataFrame, calls: pd.DataFrame, rank: int) -> Pipeline | None:
    """The pipeline of a rank, or None; JobError if several of its groups could be one."""
    rows = [(number, group) for number, group in enumerate(read_groups(groups)) if group.size > 1 and group.ranks]
    named = {parse_rank_list(group.ranks): group.label for _, group in rows if axes_of(group.label) == {"pipeline"}}
    if named:
        (ranks, label), *others = named.items()
        if others:
            raise _ambiguous(rank, named)
        return Pipeline(label, ranks, f"its name is {label}")
    peers = _peers(rows, calls)
    if not peers:
        return None
    used: dict[tuple[int, ...], str] = {}
    for _, group in rows:
        ranks = parse_rank_list(group.ranks)
        if peers <= set(ranks) and not axes_of(group.label) and group.description != "default_pg":
            used[ranks] = group.label
    if not used and len(rows) == 1 and set(ranks := parse_rank_list(rows[0][1].ranks)) == peers | {rank}:
        used[ranks] = rows[0][1].label  # it exchanges with all ranks of the job
    if len(used) != 1:
        raise _ambiguous(rank, used or {tuple(sorted(peers | {rank})): "its sends and receives"})
    ((ranks, label),) = used.items()
    return Pipeline(label, ranks, f"rank {rank} sends to or receives from rank {min(peers)}, which is in it")


def _peers(rows: list[tuple[int, ProcessGroup]], calls: pd.DataFrame) -> set[int]:
    ranks = {number: parse_rank_list(group.ranks) for number, group in rows if "context" not in axes_of(group.label)}
    pairs = calls[calls["operation"].astype(str).str.startswith(_POINT_TO_POINT) & (calls["peer"] >= 0)]
    distinct = set(zip(pairs["group"].tolist(), pairs["peer"].tolist(), strict=True))
    return {ranks[group][peer] for group, peer in distinct if group in ranks and peer < len(ranks[group])}


def _ambiguous(rank: int, candidates: dict[tuple[int, ...], str]) -> JobError:
    shown = "; ".join(f"{label} has {format_rank_list(ranks)}" for ranks, label in candidates.items())
    first = format_rank_list(next(iter(candidates)))
    return JobError(
        f"which group of rank {rank} is its pipeline? {shown}", f"name one rank of each stage: --rank {first}"
    )


def axes_of(label: str) -> set[str]:
    """The axes of parallelism that a group's label names."""
    plain = _FILLER.sub(lambda match: match[0].replace("_model", ""), label.lower())
    words = set(re.split(r"[^a-z]+", plain))
    return {axis for axis, known in _WORDS.items() if words & known}


def find_replicas(groups: pd.DataFrame, calls: pd.DataFrame, world_size: int) -> Replicas:
    """The ranks of a job that read tokens of their own, from the groups and the timed step's ``calls``.

    Tensor and pipeline groups share tokens; data parallel ranks read other sequences, context parallel ones parts of
    one.
    """
    rows = [group for group in read_groups(groups) if group.size > 1]
    used = set(calls["group"].tolist())
    labels = {group.label: axes_of(group.label) for group in rows}
    for number, group in enumerate(read_groups(groups)):
        if group.size > 1 and number in used and group.size < world_size and not labels[group.label]:
            return Replicas(0, f"what the group {group.label} of {group.size} ranks is for is not known")
    sizes = {}
    for axis in ("tensor", "pipeline"):
        group_sizes = {group.size for group in rows if labels[group.label] == {axis}}
        if len(group_sizes) > 1:
            return Replicas(0, f"there are {axis} parallel groups of several sizes")
        sizes[axis] = group_sizes.pop() if group_sizes else 1
    shared = math.prod(sizes.values())
    if world_size % shared:
        return Replicas(0, f"{world_size} ranks cannot be divided by {shared}")
    number = world_size // shared
    if number > 1 and (why := _not_shown(rows, calls, groups, number, shared)):
        return Replicas(0, why)
    parts = [f"{size} {axis}" for axis, size in sizes.items() if size > 1]
    return Replicas(number, counted(world_size, "rank") + (f" / ({' x '.join(parts)})" if parts else ""))


def _not_shown(rows: list[ProcessGroup], calls: pd.DataFrame, groups: pd.DataFrame, number: int, shared: int) -> str:
    """Why the groups do not show that so many ranks are data parallel; empty if they do."""
    of_data = {group.size for group in rows if "data" in axes_of(group.label)}
    if number in of_data:
        return ""
    apart = {group.label: group.size for group in rows if axes_of(group.label) in _SINGLE}
    if math.prod(apart.values()) == number:
        return ""
    size = calls["group"].map(dict(enumerate(group.size for group in read_groups(groups))))
    if shared == 1 and not (size > 1).any() and {group.size for group in rows} <= {number}:
        return ""  # ranks that exchange nothing train by themselves
    own = calls[size == number * shared]
    in_forward = own[own["phase"].astype(str) == "forward"]["operation"].astype(str)
    if shared == 1 and len(own) and in_forward.str.startswith(_DATA_FORWARD_CALLS).all():
        return ""
    return f"its groups do not show how {number:,} ranks share the batch"
