"""What each collective call of a run takes on a fabric."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fakedist.rank_list import parse_rank_list
from fakedist.time.collectives import CollectiveTime, CollectiveTimes, GroupShape

#: The beginning of a call's operation -> the collective that it is, and the side whose bytes are the whole buffer.
#: The first match counts.
_KINDS = (
    ("reduce_scatter", "reduce_scatter", "bytes_in"),
    ("all_gather", "all_gather", "bytes_out"),
    ("allgather", "all_gather", "bytes_out"),
    ("all_reduce", "all_reduce", "bytes_in"),
    ("allreduce", "all_reduce", "bytes_in"),
    ("all_to_all", "all_to_all", "largest"),
    ("alltoall", "all_to_all", "largest"),
    ("broadcast", "broadcast", "largest"),
    ("reduce", "reduce", "largest"),
    ("gather", "all_gather", "largest"),
    ("scatter", "reduce_scatter", "largest"),
    ("send", "send", "largest"),
    ("recv", "send", "largest"),
    ("barrier", "barrier", "largest"),
    ("monitored_barrier", "barrier", "largest"),
)
_PAIR = "send"
_UNKNOWN = CollectiveTime(float("nan"), "", float("nan"))


def call_times(calls: pd.DataFrame, groups: pd.DataFrame, times: CollectiveTimes) -> pd.DataFrame:
    """What calls take.

    Args:
        calls: The table ``calls``, or some of its rows.
        groups: The table ``groups``.
        times: Estimates collectives of a GPU on a fabric.

    Returns:
        A row for each of ``calls``, with its index. Columns:

        - time_us, low_us, high_us: Microseconds, and the 90 % interval; NaN for an operation that is not known.
        - algorithm: What runs it: measured (in one NVLink domain), ring, tree, pairs or send.
        - num_nodes: NVLink domains that it spans.
        - moved_bytes: Bytes of the whole buffer.
    """
    per_node = times.fabric.gpus_per_node
    ranks = [parse_rank_list(str(text)) if text else () for text in groups["ranks"]]
    sizes, places = groups["size"].tolist(), groups["group_rank"].tolist()
    shapes = [_shape(each, int(size), per_node) for each, size in zip(ranks, sizes, strict=True)]
    keys = calls[["operation", "group", "bytes_in", "bytes_out", "peer"]]
    distinct, of_call = np.unique(keys.astype({"operation": str}).to_records(index=False), return_inverse=True)
    rows = []
    for operation, group, bytes_in, bytes_out, peer in distinct.tolist():
        kind, num_bytes = collective_of(operation, bytes_in, bytes_out)
        shape = shapes[group]
        if kind == _PAIR:
            shape = _pair(ranks[group], int(places[group]), int(peer), per_node)
        found = times.time(kind, num_bytes, shape) if kind else _UNKNOWN
        low, high = found.time_us * np.exp(-found.spread), found.time_us * np.exp(found.spread)
        rows.append((found.time_us, low, high, found.algorithm, shape.num_nodes, float(num_bytes)))
    columns = ["time_us", "low_us", "high_us", "algorithm", "num_nodes", "moved_bytes"]
    table = pd.DataFrame(rows, columns=columns)
    return table.iloc[of_call].set_axis(calls.index)


def collective_of(operation: str, bytes_in: int, bytes_out: int) -> tuple[str, int]:
    """The collective that a call is, and the bytes of its whole buffer; "" for an operation that is not known.

    Args:
        operation: The call's operation, e.g. all_gather_into_tensor_coalesced.
        bytes_in: Bytes of this rank's inputs.
        bytes_out: Bytes of this rank's outputs.
    """
    sizes = {"bytes_in": bytes_in, "bytes_out": bytes_out, "largest": max(bytes_in, bytes_out)}
    return next(
        ((kind, sizes[side]) for prefix, kind, side in _KINDS if operation.startswith(prefix)),
        ("", sizes["largest"]),
    )


def _shape(ranks: Sequence[int], size: int, per_node: int) -> GroupShape:
    # The ranks of a group are not known if another rank made it; then it fills as few nodes as it can.
    return GroupShape.of(ranks or range(size), per_node)


def _pair(ranks: Sequence[int], group_rank: int, peer: int, per_node: int) -> GroupShape:
    """This rank and the other one of a send; two ranks of one node if the other is not known."""
    if not 0 <= peer < len(ranks) or peer == group_rank:
        return GroupShape(2, 1, 2)
    return GroupShape.of([ranks[group_rank], ranks[peer]], per_node)
