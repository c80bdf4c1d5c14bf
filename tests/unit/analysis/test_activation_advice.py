from pathlib import Path

import pytest

from tests.unit.analysis.recorded import MIB, HandMade
from tests.unit.analysis.test_advice import advice, blocks, found, trained


def test_whole_logits_in_the_loss_are_told_with_the_line(made: HandMade, tmp_path: Path) -> None:
    line = made.stack(("/site/torch/nn/functional.py", 5, "cross_entropy"), ("/job/train.py", 12, "loss"))
    made.op("forward", 1, name="aten._to_copy.default")
    made.alloc(0, 64 * MIB, stack=line)
    made.op("forward", 1, name="aten._log_softmax.default")
    made.alloc(100 * MIB, 64 * MIB, stack=line)
    made.op("forward", 1, name="aten._to_copy.default")  # another cast, elsewhere
    made.alloc(200 * MIB, 48 * MIB)
    piece = advice(made, tmp_path)["fuse-loss"]
    assert (piece["gives_low_bytes"], piece["gives_bytes"]) == ((112 - 32) * MIB, 112 * MIB)  # the logits are held
    assert "(train.py:12)" in piece["text"]
    assert piece["line"] == "/job/train.py:12 (loss)"


@pytest.mark.parametrize(
    ("is_held", "left_mib"),
    [(False, 3 * 8 + 2 * 32), (True, 8 + 3 * 32)],
    ids=["chunks at work next to logits and gradient", "held logits, and a gradient twice as its pieces become one"],
)
def test_chunks_of_the_loss_alone_leave_the_logits_and_their_gradient(
    made: HandMade, tmp_path: Path, *, is_held: bool, left_mib: int
) -> None:
    line = made.stack(("/site/torch/nn/functional.py", 5, "cross_entropy"), ("/job/train.py", 12, "loss"))
    sizes = {"logits": 32 * MIB, "cast": 64 * MIB, "saved": 64 * MIB, "picked": 64 * MIB, "back": 64 * MIB}
    sizes["gradient"] = 32 * MIB
    places = {name: number * 100 * MIB for number, name in enumerate(sizes)}

    def alloc(name: str, phase: str, operation: str, stack: int = line) -> int:
        op = made.op(phase, 1, name=f"aten.{operation}")
        made.alloc(places[name], sizes[name], stack=stack)
        return op

    def free(*names: str) -> None:
        for name in names:
            made.free(places[name], sizes[name])

    first = alloc("logits", "forward", "mm.default", stack=-1)
    alloc("cast", "forward", "_to_copy.default")
    last = alloc("saved", "forward", "_log_softmax.default")
    free("cast", *(() if is_held else ("logits",)))
    begin = alloc("picked", "backward", "nll_loss_backward.default")
    made.region(first, last)
    alloc("back", "backward", "_log_softmax_backward_data.default")
    free("picked", "saved")
    end = alloc("gradient", "backward", "_to_copy.default")
    assert begin < end
    free("back", "gradient", *(("logits",) if is_held else ()))
    made.step(1)
    piece = advice(made, tmp_path)["fuse-loss"]
    held = (3 * 64 + 32 * is_held) * MIB
    assert piece["gives_low_bytes"] == held - left_mib * MIB
    assert piece["gives_bytes"] == held * 7 // 8  # the output layer is in the chunks, too
    assert "the output layer in the chunks" in piece["title"]


@pytest.mark.parametrize("apart_us", [1.0, 10.0])
def test_chunks_of_the_loss_cast_the_weight_again_and_add_its_gradient(
    made: HandMade, tmp_path: Path, apart_us: float
) -> None:
    """The output layer is on the loss's line: its weight's cast is none of the logits."""
    line = made.stack(("/site/torch/nn/functional.py", 5, "cross_entropy"), ("/job/train.py", 12, "loss"))
    head = made.layer("head", "Linear")
    ops = [
        ("_to_copy.default", "forward", head, 16),
        ("mm.default", "forward", head, 32),
        ("_to_copy.default", "forward", 0, 64),
        ("_log_softmax.default", "forward", 0, 64),
        ("_log_softmax_backward_data.default", "backward", 0, 64),
        ("_to_copy.default", "backward", 0, 32),
        ("mm.default", "backward", head, 16),
    ]
    for number, (name, phase, layer, mib) in enumerate(ops):
        made.op(phase, 1, layer, name=f"aten.{name}")
        made.alloc(number * 100 * MIB, mib * MIB, stack=line)
    made.step(1)
    piece = found(made, tmp_path, apart_us=apart_us)[0]["fuse-loss"]
    assert "holds 224.00 MiB of full logits" in piece.text
    # Each kernel takes 100 us. Forward again, seven casts, 7 x 7 times the weight at 100 us for 128 MiB, and products.
    high = 400 + 7 * 100 + 49 * 16 / 128 * 100 + 0.25 * 2 * 200
    launches = 2 * 7 * 5 * 3  # of the output layer and the loss
    # On the host, each chunk's forward again, twice that in hooks, 12 launches of a checkpoint, and its own launches.
    host = 8 * (4 * 3 + 12 + 3 + 2) * apart_us
    assert piece.price_us == 0
    assert piece.price_high_us == pytest.approx(max(high + launches, host))


