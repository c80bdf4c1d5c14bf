from pathlib import Path

import pandas as pd
import pytest

from fakedist.analysis.blocks import build_blocks
from fakedist.analysis.memory_tables import Fold, fold_layers, fold_table, layer_table, owner_names, unfolded
from tests.unit.analysis.recorded import MIB, HandMade


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
