"""The place of a launch, from ranges made by hand; times are numbers, rows are numbered from the top."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.analysis.launches import kernel_table, traced_tables
from fakedist.rundir.encoding import Columns
from fakedist.rundir.launch_records import LAUNCH_KINDS
from fakedist.rundir.records import NoteRecord
from fakedist.rundir.trace_records import (
    KernelsRecord,
    ProfilerRecord,
    TracedActivity,
    TracedCalls,
    TracedOperations,
    TracedWaits,
)
from fakedist.traces.step_trace import CALL, LAYER, NODE, OPERATION, PHASE, Meaning, Ranges
from fakedist.traces.traced_step import LaunchSites, LayerNumbers, launch_sites, profiler_trace, traced_records
from tests.unit.analysis.recorded import HandMade

MAIN, AUTOGRAD, WORKER = 1, 2, 3
ROWS = [
    # meaning, thread, start, end, autograd's sequence number
    (Meaning(OPERATION, "fakedist::all_reduce"), MAIN, 60, 70, -1),  # row 0: the order of rows says nothing
    (Meaning(CALL, number=5), MAIN, 59, 59, -1),
    (Meaning(LAYER, "mlp", "forward"), MAIN, 10, 50, -1),
    (Meaning(LAYER, "mlp.up", "forward"), MAIN, 20, 30, -1),
    (Meaning(OPERATION, "aten.mm"), MAIN, 22, 26, 0),
    (Meaning(NODE, "MmBackward0"), AUTOGRAD, 80, 90, 0),
    (Meaning(OPERATION, "aten.mm"), AUTOGRAD, 84, 88, 9),
    (Meaning(LAYER, "mlp.up", "forward"), AUTOGRAD, 83, 89, -1),
    (Meaning(NODE, "AddBackward0"), AUTOGRAD, 92, 95, 8),
    (Meaning(PHASE, phase="optimizer"), MAIN, 100, 120, -1),
    (Meaning(NODE, "torch::autograd::AccumulateGrad"), AUTOGRAD, 91, 91, -1),
    (Meaning(OPERATION, "aten.view"), MAIN, 11, 12, 0),  # makes no node: the last of a number does
]


def sites(*launches: tuple[int, int]) -> LaunchSites:
    """Where launches are, each given by thread and time."""
    meanings, thread, start, end, sequence = (list(column) for column in zip(*ROWS, strict=True))
    numbers = [np.array(column, np.int64) for column in (thread, start, end, sequence)]
    ranges = Ranges(meanings, np.arange(len(ROWS), dtype=np.int32), *numbers)
    at = np.array(launches, np.int64)
    return launch_sites(ranges, at[:, 0], at[:, 1])


def test_a_launch_belongs_to_the_innermost_layer_operation_and_phase_of_its_thread() -> None:
    found = sites((MAIN, 24), (MAIN, 28), (MAIN, 40), (MAIN, 55))
    assert found.layer.tolist() == [3, 3, 2, -1]
    assert found.operation.tolist() == [4, -1, -1, -1]
    assert not found.in_node.any()
    found = sites((-1, 24))
    assert (found.layer.tolist(), found.operation.tolist(), found.call.tolist()) == ([-1], [-1], [-1])
    assert sites((MAIN, 24), (MAIN, 40), (MAIN, 110), (WORKER, 110)).phase.tolist() == [3, 2, 9, 9]


def test_a_launch_of_a_collective_has_the_number_of_the_mark_before_it() -> None:
    found = sites((MAIN, 24), (MAIN, 65), (MAIN, 75))
    assert found.call.tolist() == [-1, 5, -1]
    assert found.in_collective.tolist() == [False, True, False]


def test_a_node_belongs_to_the_layer_of_the_forward_operation_with_its_number_or_to_its_own_forward() -> None:
    found = sites((AUTOGRAD, 82), (AUTOGRAD, 93))
    assert found.layer.tolist()[0] == 3
    assert found.operation.tolist() == [5, 8]
    assert found.in_node.tolist() == [True, True]
    assert found.recompute.tolist() == [False, False]
    assert found.unknown.tolist() == [False, True]  # no forward operation has the number 8
    found = sites((AUTOGRAD, 91))  # the gradient is of the layer whose node ran before
    assert (found.layer.tolist(), found.operation.tolist(), found.unknown.tolist()) == ([3], [10], [False])
    found = sites((AUTOGRAD, 85))
    assert (found.layer.tolist(), found.operation.tolist(), found.recompute.tolist()) == ([7], [6], [True])


@pytest.mark.parametrize(("time", "layer"), [(5, -1), (25, 3), (55, -1)])
def test_a_thread_without_layers_launches_for_the_layer_that_runs(time: int, layer: int) -> None:
    found = sites((MAIN, 24), (MAIN, 25), (WORKER, time))
    assert found.layer.tolist() == [3, 3, layer]


#: Torch's operations and ranges on the main thread: start, end, autograd's sequence number, flops, text.
OPERATIONS = [
    (3_000, 5_000, 7, 800, "aten::mm"),
    (500, 20_000, -1, 0, "step 3"),  # the script's own, of which fakedist's are the better ones
    (1_000, 1_000, -1, 0, "fakedist.step:4"),
    (1_000, 1_000, -1, 0, "fakedist.phase:forward"),
    (2_000, 9_000, -1, 0, "fakedist.layer:up"),
    (9_500, 9_500, -1, 0, "fakedist.phase:backward"),
    (10_000, 10_000, -1, 0, "fakedist.range:0:mine"),
    (10_500, 10_500, -1, 0, "fakedist.call:5"),
    (11_000, 11_900, -1, 0, "fakedist::all_reduce"),
    (12_500, 12_500, -1, 0, "fakedist.range_end:0"),
    (13_000, 13_000, -1, 0, "fakedist.range:1:endless"),
]
MM, REDUCE, CUPTI = 1, 9, 99
#: Correlation, start, operation, CUPTI's thread.
CALLS = [(21, 3_500, MM, CUPTI), (22, 4_000, MM, CUPTI), (23, 11_500, REDUCE, CUPTI), (24, 6_000, 0, CUPTI)]
CALLS += [(25, 6_500, 0, CUPTI), (26, 14_500, 0, CUPTI)]
#: Start, end, stream, correlation, operation, bytes, node, name, grid, block.
ACTIVITY = [
    (12_000, 14_000, 9, 23, REDUCE, 64, 0, "Memcpy DtoD", "", ""),
    (5_000, 8_000, 7, 21, MM, -1, 0, "gemm_kernel", "2,1,1", "128,1,1"),
    (8_000, 9_000, 7, 22, MM, -1, 0, "gemm_kernel", "1,1,1", "128,1,1"),
    (15_000, 15_500, 7, 77, 0, -1, 0, "orphan", "1,1,1", "64,1,1"),
    (16_000, 16_500, 7, 26, 0, -1, 0, "late", "1,1,1", "64,1,1"),
]


def profiled(**more: Any) -> ProfilerRecord:
    texts: dict[str, int] = {}
    operations, calls, activity = Columns(TracedOperations), Columns(TracedCalls), Columns(TracedActivity)
    for number, (start, end, sequence, flops, text) in enumerate(OPERATIONS, start=1):
        code = texts.setdefault(text, len(texts))
        operations.extend([(number, start, end, MAIN, sequence, flops, code)])
    calls.extend(CALLS)
    for *numbers, name, grid, block in ACTIVITY:
        activity.extend([(*numbers, *(texts.setdefault(text, len(texts)) for text in (name, grid, block)))])
    waits = Columns(TracedWaits)
    waits.extend([(LAUNCH_KINDS.index("stream_waits"), 9, 7, 24, 25, 6_600, 6_700)])
    made = (operations.made(), calls.made(), activity.made(), waits.made())
    return replace(ProfilerRecord("NVIDIA H200", "measured", list(texts), *made, has_events=True), **more)


def test_a_profiled_step_is_its_kernels_and_what_else_the_host_did(made: HandMade) -> None:
    layer = made.layer("up")
    made.others += traced_records(profiled(), made.layers)
    recording = made.read()
    kernels = kernel_table(recording)
    assert kernels["name"].tolist() == ["gemm_kernel", "gemm_kernel", "Memcpy DtoD", "orphan", "late"]
    assert kernels["start_us"].tolist() == [4, 7, 11, 14, 15]
    assert kernels["duration_us"].tolist() == [3, 1, 2, 0.5, 0.5]
    assert kernels["launch_us"].fillna(-1).tolist() == [2.5, 3, 10.5, -1, 13.5]
    assert kernels["family"].tolist() == ["gemm", "gemm", "communication", "other", "other"]
    assert kernels["phase"].tolist()[:3] == ["forward", "forward", "backward"]
    assert kernels["layer"].tolist() == [layer, layer, 0, 0, 0]
    assert kernels["operation"].tolist() == ["aten.mm", "aten.mm", "fakedist::all_reduce", "", ""]
    assert kernels["call"].tolist() == [-1, -1, 5, -1, -1]
    assert kernels["flops"].fillna(-1).tolist() == [600, 200, -1, -1, -1]  # by time
    assert kernels["moved_bytes"].fillna(-1).tolist() == [-1, -1, 128, -1, -1]  # read and written
    assert kernels[["grid", "block"]].to_numpy().tolist()[:3] == [["2,1,1", "128,1,1"], ["1,1,1", "128,1,1"], ["", ""]]
    assert kernels["stream"].tolist() == [7, 7, 9, 7, 7]
    assert (set(kernels["op"]), set(kernels["step"]), set(kernels["bound"])) == ({-1}, {4}, {""})
    source = recording.kernel_source
    assert source is not None
    assert (source.tool, source.source, source.gpu, source.step, source.step_us) == (
        *("cupti", "measured", "NVIDIA H200"),
        *(4, 15.5),
    )
    assert [note.code for note in source.notes] == ["kernels_without_launch"]
    host = recording.host
    assert host is not None
    assert host.has_events
    tables = traced_tables(kernels, host, CALL_TABLE)
    ranges = tables["ranges"][["name", "thread", "first_launch", "end_launch"]].to_numpy().tolist()
    assert ranges == [["mine", 0, 4, 5], ["endless", 0, 5, 7]]
    launched = tables["launches"]
    assert launched["what"].tolist()[:5] == ["product", "product", "stream_records", "stream_waits", "collective"]
    assert launched["stream"].tolist() == [7, 7, 7, 9, 9, 7, 7]
    assert launched["event"].tolist() == [0, 0, 24, 24, 0, 0, 0]
    assert launched["host_us"].tolist() == pytest.approx([2.5, 0.5, 2.0, 0.5, 4.8, 3.0, 0.5])


def test_layers_of_a_foreign_trace_are_named_by_the_ranges_around_them() -> None:
    rows = [("net", 0, 90), ("up", 10, 40), ("net.up", 50, 60), ("in", 20, 30), ("net", 70, 80)]
    start, end = (np.array([row[at] for row in rows], np.int64) for at in (1, 2))
    kinds = [Meaning(LAYER, name) for name in ("net", "up", "net.up", "in")]
    ranges = Ranges(kinds, np.array([0, 1, 2, 3, 0], np.int32), np.full(5, MAIN), start, end, np.full(5, -1))
    layers = LayerNumbers()
    assert layers.of(ranges, np.array([3, 2, -1, 4, 1, 0])).tolist() == [4, 3, 0, 2, 3, 1]
    found = [(row.name, row.parent) for row in layers.rows]
    assert found == [("", -1), ("net", 0), ("net.net", 1), ("net.up", 1), ("net.up.in", 3)]
    known = LayerNumbers(layers.rows)
    assert known.of(ranges, np.array([0, 2, 1, -1])).tolist() == [1, 3, 0, 0]
    ours = replace(ranges, meanings=[Meaning(LAYER, name, is_ours=True) for name in ("(Net)", "a.b", "a", "(Net).(F)")])
    layers = LayerNumbers()
    assert layers.of(ours, np.array([1, 2, 3, 0, -1])).tolist() == [3, 2, 4, 1, 0]
    assert [(row.name, row.parent) for row in layers.rows[1:]] == [("(Net)", 0), ("a", 1), ("a.b", 2), ("(Net).(F)", 1)]


def test_a_kernel_is_launched_by_its_call_else_by_its_operation_else_when_it_begins() -> None:
    activity = Columns(TracedActivity)
    for correlation, operation in ((21, MM), (88, MM), (24, 0), (89, 77), (25, REDUCE)):
        activity.extend([(9_000, 9_500, 7, correlation, operation, -1, 0, 0, 0, 0)])
    trace = profiler_trace(profiled(activity=activity.made()))
    assert trace.launch.tolist() == [3_500, 3_000, 6_000, 9_000, 6_500]
    assert trace.thread.tolist() == [MAIN, MAIN, CUPTI, -1, MAIN]
    assert (trace.begin, trace.step) == (1_000, 4)


def test_a_product_outside_of_any_operation_has_none_of_the_last_ones_flops(made: HandMade) -> None:
    operations = Columns(TracedOperations)
    operations.extend([(1, 0, 900, MAIN, -1, 0, 1), (2, 100, 200, MAIN, -1, 0, 2), (3, 300, 400, MAIN, -1, 10, 3)])
    calls, activity = Columns(TracedCalls), Columns(TracedActivity)
    calls.extend([(21, 350, 3, CUPTI), (22, 700, 0, MAIN), (23, 150, 2, CUPTI)])
    activity.extend([(1_000 + at, 1_000 + at, 7, 21 + at, 0, -1, 0, 4, 0, 0) for at in range(3)])
    texts = ["", "fakedist.step:0", "aten::add", "aten::mm", "gemm"]
    made.others += traced_records(
        profiled(operations=operations.made(), calls=calls.made(), activity=activity.made(), texts=texts), []
    )
    kernels = kernel_table(made.read())
    assert kernels["flops"].fillna(-1).tolist() == [10, -1, -1]
    assert kernels["operation"].tolist() == ["aten.mm", "", "aten.add"]
    assert kernels["family"].tolist()[:2] == ["gemm", "gemm"]


def test_a_profiler_that_saw_no_kernels_leaves_a_note_and_simulated_times_are_called_so() -> None:
    (note,) = traced_records(replace(profiled(), activity=Columns(TracedActivity).made()), [])
    assert isinstance(note, NoteRecord)
    kernels, _ = traced_records(profiled(source="simulated"), [])
    assert isinstance(kernels, KernelsRecord)
    assert kernels.source.source == "simulated"
    assert kernels.source.notes[0].code == "times_are_not_a_gpus"


CALL_TABLE = pd.DataFrame(
    {"sequence": [5], "operation": ["all_reduce"], "group": 0, "asynchronous": False, "peer": -1}
).assign(phase="backward", layer=0)
