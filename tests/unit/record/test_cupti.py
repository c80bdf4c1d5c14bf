from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from fakedist.record.cupti import CuptiTracer, profiler_record
from fakedist.rundir.encoding import columns_of
from fakedist.rundir.launch_records import LAUNCH_KINDS
from fakedist.rundir.rows import LayerRow, Location
from fakedist.rundir.schema import FAMILIES, PHASES
from fakedist.rundir.time_notes import kernels_of_graphs
from fakedist.rundir.trace_records import HostCalls, HostRanges, HostRecord, HostWaits, KernelsRecord
from fakedist.traces.traced_step import LayerNumbers, Tool, host_record, kernel_record, profiler_trace

CPU, CUDA = torch._C._autograd.DeviceType.CPU, torch._C._autograd.DeviceType.CUDA
MAIN, AUTOGRAD = 100, 200
TOOL = Tool("cupti", "NVIDIA H100")
NONE = LayerRow(0, "", "", -1)


@dataclass
class Event:
    """As torch's ``_KinetoEvent``."""

    values: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        values = object.__getattribute__(self, "values")
        return lambda: values[name]


class Events(list[Any]):
    def operation(self, name: str, start: int, end: int, thread: int = MAIN, sequence: int = -1, **more: int) -> int:
        """An operation on the host; its id."""
        number = len(self) + 1
        self._add(CPU, name, start, end, thread, correlation_id=number, sequence_nr=sequence, **more)
        return number

    def kernel(self, name: str, launched: int, operation: int, node: str = "", by: str = "cudaLaunchKernel") -> None:
        """A kernel, and the call that launched it: CUPTI has a number of its own for the thread."""
        correlation = 5000 + len(self)
        call = {"correlation_id": correlation, "linked_correlation_id": operation}
        self._add(CPU, by, launched, launched + 3, 987654, **call)
        metadata = f'"queued": 0, "device": 0, "grid": [8, 4, 1], "block": [128, 1, 1]{node}'
        self._add(CUDA, name, launched + 1000, launched + 1500, 7, **call, metadata_json=metadata)

    def wait(self, name: str, at: int, until: int, stream: int, metadata: str = "") -> None:
        """Something waits, as Kineto tells it, and the call that made it wait."""
        correlation = 5000 + len(self)
        self._add(CPU, "cudaStreamWaitEvent", at, until, 987654, correlation_id=correlation)
        more = {"correlation_id": correlation, "metadata_json": f'"cuda_sync_kind": "{name}"{metadata}'}
        self._add(CUDA, name, at + 1, until, stream, **more)

    def recorded(self, at: int) -> int:
        """The host records an event; the correlation of the call."""
        correlation = 5000 + len(self)
        self._add(CPU, "cudaEventRecordWithFlags", at, at + 1, 987654, correlation_id=correlation)
        return correlation

    def _add(self, device: Any, name: str, start: int, end: int, resource: int, **more: Any) -> None:
        rest = {"flops": 0, "linked_correlation_id": 0, "sequence_nr": -1}
        rest |= {"is_user_annotation": False, "metadata_json": ""}
        made = {"device_type": device, "name": name, "start_ns": start, "duration_ns": end - start, "nbytes": 0}
        self.append(Event({**rest, **made, "device_resource_id": resource, **more}))