def test_offloaded_activations_leave_one_layer_or_two_and_cross_the_link_both_ways(
    made: HandMade, tmp_path: Path
) -> None:
    trained(made, blocks(made, 4))
    piece = found(made, tmp_path, host_bandwidth=64e9, gpus_per_node=8)[0]["offload"]
    # At least, the last layer's three blocks are there when backward begins, and those that come next.
    assert piece.gives_low_bytes == (122 - 62) * MIB
    assert piece.gives_bytes == (122 - 12) * MIB
    one_way = 120 * MIB / 64e9 * 1e6
    assert piece.price_us == pytest.approx(one_way - 1200 + one_way)  # forward hides 1.2 ms
    assert piece.price_high_us == pytest.approx(4 * one_way)
    assert "keeps 120.00 MiB a step on the host, 960.00 MiB for the GPUs of a node" in piece.text


def test_nothing_is_offloaded_over_a_link_that_is_not_known(made: HandMade, tmp_path: Path) -> None:
    trained(made, blocks(made, 4))
    assert "offload" not in found(made, tmp_path)[0]


def test_a_selective_checkpoint_keeps_products_those_that_were_not_saved_too(made: HandMade, tmp_path: Path) -> None:
    ops, layers = [], blocks(made, 4)
    for number, layer in enumerate(layers):
        for at, name in enumerate(("aten.mm.default", "aten.gelu.default", "aten.mm.default", "aten.add.Tensor")):
            ops.append(made.op("forward", 1, layer, name=name))
            made.alloc((number * 10 + at) * 10 * MIB, 10 * MIB)
        made.free((number * 10 + 2) * 10 * MIB, 10 * MIB)  # the second product's result
    made.op("backward", 1, 0)
    made.region(ops[0], ops[-1])
    for number in reversed(range(4)):
        for at in (3, 1, 0):
            made.free((number * 10 + at) * 10 * MIB, 10 * MIB)
    made.step(1)
    pieces = found(made, tmp_path)[0]
    # Three layers keep two products and an output, of which they held three blocks; the layer at work is whole.
    assert "selective-checkpoint" not in pieces  # as much is kept in addition as is dropped
    assert pieces["checkpoint"].gives_bytes == 60 * MIB
    assert pieces["checkpoint"].price_us == 4 * 200  # it stops after gelu
    assert pieces["checkpoint"].price_high_us == 4 * 400


def test_a_selective_checkpoint_recomputes_the_rest(made: HandMade, tmp_path: Path) -> None:
    ops, layers = [], blocks(made, 4)
    for number, layer in enumerate(layers):
        for at, name in enumerate(("aten.mm.default", "aten.gelu.default", "aten.mul.Tensor", "aten.add.Tensor")):
            ops.append(made.op("forward", 1, layer, name=name))
            made.alloc((number * 10 + at) * 10 * MIB, 10 * MIB)
    made.op("backward", 1, 0)
    made.region(ops[0], ops[-1])
    for number in reversed(range(4)):
        for at in reversed(range(4)):
            made.free((number * 10 + at) * 10 * MIB, 10 * MIB)
    made.step(1)
    piece = found(made, tmp_path)[0]["selective-checkpoint"]
    assert piece.gives_bytes == 3 * 20 * MIB
    assert (piece.price_us, piece.price_high_us) == (4 * 200, 4 * 300)
    assert "functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])" in piece.text


