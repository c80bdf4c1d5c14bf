"""Calibration tables: written and read back the same; an error about a damaged or meaningless one takes one line."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakedist.cost_model.kernels.calibration_table import (
    CalibrationOrigin,
    calibration_table_text,
    check_calibration_table,
    made_table,
    read_calibration_table,
    work_key,
)
from fakedist.errors import SetupError
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
