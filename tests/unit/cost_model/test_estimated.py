"""A step's estimated times, and what is said about how close they are."""

import pandas as pd
import pytest

from fakedist.analysis.layer_table import fold_layers
from fakedist.cost_model.accuracy import closest
from fakedist.cost_model.estimated import Models, StepTimes, estimate_times, network_of
from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.cost_model.launches import launch_table, recorded_ranges, work_table
from fakedist.cost_model.timeline import Array
from fakedist.gpu.models.catalogue import find_gpu
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
