"""The connections that calls make, and the effect of the environment."""

from __future__ import annotations

import pytest

from fakedist.cost_model.nccl.communicators import Usage, communicator_memory
from fakedist.cost_model.nccl.interconnect import (
    AMPERE,
    BLACKWELL,
    HOPPER,
    PCIE,
    GroupShape,
    Interconnect,
    Span,
    channels_per_peer,
    coll_channels,
    find_interconnect,
)
from fakedist.cost_model.nccl.settings import Settings, read_settings

MIB = 1 << 20
NODE, NODES, RAIL = GroupShape(8, 1, 8), GroupShape(1024, 128, 8), GroupShape(128, 128, 1)
DEFAULT = Settings()


def parts(
    shape: GroupShape, *operations: str, interconnect: Interconnect = HOPPER, **environment: str
) -> dict[str, Span]:
    settings = read_settings({f"NCCL_{name}": value for name, value in environment.items()})
    found = communicator_memory(shape, Usage(frozenset(operations)), interconnect, settings)
    assert found is not None
    return found.parts


def test_a_group_without_a_call_has_no_communicator() -> None:
    assert communicator_memory(NODE, Usage(), HOPPER, DEFAULT) is None


def test_a_group_bound_to_its_device_has_its_channels_and_no_connection() -> None:
    found = communicator_memory(NODE, Usage(is_bound=True), HOPPER, DEFAULT)
    assert found is not None
    assert list(found.parts) == ["channels"]


def test_broadcast_needs_rings_and_nothing_else() -> None:
    found = parts(NODE, "broadcast")
    assert list(found) == ["channels", "rings"]
    assert found["rings"] == Span(24 * 12 * MIB, 24 * 12 * MIB)


def test_all_reduce_may_use_rings_trees_and_nvlink_sharp_and_uses_one_at_least() -> None:
    found = parts(NODE, "all_reduce")
    assert list(found) == ["channels", "rings", "trees", "NVLink SHARP"]
    assert sum(found[name].low for name in ("rings", "trees", "NVLink SHARP")) == 256 * MIB
    assert found["NVLink SHARP"].high == 16 * 2 * MIB * 8


def test_half_of_an_all_reduce_has_no_tree_and_nvlink_sharp_in_one_node_alone() -> None:
    assert list(parts(NODE, "all_gather_into_tensor")) == ["channels", "rings", "NVLink SHARP"]
    assert list(parts(NODES, "reduce_scatter_tensor")) == ["channels", "rings"]
    assert list(parts(RAIL, "all_gather")) == ["channels", "rings", "PAT"]


@pytest.mark.parametrize("interconnect", [AMPERE, PCIE])
def test_older_gpus_have_no_nvlink_sharp(interconnect: Interconnect) -> None:
    assert "NVLink SHARP" not in parts(NODE, "all_reduce", interconnect=interconnect)


def test_two_ranks_have_no_nvlink_sharp_and_their_tree_is_their_ring() -> None:
    assert list(parts(GroupShape(2, 1, 2), "all_reduce")) == ["channels", "rings"]


def test_all_to_all_has_a_connection_to_each_rank_of_the_node_in_each_channel() -> None:
    found = parts(NODE, "all_to_all_single")
    assert list(found) == ["channels", "send and receive"]
    assert found["send and receive"].high == 7 * 32 * 12 * MIB


def test_all_to_all_over_nodes_shares_pools_and_has_few_channels_a_peer() -> None:
    assert channels_per_peer(GroupShape(64, 8, 8), HOPPER, DEFAULT) == Span(1, 2)
    found = parts(GroupShape(64, 8, 8), "all_to_all")
    assert found["send and receive"] == Span(7 * 12 * MIB, 7 * 2 * 12 * MIB)
    assert found["network pool"] == Span(0, 9 * 32 * MIB)  # one for receives, and with PXN the sends of the node


def test_a_pipeline_has_pools_for_other_nodes_and_perhaps_a_communicator_a_pair() -> None:
    usage = Usage(frozenset({"send", "recv"}), send_remote=1, recv_remote=1)
    found = communicator_memory(GroupShape(4, 4, 1), usage, HOPPER, DEFAULT)
    assert found is not None
    assert list(found.parts) == ["channels", "network pool", "pairs"]
    bound = communicator_memory(GroupShape(4, 4, 1), Usage(usage.operations, 0, 0, 1, 1, True), HOPPER, DEFAULT)
    assert bound is not None
    assert list(bound.parts) == ["channels", "network pool"]


def test_sends_that_are_not_batched_need_no_more_than_the_channels_of_a_pair() -> None:
    usage = Usage(frozenset({"send"}), send_local=1)
    found = communicator_memory(NODE, usage, HOPPER, DEFAULT)
    assert found is not None
    assert found.parts["channels"] == Span((32 * 6 + 4) * MIB, (32 * 6 + 4 + 24 * 2 + 2) * MIB)


def test_without_gpudirect_a_ring_over_one_rank_a_node_takes_nothing_of_the_gpu() -> None:
    found = parts(RAIL, "broadcast")["rings"]
    assert found.low == 0
    assert found.high == 8 * 2 * 10 * MIB


