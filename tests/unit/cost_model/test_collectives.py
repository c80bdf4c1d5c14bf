"""Collectives: measured curves in one NVLink domain, a fitted ring between nodes."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fakedist.cost_model.collectives.collective_times import (
    FABRICS,
    CollectiveTime,
    CollectiveTimes,
    default_fabric,
    find_fabric,
    load_collectives,
)
from fakedist.cost_model.nccl.settings import GroupShape, Nccl, read_settings
from fakedist.errors import JobError, SetupError
from fakedist.gpu.models.catalogue import GPUS

NDR = FABRICS["dgx-h100-ndr"]
H100 = GPUS["h100-80g"]
#: With NVLink that was not measured.
MY_GPU = replace(H100, name="my-gpu", product="My GPU", nvlink_bandwidth=200e9)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send")


@cache
def h100() -> CollectiveTimes:
    return CollectiveTimes(H100, NDR)


def test_a_measured_message_takes_what_was_measured() -> None:
    logs = load_collectives()
    is_node = (logs["gpus_per_node"] == 8) & (logs["nodes"] == 1)
    row = logs[is_node & (logs["gpu"] == "h100-80g") & (logs["operation"] == "all_reduce")]
    row = row[row["bytes"] == 64 * MIB].iloc[0]
    found = h100().time("all_reduce", 64 * MIB, GroupShape(8, 1, 8))
    assert found.time_us == pytest.approx(row["time_us"], rel=1e-6)
    assert (found.algorithm, found.protocol, found.basis) == ("nvls", "simple", "measured")
    without = CollectiveTimes(H100, NDR, logs[~is_node]).time("all_reduce", 64 * MIB, GroupShape(8, 1, 8))
    assert without.time_us != pytest.approx(found.time_us, rel=1e-3)
    four, eight = (h100().time("all_reduce", 2.0**32, GroupShape(ranks, 1, ranks)) for ranks in (4, 8))
    assert (eight.algorithm, eight.time_us < four.time_us) == ("nvls", True)
    # Beyond the largest message its bandwidth holds, and a group of one takes no time.
    large, double = (h100().time("all_gather", num_bytes, GroupShape(8, 1, 8)).time_us for num_bytes in (64e9, 128e9))
    assert double == pytest.approx(2 * large)
    assert h100().time("all_reduce", 1e9, GroupShape(1, 1, 1)).time_us == 0.0


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("shape", [(8, 1, 8), (5, 1, 5), (64, 8, 8), (16, 16, 1)])
def test_more_bytes_never_take_less_time(operation: str, shape: tuple[int, int, int]) -> None:
    times = [h100().time(operation, 2.0**power, GroupShape(*shape)).time_us for power in range(20, 34)]
    assert times == sorted(times)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_faster_network_is_never_slower(operation: str) -> None:
    shape = GroupShape(64, 8, 8)
    double = CollectiveTimes(H100, replace(NDR, nic_bandwidth=2 * NDR.nic_bandwidth))
    for power in range(10, 34):
        assert double.time(operation, 2.0**power, shape).time_us <= h100().time(operation, 2.0**power, shape).time_us


def test_a_group_has_its_shape_and_one_nic_where_it_has_one_rank_a_node() -> None:
    rail, full = (
        h100().time("all_gather", 2**34, shape).time_us for shape in (GroupShape(8, 8, 1), GroupShape(64, 8, 8))
    )
    one_nic = 2**34 * 7 / 8 / (NDR.nic_bandwidth * NDR.achieved) * 1e6
    assert rail == pytest.approx(one_nic, rel=0.01)
    assert full < rail / 5
    assert GroupShape.of(range(0, 64, 8), 8) == GroupShape(8, 8, 1)
    assert GroupShape.of(range(16), 8) == GroupShape(16, 2, 8)
    assert GroupShape.of([0, 1, 2, 8], 8) == GroupShape(4, 2, 1)


def test_ten_nodes_are_met_within_the_interval() -> None:
    logs = load_collectives()
    rows = logs[(logs["nodes"] == 10) & (logs["operation"] == "all_gather") & (logs["gpus_per_node"] == 4)]
    for row in rows.to_dict("records"):
        found = h100().time("all_gather", row["bytes"], GroupShape(40, 10, 4))
        assert found.time_us == pytest.approx(row["time_us"], rel=0.25)


def test_logs_without_times_are_refused(tmp_path: Path) -> None:
    for text in ("", "gpu,operation\n", "gpu,operation,nodes,gpus_per_node,bytes,time_us,origin\na,b,1,2,8,0,x\n"):
        path = tmp_path / f"{len(text)}.csv"
        path.write_text(text)
        with pytest.raises(SetupError, match="make measured"):
            load_collectives(path)
    with pytest.raises(SetupError, match="are missing"):
        load_collectives(tmp_path / "none.csv")


def test_what_was_not_measured_follows_the_tuner_within_a_wider_interval() -> None:
    logs = load_collectives()
    few = logs[~((logs["gpus_per_node"] > 4) & (logs["gpu"] == "h100-80g") & (logs["nodes"] == 1))]
    for operation in ("all_gather", "reduce_scatter", "all_to_all"):
        found = CollectiveTimes(H100, NDR, few).time(operation, 64 * MIB, GroupShape(8, 1, 8))
        assert found.time_us == pytest.approx(h100().time(operation, 64 * MIB, GroupShape(8, 1, 8)).time_us, rel=0.2)
        assert found.basis == "measured, and NCCL's tuner"
    own = h100().time("all_reduce", MIB, GroupShape(8, 1, 8))
    other = CollectiveTimes(MY_GPU, NDR).time("all_reduce", MIB, GroupShape(8, 1, 8))
    between = h100().time("all_reduce", MIB, GroupShape(6, 1, 6))
    assert own.spread < between.spread < other.spread


def test_slower_links_of_another_model_count() -> None:
    # A third of NVLink's bandwidth: the bytes take three times as long, the latency does not.
    third = replace(H100, name="third", product="Third", nvlink_bandwidth=150e9)
    for num_bytes, factor in ((64 * MIB, 2.5), (16 * 1024 * MIB, 2.99)):
        own, other = (
            CollectiveTimes(gpu, NDR).time("all_gather", num_bytes, GroupShape(8, 1, 8)).time_us
            for gpu in (H100, third)
        )
        assert factor < other / own < 3.001


def test_nvlink_of_the_fabric_counts_before_the_models() -> None:
    half = CollectiveTimes(H100, replace(NDR, nvlink_bandwidth=225e9))
    own, found = (each.time("all_gather", 1024 * MIB, GroupShape(8, 1, 8)) for each in (h100(), half))
    assert found.time_us == pytest.approx(2 * own.time_us, rel=0.02)
    assert found.spread > own.spread


def test_a_card_without_nvlink_has_a_wide_interval_and_crosses_its_node_on_the_way_to_others() -> None:
    shape = GroupShape(2, 1, 2)
    measured, other = (CollectiveTimes(GPUS[name], NDR).time("all_gather", MIB, shape) for name in ("l40s", "rtx4090"))
    assert (measured.spread, other.spread) == (0.15, 2.0)
    assert CollectiveTimes(GPUS["l40s"], NDR).time("all_gather", MIB, GroupShape(16, 1, 16)).spread == 2.0
    times = CollectiveTimes(GPUS["l40s"], NDR)
    inside, across = (times.time("all_gather", 2.0**32, GroupShape(*sizes)) for sizes in ((8, 1, 8), (8, 8, 1)))
    assert across.time_us >= inside.time_us > 3e6
    assert across.spread >= inside.spread
    assert across.basis.endswith("as in one node")


def test_latency_leaves_the_links_idle_and_large_messages_do_not() -> None:
    for shape in (GroupShape(8, 1, 8), GroupShape(64, 8, 8)):
        for operation in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            shares = [h100().time(operation, 2.0**power, shape).link_share for power in (12, 20, 26, 40)]
            assert shares == sorted(shares)
            assert shares[0] < 0.1
            assert 0.9 < shares[-1] <= 1.0
    # A send reaches half of its NIC with NCCL's chunks.
    assert h100().time("send", 2**30, GroupShape(2, 2, 1)).link_share == pytest.approx(0.51, abs=0.01)


#: Groups in one node, or on few, and the same ranks or more on more nodes.
_ON_MORE_NODES = {
    (8, 1, 8): ((8, 2, 4), (8, 8, 1), (16, 2, 8)),
    (4, 1, 4): ((4, 2, 2), (4, 4, 1)),
    (16, 2, 8): ((64, 8, 8),),
    (64, 8, 8): ((1024, 128, 8),),
    (2, 2, 1): ((8, 8, 1),),
    (8, 8, 1): ((128, 128, 1),),
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("fabric", FABRICS)
def test_more_nodes_and_more_bytes_are_never_faster(gpu: str, fabric: str) -> None:
    times = CollectiveTimes(GPUS[gpu], FABRICS[fabric])
    shapes = {*_ON_MORE_NODES, *(shape for others in _ON_MORE_NODES.values() for shape in others)}
    for operation in OPERATIONS:
        before = dict.fromkeys(shapes, 0.0)
        for power in range(9, 34, 3):
            found = {shape: times.time(operation, 2.0**power, GroupShape(*shape)).time_us for shape in shapes}
            for shape, others in _ON_MORE_NODES.items():
                for other in others:
                    assert found[other] >= found[shape] * 0.999, (operation, power, shape, other)
            for shape in shapes:
                assert found[shape] >= before[shape] * 0.98, (operation, power, shape)
            before = found


MIB = 1 << 20
NODE, NODES, RAIL = GroupShape(8, 1, 8), GroupShape(512, 64, 8), GroupShape(2, 2, 1)


def took(
    operation: str, num_bytes: float, shape: GroupShape, gpu: str = "h100-80g", **variables: str
) -> CollectiveTime:
    settings = read_settings(Nccl({f"NCCL_{name}": value for name, value in variables.items()}))
    return CollectiveTimes(GPUS[gpu], FABRICS["dgx-h100-ndr"], nccl=settings).time(operation, num_bytes, shape)


@pytest.mark.parametrize(
    ("num_bytes", "shape", "variables", "algorithms"),
    [
        (MIB, NODES, {}, ("tree",)),
        (4096 * MIB, NODES, {}, ("nvlstree",)),
        (64 * 1024 * MIB, GroupShape(128, 128, 1), {}, ("ring",)),
        (4096 * MIB, NODES, {"ALGO": "^NVLSTree"}, ("tree", "ring")),
        (4096 * MIB, NODES, {"ALGO": "Tree"}, ("tree",)),
    ],
)
def test_an_all_reduce_runs_the_algorithm_that_nccl_chooses_of_those_allowed(
    num_bytes: float, shape: GroupShape, variables: dict[str, str], algorithms: tuple[str, ...]
) -> None:
    assert took("all_reduce", num_bytes, shape, **variables).algorithm in algorithms


def test_a_forbidden_algorithm_or_protocol_does_not_run() -> None:
    free, ring = took("all_reduce", MIB, NODES), took("all_reduce", MIB, NODES, ALGO="Ring")
    assert (ring.algorithm, ring.time_us > free.time_us) == ("ring", True)
    assert ring.basis == "fitted, and NCCL's tuner"
    small = [took("all_gather", 1e5, NODES, PROTO=name).time_us for name in ("LL", "LL128", "Simple")]
    assert took("all_gather", 1e5, NODES).time_us == min(small) < max(small)
    large = [took("all_gather", 1e9, NODES, PROTO=name).time_us for name in ("LL", "Simple")]
    assert large[0] > 5 * large[1]


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


def test_every_preset_names_its_source_and_other_nodes_have_nics_in_proportion() -> None:
    for name, fabric in FABRICS.items():
        assert find_fabric(name) == fabric
        assert fabric.source
    assert find_fabric("dgx-h100-ndr", 4).nics_per_node == 4
    assert find_fabric("dgx-h100-ndr", 1).nics_per_node == 1


def test_a_model_has_its_usual_fabric() -> None:
    found = {gpu: default_fabric(gpu).name for gpu in ("a100-80g", "h100-80g", "h200", "b200", "gb200", "l40s")}
    assert found == {
        "a100-80g": "dgx-a100-hdr",
        "h100-80g": "dgx-h100-ndr",
        "h200": "dgx-h100-ndr",
        "b200": "dgx-b200-ndr",
        "gb200": "gb200-nvl72",
        "l40s": "dgx-h100-ndr",
    }


def test_a_file_changes_a_preset_and_can_say_how_close_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('like = "dgx-h100-ndr"\nnic_gbit_per_s = 200\nnics_per_node = 4\nhop_us = 12.5\n')
    found = find_fabric(str(path))
    assert (found.name, found.nic_bandwidth, found.nics_per_node, found.hop_us) == ("mine", 25e9, 4, 12.5)
    assert found.spread > FABRICS["dgx-h100-ndr"].spread
    file = tmp_path / "mine.toml"
    file.write_text("spread = 0.15\n")
    assert find_fabric(str(file)).spread == 0.15


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("nic_gbit_per_s = -1", "nic_gbit_per_s = -1 is not a number from 1 to 10,000"),
        ("nic_gbit_per_s = true", "is not a number"),
        ("nics_per_node = 2.5", "is not a whole number"),
        ("achieved = nan", "is not a number from"),
        ("speed = 3", "unknown key 'speed'"),
        ('like = "mine"', "names no preset"),
        ("like = [1]", "names no preset"),
        ("not toml", "is not TOML"),
    ],
)
def test_a_file_with_an_absurd_value_is_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(JobError, match=match):
        find_fabric(str(path))


def test_an_unknown_name_lists_the_presets() -> None:
    with pytest.raises(JobError, match="no fabric 'infiniband'"):
        find_fabric("infiniband")
    with pytest.raises(JobError, match="cannot be read"):
        find_fabric("nowhere.toml")
