"""A rank's axes of parallelism, from its groups' names and use; nothing is assumed of unclear ones.

Megatron and DeepSpeed describe their groups, and the groups of a DeviceMesh have the names of its axes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pandas as pd

from fakedist.analysis.topology import ProcessGroup, read_groups
from fakedist.errors import JobError
from fakedist.rank_list import format_rank_list, parse_rank_list

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
_POINT_TO_POINT = ("send", "recv")
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
    return Replicas(number, f"{world_size:,} ranks" + (f" / ({' x '.join(parts)})" if parts else ""))


def _not_shown(rows: list[ProcessGroup], calls: pd.DataFrame, groups: pd.DataFrame, number: int, shared: int) -> str:
    """Why the groups do not show that so many ranks are data parallel; empty if they do."""
    of_data = {group.size for group in rows if "data" in axes_of(group.label)}
    if number in of_data:
        return ""
    apart = {group.label: group.size for group in rows if axes_of(group.label) in _SINGLE}
    if math.prod(apart.values()) == number:
        return ""
    whole = [at for at, group in enumerate(read_groups(groups)) if group.size == number * shared]
    own = calls[calls["group"].isin(whole)]
    in_forward = own[own["phase"].astype(str) == "forward"]["operation"].astype(str)
    if shared == 1 and len(own) and in_forward.str.startswith(_DATA_FORWARD_CALLS).all():
        return ""
    return f"its groups do not show how {number:,} ranks share the batch"
