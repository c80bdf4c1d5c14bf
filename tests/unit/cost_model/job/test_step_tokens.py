"""Tokens and samples of a step, from launches written by hand: products are (layer, rows, n, k) with their weights."""

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from fakedist.cost_model.job.job_times import StepTokens, rank_throughput, tokens_of
from fakedist.rundir.launch_records import WorkRow
from fakedist.rundir.step_time import RankThroughput, SampleThroughput
from tests.unit.cost_model.job.test_job_times import ATTENTION, EMBEDDING, tables
from tests.unit.cost_model.launches_by_hand import PRODUCT, launch
from tests.unit.results.test_comparison import step

Rows = list[dict[str, Any]]
BATCH, LENGTH, WIDTH = 8, 256, 64
TOKENS = BATCH * LENGTH
CONVOLUTION = WorkRow("fprop", "kernel", "gemm", "aten.convolution.default", 1e12, 1e6, "bf16")


def embedding(layer: int, rows: int, **fields: Any) -> dict[str, Any]:
    return launch(EMBEDDING._replace(m=rows), layer=layer, **fields)


def product(layer: int, rows: int, n: int = WIDTH, k: int = WIDTH, **fields: Any) -> dict[str, Any]:
    return launch(PRODUCT._replace(m=rows, n=n, k=k, flops=2.0 * rows * n * k), layer=layer, **fields)


def block(first: int, rows: int, **fields: Any) -> Rows:
    """Four layers with weights."""
    sizes = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    return [product(first + at, rows, n, k, **fields) for at, (n, k) in enumerate(sizes)]


def found(*rows: dict[str, Any], classes: tuple[str, ...] = (), samples: int = 0) -> StepTokens:
    launches, work = tables(*rows)
    names = [("", ""), *((f"layer{number}", name) for number, name in enumerate(classes))]
    layers = pd.DataFrame(names, columns=["name", "class_name"])
    steps = pd.DataFrame({"step": [2], "samples": [samples], "sample_shape": [""]})
    launches = launches.assign(step=2)
    return tokens_of({"launches": launches, "work": work, "layers": layers, "steps": steps})


@pytest.mark.parametrize(
    ("kind", "rows", "number"),
    [
        ("positions first", [embedding(1, LENGTH), embedding(2, TOKENS), *block(3, TOKENS)], TOKENS),
        ("a user first", [embedding(1, BATCH), embedding(2, TOKENS), *block(3, TOKENS)], TOKENS),
        ("segments", [embedding(1, TOKENS), embedding(2, TOKENS), *block(3, TOKENS)], TOKENS),
        ("a class and patches", [product(1, TOKENS, k=16), embedding(2, BATCH), *block(3, TOKENS)], TOKENS),
        ("eight codebooks in one", [embedding(1, 8 * TOKENS), *block(3, TOKENS)], TOKENS),
        ("eight codebooks", [*(embedding(at, TOKENS) for at in range(8)), *block(8, TOKENS)], TOKENS),
        ("images in the text", [embedding(1, TOKENS // 2), *block(3, TOKENS)], TOKENS),
        (
            "four products of one layer",
            [embedding(1, TOKENS), *(product(2, TOKENS) for _ in range(4)), *block(3, TOKENS)],
            TOKENS,
        ),
        ("experts", [embedding(1, TOKENS), *block(2, TOKENS), product(9, 2 * TOKENS, 32 * WIDTH)], TOKENS),
        ("encoder and decoder", [embedding(1, TOKENS), embedding(2, 768), *block(3, TOKENS), *block(7, 768)], 0),
        ("text and images", [embedding(1, TOKENS), *block(2, TOKENS), *block(6, 8 * 197), *block(10, 8 * 197)], 0),
        ("an image model with captions", [embedding(1, 8 * 77), launch(CONVOLUTION), *block(2, 8 * 4096)], 0),
        ("embedded twice", [embedding(1, TOKENS), *block(2, TOKENS), embedding(1, TOKENS)], 0),
        ("no embedding", block(1, TOKENS), 0),
        ("no product", [embedding(1, TOKENS)], 0),
    ],
)
def test_tokens_are_the_rows_that_pass_through_the_layers(kind: str, rows: Rows, number: int) -> None:
    tokens = found(*rows)
    assert tokens.number == number, kind
    assert bool(tokens.why) == (not tokens.number)


def test_micro_batches_of_several_lengths_add_up_and_recomputation_does_not_count() -> None:
    rows = [embedding(1, 512), *block(2, 512), embedding(1, 384), *block(2, 384)]
    again = block(2, 384, phase="backward", recompute=True)
    elsewhere = [embedding(1, 100, phase="other"), *block(2, 100, phase="other")]  # an evaluation
    assert found(*rows, *again, *elsewhere) == StepTokens(896, 2)


def test_a_compiled_embedding_is_known_by_its_class() -> None:
    fused = WorkRow("triton_poi_fused_embedding_0", "kernel", "elementwise", "inductor::graph", 0.0, 1e6, "bf16")
    rows = [launch(fused, layer=1), *block(2, TOKENS)]
    assert found(*rows, classes=("Embedding",)) == StepTokens(TOKENS, 1, are_embedded=False)
    assert found(*rows, classes=("RotaryEmbedding", "PatchEmbedding")).number == 0
    assert found(*block(2, TOKENS), classes=("Embedding",)).number == 0  # nothing compiled hides a lookup


def test_a_row_for_each_sample_is_no_token_unless_rows_attend_to_others() -> None:
    rows = [embedding(1, TOKENS), *block(2, TOKENS)]
    assert found(*rows, samples=TOKENS).why == "each sample is a single row"
    assert found(*rows, launch(ATTENTION), samples=TOKENS).number == TOKENS


GROUPS = pd.DataFrame(
    [("0", "default_pg", 16, 0, list(range(16))), ("1", "dp", 8, 0, list(range(0, 16, 2))), ("2", "tp", 2, 0, [0, 1])],
    columns=["name", "description", "size", "group_rank", "ranks"],
).assign(backend="nccl")


def done(calls: list[tuple[str, int]], num_unknown: int = 0) -> tuple[RankThroughput | None, SampleThroughput | None]:
    micro_batch = [embedding(1, 2048), *block(2, 2048)]
    launches, work = tables(*(row | {"step": 2} for row in (*micro_batch, *micro_batch)))
    own = pd.DataFrame(calls, columns=["operation", "group"]).assign(step=2, phase="backward")
    steps = pd.DataFrame({"step": [1, 2], "samples": [4, 8], "sample_shape": ["512", "512"]})
    priced = replace(step(), step_us=1e6, num_unknown_calls=num_unknown)
    known = {"launches": launches, "work": work, "calls": own, "groups": GROUPS, "steps": steps}
    return rank_throughput(known, priced, 0, 16)


def test_a_rank_alone_tells_the_tokens_and_samples_of_a_job_whose_ranks_are_alike() -> None:
    tokens, samples = done([("all_reduce", 1)])
    assert tokens is not None
    assert tokens.tokens_per_step == 2 * 2048 * 8
    assert tokens.tokens_per_s_per_gpu == 2 * 2048 * 8 / 16
    assert tokens.tokens_from == "4,096 that rank 0 embeds in 2 micro-batches, times 8 (16 ranks / (2 tensor))"
    assert samples == SampleThroughput(8 * 8, "512", 8 * 8 / 16)


def test_a_stage_of_a_pipeline_or_an_unpriced_call_tells_no_tokens() -> None:
    assert done([("all_reduce", 1), ("recv", 0)]) == (None, None)
    assert done([("all_reduce", 1)], num_unknown=1) == (None, None)
