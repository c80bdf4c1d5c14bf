"""All steps of one process of a report, for calibration: launches in order, the operations around them, captures."""

from pathlib import Path

import pytest

from fakedist.rundir.launch_records import LAUNCH_KINDS
from fakedist.traces.nsys_report import open_database, read_process, read_trace
from fakedist.traces.one_step import StepChoice
from fakedist.traces.step_trace import ProcessTrace, Waits
from tests.unit.traces.nsys_made_up import MAIN, MadeUp, training


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
