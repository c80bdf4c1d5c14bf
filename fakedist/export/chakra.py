"""Writes a rank's timed step as an MLCommons Chakra execution trace, which ASTRA-sim and other simulators read.

A node is a launch: a kernel, a copy, a fill, a collective, a send or a receive. Its data dependencies are the launch
before it on its stream, and the launches that an event made its stream wait for. What the host waits for is a control
dependency of the next launch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.export.chakra_messages import (
    COLLECTIVE,
    COLLECTIVE_TYPES,
    COMPUTE,
    RECEIVE,
    SEND,
    Message,
    message_classes,
    write_message,
)
from fakedist.time.communication import collective_of

VERSION = "0.0.4"


@dataclass(frozen=True)
class TracedRank:
    """What a trace is written from.

    Attributes:
        rank: The rank.
        launches: The table ``launches``.
        work: The table ``work``.
        calls: The table ``calls``.
        groups: The table ``groups``.
        duration_us: How long each launch takes, by row; NaN if that is not known.
        ranks: The ranks of each group, by its row.
    """

    rank: int
    launches: pd.DataFrame
    work: pd.DataFrame
    calls: pd.DataFrame
    groups: pd.DataFrame
    duration_us: npt.NDArray[np.float64]
    ranks: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Dependencies:
    """What a launch waits for: rows of the table ``launches``.

    Attributes:
        data: On the GPU: the launch before it on its stream, and those that its stream waited for.
        control: On the host: what it waited for since the launch before.
    """

    data: tuple[int, ...]
    control: tuple[int, ...]


def write_chakra(traced: TracedRank, directory: Path, name: str) -> int:
    """Write ``NAME.RANK.et`` and return its number of nodes.

    Raises:
        SetupError: The protobuf library is not installed.
    """
    path = directory / f"{name}.{traced.rank}.et"
    classes = message_classes()
    with path.open("wb") as file:
        head = classes["GlobalMetadata"](version=VERSION)
        _attribute(head, "schema", "string", f"fakedist {VERSION}")
        _attribute(head, "rank", "int64", traced.rank)
        write_message(file, head)
        return _write_nodes(file, traced, classes["Node"])


def write_groups(groups: Mapping[str, Sequence[int]], directory: Path, name: str) -> Path:
    """Write the ranks of each group by the name that nodes have as ``pg_name``: ASTRA-sim's group configuration."""
    path = directory / f"{name}.groups.json"
    path.write_text(json.dumps({group: list(ranks) for group, ranks in groups.items()}, indent=1) + "\n")
    return path


def dependencies(launches: pd.DataFrame) -> dict[int, Dependencies]:
    """What each launch waits for, by its row. Rows without work are no launches."""
    last: dict[tuple[int, int], tuple[int, ...]] = {}
    recorded: dict[int, tuple[int, ...]] = {}
    control: tuple[int, ...] = ()
    found = {}
    columns = [launches[name].tolist() for name in ("what", "device", "stream", "event", "work")]
    for row, (what, device, stream, event, work) in enumerate(zip(*columns, strict=True)):
        at = (device, stream)
        if work >= 0:
            found[row] = Dependencies(last.get(at, ()), control)
            last[at], control = (row,), ()
            if what == "host_reads":
                control = (row,)
        elif what == "stream_records":
            recorded[event] = last.get(at, ())
        elif what == "stream_waits":
            last[at] = _joined(last.get(at, ()), recorded.get(event, ()))
        elif what == "host_waits_for_device":
            control = _joined(control, *last.values())
        else:
            control = _joined(control, recorded.get(event, ()) if event else last.get(at, ()))
    return found


def _joined(*parts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(row for part in parts for row in part))


class _Call(NamedTuple):
    """A row of the table ``calls``."""

    operation: str
    group: int
    bytes_in: int
    bytes_out: int
    peer: int


def _calls(table: pd.DataFrame) -> dict[int, _Call]:
    """The calls by sequence number."""
    columns = [table[name].tolist() for name in _Call._fields]
    return dict(zip(table["sequence"].tolist(), map(_Call, *columns), strict=True))


def _write_nodes(file: IO[bytes], traced: TracedRank, node_class: type) -> int:
    calls = _calls(traced.calls)
    waits = dependencies(traced.launches)
    numbers = {row: number for number, row in enumerate(waits)}
    work_of, call_of = traced.launches["work"].tolist(), traced.launches["call"].tolist()
    columns = [traced.work[name].tolist() for name in ("name", "flops", "moved_bytes")]
    work = list(zip(*columns, strict=True))
    for row, number in numbers.items():
        wait = waits[row]
        name, flops, moved_bytes = work[work_of[row]]
        node = node_class(
            id=number,
            name=name,
            type=COMPUTE,
            data_deps=[numbers[each] for each in wait.data],
            ctrl_deps=[numbers[each] for each in wait.control],
            duration_micros=round(float(np.nan_to_num(traced.duration_us[row]))),
        )
        _attribute(node, "is_cpu_op", "bool", value=False)
        if call_of[row] >= 0:
            _call(node, calls[call_of[row]], traced)
        else:
            _attribute(node, "num_ops", "int64", _whole(flops))
            _attribute(node, "tensor_size", "uint64", _whole(moved_bytes))
        write_message(file, node)
    return len(numbers)


def _call(node: Message, call: _Call, traced: TracedRank) -> None:
    """Make a node a collective, a send or a receive."""
    kind, num_bytes = collective_of(call.operation, call.bytes_in, call.bytes_out)
    if kind == "send":
        ranks = traced.ranks[call.group]
        other = ranks[call.peer] if 0 <= call.peer < len(ranks) else -1
        is_send = call.operation.startswith("send")
        node.type = SEND if is_send else RECEIVE
        _attribute(node, "comm_src", "int32", traced.rank if is_send else other)
        _attribute(node, "comm_dst", "int32", other if is_send else traced.rank)
        _attribute(node, "comm_tag", "int32", call.group)
    else:
        node.type = COLLECTIVE
        _attribute(node, "comm_type", "int64", COLLECTIVE_TYPES.get(kind, 0))
        _attribute(node, "pg_name", "string", str(traced.groups["name"].iloc[call.group]))
    _attribute(node, "comm_size", "int64", num_bytes)


def _attribute(message: Message, name: str, kind: str, value: object) -> None:
    message.attr.add(name=name, **{f"{kind}_val": value})


def _whole(number: float) -> int:
    return round(number) if number == number else 0
