from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.job.job_times import (
    LANES,
    Parts,
    RankRows,
    flops_of,
    lanes_of,
    parts_of,
    rank_throughput,
    tokens_of,
)
from fakedist.rundir.launch_records import WorkRow
from fakedist.rundir.step_time import RankThroughput
from tests.unit.cost_model.launches_by_hand import PRODUCT, launch
from tests.unit.results.compare.test_changed_times import step

EMBEDDING = WorkRow("gather", "kernel", "copy", "aten.embedding.default", 0.0, 1e6, "bf16", m=2048)
POSITIONS = EMBEDDING._replace(m=512)
ATTENTION = WorkRow("flash", "kernel", "attention", "aten.sdpa", 1.0, 1e6, "bf16")._replace(
    attention="forward", batch=2, heads=8, kv_heads=2, queries=1024, keys=1024, width=64, value_width=64, causal=True
)


def tables(*rows: dict[str, Any]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables launches and work of these rows, each of which is an operation of its own."""
    works: dict[WorkRow, int] = {}
    for number, row in enumerate(rows):
        row["op"] = number if row["op"] < 0 else row["op"]
        row["work"] = works.setdefault(row["work"], len(works))
    return pd.DataFrame(rows), pd.DataFrame(list(works), columns=WorkRow._fields)


def micro_batch(**fields: Any) -> list[dict[str, Any]]:
    rows = [(EMBEDDING, 1), (POSITIONS, 2), (PRODUCT, 3), (PRODUCT, 4)]
    return [launch(work, layer=layer, **fields) for work, layer in rows]


def test_tokens_are_what_the_first_embedding_looks_up_in_each_micro_batch() -> None:
    rows = [*micro_batch(), *micro_batch(), *micro_batch(phase="backward", recompute=True)]
    found = tokens_of(*tables(*rows))
    assert (found.number, found.num_micro_batches) == (2 * 2048, 2)
    rows = micro_batch()
    rows[0]["op"] = 100
    rows.insert(1, rows[0] | {})
    assert tokens_of(*tables(*rows)).number == 2048
    launches, work = tables(*micro_batch(), *micro_batch())
    is_product = (work["family"] == "gemm").to_numpy()[launches["work"]]
    launches.loc[is_product, "op"] = -1
    assert tokens_of(launches, work).num_micro_batches == 2
    assert tokens_of(launches[launches["layer"] != 3].iloc[:-1], work).why.endswith("do not run equally often")


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([launch(PRODUCT, layer=3)], "no embedding was seen"),
        ([launch(EMBEDDING, layer=1)], "no product follows"),
        ([*micro_batch(), launch(EMBEDDING, layer=1)], "do not run equally often"),
    ],
)
def test_tokens_that_are_not_certain_are_not_known(rows: list[dict[str, Any]], why: str) -> None:
    found = tokens_of(*tables(*rows))
    assert found.number == 0
    assert why in found.why


def test_flops_are_three_times_the_forward_and_what_lacks_is_counted() -> None:
    rows = [*micro_batch(), launch(ATTENTION, layer=3), launch(PRODUCT, phase="backward")]
    found = flops_of(*tables(*rows))
    every = 2 * 2 * 8 * 1024 * 1024 * (64 + 64)
    assert found.torchtitan == 3 * (2 * PRODUCT.flops + every)
    assert found.megatron == 3 * (2 * PRODUCT.flops + every / 2)
    assert found.num_lacking == 0
    unknown = PRODUCT._replace(flops=float("nan"))
    assert flops_of(*tables(launch(unknown), launch(unknown))).num_lacking == 2
    seed = WorkRow("extract_seed_and_offset", "kernel", "attention", "transformer_engine.fused_attn_fwd", 0.0, 0.0)
    assert flops_of(*tables(launch(PRODUCT), launch(seed))).num_lacking == 0
    unknown = seed._replace(flops=float("nan"))
    assert flops_of(*tables(launch(PRODUCT), launch(unknown))).num_lacking == 1


def rows_of(*rows: tuple[str, float, float, float, float]) -> RankRows:
    """Rows of lane, start, end, time alone, and launch."""
    lane, start, end, alone, launch = zip(*rows, strict=True)
    codes = np.array([LANES.index(name) for name in lane])
    return RankRows(np.array(start), np.array(launch), np.array(end), np.array(alone), codes)


STEP = rows_of(
    ("communication", 0.0, 30.0, 10.0, 0.0),  # waits 20, then receives
    ("forward", 30.0, 50.0, 20.0, 1.0),
    ("communication", 40.0, 60.0, 20.0, 2.0),  # half of it is hidden
    ("backward", 65.0, 90.0, 25.0, 65.0),  # the host is late
)


def test_the_parts_are_compute_communication_bubble_and_host() -> None:
    assert parts_of(STEP, 90.0, 100.0) == Parts(
        own_us=90.0, compute_us=45.0, communication_us=20.0, bubble_us=30.0, host_us=5.0, wait_us=0.0
    )
    rows = rows_of(("forward", 0.0, 50.0, 50.0, 0.0), ("communication", 5.0, 50.0, 10.0, 0.0))
    found = parts_of(rows, 50.0, 50.0)
    assert (found.compute_us, found.communication_us, found.bubble_us) == (50.0, 0.0, 0.0)


def test_the_parts_add_up_to_the_jobs_step() -> None:
    random = np.random.default_rng(3)
    for _ in range(50):
        start = np.sort(random.uniform(0, 90, 12))
        end = start + random.uniform(0, 20, 12)
        alone = (end - start) * random.uniform(0, 1, 12)
        lane = random.integers(0, len(LANES) - 1, 12)
        lane[0] = LANES.index("communication")
        alone[lane != LANES.index("communication")] = (end - start)[lane != LANES.index("communication")]
        rows = RankRows(start, start - random.uniform(0, 5, 12), end, alone, lane)
        own = float(end.max())
        _, *parts = astuple(parts_of(rows, own, own + 7.0))
        assert sum(parts) == pytest.approx(own + 7.0)
        assert min(parts) >= 0


def test_lanes_show_waits_apart_from_transfers_and_join_what_lies_close() -> None:
    found = lanes_of(STEP, 90.0, 100.0).set_index("lane")
    bubble = found.loc["bubble"]
    assert bubble[["start_us", "end_us"]].to_numpy().tolist() == [[0.0, 20.0], [90.0, 100.0]]
    assert found.loc["communication"].to_numpy().tolist() == [[20.0, 30.0], [40.0, 60.0]]
    close = rows_of(("forward", 0.0, 10.0, 10.0, 0.0), ("forward", 10.001, 20.0, 10.0, 0.0))
    assert lanes_of(close, 20.0, 20.0)[["start_us", "end_us"]].to_numpy().tolist() == [[0.0, 20.0]]


GROUPS = pd.DataFrame(
    [("0", "default_pg", 16, 0, list(range(16))), ("1", "dp", 8, 0, list(range(0, 16, 2))), ("2", "tp", 2, 0, [0, 1])],
    columns=["name", "description", "size", "group_rank", "ranks"],
).assign(backend="nccl")


def done(calls: list[tuple[str, int]], num_unknown: int = 0) -> RankThroughput | None:
    launches, work = tables(*micro_batch(step=2), *micro_batch(step=2))
    own = pd.DataFrame(calls, columns=["operation", "group"]).assign(step=2, phase="backward")
    priced = replace(step(), step_us=1e6, num_unknown_calls=num_unknown)
    return rank_throughput({"launches": launches, "work": work, "calls": own, "groups": GROUPS}, priced, 0, 16)


def test_a_rank_alone_tells_the_tokens_of_a_job_whose_ranks_are_alike() -> None:
    found = done([("all_reduce", 1)])
    assert found is not None
    assert found.tokens_per_step == 2 * 2048 * 8
    assert found.tokens_per_s_per_gpu == 2 * 2048 * 8 / 16
    assert found.tokens_from == "4,096 that rank 0 embeds in 2 micro-batches, times 8 (16 ranks / (2 tensor))"


def test_a_stage_of_a_pipeline_or_an_unpriced_call_tells_no_tokens() -> None:
    assert done([("all_reduce", 1), ("recv", 0)]) is None
    assert done([("all_reduce", 1)], num_unknown=1) is None
