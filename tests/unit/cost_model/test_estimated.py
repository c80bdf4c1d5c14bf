"""A step's estimated times, and what is said about how close they are."""

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from fakedist.analysis.launches import launch_table, recorded_ranges, work_table
from fakedist.analysis.memory_tables import fold_layers
from fakedist.cost_model.accuracy import closest
from fakedist.cost_model.estimated import Models, NetworkChoice, StepTimes, estimate_times, find_gains, network_of
from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.cost_model.nccl.settings import Nccl
from fakedist.cost_model.timeline import Array
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.options import Job
from fakedist.rundir.step_time import GroupTime, PathPart
from tests.unit.cost_model.launches_by_hand import COPY, PRODUCT, launch, record

H100 = find_gpu("h100-80g")
LAYERS = pd.DataFrame({"name": ["", "a"], "class_name": ["", "A"], "parent": [-1, 0]})


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    made = record([launch(COPY, layer=1), *(launch(PRODUCT, layer=1) for _ in range(9))])
    known = {"launches": launch_table(made), "work": work_table(made), "layers": LAYERS}
    columns = ["sequence", "group", "operation", "bytes_in", "bytes_out", "peer"]
    known |= {"calls": pd.DataFrame(columns=columns), "groups": pd.DataFrame(columns=["ranks", "size", "group_rank"])}
    return known | {"ranges": recorded_ranges(made)}


def estimated(tables: dict[str, pd.DataFrame], prices: KernelTimes | None = None) -> StepTimes:
    models = Models(H100, prices or KernelTimes(H100), network_of(H100, None))
    return estimate_times(tables, fold_layers(LAYERS), models)


def test_the_source_says_what_the_step_was_priced_for(tables: dict[str, pd.DataFrame]) -> None:
    prices = KernelTimes(H100, 500)
    found = estimated(tables, prices)
    source, time = found.source, found.summary
    assert source is not None
    assert time is not None
    assert (source.source, source.tool, source.step, source.gpu) == ("estimated", "model", 2, H100.product)
    assert (source.fabric, source.calibrated_on) == ("dgx-h100-ndr", None)
    assert (source.clock, source.watts) == (prices.clock.fraction, 500)
    assert (source.step_us, source.step_low_us) == (time.step_us, time.step_low_us)
    assert source.step_low_us is not None
    assert source.step_high_us is not None
    assert source.step_low_us < source.step_us < source.step_high_us
    assert sum(part.share for part in source.uncertain) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("chosen", "job", "name", "gpus_per_node", "nics_per_node"),
    [
        ({}, None, "dgx-h100-ndr", 8, 8),
        ({}, {"gpus_per_node": 4}, "dgx-h100-ndr", 4, 4),
        ({"gpus_per_node": 2}, {"gpus_per_node": 4}, "dgx-h100-ndr", 2, 2),
        ({}, {"fabric": "dgx-b200-ndr"}, "dgx-b200-ndr", 8, 8),
        ({"fabric": "dgx-a100-hdr"}, {"fabric": "dgx-b200-ndr"}, "dgx-a100-hdr", 8, 8),
        ({"what_if": "fabric=dgx-b200-ndr", "fabric": "dgx-a100-hdr"}, None, "dgx-b200-ndr", 8, 8),
        ({"what_if": "gpus-per-node=16"}, {"gpus_per_node": 4}, "dgx-h100-ndr", 16, 16),
        ({"what_if": "no-overlap", "gpus_per_node": 2}, None, "dgx-h100-ndr", 2, 2),
        ({"fabric": "gb200-nvl72"}, {"gpus_per_node": 4}, "gb200-nvl72", 72, 72),
        ({"fabric": "gb200-nvl72"}, {"gpus_per_node": 4, "world_size": 128}, "gb200-nvl72", 64, 64),
        ({"fabric": "gb200-nvl72", "gpus_per_node": 72}, {"world_size": 128}, "gb200-nvl72", 72, 72),
    ],
)
def test_the_network_is_the_what_ifs_else_the_one_chosen_else_the_jobs_else_the_gpus(
    chosen: dict[str, Any], job: dict[str, Any] | None, name: str, gpus_per_node: int, nics_per_node: int
) -> None:
    made = None if job is None else Job(**{"world_size": 64, "rank": 0, "target": "x", **job})
    fabric = network_of(H100, made, NetworkChoice(**chosen)).fabric
    assert (fabric.name, fabric.gpus_per_node, fabric.nics_per_node) == (name, gpus_per_node, nics_per_node)
    recorded = Nccl({"A": "1", "B": "1"}, "2.27.5")
    found = network_of(H100, None, NetworkChoice(nccl={"A": "2"}), recorded).nccl
    assert found == Nccl({"A": "2", "B": "1"}, "2.27.5")


