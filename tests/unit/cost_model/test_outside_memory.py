"""The estimate of a run: groups and calls in, bytes and what is left out of them."""

from typing import Any

import pandas as pd
import pytest

from fakedist.analysis.topology import ranks_of
from fakedist.cost_model.outside_memory import estimate_outside
from fakedist.rundir.plain import to_plain
from fakedist.rundir.records import TakenRecord

MIB, GIB = 1 << 20, 1 << 30


def tables(*calls: tuple[Any, ...]) -> dict[str, pd.DataFrame]:
    """Four groups of a world of 16, three of them NCCL's. Calls are group, operation, peer, bytes in and out."""
    groups = [
        ("0", "default_pg", "cpu:gloo,cuda:nccl", 16, 3, "0-15"),
        ("1", "tp", "nccl", 2, 1, "2,3"),
        ("2", "pp", "nccl", 2, 0, "3,11"),
        ("3", "", "gloo", 16, 3, "0-15"),
    ]
    return {
        "groups": pd.DataFrame(groups, columns=["name", "description", "backend", "size", "group_rank", "ranks"]),
        "calls": pd.DataFrame(
            [(*call[:3], MIB, MIB) if len(call) == 3 else call for call in calls],
            columns=["group", "operation", "peer", "bytes_in", "bytes_out"],
        ),
    }


def estimate(*calls: tuple[Any, ...], gpu: str = "NVIDIA H100 80GB HBM3", **seen: Any) -> dict[str, Any]:
    """The estimate as ``--json`` prints it."""
    found: dict[str, Any] = to_plain(estimate_outside(tables(*calls), gpu_name=gpu, gpus_per_node=8, **seen))
    return found


def test_groups_that_were_called_through_nccl_count() -> None:
    found = estimate((1, "all_reduce", -1), (3, "all_reduce", -1), (3, "barrier", -1))
    assert [(each["group"], each["num_nodes"], each["local_size"]) for each in found["communicators"]] == [("tp", 1, 2)]
    assert found["num_unused_groups"] == 2
    assert found["low_bytes"] == found["high_bytes"] == found["communicators"][0]["high_bytes"]
    assert found["high_bytes"] == (32 * 6 + 4 + 24 * 12) * MIB


def test_the_algorithms_that_nccl_chooses_for_the_calls_sizes_count() -> None:
    def parts(operation: str, num_bytes: int, **seen: Any) -> dict[str, list[int]]:
        wide = tables((3, operation, -1, num_bytes, num_bytes))
        ranks = seen.pop("ranks", 8)
        wide["groups"].loc[3, ["backend", "ranks", "size"]] = ["nccl", f"0-{ranks - 1}", ranks]
        found = to_plain(estimate_outside(wide, gpu_name="NVIDIA H100 80GB HBM3", gpus_per_node=8, **seen))
        each: dict[str, list[int]] = found["communicators"][0]["parts"]
        return {name: span for name, span in each.items() if name != "channels"}

    # NVLink SHARP serves a large all_reduce for sure; rings a large all_gather; one of two a small all_reduce.
    assert parts("all_reduce", 256 * MIB) == {"NVLink SHARP": [256 * MIB, 256 * MIB]}
    assert parts("all_gather_into_tensor", 256 * MIB) == {"rings": [288 * MIB, 288 * MIB]}
    assert parts("all_reduce", 1024) == {"rings": [288 * MIB, 288 * MIB], "trees": [0, 288 * MIB]}
    assert set(parts("all_reduce", 32 * MIB, ranks=16)) == {"NVLink SHARP"}  # over nodes, with a NIC for each GPU
    assert set(parts("all_reduce", 256 * MIB, nccl_environment={"NCCL_NVLS_ENABLE": "0"})) == {"rings"}


def test_where_the_ranks_are_follows_from_the_gpus_of_a_node() -> None:
    found = estimate((0, "broadcast", -1), (2, "recv", 1))
    assert [(each["group"], each["num_nodes"], each["local_size"]) for each in found["communicators"]] == [
        ("default_pg", 2, 8),
        ("pp", 2, 1),
    ]
    assert "network pool" in found["communicators"][1]["parts"]