@pytest.mark.parametrize(
    ("shape", "low", "high"),
    [
        # 8 channels or 16, 12 MiB each; two for each of a node's ranks, rounded up, go over the network: 0 or 20 MiB.
        (GroupShape(1024, 128, 8), (8 - 2) * 12, (16 - 4) * 12 + 4 * 20),
        (GroupShape(12, 4, 3), (8 - 6) * 12, (16 - 12) * 12 + 12 * 20),
    ],
)
def test_a_ring_over_nodes_leaves_a_rank_in_its_share_of_channels(shape: GroupShape, low: int, high: int) -> None:
    assert parts(shape, "broadcast")["rings"] == Span(low * MIB, high * MIB)


def test_small_arrays_grow_with_the_world() -> None:
    small, large = (parts(GroupShape(8 * nodes, nodes, 8), "broadcast")["channels"].high for nodes in (2, 8192))
    assert large - small > 16 * (65536 * (608 + 8 + 4) - 6 * MIB)


@pytest.mark.parametrize(
    ("name", "value", "part", "high"),
    [
        ("BUFFSIZE", "1048576", "rings", 24 * (2 + 8) * MIB),  # 0.5 + 4.69 + 1 MiB are 8 in steps of 2
        ("LL128_BUFFSIZE", "0", "rings", 24 * (2 + 6) * MIB),
        ("MAX_NCHANNELS", "4", "rings", 4 * 12 * MIB),
        ("MAX_CTAS", "4", "rings", 4 * 12 * MIB),
        ("MIN_NCHANNELS", "32", "rings", 32 * 12 * MIB),
        ("NVLS_CHUNKSIZE", "65536", "NVLink SHARP", 128 * MIB),
        ("PROTO", "Simple", "rings", 24 * 12 * MIB),
    ],
)
def test_the_environment_counts(name: str, value: str, part: str, high: int) -> None:
    assert parts(NODE, "all_reduce", **{name: value})[part].high == high


def test_channels_for_send_and_receive_have_a_limit_of_their_own() -> None:
    assert parts(NODE, "all_to_all", MAX_P2P_NCHANNELS="4")["send and receive"].high == 7 * 4 * 12 * MIB
    assert parts(NODE, "all_to_all", MAX_NCHANNELS="4")["send and receive"].high == 7 * 4 * 12 * MIB


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("Ring", {"rings"}),
        ("^Tree", {"rings", "NVLink SHARP"}),
        ("tree,ring", {"rings", "trees"}),
        ("NVLS", {"NVLink SHARP"}),
        ("allreduce:ring", {"rings"}),
        ("allgather:ring", {"rings", "trees", "NVLink SHARP"}),
        ("ring;allreduce:^ring,nvls", {"trees"}),
    ],
)
def test_algorithms_that_are_excluded_connect_nothing(value: str, left: set[str]) -> None:
    assert set(parts(NODE, "all_reduce", ALGO=value)) - {"channels"} == left


def test_nvlink_sharp_and_direct_access_can_be_switched_off() -> None:
    assert "NVLink SHARP" not in parts(NODE, "all_reduce", NVLS_ENABLE="0")
    assert list(parts(NODE, "broadcast", P2P_DISABLE="1")) == ["channels"]


def test_without_runtime_connect_everything_is_connected_at_once() -> None:
    assert {"rings", "trees", "NVLink SHARP", "network pool"} < set(parts(NODE, "broadcast", RUNTIME_CONNECT="0"))


def test_over_nodes_everything_has_the_pools_of_the_nodes_other_ranks_too() -> None:
    assert parts(GroupShape(64, 8, 8), "broadcast", RUNTIME_CONNECT="0")["network pool"].high == 8 * 32 * MIB


def test_ampere_splits_the_buffers_of_a_connection_between_both_sides() -> None:
    usage = Usage(frozenset({"send"}), send_local=1, is_bound=True)
    found = communicator_memory(NODE, usage, AMPERE, DEFAULT)
    assert found is not None
    assert found.parts["send and receive"] == Span(8 * 6 * MIB, 32 * 6 * MIB)


@pytest.mark.parametrize(
    ("name", "interconnect"),
    [
        ("NVIDIA A100-SXM4-80GB", AMPERE),
        ("NVIDIA H100 80GB HBM3", HOPPER),
        ("NVIDIA H200", HOPPER),
        ("NVIDIA B200", BLACKWELL),
        ("NVIDIA L40S", PCIE),
        ("NVIDIA GeForce RTX 4090", PCIE),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H800", None),
        ("NVIDIA GB200", None),
        ("Tesla T4", None),
        ("", None),
    ],
)
def test_gpus_are_told_apart_by_what_joins_them(name: str, interconnect: Interconnect | None) -> None:
    assert find_interconnect(name) is interconnect


def test_a_group_of_one_rank_has_all_channels() -> None:
    assert coll_channels(GroupShape(1, 1, 1), HOPPER, DEFAULT) == Span(64, 64)
    assert list(parts(GroupShape(1, 1, 1), "all_reduce")) == ["channels"]
