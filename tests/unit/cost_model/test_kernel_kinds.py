from pathlib import Path
from typing import Any

from fakedist.cost_model.breakdown import generation_us, timed
from fakedist.cost_model.launches import kernel_table
from fakedist.rundir.encoding import columns_of
from fakedist.rundir.schema import TABLES
from fakedist.rundir.trace_records import KernelsRecord
from tests.unit.analysis.recorded import HandMade
from tests.unit.cost_model.times_by_hand import NAN, SOURCE, kernel, record, table

GEMM : dict[str, Any] = {"name": "sm90_gemm", "family": "gemm", "stream": 7, "start_us": 20.5, "duration_us": 100.0} | {
    "launch_us": 3.0, "grid": "8,4,1", "block": "384,1,1", "operation": "aten.mm.default", "op": 12, "step": 2,
    "phase": "backward", "recompute": True, "layer": 3, "call": -1, "flops": 1e9, "moved_bytes": 4096.0,
    "bound": "compute",
}  # fmt: skip


def test_the_journals_columns_are_the_tables_but_those_of_an_estimate() -> None:
    columns = [column.name for column in TABLES["kernels"].columns]
    assert columns == [*columns_of(KernelsRecord), "low_us", "high_us", "shape", "basis", "launch"]


def test_rows_come_back_as_they_were_given_in_the_order_of_their_start(tmp_path: Path) -> None:
    made = HandMade()
    made.others.append(record(GEMM, kernel(1.0, 2.0, "copy", name="Memcpy", operation="")))
    recording = made.read(tmp_path)
    assert recording.kernel_source == SOURCE
    copy, gemm = kernel_table(recording).to_dict("records")
    assert {name: gemm[name] for name in GEMM} == GEMM
    assert (copy["name"], copy["operation"], copy["op"], copy["layer"], copy["call"]) == ("Memcpy", "", -1, 0, -1)
    assert copy["flops"] != copy["flops"]  # NaN: not known
    assert (gemm["low_us"] != gemm["low_us"], gemm["shape"]) == (True, "")  # it was not estimated here


def test_a_generation_lasts_from_its_first_kernel_to_the_end_of_its_last_with_sampling_and_waits() -> None:
    kernels = table(
        kernel(0.0, 5.0, phase="forward"),
        kernel(10.0, 5.0, phase="generation"),
        kernel(20.0, 3.0, phase="other"),  # sampling
        kernel(30.0, 5.0, phase="generation"),
        kernel(36.0, 4.0, phase="other"),  # a reward
        kernel(50.0, 5.0, phase="forward"),
        kernel(60.0, 5.0, phase="generation"),
        kernel(70.0, NAN, phase="generation"),
        kernel(80.0, 5.0, phase="backward"),
    )
    assert generation_us(timed(kernels)) == (35.0 - 10.0) + (70.0 - 60.0)
    assert generation_us(timed(kernels[kernels["phase"] != "generation"])) == 0.0
