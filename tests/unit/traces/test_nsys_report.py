"""All steps of one process of a report, for calibration: launches in order, the operations around them, captures."""

import contextlib
import io
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from fakedist.errors import ReportError
from fakedist.report.content.run import run_report
from fakedist.report.render.terminal import render
from fakedist.results.building import write_run
from fakedist.results.opening import open_run
from fakedist.rundir.launch_records import LAUNCH_KINDS
from fakedist.rundir.plain import to_plain
from fakedist.traces.nsys_report import open_database, read_process, read_report, read_trace
from fakedist.traces.one_step import StepChoice
from fakedist.traces.step_trace import ProcessTrace, Waits
from tests.unit.traces.nsys_made_up import DOMAIN, MAIN, PID, START_END, MadeUp, training

STEP_3 = StepChoice(step=3)


def texts(found: pd.DataFrame) -> list[str]:
    return [note["text"] for note in found.attrs["notes"]]


def kernels(report: MadeUp, directory: Path, choice: StepChoice = STEP_3) -> pd.DataFrame:
    """The table of kernels, with the layer's name in place of its row."""
    run_directory = directory / "run"
    run_directory.mkdir(parents=True)
    path = report.write(directory / "report.sqlite")
    write_run(read_report(path, path, choice), run_directory)
    run = open_run(run_directory)
    found = run.table("kernels")
    found["layer"] = run.table("layers")["name"].to_numpy()[found["layer"]]
    found.attrs |= to_plain(run.summary.kernels)
    return found


def rows(found: pd.DataFrame, *columns: str) -> list[tuple[object, ...]]:
    return list(found[list(columns)].itertuples(index=False, name=None))


PLACE = ("name", "layer", "phase", "recompute", "operation")
EXPECTED = [
    ("gemm", "layers.0", "forward", False, "aten.mm"),
    ("softmax", "layers.0.attention", "forward", False, "aten.softmax"),
    ("gemm", "layers.1", "forward", False, "aten.mm"),
    ("softmax", "layers.1.attention", "forward", False, "aten.softmax"),
    ("gemm", "layers.1", "backward", True, "aten.mm"),
    ("gemm", "layers.1", "backward", False, "aten.mm"),
    ("add", "layers.1", "backward", False, "torch::autograd::AccumulateGrad"),
    ("softmax_back", "layers.0.attention", "backward", False, "SoftmaxBackward0"),
    ("multi_tensor_apply", "", "optimizer", False, ""),
]


@pytest.mark.parametrize("old", [False, True])
def test_every_kernel_is_of_the_layer_whose_forward_made_it(old: bool, tmp_path: Path) -> None:
    found = kernels(training(old=old), tmp_path)
    assert rows(found, *PLACE) == EXPECTED
    assert found.attrs["step"] == 3
    assert found.attrs["gpu"] == "NVIDIA H100 80GB HBM3"
    assert (found.attrs["source"], found.attrs["tool"]) == ("measured", "nsys")
    first = found.iloc[0]  # times are from the beginning of the step
    assert (first["launch_us"], first["start_us"], first["duration_us"]) == (0.15, 0.25, 0.005)
    assert (first["grid"], first["block"], first["stream"]) == ("8,4,1", "128,1,1", 7)
    assert found.attrs["step_us"] == (7605 - 1000) / 1000
    assert found["moved_bytes"].isna().all()
    assert found["flops"].isna().all()
    assert [text.partition(":")[0] for text in texts(found)] == ["tracing slows the host"]


@pytest.mark.parametrize("column", ["graphNodeId", "domainId", "textId", "eventType", "gridX"])
def test_a_column_that_a_version_has_not_is_no_error(column: str, tmp_path: Path) -> None:
    found = kernels(training(without=(column,)), tmp_path)
    assert rows(found, *PLACE) == EXPECTED
    assert found["grid"].unique().tolist() == ["" if column == "gridX" else "8,4,1"]


def test_texts_may_be_registered_strings(tmp_path: Path) -> None:
    report = training()
    names = dict.fromkeys(str(row[2]) for row in report.ranges)
    report.strings = {text: place + 1 for place, text in enumerate(names)}
    report.ranges = [(*row[:2], report.strings[str(row[2])], *row[3:]) for row in report.ranges]
    assert rows(kernels(report, tmp_path), *PLACE) == EXPECTED


