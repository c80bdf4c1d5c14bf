"""The time of each collective call of a run on a fabric."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.cost_model.collectives.collective_times import (
    CollectiveTime,
    CollectiveTimes,
    Fabric,
    LibraryTime,
    symmetric_time,
)
from fakedist.cost_model.nccl.settings import GroupShape, Settings, collective_of, interconnect_like
from fakedist.cost_model.overlap import Contender, rates_with
from fakedist.gpu.models.spec import GpuSpec
from fakedist.rundir.notes import counted
from fakedist.units import format_bytes, parse_rank_list

#: Between two ranks: a send through NCCL, a copy from memory that they share.
_PAIRS = ("send", "get")
#: Kernels of user buffers that hold some SMs: "userbuffers_all_gather_16sms".
_HOLDS = re.compile(r"userbuffers_\w+_(\d+)sms")
#: They wait for what a peer sends, with one thread. Links carry as much in either direction: they share none.
_ARRIVES = re.compile("userbuffers_recv|put_wait")
_COLUMNS = [
    *("time_us", "low_us", "high_us", "algorithm", "num_nodes", "moved_bytes"),
    *("link_share", "kind", "queue", "is_uneven", "text", "sms"),
]
_UNKNOWN = CollectiveTime(float("nan"), "", "", float("nan"), 0.0, "")


@dataclass(frozen=True)
class Communication:
    """The times of a step's collectives (:func:`call_times`, by sequence number), and the rates left to its kernels."""

    calls: pd.DataFrame
    gpu: GpuSpec
    fabric: Fabric
    interferes: bool = True
    nccl: Settings = field(default_factory=Settings)

    def of_rows(self, call: npt.NDArray[np.int64], column: str) -> npt.NDArray[np.float64]:
        """A column of :attr:`calls` for each of some sequence numbers; NaN where there is no such call."""
        return np.asarray(self.calls[column].reindex(call).to_numpy("f8"))

    def queues(self, call: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The communicator that each of some sequence numbers queues on; -1 where there is no such call, or none."""
        numbers: npt.NDArray[np.int64] = self.calls["queue"].reindex(call, fill_value=-1).to_numpy("i8")
        return numbers

    def slowed(
        self, work: pd.DataFrame, bounds: npt.NDArray[np.float64], *, over_nodes: bool
    ) -> npt.NDArray[np.float64]:
        """The rate of each row of work during a collective; ``bounds`` is 1 where memory limits it, else 0."""
        own = self.calls[(self.calls["num_nodes"] > 1) == over_nodes]
        whole = own["time_us"].sum()
        bandwidth = own["moved_bytes"].sum() / whole * 1e6 if whole else 0.0
        contender = Contender(self.sms_held(own, over_nodes=over_nodes), bandwidth)
        return rates_with(work, bounds, self.gpu.sms, self.gpu.memory_bandwidth, contender)

    def sms_held(self, calls: pd.DataFrame, *, over_nodes: bool) -> int:
        """SMs that the calls' kernels hold on average over their time: NCCL's channels, or as many as a call says."""
        whole = calls["time_us"].sum()
        of_nccl = calls["sms"] < 0
        by_kernels = calls.loc[of_nccl, "time_us"].sum() / whole if whole else 1.0
        others = (calls["sms"] * calls["time_us"])[~of_nccl].sum() / whole if whole else 0.0
        gpu = self.gpu
        joined = interconnect_like(gpu.product, gpu.compute_capability[0], gpu.nvlink_bandwidth, gpu.host_bandwidth)
        fewest, most = self.nccl.channels
        channels = min(max((joined.nodes if over_nodes else joined.node).high, fewest), most)
        return round(channels * by_kernels + others)


def communication_of(
    calls: pd.DataFrame,
    groups: pd.DataFrame,
    gpu: GpuSpec,
    fabric: Fabric,
    *,
    interferes: bool = True,
    nccl: Settings | None = None,
) -> Communication:
    """Price the calls of a step."""
    nccl = Settings() if nccl is None else nccl
    times = CollectiveTimes(gpu, fabric, nccl=nccl)
    prices = call_times(calls, groups, times).set_axis(calls["sequence"].to_numpy("i8"))
    return Communication(prices, gpu, fabric, interferes, nccl)


def call_times(calls: pd.DataFrame, groups: pd.DataFrame, times: CollectiveTimes) -> pd.DataFrame:
    """Times of calls, rows of the table ``calls``, whose index the result has.

    Columns:

    - time_us, low_us, high_us: Microseconds, and the 90 % interval; NaN for an unknown operation.
    - algorithm: ring, tree, nvls, nvlstree, pat, pairs, send, copy, kernel (of shared memory), deep_ep, hybrid_ep.
    - num_nodes: NVLink domains that it spans.
    - moved_bytes: Bytes of the whole buffer; of DeepEP and HybridEP, those sent to other ranks, or over nodes to other
      nodes.
    - link_share: The fraction of its time for which its bytes would keep the links busy.
    - kind: The collective: all_reduce, ...; empty for an unknown operation.
    - queue: The group, whose communicator runs one call at a time; -1 for sends and shared memory, which run at once.
    - is_uneven: An all_to_all of uneven splits, of which other ranks may have larger ones.
    - text: A few words: "64 MiB, 8 nodes, ring simple".
    - sms: SMs that its kernel holds; -1 for NCCL's channels.
    """
    per_node = times.fabric.gpus_per_node
    ranks = [parse_rank_list(str(text)) if text else () for text in groups["ranks"]]
    sizes, own_ranks = groups["size"].tolist(), groups["group_rank"].tolist()
    # The ranks of a group are not known if another rank made it; then it fills as few nodes as it can.
    shapes = [GroupShape.of(members or range(int(size)), per_node) for members, size in zip(ranks, sizes, strict=True)]
    keys = calls[["operation", "group", "bytes_in", "bytes_out", "peer"]].assign(
        part=_optional(calls, "largest_part_bytes"), exchanged=_optional(calls, "exchanged_bytes")
    )
    distinct, of_call = np.unique(keys.astype({"operation": str}).to_records(index=False), return_inverse=True)
    rows = []
    for operation, group, bytes_in, bytes_out, peer, part, exchanged in distinct.tolist():
        size, over_nodes, own_bytes = shapes[group].size, shapes[group].num_nodes > 1, bytes_in + bytes_out
        kernels = (
            library.time(operation, exchanged, size, own_bytes=own_bytes, is_over_nodes=over_nodes)
            for library in times.of_libraries
        )
        if (kernel := next((one for one in kernels if one is not None), None)) is not None:
            rows.append(_library_row(kernel, shapes[group], exchanged, times))
            continue
        kind, num_bytes = collective_of(operation, bytes_in, bytes_out)
        shape = shapes[group]
        if kind in _PAIRS:
            shape = _pair(ranks[group], int(own_ranks[group]), int(peer), per_node)
        is_uneven = kind == "all_to_all" and part > 0 and part * shape.size != num_bytes
        # No router spreads what goes to one of several other ranks: ring attention passes its keys on.
        passes_on = is_uneven and shape.size > 2 and exchanged == part
        loaded = _even_load(part, exchanged, shape) if is_uneven else num_bytes
        estimate = times.time(kind, loaded, shape) if kind else _UNKNOWN
        if is_symmetric := kind != "" and operation.startswith(("symm_mem_", "userbuffers_")):
            estimate = _by_a_kernel(operation, symmetric_time(estimate), num_bytes, shape, times)
        low, high = estimate.time_us * np.exp(-estimate.spread), estimate.time_us * np.exp(estimate.spread)
        how = f"{estimate.algorithm} {estimate.protocol}".rstrip()
        text = f"{format_bytes(num_bytes)}, {counted(shape.num_nodes, 'node')}, {how}"
        if is_uneven:
            text += f", largest part {format_bytes(part)}"
        is_uneven = is_uneven and not passes_on
        queue = -1 if kind in _PAIRS or is_symmetric else group
        how_long = estimate.time_us, low, high
        moved = float(num_bytes), 0.0 if _ARRIVES.match(operation) else estimate.link_share
        sms = 0 if estimate.algorithm == "copy" or _ARRIVES.match(operation) else _num_sms(operation)
        rows.append((*how_long, estimate.algorithm, shape.num_nodes, *moved, kind, queue, is_uneven, text, sms))
    table = pd.DataFrame(rows, columns=_COLUMNS)
    return table.iloc[of_call].set_axis(calls.index)


def _library_row(
    estimate: LibraryTime, shape: GroupShape, num_bytes: int, times: CollectiveTimes
) -> tuple[object, ...]:
    time_us = estimate.time_us
    kind = "all_to_all" if num_bytes else ""
    low, high = time_us * np.exp(-estimate.spread), time_us * np.exp(estimate.spread)
    share = min(num_bytes / times.link_bandwidth(shape) * 1e6 / time_us, 1.0)
    text = f"{format_bytes(num_bytes)} to others, {counted(shape.num_nodes, 'node')}, {estimate.text}"
    moved = float(num_bytes), share
    return (
        time_us,
        low,
        high,
        estimate.library,
        shape.num_nodes,
        *moved,
        kind,
        -1,
        bool(num_bytes),
        text,
        estimate.sms,
    )


def _by_a_kernel(
    operation: str, estimate: CollectiveTime, num_bytes: float, shape: GroupShape, times: CollectiveTimes
) -> CollectiveTime:
    """The time of a kernel that may have few SMs: NVSwitches multicast and add up, else it moves each other's part."""
    num_sms = _num_sms(operation)
    if num_sms < 0:
        return estimate
    is_pair = re.match("userbuffers_(send|recv)", operation) is not None
    others = 1 if is_pair or "multimem" in operation else shape.size - 1
    return times.within_sms(estimate, num_bytes * others / (1 if is_pair else shape.size), num_sms)


def _num_sms(operation: str) -> int:
    held = _HOLDS.fullmatch(operation)
    return -1 if held is None else int(held[1])


def _optional(calls: pd.DataFrame, column: str) -> npt.NDArray[np.int64]:
    """The bytes that calls of all_to_all exchange; 0 for other calls, and where they were not recorded: even splits."""
    return calls[column].to_numpy("i8") if column in calls else np.zeros(len(calls), np.int64)


def _even_load(part: int, exchanged: int, shape: GroupShape) -> float:
    """Bytes of an even all_to_all that loads the links as one of uneven splits does.

    Over nodes, parts as large as the largest cross them, as many as ``exchanged`` (0: not recorded) allows.
    """
    others = shape.size - (shape.local if shape.num_nodes > 1 else 1)
    return shape.size * (min(exchanged / others, part) if exchanged else part)


def _pair(ranks: Sequence[int], group_rank: int, peer: int, per_node: int) -> GroupShape:
    if not 0 <= peer < len(ranks) or peer == group_rank:
        return GroupShape(2, 1, 2)
    return GroupShape.of([ranks[group_rank], ranks[peer]], per_node)
