import numpy as np
import pytest

from fakedist.rundir.launch_records import LAUNCH_KINDS
from fakedist.traces import step_trace as names
from fakedist.traces.step_trace import Intervals, Waits, meaning, without_numbers


@pytest.mark.parametrize(
    ("text", "kind", "name", "phase", "number"),
    [
        ("fakedist.step:4", names.STEP, "", "", 4),
        ("fakedist.phase:optimizer", names.PHASE, "", "optimizer", -1),
        ("fakedist.layer:layers.0.attention", names.LAYER, "layers.0.attention", "", -1),
        ("fakedist.call:17", names.CALL, "", "", 17),
        ("fakedist.range:3:mine:too", names.SCRIPTS, "mine:too", "", 3),
        ("fakedist.range:x:mine", names.IGNORED, "", "", -1),
        ("fakedist.range_end:3", names.SCRIPTS_END, "", "", 3),
        ("fakedist.timed", names.IGNORED, "", "", -1),
        ("step 3", names.STEP, "", "", 3),
        ("iteration12", names.STEP, "", "", 12),
        ("ProfilerStep#7", names.STEP, "", "", 7),
        ("train_step_5", names.STEP, "", "", 5),
        ("iter 3/100", names.STEP, "", "", 3),
        ("forward", names.PHASE, "", "forward", -1),
        ("backward pass", names.PHASE, "", "backward", -1),
        ("bwd", names.PHASE, "", "backward", -1),
        ("forward_step_func", names.PHASE, "", "forward", -1),
        ("optimizer.step", names.PHASE, "", "optimizer", -1),
        ("Optimizer.step#AdamW.step", names.PHASE, "", "optimizer", -1),
        ("forward-backward", names.IGNORED, "", "", -1),
        ("aten::mm", names.OPERATION, "aten::mm", "", -1),
        ("fakedist::all_gather", names.OPERATION, "fakedist::all_gather", "", -1),
        ("nccl:all_reduce", names.OPERATION, "nccl:all_reduce", "", -1),
        ("MmBackward0", names.DERIVATIVE, "MmBackward0", "backward", -1),
        ("autograd::engine::evaluate_function: MmBackward0", names.NODE, "MmBackward0", "backward", -1),
        ("TransformerLayer.self_attention", names.LAYER, "TransformerLayer.self_attention", "", -1),
        ("LayerNormLinear.backward", names.LAYER, "LayerNormLinear.backward", "backward", -1),
        ("layer 3", names.LAYER, "layer.3", "", -1),
        ("decode step 12", names.STEP, "", "", 12),
        ("DeepSpeedEngine.step", names.LAYER, "DeepSpeedEngine.step", "optimizer", -1),
        (" ", names.IGNORED, "", "", -1),
    ],
)
def test_a_ranges_text_is_understood(text: str, kind: int, name: str, phase: str, number: int) -> None:
    found = meaning(text)
    assert (found.kind, found.name, found.phase, found.number) == (kind, name, phase, number)


def test_what_a_library_pushes_is_no_layer() -> None:
    assert meaning("ncclAllReduce", "NCCL").kind == names.OPERATION
    assert meaning("mlp", "my own domain").kind == names.LAYER


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("aten::mm, seq = 12, op_id = 7, sizes = [[1, 2]]", ("aten::mm", 12)),
        ("aten::mm, op_id = 7", ("aten::mm", -1)),
        ("aten::view, sizes = [[2, 3]]", ("aten::view", -1)),
        ("mlp, the second", ("mlp, the second", -1)),
        ("plain", ("plain", -1)),
    ],
)
def test_what_makes_each_text_different_is_cut_off(text: str, cut: tuple[str, int]) -> None:
    assert without_numbers(text) == cut


def by_hand(lane: int, time: int, ranges: list[tuple[int, int, int]]) -> int:
    """The range that began last of those the point is in; of two that began together, the shorter one."""
    inside = [row for row, (of, start, end) in enumerate(ranges) if of == lane and start <= time <= end]
    return max(inside, key=lambda row: (ranges[row][1], -ranges[row][2]), default=-1)


def intervals(ranges: list[tuple[int, int, int]]) -> Intervals:
    lane, start, end = np.array(ranges, np.int64).reshape(-1, 3).T
    return Intervals(lane, start, end)


@pytest.mark.parametrize("seed", range(20))
def test_the_innermost_of_any_ranges_is_what_a_loop_finds(seed: int) -> None:
    random = np.random.default_rng(seed)
    num = int(random.integers(1, 60))
    start = random.integers(0, 50, num)
    length = random.integers(0, 50, num)
    lane = random.integers(0, 3, num)
    ranges = list({(int(of), int(at), int(at + more)) for of, at, more in zip(lane, start, length, strict=True)})
    asked = [(of, at) for of in range(5) for at in range(-3, 110)]
    found = intervals(ranges).innermost(np.array([of for of, _ in asked]), np.array([at for _, at in asked]))
    assert found.tolist() == [by_hand(of, at, ranges) for of, at in asked]


def test_the_range_around_a_range_is_of_its_own_thread_in_any_order() -> None:
    ranges = [(0, 12, 13), (0, 0, 100), (0, 10, 20), (0, 30, 40), (1, 11, 19), (1, 200, 300)]
    assert intervals(ranges).parents().tolist() == [2, -1, 1, 1, -1, -1]
    assert intervals([]).innermost(np.array([0]), np.array([5])).tolist() == [-1]
    for together, rows in (([(0, 5, 8), (0, 5, 20)], [0, 1]), ([(0, 5, 20), (0, 5, 8)], [1, 0])):
        assert intervals(together).innermost(np.zeros(2, np.int64), np.array([6, 10])).tolist() == rows


@pytest.mark.parametrize(
    ("what", "stream", "record", "event"),
    [
        ("stream_waits", 9, 21, 21),
        ("stream_waits", 9, 0, names._NEVER_RECORDED),  # recorded before the trace
        ("stream_waits", 9, 22, 22),  # of which the trace lacks the record
        ("host_waits", -1, 21, 21),
        ("host_waits", -1, 0, names._NEVER_RECORDED),
        ("host_waits", 7, 0, 0),  # for a stream
        ("host_waits", 0, -1, 0),
        ("host_waits_for_device", -1, 0, 0),
    ],
)
def test_a_wait_has_its_event_and_what_was_recorded_before_the_trace_takes_no_time(
    what: str, stream: int, record: int, event: int
) -> None:
    columns = {"what": LAUNCH_KINDS.index(what), "stream": stream, "record": record, "recorded_on": 5, "start": 30}
    found = Waits.of({name: np.array([value]) for name, value in (columns | {"end": 40}).items()}, {21: 10})
    recorded = [("stream_records", 5, 21, 10, 10)] if event == 21 else []
    rows = zip(found.what, found.stream, found.event, found.start, found.end, strict=True)
    assert [(LAUNCH_KINDS[kind], *map(int, rest)) for kind, *rest in rows] == [*recorded, (what, stream, event, 30, 40)]
