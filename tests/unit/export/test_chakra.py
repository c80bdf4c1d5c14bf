"""Chakra traces, read back with the protobuf library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.export.chakra import Dependencies, TracedRank, dependencies, write_chakra, write_groups
from fakedist.export.chakra_messages import COLLECTIVE, COMPUTE, RECEIVE, SEND, message_classes, read_messages

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
GROUPS = pd.DataFrame([("0",), ("pp",)], columns=["name"])


def traced(rank: int = 5) -> TracedRank:
    duration = np.full(len(LAUNCHES), np.nan)
    duration[[0, 3, 5, 7]] = [100.4, 50.6, 3.0, 100.4]
    return TracedRank(rank, LAUNCHES, WORK, CALLS, GROUPS, duration, [range(8), [5, 13]])


def read(path: Path) -> tuple[Any, list[Any]]:
    """The head and the nodes of a trace."""
    classes = message_classes()
    head, *rest = read_messages(path.read_bytes())
    made = [classes["GlobalMetadata"](), *(classes["Node"]() for _ in rest)]
    for message, data in zip(made, [head, *rest], strict=True):
        message.ParseFromString(data)
    return made[0], made[1:]


def attributes(node: Any) -> dict[str, Any]:
    return {each.name: getattr(each, each.WhichOneof("value")) for each in node.attr}


def test_launches_wait_for_their_stream_and_for_events() -> None:
    assert dependencies(LAUNCHES) == {
        0: Dependencies((), ()),
        3: Dependencies((0,), ()),
        5: Dependencies((0,), ()),
        7: Dependencies((5, 3), ()),
        9: Dependencies((), (7,)),
        10: Dependencies((9,), ()),
    }


def test_nodes_types_bytes_and_dependencies_are_the_runs(tmp_path: Path) -> None:
    assert write_chakra(traced(), tmp_path, "job") == 6
    head, nodes = read(tmp_path / "job.5.et")
    assert attributes(head)["rank"] == 5
    assert [node.id for node in nodes] == [0, 1, 2, 3, 4, 5]
    assert [node.type for node in nodes] == [COMPUTE, COLLECTIVE, COMPUTE, COMPUTE, SEND, RECEIVE]
    assert [list(node.data_deps) for node in nodes] == [[], [0], [0], [2, 1], [], [4]]
    assert [list(node.ctrl_deps) for node in nodes] == [[], [], [], [], [3], []]
    assert [node.duration_micros for node in nodes] == [100, 51, 3, 100, 0, 0]
    assert [node.name for node in nodes][:2] == ["gemm<a>", "all_gather_into_tensor"]


def test_attributes_are_what_simulators_read(tmp_path: Path) -> None:
    write_chakra(traced(), tmp_path, "job")
    product, gather, _, _, send, receive = map(attributes, read(tmp_path / "job.5.et")[1])
    assert product == {"is_cpu_op": False, "num_ops": 2_000_000_000_000, "tensor_size": 3_000_000_000}
    assert gather == {"is_cpu_op": False, "comm_type": 2, "pg_name": "0", "comm_size": 800}
    assert send == {"is_cpu_op": False, "comm_src": 5, "comm_dst": 13, "comm_tag": 1, "comm_size": 64}
    assert receive == {"is_cpu_op": False, "comm_src": 5, "comm_dst": 5, "comm_tag": 1, "comm_size": 64}


def test_groups_are_named_as_the_nodes_name_them(tmp_path: Path) -> None:
    path = write_groups({"0": range(3), "pp": [5, 13]}, tmp_path, "job")
    assert json.loads(path.read_text()) == {"0": [0, 1, 2], "pp": [5, 13]}


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_trace_that_was_cut_is_told(tmp_path: Path, cut: int) -> None:
    write_chakra(traced(), tmp_path, "job")
    data = (tmp_path / "job.5.et").read_bytes()
    with pytest.raises(ValueError, match="ends within a message"):
        list(read_messages(data[:-cut]))
