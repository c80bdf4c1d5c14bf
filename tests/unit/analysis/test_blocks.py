from __future__ import annotations

from pathlib import Path

import pytest

from fakedist.analysis.blocks import Blocks, build_blocks
from fakedist.rundir.schema import CATEGORIES
from tests.unit.analysis.recorded import MIB, HandMade


def categories(blocks: Blocks) -> list[str]:
    return blocks.frame["category"].astype(str).tolist()


def test_a_block_says_where_it_was_made(tmp_path: Path) -> None:
    made = HandMade()
    layer = made.layer("head")
    line = made.stack(("/job/train.py", 7, "main"))
    made.op("backward", 2, layer, recompute=True, name="aten.add.Tensor")
    made.alloc(0, 1000, stream=5, stack=line)
    row = build_blocks(made.read(tmp_path)).frame.iloc[0].to_dict()
    assert row | {"address": 0} == {
        "address": 0,
        "requested_bytes": 1000,
        "bytes": 1024,
        "alloc_event": 1,
        "free_event": 2,
        "reuse_event": 2,
        "op": 0,
        "operation": "aten.add.Tensor",
        "step": 2,
        "phase": "backward",
        "recompute": True,
        "layer": layer,
        "category": "temporary",
        "stream": 5,
        "stack": 0,
    }


def test_a_block_outside_of_any_operation_has_no_place(tmp_path: Path) -> None:
    made = HandMade()
    made.alloc(0, MIB, op=-1)
    made.op("forward", 1, made.layer("a"))
    made.alloc(MIB, MIB, op=5)  # its operation was not written down before the rank was killed
    frame = build_blocks(made.read(tmp_path)).frame
    assert frame["category"].astype(str).tolist() == ["other", "other"]
    assert frame[["step", "layer"]].to_numpy().tolist() == [[0, 0], [0, 0]]
    assert frame["operation"].astype(str).tolist() == ["", ""]


def test_a_mark_is_about_the_block_that_was_at_the_address_then(tmp_path: Path) -> None:
    made = HandMade()
    made.op()
    made.alloc(0, MIB)
    made.mark(0, "gradient")
    made.op()
    made.free(0, MIB)
    made.alloc(0, MIB)
    made.op()
    made.alloc(MIB, MIB)
    made.mark(0, "parameter")
    made.op()
    made.free(0, MIB)
    made.alloc(0, MIB)
    assert categories(build_blocks(made.read(tmp_path))) == ["gradient", "parameter", "temporary", "temporary"]


def test_a_mark_without_a_block_has_no_owner(tmp_path: Path) -> None:
    made = HandMade()
    made.op()
    made.mark(0, "parameter")
    made.op()
    made.alloc(0, MIB)
    assert categories(build_blocks(made.read(tmp_path))) == ["temporary"]


def test_marks_win_in_the_order_of_the_schema(tmp_path: Path) -> None:
    made = HandMade()
    made.op()
    marks = ("communication", "workspace", "gradient", "optimizer_state", "parameter")
    for number in range(len(marks)):
        made.alloc(number * MIB, MIB)
        for name in marks[: number + 1]:
            made.mark(number * MIB, name)
    assert categories(build_blocks(made.read(tmp_path))) == list(marks)
    assert list(marks) == [name for name in reversed(CATEGORIES) if name in marks]


@pytest.mark.parametrize(
    ("mark", "category"),
    [("gradient", "gradient"), ("workspace", "workspace"), ("communication", "activation"), (None, "activation")],
)
def test_a_block_that_is_kept_for_backward_is_an_activation_unless_it_is_something_better(
    tmp_path: Path, mark: str | None, category: str
) -> None:
    made = HandMade()
    first = made.op("forward")
    made.alloc(0, MIB)
    if mark:
        made.mark(0, mark)
    made.op("backward")
    made.free(0, MIB)
    made.region(first, first)
    assert categories(build_blocks(made.read(tmp_path))) == [category]


def test_a_buffer_for_communication_made_in_forward_that_outlives_the_step_is_no_activation(tmp_path: Path) -> None:
    made = HandMade()
    first = made.op("forward", 1)
    made.alloc(0, MIB)
    made.mark(0, "communication")
    made.region(first, first)
    made.op("backward", 1)
    made.op("forward", 2)
    made.alloc(MIB, MIB)
    assert categories(build_blocks(made.read(tmp_path)))[0] == "communication"


