"""Device memory outside the caching allocator: a run's estimate, and whether it fits on top of the measured memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Literal

import pandas as pd

from fakedist.analysis.topology import ProcessGroup, ranks_of, read_groups
from fakedist.cost_model.collectives.collective_times import FABRICS, default_fabric
from fakedist.cost_model.nccl.communicators import CommunicatorMemory, Usage, communicator_memory
from fakedist.cost_model.nccl.settings import (
    THROUGH_SHARED_MEMORY,
    GroupShape,
    Nccl,
    Network,
    Span,
    collective_of,
    exactly,
    find_interconnect,
    read_settings,
    total,
)
from fakedist.gpu.models.catalogue import CONTEXT_BYTES, GPUS
from fakedist.rundir import summary
from fakedist.rundir.records import TakenRecord
from fakedist.rundir.summary import Outside

_LIBRARIES = "libraries: handles of cuBLAS and cuDNN, and kernels as they are loaded, are not known"


def estimate_outside(
    tables: Mapping[str, pd.DataFrame],
    *,
    gpu_name: str,
    gpus_per_node: int,
    fabric: str | None = None,
    nccl_version: str = "",
    nccl_environment: Mapping[str, str] = MappingProxyType({}),
    bound: Collection[int] = (),
    measured_bytes: int | None = None,
    taken: TakenRecord | None = None,
    reserved_bytes: int = 0,
    capacity_bytes: int = 0,
    reserve_bytes: int = 0,
) -> Outside:
    """Estimate the GPU memory that the rank takes outside the caching allocator.

    Args:
        tables: ``groups`` and ``calls`` of the run.
        fabric: A preset, else the GPU's usual one; its NICs decide NCCL's algorithms over nodes.
        bound: Numbers of the groups that are bound to a device.
        measured_bytes: Used minus reserved memory of the device, at the end; None on a virtual GPU.
        taken: On a virtual GPU, what was taken outside the allocator.
        capacity_bytes: 0 if unknown.
        reserve_bytes: What ``--reserve`` kept from the allocator for all of that; it is at least so much.
    """
    interconnect, settings = find_interconnect(gpu_name), read_settings(Nccl(nccl_environment, nccl_version))
    network = _network(gpu_name, fabric)
    left_out = [] if gpu_name in CONTEXT_BYTES else [f"CUDA context: not known for {gpu_name or 'this GPU'}"]
    context, source = CONTEXT_BYTES.get(gpu_name, (0, ""))
    groups = {number: group for number, group in enumerate(read_groups(tables["groups"])) if "nccl" in group.backend}
    communicators: list[tuple[ProcessGroup, GroupShape, CommunicatorMemory]] = []
    if interconnect is None and groups:
        left_out.append(f"NCCL: not known for {gpu_name or 'this GPU'}")
    elif interconnect is not None:
        calls = {int(str(number)): rows for number, rows in tables["calls"].groupby("group")}
        for number, group in groups.items():
            shape, is_local = _shape(group, gpus_per_node)
            usage = _usage(_through_nccl(calls.get(number), group.backend), is_local, number in bound)
            if (communicator := communicator_memory(shape, usage, interconnect, settings, network)) is not None:
                communicators.append((group, shape, communicator))
    taken_bytes = 0 if taken is None else taken.peak_bytes
    everything = total([exactly(context + taken_bytes), *(memory.bytes for *_, memory in communicators)])
    everything = Span(max(everything.low, reserve_bytes), max(everything.high, reserve_bytes))
    return Outside(
        low_bytes=everything.low,
        high_bytes=everything.high,
        context_bytes=context or None,
        context_source=source,
        nccl_version=nccl_version,
        nccl_environment=dict(nccl_environment),
        communicators=[_summarized(*row) for row in sorted(communicators, key=lambda row: -row[2].bytes.high)],
        num_unused_groups=len(groups) - len(communicators) if interconnect is not None else 0,
        left_out=[*left_out, _LIBRARIES],
        measured_bytes=measured_bytes,
        beside_reserved=_beside_reserved(reserved_bytes, everything, capacity_bytes),
        taken={} if taken is None else dict(taken.by_owner),
        taken_bytes=taken_bytes,
        reserve_bytes=reserve_bytes,
    )


def _beside_reserved(reserved: int, memory: Span, capacity: int) -> Literal["fits", "may not fit", "does not fit"]:
    if not capacity or reserved + memory.high <= capacity:
        return "fits"
    return "may not fit" if reserved + memory.low <= capacity else "does not fit"


def _network(gpu_name: str, fabric: str | None) -> Network:
    model = next((name for name, spec in GPUS.items() if spec.product == gpu_name), "")
    joined = FABRICS.get(fabric or "") or default_fabric(model)
    return Network(joined.nic_bandwidth, joined.nics_per_node / joined.gpus_per_node)


def _shape(group: ProcessGroup, per_node: int) -> tuple[GroupShape, list[bool]]:
    """The shape of the group, and the mask of its ranks on this rank's node."""
    ranks = ranks_of(group.ranks)
    if not ranks:  # another rank made it: it fills as few nodes as it can
        return GroupShape.of(range(group.size), per_node), []
    mine = ranks[group.group_rank] // per_node
    return GroupShape.of(ranks, per_node, group.group_rank), [rank // per_node == mine for rank in ranks]


def _through_nccl(calls: pd.DataFrame | None, backend: str) -> pd.DataFrame | None:
    """The calls of a group that reach NCCL. If the group has gloo for the host, object calls and barriers do not."""
    if calls is None:
        return None
    others = r"monitored_barrier" if backend == "nccl" else r"monitored_barrier|barrier|\w+_object(?:_list)?"
    own = calls[~calls["operation"].str.fullmatch(f"{others}|{THROUGH_SHARED_MEMORY}")]
    return own if len(own) else None


def _usage(calls: pd.DataFrame | None, is_local: list[bool], is_bound: bool) -> Usage:
    if calls is None:
        return Usage(is_bound=is_bound)
    peers: dict[str, set[int]] = {"send": set(), "recv": set()}
    for operation, ranks in peers.items():
        ranks |= set(calls.loc[(calls["operation"] == operation) & (calls["peer"] >= 0), "peer"])
    counts = {
        f"{name}_{'local' if local else 'remote'}": sum(is_local[int(peer)] == local for peer in ranks)
        for name, ranks in peers.items()
        for local in (True, False)
    }
    operations = frozenset(map(str, calls["operation"].unique()))
    return Usage(operations, **counts, is_bound=is_bound, sizes=_sizes(calls))


def _sizes(calls: pd.DataFrame) -> dict[str, frozenset[int]]:
    by_operation: dict[str, set[int]] = {}
    distinct = calls[["operation", "bytes_in", "bytes_out"]].astype({"operation": str}).drop_duplicates()
    for operation, bytes_in, bytes_out in distinct.itertuples(index=False):
        by_operation.setdefault(operation, set()).add(collective_of(operation, bytes_in, bytes_out)[1])
    return {operation: frozenset(sizes) for operation, sizes in by_operation.items()}


def _summarized(group: ProcessGroup, shape: GroupShape, memory: CommunicatorMemory) -> summary.Communicator:
    return summary.Communicator(
        group=group.label,
        group_size=shape.size,
        local_size=shape.own,
        num_nodes=shape.num_nodes,
        channels=_pair(memory.channels),
        parts={name: _pair(part) for name, part in memory.parts.items()},
        low_bytes=memory.bytes.low,
        high_bytes=memory.bytes.high,
    )


def _pair(span: Span) -> tuple[int, int]:
    return span.low, span.high
