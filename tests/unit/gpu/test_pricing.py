"""The roofline: what limits, how time grows with the work, and that its data say where they are from."""

from __future__ import annotations

import math

import pytest

from fakedist.errors import SetupError
from fakedist.gpu.launch_demand import product_work
from fakedist.gpu.pricing import Roofline, load_efficiency
from fakedist.gpu.work_shapes import ProductShape
from fakedist.gpu_models.known import GPUS, find_gpu
from fakedist.gpu_models.spec import GpuSpec
from fakedist.run.launch_records import WorkRow

every_gpu = pytest.mark.parametrize("spec", GPUS.values(), ids=GPUS)
H100 = find_gpu("h100-80g")
DATA = load_efficiency()
BF16 = (2.0, 2.0, 2.0)


def product_us(m: int, n: int, k: int, batch: int = 1, dtype: str = "bf16") -> tuple[float, str]:
    return Roofline(H100).duration(product_work(ProductShape(m, n, k, batch, 0, "", *BF16), dtype))


def test_a_large_product_is_limited_by_arithmetic_and_never_beats_the_peak() -> None:
    duration, bound = product_us(8192, 8192, 8192)
    at_peak = 2 * 8192**3 / H100.peak_flops["bf16"] * 1e6
    assert bound == "compute"
    assert 1.0 < duration / at_peak < 2.0


def test_a_product_with_one_row_is_limited_by_reading_its_matrix() -> None:
    duration, bound = product_us(8192, 1, 8192)
    assert bound == "memory"
    assert duration > 8192 * 8192 * 2 / H100.memory_bandwidth * 1e6


def test_a_tiny_kernel_is_limited_by_its_launch() -> None:
    assert Roofline(H100).duration(WorkRow("", "kernel", "elementwise", "", 0.0, 1024.0)) == (
        pytest.approx(Roofline(H100).fixed.kernel, rel=0.02),
        "launch",
    )


def test_twice_a_large_work_takes_twice_as_long() -> None:
    roofline = Roofline(H100)
    copy, twice = (
        roofline.duration(WorkRow("", "kernel", "copy", "", 0.0, moved))[0] - roofline.fixed.kernel
        for moved in (4e9, 8e9)
    )
    assert twice / copy == pytest.approx(2.0)
    one, two = (product_us(16384, 16384, 16384, batch)[0] - roofline.fixed.kernel for batch in (1, 2))
    assert two / one == pytest.approx(2.0)


@every_gpu
def test_more_work_never_takes_less_time(spec: GpuSpec) -> None:
    roofline = Roofline(spec)
    sizes = [10 ** (exponent / 4) for exponent in range(8, 60)]
    for curve in roofline.curves:
        fractions = [roofline.fraction(curve, size) for size in sizes]
        assert all(0 < fraction <= 1 for fraction in fractions)
        if not curve.startswith("attention"):  # those are over the keys, of which each has its own work
            times = [size / fraction for size, fraction in zip(sizes, fractions, strict=True)]
            assert times == sorted(times), curve


def test_what_is_not_known_is_not_estimated() -> None:
    assert [
        math.isnan(each)
        for each in (Roofline(H100).duration(WorkRow("", "kernel", "gemm", "", math.nan, math.nan))[0],)
    ] == [True]
    no_fp8 = Roofline(find_gpu("a100-80g")).duration(
        product_work(ProductShape(4096, 4096, 4096, a_bytes=1.0, b_bytes=1.0, d_bytes=2.0), "fp8")
    )
    assert math.isnan(no_fp8[0])
    assert no_fp8[1] == ""


def test_a_curve_that_one_implementation_has_falls_back_to_that_of_all() -> None:
    demand = WorkRow("", "library", "attention", "", 1e12, 1e6, "bf16", attention="forward", library="cudnn", keys=4096)
    assert Roofline(H100).duration(demand)[0] == pytest.approx(1e12 / (989.4e12 * 0.616) * 1e6 + 2.0, rel=1e-3)
    assert Roofline(find_gpu("b200")).duration(demand)[0] == pytest.approx(
        1e12 / (2.25e15 * 0.52) * 1e6 + 2.0, rel=1e-3
    )


def test_a_faster_memory_makes_copies_faster_and_nothing_else_differs() -> None:
    copy = WorkRow("", "kernel", "copy", "", 0.0, 4e9)
    h100, h200 = (Roofline(find_gpu(name)).duration(copy)[0] - 2.0 for name in ("h100-80g", "h200"))
    assert h100 / h200 == pytest.approx(find_gpu("h200").memory_bandwidth / H100.memory_bandwidth)


def test_a_copy_over_the_hosts_link_is_slower_than_one_within_the_device() -> None:
    roofline = Roofline(H100)
    assert (
        roofline.duration(WorkRow("", "kernel", "copy", "", 0.0, 1e9, over_host_link=True))[0]
        > 1e9 / H100.host_bandwidth * 1e6
    )
    assert roofline.duration(WorkRow("", "kernel", "copy", "", 0.0, 1e9))[0] < 1e9 / H100.host_bandwidth * 1e6


def test_every_curve_names_a_source_that_is_explained() -> None:
    entries = [entry for curves in DATA["curves"].values() for entry in curves.values()]
    assert {entry["source"] for entry in [*entries, *DATA["fixed_us"].values()]} == set(DATA["sources"])
    assert DATA["measured_on"] is None, "calibrated data name the machine: change docs/accuracy.md too"


def test_data_of_another_format_are_refused() -> None:
    with pytest.raises(SetupError, match="has format 2"):
        Roofline(H100, DATA | {"format": 2})


def test_a_rehearsals_figures_make_no_estimate() -> None:
    with pytest.raises(SetupError, match="nothing was measured"):
        Roofline(H100, DATA | {"rehearsal": True})
