"""Traces of torch.profiler with more than its defaults: modules, shapes, memory, collectives, several steps.

The events are written by hand in the form of torch 2.11's export, `libkineto/src/output_json.cpp`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakedist.results.building import open_imported
from fakedist.traces.chrome_trace import read_chrome_trace
from fakedist.traces.one_step import StepChoice
from fakedist.traces.operation_flops import operation_flops
from tests.unit.traces.test_chrome_trace import event


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
    named = {**facts, "Process Group Description": "fsdp"}
    trace.now = 1100
    trace.kernel("c10d::_allgather_base_", "ncclDevKernel_AllGather_RING_LL(x)", us=7, stream=20, **named)
    trace.now = 1200
    trace.kernel("c10d::x", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", us=3, stream=20)
    run = open_imported(trace.write(tmp_path))
    assert run.summary.timed is not None
    rows = run.summary.timed[0].by_group
    # The product runs from 1002 to 1022, the first collective from 1012 to 1042.
    assert [(row.operation, row.time_us, row.hidden_us, row.exposed_us) for row in rows] == [
        ("_allgather_base, 7 of 8 ranks", 30, 10, 20),
        ("_allgather_base, fsdp of 8 ranks", 7, 0, 7),
        ("ncclDevKernel_SendRecv", 3, 0, 3),
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