def test_of_compiled_layers_a_checkpoint_is_known_by_bounds_alone(made: HandMade, tmp_path: Path) -> None:
    ops, layers = [], blocks(made, 4)
    for number, layer in enumerate(layers):
        ops.append(made.op("forward", 1, layer, name="inductor::graph"))
        for at in range(4):
            made.alloc((number * 10 + at) * 10 * MIB, 10 * MIB)
        ops.append(made.op("forward", 1, layer, name="aten.addmm.out"))
        made.alloc((number * 10 + 5) * 10 * MIB, MIB)  # a workspace: the result is a graph's block
        made.free((number * 10 + 5) * 10 * MIB, MIB)
    made.op("backward", 1, 0)
    made.region(ops[0], ops[-1])
    for number in reversed(range(4)):
        for at in reversed(range(4)):
            made.free((number * 10 + at) * 10 * MIB, 10 * MIB)
    made.step(1)
    pieces = found(made, tmp_path, host_bandwidth=64e9)[0]
    assert not {"selective-checkpoint", "offload"} & set(pieces)
    piece = pieces["checkpoint"]
    assert (piece.gives_low_bytes, piece.gives_bytes) == ((1 + 3 * 30) * MIB, (1 + 150) * MIB)  # 161 at the peak
    assert (piece.price_us, piece.price_high_us) == (0, 8 * 100)
    assert "partitioner of torch.compile" in piece.text


def test_half_the_micro_batch_halves_what_scales_and_holds_gradients_through_forward(
    made: HandMade, tmp_path: Path
) -> None:
    (layer,) = blocks(made, 1)
    made.op("init", 0)
    made.alloc(0, 30 * MIB, mark=("parameter", layer, 30 * MIB))
    for step in (1, 2):
        first = made.op("forward", step, layer)
        made.alloc(100 * MIB, 80 * MIB)
        last = made.op("forward", step, layer, name="aten._to_copy.default")
        made.alloc(200 * MIB, 60 * MIB)  # a parameter's size twice over: may be made of it
        made.op("backward", step, layer)
        made.region(first, last)
        made.alloc(300 * MIB, 30 * MIB, mark=("gradient", layer, 30 * MIB))
        made.free(200 * MIB, 60 * MIB)
        made.free(100 * MIB, 80 * MIB)
        made.op("optimizer", step)
        made.free(300 * MIB, 30 * MIB)
        made.record("step", step=step, start_us=step * 1000, end_us=step * 1000 + 900, samples=4)
    piece = found(made, tmp_path)[0]["micro-batch"]
    # 30 + 80 + 60 + 30 MiB; the gradient's second copy while the first is held.
    assert piece.gives_low_bytes == 40 * MIB - 30 * MIB
    assert piece.gives_bytes == 70 * MIB - 30 * MIB
    assert piece.title == "micro-batches of 2 instead of 4, accumulated 2 times as often"


@pytest.mark.parametrize(
    ("made_by", "size", "is_sure"),
    [
        ("aten.gelu.default", 20, True),
        ("aten._to_copy.default", 20, False),  # autocast's copy of the weight, as large as a result
        ("aten.mul.Tensor", 20, False),  # a mask of the weight
        ("aten.cat.default", 120, False),  # two weights together
        ("aten.native_batch_norm.default", 40, False),  # a standardized weight
        ("aten.tril.default", 28, False),
        ("aten.mul.Tensor", 28, True),
    ],
)
def test_what_weights_are_made_into_does_not_surely_scale_with_the_batch(
    made: HandMade, tmp_path: Path, made_by: str, size: int, is_sure: bool
) -> None:
    (layer,) = blocks(made, 1)
    made.op("init", 0)
    made.alloc(0, 40 * MIB, mark=("parameter", layer, 40 * MIB))
    for step in (1, 2):
        first = made.op("forward", step, layer, name="aten.addmm.default")
        made.alloc(100 * MIB, size * MIB)  # as large as what follows
        last = made.op("forward", step, layer, name=made_by)
        made.alloc(300 * MIB, size * MIB)
        made.op("backward", step, layer)
        made.region(first, last)
        for address in (300, 100):
            made.free(address * MIB, size * MIB)
        made.record("step", step=step, start_us=step * 1000, end_us=step * 1000 + 900, samples=4)
    piece = found(made, tmp_path)[0]["micro-batch"]
    assert piece.gives_bytes == size * MIB
    assert piece.gives_low_bytes == (size if is_sure else size / 2) * MIB


def test_a_micro_batch_of_one_is_not_halved(made: HandMade, tmp_path: Path) -> None:
    trained(made, blocks(made, 4))
    assert "micro-batch" not in found(made, tmp_path)[0]