@pytest.mark.parametrize("freed", [False, True])
def test_in_the_last_step_the_optimizer_tells_a_kept_buffer_from_an_activation(tmp_path: Path, freed: bool) -> None:
    made = HandMade()
    first = made.op("forward")
    made.alloc(0, MIB)
    made.mark(0, "communication")
    made.region(first, first)
    made.op("backward")
    if freed:
        made.free(0, MIB)
    made.op("optimizer")
    made.alloc(MIB, MIB)
    assert categories(build_blocks(made.read(tmp_path)))[0] == ("activation" if freed else "communication")


def test_activations_are_what_is_left_of_a_forward_when_it_ends(tmp_path: Path) -> None:
    made = HandMade()
    first = made.op("forward")
    made.alloc(0, MIB)  # kept
    made.alloc(MIB, MIB)  # let go by the forward's own last operation
    last = made.op("forward")
    made.free(MIB, MIB)
    made.region(first, last)
    made.op("backward")
    made.free(0, MIB)
    made.alloc(2 * MIB, MIB)  # after the region
    assert categories(build_blocks(made.read(tmp_path))) == ["activation", "temporary", "temporary"]


def test_what_a_checkpoint_computes_again_in_backward_is_an_activation_too(tmp_path: Path) -> None:
    made = HandMade()
    forward = made.op("forward")
    made.region(forward, forward)
    made.op("backward")
    made.alloc(0, MIB)
    again = made.op("backward", recompute=True)
    made.alloc(MIB, MIB)
    made.region(again, again)
    made.op("backward")
    made.free(MIB, MIB)
    found = build_blocks(made.read(tmp_path))
    assert categories(found) == ["temporary", "activation"]
    assert found.frame["recompute"].tolist() == [False, True]


def test_what_is_made_before_the_first_step_is_other_unless_it_is_marked(tmp_path: Path) -> None:
    made = HandMade()
    made.op("init", 0)
    made.alloc(0, MIB)
    made.alloc(MIB, MIB)
    made.mark(MIB, "parameter")
    made.op("optimizer", 1)
    made.alloc(2 * MIB, MIB)
    assert categories(build_blocks(made.read(tmp_path))) == ["other", "parameter", "temporary"]


def test_a_marked_block_belongs_to_the_layer_that_owns_it(tmp_path: Path) -> None:
    made = HandMade()
    first, second = made.layer("a"), made.layer("b")
    made.op("init", 0, first)
    made.alloc(0, MIB)
    made.alloc(MIB, MIB)
    made.mark(0, "parameter", second, MIB)
    made.mark(MIB, "parameter")  # no owner is known
    found = build_blocks(made.read(tmp_path))
    assert found.frame["layer"].tolist() == [second, first]
    assert found.shares.empty


def test_a_layer_that_marks_a_lesser_category_owns_nothing(tmp_path: Path) -> None:
    made = HandMade()
    first, second = made.layer("a"), made.layer("b")
    made.op("init", 0)
    made.alloc(0, MIB)
    made.mark(0, "gradient", first, MIB)
    made.mark(0, "parameter", second, MIB)
    found = build_blocks(made.read(tmp_path))
    assert found.frame["layer"].tolist() == [second]
    assert found.shares.empty


def test_tensors_of_one_layer_in_a_shared_block_add_up(tmp_path: Path) -> None:
    made = HandMade()
    first, second = made.layer("a"), made.layer("b")
    made.op("init", 0)
    made.alloc(0, 10 * MIB)
    # A weight, a bias that is seen twice, and a view of a part of both.
    for start, bytes_ in ((0, 3 * MIB), (3 * MIB, MIB), (3 * MIB, MIB), (2 * MIB, MIB + 5)):
        made.mark(0, "parameter", first, bytes_, start)
    made.mark(0, "parameter", second, 6 * MIB, 4 * MIB)
    shares = build_blocks(made.read(tmp_path)).shares
    assert dict(zip(shares["layer"], shares["bytes"], strict=True)) == {first: 4 * MIB, second: 6 * MIB}


