from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.collectives.collective_times import FABRICS, CollectiveTimes
from fakedist.cost_model.collectives.communication import Communication, call_times
from fakedist.cost_model.nccl.settings import GroupShape, Nccl, read_settings
from fakedist.gpu.models.catalogue import GPUS

MIB = 1 << 20
COLUMNS = ["operation", "group", "bytes_in", "bytes_out", "peer"]
GROUPS = pd.DataFrame(
    [("0-63", 64, 0), ("0-7", 8, 0), ("0-56:8", 8, 0), ("", 4, 0), ("0", 1, 0)], columns=["ranks", "size", "group_rank"]
)
TIMES = CollectiveTimes(GPUS["h100-80g"], FABRICS["dgx-h100-ndr"])


def of(*rows: tuple[str, int, int, int, int]) -> pd.DataFrame:
    calls = pd.DataFrame(rows, columns=COLUMNS)
    return call_times(calls, GROUPS, TIMES)


def test_each_call_is_priced_by_its_group() -> None:
    found = of(
        ("all_gather_into_tensor", 1, 8 * MIB, 64 * MIB, -1),
        ("all_gather_into_tensor", 2, 8 * MIB, 64 * MIB, -1),
        ("all_gather_into_tensor", 1, 8 * MIB, 64 * MIB, -1),
    )
    assert found["time_us"].iloc[0] == TIMES.time("all_gather", 64 * MIB, GroupShape(8, 1, 8)).time_us
    assert found["time_us"].iloc[1] == TIMES.time("all_gather", 64 * MIB, GroupShape(8, 8, 1)).time_us
    assert found["time_us"].iloc[2] == found["time_us"].iloc[0]
    assert found["num_nodes"].tolist() == [1, 8, 1]
    assert found["text"].iloc[1] == "64.00 MiB, 8 nodes, ring simple"
    assert (found["low_us"] < found["time_us"]).all()
    assert (found["time_us"] < found["high_us"]).all()


def test_sends_cross_nodes_by_their_peer_and_groups_without_known_ranks_fill_few_nodes() -> None:
    found = of(("send", 0, 64 * MIB, 0, 1), ("send", 0, 64 * MIB, 0, 8), ("send", 0, 64 * MIB, 0, -1))
    assert found["num_nodes"].tolist() == [1, 2, 1]
    assert found["time_us"].iloc[1] > 5 * found["time_us"].iloc[0]
    assert of(("all_reduce", 3, MIB, MIB, -1))["num_nodes"].tolist() == [1]


def test_copies_from_peers_take_a_copy_engine_and_the_links() -> None:
    found = of(("get", 1, 0, 64 * MIB, 3), ("put", 1, 64 * MIB, 0, 3), ("send", 1, 64 * MIB, 0, 3), ("get", 0, 0, 1, 8))
    # 371 of 450 GB/s in each direction between two H100 (NVIDIA/nccl#1264).
    assert found["time_us"].iloc[0] == pytest.approx(2.5 + 64 * MIB / 371e3, rel=0.01)
    assert found["time_us"].iloc[1] == found["time_us"].iloc[0] < found["time_us"].iloc[2]
    assert found["algorithm"].tolist()[:3] == ["copy", "copy", "send"]
    assert np.isnan(found["time_us"].iloc[3]), "no copy crosses nodes"
    assert (found["queue"] == -1).all()


def test_kernels_of_symmetric_memory_are_between_the_links_and_nccl() -> None:
    sizes = (1, 8 * MIB, 64 * MIB, -1)
    kernels = ("two_shot_all_reduce_", *sizes), ("multimem_all_gather_out", *sizes), ("barrier", 1, 0, 0, -1)
    found = of(*[(f"symm_mem_{name}", *others) for name, *others in kernels])
    nccl = of(("all_reduce", *sizes), ("all_gather", *sizes), ("barrier", 1, 0, 0, -1))
    assert found["kind"].tolist() == ["all_reduce", "all_gather", "barrier"]
    assert (found["time_us"] < nccl["time_us"]).all()
    assert found["high_us"].to_numpy() == pytest.approx(nccl["high_us"].to_numpy())
    assert (found["low_us"] < nccl["time_us"] * nccl["link_share"]).tolist() == [True, True, False]
    assert found["low_us"].iloc[2] == pytest.approx(2.0 * np.exp(-0.15), rel=0.01), (
        "a kernel's least, less the interval"
    )
    assert (found["queue"] == -1).all()


def test_kernels_of_user_buffers_move_what_their_sms_can() -> None:
    gathers, reduces = (1, 8 * MIB, 64 * MIB, -1), (1, 64 * MIB, 8 * MIB, -1)
    found = of(
        ("userbuffers_all_gather_16sms", *gathers), ("userbuffers_all_gather_2sms", *gathers),
        ("userbuffers_multimem_reduce_scatter_2sms", *reduces), ("symm_mem_multimem_all_gather_out", *gathers),
    )  # fmt: skip
    assert found["kind"].tolist() == ["all_gather", "all_gather", "reduce_scatter", "all_gather"]
    assert found["sms"].tolist() == [16, 2, 2, -1]
    assert found["time_us"].iloc[0] == found["time_us"].iloc[3]
    by_two_channels_us = 56 * MIB / (2 * 36.7e3)
    assert found["time_us"].iloc[1] == pytest.approx(by_two_channels_us)
    assert found["time_us"].iloc[2] < by_two_channels_us / 2, "NVSwitches add up: each rank takes its part"


