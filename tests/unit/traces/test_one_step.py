"""The critical path of a traced step, on traces written by hand in the form of torch 2.11's export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakedist.report.content.time import time_sheets
from fakedist.results.building import open_imported
from fakedist.results.run import Run
from fakedist.results.verdict import limit_text
from tests.unit.traces.test_chrome_trace import Written, event

_MAIN, _AUTOGRAD = 7, 8


class Hosted(Written):
    """A trace with calls at given times."""

    def launch(
        self, at: float, start: float, us: float, *, stream: int = 7, name: str = "k", thread: int = _MAIN
    ) -> None:
        self.correlation += 1
        number = {"correlation": self.correlation}
        self.call("cudaLaunchKernel", at, 2, thread=thread, **number)
        where = {"pid": 0, "tid": stream, "device": 0, "stream": stream}
        self.events.append(event("kernel", name, start, us, **where, **number))

    def call(self, name: str, at: float, us: float, *, thread: int = _MAIN, **more: Any) -> None:
        self.events.append(event("cuda_runtime", name, at, us, **more) | {"tid": thread})

    def sync(self, kind: str, at: float, us: float, correlation: int, **more: Any) -> None:
        where = {"pid": 0, "tid": 7, "device": 0, "correlation": correlation, "cuda_sync_kind": kind}
        self.events.append(event("cuda_sync", kind, at, us, **where, **more))

    def operation(self, name: str, at: float, us: float, *, thread: int = _MAIN, category: str = "cpu_op") -> None:
        self.events.append(event(category, name, at, us, **{"External id": 900 + len(self.events)}) | {"tid": thread})

    def open(self, folder: Path) -> Run:
        return open_imported(self.write(folder))


def parts(run: Run) -> dict[tuple[str, str, str], float]:
    assert run.summary.timed is not None
    time = run.summary.timed[0]
    assert sum(part.time_us for part in time.critical_path) == pytest.approx(time.step_us)
    assert time.critical_path == sorted(time.critical_path, key=lambda part: -part.time_us)
    return {(part.kind, part.operation, part.lane): round(part.time_us, 3) for part in time.critical_path}


def test_kernels_that_wait_for_each_other_are_the_path_back_to_the_launch_that_came_late(tmp_path: Path) -> None:
    trace = Hosted()
    trace.operation("aten::mm", 100, 20)
    trace.launch(110, 115, 100)
    trace.launch(130, 216, 50)  # queued: it begins 1 us after the one before
    run = trace.open(tmp_path)
    assert parts(run) == {
        ("kernels", "aten.mm", "stream 7"): 100, ("kernels", "", "stream 7"): 50, ("idle", "", "stream 7"): 1,
        ("launch", "cudaLaunchKernel", f"thread {_MAIN}"): 5, ("host", "aten::mm", f"thread {_MAIN}"): 10,
    }  # fmt: skip
    assert run.table("kernels")["path_us"].tolist() == [100, 50]
    assert run.summary.timed is not None
    assert limit_text(run.summary.timed[0]) == "limited by kernels: 90% of the critical path"


def test_a_call_that_waited_leads_back_to_the_kernel_that_it_waited_for(tmp_path: Path) -> None:
    trace = Hosted()
    trace.launch(100, 105, 300)
    trace.call("cudaStreamSynchronize", 110, 300)  # until 410, 5 us after the kernel
    trace.operation("aten::add", 450, 20)
    trace.launch(460, 465, 40)
    assert parts(trace.open(tmp_path)) == {
        ("kernels", "", "stream 7"): 300, ("kernels", "aten.add", "stream 7"): 40,
        ("launch", "cudaLaunchKernel", f"thread {_MAIN}"): 10,
        ("host", "cudaStreamSynchronize", f"thread {_MAIN}"): 5,
        ("host", "between operations", f"thread {_MAIN}"): 40, ("host", "aten::add", f"thread {_MAIN}"): 10,
    }  # fmt: skip


def test_a_copy_to_the_host_is_waited_for_and_a_call_that_waits_for_nothing_is_the_hosts(tmp_path: Path) -> None:
    trace = Hosted()
    where = {"pid": 0, "tid": 7, "device": 0, "stream": 7, "bytes": 64, "correlation": 77}
    trace.call("cudaMemcpyAsync", 100, 60, correlation=77)
    trace.events.append(event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 110, 45, **where))
    trace.call("cudaDeviceSynchronize", 170, 10)
    trace.launch(190, 195, 5)
    assert parts(trace.open(tmp_path)) == {
        ("kernels", "", "stream 7"): 45 + 5, ("host", "cudaMemcpyAsync", f"thread {_MAIN}"): 5,
        ("host", "cudaDeviceSynchronize", f"thread {_MAIN}"): 10,
        ("host", "between operations", f"thread {_MAIN}"): 20,
        ("launch", "cudaMemcpyAsync", f"thread {_MAIN}"): 10, ("launch", "cudaLaunchKernel", f"thread {_MAIN}"): 5,
    }  # fmt: skip


def test_a_thread_that_did_nothing_waited_for_the_one_that_worked(tmp_path: Path) -> None:
    """The main thread runs a forward, autograd's the backward, and the main one the optimizer."""
    trace = Hosted()
    trace.operation("DataLoader.next", 100, 50, category="user_annotation")
    trace.operation("aten::mm", 150, 20)
    trace.launch(160, 162, 1)
    trace.operation("autograd::engine::evaluate_function: MmBackward0", 180, 100, thread=_AUTOGRAD)
    trace.launch(270, 272, 1, thread=_AUTOGRAD)
    trace.operation("aten::_foreach_add_", 290, 30)
    trace.launch(310, 312, 1)
    found = parts(trace.open(tmp_path))
    assert found["host", "MmBackward0", f"thread {_AUTOGRAD}"] == 100 - 2
    assert found["host", "cudaLaunchKernel", f"thread {_AUTOGRAD}"] == 2
    assert found["host", "between operations", f"thread {_MAIN}"] == 10
    assert found["host", "between operations", f"thread {_AUTOGRAD}"] == 10
    assert found["host", "DataLoader.next", f"thread {_MAIN}"] == 50


