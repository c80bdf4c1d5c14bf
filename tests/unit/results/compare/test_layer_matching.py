"""Layers find each other through re-numbering, renames and moves.

Two runs on one axis: phases meet, and no peak is lost.
"""

import numpy as np
import pandas as pd
import pytest

from fakedist.results.compare.layer_matching import common_axis, layer_patterns, match_layers, on_axis, renamed_layers

Layers = list[tuple[str, str, int]]


def table(layers: Layers) -> pd.DataFrame:
    """The table `layers` of (name, class, own parameter bytes)."""
    names = [""] + [name for name, _, _ in layers]
    parents = [-1]
    for name in names[1:]:
        above = name.rpartition(".")[0]
        root = next((place for place, each in enumerate(names) if each.startswith("(")), 0)
        parents.append(names.index(above) if above else (0 if name.startswith("(") else root))
    return pd.DataFrame(
        {
            "name": names,
            "class_name": ["", *(of_class for _, of_class, _ in layers)],
            "parent": parents,
            "peak_parameter_bytes": [0, *(bytes_ for _, _, bytes_ in layers)],
        }
    )


def blocks(numbers: range | list[int], mlp: str = "mlp", mlp_class: str = "MLP", classes: str = "") -> Layers:
    found: Layers = [("(Net)", "Net", 0), ("layers", "ModuleList", 0)]
    for place, number in enumerate(numbers):
        of_class = {"": "Block", "m": "Mamba", "d": "Block"}[classes[place] if classes else ""]
        found += [
            (f"layers.{number}", of_class, 0),
            (f"layers.{number}.attn", "Attention", 400),
            (f"layers.{number}.{mlp}", mlp_class, 900),
        ]
    return [*found, ("head", "Linear", 1_000)]


def matched(a: Layers, b: Layers) -> dict[str, tuple[str, str]]:
    """The layer of b for each layer of `a`, with how; and "+name" for those that are new."""
    tables = table(a), table(b)
    found = match_layers(*tables)
    assert sorted(found["a"][found["a"] >= 0]) == list(range(len(a) + 1))
    assert sorted(found["b"][found["b"] >= 0]) == list(range(len(b) + 1))
    names = [list(each["name"]) for each in tables]
    return {
        (names[0][at] if at >= 0 else f"+{names[1][to]}"): (names[1][to] if to >= 0 else "", how)
        for at, to, how in found.itertuples(index=False)
    }


def test_the_same_model_matches_itself_but_for_a_layer_less_at_the_end() -> None:
    found = matched(blocks(range(4)), blocks(range(4)))
    assert all(name == other and how == "same" for name, (other, how) in found.items())
    found = matched(blocks(range(4)), blocks(range(3)))
    assert {name for name, (_, how) in found.items() if how == "gone"} == {"layers.3", "layers.3.attn", "layers.3.mlp"}
    assert found["layers.2.mlp"] == ("layers.2.mlp", "same")


def test_a_removed_or_inserted_layer_of_its_own_kind_renumbers_those_behind_it() -> None:
    found = matched(blocks(range(6), classes="ddmddd"), blocks(range(5), classes="ddddd"))
    assert found["layers.2"] == ("", "gone")
    assert found["layers.1.attn"] == ("layers.1.attn", "same")
    assert found["layers.3"] == ("layers.2", "renumbered")
    assert found["layers.5.mlp"] == ("layers.4.mlp", "renumbered")
    found = matched(blocks(range(5), classes="ddddd"), blocks(range(6), classes="dmdddd"))
    assert found["+layers.1"] == ("layers.1", "appeared")
    assert found["layers.4.attn"] == ("layers.5.attn", "renumbered")


def test_numbers_that_are_names_are_kept_and_other_layers_are_not_matched() -> None:
    """A pipeline stage holds some of the layers under the numbers of the whole model."""
    found = matched(blocks([4, 5, 6, 7]), blocks([6, 7, 8]))
    assert found["layers.6.mlp"] == ("layers.6.mlp", "same")
    assert found["layers.4"] == ("", "gone")
    assert found["+layers.8"] == ("layers.8", "appeared")
    a: Layers = [("(Net)", "Net", 0), ("embed", "Embedding", 900)]
    b: Layers = [("(Net)", "Net", 0), ("router", "Router", 10)]
    found = matched(a, b)
    assert found["embed"] == ("", "gone")
    assert found["+router"] == ("router", "appeared")


@pytest.mark.parametrize("new_class", ["MLP", "FeedForward"])
def test_a_renamed_layer_is_found_by_its_class_or_its_size(new_class: str) -> None:
    a, b = blocks(range(3)), blocks(range(3), mlp="feed_forward", mlp_class=new_class)
    found = matched(a, b)
    assert found["layers.1.mlp"] == ("layers.1.feed_forward", "renamed")
    renamed = renamed_layers(table(a), table(b), match_layers(table(a), table(b)))
    assert renamed == [{"was": "layers.*.mlp", "name": "layers.*.feed_forward", "how": "renamed"}]


def test_what_is_below_a_renamed_layer_is_not_listed_and_one_of_repeated_layers_has_its_number() -> None:
    def renamed(a: Layers, b: Layers) -> list[tuple[str, ...]]:
        tables = table(a), table(b)
        return [tuple(row.values()) for row in renamed_layers(*tables, match_layers(*tables))]

    a = blocks(range(3))
    whole = [(name.replace("layers", "blocks"), of_class, size) for name, of_class, size in a]
    assert renamed(a, whole) == [("layers", "blocks", "renamed")]
    one = [(name.replace("layers.1.mlp", "layers.1.moe"), of_class, size) for name, of_class, size in a]
    assert renamed(a, one) == [("layers.1.mlp", "layers.1.moe", "renamed")]
    two: Layers = [("(Net)", "Net", 0), ("one", "Linear", 900), ("two", "Linear", 400)]
    swapped: Layers = [("(Net)", "Net", 0), ("here", "Linear", 400), ("there", "Linear", 900)]
    assert renamed(two, swapped) == [("one", "there", "renamed"), ("two", "here", "renamed")]


