"""NCCL's choice of algorithm and protocol, from the formulas of its tuner."""

import csv
from pathlib import Path

import pytest

from fakedist.cost_model.nccl.settings import (
    AMPERE,
    BLACKWELL,
    DOUBT,
    HOPPER,
    PCIE,
    GroupShape,
    Interconnect,
    Nccl,
    Network,
    Tuner,
    collective_of,
    read_settings,
)

MIB = 1 << 20
NODE, PAIR, NODES, RAIL = GroupShape(8, 1, 8), GroupShape(2, 1, 2), GroupShape(1024, 128, 8), GroupShape(128, 128, 1)


def tuner(interconnect: Interconnect = HOPPER, *, counts_channels: bool = False, **variables: str) -> Tuner:
    settings = read_settings(Nccl({f"NCCL_{name}": value for name, value in variables.items()}))
    return Tuner(interconnect, Network(), settings, counts_channels=counts_channels)


@pytest.mark.parametrize(
    ("interconnect", "kind", "num_bytes", "shape", "algorithm", "protocol"),
    [
        # NVLink SHARP serves large all_reduce of eight Hopper, as 480 GB/s in nccl-tests' logs show; rings the rest.
        (HOPPER, "all_reduce", 64 * MIB, NODE, "nvls", "simple"),
        (HOPPER, "all_reduce", 1024, NODE, "ring", "ll"),
        (HOPPER, "all_gather", 64 * MIB, NODE, "ring", "simple"),
        (HOPPER, "all_reduce", 64 * MIB, PAIR, "ring", "simple"),
        (AMPERE, "all_reduce", 64 * MIB, NODE, "ring", "simple"),
        (BLACKWELL, "all_reduce", 64 * MIB, NODE, "nvls", "simple"),
        (PCIE, "all_reduce", 64 * MIB, NODE, "ring", "simple"),
        (HOPPER, "broadcast", 64 * MIB, NODES, "ring", "simple"),
        (HOPPER, "barrier", 4, NODES, "tree", "ll"),
        (HOPPER, "all_reduce", MIB, NODES, "tree", "ll128"),
        (HOPPER, "all_reduce", 256 * MIB, NODES, "nvlstree", "simple"),
        (AMPERE, "all_reduce", 65536 * MIB, NODES, "ring", "simple"),
        (HOPPER, "all_gather", 65536 * MIB, NODES, "ring", "simple"),
        (HOPPER, "reduce_scatter", MIB, RAIL, "pat", "simple"),
        (HOPPER, "all_to_all", MIB, NODE, "pairs", "simple"),
        (HOPPER, "send", MIB, PAIR, "send", "simple"),
    ],
)
def test_what_runs(
    interconnect: Interconnect, kind: str, num_bytes: int, shape: GroupShape, algorithm: str, protocol: str
) -> None:
    assert tuner(interconnect).choose(kind, num_bytes, shape)[:2] == (algorithm, protocol)


@pytest.mark.parametrize(
    ("variables", "algorithms", "protocols"),
    [
        ({"ALGO": "Tree"}, {"tree"}, {"ll", "ll128", "simple"}),
        ({"ALGO": "^NVLS,Tree"}, {"ring"}, {"ll", "ll128", "simple"}),
        ({"PROTO": "LL"}, {"ring", "tree"}, {"ll"}),
        ({"PROTO": "^LL128"}, {"ring", "tree", "nvls"}, {"ll", "simple"}),
        ({"ALGO": "allgather:ring"}, {"ring", "tree", "nvls"}, {"ll", "ll128", "simple"}),
        ({"ALGO": "ring;allreduce:tree"}, {"tree"}, {"ll", "ll128", "simple"}),
        ({"NVLS_ENABLE": "0"}, {"ring", "tree"}, {"ll", "ll128", "simple"}),
        ({"ALGO": "PAT"}, {"ring"}, {"ll", "ll128", "simple"}),
    ],
)
def test_the_environment_forbids(variables: dict[str, str], algorithms: set[str], protocols: set[str]) -> None:
    found = tuner(**variables).candidates("all_reduce", MIB, NODE)
    assert {each.algorithm for each in found} == algorithms
    assert {each.protocol for each in found} == protocols


