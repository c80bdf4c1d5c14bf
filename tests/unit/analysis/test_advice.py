from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakedist.results.building import build_tables
from fakedist.rundir.manifest import load_manifest
from fakedist.rundir.plain import to_plain
from tests.unit.analysis.recorded import GIB, GPU, MIB, HandMade, new_run


def advice(made: HandMade, directory: Path) -> dict[str, dict[str, Any]]:
    made.ended()
    run = made.write(new_run(directory / "run"))
    build_tables(run)
    summary = load_manifest(run).summary
    assert summary is not None
    return {piece.rule: to_plain(piece) for piece in summary.advice}


def blocks(made: HandMade, number: int) -> list[int]:
    container = made.layer("layers", "ModuleList", made.layer("(Net)", "Net"))
    return [made.layer(f"layers.{at}", "Block", container) for at in range(number)]


def trained(made: HandMade, layers: list[int], *, saved: int = 3) -> None:
    """One step: every layer saves blocks of 10 MiB, the last of them its output; backward frees them in reverse."""
    ops = []
    for number, layer in enumerate(layers):
        for at in range(saved):
            ops.append(made.op("forward", 1, layer))
            made.alloc((number * 10 + at) * 10 * MIB, 10 * MIB)
    made.op("backward", 1, 0)
    made.region(ops[0], ops[-1])
    made.alloc(1_000 * MIB, 2 * MIB)  # before the last layer's first free, when all of it is held again
    for number in reversed(range(len(layers))):
        for at in reversed(range(saved)):
            made.free((number * 10 + at) * 10 * MIB, 10 * MIB)
    made.step(1)


def test_checkpointing_keeps_one_output_a_layer_and_one_layer_whole(made: HandMade, tmp_path: Path) -> None:
    trained(made, blocks(made, 4))
    piece = advice(made, tmp_path)["checkpoint"]
    # Of 122 MiB stay, with a checkpoint: outputs of three layers, the whole of the one at work, and backward's own.
    assert piece["gives_bytes"] == (122 - (3 * 10 + 30 + 2)) * MIB
    assert piece["title"] == "checkpoint layers.0-3 (Block)"
    assert "hold 120.00 MiB at the peak" in piece["text"]


@pytest.mark.parametrize(("number", "saved"), [(4, 1), (1, 3)])
def test_nothing_is_said_of_layers_that_save_their_output_alone_or_do_not_repeat(
    made: HandMade, tmp_path: Path, number: int, saved: int
) -> None:
    trained(made, blocks(made, number), saved=saved)
    assert "checkpoint" not in advice(made, tmp_path)


def replicated(
    made: HandMade,
    *,
    group_size: int = 8,
    forward_too: bool = False,
    reduced_bytes: int = 40 * MIB,
    state_bytes: int = 80 * MIB,
) -> None:
    """Parameters of 40 MiB, Adam's state of twice that, gradients that are all-reduced in backward."""
    (layer,) = blocks(made, 1)
    made.op("init", 0)
    made.alloc(0, 40 * MIB, mark=("parameter", layer, 40 * MIB))
    made.op("forward", 1, layer)
    made.op("backward", 1)
    made.op("optimizer", 1)
    made.alloc(100 * MIB, state_bytes, mark=("optimizer_state", layer, state_bytes))
    made.step(1)
    made.record("groups", rows=[(0, "0", "default_pg", tuple(range(group_size)), 0, 0, "nccl")])
    # The call is of scope 2, the backward.
    rows = [(0, "all_reduce", 0, reduced_bytes, reduced_bytes, "float32", True, 0, 2, 2, -1, 0, 0)]
    if forward_too:
        rows.append((1, "all_reduce", 0, MIB, MIB, "float32", True, 0, 1, 1, -1, 0, 0))
    made.record("calls", rows=rows)


def test_optimizer_state_that_a_group_holds_alike_can_be_sharded(made: HandMade, tmp_path: Path) -> None:
    replicated(made)
    assert advice(made, tmp_path)["shard-optimizer"]["gives_bytes"] == 70 * MIB  # seven eighths


@pytest.mark.parametrize(
    "how",
    [{"group_size": 1}, {"forward_too": True}, {"reduced_bytes": 35 * MIB}, {"state_bytes": 19 * MIB}],
    ids=["one rank", "tensor parallel", "some gradients", "state is sharded already"],
)
def test_a_group_of_one_of_tensor_parallelism_or_of_some_gradients_shards_no_optimizer(
    made: HandMade, tmp_path: Path, how: dict[str, Any]
) -> None:
    replicated(made, **how)
    assert "shard-optimizer" not in advice(made, tmp_path)


def test_whole_logits_in_the_loss_are_told_with_the_line(made: HandMade, tmp_path: Path) -> None:
    line = made.stack(("/site/torch/nn/functional.py", 5, "cross_entropy"), ("/job/train.py", 12, "loss"))
    made.op("forward", 1, name="aten._to_copy.default")
    made.alloc(0, 64 * MIB, stack=line)
    made.op("forward", 1, name="aten._log_softmax.default")
    made.alloc(100 * MIB, 64 * MIB, stack=line)
    made.op("forward", 1, name="aten._to_copy.default")  # another cast, elsewhere
    made.alloc(200 * MIB, 32 * MIB)
    piece = advice(made, tmp_path)["fuse-loss"]
    assert piece["gives_bytes"] == 112 * MIB
    assert "(train.py:12)" in piece["text"]
    assert piece["line"] == "/job/train.py:12 (loss)"