def test_a_shard_of_gathered_parameters_is_one_unless_it_was_made_for_the_gather(tmp_path: Path) -> None:
    made = HandMade()
    layer = made.layer("a")
    made.op("init", 0)
    made.alloc(0, MIB)
    made.op("forward", 1)
    made.alloc(MIB, MIB)
    for address in (0, MIB):
        made.mark(address, "communication")
        made.mark(address, "shard", layer, MIB)
    found = build_blocks(made.read(tmp_path))
    assert categories(found) == ["parameter", "communication"]
    assert found.frame["layer"].tolist() == [layer, 0]


def test_a_shared_block_is_divided_exactly_and_the_rest_is_its_makers(tmp_path: Path) -> None:
    made = HandMade()
    first, second, maker = made.layer("a"), made.layer("b"), made.layer("c")
    made.op("init", 0, maker)
    made.alloc(0, 10 * MIB)
    for bytes_ in (100, 3 * MIB + 1):  # seen twice: the larger counts
        made.mark(0, "parameter", first, bytes_)
    made.mark(0, "parameter", second, 5 * MIB)
    shares = build_blocks(made.read(tmp_path)).shares
    assert shares.to_dict("records") == [
        {"block": 0, "layer": first, "bytes": 3 * MIB + 1},
        {"block": 0, "layer": second, "bytes": 5 * MIB},
        {"block": 0, "layer": maker, "bytes": 2 * MIB - 1},
    ]


def test_what_is_left_of_a_bucket_for_everybody_is_outside_of_modules(tmp_path: Path) -> None:
    made = HandMade()
    first, maker = made.layer("a"), made.layer("c")
    made.op("backward", 1, maker)
    made.alloc(0, 10 * MIB)
    made.mark(0, "gradient", 0)
    made.alloc(10 * MIB, MIB)
    made.mark(10 * MIB, "gradient", 0)
    made.mark(0, "gradient", first, 4 * MIB)
    found = build_blocks(made.read(tmp_path))
    assert found.shares[["layer", "bytes"]].to_numpy().tolist() == [[0, 6 * MIB], [first, 4 * MIB]]
    assert found.frame["layer"].tolist()[1] == 0


def test_tied_weights_are_divided_in_proportion_and_add_up_to_the_block(tmp_path: Path) -> None:
    made = HandMade()
    owners = [made.layer(name) for name in "abc"]
    made.op("init", 0)
    made.alloc(0, MIB + 512)
    for owner, bytes_ in zip(owners, (MIB + 512, MIB + 512, MIB // 3), strict=True):
        made.mark(0, "parameter", owner, bytes_)
    shares = build_blocks(made.read(tmp_path)).shares
    assert shares["bytes"].sum() == MIB + 512
    assert set(shares["layer"]) == set(owners)  # the remainder goes to owners alone
    assert len(shares) == len(owners)
    by_layer = shares.set_index("layer")["bytes"]
    assert abs(by_layer[owners[0]] - by_layer[owners[1]]) <= 2
    assert by_layer[owners[2]] < by_layer[owners[1]] / 2


def test_a_maker_that_also_owns_a_part_has_one_share(tmp_path: Path) -> None:
    made = HandMade()
    first, second = made.layer("a"), made.layer("b")
    made.op("init", 0, first)
    made.alloc(0, 4 * MIB)
    made.mark(0, "parameter", first, MIB)
    made.mark(0, "parameter", second, MIB)
    shares = build_blocks(made.read(tmp_path)).shares
    assert shares[["layer", "bytes"]].to_numpy().tolist() == [[first, 3 * MIB], [second, MIB]]


def test_the_peak_is_the_first_event_with_most_bytes(tmp_path: Path) -> None:
    made = HandMade()
    made.op()
    made.alloc(0, MIB)
    made.alloc(MIB, MIB)
    made.free(MIB, MIB)
    made.alloc(2 * MIB, MIB)
    found = build_blocks(made.read(tmp_path))
    assert found.peak_event == 2
    assert found.at_peak.tolist() == [True, True, False]


def test_a_recording_without_events_has_no_blocks(tmp_path: Path) -> None:
    found = build_blocks(HandMade().read(tmp_path))
    assert len(found.frame) == len(found.shares) == 0
    assert found.peak_event == -1
