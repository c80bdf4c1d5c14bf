"""A real file against the run rebuilt here: where allocations part first, and where the real step is slower."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pandas as pd
import pytest

from fakedist.errors import RunDirectoryError
from fakedist.report.content.comparison import comparison_object, real_step_report
from fakedist.report.content.report_blocks import Facts, Sheet, Verdict
from fakedist.results.building import open_imported
from fakedist.results.compare.against_trace import collective_kind, layers_by_class, plain_operation, slower_parts
from fakedist.results.compare.allocation_streams import compare_streams, plain_line
from fakedist.results.comparison import SnapshotComparison
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from tests.support.real_files import real_file
from tests.unit.traces.test_chrome_trace import Written
from tests.unit.traces.test_inferring import ENGINE, STEP, Made, inside


def test_lines_of_other_machines_are_the_same_file() -> None:
    assert plain_line("/home/user/course/model/net.py:39 (forward)") == "model/net.py:39 (forward)"
    assert plain_line("net.py:3 (f)") == "net.py:3 (f)"
    assert plain_line("") == ""


CAST = ("", 0, "at::autocast::cached_cast(c10::ScalarType, at::Tensor const&, c10::DeviceType)")
WORKSPACE = ("", 0, "at::cuda::getCUDABlasLtWorkspaceSize()")


def training(path: Path, size: int, *, casts: bool, file: str = "/job/model.py") -> Path:
    """Two steps of a layer whose products have ``size`` bytes; ``casts`` come before each."""
    made = Made()
    made.before(4 * size)
    for _ in range(2):
        stack = inside((file, 20, "forward"))
        kept = [made.alloc(1024, stack)]
        if casts:
            kept.append(made.alloc(3 * size, [CAST, *inside((file, 21, "forward"))]))
        else:
            made.free(made.alloc(32 << 20, [WORKSPACE, *stack]), stack)
        kept += [made.alloc(size, stack), made.alloc(size, stack)]
        gradient = made.alloc(4 * size, ENGINE)
        for at in kept:
            made.free(at, ENGINE)
        made.free(made.alloc(2048, STEP), STEP)
        made.free(gradient, STEP)
    return made.write(path)


def test_the_first_allocation_that_differs_is_named_with_its_line(tmp_path: Path) -> None:
    half = training(tmp_path / "a.pickle", 8192, casts=True)
    whole = training(tmp_path / "b.pickle", 16384, casts=False, file="/home/train.py")
    comparison = SnapshotComparison(half, whole)
    stream = comparison.stream
    assert (stream.step_a, stream.step_b) == (2, 2)
    assert stream.first is not None
    before, a, b = stream.first
    assert before == 1
    assert a is not None
    assert b is not None
    assert (a.bytes_, a.line) == (24_576, "/job/model.py:21 (forward)")
    assert (b.bytes_, b.line) == (16_384, "/home/train.py:20 (forward)")
    assert stream.same_lines == {"/job/model.py:20 (forward)": "/home/train.py:20 (forward)"}
    assert stream.workspaces == ((0, 0), (1, 32 << 20))
    assert comparison.first_why == (
        "allocations of a step part after 1: A requests 24.00 KiB for a cast at /job/model.py:21 (forward), B requests "
        "16.00 KiB at /home/train.py:20 (forward); A's casts in forward take 24.00 KiB, most at /job/model.py:21 "
        "(forward), B's 0 B: as if autocast were on in A alone"
    )
    earlier = comparison.lines[comparison.lines["line"] == "(before the step)"]
    assert earlier[["num_a", "num_b", "a_bytes", "b_bytes"]].to_numpy().tolist() == [[1, 1, 32_768, 65_536]]
    assert stream.half_of == "B"
    assert (stream.num_a, stream.num_b) == (6, 5)
    same = compare_streams(open_run(half), open_run(half))
    assert (same.first, same.num_same, len(same.lines)) == (None, 6, 0)
    found = comparison_object(SnapshotComparison(open_run(half), open_run(whole)))
    json.dumps(found)
    assert isinstance(found["stream"], dict)
    assert found["stream"]["first"]["num_before"] == before


def traced(folder: Path, mm_us: float, reduce_us: float) -> Path:
    folder.mkdir()
    trace = Written()
    trace.kernel("aten::mm", "nvjet", us=mm_us, delay=2)
    trace.now = 2000
    trace.kernel("aten::add", "vectorized_elementwise_kernel", us=4)
    trace.now = 3000
    trace.kernel("c10d::x", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", us=reduce_us)
    return trace.write(folder)


def test_the_parts_of_a_real_step_that_are_slower_come_first(tmp_path: Path) -> None:
    real, run = open_imported(traced(tmp_path / "a", 90, 50)), open_imported(traced(tmp_path / "b", 20, 10))
    tables = slower_parts(real, run)
    operations = tables["operation"][["name", "slower_us"]].to_numpy().tolist()
    assert operations == [["aten.mm", 70.0], ["aten.add", 0.0]]
    assert tables["collective"][["name", "real_us", "run_us"]].to_numpy().tolist() == [["all_reduce", 50.0, 10.0]]
    parts = tables["part"].set_index("name")["slower_us"]
    assert parts["computes"] == 70
    assert parts["only communicates"] == 40
    report = real_step_report(real, run, all_rows=False)
    json.dumps(report.data())
    assert report.title == "compare"
    verdict, facts = report.blocks[:2]
    assert isinstance(verdict, Verdict)
    assert verdict.text.startswith("B's step is ")
    assert isinstance(facts, Facts)
    assert [fact.name for fact in facts.rows] == ["A", "B"]
    (sheet,) = (block for block in report.blocks if isinstance(block, Sheet) and block.columns[0].name == "operation")
    assert [column.name for column in sheet.columns[1:4]] == ["B slower by", "A", "B"]
    assert [column.cells[0] for column in sheet.columns[1:4]] == ["70.0 µs", "20.0 µs", "90.0 µs"]


def test_a_run_without_a_timed_step_is_refused(tmp_path: Path) -> None:
    real, snapshot = open_imported(traced(tmp_path / "a", 9, 5)), open_run(training(tmp_path / "s", 512, casts=True))
    with pytest.raises(RunDirectoryError, match="has no timed step"):
        real_step_report(real, snapshot, all_rows=False)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "all_gather"), ("all_gather_into_tensor", "all_gather"),
        ("_reduce_scatter_base, fsdp of 8 ranks", "reduce_scatter"), ("ncclDevKernel_ReduceScatter", "reduce_scatter"),
        ("ncclDevKernel_AllReduce_Sum_bf16", "all_reduce"), ("ncclDevKernel_SendRecv", "all_to_all, send and recv"),
        ("all_to_all_single", "all_to_all, send and recv"), ("something", "something"),
    ],
)  # fmt: skip
def test_collectives_of_traces_and_runs_have_one_name(name: str, kind: str) -> None:
    assert collective_kind(name) == kind


def test_operations_of_traces_lack_the_overload() -> None:
    assert plain_operation("aten.mm.default") == plain_operation("aten.mm") == plain_operation("aten::mm") == "aten.mm"
    assert plain_operation("MmBackward0") == "MmBackward0"
    attention = "aten._scaled_dot_product_flash_attention"
    assert plain_operation("aten::_flash_attention_forward") == plain_operation(f"{attention}.default") == attention
    assert plain_operation("aten::_flash_attention_backward") == f"{attention}_backward"
    assert plain_operation(f"{attention}_backward.default") == f"{attention}_backward"
    assert plain_operation("aten::cudnn_convolution") == plain_operation("aten.convolution.default")
    assert plain_operation("aten::clamp_min_") == plain_operation("aten.relu_.default") == "aten.relu_"


def test_layers_are_found_by_the_classes_that_a_trace_has() -> None:
    rows = [("", "", -1), ("(GPT)", "DistributedDataParallel", 0), ("(GPT)", "GPT", 1), ("h", "ModuleList", 2)]
    rows += [("h.0", "Block", 3), ("h.0.fc", "Linear", 4), ("h.0.out", "Linear", 4), ("h.1", "Block", 3)]
    layers = pd.DataFrame([*rows, ("head", "Linear", 2)], columns=["name", "class_name", "parent"])
    run = cast("Run", SimpleNamespace(table=lambda *_: layers))
    found = layers_by_class(run)
    assert found["GPT.Block.0.Linear.1"] == "h.0.out"
    assert found["GPT.Block.1"] == "h.1"
    assert found["GPT.Linear"] == "head"


def test_a_real_snapshot_is_the_same_as_itself() -> None:
    run = open_run(real_file("course-gpt-medium-1024.pickle"))
    stream = compare_streams(run, run)
    assert stream.first is None
    assert stream.num_same == stream.num_a > 7000
