"""A measured step placed in time again: copies that stand for collectives are out, priced collectives are in."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.analysis.launches import traced_tables
from fakedist.cost_model.collectives.collective_times import FABRICS
from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.step import MeasuredPrices, PricedStep, price_step
from fakedist.gpu.models.catalogue import GPUS
from fakedist.rundir.encoding import Columns
from fakedist.rundir.launch_records import LAUNCH_KINDS
from fakedist.rundir.table_rows import TABLES
from fakedist.rundir.trace_records import HostCalls, HostRanges, HostRecord, HostWaits
from tests.unit.cost_model.times_by_hand import kernel, table

NAN = float("nan")
COMPUTE, SIDE = 7, 13
CALLS = pd.DataFrame({"sequence": [40, 41], "operation": ["all_reduce", "barrier"], "layer": [3, 0]}).assign(
    group=0, asynchronous=[True, False], peer=-1, phase="backward"
)


def host(*, waits: list[tuple[str, int, int, float, float]], has_events: bool = True, **more: Any) -> HostRecord:
    """The host's actions: waits as (what, stream, event, at_us, until_us), calls, and ranges as (name, begin, end)."""
    waited, called, inside = Columns(HostWaits), Columns(HostCalls), Columns(HostRanges)
    waited.extend([(LAUNCH_KINDS.index(what), *rest) for what, *rest in waits])
    called.extend(more.get("calls", []))
    ranges = more.get("ranges", [])
    inside.extend([(number, 0, begin, end) for number, (_, begin, end) in enumerate(ranges)])
    texts = [name for name, *_ in ranges]
    return HostRecord(4, has_events, texts, waited.made(), called.made(), inside.made())


def step(*, copy_us: float = 20.0) -> dict[str, pd.DataFrame]:
    """Two products of 100 us and, next to the first, a copy that stands for an all_reduce. The second waits for it.

    The host launches everything in the first 30 us, and then waits for the second product.
    """
    kernels = table(
        kernel(10, 100, stream=COMPUTE, launch_us=5, operation="aten.mm", flops=8e9),
        kernel(10, copy_us, "communication", name="Memcpy DtoD", stream=SIDE, launch_us=10, call=40),
        kernel(10 + copy_us, 1, "communication", name="scale", stream=SIDE, launch_us=12, call=40),
        kernel(110, 100, stream=COMPUTE, launch_us=30, operation="aten.mm", flops=8e9),
    )
    waits = [
        ("stream_records", COMPUTE, 90, 3.0, 3.0),
        ("stream_waits", SIDE, 90, 4.0, 4.0),
        ("stream_records", SIDE, 91, 14.0, 14.0),
        ("stream_waits", COMPUTE, 91, 20.0, 20.0),
        ("host_waits", COMPUTE, 0, 33.0, 210.0),
    ]
    ranges = [("first", 4.5, 13.0), ("all", 1.0, 40.0)]
    told = host(waits=waits, calls=[(40, 9.0), (41, 25.0)], ranges=sorted(ranges, key=lambda each: each[1]))
    return traced_tables(kernels, told, CALLS)


def priced(found: dict[str, pd.DataFrame], time_us: float, *, interferes: bool = False) -> PricedStep:
    calls = pd.DataFrame(
        {"time_us": time_us, "low_us": time_us / 2, "high_us": time_us * 2, "num_nodes": 1, "moved_bytes": 1e6},
        index=[40, 41],
    ).assign(link_share=0.0, queue=0, text="", is_uneven=False, algorithm="ring", sms=-1)
    calls.loc[41, ["time_us", "low_us", "high_us"]] = 0.0
    communication = Communication(calls, GPUS["h100-80g"], FABRICS["dgx-h100-ndr"], interferes)
    return price_step(found["launches"], found["work"], MeasuredPrices("NVIDIA H100", found["launches"]), communication)


def test_a_call_is_one_launch_where_its_first_copy_was() -> None:
    launches = step()["launches"]
    assert launches["what"].tolist() == [
        "stream_records", "stream_waits", "product", "collective", "stream_records", "stream_waits", "collective",
        "product",
    ]  # fmt: skip
    calls = launches[launches["what"] == "collective"]
    assert calls[["call", "stream", "layer"]].to_numpy().tolist() == [[40, SIDE, 3], [41, COMPUTE, 0]]
    assert calls["phase"].tolist() == ["backward", "backward"]


def test_a_send_that_copies_nothing_is_before_the_event_that_is_waited_for() -> None:
    kernels = table(
        kernel(10, 100, stream=COMPUTE, launch_us=5),
        kernel(110, 5, stream=COMPUTE, launch_us=20),
        kernel(115, 5, stream=COMPUTE, launch_us=40),
    )
    waits = [("stream_records", SIDE, 91, 12.0, 12.0), ("stream_waits", COMPUTE, 91, 30.0, 30.0)]
    calls = CALLS.iloc[:1].assign(operation="send", asynchronous=False, peer=1)
    found = traced_tables(kernels, host(waits=waits, calls=[(40, 10.0)]), calls)
    assert list(zip(found["launches"]["what"], found["launches"]["stream"], strict=True)) == [
        ("product", COMPUTE), ("stream_records", COMPUTE), ("stream_waits", SIDE), ("collective", SIDE),
        ("stream_records", SIDE), ("product", COMPUTE), ("stream_waits", COMPUTE), ("product", COMPUTE),
    ]  # fmt: skip
    starts = priced(found, 300.0).kernels.set_index("call")["start_us"]
    assert starts[40] == 105, "it sends what was computed before it"
    assert starts[-1].tolist() == [5, 105, 405]


