"""Peaks by phase and step, and whether they are the allocator's own."""

from pathlib import Path

import pandas as pd
import pytest

from fakedist.analysis import memory_tables
from fakedist.analysis.blocks import build_blocks, event_places
from fakedist.analysis.memory_tables import Fold, fold_layers, fold_table, layer_table, owner_names, unfolded
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
        [1, 1000, 900, 28 * MIB, GIB, 0, "", "", 0.0],
        [2, 2000, 900, 28 * MIB, GIB + 20 * MIB, 0, "", "", 0.0],
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
    rows = memory_tables.step_table(recording, blocks, places).to_numpy().tolist()
    assert rows == [[1, 1000, 900, 0, 0, 0, "", "", 0.0]]
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


def tree(*layers: tuple[str, str], root: str = "(Model)") -> pd.DataFrame:
    """Names, classes and parents of the table ``layers``; parents by name."""
    rows = [("", "", -1), (root, root.strip("()"), 0)]
    for name, class_name in layers:
        above = name.rpartition(".")[0]
        parent = next((row for row, (other, _, _) in enumerate(rows) if row > 1 and other == above), 1)
        rows.append((name, class_name, parent))
    return pd.DataFrame(rows, columns=["name", "class_name", "parent"])


def blocks_of(*numbers: int, wide: frozenset[int] = frozenset()) -> list[tuple[str, str]]:
    found = [("layers", "ModuleList")]
    for number in numbers:
        found += [(f"layers.{number}", "Block"), (f"layers.{number}.attention", "Attention")]
        found += [(f"layers.{number}.mlp", "MoE" if number in wide else "Mlp")]
    return found


def told(folds: list[Fold]) -> list[tuple[str, int]]:
    return [(fold.name, len(fold.layers)) for fold in folds]


def test_repeated_layers_are_one_row_with_their_children() -> None:
    folds = fold_layers(tree(("embed", "Embedding"), *blocks_of(*range(80)), ("head", "Linear")))
    repeated = [(f"layers.0-79{name}", 80) for name in ("", ".attention", ".mlp")]
    assert told(folds) == [("", 1), ("(Model)", 1), ("embed", 1), ("layers", 1), *repeated, ("head", 1)]
    assert [fold.depth for fold in folds] == [0, 0, 1, 1, 2, 3, 3, 1]


@pytest.mark.parametrize(
    ("numbers", "wide", "names"),
    [
        ((0, 1, 2, 3, 4), {2}, ["layers.0-1", "layers.2", "layers.3-4"]),
        ((0, 1, 4, 5), set(), ["layers.0-1", "layers.4-5"]),
    ],
)
def test_siblings_that_differ_or_do_not_follow_each_other_stay_apart(
    numbers: tuple[int, ...], wide: set[int], names: list[str]
) -> None:
    folds = fold_layers(tree(*blocks_of(*numbers, wide=frozenset(wide))))
    assert [fold.name for fold in folds if fold.class_name == "Block"] == names


def test_repeats_inside_of_repeats_are_folded_both_times_and_unfolded_rows_know_their_depth() -> None:
    layers = [("stages", "ModuleList")]
    for stage in range(2):
        layers.append((f"stages.{stage}", "Sequential"))
        layers += [(f"stages.{stage}.{number}", "Linear") for number in range(3)]
    assert told(fold_layers(tree(*layers)))[2:] == [("stages", 1), ("stages.0-1", 2), ("stages.0-1.0-2", 6)]
    folds = unfolded(tree(*blocks_of(0, 1)))
    assert told(folds)[2:6] == [("layers", 1), ("layers.0", 1), ("layers.0.attention", 1), ("layers.0.mlp", 1)]
    assert [fold.depth for fold in folds][:6] == [0, 0, 1, 2, 3, 3]


def test_what_a_root_only_calls_changes_no_other_name() -> None:
    layers = [("", "", -1), ("(GPT)", "GPT", 0), ("layers", "ModuleList", 1)]
    layers += [("layers.0", "Block", 2), ("layers.1", "Block", 2), ("(GPT).(Softmax)", "Softmax", 1)]
    layers += [("layers.0.(Softmax)", "Softmax", 3), ("layers.1.(Softmax)", "Softmax", 4)]
    folds = fold_layers(pd.DataFrame(layers, columns=["name", "class_name", "parent"]))
    expected = [("", 1), ("(GPT)", 1), ("layers", 1), ("layers.0-1", 2), ("layers.0-1.(Softmax)", 2)]
    assert told(folds) == [*expected, ("(GPT).(Softmax)", 1)]


def test_several_models_are_several_roots_and_names_without_numbers_are_never_folded() -> None:
    layers = [("", "", -1), ("(A)", "A", 0), ("w", "Linear", 1), ("v", "Linear", 1), ("(B)", "B", 0)]
    table = pd.DataFrame([*layers, ("(B).w", "Linear", 4)], columns=["name", "class_name", "parent"])
    assert told(fold_layers(table)) == [(name, 1) for name in ("", "(A)", "w", "v", "(B)", "(B).w")]


def test_a_traces_modules_fold_by_class_and_number_at_every_depth() -> None:
    layers = [("", "", -1), ("GPT", "", 0)]
    for block in range(2):
        layers.append((f"GPT.Block.{block}", "", 1))
        layers += [(f"GPT.Block.{block}.{own}", "", len(layers) - 1) for own in ("Linear.0", "Norm.0", "Linear.1")]
    layers += [("stage.0", "", 0), ("stage.1", "", 0)]
    folds = fold_layers(pd.DataFrame(layers, columns=["name", "class_name", "parent"]))
    blocks = [(f"GPT.Block.0-1{own}", 2) for own in ("", ".Linear.0", ".Norm.0", ".Linear.1")]
    assert told(folds) == [("", 1), ("GPT", 1), *blocks, ("stage.0-1", 2)]