def test_the_last_step_with_an_end_or_the_one_asked_for_is_taken(tmp_path: Path) -> None:
    report = training()
    report.range(10_000, None, "step 5")
    report.kernel(10_500)
    report.kernel(9_600, "in step 4")
    report.range(0, 20_000, "batch 77", PID | 13)  # a data loader counts too, and launches nothing
    report.range(5, 10_000, "batch 78", PID | 13)
    found = kernels(report, tmp_path, StepChoice())
    assert (found.attrs["step"], found["name"].tolist()) == (4, ["in step 4"])
    with pytest.raises(ReportError, match="no step 7") as raised:
        kernels(training(), tmp_path / "other", StepChoice(step=7))
    assert raised.value.hint == "--step is one of 3, 4"


def test_without_steps_all_is_one_and_a_note_says_so(tmp_path: Path) -> None:
    report = MadeUp()
    report.range(100, 900, "mlp")
    report.kernel(200)
    found = kernels(report, tmp_path, StepChoice())
    assert rows(found, "layer", "phase") == [("mlp", "other")]
    assert any("no range of the file names a step" in text for text in texts(found))


def test_ranges_that_start_and_end_in_any_order_count_too(tmp_path: Path) -> None:
    report = MadeUp()
    report.range(0, 1000, "step 1", kind=START_END)
    report.range(10, 500, "forward", kind=START_END)
    report.range(400, 700, "backward", kind=START_END)
    report.kernel(450)
    report.kernel(600)
    report.kernel(100)
    found = kernels(report, tmp_path, StepChoice())
    assert found["phase"].tolist() == ["forward", "backward", "backward"]


