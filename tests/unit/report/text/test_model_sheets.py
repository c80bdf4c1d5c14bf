"""Steps priced for several GPUs: a surprise has its cause."""

from dataclasses import replace

from fakedist.gpu.models.catalogue import GPUS
from fakedist.report.text.model_sheets import GpuStep, priced_sheet
from fakedist.rundir.step_time import KernelSource
from tests.unit.results.compare.test_changed_times import step


def priced(gpu: str, step_us: float, clock: float) -> GpuStep:
    source = KernelSource("estimated", "model", 2, gpu, step_us, fabric="ndr", clock=clock, watts=GPUS[gpu].watts)
    return GpuStep(GPUS[gpu], replace(step(), step_us=step_us), source)


def test_a_better_gpu_that_is_no_faster_has_its_cause_below_the_table() -> None:
    own = priced("h100-80g", 1000.0, 0.82)
    rows = [own, priced("h200", 1002.0, 0.78), priced("b200", 500.0, 0.7), priced("a100-80g", 2000.0, 0.9)]
    remarks = priced_sheet(own, rows).remarks[2:]
    assert remarks == ["h200 with ndr is not faster: held by its power limit of 700 W at 78% of the clock"]


def test_a_gpu_is_compared_with_the_own_one_on_the_same_fabric() -> None:
    own = priced("h100-80g", 1000.0, 0.82)
    on_efa = [replace(row, source=replace(row.source, fabric="efa")) for row in (own, priced("h200", 1020.0, 0.78))]
    slower = replace(on_efa[0], time=replace(on_efa[0].time, step_us=1060.0))
    assert priced_sheet(own, [own, slower, on_efa[1]]).remarks[2:] == []
    (remark,) = priced_sheet(own, [own, on_efa[1]]).remarks[2:]
    assert remark.startswith("h200 with efa is not faster: on another fabric than ndr; held by")
