"""Chrome traces of torch.profiler: old and new spellings, several processes, and what is damaged.

Traces of torch.profiler with more than its defaults: modules, shapes, memory, collectives, several steps.

The events are written by hand in the form of torch 2.11's export, `libkineto/src/output_json.cpp`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakedist.errors import ReportError
from fakedist.results.building import open_imported
from fakedist.traces.chrome_trace import operation_flops, read_chrome_trace
from fakedist.traces.one_step import StepChoice

NEW = {"kernel": "kernel", "copy": "gpu_memcpy", "call": "cuda_runtime", "operation": "cpu_op", "id": "External id"}
OLD = {"kernel": "Kernel", "copy": "Memcpy", "call": "Runtime", "operation": "Operator", "id": "external id"}


def event(category: str, name: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    places = {"pid": more.pop("pid", 100), "tid": more.pop("tid", 1)}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": more, **places}


_COPIED = "Memcpy DtoD (Device -> Device)"
ROCM = NEW | {"copied": "CopyDeviceToDevice"}


def process(pid: int, device: int, words: dict[str, str] = NEW, start: float = 1000.0) -> list[dict[str, Any]]:
    """A product and a copy, launched inside of operations."""
    link = {words["id"]: 11}
    return [
        event(words["operation"], "aten::linear", start, 60, pid=pid, **{words["id"]: 10}),
        event(words["operation"], "aten::mm", start + 10, 40, pid=pid, **link,
              **{"Input Dims": [[8, 4], [4, 2], 7, [1], [5, 5]], "Sequence number": 0}),
        event(words["call"], "cudaLaunchKernel", start + 20, 5, pid=pid, correlation=7, **link),
        event(words["kernel"], "nvjet", start + 90, 12.5, pid=device, tid=7, device=device, stream=7, correlation=7,
              grid=[4, 2, 1], block=[128, 1, 1], **link),
        event(words["call"], "cudaMemcpyAsync", start + 70, 5, pid=pid, correlation=8),
        event(words["copy"], words.get("copied", _COPIED), start + 110, 3, pid=device, tid=7, device=device,
              stream=7, correlation=8, bytes=64),
    ]  # fmt: skip


def write(path: Path, events: list[Any], **header: Any) -> Path:
    form: dict[str, Any] = {"separators": (",", ":")} if header else {"indent": 1}
    path.write_text(json.dumps({**header, "traceEvents": events}, **form))
    return path


@pytest.mark.parametrize("words", [NEW, OLD, ROCM], ids=["new", "old", "ROCm"])
def test_kernels_have_their_times_launches_and_operations(tmp_path: Path, words: dict[str, str]) -> None:
    devices = [{"id": 0, "name": "NVIDIA A100"}, {"id": 1, "name": "NVIDIA H200"}]
    path = write(
        tmp_path / "t.json", process(100, 1, words), deviceProperties=devices, distributedInfo={"rank": 3},
        cuda_driver_version=13020,
    )  # fmt: skip
    trace = read_chrome_trace(path)
    assert (trace.gpu, trace.rank, trace.driver) == ("NVIDIA H200", 3, "CUDA 13.2")
    assert (trace.tool, trace.num_elsewhere, trace.num_unreadable) == ("torch.profiler", 0, 0)
    activity = trace.activity
    assert [activity.names[each] for each in activity.name] == [
        "nvjet", _COPIED if words is not ROCM else "Memcpy CopyDeviceToDevice"
    ]  # fmt: skip
    assert (activity.columns["end"] - activity.columns["start"]).tolist() == [12_500, 3_000]
    assert trace.launch.tolist() == [1_020_000, 1_070_000]
    assert [activity.shapes[each] for each in activity.shape] == [("4,2,1", "128,1,1"), ("", "")]
    columns = {name: activity.columns[name].tolist() for name in ("bytes", "correlation", "stream", "node")}
    assert columns == {"bytes": [-1, 128], "correlation": [7, 8], "stream": [7, 7], "node": [0, 0]}
    assert (trace.ranges.sequence.tolist(), trace.linked.tolist()) == ([-1, 0], [1, -1])
    assert trace.made_in.tolist() == trace.made_at.tolist() == [-1, -1]
    innermost, chains, chain = trace.operations()
    assert [chains[each] for each in chain] == [("aten::mm", "aten::linear"), ()]
    compressed = tmp_path / "t.json.gz"
    compressed.write_bytes(gzip.compress(json.dumps(process(100, 0, words)).encode()))  # a list is a trace too
    bare = read_chrome_trace(compressed)
    assert (len(bare.activity), bare.gpu, bare.rank, bare.driver) == (2, "", -1, "")
    if words is NEW:
        assert trace.shapes[trace.inputs[innermost[0]]] == ((8, 4), (4, 2), (1,))


@pytest.mark.parametrize(
    ("header", "gpu", "driver"),
    [
        ({"deviceProperties": [{"id": 5, "name": "the only one"}]}, "the only one", ""),
        ({"deviceProperties": [{"id": 0, "name": "first"}, {"id": 1, "name": "second"}]}, "first", ""),
        ({"deviceProperties": [7, {"id": 0}], "cuda_driver_version": 12000}, "", "CUDA 12.0"),
        ({"cuda_driver_version": 12090, "distributedInfo": {"rank": "3"}}, "", "CUDA 12.9"),
    ],
)
def test_the_header_names_the_gpu_and_the_driver(tmp_path: Path, header: dict[str, Any], gpu: str, driver: str) -> None:
    trace = read_chrome_trace(write(tmp_path / "t.json", process(100, 0), **header))
    assert (trace.gpu, trace.driver, trace.rank) == (gpu, driver, -1)


def test_among_processes_with_the_same_correlations_the_closest_earlier_launch_counts(tmp_path: Path) -> None:
    """One GPU's kernels; three processes with calls of its numbers: long before, just before, and after."""
    calls = [event("cuda_runtime", "call", start, 1, pid=pid, correlation=number)
             for pid, start in ((300, 100), (100, 1_000), (200, 9_000)) for number in (7, 8)]  # fmt: skip
    kernels = [event("kernel", "k", 2_000 + number, 1, pid=0, device=0, correlation=number) for number in (7, 8)]
    assert read_chrome_trace(write(tmp_path / "t.json", calls + kernels)).launch.tolist() == [1_000_000] * 2
    late = [each for each in calls if each["pid"] != 200]
    with pytest.raises(ReportError, match="no kernels of process 300") as raised:
        read_chrome_trace(write(tmp_path / "t.json", late + kernels), StepChoice(process=300))
    assert raised.value.hint == "it has those of 100"  # the process whose kernels they are


