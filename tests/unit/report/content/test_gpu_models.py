"""Steps priced for several GPUs: a surprise has its cause."""

from dataclasses import replace

from fakedist.cost_model.hosts import host_model
from fakedist.gpu.models.catalogue import GPUS
from fakedist.report.content.gpu_models import GpuStep, lifting, priced_objects, priced_sheet
from fakedist.rundir.step_time import ClockSteadiness, KernelSource, StepLimit
from tests.unit.results.test_comparison import step


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


KERNELS = StepLimit("kernels", "", 0, 900.0, 880.0, 950.0)
NICS = StepLimit("collectives", "dp", 4, 700.0, 500.0, 980.0)
LINKS, HOST = StepLimit("collectives", "tp", 1, 300.0, 250.0, 350.0), StepLimit("host", "", 0, 990.0, 600.0, 1800.0)


def limited(gpu: str, step_us: float, *limits: StepLimit) -> GpuStep:
    found = priced(gpu, step_us, 1.0)
    host = host_model(GPUS[gpu], None, 10.0, ClockSteadiness(5, 0.0, 0.0)).time
    time = replace(found.time, step_low_us=0.9 * step_us, step_high_us=1.2 * step_us, limits=[*limits])
    return replace(found, time=time, source=replace(found.source, host=host))


def test_each_gpu_has_what_limits_the_step_then_and_what_would_lift_that() -> None:
    own, late = limited("h100-80g", 1000.0, NICS, KERNELS), limited("gb200", 980.0, HOST)
    with_reference = limited("gb200", 600.0, KERNELS, replace(HOST, step_us=550.0)).time
    rows = [own, replace(late, lifted_by="--host dgx-h100", lifted=with_reference), limited("b200", 500.0, KERNELS)]
    sheet = priced_sheet(own, rows)
    columns = {column.name: column.cells for column in sheet.columns}
    assert columns["then limited by"] == [
        "dp over the NICs or kernels",
        "the host: grace launches at 1.8 x; --host dgx-h100: 600 µs",
        "kernels",
    ]
    assert columns["changes by"] == ["= 0%", "= -2%", "-50.0%"], "no decimals within the intervals"
    assert sheet.remarks[1].endswith("; =: the intervals overlap")
    assert not any("next to" in remark for remark in sheet.remarks)
    plain = priced_objects(own, rows)
    assert [row["is_tied"] for row in plain] == [True, True, False]
    assert [(row["lifted_by"], row["lifted_us"]) for row in plain] == [
        (None, None),
        ("--host dgx-h100", 600.0),
        (None, None),
    ]
    assert [[limit["kind"] for limit in row["limited_by"]] for row in plain] == [  # type: ignore[attr-defined]
        ["collectives", "kernels"],
        ["host"],
        ["kernels"],
    ]


def test_a_host_that_is_not_the_usual_one_is_named_and_nothing_is_promised_that_does_not_help() -> None:
    own, row = limited("h100-80g", 1000.0, KERNELS), limited("gb200", 500.0, KERNELS)
    sheet = priced_sheet(own, [own, replace(row, lifted_by="--gpu gb300", lifted=row.time)])
    assert sheet.columns[-1].cells == ["kernels", "kernels"]
    assert sheet.remarks[-1] == "next to gb200: the host grace; --host replaces it"
    tied = limited("gb200", 500.0, replace(KERNELS, high_us=1000.0), HOST)
    assert priced_sheet(own, [tied]).columns[-1].cells == ["kernels or the host (grace)"]


def test_what_lifts_a_limit_follows_it() -> None:
    assert lifting(limited("h100-80g", 1.0, NICS)) == ("--what-if", "bandwidth=2x")
    assert lifting(limited("h100-80g", 1.0, LINKS)) == ("--what-if", "bandwidth=nvlink:2x")
    assert lifting(limited("h200", 1.0, KERNELS)) == ("--gpu", "b200")
    assert lifting(limited("gb300", 1.0, KERNELS)) == ("", "")
    assert lifting(limited("gb200", 1.0, HOST)) == ("--host", "dgx-h100")
    assert lifting(limited("h200", 1.0, HOST)) == ("--what-if", "no-host-waits")
    assert lifting(limited("h200", 1.0)) == ("", "")