def test_a_model_is_the_same_in_a_wrapper_and_under_a_root_of_another_class() -> None:
    a: Layers = [("(GPT)", "GPT", 0), ("embed", "Embedding", 900)]
    b: Layers = [("(GPT2)", "GPT2", 0), ("embed", "Embedding", 900)]
    assert matched(a, b)["embed"] == ("embed", "same")
    inner: Layers = [("model", "Net", 0), ("model.embed", "Embedding", 900), ("model.head", "Linear", 900)]
    plain: Layers = [("(Net)", "Net", 0), ("embed", "Embedding", 900), ("head", "Linear", 900)]
    found = matched(plain, [("(Trainer)", "Trainer", 0), *inner])
    assert found["embed"][0] == "model.embed"
    assert found["head"][0] == "model.head"


def test_patterns_star_repeated_layers_and_keep_the_places_of_a_sequence() -> None:
    layers: Layers = [("(Net)", "Net", 0), ("h", "ModuleList", 0)]
    for number in range(3):
        layers += [(f"h.{number}", "Block", 0), (f"h.{number}.mlp", "Sequential", 0)]
        layers += [(f"h.{number}.mlp.{at}", of_class, 1) for at, of_class in enumerate(("Linear", "GELU", "Linear"))]
    patterns = layer_patterns(table(layers))
    assert patterns[3:8] == ["h.*", "h.*.mlp", "h.*.mlp.0", "h.*.mlp.1", "h.*.mlp.2"]
    assert patterns[8] == "h.*"


def test_patterns_of_a_traces_modules_star_each_class_of_its_own() -> None:
    layers = [("", "", -1), ("GPT", "", 0), ("GPT.Head.0", "", 1)]
    for block in range(2):
        layers += [(f"GPT.Block.{block}", "", 1), (f"GPT.Block.{block}.Linear.0", "", 3 + 2 * block)]
    patterns = layer_patterns(pd.DataFrame(layers, columns=["name", "class_name", "parent"]))
    assert patterns == ["", "GPT", "GPT.Head.*", *["GPT.Block.*", "GPT.Block.*.Linear.*"] * 2]


def test_a_removed_layer_of_its_own_size_renumbers_those_behind_it() -> None:
    def sized(*sizes: int) -> Layers:
        layers: Layers = [("(Net)", "Net", 0), ("layers", "ModuleList", 0)]
        return layers + [(f"layers.{number}", "Linear", size) for number, size in enumerate(sizes)]

    found = matched(sized(9, 9, 50, 9), sized(9, 9, 9))
    assert found["layers.2"] == ("", "gone")
    assert found["layers.3"] == ("layers.2", "renumbered")


def spans(*rows: tuple[int, str, int]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=["step", "phase", "first_event"])


def test_phases_meet_or_a_step_of_other_phases_is_stretched_as_a_whole() -> None:
    a = spans((0, "init", 0), (1, "forward", 10), (1, "backward", 20))
    b = spans((0, "init", 0), (1, "forward", 10), (1, "backward", 40))
    pieces = common_axis((a, b), (30, 60))
    assert [(piece.step, piece.phase) for piece in pieces] == [(0, "init"), (1, "forward"), (1, "backward")]
    assert [piece.events for piece in pieces] == [((0, 10), (0, 10)), ((10, 20), (10, 40)), ((20, 30), (40, 60))]
    widths = [round((piece.at[1] - piece.at[0]) * 60) for piece in pieces]
    assert widths == [10, 30, 20]
    assert pieces[-1].at[1] == 1.0
    a = spans((1, "forward", 0), (1, "backward", 10), (1, "forward", 20), (1, "backward", 30))
    b = spans((1, "forward", 0), (1, "backward", 30), (2, "forward", 50))
    pieces = common_axis((a, b), (40, 70))
    assert [(piece.step, piece.phase, piece.events) for piece in pieces] == [
        (1, "", ((0, 40), (0, 50))),
        (2, "", ((0, 0), (50, 70))),
    ]


def test_runs_without_spans_and_without_events() -> None:
    nothing = pd.DataFrame()
    (piece,) = common_axis((nothing, nothing), (5, 9))
    assert (piece.events, piece.at) == (((0, 5), (0, 9)), (0.0, 1.0))
    assert common_axis((nothing, nothing), (0, 0)) == []
    least, most = on_axis(np.zeros(0, "i8"), [], 0, 4)
    assert least.tolist() == most.tolist() == [0, 0, 0, 0]


def test_no_peak_is_lost_and_gaps_hold_what_was_before() -> None:
    generator = np.random.default_rng(0)
    curve = np.abs(generator.integers(-3, 4, 10_000).cumsum())
    pieces = common_axis((pd.DataFrame(), pd.DataFrame()), (len(curve), 3))
    least, most = on_axis(curve, pieces, 0, 100)
    assert most.max() == curve.max()
    assert most.tolist() == [int(part.max()) for part in np.split(curve, 100)]
    assert least.tolist() == [int(part.min()) for part in np.split(curve, 100)]
    least, most = on_axis(np.array([5, 9, 2]), pieces, 1, 12)
    assert most.tolist() == least.tolist() == [0, 0, 5, 5, 5, 5, 9, 9, 9, 9, 2, 2]