def test_of_several_ranks_each_kernel_belongs_to_the_process_that_launched_it(tmp_path: Path) -> None:
    """The correlations of two processes are the same numbers."""
    second = process(200, 1, start=5000.0)
    path = write(tmp_path / "t.json", process(100, 0) + second + second[2:4], deviceProperties="?")
    trace = read_chrome_trace(path, StepChoice(process=100))
    assert trace.launch.tolist() == [1_020_000, 1_070_000]
    assert trace.num_elsewhere == 3
    assert read_chrome_trace(path, StepChoice(process=200)).launch.min() == 5_020_000
    assert read_chrome_trace(path).launch.min() == 5_020_000  # it has most kernels
    with pytest.raises(ReportError, match="no kernels of process 300"):
        read_chrome_trace(path, StepChoice(process=300))


def test_a_kernel_without_its_call_is_launched_with_its_operation(tmp_path: Path) -> None:
    events = [each for each in process(100, 0)[1:] if each["cat"] != "cuda_runtime"]
    trace = read_chrome_trace(write(tmp_path / "t.json", events))
    assert dict(zip(trace.launch.tolist(), trace.thread.tolist(), strict=True)) == {1_010_000: 0, 1_110_000: -1}


def test_damaged_events_are_left_out_and_counted(tmp_path: Path) -> None:
    damaged: list[Any] = [
        7, None, {"ph": "X", "cat": "kernel"}, event("kernel", "k", 1e300, 2), event("kernel", "k", 3, -2),
        event("kernel", "k", 1, 2, stream=1 << 70), {**event("kernel", "k", 1, 2), "name": 3}, {"cat": ["x"]},
        {**event("cpu_op", "aten::mm", 1, 2), "pid": ["unhashable"]}, event("kernel", "k", float("nan"), 1),
    ]  # fmt: skip
    trace = read_chrome_trace(write(tmp_path / "t.json", process(100, 0) + damaged))
    assert len(trace.activity) == 2
    assert trace.num_unreadable == 9


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a Chrome trace"),
        (b"hello", "is not a Chrome trace"),
        (b"{}", "it has no events"),
        (b'{"traceEvents": []}', "it has no events"),
        (b'{"traceEvents": [{"ph": "X", "ts"', "is damaged or cut off after 0 events"),
        (b'{"traceEvents": [{}, {}, {"a', "is damaged or cut off after 2 events"),
        (b'{"traceEvents": [{} {}]}', "is damaged or cut off after 1 events"),
        (b'{"traceEvents": [{}] "a": 1}', "is damaged or cut off after 1 events"),
        (b'{"traceEvents": [{"a": ' + b"9" * 5000 + b"}]}", "is damaged or cut off"),
        (b'{"traceEvents": ' + b"[" * 100_000, "is damaged or cut off"),
        (b'{"traceEvents": [{"ph": "X"}]}', "has no kernels"),
        (b"\x1f\x8bgarbage", "is damaged or cut off"),
        (gzip.compress(b'{"traceEvents": [{}]}' * 99, mtime=0)[:40], "is damaged or cut off"),
        (bytes(range(256)) * 9, "is not a Chrome trace"),
        (b'{"schemaVersion": 1, "traceEvents": 3}', "it has no events"),
    ],
)
def test_what_is_no_trace_is_told_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ReportError) as caught:
        read_chrome_trace(path)
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    with pytest.raises(ReportError, match="cannot be read: No such file"):
        read_chrome_trace(tmp_path / "none.json")