@pytest.mark.parametrize(("delay", "waits"), [(3, True), (30, False)])
def test_a_kernel_that_begins_as_one_of_another_stream_ends_is_taken_to_wait_for_it(
    tmp_path: Path, delay: float, waits: bool
) -> None:
    trace = Hosted()
    trace.launch(100, 105, 200, name="ncclDevKernel_AllReduce_Sum(x)", stream=20)
    trace.launch(120, 305 + delay, 50)
    found = parts(trace.open(tmp_path))
    assert (("collectives", "ncclDevKernel_AllReduce_Sum", "stream 20") in found) == waits
    assert (found["launch", "cudaLaunchKernel", f"thread {_MAIN}"] > 100) != waits


def test_without_calls_the_path_is_not_known(tmp_path: Path) -> None:
    trace = Hosted()
    trace.launch(100, 105, 200)
    trace.events = [each for each in trace.events if each["cat"] != "cuda_runtime"]
    run = trace.open(tmp_path)
    assert run.summary.timed is not None
    assert run.summary.timed[0].critical_path == []
    assert run.table("kernels")["path_us"].isna().all()


def test_activities_that_contradict_each_other_end_the_walk(tmp_path: Path) -> None:
    """Kernels without a duration at one time, on streams that would wait for each other, and calls after them."""
    trace = Hosted()
    for number in range(30):
        trace.launch(500 + number, 400, 0, stream=number % 3)
        trace.call("cudaDeviceSynchronize", 300, 100)
    trace.launch(100, 399, 2)
    parts(trace.open(tmp_path))


def test_the_sheet_has_the_lanes_and_the_shares_by_kind(tmp_path: Path) -> None:
    trace = Hosted()
    trace.launch(100, 105, 85)
    (sheet,) = [sheet for sheet in time_sheets(trace.open(tmp_path), all_layers=False) if "Critical" in sheet.title]
    assert [column.name for column in sheet.columns] == ["what", "of", "on", "launches", "time", "of the step"]
    assert sheet.remarks[0] == "kernels 94.4%, launch 5.6%"


def test_a_stream_that_waits_for_an_event_leads_to_what_was_recorded_before_it(tmp_path: Path) -> None:
    trace = Hosted()
    trace.launch(100, 105, 300, stream=20, name="other")
    trace.call("cudaEventRecord", 110, 1, correlation=50)
    trace.launch(115, 120, 325, stream=21, name="nothing_waits_for_it")
    trace.call("cudaStreamWaitEvent", 130, 1, correlation=51)
    trace.launch(140, 450, 60)  # 45 us after the kernel that it waits for: too late for a guess
    trace.sync("Stream Wait Event", 130, 1, 51, stream=7, wait_on_stream=20, wait_on_cuda_event_record_corr_id=50)
    run = trace.open(tmp_path)
    assert parts(run)["kernels", "", "stream 20"] == 300
    assert parts(run)["idle", "", "stream 7"] == 45


def test_a_wait_for_one_stream_is_not_one_for_another_that_ended_later(tmp_path: Path) -> None:
    trace = Hosted()
    trace.launch(100, 105, 200, stream=20, name="waited_for")
    trace.launch(103, 110, 205, stream=21, name="ends_later")
    trace.operation("aten::item", 108, 220)
    trace.call("cudaStreamSynchronize", 110, 210, correlation=60)
    trace.sync("Stream Sync", 110, 195, 60, stream=20)
    trace.launch(400, 405, 40)
    run = trace.open(tmp_path)
    assert parts(run)["kernels", "", "stream 20"] == 200
    assert ("kernels", "", "stream 21") not in parts(run)
    assert run.summary.timed is not None
    (wait,) = run.summary.timed[0].host_waits
    assert (wait.operation, wait.kind, wait.num_waits, wait.wait_us) == ("aten.item", "synchronize", 1, 195)


def test_the_gpu_is_idle_from_what_the_host_waited_for_to_the_next_launch(tmp_path: Path) -> None:
    trace = Hosted()
    trace.launch(100, 105, 300)
    trace.operation("aten::item", 108, 310)
    for number, name in enumerate(("<module>", "log", "torch/_tensor.py(1200): item")):
        named = name if "(" in name else f"/job/train.py({10 * number + 1}): {name}"
        trace.events.append(event("python_function", named, 90 + number, 340 - 2 * number) | {"tid": _MAIN})
    trace.call("cudaStreamSynchronize", 110, 300)
    trace.launch(460, 465, 40)
    run = trace.open(tmp_path)
    assert run.summary.timed is not None
    (wait,) = run.summary.timed[0].host_waits
    assert (wait.operation, wait.num_waits, wait.wait_us, wait.idle_us) == ("aten.item", 1, 295, 55)
    (finding,) = [finding for finding in run.findings if finding.code == "FD203"]
    assert finding.line == wait.line == "/job/train.py:11 (log)"
