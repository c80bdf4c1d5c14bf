import hashlib
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fakedist.analysis.advice import find_advice
from fakedist.analysis.evidence import Room, Setup
from fakedist.results.building import build_tables, compute_tables
from fakedist.rundir.directory import load_manifest
from fakedist.rundir.plain import to_plain
from fakedist.rundir.records import StepRecord
from fakedist.rundir.summary import Advice
from tests.unit.analysis.recorded import GIB, GPU, MIB, HandMade, new_run
from tests.unit.cost_model.test_reference_prices import six_digits


def advice(made: HandMade, directory: Path, *, has_step: bool = True) -> dict[str, dict[str, Any]]:
    if made.gpu is GPU:  # of which 1 % is more than these small jobs have
        made.gpu = replace(GPU, capacity_bytes=0)
    if has_step and not any(isinstance(record, StepRecord) for record in made.others):
        made.step(1)
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


@pytest.mark.parametrize(("sum_mib", "least", "most"), [(8, 60, 60), (14, 60, 64), (30, 60, 70)])
def test_what_a_checkpoint_hands_to_a_node_may_be_freed_before_the_sum_of_its_bias(
    made: HandMade, tmp_path: Path, sum_mib: int, least: int, most: int
) -> None:
    """Four layers save three blocks of 10 MiB; each backward sums a bias before it frees the second of them."""
    held, ops = list[int](), list[int]()
    for layer in blocks(made, 4):
        for _ in range(3):
            ops.append(made.op("forward", 1, layer))
            held.append(len(held) * 20 * MIB)
            made.alloc(held[-1], 10 * MIB)
    made.op("backward", 1, 0)
    made.region(ops[0], ops[-1])
    made.alloc(1_000 * MIB, 2 * MIB)
    for number in (9, 6, 3, 0):
        made.free(held[number + 2], 10 * MIB)
        made.op("backward", 1, 0, name="aten.sum.dim_IntList")
        made.alloc(1_100 * MIB, sum_mib * MIB)
        made.free(1_100 * MIB, sum_mib * MIB)
        made.free(held[number + 1], 10 * MIB)
        made.op("backward", 1, 0, name="aten.gelu_backward.default")
        made.alloc(1_200 * MIB, MIB)
        made.free(held[number], 10 * MIB)
        made.free(1_200 * MIB, MIB)
    made.step(1)
    piece = advice(made, tmp_path)["checkpoint"]
    # With a checkpoint the last layer is whole (62 MiB with what is around it), or lacks one block while its sum runs.
    assert (piece["gives_low_bytes"], piece["gives_bytes"]) == (least * MIB, most * MIB)


