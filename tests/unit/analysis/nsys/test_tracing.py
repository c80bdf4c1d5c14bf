"""All steps of one process of a report, for calibration: launches in order, the operations around them, captures."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakedist.analysis.nsys.database import open_database
from fakedist.analysis.nsys.tracing import read_process
from fakedist.analysis.traces.process_trace import ProcessTrace
from fakedist.errors import ReportError
from tests.unit.analysis.nsys.made_up import MAIN, MadeUp, training


def process(report: MadeUp, directory: Path, number: int | None = None) -> ProcessTrace:
    with open_database(report.write(directory / "report.sqlite")) as database:
        return read_process(database, number)


def chains(trace: ProcessTrace) -> list[tuple[str, ...]]:
    _, found, chain = trace.operations()
    return [found[each] for each in chain]


def test_kernels_of_all_steps_come_in_the_order_of_their_launches(tmp_path: Path) -> None:
    trace = process(training(), tmp_path)
    assert (trace.tool, trace.gpu) == ("nsys", "NVIDIA H100 80GB HBM3")
    assert trace.launch.tolist() == sorted(trace.launch.tolist())
    names = [trace.activity.names[each] for each in trace.activity.name]
    assert names == ["gemm", "softmax", "gemm", "softmax", "gemm", "gemm", "add", "softmax_back", "multi_tensor_apply"]
    assert (trace.activity.columns["end"] - trace.activity.columns["start"]).tolist() == [5] * 9


def test_operations_are_those_of_emit_nvtx_without_their_numbers(tmp_path: Path) -> None:
    found = chains(process(training(), tmp_path))
    assert found[0][0] == "aten::mm"
    assert found[1][0] == "aten::softmax"
    assert "MmBackward0" in found[4]
    assert found[8] == ()


def test_nodes_of_a_graph_belong_to_the_operations_that_were_captured(tmp_path: Path) -> None:
    report = MadeUp()
    report.range(100, 200, "aten::mm")
    report.nodes.append((5, 5, MAIN, 150))
    report.kernel(900, "gemm", node=5)
    assert chains(process(report, tmp_path)) == [("aten::mm",)]


def test_other_processes_are_counted(tmp_path: Path) -> None:
    report = training()
    other = (0x1000008 << 24) | 5
    for at in (100, 200):
        report.kernel(at, "theirs", thread=other)
    assert process(report, tmp_path).num_elsewhere == 2
    again = process(report, tmp_path / "again" if (tmp_path / "again").mkdir() is None else tmp_path, 8)
    assert [again.activity.names[each] for each in again.activity.name] == ["theirs", "theirs"]


def test_a_report_without_kernels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="has no kernels"):
        process(MadeUp(), tmp_path)
