from pathlib import Path

import pytest

from fakedist.analysis.blocks import Blocks, build_blocks
from fakedist.rundir.schema import CATEGORIES
from tests.unit.analysis.recorded import BASE, MIB, HandMade


def categories(blocks: Blocks) -> list[str]:
    return blocks.frame["category"].astype(str).tolist()


def test_a_block_says_where_it_was_made(made: HandMade) -> None:
    layer = made.layer("head")
    line = made.stack(("/job/train.py", 7, "main"))
    made.op("backward", 2, layer, recompute=True, name="aten.add.Tensor")
    made.alloc(0, 1000, stream=5, stack=line)
    row = made.blocks().frame.iloc[0].to_dict()
    events = {"alloc_event": 1, "free_event": 2, "reuse_event": 2, "op": 0, "operation": "aten.add.Tensor"}
    place = {"step": 2, "phase": "backward", "recompute": True, "layer": layer, "stream": 5, "stack": 0}
    sizes = {"address": BASE, "requested_bytes": 1000, "bytes": 1024, "category": "temporary"}
    assert row == sizes | events | place


def test_a_block_outside_of_any_operation_has_no_place(made: HandMade) -> None:
    made.alloc(0, MIB, op=-1)
    made.op("forward", 1, made.layer("a"))
    made.alloc(MIB, MIB, op=5)  # its operation was not written down before the rank was killed
    frame = made.blocks().frame
    assert frame["category"].astype(str).tolist() == ["other", "other"]
    assert frame[["step", "layer"]].to_numpy().tolist() == [[0, 0], [0, 0]]
    assert frame["operation"].astype(str).tolist() == ["", ""]


def test_a_mark_is_about_the_block_that_was_at_the_address_then(made: HandMade) -> None:
    made.op()
    made.mark(MIB, "parameter")  # of no block
    made.alloc(0, MIB, mark=("gradient",))
    made.op()
    made.free(0, MIB)
    made.alloc(0, MIB)
    made.op()
    made.alloc(MIB, MIB)
    made.mark(0, "parameter")
    made.op()
    made.free(0, MIB)
    made.alloc(0, MIB)
    assert categories(made.blocks()) == ["gradient", "parameter", "temporary", "temporary"]


def test_marks_win_in_the_order_of_the_schema(made: HandMade) -> None:
    made.op()
    marks = ("communication", "workspace", "gradient", "optimizer_state", "parameter")
    for number in range(len(marks)):
        made.alloc(number * MIB, MIB)
        for name in marks[: number + 1]:
            made.mark(number * MIB, name)
    assert categories(made.blocks()) == list(marks)
    assert list(marks) == [name for name in reversed(CATEGORIES) if name in marks]


@pytest.mark.parametrize(
    ("mark", "category"),
    [("gradient", "gradient"), ("workspace", "workspace"), ("communication", "activation"), (None, "activation")],
)
def test_a_block_that_is_kept_for_backward_is_an_activation_unless_it_is_something_better(
    made: HandMade, mark: str | None, category: str
) -> None:
    first = made.op("forward")
    made.alloc(0, MIB)
    if mark:
        made.mark(0, mark)
    made.op("backward")
    made.free(0, MIB)
    made.region(first, first)
    assert categories(made.blocks()) == [category]


@pytest.mark.parametrize(
    ("freed", "phase", "step", "category"),
    [
        (True, "optimizer", 1, "activation"),
        (False, "optimizer", 1, "communication"),  # in the last step the optimizer tells a kept buffer
        (False, "forward", 2, "communication"),
    ],
)
def test_a_buffer_for_communication_that_outlives_its_step_is_no_activation(
    made: HandMade, freed: bool, phase: str, step: int, category: str
) -> None:
    first = made.op("forward")
    made.alloc(0, MIB, mark=("communication",))
    made.region(first, first)
    made.op("backward")
    if freed:
        made.free(0, MIB)
    made.op(phase, step)
    made.alloc(MIB, MIB)
    assert categories(made.blocks())[0] == category


def test_activations_are_what_is_left_of_a_forward_when_it_ends(made: HandMade) -> None:
    first = made.op("forward")
    made.alloc(0, MIB)  # kept
    made.alloc(MIB, MIB)  # let go by the forward's own last operation
    last = made.op("forward")
    made.free(MIB, MIB)
    made.region(first, last)
    made.op("backward")
    made.free(0, MIB)
    made.alloc(2 * MIB, MIB)  # after the region
    assert categories(made.blocks()) == ["activation", "temporary", "temporary"]


def test_what_a_checkpoint_computes_again_in_backward_is_an_activation_too(made: HandMade) -> None:
    forward = made.op("forward")
    made.region(forward, forward)
    made.op("backward")
    made.alloc(0, MIB)
    again = made.op("backward", recompute=True)
    made.alloc(MIB, MIB)
    made.region(again, again)
    made.op("backward")
    made.free(MIB, MIB)
    found = made.blocks()
    assert categories(found) == ["temporary", "activation"]
    assert found.frame["recompute"].tolist() == [False, True]


