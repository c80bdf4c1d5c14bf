"""NCCL's environment variables change what collectives take as they change NCCL's own choice."""

from __future__ import annotations

import pytest

from fakedist.cost_model.collectives.collective_times import CollectiveTime, CollectiveTimes
from fakedist.cost_model.collectives.fabric import FABRICS
from fakedist.cost_model.nccl.interconnect import GroupShape
from fakedist.cost_model.nccl.settings import read_settings
from fakedist.gpu.models.catalogue import GPUS

MIB = 1 << 20
NODE, NODES, RAIL = GroupShape(8, 1, 8), GroupShape(512, 64, 8), GroupShape(2, 2, 1)


def took(
    operation: str, num_bytes: float, shape: GroupShape, gpu: str = "h100-80g", **variables: str
) -> CollectiveTime:
    settings = read_settings({f"NCCL_{name}": value for name, value in variables.items()})
    return CollectiveTimes(GPUS[gpu], FABRICS["dgx-h100-ndr"], nccl=settings).time(operation, num_bytes, shape)


def test_an_algorithm_that_is_forbidden_does_not_run() -> None:
    free = took("all_reduce", MIB, NODES)
    assert free.algorithm == "tree"
    ring = took("all_reduce", MIB, NODES, ALGO="Ring")
    assert (ring.algorithm, ring.time_us > free.time_us) == ("ring", True)
    assert ring.basis == "fitted, and NCCL's tuner"
    assert took("all_reduce", 4096 * MIB, NODES).algorithm == "nvlstree"
    assert took("all_reduce", 4096 * MIB, NODES, ALGO="^NVLSTree").algorithm in ("tree", "ring")
    assert took("all_reduce", 4096 * MIB, NODES, ALGO="Tree").algorithm == "tree"


@pytest.mark.parametrize("variables", [{"NVLS_ENABLE": "0"}, {"ALGO": "Ring"}, {"ALGO": "^NVLS"}])
def test_an_all_reduce_that_the_switches_may_not_do_takes_two_passes(variables: dict[str, str]) -> None:
    # Rings move both halves over NVLink: 8 H100 reach 360 GB/s so, and 480 GB/s with NVLink SHARP.
    free, ring = (took("all_reduce", 1024 * MIB, NODE, **each) for each in ({}, variables))
    assert 1.25 < ring.time_us / free.time_us < 1.45
    assert (free.algorithm, ring.algorithm) == ("nvls", "ring")
    assert took("all_gather", 1024 * MIB, NODE, **variables) == took("all_gather", 1024 * MIB, NODE)
    others = [took("all_reduce", 1024 * MIB, NODE, gpu="a100-80g", **each).time_us for each in ({}, variables)]
    assert others[0] == others[1]


def test_few_channels_slow_collectives_and_sends_down() -> None:
    for operation in ("all_gather", "all_to_all", "all_reduce", "send"):
        shape = GroupShape(2, 1, 2) if operation == "send" else NODE
        free, many, few = (
            took(operation, 1024 * MIB, shape, **each).time_us
            for each in ({}, {"MAX_NCHANNELS": "16"}, {"MAX_NCHANNELS": "4"})
        )
        assert free == many
        assert 2 < few / free < 5


def test_larger_chunks_let_a_send_use_its_nic() -> None:
    gigabyte = [
        1e9 / took("send", 1e9, RAIL, **each).time_us / 1e3
        for each in ({}, {"P2P_NET_CHUNKSIZE": "524288"}, {"P2P_NET_CHUNKSIZE": "2097152"})
    ]
    assert gigabyte[0] == pytest.approx(24.9, rel=0.01)
    assert 30 < gigabyte[1] < 40
    assert 46 < gigabyte[2] < 48


def test_a_protocol_that_is_forbidden_does_not_run() -> None:
    small = [took("all_gather", 1e5, NODES, PROTO=name).time_us for name in ("LL", "LL128", "Simple")]
    assert took("all_gather", 1e5, NODES).time_us == min(small) < max(small)
    large = [took("all_gather", 1e9, NODES, PROTO=name).time_us for name in ("LL", "Simple")]
    assert large[0] > 5 * large[1]
