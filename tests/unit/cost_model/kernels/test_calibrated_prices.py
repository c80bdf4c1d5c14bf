"""A calibration table replaces estimates of the same work and scales those of similar work; everything else stays."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.kernels.calibration_table import (
    CalibratedPrices,
    CalibratedTimes,
    CalibrationOrigin,
    CalibrationTable,
    WorkTimes,
    apply_calibration,
    calibrated_prices_of,
    calibration_table_text,
    made_table,
)
from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.errors import SetupError
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.rundir.launch_records import WorkRow

ORIGIN = CalibrationOrigin("NVIDIA H100 80GB HBM3", "torch.profiler", "2026-01-31")


def product(m: int, n: int, k: int, **more: object) -> WorkRow:
    work = WorkRow("cublasGemmEx", "product", "gemm", "aten.mm.default", batch=1, m=m, n=n, k=k, layout="TN")
    return work._replace(dtype="bf16", flops=2.0 * m * n * k)._replace(**more)  # type: ignore[arg-type]


def kernel(moved: float, name: str = "void add<float>(int)", **more: object) -> WorkRow:
    work = WorkRow(name, "kernel", "elementwise", "aten.add.Tensor", 0.0, moved, "bf16")
    return work._replace(**more)  # type: ignore[arg-type]


def model(works: list[WorkRow]) -> WorkTimes:
    """An estimate: 100 TFLOP/s or 1 TB/s."""
    time = np.array([np.maximum(work.flops / 1e14, work.moved_bytes / 1e12) * 1e6 for work in works])
    return WorkTimes(time, time * 0.8, time * 1.2)


def applied(works: list[WorkRow], samples: dict[WorkRow, list[float]]) -> CalibratedTimes:
    table = made_table(ORIGIN, samples)
    frame = pd.DataFrame(works, columns=list(WorkRow._fields))
    return apply_calibration(frame, model(works), table, model([row.work for row in table.rows]))


def test_the_same_work_takes_what_was_measured_with_the_spread_of_many() -> None:
    found = applied([product(512, 512, 512), product(64, 64, 9000)], {product(512, 512, 512): [9.0, 10.0, 11.0] * 9})
    assert found.is_measured.tolist() == [True, False]
    assert found.is_scaled.tolist() == [False, False]
    assert (found.times.time_us[0], found.times.low_us[0], found.times.high_us[0]) == (10.0, 9.0, 11.0)
    expected = model([product(64, 64, 9000)])
    assert found.times.time_us[1] == expected.time_us[0]
    assert found.times.low_us[1] == expected.low_us[0]
    found = applied([product(512, 512, 512)], {product(512, 512, 512): [10.0]})
    assert (found.times.time_us[0], found.times.low_us[0], found.times.high_us[0]) == (10.0, 9.5, 10.5)


def test_similar_products_are_scaled_by_what_was_measured() -> None:
    own = product(4096, 4096, 4096)
    slower = 1.3 * float(model([own]).time_us[0])
    near, far = product(4096, 4096, 6144), product(4096, 4096, 16384)
    found = applied([near, far], {own: [slower]})
    expected = model([near, far])
    assert found.times.time_us == pytest.approx(expected.time_us * [1.3, 1.0])
    assert found.times.low_us == pytest.approx(expected.low_us * [1.3, 1.0])
    assert found.times.high_us == pytest.approx(expected.high_us * [1.3, 1.0])
    assert found.is_scaled.tolist() == [True, False]


def test_the_nearest_measurement_weighs_most() -> None:
    close, further = product(4096, 4096, 4200), product(4096, 8000, 4096)
    samples = {close: [2.0 * float(model([close]).time_us[0])], further: [1.0 * float(model([further]).time_us[0])]}
    asked = product(4096, 4096, 4096)
    found = applied([asked], samples)
    assert 1.8 < found.times.time_us[0] / model([asked]).time_us[0] < 2.0
    own, other = product(4096, 4096, 4096), product(4096, 4096, 4096, layout="NT")
    base = float(model([own]).time_us[0])
    found = applied([product(4096, 4096, 5000, layout="NT")], {own: [base], other: [3 * base]})
    assert found.times.time_us[0] > 2 * float(model([product(4096, 4096, 5000)]).time_us[0])
    small, large = kernel(1e6), kernel(1e6, "void mul<float>(int)")
    found = applied([kernel(1.5e6, "void mul<double>(int)")], {small: [1.0], large: [3.0]})
    assert found.times.time_us[0] > 2 * 1.5


def test_a_factor_of_similar_work_brings_no_estimate_below_its_roofline() -> None:
    own, similar = product(4096, 4096, 4096), product(4096, 4096, 5000)
    prices = CalibratedPrices(KernelTimes(find_gpu("h100")), made_table(ORIGIN, {own: [1.0]}))
    found = prices.price(pd.DataFrame([own, similar], columns=list(WorkRow._fields)), np.array([1, 1]))
    assert found["time_us"].tolist() == [1.0, found["least_us"][1]], "a time of the same work counts as measured"
    assert found["low_us"][1] == found["least_us"][1]


@pytest.mark.parametrize("difference", [{"dtype": "fp8"}, {"family": "norm"}, {"scaling": "block"}])
def test_work_of_another_type_is_not_similar(difference: dict[str, object]) -> None:
    own = product(4096, 4096, 4096)
    found = applied([own._replace(n=5000, **difference)], {own: [1.0]})  # type: ignore[arg-type]
    assert not found.is_scaled.any()


def test_what_the_model_does_not_know_is_known_once_it_is_measured() -> None:
    unknown = kernel(float("nan"), "te::kernel", operation="te.op")
    found = applied([unknown, unknown._replace(threads=7)], {unknown: [4.0]})
    assert found.times.time_us[0] == 4.0
    assert np.isnan(found.times.time_us[1])


def test_a_table_of_other_work_changes_nothing() -> None:
    works = [product(512, 512, 512), kernel(1e6)]
    found = applied(works, {kernel(1e9, family="norm"): [7.0]})
    assert found.times.time_us.tolist() == model(works).time_us.tolist()
    empty = apply_calibration(
        pd.DataFrame(works, columns=list(WorkRow._fields)), model(works), CalibrationTable(ORIGIN, []), model([])
    )
    assert empty.times.time_us.tolist() == model(works).time_us.tolist()


def test_prices_of_the_table_come_first_and_a_note_has_their_fraction(tmp_path: Path) -> None:
    own, near, other = product(4096, 4096, 4096), product(4096, 4096, 6144), kernel(1e8)
    model = KernelTimes(find_gpu("h100-80g", 10_000))  # so much power that clocks do not fall
    frame = pd.DataFrame([own, near, other], columns=list(WorkRow._fields))
    before = model.price(frame, np.array([2, 1, 1]))
    path = tmp_path / "own.json"
    path.write_text(calibration_table_text(made_table(ORIGIN, {own: [2 * float(before["time_us"][0])] * 9})))
    prices = calibrated_prices_of(model, path)
    after = prices.price(frame, np.array([2, 1, 1]))
    assert after["time_us"].tolist() == pytest.approx((before["time_us"] * [2, 2, 1]).tolist(), rel=1e-4)
    assert after["basis"].tolist()[0] == "calibration table"
    assert "scaled by the calibration table" in after["basis"].tolist()[1]
    assert after["bound"].tolist() == before["bound"].tolist()
    times = after["time_us"] * [2, 1, 1]
    assert prices.fractions.measured == pytest.approx(times[0] / times.sum())
    assert prices.fractions.scaled == pytest.approx(times[1] / times.sum())
    assert prices.calibrated_on is not None
    assert prices.calibrated_on.date == ORIGIN.date
    text = prices.notes()[0].text
    assert text.startswith("measured on your NVIDIA H100 80GB HBM3 on 2026-01-31: ")
    assert f"{prices.fractions.measured:.0%} of kernel time" in text


def test_prices_of_another_gpu_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(calibration_table_text(made_table(ORIGIN, {kernel(1.0): [1.0]})))
    assert isinstance(calibrated_prices_of(KernelTimes(find_gpu("h100-80g")), path), CalibratedPrices)
    with pytest.raises(SetupError, match="measured on NVIDIA H100"):
        calibrated_prices_of(KernelTimes(find_gpu("h200")), path)
