from __future__ import annotations

import math

import pandas as pd
import pytest

from fakedist.cost_model.collectives.collective_times import FABRICS, CollectiveTimes
from fakedist.cost_model.collectives.communication import Communication, call_times
from fakedist.extras.experts.library_times import LibraryTimes, load_dispatchers
from fakedist.gpu.models.catalogue import GPUS

NIC = 50e9
H100 = LibraryTimes(GPUS["h100-80g"], NIC)


def measured(gpu: str, operation: str, ranks: int, sms: int) -> pd.DataFrame:
    table = load_dispatchers()
    own = (table["gpu"] == gpu) & (table["operation"] == operation) & (table["ranks"] == ranks) & (table["sms"] == sms)
    return table[own].sort_values("bytes")


@pytest.mark.parametrize(("operation", "ranks", "sms"), [("dispatch", 8, 20), ("combine", 16, 24), ("dispatch", 32, 4)])
def test_a_measured_size_takes_as_long_as_measured(operation: str, ranks: int, sms: int) -> None:
    row = measured("h100-80g", operation, ranks, sms).iloc[-5]
    found = H100.time(f"deep_ep_{operation}_{sms}sms", row["bytes"], ranks, is_over_nodes=ranks > 8)
    assert found is not None
    assert found.time_us == pytest.approx(row["time_us"], rel=0.02)
    assert (found.sms, found.spread) == (sms, 0.3)


def test_what_was_not_measured_is_between_its_neighbours_with_a_wider_interval() -> None:
    of = [H100.time("deep_ep_combine_20sms", 1e8, ranks, is_over_nodes=True) for ranks in (16, 24, 32)]
    less, between, more = [one for one in of if one is not None]
    assert sorted([less.time_us, between.time_us, more.time_us])[1] == between.time_us
    assert between.spread > less.spread == more.spread
    fewer, same = (H100.time(f"deep_ep_combine_{sms}sms", 1e8, 16, is_over_nodes=True) for sms in (2, 4))
    assert fewer is not None
    assert same is not None
    assert fewer.time_us == pytest.approx(2 * same.time_us)


def test_eight_nodes_have_an_interval_from_the_measured_to_that_of_four() -> None:
    row = measured("h100-80g", "dispatch", 64, 24).iloc[-5]
    found, four = (H100.time("deep_ep_dispatch_24sms", row["bytes"], ranks, is_over_nodes=True) for ranks in (64, 32))
    assert found is not None
    assert four is not None
    eight_us = row["time_us"]
    assert four.time_us < found.time_us < eight_us
    assert found.time_us * math.exp(found.spread) > eight_us
    assert found.time_us / math.exp(found.spread - 0.3) == pytest.approx(four.time_us)


def test_another_gpu_or_network_widens_the_interval() -> None:
    def spread(gpu: str, nic: float) -> tuple[float, float]:
        found = LibraryTimes(GPUS[gpu], nic).time("deep_ep_dispatch_20sms", 1e8, 16, is_over_nodes=True)
        assert found is not None
        return found.time_us, found.spread

    own_us, own = spread("h100-80g", NIC)
    slow_us, slow = spread("h100-80g", NIC / 2)
    _, other = spread("a100-80g", NIC)
    assert own_us * 1.8 < slow_us < own_us * 2
    assert own < slow < other


def test_hybrid_ep_takes_as_long_as_published_and_in_proportion_to_its_bytes() -> None:
    row = measured("h100-80g", "hybrid_ep_dispatch", 64, 16).iloc[-1]
    # 4,096 tokens of 14,336 bytes, top 8, reach 5.3 of 8 nodes, with the own; 49.97 GB/s is published.
    nodes = 8 * (1 - math.comb(448, 8) / math.comb(512, 8))
    assert row["time_us"] == pytest.approx(4096 * nodes * 14336 / 49.97e3, rel=1e-4)
    assert row["bytes"] == pytest.approx(4096 * nodes * 7 / 8 * 14336, rel=1e-4)
    whole, half = (H100.time("hybrid_ep_dispatch_16sms", row["bytes"] / by, 64, is_over_nodes=True) for by in (1, 2))
    assert whole is not None
    assert half is not None
    assert whole.time_us == pytest.approx(row["time_us"], rel=1e-4)
    assert (whole.sms, whole.spread, whole.library) == (16, 0.3, "hybrid_ep")
    assert half.time_us == pytest.approx(whole.time_us / 2, rel=0.02)


def test_hybrid_ep_in_a_node_of_h100s_is_scaled_by_nvlink_from_b200s_with_a_wide_interval() -> None:
    own, other = (
        LibraryTimes(GPUS[gpu], NIC).time("hybrid_ep_combine_16sms", 279_125_702, 8, is_over_nodes=False)
        for gpu in ("b200", "h100-80g")
    )
    assert own is not None
    assert other is not None
    assert own.time_us == pytest.approx(473.41, rel=1e-3)
    assert other.time_us == pytest.approx(2 * own.time_us - 48.36, rel=1e-3)
    assert other.spread > own.spread == 0.3


def test_kernels_of_hybrid_ep_that_only_move_rows_take_as_long_as_memory_does() -> None:
    found = H100.time("hybrid_ep_permute", 0, 64, own_bytes=1e9, is_over_nodes=True)
    assert found is not None
    assert 1e9 / 3.35e12 * 1e6 < found.time_us < 1.5 * 1e9 / 3.35e12 * 1e6


def test_low_latency_kernels_take_the_published_time_and_hold_no_sm() -> None:
    sent = 128 * 8 * 7168 * 15 / 16
    found = H100.time("deep_ep_low_latency_dispatch", sent, 16, is_over_nodes=True)
    assert found is not None
    assert (found.time_us, found.sms) == (pytest.approx(118), 0)


def test_calls_of_a_group_are_priced_by_what_goes_to_others() -> None:
    groups = pd.DataFrame({"ranks": ["0-15"], "size": [16], "group_rank": [0]})
    columns = ["operation", "group", "bytes_in", "bytes_out", "peer", "largest_part_bytes", "exchanged_bytes"]
    rows = [
        ("deep_ep_dispatch_24sms", 0, 100, 200, -1, 10**8, 10**8),
        ("deep_ep_layout", 0, 100, 200, -1, 0, 0),
        ("all_gather_into_tensor", 0, 1, 1, -1, 0, 0),
    ]
    times = CollectiveTimes(GPUS["h100-80g"], FABRICS["dgx-h100-ndr"])
    found = call_times(pd.DataFrame(rows, columns=columns), groups, times)
    expected = times.of_libraries[0].time("deep_ep_dispatch_24sms", 10**8, 16, is_over_nodes=True)
    assert expected is not None
    assert found["time_us"].iloc[0] == pytest.approx(expected.time_us)
    assert found["kind"].tolist() == ["all_to_all", "", "all_gather"]
    assert found["sms"].tolist() == [24, 0, -1]
    held = Communication(found, GPUS["h100-80g"], FABRICS["dgx-h100-ndr"])
    assert held.sms_held(found.iloc[:1], over_nodes=True) == 24
