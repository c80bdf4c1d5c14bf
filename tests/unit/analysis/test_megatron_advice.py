"""Flags of Megatron-LM on a command line, and those that it still lacks."""

import pytest

from fakedist.analysis.parallel_advice import Megatron


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
