from pathlib import Path
from typing import Any

import pytest

from fakedist.analysis.times.kernel_kinds import kernel_table
from fakedist.run.encoding import columns_of
from fakedist.run.kernel_rows import KernelRow, KernelRows
from fakedist.run.schema import TABLES
from fakedist.run.step_time import KernelSource
from fakedist.run.trace_records import KernelsRecord
from tests.unit.analysis.recorded import HandMade

GEMM : dict[str, Any] = {"name": "sm90_gemm", "family": "gemm", "stream": 7, "start_us": 20.5, "duration_us": 100.0} | {
    "launch_us": 3.0, "grid": "8,4,1", "block": "384,1,1", "operation": "aten.mm.default", "op": 12, "step": 2,
    "phase": "backward", "recompute": True, "layer": 3, "call": -1, "flops": 1e9, "moved_bytes": 4096.0,
    "bound": "compute",
}  # fmt: skip

SOURCE = KernelSource("estimated", "model", 2, "NVIDIA H100", 10.0)


def test_the_journals_columns_are_the_tables() -> None:
    assert list(columns_of(KernelsRecord)) == sorted(KernelRow._fields, key=list(columns_of(KernelsRecord)).index)
    assert list(columns_of(KernelsRecord)) == [column.name for column in TABLES["kernels"].columns]


def test_rows_come_back_as_they_were_given_in_the_order_of_their_start(tmp_path: Path) -> None:
    rows = KernelRows(SOURCE)
    rows.add(KernelRow(**GEMM))
    rows.add(KernelRow("Memcpy", "copy", 0, 1.0, 2.0, step=2, phase="forward"))
    made = HandMade()
    made.others.append(rows.record())
    recording = made.read(tmp_path)
    assert recording.kernel_source == SOURCE
    copy, gemm = kernel_table(recording).to_dict("records")
    assert gemm == GEMM
    assert (copy["name"], copy["operation"], copy["op"], copy["layer"], copy["call"]) == ("Memcpy", "", -1, 0, -1)
    assert copy["flops"] != copy["flops"]  # NaN: not known


def test_a_family_that_the_schema_does_not_know_is_an_error() -> None:
    with pytest.raises(KeyError, match="surprise"):
        KernelRows(SOURCE).add(KernelRow(**GEMM | {"family": "surprise"}))