def test_what_arrives_in_user_buffers_takes_as_long_as_it_is_sent_and_shares_no_links() -> None:
    sent, received = (1, 64 * MIB, 0, 3), (1, 0, 64 * MIB, 3)
    found = of(
        ("put", *sent), ("put_wait", *received), ("userbuffers_send_4sms", *sent), ("userbuffers_recv_4sms", *received)
    )
    assert found["time_us"].iloc[0] == found["time_us"].iloc[1]
    assert found["time_us"].iloc[2] == found["time_us"].iloc[3] == pytest.approx(64 * MIB / (4 * 36.7e3))
    assert (found["link_share"] > 0).tolist() == [True, False, True, False]
    assert found["sms"].tolist() == [0, 0, 4, 0]
    assert (found["queue"] == -1).all()


def test_copy_engines_hold_no_sm() -> None:
    def num_sms(*rows: tuple[str, int, int, int, int]) -> int:
        times = call_times(pd.DataFrame(rows, columns=COLUMNS), GROUPS, TIMES)
        held = Communication(times, GPUS["h100-80g"], FABRICS["dgx-h100-ndr"])
        return held.sms_held(times, over_nodes=False)

    assert num_sms(("get", 1, 0, 64 * MIB, 3)) == 0
    assert 0 < num_sms(("get", 1, 0, 64 * MIB, 3), ("send", 1, 64 * MIB, 0, 3)) < num_sms(("send", 1, 64 * MIB, 0, 3))


def of_parts(part: int, exchanged: int = 0, group: int = 1) -> pd.Series[Any]:
    """The price of an all_to_all of 64 MiB."""
    row = ("all_to_all_single", group, 64 * MIB, 64 * MIB, -1, part, exchanged)
    columns = [*COLUMNS, "largest_part_bytes", "exchanged_bytes"]
    return call_times(pd.DataFrame([row], columns=columns), GROUPS, TIMES).iloc[0]


def test_an_all_to_all_of_uneven_splits_is_priced_by_what_is_exchanged() -> None:
    def price(num_bytes: float, shape: GroupShape) -> float:
        return TIMES.time("all_to_all", num_bytes, shape).time_us

    node, nodes = GroupShape(8, 1, 8), GroupShape(64, 8, 8)
    even, uneven = of_parts(8 * MIB, exchanged=56 * MIB), of_parts(20 * MIB, exchanged=42 * MIB)
    assert (even["time_us"], even["is_uneven"]) == (price(64 * MIB, node), False)
    assert (uneven["time_us"], uneven["is_uneven"]) == (price(48 * MIB, node), True)
    # 64 ranks on 8 nodes: 56 are on others. All of it may cross nodes, or 56 parts of the largest.
    assert of_parts(20 * MIB, exchanged=42 * MIB, group=0)["time_us"] == price(48 * MIB, nodes)
    assert of_parts(MIB // 2, exchanged=63 * MIB // 2, group=0)["time_us"] == price(32 * MIB, nodes)


def test_an_all_to_all_that_passes_everything_on_is_no_routers() -> None:
    ring = of_parts(64 * MIB, 64 * MIB)
    assert ring["time_us"] == TIMES.time("all_to_all", 64 * MIB * 8 / 7, GroupShape(8, 1, 8)).time_us
    assert not ring["is_uneven"]


def test_uneven_splits_of_which_the_largest_alone_was_recorded_are_priced_by_it() -> None:
    def price(num_bytes: int) -> float:
        return TIMES.time("all_to_all", num_bytes, GroupShape(8, 1, 8)).time_us

    even, uneven = of_parts(8 * MIB), of_parts(20 * MIB)
    assert (even["time_us"], even["is_uneven"]) == (price(64 * MIB), False)
    assert (uneven["time_us"], uneven["is_uneven"]) == (price(160 * MIB), True)
    assert uneven["text"] == "64.00 MiB, 1 node, pairs simple, largest part 20.00 MiB"
    assert uneven["moved_bytes"] == 64 * MIB
    assert of_parts(2 * MIB)["time_us"] == price(16 * MIB), "most of it stays on this rank"


def test_calls_have_a_queue_a_kind_and_their_index_and_unknown_ones_no_time() -> None:
    found = of(("all_reduce", 1, MIB, MIB, -1), ("send", 0, MIB, 0, 8))
    assert found["queue"].tolist() == [1, -1]
    assert found["kind"].tolist() == ["all_reduce", "send"]
    alone, unknown = of(("all_reduce", 4, MIB, MIB, -1), ("frobnicate", 1, MIB, MIB, -1))["time_us"]
    assert alone == 0.0
    assert pd.isna(unknown)
    calls = pd.DataFrame([("all_reduce", 1, MIB, MIB, -1)] * 2, columns=COLUMNS, index=[7, 3])
    assert call_times(calls, GROUPS, TIMES).index.tolist() == [7, 3]


@pytest.mark.parametrize(("variable", "sms"), [("", 24), ("NCCL_MAX_NCHANNELS", 8), ("NCCL_MIN_NCHANNELS", 32)])
def test_channels_set_the_sms_that_a_collective_holds(variable: str, sms: int) -> None:
    gpu = GPUS["h100-80g"]
    settings = read_settings(Nccl({variable: str(sms)} if variable else {}))
    calls = of(("all_reduce", 1, MIB, MIB, -1)).set_axis([0])
    found = Communication(calls, gpu, FABRICS["dgx-h100-ndr"], nccl=settings)
    work = pd.DataFrame({"kind": ["kernel"], "m": [0], "n": [0], "batch": [0]})
    assert found.slowed(work, np.zeros(1), over_nodes=False)[0] == pytest.approx(1 - sms / gpu.sms)
