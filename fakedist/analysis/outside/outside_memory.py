"""Device memory outside the caching allocator: a run's estimate, and whether it fits on top of the measured memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from fakedist.analysis.calls import ranks_of
from fakedist.analysis.outside.communicators import CommunicatorMemory, Usage, communicator_memory
from fakedist.analysis.outside.connections import Shape
from fakedist.analysis.outside.fabric import Fabric, find_fabric
from fakedist.analysis.outside.nccl_settings import MIB, read_settings
from fakedist.analysis.outside.span import Span, exactly, total
from fakedist.run import summary
from fakedist.run.summary import Outside

#: A process's CUDA context with PyTorch, as measured and published. No figure was found for any other GPU.
CONTEXT_BYTES = {
    "NVIDIA GeForce RTX 3060": (114 * MIB, "sgl-project/sglang#35538"),
    "NVIDIA GeForce RTX 3090": (256 * MIB, "invoke-ai/InvokeAI#9413"),
}
_LIBRARIES = "libraries: handles of cuBLAS and cuDNN, and kernels as they are loaded, are not known"


def estimate_outside(tables: Mapping[str, pd.DataFrame], place: Mapping[str, Any], seen: Mapping[str, Any]) -> Outside:
    """Estimate the GPU memory that the rank takes outside the caching allocator.

    Args:
        tables: ``groups`` and ``calls`` of the run.
        place: ``gpu_name`` and ``gpus_per_node``.
        seen: ``environment`` (NCCL_* variables), ``version`` of NCCL, ``bound`` (numbers of groups bound to a device),
            ``measured_bytes`` (the device's used memory minus reserved, at the end) or None.
    """
    gpu_name, environment = str(place["gpu_name"]), dict(seen.get("environment", {}))
    fabric = find_fabric(gpu_name)
    left_out = [] if gpu_name in CONTEXT_BYTES else [f"CUDA context: not known for {gpu_name or 'this GPU'}"]
    context, source = CONTEXT_BYTES.get(gpu_name, (0, ""))
    groups = nccl_groups(tables["groups"])
    found = []
    if fabric is None and len(groups):
        left_out.append(f"NCCL: not known for {gpu_name or 'this GPU'}")
    elif fabric is not None:
        found = _communicators(tables, groups, place, (fabric, environment, frozenset(seen.get("bound", ()))))
    everything = total([exactly(context), *(each.bytes for _, each in found)])
    return Outside(
        low_bytes=everything.low,
        high_bytes=everything.high,
        context_bytes=context or None,
        context_source=source,
        nccl_version=str(seen.get("version", "")),
        nccl_environment=environment,
        communicators=[_summarized(group, each) for group, each in found],
        num_unused_groups=len(groups) - len(found) if fabric is not None else 0,
        left_out=[*left_out, _LIBRARIES],
        measured_bytes=seen.get("measured_bytes"),
    )


def beside_reserved(reserved: int, outside: Outside, capacity: int) -> Outside:
    """The estimate, completed with whether it fits into the capacity together with reserved memory."""
    if not capacity or reserved + outside.high_bytes <= capacity:
        return replace(outside, beside_reserved="fits")
    fits_least = reserved + outside.low_bytes <= capacity
    return replace(outside, beside_reserved="may not fit" if fits_least else "does not fit")


def nccl_groups(groups: pd.DataFrame) -> pd.DataFrame:
    """Groups whose device tensors go through NCCL, indexed by the group's number."""
    return groups[groups["backend"].str.contains("nccl")] if len(groups) else groups


def _communicators(
    tables: Mapping[str, pd.DataFrame],
    groups: pd.DataFrame,
    place: Mapping[str, Any],
    known: tuple[Fabric, Mapping[str, str], frozenset[int]],
) -> list[tuple[dict[str, Any], CommunicatorMemory]]:
    fabric, environment, bound = known
    settings, per_node = read_settings(environment), int(place["gpus_per_node"])
    calls: dict[Any, pd.DataFrame] = dict(tuple(tables["calls"].groupby("group")))
    found: list[tuple[dict[str, Any], CommunicatorMemory]] = []
    for number, row in zip(groups.index, groups.to_dict("records"), strict=True):
        ranks = ranks_of(str(row["ranks"]))
        nodes = Counter(rank // per_node for rank in ranks)
        mine = ranks[int(row["group_rank"])] // per_node if ranks else 0
        shape = Shape(int(row["size"]), nodes[mine], len(nodes))
        made = _through_nccl(calls.get(number), str(row["backend"]))
        usage = _usage(made, [rank // per_node == mine for rank in ranks], number in bound)
        if (each := communicator_memory(shape, usage, fabric, settings)) is not None:
            found.append(({**{str(name): value for name, value in row.items()}, "shape": shape}, each))
    return sorted(found, key=lambda pair: -pair[1].bytes.high)


def _through_nccl(calls: pd.DataFrame | None, backend: str) -> pd.DataFrame | None:
    """The calls of a group that reach NCCL. If the group has gloo for the host, object calls and barriers do not."""
    if calls is None:
        return None
    others = r"monitored_barrier" if backend == "nccl" else r"monitored_barrier|barrier|\w+_object(?:_list)?"
    found = calls[~calls["operation"].str.fullmatch(others)]
    return found if len(found) else None


def _usage(calls: pd.DataFrame | None, is_local: list[bool], is_bound: bool) -> Usage:
    if calls is None:
        return Usage(is_bound=is_bound)
    peers: dict[str, set[int]] = {"send": set(), "recv": set()}
    for operation, found in peers.items():
        found |= set(calls.loc[(calls["operation"] == operation) & (calls["peer"] >= 0), "peer"])
    counts = {
        f"{name}_{'local' if local else 'remote'}": sum(is_local[int(peer)] == local for peer in found)
        for name, found in peers.items()
        for local in (True, False)
    }
    operations = frozenset(map(str, calls["operation"].unique()))
    return Usage(operations, **counts, is_bound=is_bound)


def _summarized(group: Mapping[str, Any], each: CommunicatorMemory) -> summary.Communicator:
    shape: Shape = group["shape"]
    return summary.Communicator(
        group=str(group["description"] or group["name"]),
        group_size=shape.size,
        local_size=shape.local,
        num_nodes=shape.num_nodes,
        channels=_pair(each.channels),
        parts={name: _pair(part) for name, part in each.parts.items()},
        low_bytes=each.bytes.low,
        high_bytes=each.bytes.high,
    )


def _pair(span: Span) -> tuple[int, int]:
    return span.low, span.high