def test_a_change_gives_no_more_than_the_next_peak_leaves(made: HandMade, tmp_path: Path) -> None:
    made.op("forward", 1, name="aten._log_softmax.default")
    made.alloc(0, 80 * MIB)
    made.free(0, 80 * MIB)
    made.op("forward", 1)
    made.alloc(100 * MIB, 60 * MIB)
    piece = advice(made, tmp_path)["fuse-loss"]
    assert (piece["gives_bytes"], piece["line"]) == (20 * MIB, "")


def test_what_gives_little_of_the_peak_is_not_said(made: HandMade, tmp_path: Path) -> None:
    made.op("forward", 1)
    made.event("segment_alloc", 2 * GIB, 40 * GIB)
    made.alloc(2 * GIB, 40 * GIB)
    made.op("forward", 1, name="aten._log_softmax.default")
    made.alloc(0, 80 * MIB)
    assert "fuse-loss" not in advice(made, tmp_path)


def test_lists_of_temporaries_in_the_optimizer_are_told(made: HandMade, tmp_path: Path) -> None:
    made.op("forward", 1)
    made.alloc(0, 50 * MIB)
    made.op("optimizer", 1, name="aten._foreach_sqrt.default")
    made.alloc(100 * MIB, 30 * MIB)
    assert advice(made, tmp_path)["fuse-optimizer"]["gives_bytes"] == 30 * MIB


def test_gradients_kept_through_the_forward_are_told(made: HandMade, tmp_path: Path) -> None:
    (layer,) = blocks(made, 1)
    made.op("forward", 1, layer)
    made.op("backward", 1, layer)
    made.alloc(0, 20 * MIB, mark=("gradient", layer, 20 * MIB))
    made.op("optimizer", 1)
    made.alloc(50 * MIB, 512)
    made.step(1)
    made.op("forward", 2, layer)
    made.alloc(100 * MIB, 60 * MIB)
    made.op("backward", 2, layer)
    made.free(100 * MIB, 60 * MIB)
    made.step(2)
    assert advice(made, tmp_path)["drop-gradients"]["gives_bytes"] == 20 * MIB


def test_reserved_memory_that_nothing_used_is_a_limit_and_comes_after_what_was_computed(
    made: HandMade, tmp_path: Path
) -> None:
    made.op("forward", 1, name="aten._log_softmax.default")
    made.alloc(0, 80 * MIB)
    found = advice(made, tmp_path)
    assert list(found) == ["fuse-loss", "expandable-segments"]  # 70 and up to 944 MiB
    limit = found["expandable-segments"]
    assert (limit["gives_bytes"], limit["of"], limit["is_upper_bound"]) == (944 * MIB, "peak_reserved_bytes", True)


def test_nothing_is_said_of_a_run_without_memory(tmp_path: Path) -> None:
    assert advice(HandMade(), tmp_path) == {}


def _room(made: HandMade, capacity_bytes: int) -> None:
    made.gpu = replace(GPU, capacity_bytes=capacity_bytes)


def remedy(made: HandMade, directory: Path, capacity_bytes: int) -> dict[str, Any] | None:
    _room(made, capacity_bytes)
    directory.mkdir(exist_ok=True)
    made.record("beyond", device=0, requested_bytes=MIB, limit_bytes=capacity_bytes, op=0, stack=["train.py:1 (f)"])
    made.ended()
    run = made.write(new_run(directory / "run"))
    build_tables(run)
    summary = load_manifest(run).summary
    assert summary is not None
    assert not summary.fits
    return None if summary.remedy is None else to_plain(summary.remedy)


def test_advice_says_what_would_then_be_reserved_and_whether_that_fits(tmp_path: Path) -> None:
    for capacity, expected in ((2 * GIB, "fits"), (500 * MIB, "may fit"), (50 * MIB, "does not fit")):
        made = HandMade()
        trained(made, blocks(made, 4))
        _room(made, capacity)
        (tmp_path / expected).mkdir()
        piece = advice(made, tmp_path / expected)["checkpoint"]
        assert piece["needs_low_bytes"] == (3 * 10 + 30 + 2) * MIB
        assert piece["needs_high_bytes"] == (3 * 10 + 30 + 2) * MIB + GIB - 122 * MIB  # what is not allocated stays
        assert piece["fits"] == expected
        assert piece["price_us"] is None


def test_the_fewest_changes_that_fit_are_the_remedy(tmp_path: Path) -> None:
    made = HandMade()
    trained(made, blocks(made, 8))
    one = remedy(made, tmp_path / "one", 1_000 * MIB)  # 242 of 1,024 MiB are allocated
    assert one is not None
    assert one["rules"] == ["checkpoint"]
    assert one["fits"] == "fits"
    assert one["titles"] in (["checkpoint layers.0-7 (Block)"], ["checkpoint every second layer of layers.0-7 (Block)"])
    assert one["unpriced"] == ["checkpoint"]
    made = HandMade()
    trained(made, blocks(made, 8))
    assert remedy(made, tmp_path / "none", 10 * MIB) is None  # a layer at work has more, even offloaded


def test_two_changes_of_which_each_uncovers_the_other_are_found_together(tmp_path: Path) -> None:
    """Activations hold 122 MiB when backward begins, and the loss 120 MiB at another moment."""
    made = HandMade()
    trained(made, blocks(made, 4))
    made.op("forward", 2, 0, name="aten._log_softmax.default")
    made.alloc(0, 120 * MIB)
    made.op("backward", 2, 0)
    made.free(0, 120 * MIB)
    made.step(2)
    both = remedy(made, tmp_path, 1_000 * MIB)
    assert both is not None
    assert sorted(both["rules"]) == ["checkpoint", "fuse-loss"]
    assert both["gives_bytes"] == (122 - 62) * MIB