def test_a_synchronous_call_that_copies_nothing_is_on_the_stream_that_computes_and_old_events_hold_up_nothing() -> None:
    kernels = table(kernel(10, 100, stream=COMPUTE, launch_us=5), kernel(10, 1, stream=9, launch_us=6))
    calls = CALLS.iloc[:1].assign(asynchronous=False)
    found = traced_tables(kernels, host(waits=[], calls=[(40, 10.0)]), calls)
    assert found["launches"]["stream"].tolist() == [COMPUTE, 9, COMPUTE]
    kernels = table(kernel(10, 100, stream=COMPUTE, launch_us=5))
    told = host(waits=[("stream_waits", COMPUTE, 1 << 62, 1.0, 1.0)])
    assert priced(traced_tables(kernels, told, CALLS.iloc[:0]), 1.0).step_us == 105


def test_tables_are_those_of_a_step_on_the_virtual_gpu() -> None:
    found = step()
    assert list(found["launches"]) == TABLES["launches"].names
    assert list(found["work"]) == TABLES["work"].names
    products = found["launches"][found["launches"]["what"] == "product"]
    assert set(products["work"]) == {products["work"].iloc[0]}, "the same work is one row"
    assert found["work"]["flops"].iloc[products["work"].iloc[0]] == 8e9
    assert products["measured_us"].tolist() == [100, 100]


def test_the_host_takes_what_it_took_without_its_waits_and_with_copies_to_pageable_memory() -> None:
    launches = step()["launches"]
    assert launches["host_us"].tolist() == [3, 1, 1, 5, 4, 6, 5, 5]
    kernels = table(kernel(10, 5, launch_us=5), kernel(110, 5, launch_us=104))
    waited = traced_tables(kernels, host(waits=[("host_waits", 0, 0, 7.0, 100.0)]), CALLS.iloc[:0])
    assert waited["launches"]["host_us"].tolist() == [5, 2, 4]
    kernels = table(
        kernel(10, 50, "copy", name="Memcpy DtoH (Device -> Pageable)", launch_us=5), kernel(66, 5, launch_us=64)
    )
    copied = traced_tables(kernels, host(waits=[]), CALLS.iloc[:0])["launches"]
    assert copied["what"].tolist() == ["host_reads", "product"]
    assert copied["host_us"].tolist() == [5, 4]


def test_priced_collectives_move_and_slow_down_what_follows_or_nothing() -> None:
    found = priced(step(), 21.0)
    assert found.kernels[found.kernels["call"] < 0]["start_us"].tolist() == [5, 105]
    assert found.step_us == 205
    kernels = priced(step(), 300.0, interferes=True).kernels
    first, second = kernels[kernels["call"] < 0]["duration_us"]
    assert 100 < first < 130
    assert second == 100


def test_what_waits_for_a_longer_collective_begins_later() -> None:
    found = priced(step(), 300.0)
    kernels = found.kernels.set_index("name")
    assert kernels.loc["all_reduce", "start_us"] == 10
    assert kernels.loc["gemm_kernel", "start_us"].tolist() == [5, 310]
    assert found.step_us == 410
    assert (found.step_low_us, found.step_high_us) == (260, 710), "the interval is the collectives'"
    assert kernels.loc["gemm_kernel", "basis"].tolist() == ["measured", "measured"]
    assert [note.code for note in found.notes] == ["collectives_estimated"]


def test_ranges_have_the_launches_that_the_host_made_in_them() -> None:
    found = step()
    assert found["ranges"]["name"].tolist() == ["all", "first"]
    assert found["ranges"]["depth"].tolist() == [0, 1]
    inside = found["launches"].iloc[found["ranges"]["first_launch"][1] : found["ranges"]["end_launch"][1]]
    assert inside["what"].tolist() == ["product", "collective"]
    assert found["kernels"]["launch"].tolist() == [2, 3, 3, 7], "a copy is of its collective's row"


@pytest.mark.parametrize("seed", range(3))
def test_rows_come_in_the_order_of_the_host(seed: int) -> None:
    random = np.random.default_rng(seed)
    launched = random.permutation(20).astype(float)
    kernels = table(*(kernel(float(at) + 100, 1, launch_us=float(at)) for at in launched))
    found = traced_tables(kernels, host(waits=[]), CALLS.iloc[:0])
    assert found["launches"]["host_us"].tolist() == [0.0, *[1.0] * 19]
    assert found["kernels"]["launch"].tolist() == launched.tolist()