DP, TP = (GroupTime(name, 8, nodes, "all_gather", 1, 0, 1e9, 2.0, 1.0, 1.0) for name, nodes in (("dp", 2), ("tp", 1)))
ALONE = replace(DP, group="me", group_size=1)
NICS, NVLINK, RACK = "bandwidth=2x", "bandwidth=nvlink:2x", "gpus-per-node=72"


@pytest.mark.parametrize(
    ("groups", "more", "gpu", "expected"),
    [
        ([DP, TP], {}, "h100-80g", {NICS, NVLINK, RACK, "no-overlap", "h200", "b200", "gb200"}),
        ([DP], {}, "h100-80g", {NICS, RACK, "no-overlap", "h200", "b200", "gb200"}),
        ([TP], {}, "h200", {NVLINK, "no-overlap", "b200", "gb200"}),
        ([ALONE], {}, "h200", {"no-overlap", "b200", "gb200"}),
        ([], {"launch_gap_us": 1.0}, "h200", {"no-host-waits", "host=2x", "b200", "gb200"}),
        ([], {"critical_path": [PathPart("host", "", "", "", 0, 1, 1.0)]}, "l40s", {"no-host-waits", "host=2x"}),
        ([], {"critical_path": [PathPart("idle", "", "", "", 0, 1, 1.0)]}, "l40s", set()),
    ],
)
def test_changes_are_tried_where_they_may_matter(
    tables: dict[str, pd.DataFrame], groups: list[GroupTime], more: dict[str, Any], gpu: str, expected: set[str]
) -> None:
    model = find_gpu(gpu)
    models = Models(model, KernelTimes(model), network_of(model, None))
    times = estimate_times(tables, fold_layers(LAYERS), models)
    own, prices = times.summary, times.prices
    assert own is not None
    assert prices is not None
    time = replace(own, by_group=groups, **{"launch_gap_us": 0.0, "critical_path": []} | more)
    gains = find_gains(tables, models, None, time, prices)
    assert [gain.step_us for gain in gains] == sorted(gain.step_us for gain in gains)
    found = {gain.option.split()[1] for gain in gains}
    assert expected <= found if "h200" in expected or "b200" in expected else found == expected
    assert found - expected <= {"gb300", "b300"}
    for gain in gains:
        assert gain.step_us == pytest.approx(own.step_us) or gain.option.startswith("--gpu") or "host" in gain.option
        assert gain.why.endswith("of the clock") == (gain.step_us >= 0.99 * own.step_us and gain.option == "--gpu h200")


def test_the_accuracy_is_of_the_families_that_take_most_of_the_step(tables: dict[str, pd.DataFrame]) -> None:
    source = estimated(tables).source
    assert source is not None
    found = source.accuracy
    families = [row.family for row in found]
    assert families[0].startswith("products bf16")
    assert families[1].startswith("elementwise")
    (row,) = closest(H100, families[:1])
    assert (found[0].gpu, found[0].median_error, found[0].p95_error) == (row.gpu, row.median, row.p95)


class _OfUnknownAccuracy(KernelTimes):
    def price(self, work: pd.DataFrame, counts: Array) -> pd.DataFrame:
        return super().price(work, counts).assign(accuracy="")


def test_a_model_that_was_not_measured_has_no_accuracy(tables: dict[str, pd.DataFrame]) -> None:
    source = estimated(tables, _OfUnknownAccuracy(H100)).source
    assert source is not None
    assert source.accuracy == []


def test_each_kernel_tells_what_its_time_is_from(tables: dict[str, pd.DataFrame]) -> None:
    kernels = estimated(tables).tables["kernels"]
    is_product = (kernels["family"] == "gemm").to_numpy()
    basis = kernels["basis"].astype(str)
    assert basis[is_product].str.startswith("measured: bf16 products on h100-sxm").all()
    assert basis[~is_product].str.startswith("measured: elementwise on h100-sxm; assumed: ").all()