def test_what_is_made_before_the_first_step_is_other_unless_it_is_marked(made: HandMade) -> None:
    made.op("init", 0)
    made.alloc(0, MIB)
    made.alloc(MIB, MIB, mark=("parameter",))
    made.op("optimizer", 1)
    made.alloc(2 * MIB, MIB)
    assert categories(made.blocks()) == ["other", "parameter", "temporary"]


def test_a_marked_block_belongs_to_the_layer_that_owns_its_best_category(made: HandMade) -> None:
    first, second = made.layer("a"), made.layer("b")
    made.op("init", 0, first)
    made.alloc(0, MIB, mark=("gradient", first, MIB))
    made.mark(0, "parameter", second, MIB)
    made.alloc(MIB, MIB, mark=("parameter",))  # no owner is known
    found = made.blocks()
    assert found.frame["layer"].tolist() == [second, first]
    assert found.shares.empty


def test_a_shard_of_gathered_parameters_is_one_unless_it_was_made_for_the_gather(made: HandMade) -> None:
    layer = made.layer("a")
    made.op("init", 0)
    made.alloc(0, MIB)
    made.op("forward", 1)
    made.alloc(MIB, MIB)
    for address in (0, MIB):
        made.mark(address, "communication")
        made.mark(address, "shard", layer, MIB)
    found = made.blocks()
    assert categories(found) == ["parameter", "communication"]
    assert found.frame["layer"].tolist() == [layer, 0]


@pytest.mark.parametrize(
    ("size", "marks", "shares"),
    [
        # A weight, a bias that is seen twice, and a view of a part of both.
        (
            10 * MIB,
            [
                ("a", 3 * MIB, 0),
                ("a", MIB, 3 * MIB),
                ("a", MIB, 3 * MIB),
                ("a", MIB + 5, 2 * MIB),
                ("b", 6 * MIB, 4 * MIB),
            ],
            {"a": 4 * MIB, "b": 6 * MIB},
        ),
        # Seen twice: the larger counts.
        (
            10 * MIB,
            [("a", 100, 0), ("a", 3 * MIB + 1, 0), ("b", 5 * MIB, 0)],
            {"a": 3 * MIB + 1, "b": 5 * MIB, "maker": 2 * MIB - 1},
        ),
        (4 * MIB, [("maker", MIB, 0), ("b", MIB, 0)], {"maker": 3 * MIB, "b": MIB}),
    ],
)
def test_a_shared_block_is_divided_exactly_and_the_rest_is_its_makers(
    made: HandMade, size: int, marks: list[tuple[str, int, int]], shares: dict[str, int]
) -> None:
    layers = {name: made.layer(name) for name in ("a", "b", "maker")}
    made.op("init", 0, layers["maker"])
    made.alloc(0, size)
    for name, bytes_, start in marks:
        made.mark(0, "parameter", layers[name], bytes_, start)
    found = made.blocks().shares
    expected = [{"block": 0, "layer": layers[name], "bytes": bytes_} for name, bytes_ in shares.items()]
    assert found.to_dict("records") == sorted(expected, key=lambda row: row["layer"])


def test_what_is_left_of_a_bucket_for_everybody_is_outside_of_modules(made: HandMade) -> None:
    first, maker = made.layer("a"), made.layer("c")
    made.op("backward", 1, maker)
    made.alloc(0, 10 * MIB, mark=("gradient", 0))
    made.alloc(10 * MIB, MIB, mark=("gradient", 0))
    made.mark(0, "gradient", first, 4 * MIB)
    found = made.blocks()
    assert found.shares[["layer", "bytes"]].to_numpy().tolist() == [[0, 6 * MIB], [first, 4 * MIB]]
    assert found.frame["layer"].tolist()[1] == 0


def test_tied_weights_are_divided_in_proportion_and_add_up_to_the_block(made: HandMade) -> None:
    owners = [made.layer(name) for name in "abc"]
    made.op("init", 0)
    made.alloc(0, MIB + 512)
    for owner, bytes_ in zip(owners, (MIB + 512, MIB + 512, MIB // 3), strict=True):
        made.mark(0, "parameter", owner, bytes_)
    shares = made.blocks().shares
    assert shares["bytes"].sum() == MIB + 512
    assert set(shares["layer"]) == set(owners)  # the remainder goes to owners alone
    assert len(shares) == len(owners)
    by_layer = shares.set_index("layer")["bytes"]
    assert abs(by_layer[owners[0]] - by_layer[owners[1]]) <= 2
    assert by_layer[owners[2]] < by_layer[owners[1]] / 2


def test_the_peak_is_the_first_event_with_most_bytes(made: HandMade) -> None:
    made.op()
    made.alloc(0, MIB)
    made.alloc(MIB, MIB)
    made.free(MIB, MIB)
    made.alloc(2 * MIB, MIB)
    found = made.blocks()
    assert found.peak_event == 2
    assert found.at_peak.tolist() == [True, True, False]


def test_a_recording_without_events_has_no_blocks(tmp_path: Path) -> None:
    found = build_blocks(HandMade().read(tmp_path))
    assert len(found.frame) == len(found.shares) == 0
    assert found.peak_event == -1
