"""Peaks by phase and step, and whether they are the allocator's own."""

from pathlib import Path

import pytest

from fakedist.analysis import memory_tables
from fakedist.analysis.blocks import build_blocks, event_places
from fakedist.analysis.recording import Recording
from fakedist.analysis.stack_lines import stack_lines
from fakedist.rundir.schema import ALIKE_CODE, CATEGORIES
from tests.unit.analysis.recorded import BASE, GIB, MIB, HandMade


def two_steps(directory: Path) -> Recording:
    """8 MiB of weights, 4 MiB for forward, 16 MiB for a moment in backward; the same again."""
    made = HandMade()
    made.op("init", 0)
    made.alloc(0, 8 * MIB, mark=("parameter",))
    for step in (1, 2):
        made.op("forward", step)
        made.alloc(8 * MIB, 4 * MIB)
        made.op("backward", step)
        made.alloc(16 * MIB, 16 * MIB)
        made.free(16 * MIB, 16 * MIB)
        made.free(8 * MIB, 4 * MIB)
        made.step(step)
    made.event("segment_alloc", 2 * GIB, 20 * MIB)
    return made.read(directory)


def test_phases_steps_and_the_peak_are_those_of_the_recording(tmp_path: Path) -> None:
    recording = two_steps(tmp_path)
    blocks, places = build_blocks(recording), event_places(recording)
    phases = memory_tables.phase_table(recording, blocks, places)  # in the order in which they began
    columns = ["step", "phase", "peak_allocated_bytes", "end_allocated_bytes"]
    assert phases[columns].astype({"phase": str}).to_numpy().tolist() == [
        [0, "init", 8 * MIB, 8 * MIB],
        [1, "forward", 12 * MIB, 12 * MIB],
        [1, "backward", 28 * MIB, 8 * MIB],
        [2, "forward", 12 * MIB, 12 * MIB],
        [2, "backward", 28 * MIB, 8 * MIB],
    ]
    assert phases["peak_reserved_bytes"].tolist() == [GIB] * 4 + [GIB + 20 * MIB]
    assert memory_tables.step_table(recording, blocks, places).to_numpy().tolist() == [
        [1, 1000, 900, 28 * MIB, GIB, 0, "", ""],
        [2, 2000, 900, 28 * MIB, GIB + 20 * MIB, 0, "", ""],
    ]
    spans = memory_tables.span_table(places)
    assert spans[["step", "phase", "first_event"]].astype({"phase": str}).to_numpy().tolist() == [
        [0, "init", 0],
        *([1, "forward", 2], [1, "backward", 3], [2, "forward", 8], [2, "backward", 9]),
    ]
    peak = memory_tables.find_peak(blocks, places)
    assert (peak.allocated_bytes, peak.reserved_bytes) == (28 * MIB, GIB + 20 * MIB)
    assert (peak.step, peak.phase) == (1, "backward")
    assert peak.by_category == dict.fromkeys(CATEGORIES, 0) | {"parameter": 8 * MIB, "temporary": 20 * MIB}


def test_a_phase_without_an_allocation_has_what_was_held_while_it_ran(made: HandMade) -> None:
    made.op("forward", 0, layer=made.layer("(Model)"))  # a probe on the host, in no step
    made.op("init", 0)
    made.op("forward", 1)
    made.alloc(0, 8 * MIB)
    made.op("backward", 1)
    made.op("optimizer", 1)
    made.op("other", 1)
    made.free(0, 8 * MIB)
    made.op("forward", 2)  # cut short by the stop
    made.ended()
    recording = made.read()
    phases = memory_tables.phase_table(recording, build_blocks(recording), event_places(recording))
    assert phases.astype({"phase": str}).to_numpy().tolist() == [
        [0, "init", 0, 0, 0],
        [1, "forward", 8 * MIB, GIB, 8 * MIB],
        [1, "backward", 8 * MIB, GIB, 8 * MIB],
        [1, "optimizer", 8 * MIB, GIB, 8 * MIB],
        [1, "other", 0, GIB, 0],
    ]


def test_a_step_without_any_event_used_nothing(made: HandMade) -> None:
    made.step(1)
    recording = made.read()
    blocks, places = build_blocks(recording), event_places(recording)
    assert memory_tables.phase_table(recording, blocks, places).empty
    assert memory_tables.step_table(recording, blocks, places).to_numpy().tolist() == [[1, 1000, 900, 0, 0, 0, "", ""]]
    peak = memory_tables.find_peak(blocks, places)
    assert (peak.allocated_bytes, peak.step, peak.phase) == (0, 0, "init")


def test_a_step_that_only_replays_a_graph_held_what_was_held_before(made: HandMade) -> None:
    made.op("init", 0)
    made.alloc(0, 8 * MIB)
    made.op("forward", 1)
    made.alloc(8 * MIB, 4 * MIB)
    made.free(8 * MIB, 4 * MIB)
    made.step(1)
    made.step(2)
    recording = made.read()
    steps = memory_tables.step_table(recording, build_blocks(recording), event_places(recording))
    assert steps["peak_allocated_bytes"].tolist() == [12 * MIB, 8 * MIB]
    assert steps["peak_reserved_bytes"].tolist() == [GIB, GIB]


