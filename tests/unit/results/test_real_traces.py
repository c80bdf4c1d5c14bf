"""Traces and reports of real GPUs: each figure was counted in the file itself, by other programs."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from fakedist.results.building import open_imported
from fakedist.results.run import Run
from fakedist.rundir.step_time import KernelSource, StepTime
from fakedist.traces.chrome_trace import read_chrome_trace
from fakedist.traces.one_step import StepChoice, one_step
from fakedist.traces.step_trace import NODE, OPERATION
from tests.support.real_files import real_file

V100, RTX = "v100-five-steps.pt.trace.json.gz", "rtx2080ti-resnet.pt.trace.json.gz"
BEFORE, ONE_SECOND = "h100-2gpu-before.sqlite", "h100-2gpu-1s.sqlite"


@functools.cache
def opened(name: str, device: int | None = None) -> Run:
    return open_imported(real_file(name), StepChoice(device=device))


def timed(name: str, device: int | None = None) -> tuple[StepTime, KernelSource]:
    found = opened(name, device).summary.timed
    assert found is not None
    return found


def test_five_steps_of_a_v100() -> None:
    _, source = timed(V100)
    (whole,) = source.processes
    assert (whole.num_kernels, whole.num_copies, whole.num_fills, whole.gpu) == (
        4350,
        1600,
        145,
        "Tesla V100-SXM2-32GB",
    )
    assert whole.kernel_us == pytest.approx(468_154, abs=0.5)
    assert [(row.step, round(row.range_us / 1000, 1)) for row in source.steps] == [
        (101, 35.1), (102, 72.1), (103, 95.7), (104, 95.6), (105, 95.7)
    ]  # fmt: skip
    # The host is ahead of the GPU by a step, so steps are as long as the GPU takes, which the host's ranges are not.
    assert [round(row.step_us / 1000, 1) for row in source.steps] == [101.2, 95.7, 95.6, 95.7, 95.4]
    trace = read_chrome_trace(real_file(V100))
    assert (trace.rank, trace.world_size) == (0, 1)
    ranges = trace.ranges
    made = set(ranges.sequence[(ranges.kind == OPERATION) & (ranges.sequence >= 0)].tolist())
    nodes = ranges.sequence[(ranges.kind == NODE) & (ranges.sequence >= 0)].tolist()
    assert 2 * sum(number in made for number in nodes) == 1810  # both ends of torch's own forward-backward links


def test_a_resnet_without_steps_on_an_rtx_2080_ti() -> None:
    time, source = timed(RTX)
    (whole,) = source.processes
    assert (whole.num_kernels, whole.num_copies, whole.num_fills) == (9628, 123, 362)
    assert whole.kernel_us == pytest.approx(4_103_141, abs=0.5)
    assert source.steps == []
    assert "no_steps_traced" in {note.code for note in source.notes}
    assert time.num_kernels == 9628 + 123 + 362


@pytest.mark.parametrize(("device", "us", "collective_us"), [(0, 270_876, 17_173), (1, 264_325, 8_229)])
def test_two_gpus_of_a_training_with_nccl(device: int, us: float, collective_us: float) -> None:
    time, source = timed(BEFORE, device)
    rows = {row.device: row for row in source.processes}
    assert {number: row.num_kernels for number, row in rows.items()} == {0: 1993, 1: 2017}
    row = rows[device]
    assert row.is_shown
    assert (row.kernel_us, row.collective_us) == (pytest.approx(us, abs=0.5), pytest.approx(collective_us, abs=0.5))
    (collective,) = time.by_group
    assert (collective.operation, collective.num_calls) == ("ncclDevKernel_SendRecv", 33)
    assert collective.time_us == pytest.approx(collective_us, abs=0.5)
    assert collective.hidden_us + collective.exposed_us == pytest.approx(collective.time_us)
    assert time.communication_us == pytest.approx(collective.exposed_us)
    assert time.has_real_collectives
    if device == 1:
        attention = next(row for row in time.by_family if row.family == "attention")
        assert attention.time_us == pytest.approx(136_400, abs=50)


def test_an_inference_on_two_gpus_that_copies_from_the_host() -> None:
    for device, us in ((0, 22_385), (1, 22_444)):
        time, source = timed(ONE_SECOND, device)
        row = next(row for row in source.processes if row.is_shown)
        assert (row.device, row.num_kernels, row.num_collectives) == (device, 1721, 0)
        assert row.kernel_us == pytest.approx(us, abs=0.5)
        assert time.copies_alone_us > 0.9 * time.busy_us
        assert time.by_group == []


def test_the_critical_path_is_that_of_holistic_trace_analysis() -> None:
    """HolisticTraceAnalysis 0.5.0, critical_path_analysis(annotation="ProfilerStep", instance_id=3), in microseconds.

    Its gpu_kernel_kernel_overhead begins with the first kernel, ours when the step before has ended.
    """
    time, _ = timed(V100)
    parts = Counter[str]()
    for part in time.critical_path:
        parts[part.kind] += round(part.time_us)
    assert set(parts) == {"kernels", "idle"}
    assert parts["kernels"] == pytest.approx(94_561.467, abs=3)  # gpu_compute_bound
    assert parts["idle"] == pytest.approx(1_101.806, rel=0.01)


def test_a_resnet_waits_for_its_data_loader() -> None:
    time, _ = timed(RTX)
    assert sum(part.time_us for part in time.critical_path) == pytest.approx(time.step_us)
    first = time.critical_path[0]
    assert (first.kind, first.lane) == ("host", "thread 23442")
    assert first.operation == "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    assert first.time_us > 0.5 * time.step_us


def test_the_breakdown_is_that_of_holistic_trace_analysis() -> None:
    """HolisticTraceAnalysis 0.5.0, get_temporal_breakdown and get_idle_time_breakdown, in microseconds.

    It cuts times to whole microseconds: the V100's trace was given to it with nanoseconds for microseconds, and with
    include_last_profiler_step=True.
    """
    time, _ = timed(RTX)
    assert time.busy_us - time.copies_alone_us == pytest.approx(4_103_141, rel=0.01)  # compute_time
    assert time.copies_alone_us == pytest.approx(630_681, rel=0.01)  # non_compute_time
    assert time.launch_gap_us == pytest.approx(9_777_580, rel=0.01)  # host_wait
    assert time.wait_us == pytest.approx(11_515, rel=0.01)  # kernel_wait
    _, source = timed(V100)
    assert sum(row.busy_us for row in source.steps) == pytest.approx(468_153.6 + 4_300.8, rel=0.01)
    # The host begins the first step before the GPU has anything to do, which is not counted there.
    path = real_file(V100)
    first = one_step(read_chrome_trace(path), StepChoice(step=101), path).activity.columns
    first_us = int(first["end"].max() - first["start"].min()) / 1000
    idle_us = first_us - source.steps[0].busy_us + sum(row.step_us - row.busy_us for row in source.steps[1:])
    assert idle_us == pytest.approx(7_574.8, rel=0.01)  # idle_time
