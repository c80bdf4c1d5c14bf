"""The rank's place in its groups, its calls on each in one step, and which of them can run at the same time.

Two calls can run at once if they are on different groups and on different streams: the calls of one group run in the
order in which they are made, and so does the work of one stream. Sends to and receives from different ranks have
separate streams. Dependencies between calls are not considered, so this is the most that can run at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

#: Values of ``stream``: where a row's calls run. Other streams are numbered in order of their first call.
OWN, COMPUTE, HOST = "own", "compute", "host"
_POINT_TO_POINT = ("send", "recv")
_BLOCK = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")  # layers.12 of layers.12.attention.wq
_WORKING = ("forward", "backward", "optimizer")

Read = Callable[..., pd.DataFrame]


@dataclass(frozen=True)
class Topology:
    """The groups of a rank and its calls in one step.

    Attributes:
        step: The last step that ended; if none did, 0, which is everything before the first step.
        groups: The run's table ``groups``, indexed by the group's number.
        calls: A row for each group, operation and stream, in order of first call. Columns: group (row of ``groups``),
            operation, num_calls, bytes_in, bytes_out, when (a list of forward, backward, optimizer, "after backward"
            and so on, most calls first), num_layers (repeated blocks of the model that call it), of_layers (number of
            such blocks in total), peers (a list of group ranks of sends and receives), stream (``own``: the group's;
            ``compute``: the forward's; ``host``; else its number), beside (a list of what can run at the same time:
            "compute" and rows of this table).
    """

    step: int
    groups: pd.DataFrame
    calls: pd.DataFrame


def find_topology(read: Read) -> Topology:
    """The topology of a run.

    Args:
        read: Returns a table of the run: ``read(name, columns)``.
    """
    steps, groups = read("steps", ("step",)), read("groups", None)
    step = int(steps["step"].max()) if len(steps) else 0
    calls = read("calls", None).astype({"operation": str, "phase": str})
    calls = calls[calls["step"] == step].reset_index(drop=True)
    names = read("layers", ("name",))["name"].astype(str)
    blocks = names.map(_block)
    calls["block"] = calls["layer"].map(blocks).fillna("")
    calls["when"] = _when(calls, read, step)
    calls["lane"] = _lanes(calls, groups, _compute_stream(read, step))
    table = _rows(calls, blocks)
    table["beside"] = _beside(table, groups["size"].tolist())
    return Topology(step, groups, table)


def _block(name: str) -> str:
    found = _BLOCK.match(name)
    return found[0] if found else ""


def _when(calls: pd.DataFrame, read: Read, step: int) -> list[str]:
    """Each call's phase. For ``other``, the phase that it came after."""
    spans = read("spans", None).astype({"phase": str})
    spans = spans[(spans["step"] == step) & spans["phase"].isin(_WORKING)]
    if not len(spans) or not len(calls):
        return list(calls["phase"])
    op = np.maximum.accumulate(read("events", ("op",))["op"].to_numpy())
    begins = op[spans["first_event"].to_numpy()]
    before = np.searchsorted(begins, calls["op"].to_numpy(), side="right") - 1
    names = ["after " + phase for phase in spans["phase"]] + ["before forward"]
    return [
        phase if phase != "other" else names[place]
        for phase, place in zip(calls["phase"], before.tolist(), strict=True)
    ]


def _compute_stream(read: Read, step: int) -> int:
    """The stream on which forward and backward allocated the most memory; the default stream if they allocated none."""
    blocks = read("blocks", ("bytes", "stream", "phase", "step", "category"))
    working = blocks["phase"].isin(("forward", "backward")) & blocks["category"].isin(("activation", "temporary"))
    sums = blocks[working & (blocks["step"] == step)].groupby("stream")["bytes"].sum()
    return int(sums.index[int(sums.to_numpy().argmax())]) if len(sums) else 0


def _lanes(calls: pd.DataFrame, groups: pd.DataFrame, compute: int) -> list[str]:
    """The value of ``stream`` for each call."""
    numbers: dict[int, str] = {compute: COMPUTE}
    on_host = [set(str(backend).split(",")) <= {"gloo", "mpi", "cpu:gloo"} for backend in groups["backend"]]
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


def _rows(calls: pd.DataFrame, blocks: pd.Series[Any]) -> pd.DataFrame:
    of_layers = blocks[blocks != ""].nunique()
    rows = []
    for _, part in calls.groupby(["group", "operation", "lane"], sort=False):
        group, operation, lane = part[["group", "operation", "lane"]].iloc[0]
        peers = [peer for peer in part["peer"].unique().tolist() if peer >= 0]
        rows.append(
            {
                "group": int(group),
                "operation": operation,
                "num_calls": len(part),
                "bytes_in": int(part["bytes_in"].sum()),
                "bytes_out": int(part["bytes_out"].sum()),
                "when": part["when"].value_counts().index.tolist(),
                "num_layers": int(part.loc[part["block"] != "", "block"].nunique()),
                "of_layers": int(of_layers),
                "peers": sorted(peers),
                "stream": lane,
            }
        )
    names = ["group", "operation", "num_calls", "bytes_in", "bytes_out", "when", "num_layers", "of_layers", "peers"]
    return pd.DataFrame(rows, columns=[*names, "stream"])


def _beside(table: pd.DataFrame, sizes: list[int]) -> list[list[Any]]:
    """For each row, what can run at the same time. A rank's calls with itself overlap nothing."""
    rows = table.to_dict("records")
    found: list[list[Any]] = []
    for row in rows:
        if sizes[row["group"]] == 1:
            found.append([])
            continue
        beside: list[Any] = [] if row["stream"] == COMPUTE else ["compute"]
        beside += [
            place
            for place, other in enumerate(rows)
            if sizes[other["group"]] > 1 and other is not row and _are_apart(row, other)
        ]
        found.append(beside)
    return found


def _are_apart(row: dict[Any, Any], other: dict[Any, Any]) -> bool:
    if row["group"] != other["group"]:
        return bool(row["stream"] == other["stream"] == OWN or row["stream"] != other["stream"])
    # Sends and receives on one group: different peers have different streams.
    return bool(row["peers"] and other["peers"] and set(row["peers"]) != set(other["peers"]))