@pytest.mark.parametrize(
    ("allocated", "reserved", "reset", "figure", "difference"),
    [
        (8 * MIB, GIB, False, "", 0),
        (8 * MIB + 512, GIB, False, f"allocated peak of {8 * MIB}", -512),
        (8 * MIB, GIB - 1, False, f"reserved peak of {GIB}", 1),
        (0, 0, True, "", 0),
        (9 * MIB, GIB, True, f"allocated peak of {8 * MIB}", -MIB),
    ],
)
def test_a_replay_that_is_not_the_allocators_own_is_never_silent(
    made: HandMade, allocated: int, reserved: int, reset: bool, figure: str, difference: int
) -> None:
    made.op("init", 0)
    made.alloc(0, 8 * MIB)
    made.stats(allocated, reserved, peaks_were_reset=reset)
    said = f"the {figure} bytes differs from the allocator's own statistics by {difference} bytes"
    assert differences(made) == [said] * bool(figure)


def differences(made: HandMade) -> list[str]:
    recording = made.read()
    return [note.text for note in memory_tables.differences(recording, build_blocks(recording))]


@pytest.mark.parametrize(("number", "were"), [(1, "1 block was"), (2, "2 blocks were")])
def test_blocks_from_before_the_recording_are_told(made: HandMade, number: int, were: str) -> None:
    for block in range(number):
        made.free(block * MIB, MIB)
    assert differences(made) == [f"{were} allocated before the recording began and not counted"]


def test_the_largest_blocks_come_with_the_users_line(made: HandMade) -> None:
    layer = made.layer("head")
    inner = ("/site-packages/torch/nn/modules/linear.py", 134, "forward")
    line = made.stack(
        *(inner, ("<string>", 1, "<module>"), ("/site-packages/monai/data/meta_tensor.py", 5, "__torch_function__")),
        ("/site-packages/typing_extensions.py", 3140, "wrapper"),
        *(("/job/model.py", 12, "forward"), ("/job/train.py", 3, "main")),
    )
    nowhere = made.stack(inner)
    made.op("forward", 1, layer, name="aten.addmm.default")
    made.alloc(0, MIB, stack=nowhere)
    made.alloc(8 * MIB, 4 * MIB, stack=line)
    made.alloc(16 * MIB, 4 * MIB)
    recording = made.read()
    lines = stack_lines(recording.frames, recording.stacks)
    assert lines == ["/job/model.py:12 (forward)", ""]
    largest = memory_tables.largest_blocks(recording, build_blocks(recording), lines)
    assert largest[["bytes", "line"]].to_numpy().tolist() == [[4 * MIB, lines[0]], [4 * MIB, ""], [MIB, ""]]
    place = ["temporary", "head", "forward", 1, "aten.addmm.default"]
    assert largest.iloc[0][["category", "layer", "phase", "step", "operation"]].tolist() == place


def test_only_the_largest_blocks_are_listed(made: HandMade) -> None:
    made.op()
    for number in range(memory_tables.LARGEST + 5):
        made.alloc(number * MIB, (number + 1) * 512)
    recording = made.read()
    largest = memory_tables.largest_blocks(recording, build_blocks(recording), [])
    assert largest["bytes"].tolist() == [(number + 1) * 512 for number in range(24, 4, -1)]


def test_a_large_block_that_layers_share_is_none_of_its_makers(made: HandMade) -> None:
    model = made.layer("(Model)")
    first, second, maker = (made.layer(name, parent=model) for name in ("a", "b", "c"))
    made.op("backward", 1, maker)
    made.alloc(0, 10 * MIB)
    made.alloc(10 * MIB, MIB)
    for owner in (first, second):
        made.mark(0, "gradient", owner, 5 * MIB, 5 * MIB * (owner == second))
    recording = made.read()
    largest = memory_tables.largest_blocks(recording, build_blocks(recording), [])
    assert largest["layer"].tolist() == ["2 layers of (Model)", "c"]


@pytest.mark.parametrize(
    ("phase", "operation", "category"),
    [
        ("optimizer", "aten.clone.default", "other"),
        *(("optimizer", f"aten.{name}.default", "temporary") for name in ("zeros", "zeros_like", "new_ones", "randn")),
        ("optimizer", "aten.zeroslike.default", "other"),
        *((phase, "aten.clone.default", "temporary") for phase in ("forward", "backward", "generation")),
    ],
)
def test_a_tensor_like_a_parameter_is_a_copy_unless_it_was_filled_or_a_model_ran(
    made: HandMade, phase: str, operation: str, category: str
) -> None:
    made.op(phase, 1, name=operation)
    made.alloc(0, MIB)
    made.alloc(8 * MIB, MIB)
    made.marks.append((0, BASE, ALIKE_CODE, -1, 0, MIB))
    assert made.blocks().frame["category"].astype(str).tolist() == [category, "temporary"]


def test_a_step_that_went_on_holds_what_was_recorded_as_the_next(made: HandMade) -> None:
    made.record("scopes", rows=[(0, 1, "forward", 0, False), (1, 2, "forward", 0, False)])
    made.step(1)
    made.record("step_went_on", step=1)
    made.record("scopes", rows=[(2, 2, "forward", 0, False)])
    recording = made.read()
    assert [scope.step for scope in recording.scopes] == [1, 1, 2]
    assert recording.steps == []