def training() -> Events:
    """Two layers; the second's forward runs again in its backward."""
    events = Events()
    events.operation("fakedist.step:4", 1000, 1001)
    events.operation("fakedist.phase:forward", 1002, 1003)
    for layer, start in (("blocks.0", 1100), ("blocks.1", 1500)):
        events.operation(f"fakedist.layer:{layer}", start, start + 300)
        mm = events.operation("aten::mm", start + 10, start + 90, sequence=start // 100)
        events.kernel("sm90_xmma_gemm", start + 50, mm)
    events.operation("fakedist.phase:backward", 2000, 2001)
    node = "autograd::engine::evaluate_function: MmBackward0"
    events.operation(node, 2100, 2900, AUTOGRAD, sequence=15)
    events.operation("fakedist.layer:blocks.1", 2200, 2600, AUTOGRAD)
    events.kernel("sm90_xmma_gemm", 2350, events.operation("aten::mm", 2300, 2400, AUTOGRAD, sequence=3))
    events.kernel("sm90_xmma_gemm", 2750, events.operation("aten::mm", 2700, 2800, AUTOGRAD))
    events.operation("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 2950, 3100, AUTOGRAD)
    events.operation("fakedist.call:9", 2960, 2961, AUTOGRAD)
    events.operation("fakedist::all_reduce", 2970, 3090, AUTOGRAD)
    events.kernel("vectorized_elementwise_kernel", 3000, events.operation("aten::mul_", 2980, 3050, AUTOGRAD))
    events.operation(node, 3200, 3400, AUTOGRAD, sequence=11)
    events.kernel("sm90_xmma_gemm", 3300, events.operation("aten::mm", 3250, 3350, AUTOGRAD))
    events.operation("fakedist.phase:optimizer", 4000, 4001)
    step = events.operation("Optimizer.step#AdamW.step", 4100, 4900)
    events.kernel("multi_tensor_apply_kernel", 4500, step)
    events._add(CUDA, "Optimizer.step#AdamW.step", 5400, 6100, 7, is_user_annotation=True, correlation_id=1)
    return events


def rows(events: Events) -> list[tuple[Any, ...]]:
    """Kernels: family, layer, phase, recompute, operation, call."""
    layers = LayerNumbers([NONE, LayerRow(1, "blocks.0", "Block", 0), LayerRow(2, "blocks.1", "Block", 0)])
    made = kernel_record(profiler_trace(profiler_record(events, "NVIDIA H100")), layers, TOOL)
    columns = {
        name: np.frombuffer(getattr(made, name), code).tolist() for name, code in columns_of(KernelsRecord).items()
    }
    return [
        (FAMILIES[family], layers.rows[layer].name, PHASES[phase], bool(recompute), made.texts[operation], call)
        for family, layer, phase, recompute, operation, call in zip(
            *(columns[name] for name in ("family", "layer", "phase", "recompute", "operation", "call")), strict=True
        )
    ]


def test_every_kernel_has_its_layer_phase_operation_and_collective() -> None:
    assert rows(training()) == [
        ("gemm", "blocks.0", "forward", False, "aten.mm", -1),
        ("gemm", "blocks.1", "forward", False, "aten.mm", -1),
        ("gemm", "blocks.1", "backward", True, "aten.mm", -1),
        ("gemm", "blocks.1", "backward", False, "aten.mm", -1),
        ("communication", "blocks.1", "backward", False, "aten.mul_", 9),
        ("gemm", "blocks.0", "backward", False, "aten.mm", -1),
        ("optimizer", "", "optimizer", False, "", -1),
    ]


def test_times_grid_and_stream_are_cuptis() -> None:
    layers = LayerNumbers([NONE])
    made = kernel_record(profiler_trace(profiler_record(training(), "")), layers, TOOL)
    first = {name: np.frombuffer(getattr(made, name), code)[0] for name, code in columns_of(KernelsRecord).items()}
    assert (first["launch_us"], first["start_us"], first["duration_us"]) == (0.15, 1.15, 0.5)
    assert (made.texts[first["grid"]], made.texts[first["block"]]) == ("8,4,1", "128,1,1")
    assert (first["stream"], first["step"], made.source.step) == (7, 4, 4)
    assert made.source.step_us == pytest.approx((4500 + 1500 - 1000) / 1000)


def test_the_operations_of_a_product_are_its_kernels_by_their_time() -> None:
    events = Events()
    events.operation("fakedist.step:4", 1000, 1001)
    product = events.operation("aten::mm", 1100, 1200, flops=3000)
    events.kernel("sm90_xmma_gemm_splitk", 1110, product)
    events.kernel("splitKreduce_kernel", 1120, product)
    events[-1].values["duration_ns"] = 250  # the other takes 500
    events.kernel("Memset (Device)", 1130, product)
    events.kernel("vectorized_elementwise_kernel", 1350, events.operation("aten::relu", 1300, 1400))
    made = kernel_record(profiler_trace(profiler_record(events, "")), LayerNumbers([NONE]), TOOL)
    flops = np.frombuffer(made.flops, "<f8")
    assert flops[:2].tolist() == [2000.0, 1000.0]
    assert np.isnan(flops[2:]).all()


@pytest.mark.parametrize("how", [{"node": ', "graph node id": 12'}, {"by": "cudaGraphLaunch"}])
def test_kernels_of_a_cuda_graph_are_counted_in_a_note(how: dict[str, str]) -> None:
    events = training()
    events.kernel("in_graph", 1150, 4, **how)
    made = kernel_record(profiler_trace(profiler_record(events, "")), LayerNumbers([NONE]), TOOL)
    assert kernels_of_graphs(1) in made.source.notes


@pytest.mark.parametrize("name", ["__cudaLaunchKernel", "INVALID", "cuLaunchKernelEx"])
def test_a_call_is_no_operation_whatever_torch_calls_it(name: str) -> None:
    events = Events()
    events.operation("fakedist.step:4", 1000, 1001)
    product = events.operation("aten::mm", 1100, 1200)
    events.kernel("sm90_xmma_gemm", 1150, product, by=name)
    made = profiler_record(events, "")
    assert [len(table.start) // 8 for table in (made.operations, made.calls, made.activity)] == [2, 1, 1]


def test_the_backward_of_a_scripts_own_function_is_of_the_layer_that_called_it() -> None:
    """Transformer Engine's, Megatron's, make_graphed_callables': torch calls them as their class."""
    events = Events()
    events.operation("fakedist.step:4", 1000, 1001)
    events.operation("fakedist.layer:blocks.1", 1100, 1400)
    function = events.operation("_LayerNormLinear", 1110, 1390, sequence=21)
    events.kernel("rmsnorm_fwd", 1150, function)
    events.operation("of the script", 1410, 1490)  # a range of its own is none
    events.kernel("in_range", 1450, events.operation("aten::mul", 1440, 1460))
    node = "autograd::engine::evaluate_function: _LayerNormLinearBackward"
    events.kernel("rmsnorm_bwd", 2150, events.operation(node, 2100, 2900, AUTOGRAD, sequence=21))
    assert [(layer, phase, operation) for _, layer, phase, _, operation, _ in rows(events)] == [
        ("blocks.1", "other", "_LayerNormLinear"),
        ("", "other", "aten.mul"),
        ("blocks.1", "backward", "_LayerNormLinearBackward"),
    ]


def waits_of(events: Events, *, has_events: bool = True) -> HostRecord:
    return host_record(profiler_trace(profiler_record(events, "", has_events=has_events)))


def test_what_waits_for_an_event_waits_for_the_last_record_before_it() -> None:
    events = training()
    record = events.recorded(1200)
    metadata = f', "wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": {record}, "wait_on_cuda_event_id": 3'
    events.wait("Stream Wait Event", 1300, 1301, 13, metadata)
    events.wait("Stream Wait Event", 1400, 1401, 13, metadata.replace(str(record), "-1"))
    events.wait("Event Sync", 1500, 1600, -1, metadata)
    events.wait("Stream Sync", 1700, 1800, 13)
    events.wait("Context Sync", 1900, 1950, -1)
    made = waits_of(events)
    columns = {name: np.frombuffer(getattr(made.waits, name), code) for name, code in columns_of(HostWaits).items()}
    assert [LAUNCH_KINDS[kind] for kind in columns["what"]] == [
        "stream_records", "stream_waits", "stream_waits", "host_waits", "host_waits", "host_waits_for_device",
    ]  # fmt: skip
    assert columns["stream"].tolist()[:3] == [7, 13, 13]
    lost = columns["event"].tolist()[2]
    assert columns["event"].tolist() == [record, record, lost, record, 0, 0]
    assert lost not in (0, record), "an event from before the step is none that the step records"
    assert columns["at_us"].tolist() == [0.2, 0.3, 0.4, 0.5, 0.7, 0.9]
    assert columns["until_us"].tolist()[3:] == [0.6, 0.8, 0.95]
    assert made.has_events
    assert not waits_of(training(), has_events=False).has_events


def test_calls_and_ranges_are_where_their_marks_are() -> None:
    events = training()
    events.operation("fakedist.range:0:train: all", 1050, 1051)
    events.operation("fakedist.range:1:never ends", 1250, 1251, AUTOGRAD)
    events.operation("fakedist.range_end:0", 1800, 1801)
    made = waits_of(events)
    calls = {name: np.frombuffer(getattr(made.calls, name), code) for name, code in columns_of(HostCalls).items()}
    assert (calls["call"].tolist(), calls["at_us"].tolist()) == ([9], [1.96])
    ranges = {name: np.frombuffer(getattr(made.ranges, name), code) for name, code in columns_of(HostRanges).items()}
    assert [made.texts[name] for name in ranges["name"]] == ["train: all", "never ends"]
    assert ranges["begin_us"].tolist() == [0.05, 0.25]
    assert ranges["end_us"].tolist() == [0.8, 3.9]
    assert ranges["thread"].tolist() == [0, 1]
    assert len(rows(events)) == len(rows(training())), "marks are neither operations nor layers"


def test_a_profile_without_a_kernel_is_an_empty_table() -> None:
    events = Events()
    events.operation("fakedist.step:4", 1000, 1001)
    assert rows(events) == []


def test_torchs_own_events_are_understood() -> None:
    """Of the host alone: what torch calls nodes, operations and our ranges, and how it numbers them."""
    weight = torch.ones(4, 4, requires_grad=True)
    tracer = CuptiTracer()
    event = torch._C._profiler._RecordFunctionFast
    host_alone = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=host_alone, acc_events=True, with_flops=True) as profile:
        tracer._mark("fakedist.step:4")
        tracer.location(Location(4, "forward", 0, recompute=False))
        with event("fakedist.layer:blocks.1"):
            result = torch.mm(torch.ones(4, 4), weight)
        tracer.location(Location(4, "backward", 0, recompute=False))
        result.sum().backward()
    host = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = Events(host)
    first = next(event for event in host if event.name() == "aten::mm")
    inside = [event for event in host if event.name() == "aten::mm" and event.start_ns() > first.end_ns()]
    assert inside
    assert first.flops() == 2 * 4 * 4 * 4
    for event in (first, *inside):
        events.kernel("sm90_xmma_gemm", event.start_ns() + 1, event.correlation_id())
    made = rows(events)
    assert [row[:4] for row in made] == [
        ("gemm", "blocks.1", "forward", False),
        *[("gemm", "blocks.1", "backward", False)] * len(inside),
    ]