def test_a_librarys_ranges_are_no_layers(tmp_path: Path) -> None:
    report = MadeUp()
    report.ranges.append((0, 0, "NCCL", MAIN, DOMAIN, 9))
    report.range(0, 1000, "step 1")
    report.range(10, 500, "mlp")
    report.ranges.append((20, 400, "ncclAllReduce", MAIN, 59, 9))
    report.kernel(100, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL")
    found = kernels(report, tmp_path, StepChoice())
    assert rows(found, "layer", "operation", "family") == [("mlp", "ncclAllReduce", "communication")]


def said(run_directory: Path, *, full: bool) -> str:
    console = Console(file=io.StringIO(), width=120)
    render(run_report(run_directory, is_full=full), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_nccls_own_kernels_are_measured_and_the_first_screen_says_where_the_time_goes(tmp_path: Path) -> None:
    report = MadeUp()
    report.range(0, 1000, "step 1")
    report.kernel(100, "gemm")
    report.kernel(300, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")
    kernels(report, tmp_path, StepChoice())
    step, _ = open_run(tmp_path / "run").summary.timed or pytest.fail("no step")
    assert step.has_real_collectives
    full, first = said(tmp_path / "run", full=True), said(tmp_path / "run", full=False)
    for text in (full, first):
        assert "while nothing computes; measured" in text
        assert "simulated" not in text
    for line in ("computes ", "family of kernels ", "gemm ", "communication ", "no range of the trace names forward"):
        assert line in first


def test_copies_in_fakedists_ranges_stand_for_collectives(tmp_path: Path) -> None:
    report = MadeUp()
    report.range(0, 1000, "step 1")
    report.kernel(100, "gemm")
    report.range(250, 400, "fakedist::all_reduce #1")
    report.kernel(300, "vectorized_elementwise_kernel")
    kernels(report, tmp_path, StepChoice())
    step, _ = open_run(tmp_path / "run").summary.timed or pytest.fail("no step")
    assert not step.has_real_collectives
    assert "local copies that stand for collectives, simulated" in said(tmp_path / "run", full=True)


def test_a_kernel_whose_launch_was_not_traced_is_counted(tmp_path: Path) -> None:
    report = training()
    report.kernels.append((3000, 3010, 999, "orphan", None, PID))
    found = kernels(report, tmp_path)
    orphan = found[found["name"] == "orphan"].iloc[0]
    assert orphan["layer"] == ""
    assert orphan["launch_us"] != orphan["launch_us"]
    assert "1 kernel of 10 without a traced launch: of no layer" in texts(found)


def test_kernels_of_a_graph_count_for_its_launch_and_a_note_says_so(tmp_path: Path) -> None:
    report = training()
    report.kernel(1160, "in graph", node=77)
    found = kernels(report, tmp_path)
    assert found[found["name"] == "in graph"]["layer"].tolist() == ["layers.0"]
    assert "1 kernel of CUDA graphs count for the layer that launched the graph" in texts(found)


@pytest.mark.parametrize("old", [False, True])
def test_kernels_of_a_graph_count_for_the_layer_that_was_captured_where_the_report_saw_it(
    old: bool, tmp_path: Path
) -> None:
    report = training(old=old)
    report.range(100, 900, "captured")
    report.nodes = [(77, 55, MAIN, 5000), (55, 0, MAIN, 500)]
    report.kernel(1160, "in graph", node=77)
    found = kernels(report, tmp_path)
    assert found[found["name"] == "in graph"]["layer"].tolist() == ["captured"]
    assert not any("CUDA graph" in text for text in texts(found))


def test_a_graph_that_was_traced_as_a_whole_is_a_row_and_a_note(tmp_path: Path) -> None:
    report = training()
    report.calls.append((1170, 500, MAIN))
    report.graphs.append((1400, 1900, 500))
    found = kernels(report, tmp_path)
    graph = found[found["name"] == "CUDA graph"].iloc[0]
    assert (graph["layer"], graph["family"], graph["duration_us"]) == ("layers.0", "other", 0.5)
    assert any("1 CUDA graph traced as a whole" in text for text in texts(found))


def test_copies_have_their_bytes(tmp_path: Path) -> None:
    report = training()
    report.calls += [(1170, 500, MAIN), (1180, 501, MAIN)]
    report.copies += [(1400, 1500, 500, 4096, 1), (1600, 1700, 501, 4096, 8)]
    found = kernels(report, tmp_path)
    copies = found[found["family"] == "copy"]
    assert rows(copies, "name", "moved_bytes", "layer") == [
        ("Memcpy HtoD", 4096.0, "layers.0"),
        ("Memcpy DtoD", 8192.0, "layers.0"),
    ]


def test_the_process_with_most_kernels_is_taken_and_another_may_be_chosen(tmp_path: Path) -> None:
    report = training()
    other = 0x1000009 << 24
    report.range(0, 2000, "step 1", other | 3)
    report.range(10, 500, "elsewhere", other | 3)
    report.kernel(100, "other", other | 3)
    found = kernels(report, tmp_path)
    assert rows(found, *PLACE) == EXPECTED
    assert any(
        "kernels of 2 processes and GPUs; these are of process 7 on GPU 0 (--process 9 --gpu-index 0)" in text
        for text in texts(found)
    )
    chosen = kernels(report, tmp_path / "second", StepChoice(process=9))
    assert rows(chosen, "name", "layer") == [("other", "elsewhere")]
    with pytest.raises(ReportError, match="has no kernels of process 8") as raised:
        kernels(report, tmp_path / "third", StepChoice(process=8))
    assert raised.value.hint == "it has those of 7, 9"


def test_a_report_of_ours_has_its_layers_by_their_names(tmp_path: Path) -> None:
    report = MadeUp()
    report.range(0, 1000, "fakedist.step:4", kind=START_END)
    report.range(0, 900, "fakedist.phase:forward", kind=START_END)
    report.range(10, 800, "fakedist.layer:(Net), op_id = 3")
    report.range(15, 790, "DistributedDataParallel.forward, op_id = 4")
    report.range(20, 700, "fakedist.layer:blocks.0, op_id = 5")
    report.kernel(50)
    report.range(60, 61, "fakedist.call:12, op_id = 6")
    report.range(65, 90, "fakedist::all_gather, op_id = 7")
    report.kernel(70, "Memcpy")
    report.kernel(750)
    found = kernels(report, tmp_path, StepChoice())
    assert rows(found, "layer", "phase", "family", "call") == [
        ("blocks.0", "forward", "other", -1),
        ("blocks.0", "forward", "communication", 12),
        ("(Net)", "forward", "other", -1),
    ]
    layers = open_run(tmp_path / "run").table("layers")
    names = layers["name"].tolist()
    assert [names[parent] for parent in layers["parent"][1:]] == ["", "(Net)", "blocks"]


def execute(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def test_a_view_without_end_is_left(tmp_path: Path) -> None:
    path = training().write(tmp_path / "report.sqlite")
    numbers = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n AS name, 1 AS id FROM r"
    execute(path, "DROP TABLE TARGET_INFO_GPU", f"CREATE VIEW TARGET_INFO_GPU AS {numbers}")
    with pytest.raises(ReportError, match=r"reading it does not end: \d+,\d+,\d+ steps"), open_database(path) as found:
        found.rows("SELECT COUNT(*) FROM TARGET_INFO_GPU")


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (Path.unlink, "No such file"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_text("{}" * 100), "is not an SQLite file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4096]), "is cut off"),
        (lambda path: path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 40960), "cannot be read"),
        (
            lambda path: path.with_name("report.sqlite-journal").write_bytes(b"\xd9\xd5\x05\xf9 \xa1c\xd7"),
            "interrupted",
        ),
        (lambda path: execute(path, "DROP TABLE StringIds"), "no StringIds"),
        (lambda path: execute(path, "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL"), "has no kernels"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is not an Nsight report: it is a pipe"),
    ],
)
def test_a_file_that_is_no_report_is_refused_in_one_line(
    tmp_path: Path, damage: Callable[[Path], object], error: str
) -> None:
    path = training().write(tmp_path / "report.sqlite")
    damage(path)
    with pytest.raises(ReportError, match=error) as raised, open_database(path) as database:
        read_trace(database, StepChoice())
    assert "\n" not in raised.value.message
    assert raised.value.hint


def process(report: MadeUp, directory: Path, number: int | None = None) -> ProcessTrace:
    with open_database(report.write(directory / "report.sqlite")) as database:
        return read_process(database, StepChoice(process=number))


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
    operations = chains(trace)  # those of emit_nvtx, without their numbers
    assert (operations[0][0], operations[1][0], operations[8]) == ("aten::mm", "aten::softmax", ())
    assert "MmBackward0" in operations[4]


def test_nodes_of_a_graph_belong_to_the_operations_that_were_captured(tmp_path: Path) -> None:
    report = MadeUp()
    report.range(100, 200, "aten::mm")
    report.nodes.append((5, 5, MAIN, 150))
    report.kernel(900, "gemm", node=5)
    assert chains(process(report, tmp_path)) == [("aten::mm",)]


def waits(report: MadeUp, directory: Path) -> Waits | None:
    with open_database(report.write(directory / "report.sqlite")) as database:
        return read_trace(database, StepChoice(step=3)).waits


@pytest.mark.parametrize("without", [(), ("deviceId", "contextId")])
def test_a_wait_is_for_the_last_record_of_its_event_before_it(tmp_path: Path, without: tuple[str, ...]) -> None:
    report = training(without=without)
    for correlation, start in ((21, 1200), (22, 1300), (23, 1400), (24, 1500), (25, 1600)):
        report.calls.append((start, correlation, MAIN))
    report.events += [(7, 21, 3), (9, 22, 4), (7, 24, 3)]
    report.waits += [
        (1401, 1402, 13, 23, 2, 3),  # waits for the first record of event 3
        (1601, 1700, -1, 25, 1, 3),  # the host waits for the second one
        (1710, 1800, 7, 26, 3, -1),
        (1810, 1900, -1, 27, 4, -1),
        (9600, 9700, -1, 28, 4, -1),  # after the step
    ]
    found = waits(report, tmp_path)
    assert found is not None
    what = [LAUNCH_KINDS[each] for each in found.what]
    assert list(zip(what, found.stream.tolist(), found.event.tolist(), found.start.tolist(), strict=True)) == [
        ("stream_records", 7, 21, 1200),
        ("stream_records", 7, 24, 1500),
        ("stream_waits", 13, 21, 1401),
        ("host_waits", -1, 24, 1601),
        ("host_waits", 7, 0, 1710),
        ("host_waits_for_device", -1, 0, 1810),
    ]


def test_without_records_of_events_it_is_not_known_what_waits(tmp_path: Path) -> None:
    report = training()
    report.waits.append((1401, 1402, 13, 23, 2, 3))
    assert waits(report, tmp_path) is None


def test_other_processes_are_counted(tmp_path: Path) -> None:
    report = training()
    other = (0x1000008 << 24) | 5
    for at in (100, 200):
        report.kernel(at, "theirs", thread=other)
    assert process(report, tmp_path).num_elsewhere == 2
    (tmp_path / "again").mkdir()
    again = process(report, tmp_path / "again", 8)
    assert [again.activity.names[each] for each in again.activity.name] == ["theirs", "theirs"]