def two_layers(directory: Path) -> pd.DataFrame:
    """Two repeated layers below one model: 4 MiB and 2 MiB of weights; a temporary in each forward of step 2."""
    made = HandMade(directory=directory)
    root = made.layer("(Model)", "Model")
    container = made.layer("layers", "ModuleList", root)
    layers = [made.layer(f"layers.{number}", "Linear", container) for number in range(2)]
    made.op("init", 0)
    for number, layer in enumerate(layers):
        made.alloc(number * 8 * MIB, (4 - 2 * number) * MIB, mark=("parameter", layer, MIB))
    for layer in layers:
        made.op("forward", 2, layer)
        made.alloc(32 * MIB, 3 * MIB)
        made.free(32 * MIB, 3 * MIB)
    made.op("forward", 2, root)
    made.alloc(32 * MIB, 16 * MIB)
    return whole_table(made, 3)


def whole_table(made: HandMade, first: int = 0) -> pd.DataFrame:
    """The layers over all events from the first on."""
    recording = made.read()
    return layer_table(recording, build_blocks(recording), (first, len(recording.device_events["op"])))


def test_layers_have_their_bytes_at_the_peak_and_the_most_at_once_and_fold(tmp_path: Path) -> None:
    table = two_layers(tmp_path)
    assert table["peak_own_bytes"].tolist() == [0, 16 * MIB, 0, 4 * MIB, 2 * MIB]
    assert table["peak_total_bytes"].tolist() == [0, 22 * MIB, 6 * MIB, 4 * MIB, 2 * MIB]
    assert table["peak_parameter_bytes"].tolist() == [0, 0, 0, 4 * MIB, 2 * MIB]
    most = {
        "own": [0, 16, 0, 7, 5],
        "total": [0, 22, 9, 7, 5],
        "temporary": [0, 16, 0, 3, 3],
        "total_temporary": [0, 16, 3, 3, 3],
        "total_parameter": [0, 6, 6, 4, 2],
    }
    assert {name: (table[f"most_{name}_bytes"] / MIB).tolist() for name in most} == most
    row = fold_table(table, fold_layers(table)).set_index("name").loc["layers.0-1"]
    assert (row["num_repeats"], row["peak_own_bytes"], row["peak_parameter_bytes"]) == (2, 6 * MIB, 6 * MIB)
    assert (row["most_own_bytes"], row["most_total_bytes"]) == (7 * MIB, 7 * MIB)


def test_shares_are_their_owners_and_the_rest_is_outside_at_the_peak_and_over_the_step(made: HandMade) -> None:
    first, second = made.layer("a"), made.layer("b")
    made.op("init", 0)
    made.alloc(0, 4 * MIB, mark=("parameter", first, MIB))
    made.mark(0, "parameter", second, 2 * MIB)
    table = whole_table(made)
    for column in ("peak_own_bytes", "most_own_bytes", "peak_total_bytes", "most_total_bytes"):
        assert table[column].tolist() == [MIB, MIB, 2 * MIB]
    assert table["peak_parameter_bytes"].sum() == 4 * MIB


def test_a_recording_without_layers_still_has_the_outside(tmp_path: Path) -> None:
    table = whole_table(HandMade(layers=[], directory=tmp_path))
    assert (table["name"].tolist(), table["peak_own_bytes"].tolist()) == ([""], [0])


def test_a_block_of_several_layers_is_named_by_what_is_above_them_all() -> None:
    table = tree(*blocks_of(0, 1), ("head", "Linear"))
    names, parents = table["name"].tolist(), table["parent"].tolist()
    row = {name: number for number, name in enumerate(names)}
    owners = {
        3: ["layers.0.attention", "layers.0.mlp"],
        5: ["layers.0.mlp", "layers.1.mlp", "layers.1"],
        8: ["layers.1.mlp", "head"],
        9: ["", "layers.1"],
        11: [""],
    }
    rows = [(block, row[name], 1) for block, of_block in owners.items() for name in of_block]
    assert owner_names(pd.DataFrame(rows, columns=["block", "layer", "bytes"]), names, parents) == {
        3: "2 layers of layers.0",
        5: "3 layers of layers",
        8: "2 layers of (Model)",
        9: "layers.1",
    }


def test_a_block_that_the_first_event_of_the_window_frees_counts(made: HandMade) -> None:
    root = made.layer("(Net)", "Net")
    layer = made.layer("up", "Linear", root)
    made.op("backward", 1, layer)
    made.alloc(0, 10 * MIB)  # event 1
    made.free(0, 10 * MIB)  # events 2 and 3
    made.op("forward", 2, layer)
    made.alloc(100 * MIB, 4 * MIB)  # event 4
    recording = made.read()
    table = layer_table(recording, build_blocks(recording), (2, 5))
    assert table["most_own_bytes"].tolist() == [0, 0, 10 * MIB]
    assert table["most_total_bytes"].tolist() == [0, 10 * MIB, 10 * MIB]
    after = layer_table(recording, build_blocks(recording), (3, 5))
    assert after["most_total_bytes"].tolist() == [0, 4 * MIB, 4 * MIB]
