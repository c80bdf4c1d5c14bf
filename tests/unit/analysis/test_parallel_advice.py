"""Advice on pipelines: what it foretells is what a run by the advised schedule holds.

Flags of Megatron-LM on a command line, and those that it still lacks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakedist.analysis.advice import find_advice
from fakedist.analysis.evidence import Room, Setup
from fakedist.analysis.parallel_advice import Megatron
from fakedist.results.building import compute_tables
from fakedist.rundir.summary import Advice
from tests.unit.analysis.recorded import MIB, HandMade, new_run

_BATCHES, _LAYERS, _SAVED = 4, 2, 20  # MiB of each layer of a micro-batch, in two blocks
_AT_WORK = 2  # MiB of a backward


def piped(directory: Path, in_flight: int, **how: Any) -> tuple[dict[str, Advice], int]:
    """The advice on a step of the first of two stages that keeps so many micro-batches in flight, and its peak.

    A backward takes the oldest micro-batch, or with ``is_reversed`` the newest. The first leaves a gradient of 4 MiB.
    With ``holds``, each has an input, 5 MiB, and sends its gradient, 3 MiB: freed at once, or after the last backward.
    """
    made = HandMade()
    container = made.layer("layers", "ModuleList", made.layer("(Net)", "Net"))
    layers = [made.layer(f"layers.{at}", "Block", container) for at in range(_LAYERS)]
    waiting: list[tuple[int, int, int]] = []

    def forward(batch: int) -> None:
        first = len(made.ops)
        if "holds" in how:
            made.op("forward" if batch else "other", 1)
            made.alloc((8_000 + batch * 10) * MIB, 5 * MIB, mark=("communication",))
            first += batch == 0
        for number, layer in enumerate(layers):
            for half in range(2):
                made.op("forward", 1, layer, name="aten.gelu.default")
                made.alloc(_at(batch, number, half), _SAVED // 2 * MIB)
        waiting.append((batch, first, len(made.ops) - 1))

    def backward() -> None:
        batch, first, last = waiting.pop(-1 if how.get("is_reversed") else 0)
        made.op("backward", 1, layers[-1])
        made.region(first, last)
        made.alloc(5_000 * MIB, _AT_WORK * MIB, stack=made.stack(("/job/train.py", 7, "step")))
        for number in reversed(range(_LAYERS)):
            for half in (1, 0):
                made.free(_at(batch, number, half), _SAVED // 2 * MIB)
        if batch == 0:
            made.alloc(6_000 * MIB, 4 * MIB, mark=("gradient", layers[0], 4 * MIB))
        if "holds" in how:
            made.alloc((7_000 + batch * 10) * MIB, 3 * MIB, mark=("communication",))
        made.free(5_000 * MIB, _AT_WORK * MIB)
        made.op("other", 1)
        if how.get("holds") is False:
            passed_on(batch)

    def passed_on(batch: int) -> None:
        made.free((7_000 + batch * 10) * MIB, 3 * MIB)
        made.free((8_000 + batch * 10) * MIB, 5 * MIB)

    for batch in range(_BATCHES):
        if len(waiting) == in_flight:
            backward()
        forward(batch)
    while waiting:
        backward()
    for batch in range(_BATCHES if how.get("holds") else 0):
        passed_on(batch)
    made.op("optimizer", 1)
    made.free(6_000 * MIB, 4 * MIB)
    return advised(made, directory, **how)


def advised(made: HandMade, directory: Path, **how: Any) -> tuple[dict[str, Advice], int]:
    """The advice on the step, and its peak."""
    made.record("step", step=1, start_us=0, end_us=900, samples=16, sample_shape=how.get("sample_shape", "128"))
    made.record("groups", rows=[(0, "0", "pp", (0, 1), 0, 0, "nccl")])
    made.record("calls", rows=[(0, "send", 0, MIB, 0, "bfloat16", True, 0, 0, 0, 1, 0, 0)])
    made.ended()
    directory.mkdir()
    computed = compute_tables(made.write(new_run(directory / "run")))
    setup = Setup(tuple(how.get("arguments", ())))
    advices = find_advice(computed.tables, computed.folds, Room(), setup)[0]
    return {piece.rule: piece for piece in advices}, int(computed.tables["events"]["allocated_bytes"].max())


def _at(batch: int, layer: int, half: int) -> int:
    return (batch * 100 + layer * 40 + half * 20) * MIB


def test_one_forward_one_backward_holds_what_was_foretold(tmp_path: Path) -> None:
    pieces, all_forwards_first = piped(tmp_path / "all", _BATCHES)
    _, alternating = piped(tmp_path / "two", 2)
    assert all_forwards_first == (_BATCHES * _LAYERS * _SAVED + _AT_WORK) * MIB
    piece = pieces["one-forward-one-backward"]
    assert piece.needs_low_bytes == alternating
    assert piece.gives_bytes == piece.gives_low_bytes == all_forwards_first - alternating
    assert "with 1F1B, 2 are" in piece.text
    assert piece.line == ""  # the one line is of what stays
    assert "micro-batch" not in pieces  # smaller ones would all be held, too


def test_at_best_a_script_no_longer_holds_what_it_received_and_sent(tmp_path: Path) -> None:
    piece = piped(tmp_path / "all", _BATCHES, holds=True)[0]["one-forward-one-backward"]
    assert piece.needs_low_bytes == piped(tmp_path / "two", 2, holds=False)[1]


@pytest.mark.parametrize(("in_flight", "is_reversed"), [(2, False), (_BATCHES, True)])
def test_other_schedules_are_not_advised_to_alternate(tmp_path: Path, in_flight: int, is_reversed: bool) -> None:
    assert "one-forward-one-backward" not in piped(tmp_path / "run", in_flight, is_reversed=is_reversed)[0]


@pytest.mark.parametrize(
    ("how", "title"),
    [
        ({}, "8 micro-batches of 2 instead of 4 of 4"),
        (
            {"sample_shape": "128x64", "arguments": ("--micro-batch=4",)},
            "8 micro-batches of 2 instead of 4 of 4: --micro-batch 2",
        ),
        ({"sample_shape": "128x64", "arguments": ("--heads", "4")}, None),  # it may be the sequence
    ],
)
def test_smaller_micro_batches_need_less_where_as_many_are_in_flight(
    tmp_path: Path, how: dict[str, Any], title: str | None
) -> None:
    piece = piped(tmp_path / "run", 2, **how)[0].get("micro-batch")
    assert (piece and piece.title) == title
    if piece is not None:  # all that was saved is half as large, and may be what a backward has at work
        assert piece.gives_low_bytes == _LAYERS * _SAVED * MIB
        assert piece.gives_bytes >= piece.gives_low_bytes


def of(line: str, *, has_engine: bool = True) -> Megatron:
    return Megatron(tuple(line.split()), has_engine)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--recompute-modules core_attn mlp --bf16", ["core_attn", "mlp"]),
        ("--recompute-modules=core_attn mlp --bf16", ["core_attn", "mlp"]),
        ("--bf16 --recompute-modules mlp", ["mlp"]),
        ("--recompute-modules --bf16", []),
        ("--recompute-modules-of-another moe", []),
        ("recompute-modules moe", []),
        ("", []),
    ],
)
def test_the_values_of_a_flag_end_where_the_next_begins(line: str, values: list[str]) -> None:
    assert of(line).values("recompute-modules") == values


@pytest.mark.parametrize(
    ("line", "has_it"),
    [("--bf16", True), ("--bf16=true", True), ("--bf16-more", False), ("bf16", False), ("--lr --bf16", True)],
)
def test_a_flag_is_on_the_command_line_alone_or_with_its_value(line: str, has_it: bool) -> None:
    assert of(line).has("bf16") is has_it


@pytest.mark.parametrize(
    ("line", "size"),
    [("--micro-batch-size 4", 4), ("--micro-batch-size=12", 12), ("--micro-batch-size four", 0), ("--bf16", 0)],
)
def test_a_micro_batch_is_as_large_as_the_command_line_has_it(line: str, size: int) -> None:
    assert of(line).micro_batch == size


@pytest.mark.parametrize(
    ("line", "can"),
    [
        ("", True),
        ("--pipeline-model-parallel-size 1", True),
        ("--pipeline-model-parallel-size 2", False),
        ("--recompute-granularity full", False),
        ("--recompute-activations", False),
        ("--cpu-offloading-num-layers 3", False),
    ],
)
def test_offloading_needs_the_engine_no_pipeline_and_no_recomputation(line: str, can: bool) -> None:
    assert of(line).can_offload is can
    assert not of(line, has_engine=False).can_offload


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        ("--overlap-grad-reduce", "--use-distributed-optimizer --overlap-param-gather"),
        ("--overlap-param-gather --overlap-grad-reduce", "--use-distributed-optimizer"),
    ],
)
def test_a_sharded_optimizer_gets_the_overlaps_that_are_missing(line: str, flags: str) -> None:
    assert of(line).optimizer_flags() == flags