def _two_ranks(merged: Callable[[int, Any], object]) -> list[dict[str, Any]]:
    """Two ranks that launch at the same times, with the same correlations, in one trace."""
    return [{**row, "pid": merged(rank, row["pid"])} for rank in (0, 1) for row in _launches(30)]


def _launches(count: int) -> list[dict[str, Any]]:
    rows = []
    for number in range(1, count + 1):
        at = 10.0 * number
        rows.append(event("cuda_runtime", "cudaLaunchKernel", at, 2, correlation=number))
        where = {"pid": 0, "tid": 7, "device": 0, "stream": 7, "correlation": number}
        rows.append(event("kernel", "k", at + 3, 5, **where))
    return rows


@pytest.mark.parametrize(
    "merged",
    [lambda rank, pid: pid + 1_000_000 * rank, lambda rank, pid: f"rank {rank}: {pid}"],
    ids=["numbers", "texts"],
)
def test_ranks_in_a_merged_trace_are_told_apart(merged: Callable[[int, Any], object], tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(_two_ranks(merged)))
    rows = read_chrome_trace(path).processes
    assert [row.num_kernels for row in rows] == [30, 30]
    assert len({row.process for row in rows}) == 2
    second = read_chrome_trace(path, StepChoice(process=rows[1].process))
    assert [row.process for row in second.processes if row.is_shown] == [rows[1].process]


