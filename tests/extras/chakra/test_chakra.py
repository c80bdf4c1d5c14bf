"""Chakra traces, read back with the protobuf library."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.extras.chakra.chakra import (
    COLLECTIVE,
    COMPUTE,
    INVALID,
    RECEIVE,
    SEND,
    Prerequisites,
    TracedGroup,
    TracedRank,
    dependencies,
    message_classes,
    write_chakra,
    write_groups,
)

NONE = -1
#: what, work, stream, event, call: a product on stream 0, an all_gather on stream 7 after it, a product that waits.
ROWS = [
    ("product", 0, 0, 0, NONE),
    ("stream_records", NONE, 0, 1, NONE),
    ("stream_waits", NONE, 7, 1, NONE),
    ("collective", 1, 7, 0, 40),
    ("stream_records", NONE, 7, 2, NONE),
    ("kernel", 2, 0, 0, NONE),
    ("stream_waits", NONE, 0, 2, NONE),
    ("product", 0, 0, 0, NONE),
    ("host_waits", NONE, 0, 0, NONE),
    ("collective", 3, 9, 0, 41),
    ("collective", 4, 9, 0, 42),
]
LAUNCHES = pd.DataFrame(ROWS, columns=["what", "work", "stream", "event", "call"]).assign(device=0)
WORK = pd.DataFrame(
    [
        ("gemm<a>", 2e12, 3e9),
        ("all_gather_into_tensor", float("nan"), float("nan")),
        ("norm", 0.0, 1e6),
        ("send", 0, 0),
        ("recv", 0, 0),
    ],
    columns=["name", "flops", "moved_bytes"],
)
CALLS = pd.DataFrame(
    [(40, "all_gather_into_tensor", 0, 100, 800, -1), (41, "send", 1, 64, 0, 1), (42, "recv", 1, 0, 64, 0)],
    columns=["sequence", "operation", "group", "bytes_in", "bytes_out", "peer"],
)
GROUPS = [TracedGroup(1, "world", range(8)), TracedGroup(2, "pp", [5, 13]), TracedGroup(0, "elsewhere", ())]


def traced(rank: int = 5) -> TracedRank:
    duration = np.full(len(LAUNCHES), np.nan)
    duration[[0, 3, 5, 7]] = [100.4, 50.6, 3.0, 100.4]
    return TracedRank(rank, LAUNCHES, WORK, CALLS, GROUPS, duration)


def read(path: Path) -> tuple[Any, list[Any]]:
    classes = message_classes()
    data, made = path.read_bytes(), [classes["GlobalMetadata"]()]
    at = 0
    while at < len(data):
        length, shift = 0, 0
        while True:
            length |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 0x80:
                break
        made[-1].ParseFromString(data[at : at + length])
        made.append(classes["Node"]())
        at += length
    assert at == len(data)
    return made[0], made[1:-1]


def attributes(node: Any) -> dict[str, Any]:
    return {each.name: getattr(each, each.WhichOneof("value")) for each in node.attr}


def test_launches_wait_for_their_stream_and_for_events() -> None:
    assert dependencies(LAUNCHES) == {
        0: Prerequisites((), ()),
        3: Prerequisites((0,), ()),
        5: Prerequisites((0,), ()),
        7: Prerequisites((5, 3), ()),
        9: Prerequisites((), (7,)),
        10: Prerequisites((9,), ()),
    }


def test_nodes_types_bytes_and_dependencies_are_the_runs(tmp_path: Path) -> None:
    written = write_chakra(traced(), tmp_path, "job")
    assert written.num_nodes == {"kernels": 3, "collectives": 1, "sends": 1, "receives": 1}
    assert written.collectives == {"all_gather": 1}
    head, nodes = read(tmp_path / "job.5.et")
    assert attributes(head)["rank"] == 5
    assert [node.id for node in nodes] == [0, 1, 2, 3, 4, 5]
    assert [node.type for node in nodes] == [COMPUTE, COLLECTIVE, COMPUTE, COMPUTE, SEND, RECEIVE]
    assert [list(node.data_deps) for node in nodes] == [[], [0], [0], [2, 1], [], []]
    assert [list(node.ctrl_deps) for node in nodes] == [[], [], [], [], [3], [3]]
    assert [node.duration_micros for node in nodes] == [100, 51, 3, 100, 0, 0]
    assert [node.name for node in nodes][:2] == ["gemm<a>", "all_gather_into_tensor"]


def test_attributes_are_what_simulators_read(tmp_path: Path) -> None:
    write_chakra(traced(), tmp_path, "job")
    product, gather, _, _, send, receive = map(attributes, read(tmp_path / "job.5.et")[1])
    assert product == {"is_cpu_op": False, "num_ops": 2_000_000_000_000, "tensor_size": 3_000_000_000}
    assert gather == {"is_cpu_op": False, "comm_type": 2, "pg_name": "1", "comm_size": 100}
    assert send == {"is_cpu_op": False, "comm_src": 5, "comm_dst": 13, "comm_tag": 2, "comm_size": 64}
    assert receive == {"is_cpu_op": False, "comm_src": 5, "comm_dst": 5, "comm_tag": 2, "comm_size": 64}


def test_each_stream_waits_once_for_what_the_host_waited_for() -> None:
    def launched(stream: int) -> tuple[str, int, int, int, int]:
        return ("kernel", 0, stream, 0, NONE)

    def awaited(stream: int) -> tuple[str, int, int, int, int]:
        return ("host_waits", NONE, stream, 0, NONE)

    rows = [launched(0), awaited(0), launched(7), launched(7), awaited(7), launched(9), launched(7)]
    found = dependencies(pd.DataFrame(rows, columns=["what", "work", "stream", "event", "call"]).assign(device=0))
    assert {row: each.control for row, each in found.items()} == {0: (), 2: (0,), 3: (), 5: (0, 3), 6: (3,)}


def test_launches_together_wait_for_the_same_and_are_all_waited_for() -> None:
    rows = [("kernel", 0, 9, 0, NONE)] * 4
    launches = pd.DataFrame(rows, columns=["what", "work", "stream", "event", "call"]).assign(device=0)
    found = dependencies(launches, [[1, 2]])
    assert [found[row].data for row in range(4)] == [(), (0,), (0,), (1, 2)]


@pytest.mark.parametrize(
    ("operation", "group", "peer", "kind"),
    [("frobnicate", 0, -1, INVALID), ("all_reduce", 2, -1, INVALID), ("send", 1, -1, INVALID), ("gather", 0, -1, 7)],
)
def test_a_call_that_is_not_known_does_nothing(
    tmp_path: Path, operation: str, group: int, peer: int, kind: int
) -> None:
    calls = CALLS.assign(operation=[operation, "send", "recv"], group=[group, 1, 1], peer=[peer, 1, 0])
    written = write_chakra(replace(traced(), calls=calls), tmp_path, "job")
    node = read(tmp_path / "job.5.et")[1][1]
    assert (node.type, list(node.data_deps)) == (kind, [0])
    assert written.num_nodes.get("unknown", 0) == int(kind == INVALID)
    assert attributes(node).get("comm_type") == (3 if operation == "gather" else None)


def test_groups_are_numbered_as_the_nodes_number_them(tmp_path: Path) -> None:
    path = write_groups({1: range(3), 2: [5, 13]}, tmp_path, "job")
    assert json.loads(path.read_text()) == {"1": [0, 1, 2], "2": [5, 13]}