def test_a_stages_output_that_is_sent_is_not_kept_for_each_micro_batch(made: HandMade, tmp_path: Path) -> None:
    """Two micro-batches, forward and then backward. What the last layer saves last is larger than an output."""
    held, ops, layers = list[tuple[int, int]](), list[int](), blocks(made, 4)
    for _ in range(2):
        for number, layer in enumerate(layers):
            for at in range(3):
                ops.append(made.op("forward", 1, layer))
                held.append((len(held) * 20 * MIB, (20 if (number, at) == (3, 2) else 10) * MIB))
                made.alloc(*held[-1])
    made.op("backward", 1, 0)
    made.region(ops[0], ops[-1])
    made.alloc(1_000 * MIB, 2 * MIB)
    for block in [*reversed(held[:12]), *reversed(held[12:])]:
        made.free(*block)
    made.step(1)
    piece = advice(made, tmp_path)["checkpoint"]
    # Of 262 MiB stay: outputs of three layers for each micro-batch, the whole of the layer at work, and backward's own.
    assert piece["gives_bytes"] == (262 - (2 * 3 * 10 + 40 + 2)) * MIB


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
    shards: bool = False,
    reduced_bytes: int = 40 * MIB,
    state_bytes: int = 80 * MIB,
) -> None:
    """Parameters of 40 MiB, Adam's state of twice that, gradients that are all-reduced in backward.

    With ``shards``, these are shards of FSDP, which gathers them twice as large in forward.
    """
    (layer,) = blocks(made, 1)
    made.op("init", 0)
    made.alloc(0, 40 * MIB, mark=("parameter", layer, 40 * MIB))
    made.op("forward", 1, layer)
    if shards:
        made.alloc(50 * MIB, 80 * MIB, mark=("parameter", layer, 80 * MIB))
    made.op("backward", 1)
    made.op("optimizer", 1)
    made.alloc(200 * MIB, state_bytes, mark=("optimizer_state", layer, state_bytes))
    made.step(1)
    groups = [(0, "0", "default_pg", tuple(range(group_size)), 0, 0, "nccl"), (1, "1", "shard", (0, 8), 0, 0, "nccl")]
    made.record("groups", rows=groups)
    # The call is of scope 2, the backward.
    rows = [(0, "all_reduce", 0, reduced_bytes, reduced_bytes, "float32", True, 0, 2, 2, -1, 0, 0)]
    if forward_too:
        rows.append((1, "all_reduce", 0, MIB, MIB, "float32", True, 0, 1, 1, -1, 0, 0))
    if shards:
        gathered = 80 * MIB
        rows.append((1, "all_gather_into_tensor", 1, gathered // 2, gathered, "float32", True, 0, 1, 1, -1, 0, 0))
    made.record("calls", rows=rows)


@pytest.mark.parametrize(("ranks", "gives_mib"), [(8, 70), (2, 40)])
def test_optimizer_state_that_a_group_holds_alike_can_be_sharded(
    made: HandMade, tmp_path: Path, ranks: int, gives_mib: int
) -> None:
    replicated(made, group_size=ranks)
    assert advice(made, tmp_path)["shard-optimizer"]["gives_bytes"] == gives_mib * MIB  # seven eighths, or half


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


def test_a_change_gives_no_more_than_the_next_peak_leaves(made: HandMade, tmp_path: Path) -> None:
    made.op("forward", 1, name="aten._log_softmax.default")
    made.alloc(0, 80 * MIB)
    made.free(0, 80 * MIB)
    made.op("forward", 1)
    made.alloc(100 * MIB, 60 * MIB)
    piece = advice(made, tmp_path)["fuse-loss"]
    assert (piece["gives_bytes"], piece["line"]) == (20 * MIB, "")


@pytest.mark.parametrize(
    ("others", "gives", "is_said"),
    [(40 * GIB, 80 * MIB, False), (10 * MIB, 3 * MIB // 2, True), (10 * MIB, MIB - 512, False)],
)
def test_what_gives_little_of_the_peak_is_not_said(
    made: HandMade, tmp_path: Path, others: int, gives: int, is_said: bool
) -> None:
    made.op("forward", 1)
    made.event("segment_alloc", 2 * GIB, 40 * GIB)
    made.alloc(2 * GIB, others)
    made.op("forward", 1, name="aten._log_softmax.default")
    made.alloc(0, gives)
    assert ("fuse-loss" in advice(made, tmp_path)) is is_said


@pytest.mark.parametrize(("capacity", "is_said"), [(6_000 * MIB, True), (6_100 * MIB, False)])
def test_what_gives_less_than_a_hundredth_of_the_gpu_is_not_said(
    made: HandMade, tmp_path: Path, capacity: int, is_said: bool
) -> None:
    trained(made, blocks(made, 4))  # a checkpoint gives 60 of 122 MiB
    _room(made, capacity)
    assert ("checkpoint" in advice(made, tmp_path)) is is_said


def test_nothing_is_said_before_a_step_has_ended_unless_memory_ran_out(tmp_path: Path) -> None:
    for is_out_of_memory in (False, True):
        made = HandMade()
        made.op("forward", 1, name="aten._log_softmax.default")
        made.alloc(0, 80 * MIB)
        if is_out_of_memory:
            made.record("beyond", device=0, requested_bytes=MIB, limit_bytes=GIB, op=0, stack=["train.py:1 (f)"])
        directory = tmp_path / str(is_out_of_memory)
        directory.mkdir()
        assert ("fuse-loss" in advice(made, directory, has_step=False)) is is_out_of_memory


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


def test_dropped_gradients_are_gone_until_the_backward_of_their_layer(made: HandMade, tmp_path: Path) -> None:
    (layer,) = blocks(made, 1)
    made.op("forward", 1, layer)
    made.op("backward", 1, layer)
    made.alloc(0, 20 * MIB, mark=("gradient", layer, 20 * MIB))
    made.step(1)
    made.op("forward", 2, layer)
    made.alloc(100 * MIB, 60 * MIB)
    made.op("backward", 2, 0)  # the loss's, where the peak is
    made.alloc(200 * MIB, 60 * MIB)
    made.free(200 * MIB, 60 * MIB)
    made.op("backward", 2, layer)
    made.alloc(300 * MIB, 20 * MIB)
    made.free(300 * MIB, 20 * MIB)
    made.free(100 * MIB, 60 * MIB)
    made.step(2)
    assert advice(made, tmp_path)["drop-gradients"]["gives_low_bytes"] == 20 * MIB


def test_reserved_memory_that_nothing_used_is_a_limit_and_comes_after_what_was_computed(
    made: HandMade, tmp_path: Path
) -> None:
    made.op("forward", 1, name="aten._log_softmax.default")
    made.alloc(0, 80 * MIB)
    found = advice(made, tmp_path)
    assert list(found) == ["fuse-loss", "expandable-segments"]  # 70 and up to 944 MiB
    limit = found["expandable-segments"]
    assert (limit["gives_bytes"], limit["of"], limit["is_upper_bound"]) == (944 * MIB, "peak_reserved_bytes", True)


def test_expandable_segments_do_not_free_what_a_stream_still_uses(made: HandMade, tmp_path: Path) -> None:
    made.op("forward", 1)
    made.alloc(0, 80 * MIB)
    made.event("free_requested", 0, 80 * MIB)
    made.alloc(100 * MIB, 60 * MIB)
    made.event("free_completed", 0, 80 * MIB)
    assert advice(made, tmp_path)["expandable-segments"]["gives_bytes"] == (1024 - 140) * MIB


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
    line = made.stack(("/job/train.py", 12, "loss"))
    for at, name in enumerate(("_to_copy", "_log_softmax")):
        made.op("forward", 2, 0, name=f"aten.{name}.default")
        made.alloc(at * 100 * MIB, 60 * MIB, stack=line)
    made.op("backward", 2, 0)
    for at in range(2):
        made.free(at * 100 * MIB, 60 * MIB)
    made.step(2)
    both = remedy(made, tmp_path, 1_000 * MIB)
    assert both is not None
    assert sorted(both["rules"]) == ["checkpoint", "fuse-loss"]
    assert both["gives_bytes"] == (122 - 62) * MIB


# ---- changes whose saving is known by bounds; whole tables, since times are needed


def found(
    made: HandMade, directory: Path, capacity: int = 0, *, apart_us: float = 10.0, **setup: Any
) -> tuple[dict[str, Any], Any]:
    """Advice by rule, and the remedy. The host launches every ``apart_us``."""
    advices, remedy_ = _advised(made, directory, capacity, apart_us, **setup)
    return {piece.rule: piece for piece in advices}, remedy_


def _advised(
    made: HandMade, directory: Path, capacity: int, apart_us: float = 10.0, **setup: Any
) -> tuple[list[Advice], Any]:
    """Advice, and the remedy, of a hand-made run whose step has kernels: 100 us for each of its operations."""
    made.ended()
    computed = compute_tables(made.write(new_run(directory / "run")))
    tables = computed.tables
    ops = range(len(made.ops))
    scopes = {number: key for key, number in made.scopes.items()}
    names = {number: name for name, number in made.operations.items()}
    columns = ("step", "phase", "layer", "recompute")
    rows = [dict(zip(columns, scopes[scope], strict=True)) | {"operation": names[name]} for name, scope in made.ops]
    kernels = pd.DataFrame(rows).assign(op=ops, duration_us=100.0, call=-1, family="gemm", bound="")
    is_call = kernels["operation"].str.startswith("c10d.")
    kernels.loc[is_call, "call"] = range(int(is_call.sum()))
    kernels.loc[kernels["operation"].str.contains("add"), "bound"] = "launch"
    kernels["launch_us"] = kernels["op"] * apart_us
    room = Room(capacity, capacity, 10_000.0) if capacity else Room(step_us=10_000.0)
    return find_advice(tables | {"kernels": kernels}, computed.folds, room, Setup(**setup))


def test_replicas_can_shard_their_parameters_and_gradients(made: HandMade, tmp_path: Path) -> None:
    replicated(made)
    pieces = found(made, tmp_path)[0]
    # Nothing repeats, so that parameters may be whole, and the state of the only parameter may not be divided.
    assert (pieces["shard-parameters"].gives_low_bytes, pieces["shard-parameters"].gives_bytes) == (
        69 * MIB,  # the rest may get a segment of its own
        105 * MIB,
    )
    assert pieces["shard-gradients"].gives_bytes == (70 - 5) * MIB  # less this rank's shard of the parameters
    assert pieces["shard-optimizer"].gives_low_bytes == 0
    assert "fully_shard" in pieces["shard-parameters"].title


def test_replicas_of_shards_can_shard_over_all_ranks(made: HandMade, tmp_path: Path) -> None:
    replicated(made, shards=True)
    pieces = found(made, tmp_path)[0]
    piece = pieces["shard-parameters"]
    assert "over default_pg, too" in piece.title
    # Of 120 MiB of shards, each of two blocks leaves an eighth: below 10 MiB a nineteenth more, else 1 MiB.
    assert piece.gives_bytes == 105 * MIB
    assert 105 * MIB - piece.gives_low_bytes == MIB + -(-5 * MIB // 19)
    assert piece.price_us is None
    assert not {"shard-gradients", "shard-optimizer"} & set(pieces)


def test_a_group_of_tensor_parallelism_shards_no_parameters(made: HandMade, tmp_path: Path) -> None:
    replicated(made, forward_too=True)
    assert not {"shard-parameters", "shard-gradients"} & set(found(made, tmp_path)[0])


def test_parameters_that_stay_whole_after_forward_can_be_resharded(made: HandMade, tmp_path: Path) -> None:
    ops, layers = [], blocks(made, 4)
    for number, layer in enumerate(layers):
        made.op("forward", 1, layer, name="aten.copy_.default")
        made.alloc((number * 10 + 5) * 10 * MIB, 40 * MIB, mark=("parameter", layer, 40 * MIB))
        ops.append(made.op("forward", 1, layer))
        made.alloc(number * 100 * MIB, 10 * MIB)
    made.op("backward", 1, 0)
    made.region(ops[0], ops[-1])
    for number in reversed(range(4)):
        made.free(number * 100 * MIB, 10 * MIB)
        made.free((number * 10 + 5) * 10 * MIB, 40 * MIB)
    made.step(1)
    piece = found(made, tmp_path)[0]["reshard"]
    # Of 200 MiB, three layers' parameters go while backward begins; at least, those gathered ahead are there.
    assert piece.gives_bytes == 3 * 40 * MIB
    assert 0 < piece.gives_low_bytes < piece.gives_bytes
    assert "reshard_after_forward=True" in piece.text


def test_logits_that_a_tensor_parallel_group_gathers_can_stay_sharded(made: HandMade, tmp_path: Path) -> None:
    made.op("forward", 1, name="aten._log_softmax.default")
    made.alloc(0, 80 * MIB)
    made.step(1)
    made.record("groups", rows=[(0, "0", "tp", (0, 1, 2, 3), 0, 0, "nccl")])
    calls = (("reduce_scatter_tensor", MIB, MIB), ("all_gather_into_tensor", 20 * MIB, 80 * MIB))
    rows = [
        (number, name, 0, size_in, size_out, "float32", True, 0, 0, 0, -1, 0, 0)
        for number, (name, size_in, size_out) in enumerate(calls)
    ]
    made.record("calls", rows=rows)
    assert found(made, tmp_path)[0]["loss-parallel"].gives_low_bytes == 60 * MIB


MEGATRON = ("--micro-batch-size", "4", "--recompute-granularity", "selective", "--recompute-modules", "core_attn")


def test_megatron_is_advised_with_the_flags_to_type(made: HandMade, tmp_path: Path) -> None:
    stack = made.stack(("/site/megatron/core/transformer/transformer_layer.py", 5, "forward"))
    container = made.layer("decoder.layers", "ModuleList", made.layer("decoder", "TransformerBlock"))
    layers = [made.layer(f"decoder.layers.{at}", "TransformerLayer", container) for at in range(4)]
    made.stack(("/site/transformer_engine/pytorch/attention.py", 5, "forward"))
    norms = [made.layer(f"decoder.layers.{at}.input_layernorm", "Norm", layer) for at, layer in enumerate(layers)]
    ops = []
    for number, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
        for at, owner in enumerate((norm, layer, layer)):
            ops.append(made.op("forward", 1, owner))
            made.alloc((number * 10 + at) * 10 * MIB, 10 * MIB, stack=stack)
    made.op("backward", 1, 0)
    made.region(ops[0], ops[-1])
    for number in reversed(range(4)):
        for at in reversed(range(3)):
            made.free((number * 10 + at) * 10 * MIB, 10 * MIB)
    made.step(1)
    pieces = found(made, tmp_path, host_bandwidth=64e9, arguments=MEGATRON)[0]
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert pieces["checkpoint"].title.endswith(flags)
    assert pieces["recompute-module"].title.endswith("selective --recompute-modules core_attn layernorm")
    assert pieces["recompute-module"].gives_bytes == 4 * 10 * MIB  # the norms' outputs too
    assert pieces["micro-batch"].title.endswith("--micro-batch-size 2")
    assert "offload" not in pieces  # not with recomputation
    assert "selective-checkpoint" not in pieces


def test_segments_that_expand_may_be_all_that_is_needed(made: HandMade, tmp_path: Path) -> None:
    made.op("forward", 1)
    made.alloc(0, 80 * MIB)
    remedy_ = found(made, tmp_path, capacity=512 * MIB)[1]  # of 1 GiB reserved
    assert (remedy_.rules, remedy_.fits) == (["expandable-segments"], "may fit")


def test_what_fits_comes_before_what_does_not(made: HandMade, tmp_path: Path) -> None:
    _run_job(made, 1, is_megatron=False)
    advices, remedy_ = _advised(made, tmp_path, 500 * MIB, host_bandwidth=64e9)
    assert {piece.title for piece in advices[: len(remedy_.titles)]} == set(remedy_.titles)
    outcomes = [piece.fits for piece in advices[len(remedy_.titles) :]]
    assert outcomes == sorted(outcomes, key=["fits", "may fit", "does not fit"].index)
    assert len(set(outcomes)) > 1


def in_megatron_fsdp(
    made: HandMade, *, size: int = 8, weights: int = 64, gradients: int = 256, has_replicas: bool = False
) -> None:
    """Two buffers of bf16 weights that gathers make 64 MiB, and one of fp32 gradients, in MiB."""
    stack = made.stack(("/site/megatron_fsdp/buffer.py", 5, "init"), ("/job/train.py", 9, "build"))
    layers = blocks(made, 2)
    made.op("init", 0)
    for at, layer in enumerate(layers):
        made.alloc(at * 100 * MIB, weights * MIB, stack=stack, mark=("parameter", layer, weights * MIB))
    made.alloc(300 * MIB, gradients * MIB, stack=stack, mark=("gradient", layers[0], gradients * MIB))
    for phase in ("forward", "backward"):
        for _ in range(2):
            made.op(phase, 1, name="c10d.call.default")
    made.alloc(900 * MIB, 16 * MIB)
    made.free(900 * MIB, 16 * MIB)
    made.step(1)
    groups = [(0, "0", "dp", tuple(range(size)), 0, 0, "nccl"), (1, "1", "replicas", (0, 64), 0, 0, "nccl")]
    made.record("groups", rows=groups)
    part, whole = 64 // size * MIB, 64 * MIB
    rows: list[tuple[Any, ...]] = []
    for at in range(2):
        rows.append((at, "all_gather_into_tensor", 0, part, whole, "bfloat16", True, 0, 1, 1, -1, 0, 0))
        rows.append((2 + at, "reduce_scatter_tensor", 0, whole, part, "bfloat16", True, 0, 2, 2, -1, 0, 0))
    if has_replicas:
        rows.append((4, "all_reduce", 1, 2 * part, 2 * part, "bfloat16", True, 0, 2, 2, -1, 0, 0))
    made.record("calls", rows=rows)


def test_megatron_fsdp_can_shard_what_its_buffers_hold_whole(made: HandMade, tmp_path: Path) -> None:
    in_megatron_fsdp(made)
    pieces = found(made, tmp_path)[0]
    of_gradients, of_both = pieces["shard-gradients"], pieces["shard-parameters"]
    assert 'zero_dp_strategy="optim_grads" (ZeRO-2)' in of_gradients.title
    assert 'gradients and parameters over the 8 ranks, too: zero_dp_strategy="optim_grads_params"' in of_both.title
    assert (of_gradients.gives_bytes, of_both.gives_bytes) == (224 * MIB, (224 + 112) * MIB)
    # At least: both buckets of gradients, and both units, are whole at the peak; of each block 1 MiB may be lost.
    assert (224 - 128 - 1) * MIB <= of_gradients.gives_low_bytes <= (224 - 128) * MIB
    assert (336 - 256 - 3) * MIB <= of_both.gives_low_bytes <= (336 - 256) * MIB
    assert of_both.price_us == 0
    assert of_both.price_high_us == 2 * 200 + 200  # gathers twice, and reductions


@pytest.mark.parametrize(
    ("how", "rules"),
    [
        ({"gradients": 32}, {"shard-parameters"}),
        ({"gradients": 32, "weights": 8}, set()),
        ({"gradients": 32, "weights": 8, "has_replicas": True}, {"shard-parameters"}),
        ({"size": 2}, set()),  # halves in fp32 are as large as all in bf16
    ],
)
def test_megatron_fsdp_is_advised_to_shard_what_is_whole_or_alike_on_replicas_alone(
    made: HandMade, tmp_path: Path, how: dict[str, int], rules: set[str]
) -> None:
    in_megatron_fsdp(made, **how)
    assert {rule for rule in found(made, tmp_path)[0] if rule.startswith("shard")} == rules


# ---- whole jobs, whose advice is compared with that of before

REFERENCE = Path(__file__).parent / "reference_advice.json"
_SITE = "/site/megatron/core/transformer"


def _layers_of_job(made: HandMade, chosen: random.Random, *, is_megatron: bool) -> list[list[int]]:
    """Parameters with their optimizer state, in repeated layers of two modules and outside of them."""
    name, of_class = ("decoder.layers", "TransformerLayer") if is_megatron else ("layers", "Block")
    top = made.layer("decoder", "TransformerBlock") if is_megatron else made.layer("(Net)", "Net")
    container, layers = made.layer(name, "ModuleList", top), []
    for number in range(chosen.randint(3, 5)):
        layer = made.layer(f"{name}.{number}", of_class, container)
        attention = made.layer(f"{name}.{number}.self_attention", "Attention", layer)
        core = made.layer(f"{name}.{number}.self_attention.core_attention", "Core", attention)
        layers.append([layer, core, made.layer(f"{name}.{number}.mlp", "Linear", layer)])
    made.op("init", 0)
    for number, layer in enumerate((top, *(layer[2] for layer in layers))):
        made.alloc(number * 100 * MIB, 12 * MIB, mark=("parameter", layer, 12 * MIB))
    return layers


def _forward_of_job(made: HandMade, chosen: random.Random, layers: list[list[int]], step: int, stack: int) -> list[Any]:
    """A forward with its loss: blocks, of which some last until backward."""
    names = (
        "mm.default",
        "gelu.default",
        "_scaled_dot_product_flash_attention.default",
        "add.Tensor",
        "_to_copy.default",
    )
    held, at = [], 2_000 * MIB
    for layer in layers:
        for owner in layer:
            for name in chosen.sample(names, 3):
                made.op("forward", step, owner, name=f"aten.{name}")
                size = 4 * chosen.randint(1, 6) * MIB + chosen.choice((0, 100))
                made.alloc(at, size, stack=stack)
                held.append((at, size))
                at += 30 * MIB
        if chosen.random() < 0.5:
            made.op("forward", step, layer[2], name="c10d.allreduce_.default")
    for name in ("aten._to_copy.default", "aten._log_softmax.default"):
        made.op("forward", step, 0, name=name)
        made.alloc(at, 24 * MIB, stack=stack)
        held.append((at, 24 * MIB))
        at += 30 * MIB
    return held


def _run_job(made: HandMade, seed: int, *, is_megatron: bool) -> None:
    """Two steps of two micro-batches, on a group of tensor parallelism and one of replicas."""
    chosen = random.Random(seed)
    stacks = [made.stack((f"{_SITE}/layer.py", 5, "forward"), ("/job/train.py", 9, "step"))] if is_megatron else [
        made.stack(("/job/train.py", 9, "step")), made.stack(("/site/transformer_engine/x.py", 1, "f"))]  # fmt: skip
    layers = _layers_of_job(made, chosen, is_megatron=is_megatron)
    for step in (1, 2):
        for batch in range(2):
            first = len(made.ops)
            held = _forward_of_job(made, chosen, layers, step, stacks[0])
            last = len(made.ops) - 1
            made.op("backward", step, layers[-1][2])
            made.region(first, last)
            for number, (at, size) in enumerate(reversed(held)):
                owner = layers[-1 - number * len(layers) // len(held)][number % 3]
                made.op("backward", step, owner, recompute=chosen.random() < 0.2, name="aten.mm.default")
                if batch == 0 and number < len(layers):
                    made.alloc((1_000 + step * 400 + number * 40) * MIB, 12 * MIB, mark=("gradient", owner, 12 * MIB))
                made.free(at, size)
        made.op("backward", step, name="c10d.allreduce_.default")
        made.op("optimizer", step, name="aten._foreach_sqrt.default")
        if step == 1:
            made.alloc(8_000 * MIB, 90 * MIB, mark=("optimizer_state", layers[0][2], 90 * MIB))
            made.alloc(8_200 * MIB, 60 * MIB, mark=("optimizer_state", layers[1][2], 60 * MIB))
        made.alloc(8_300 * MIB, 30 * MIB)
        made.free(8_300 * MIB, 30 * MIB)
        if step == 2 or seed % 2:  # else they are held through the next forward
            for number in range(len(layers)):
                made.free((1_000 + step * 400 + number * 40) * MIB, 12 * MIB)
        made.record("step", step=step, start_us=step * 1000, end_us=step * 1000 + 900, samples=8)
    groups = [(0, "0", "dp", tuple(range(8)), 0, 0, "nccl"), (1, "1", "tp", (0, 1), 0, 0, "nccl")]
    made.record("groups", rows=groups)
    by_number = {number: name for name, number in made.operations.items()}
    of_calls = [(op, scope) for op, (name, scope) in enumerate(made.ops) if by_number[name].startswith("c10d.")]
    phases = {number: key[1] for key, number in made.scopes.items()}
    rows = [
        (number, "all_reduce", int(phases[scope] == "forward"), 60 * MIB, 60 * MIB, "bfloat16", True, 0, op, scope, -1)
        for number, (op, scope) in enumerate(of_calls)
    ]
    made.record("calls", rows=[(*row, 0, 0) for row in rows])


def _digests(table: pd.DataFrame) -> dict[str, str]:
    """A digest of each column, which is long."""
    columns = {str(name): str(six_digits(table[name].tolist())) for name in table.columns}
    return {name: hashlib.md5(text.encode()).hexdigest()[:8] for name, text in columns.items()}


def advised(directory: Path) -> dict[str, Any]:
    """All that is said of some jobs, of each the remedy and its tables, by job."""
    said: dict[str, Any] = {}
    for seed, is_megatron, capacity in (
        (1, False, 700),
        (2, False, 500),
        (3, True, 600),
        (4, True, 450),
        (5, False, 0),
    ):
        made = HandMade()
        (directory / str(seed)).mkdir()
        _run_job(made, seed, is_megatron=is_megatron)
        arguments = ("--micro-batch-size=2", "--overlap-grad-reduce") if is_megatron else ()
        pieces, remedy_ = found(
            made, directory / str(seed), capacity * MIB, host_bandwidth=64e9, gpus_per_node=8, arguments=arguments
        )
        said |= {f"{seed} {rule}": six_digits(to_plain(piece)) for rule, piece in pieces.items()}
        if seed == 1:
            computed = compute_tables(directory / str(seed) / "run")
            said |= {f"{seed} {name}": _digests(table) for name, table in computed.tables.items()}
        said[f"{seed} remedy"] = None if remedy_ is None else six_digits(to_plain(remedy_))
    return said


def test_advice_and_tables_are_what_they_were(tmp_path: Path) -> None:
    """A figure that changes changes ``reference_advice.json``, which ``python -m`` of this module writes."""
    expected, said = json.loads(REFERENCE.read_text()), json.loads(json.dumps(advised(tmp_path)))
    assert {name: piece for name, piece in said.items() if expected.get(name) != piece} == {}
    assert list(said) == list(expected)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as written_in:
        REFERENCE.write_text(json.dumps(advised(Path(written_in)), indent=0) + "\n")