@pytest.mark.parametrize("operation", ["send", "recv"])
def test_a_peer_of_the_same_node_is_reached_without_the_network(operation: str) -> None:
    (within,) = estimate((1, operation, 0))["communicators"]  # rank 2 for rank 3
    assert "send and receive" in within["parts"]
    assert "network pool" not in within["parts"]
    (beyond,) = estimate((2, operation, 1))["communicators"]  # rank 11 for rank 3
    assert "send and receive" not in beyond["parts"]
    assert "network pool" in beyond["parts"]


def test_objects_and_barriers_of_a_group_with_gloo_go_over_the_host() -> None:
    host = [(0, "barrier", -1), (0, "broadcast_object_list", -1), (0, "all_gather_object", -1)]
    assert estimate(*host)["communicators"] == []
    assert len(estimate(*host, (0, "all_reduce", -1))["communicators"]) == 1
    assert len(estimate((1, "barrier", -1))["communicators"]) == 1


def test_a_bound_group_and_the_scripts_environment_count() -> None:
    assert [each["group"] for each in estimate(bound={1, 3})["communicators"]] == ["tp"]
    found = estimate((1, "all_reduce", -1), nccl_environment={"NCCL_MAX_NCHANNELS": "2"})
    assert found["communicators"][0]["channels"] == [2, 2]
    assert found["nccl_environment"] == {"NCCL_MAX_NCHANNELS": "2"}


def test_what_is_known_counts_with_its_source_and_what_is_not_is_left_out() -> None:
    found = estimate((1, "all_reduce", -1), gpu="NVIDIA GB200")
    assert (found["low_bytes"], found["high_bytes"], found["communicators"]) == (0, 0, [])
    assert [text.partition(":")[0] for text in found["left_out"]] == ["CUDA context", "NCCL", "libraries"]
    found = estimate(gpu="NVIDIA GeForce RTX 3060")
    assert (found["context_bytes"], found["low_bytes"], found["high_bytes"]) == (114 * MIB, 114 * MIB, 114 * MIB)
    assert found["context_source"] == "sgl-project/sglang#35538"
    assert estimate(measured_bytes=GIB)["measured_bytes"] == GIB
    assert estimate(measured_bytes=GIB)["high_bytes"] == 0


@pytest.mark.parametrize(("beyond", "word"), [(0, "fits"), (1, "may not fit")])
def test_reserved_and_the_estimate_fill_the_gpu_together(beyond: int, word: str) -> None:
    peers = [(2, "send", 1), (2, "recv", 1)]
    least, most = (estimate(*peers)[name] for name in ("low_bytes", "high_bytes"))
    assert 0 < least < most, "the estimate is an interval"
    assert estimate(*peers, reserved_bytes=GIB + beyond, capacity_bytes=GIB + most)["beside_reserved"] == word
    assert estimate(*peers, reserved_bytes=GIB, capacity_bytes=GIB + least)["beside_reserved"] == "may not fit"
    assert estimate(*peers, reserved_bytes=GIB + 1, capacity_bytes=GIB + least)["beside_reserved"] == "does not fit"
    assert estimate(*peers, reserved_bytes=GIB)["beside_reserved"] == "fits"  # without a capacity everything does


@pytest.mark.parametrize(
    ("text", "ranks"), [("3", (3,)), ("0,3,5", (0, 3, 5)), ("0-6:2", (0, 2, 4, 6)), ("4-7", (4, 5, 6, 7))]
)
def test_ranks_are_read_as_they_were_written(text: str, ranks: tuple[int, ...]) -> None:
    assert ranks_of(text) == ranks


def test_what_was_taken_counts_with_its_owners() -> None:
    taken = TakenRecord(0, peak_bytes=3 * GIB, by_owner={"user buffers": 2 * GIB, "extensions": 2 * GIB})
    found = estimate(taken=taken, reserved_bytes=GIB, capacity_bytes=4 * GIB)
    assert (found["low_bytes"], found["high_bytes"], found["taken_bytes"]) == (3 * GIB,) * 3
    assert found["taken"] == {"user buffers": 2 * GIB, "extensions": 2 * GIB}
    assert found["beside_reserved"] == "fits"
    assert estimate(taken=taken, reserved_bytes=GIB + 1, capacity_bytes=4 * GIB)["beside_reserved"] == "does not fit"