def test_few_channels_do_not_change_the_choice_and_close_ones_are_all_likely() -> None:
    free, few = tuner(), tuner(MAX_NCHANNELS="4")
    assert read_settings(Nccl(version="unknown")).version == (2, 30)
    chosen = few.choose("all_gather", 1024 * MIB, NODE)
    assert chosen == free.choose("all_gather", 1024 * MIB, NODE)
    costs = tuner(MAX_NCHANNELS="4", counts_channels=True).cost_us(chosen, "all_gather", 1024 * MIB, NODE)
    assert costs / chosen.time_us == pytest.approx(360 / (4 * 36.7), rel=0.01)  # a channel of Hopper moves 36.7 GB/s
    near = tuner().candidates("all_reduce", MIB, NODE)
    best = {name: min(each.time_us for each in near if each.algorithm == name) for name in ("ring", "tree", "nvls")}
    least = min(best.values())
    assert tuner().likely("all_reduce", MIB, NODE) == {name for name, cost in best.items() if cost <= DOUBT * least}
    assert tuner().likely("all_reduce", 256 * MIB, NODE) == {"nvls"}
    assert tuner(PAT_ENABLE="0").choose("all_gather", MIB, RAIL).algorithm == "ring"
    assert {each.protocol for each in tuner(PCIE).candidates("all_reduce", MIB, NODE)} == {"ll", "simple"}


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "broadcast"])
@pytest.mark.parametrize("shape", [NODE, PAIR, NODES, RAIL])
def test_faster_links_never_cost_more(kind: str, shape: GroupShape) -> None:
    double = Tuner(HOPPER, Network(100e9), read_settings(Nccl()))
    for power in range(4, 34):
        slow, fast = (each.choose(kind, 2.0**power, shape).time_us for each in (tuner(), double))
        assert fast <= slow


@pytest.mark.parametrize(
    ("operation", "kind", "num_bytes"),
    [
        ("all_gather_into_tensor_coalesced", "all_gather", 800),
        ("reduce_scatter_tensor", "reduce_scatter", 100),
        ("all_reduce", "all_reduce", 100),
        ("reduce", "reduce", 800),
        ("all_to_all_single", "all_to_all", 800),
        ("recv", "send", 800),
        ("broadcast_object_list", "broadcast", 800),
        ("frobnicate", "", 800),
    ],
)
def test_the_collective_and_its_whole_buffer(operation: str, kind: str, num_bytes: int) -> None:
    assert collective_of(operation, 100, 800) == (kind, num_bytes)


@pytest.mark.parametrize("interconnect", [AMPERE, HOPPER, BLACKWELL, PCIE])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"])
def test_a_group_may_have_any_number_of_ranks_on_each_node(interconnect: Interconnect, kind: str) -> None:
    for size in range(2, 26):
        for first in range(1, 8):  # ranks of the group on the first node
            ranks = [*range(8 - first, 8 - first + size)]
            for mine in (0, size - 1):
                shape = GroupShape.of(ranks, 8, mine)
                for candidate in tuner(interconnect).candidates(kind, MIB, shape):
                    assert 0 < candidate.time_us < float("inf")


def test_nvlink_sharp_needs_three_ranks_on_every_node() -> None:
    # A communicator has as many NVLink SHARP channels as its node with the fewest, and one GPU has none.
    uneven, even = GroupShape.of([*range(9)], 8, 0), GroupShape.of([*range(16)], 8, 0)
    assert "nvlstree" not in {candidate.algorithm for candidate in tuner().candidates("all_reduce", MIB, uneven)}
    assert "nvlstree" in {candidate.algorithm for candidate in tuner().candidates("all_reduce", MIB, even)}


def logged_by_nccl() -> list[dict[str, str]]:
    """Latency and bandwidth of each algorithm and protocol, as NCCL 2.27.5 logged them on 2 to 32 nodes of H100."""
    with Path(__file__).with_name("h100_logged.csv").open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def test_latencies_and_bandwidths_over_nodes_are_those_that_nccl_logs() -> None:
    model = Tuner(HOPPER, Network(), read_settings(Nccl(version="2.27.5")))
    rows = logged_by_nccl()
    assert len(rows) == 190
    for row in rows:
        nodes, local = int(row["nodes"]), int(row["gpus_per_node"])
        name = row["algo"].replace("_", ""), row["proto"].lower()
        for kind in row["operation"].split("/"):
            shape = GroupShape(nodes * local, nodes, local)
            latency_us, long_us = (
                next(each.time_us for each in model.candidates(kind, num_bytes, shape) if each[:2] == name)
                for num_bytes in (0.0, 2.0**40)
            )
            assert latency_us == pytest.approx(float(row["latency_us"]), abs=0.11), row
            assert 2.0**40 / (long_us - latency_us) / 1e3 == pytest.approx(float(row["algbw_GBps"]), rel=0.01), row