@pytest.mark.parametrize("packed", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_trace_of_a_killed_job_is_read_until_where_it_ends(packed: Callable[[bytes], bytes], tmp_path: Path) -> None:
    whole = json.dumps({"traceEvents": _launches(3000)}).encode()
    path = tmp_path / "t.json"
    content = packed(whole)
    path.write_bytes(content[: -len(content) // 4])
    trace = read_chrome_trace(path)
    assert 0 < len(trace.activity) < 3000
    assert trace.cut_off_after > 0
    timed = open_imported(path).summary.timed
    assert timed is not None
    assert "trace_cut_off" in [note.code for note in timed[1].notes]
    path.write_bytes(whole[:20_000] + b"#" + whole[20_001:])
    with pytest.raises(ReportError, match="damaged or cut off after"):
        read_chrome_trace(path)


class Written:
    """A trace that grows: the host runs operations, each of which launches a kernel at once."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now, self.correlation = 1000.0, 0

    def frame(self, name: str, start: float, end: float) -> None:
        self.events.append(event("python_function", name, start, end - start, **{"Python id": len(self.events)}))

    def kernel(
        self, operation: str, kernel: str = "k", us: float = 5, delay: float = 2, stream: int = 7, **more: Any
    ) -> float:
        """Returns when the kernel ends."""
        start = self.now
        self.correlation += 1
        inside = more.pop("inside", {})
        self.events.append(event("cpu_op", operation, start, 8, **{"External id": self.correlation, **inside}))
        self.events.append(event("cuda_runtime", "cudaLaunchKernel", start + 1, 2, correlation=self.correlation))
        self.events.append(event("kernel", kernel, start + delay, us, pid=0, tid=stream, device=0, stream=stream,
                                 correlation=self.correlation, **more))  # fmt: skip
        self.now += 10
        return start + delay + us

    def write(self, folder: Path, **header: Any) -> Path:
        path = folder / "t.json"
        path.write_text(json.dumps({**header, "traceEvents": self.events}))
        return path


def test_modules_of_python_stacks_are_layers_numbered_within_their_parents(tmp_path: Path) -> None:
    trace = Written()
    begin = trace.now
    for block, first in ((0, 10), (1, 12)):
        at = trace.now
        for linear in (first, first + 1):
            inner = trace.now
            trace.kernel("aten::mm")
            trace.frame(f"nn.Module: Linear_{linear}", inner - 1, trace.now - 1)
        trace.frame(f"nn.Module: Block_{block}", at - 2, trace.now - 0.5)
    trace.frame("nn.Module: GPT_0", begin - 3, trace.now)
    trace.frame("train.py(3): main", begin - 4, trace.now + 1)
    run = open_imported(trace.write(tmp_path))
    layers = run.table("layers")["name"]
    assert [layers[row] for row in run.table("kernels")["layer"]] == [
        "GPT.Block.0.Linear.0", "GPT.Block.0.Linear.1", "GPT.Block.1.Linear.0", "GPT.Block.1.Linear.1"
    ]  # fmt: skip


def test_a_step_begins_when_the_gpu_is_done_with_what_was_launched_before(tmp_path: Path) -> None:
    """The host runs ahead: at the begin of its step 2, the GPU has half of step 1 to do."""
    trace = Written()
    for number, start in ((1, 1000.0), (2, 1020.0), (3, 1040.0)):
        trace.now = start
        trace.kernel("aten::mm", us=60, delay=(number - 1) * 60 - (number - 1) * 20 + 2)
        trace.events.append(event("user_annotation", f"ProfilerStep#{number}", start, 18))
    run = open_imported(trace.write(tmp_path), StepChoice(step=2))
    assert run.summary.timed is not None
    time, source = run.summary.timed
    assert (source.step, time.step_us, time.busy_us, time.launch_gap_us) == (2, 60, 60, 0)
    assert [(row.step, row.range_us, row.step_us, row.is_shown) for row in source.steps] == [
        (1, 18, 62, False), (2, 18, 60, True), (3, 18, 60, False)
    ]  # fmt: skip


def test_collectives_are_named_by_their_group_and_their_exposed_time_is_measured(tmp_path: Path) -> None:
    trace = Written()
    trace.kernel("aten::mm", us=20)
    facts = {"Collective name": "_allgather_base", "Process Group Name": "7", "Group size": 8}
    trace.kernel("c10d::_allgather_base_", "ncclDevKernel_AllGather_RING_LL(x)", us=30, stream=20, **facts)
    named = {**facts, "Process Group Description": "fsdp", "In msg nelems": 100, "Out msg nelems": 800}
    trace.now = 1100
    for us, dtype in ((4, "BFloat16"), (3, "Float8_e4m3fn")):
        trace.kernel(
            "c10d::_allgather_base_", "ncclDevKernel_AllGather_RING_LL(x)", us=us, stream=20, **named, dtype=dtype
        )
    trace.now = 1200
    trace.kernel("c10d::x", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", us=3, stream=20)
    run = open_imported(trace.write(tmp_path))
    assert run.summary.timed is not None
    rows = run.summary.timed[0].by_group
    # The product runs from 1002 to 1022, the first collective from 1012 to 1042.
    assert [(row.operation, row.moved_bytes, row.time_us, row.hidden_us, row.exposed_us) for row in rows] == [
        ("_allgather_base, 7 of 8 ranks", 0, 30, 10, 20),
        ("_allgather_base, fsdp of 8 ranks", 800 * 2 + 800, 7, 0, 7),
        ("ncclDevKernel_SendRecv", 0, 3, 0, 3),
    ]
    assert run.summary.timed[0].communication_us == 30


def test_the_peak_of_traced_memory_is_noted_and_the_events_of_other_devices_are_left_out(tmp_path: Path) -> None:
    trace = Written()
    trace.kernel("aten::mm")
    for kind, device, allocated in ((1, 0, 3 << 30), (1, 0, 1 << 30), (1, 1, 5 << 30), (0, -1, 9 << 30)):
        facts = {"Device Type": kind, "Device Id": device, "Addr": -5, "Bytes": 512, "Total Allocated": allocated}
        moment = {"Total Reserved": 4 << 30}
        trace.events.append({**event("cpu_instant_event", "[memory]", 1, 0, **facts, **moment), "ph": "i"})
    run = open_imported(trace.write(tmp_path))
    assert run.summary.timed is not None
    (said,) = [note.text for note in run.summary.timed[1].notes if note.code == "memory_traced"]
    assert "3.00 GiB allocated and 4.00 GiB reserved in the whole file" in said


def counted(name: str, dims: list[Any], values: list[str] | None = None) -> int:
    return operation_flops(name, {"Input Dims": dims, **({} if values is None else {"Concrete Inputs": values})})


@pytest.mark.parametrize(
    ("name", "dims", "values", "flops"),
    [
        ("aten::mm", [[8, 4], [4, 2]], None, 2 * 8 * 4 * 2),
        ("aten::addmm", [[2], [8, 4], [4, 2], [], []], None, 128),
        ("aten::bmm", [[3, 8, 4], [3, 4, 2]], None, 384),
        ("aten::linear", [[8, 4], [2, 4]], None, 0),  # the product that it calls counts
        (
            "aten::cudnn_convolution",
            [[2, 3, 9, 9], [5, 3, 3, 3], [], [], [], [], [], [], []],
            ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1", "False", "False", "True"],
            2 * 2 * 25 * 5 * 27,
        ),
        ("aten::cudnn_convolution", [[2, 3, 9, 9], [5, 3, 3, 3]], None, 0),
        (
            "aten::convolution_backward",
            [[2, 5, 5, 5], [2, 3, 9, 9], [5, 3, 3, 3]],
            ["", "", "", "[0]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[False, True, False]"],
            2 * 2 * 25 * 5 * 27,
        ),
        (
            "aten::_flash_attention_forward",
            [[2, 16, 4, 8]] * 3,
            [""] * 7 + ["0.", "False"],
            2 * 2 * 4 * 16 * 16 * 16,
        ),
        ("aten::_flash_attention_forward", [[2, 16, 4, 8]] * 3, [""] * 7 + ["0.", "True"], 2 * 2 * 4 * 16 * 17 * 8),
        ("aten::_flash_attention_forward", [[2, 16, 4, 8]] * 3, None, 0),
        ("aten::mm", [[8, "x"], [4, 2]], None, 0),
        ("aten::mm", [[-8, 4], [4, 2]], None, 0),
        ("aten::mm", [], None, 0),
    ],
)
def test_operations_have_the_flops_that_the_trace_tells(
    name: str, dims: list[Any], values: list[str] | None, flops: int
) -> None:
    assert counted(name, dims, values) == flops


def test_products_of_a_trace_with_shapes_have_rates(tmp_path: Path) -> None:
    trace = Written()
    trace.kernel("aten::mm", "nvjet_x", us=4, inside={"Input Dims": [[1000, 1000], [1000, 1000]]})
    trace.kernel("aten::add", "vectorized_elementwise_kernel", us=4, inside={"Input Dims": [[1000], [1000]]})
    flops = open_imported(trace.write(tmp_path)).table("kernels")["flops"].to_numpy()
    assert flops[0] == 2e9
    assert np.isnan(flops[1])


def test_world_and_rank_are_those_of_the_header(tmp_path: Path) -> None:
    trace = Written()
    trace.kernel("aten::mm")
    read = read_chrome_trace(trace.write(tmp_path, distributedInfo={"rank": 3, "world_size": 64}))
    assert (read.rank, read.world_size) == (3, 64)
