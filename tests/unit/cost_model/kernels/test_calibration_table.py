"""Calibration tables: written and read back the same; an error about a damaged or meaningless one takes one line.

A calibration table replaces estimates of the same work and scales those of similar work; everything else stays.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    check_calibration_table,
    made_table,
    read_calibration_table,
    work_key,
)
from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.errors import SetupError
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.rundir.launch_records import WorkRow

ORIGIN = CalibrationOrigin(
    "NVIDIA H100 80GB HBM3", "torch.profiler", "2026-01-31", torch="2.15.0", file="/traces/t.json"
)
PRODUCT = WorkRow("cublasGemmEx", "product", "gemm", "aten.mm.default", 2e9, 6e6, batch=1, m=512, n=1024, k=2048)
UNKNOWN = WorkRow("te::kernel<int>", "kernel", "other", "te.op.default", math.nan, 0.5, threads=4096)
COPY = WorkRow("Memcpy DtoD", "copy", "copy", "aten.copy_.default", 0.0, 4096.0)


def written(path: Path) -> Path:
    path.write_text(calibration_table_text(made_table(ORIGIN, {PRODUCT: [10.0, 12.0, 11.0], UNKNOWN: [3.0]})))
    return path


def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    table = read_calibration_table(written(tmp_path / "my.table"))
    assert table.origin == ORIGIN
    assert table.rows[0].work == PRODUCT
    assert table.rows[0][1:] == (11.0, 10.1, 11.9, 3)
    assert math.isnan(table.rows[1].work.flops)
    assert table.rows[1].work._replace(flops=0) == UNKNOWN._replace(flops=0)
    assert table.work()["m"].tolist() == [512, 0]


def test_work_that_kernels_do_in_the_same_way_is_one_row() -> None:
    other_call = PRODUCT._replace(name="cublasLtMatmul", operation="aten.addmm.default")
    read = COPY._replace(kind="host_reads", operation="aten._local_scalar_dense.default")
    table = made_table(ORIGIN, {PRODUCT: [1.0], other_call: [3.0], COPY: [5.0], read: [5.0], UNKNOWN: [1.0]})
    assert [row.num_kernels for row in table.rows] == [2, 2, 1]
    assert table.rows[0].time_us == 2.0
    assert work_key(UNKNOWN) == work_key(UNKNOWN._replace(flops=math.nan))
    assert work_key(PRODUCT) != work_key(PRODUCT._replace(layout="NT"))
    assert work_key(UNKNOWN) != work_key(UNKNOWN._replace(name="te::other"))
    assert work_key(COPY._replace(name="sum")) != work_key(read._replace(name="sum"))


def _row(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda plain: plain["rows"][1].update(changes)


def _work(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda plain: plain["rows"][1]["work"].update(changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plain: plain.pop("fakedist_times"), "is not a table of measured times: it has no 'fakedist_times'"),
        (lambda plain: plain.update(fakedist_times=2), "has format 2; this fakedist reads 1"),
        (lambda plain: plain.update(rows=[]), "rows is not a list of measured work"),
        (lambda plain: plain.update(rows={"a": 1}), "rows is not a list of measured work"),
        (lambda plain: plain.pop("origin"), "origin is 'None', not an object"),
        (lambda plain: plain["origin"].update(gpu=""), "of which GPU"),
        (lambda plain: plain["origin"].update(gpu=7), "origin.gpu is '7', not a text"),
        (lambda plain: plain["origin"].update(rehearsal=True), "comes from a rehearsal"),
        (lambda plain: plain["rows"].append(plain["rows"][0]), "rows[2] has the same work as rows[0]"),
        (lambda plain: plain["rows"].append(7), "rows[2] is not an object"),
        (_row(time_us=-1.0), "rows[1].time_us is '-1.0', not a time"),
        (_row(time_us=math.nan), "rows[1].time_us is 'nan', not a time"),
        (_row(time_us=1e300), "not a time in microseconds"),
        (_row(time_us=True), "not a time in microseconds"),
        (_row(time_us="3"), "not a time in microseconds"),
        (_row(low_us=None), "rows[1].low_us is 'None'"),
        (_row(low_us=4.0), "time_us 3 is not between low_us 4 and high_us 3"),
        (_row(num_kernels=0), "num_kernels is '0'"),
        (_row(num_kernels=1.5), "num_kernels is '1.5'"),
        (_row(work=None), "rows[1].work is missing, or not an object"),
        (_work(m=-3), "rows[1].work.m is '-3', not a int"),
        (_work(m=3.5), "rows[1].work.m is '3.5', not a int"),
        (_work(flops=math.inf), "rows[1].work.flops is 'inf'"),
        (_work(name=3), "rows[1].work.name is '3', not a str"),
        (_work(kind="magic"), "the unknown kind or family 'magic'"),
        (_work(family="magic"), "the unknown kind or family 'magic'"),
        (_work(colour="red"), "colour is not a column of the table work"),
        (lambda plain: plain["rows"][1]["work"].pop("name"), "rows[1].work.name is missing"),
    ],
)
def test_a_damaged_table_is_told_in_one_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    path = written(tmp_path / "my.table")
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(SetupError) as caught:
        read_calibration_table(path)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("content", [b"", b"hello", b"[1]", b'{"fakedist_times": 1, "or', b"[" * 100_000, b"\xff\xfe"])
def test_what_is_no_table_is_told_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "my.table"
    path.write_bytes(content)
    with pytest.raises(SetupError, match="is not a table of measured times") as caught:
        read_calibration_table(path)
    assert "\n" not in caught.value.message
    with pytest.raises(SetupError, match="cannot be read: No such file"):
        read_calibration_table(tmp_path / "none")


def test_times_of_another_gpu_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "my.table")
    assert check_calibration_table(path, "nvidia h100 80gb hbm3").origin == ORIGIN
    with pytest.raises(SetupError, match="measured on NVIDIA H100 80GB HBM3, and the step is priced for NVIDIA H200"):
        check_calibration_table(path, "NVIDIA H200")


H100_ORIGIN = CalibrationOrigin("NVIDIA H100 80GB HBM3", "torch.profiler", "2026-01-31")


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
    table = made_table(H100_ORIGIN, samples)
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
    prices = CalibratedPrices(KernelTimes(find_gpu("h100")), made_table(H100_ORIGIN, {own: [1.0]}))
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
        pd.DataFrame(works, columns=list(WorkRow._fields)), model(works), CalibrationTable(H100_ORIGIN, []), model([])
    )
    assert empty.times.time_us.tolist() == model(works).time_us.tolist()


def test_prices_of_the_table_come_first_and_a_note_has_their_fraction(tmp_path: Path) -> None:
    own, near, other = product(4096, 4096, 4096), product(4096, 4096, 6144), kernel(1e8)
    model = KernelTimes(find_gpu("h100-80g", 10_000))  # so much power that clocks do not fall
    frame = pd.DataFrame([own, near, other], columns=list(WorkRow._fields))
    before = model.price(frame, np.array([2, 1, 1]))
    path = tmp_path / "own.json"
    path.write_text(calibration_table_text(made_table(H100_ORIGIN, {own: [2 * float(before["time_us"][0])] * 9})))
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
    assert prices.calibrated_on.date == H100_ORIGIN.date
    text = prices.notes()[0].text
    assert text.startswith("measured on your NVIDIA H100 80GB HBM3 on 2026-01-31: ")
    assert f"{prices.fractions.measured:.0%} of kernel time" in text


def test_prices_of_another_gpu_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(calibration_table_text(made_table(H100_ORIGIN, {kernel(1.0): [1.0]})))
    assert isinstance(calibrated_prices_of(KernelTimes(find_gpu("h100-80g")), path), CalibratedPrices)
    with pytest.raises(SetupError, match="measured on NVIDIA H100"):
        calibrated_prices_of(KernelTimes(find_gpu("h200")), path)
