"""The connections that calls make, and the effect of the environment."""

import pytest

from fakedist.cost_model.nccl.communicators import Usage, communicator_memory
from fakedist.cost_model.nccl.settings import (
    AMPERE,
    BLACKWELL,
    HOPPER,
    PCIE,
    GroupShape,
    Interconnect,
    Nccl,
    Settings,
    Span,
    channels_per_peer,
    coll_channels,
    find_interconnect,
    read_settings,
)

MIB = 1 << 20
NODE, NODES, RAIL = GroupShape(8, 1, 8), GroupShape(1024, 128, 8), GroupShape(128, 128, 1)
DEFAULT = Settings()


def memory(usage: Usage, shape: GroupShape = NODE, interconnect: Interconnect = HOPPER) -> dict[str, Span]:
    found = communicator_memory(shape, usage, interconnect, DEFAULT)
    assert found is not None
    return found.parts


def parts(
    shape: GroupShape, *operations: str, interconnect: Interconnect = HOPPER, **environment: str
) -> dict[str, Span]:
    settings = read_settings(Nccl({f"NCCL_{name}": value for name, value in environment.items()}))
    found = communicator_memory(shape, Usage(frozenset(operations)), interconnect, settings)
    assert found is not None
    return found.parts


def test_a_group_has_a_communicator_once_it_calls_or_is_bound() -> None:
    assert communicator_memory(NODE, Usage(), HOPPER, DEFAULT) is None
    assert list(memory(Usage(is_bound=True))) == ["channels"]
    assert coll_channels(GroupShape(1, 1, 1), HOPPER, DEFAULT) == Span(64, 64)


@pytest.mark.parametrize(
    ("operation", "shape", "interconnect", "environment", "names"),
    [
        ("broadcast", NODE, HOPPER, {}, ["rings"]),
        ("all_reduce", NODE, HOPPER, {}, ["rings", "trees", "NVLink SHARP"]),
        ("all_reduce", NODE, AMPERE, {}, ["rings", "trees"]),
        ("all_reduce", NODE, PCIE, {}, ["rings", "trees"]),
        # Two ranks have no NVLink SHARP, and their tree is their ring.
        ("all_reduce", GroupShape(2, 1, 2), HOPPER, {}, ["rings"]),
        ("all_reduce", GroupShape(1, 1, 1), HOPPER, {}, []),
        # Half of an all_reduce has no tree, and NVLink SHARP in one node alone.
        ("all_gather_into_tensor", NODE, HOPPER, {}, ["rings", "NVLink SHARP"]),
        ("reduce_scatter_tensor", NODES, HOPPER, {}, ["rings"]),
        ("all_gather", RAIL, HOPPER, {}, ["rings", "PAT"]),
        ("all_reduce", NODE, HOPPER, {"NVLS_ENABLE": "0"}, ["rings", "trees"]),
        ("broadcast", NODE, HOPPER, {"P2P_DISABLE": "1"}, []),
    ],
)
def test_an_operation_connects_what_it_may_use(
    operation: str, shape: GroupShape, interconnect: Interconnect, environment: dict[str, str], names: list[str]
) -> None:
    assert list(parts(shape, operation, interconnect=interconnect, **environment)) == ["channels", *names]


def test_a_communicator_has_what_its_operations_need_at_least() -> None:
    found = parts(NODE, "all_reduce")
    assert sum(found[name].low for name in ("rings", "trees", "NVLink SHARP")) == 256 * MIB
    assert found["NVLink SHARP"].high == 16 * 2 * MIB * 8
    assert parts(NODE, "broadcast")["rings"] == Span(24 * 12 * MIB, 24 * 12 * MIB)
    found = parts(NODE, "broadcast", RUNTIME_CONNECT="0")
    assert {"rings", "trees", "NVLink SHARP", "network pool"} < set(found)
    # Over nodes also the pools of the node's other ranks.
    assert parts(GroupShape(64, 8, 8), "broadcast", RUNTIME_CONNECT="0")["network pool"].high == 8 * 32 * MIB
    found = parts(RAIL, "broadcast")["rings"]
    assert found.low == 0
    assert found.high == 8 * 2 * 10 * MIB
    # Trees share the rings' connections, of 6 to 12 channels and 4 over nodes. In addition, they have none to 16 within
    # the node, and 4 over nodes in both directions.
    high = 12 * 12 + 4 * 20 + 16 * 12 + 4 * 2 * 10
    assert parts(NODES, "all_reduce", ALGO="tree")["trees"] == Span(6 * 12 * MIB, high * MIB)
    small, large = (parts(GroupShape(8 * nodes, nodes, 8), "broadcast")["channels"].high for nodes in (2, 8192))
    assert large - small > 16 * (65536 * (608 + 8 + 4) - 6 * MIB)


def test_sends_need_the_channels_and_pools_of_their_pairs() -> None:
    operations, shape = frozenset({"send", "recv"}), GroupShape(4, 4, 1)
    usage = Usage(operations, send_remote=1, recv_remote=1)
    assert list(memory(usage, shape)) == ["channels", "network pool", "pairs"]
    assert list(memory(Usage(operations, 0, 0, 1, 1, True), shape)) == ["channels", "network pool"]
    found = memory(Usage(frozenset({"send"}), send_local=1))
    assert found["channels"] == Span((32 * 6 + 4) * MIB, (32 * 6 + 4 + 24 * 2 + 2) * MIB)
    # Ampere splits the buffers of a connection between both sides.
    split = memory(Usage(frozenset({"send"}), send_local=1, is_bound=True), interconnect=AMPERE)
    assert split["send and receive"] == Span(8 * 6 * MIB, 32 * 6 * MIB)


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


def test_all_to_all_has_a_connection_to_each_rank_of_the_node_in_each_channel() -> None:
    found = parts(NODE, "all_to_all_single")
    assert list(found) == ["channels", "send and receive"]
    assert found["send and receive"].high == 7 * 32 * 12 * MIB
    for variable in ("MAX_P2P_NCHANNELS", "MAX_NCHANNELS"):
        assert parts(NODE, "all_to_all", **{variable: "4"})["send and receive"].high == 7 * 4 * 12 * MIB
    assert channels_per_peer(GroupShape(64, 8, 8), HOPPER, DEFAULT) == Span(1, 2)
    found = parts(GroupShape(64, 8, 8), "all_to_all")
    assert found["send and receive"] == Span(7 * 12 * MIB, 7 * 2 * 12 * MIB)
    assert found["network pool"] == Span(0, 9 * 32 * MIB)  # one for receives, and with PXN the sends of the node


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
