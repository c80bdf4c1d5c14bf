"""The shares of the GPU that vLLM's engine may take: every figure by arithmetic from hand-made records."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from fakedist.extras.rl.engine_memory import (
    Use,
    cache_bytes,
    fits,
    largest_share,
    least_share,
    num_blocks,
    starts,
)
from fakedist.results.building import build_tables
from fakedist.rundir.directory import load_manifest
from fakedist.rundir.plain import to_plain
from fakedist.rundir.records import EngineRecord
from fakedist.rundir.summary import Summary
from tests.unit.analysis.recorded import BASE, GIB, GPU, MIB, HandMade, new_run

#: Of 80 GiB, 4 GiB are in use before the engine looks; of its half of the GPU 5 GiB are not for its KV cache.
ENGINE = EngineRecord(
    version="0.33.0",
    utilization=0.5,
    total_bytes=80 * GIB,
    free_bytes=76 * GIB,
    requested_bytes=40 * GIB,
    weights_bytes=3 * GIB,
    consumed_bytes=3 * GIB + 100 * MIB,
    activations_bytes=GIB + 900 * MIB,
    graphs_estimate_bytes=24 * MIB,
    graphs_bytes=30 * MIB,
    num_blocks=35 * 512,
    block_bytes=2 * MIB,
    block_tokens=16,
    request_bytes=GIB,
    cache_dtype="bfloat16",
    enforce_eager=False,
    can_sleep=True,
    max_model_len=4096,
)


def test_the_share_of_the_run_gives_the_blocks_that_the_engine_had() -> None:
    assert num_blocks(ENGINE, 0.5) == ENGINE.num_blocks
    assert num_blocks(ENGINE, 0.6) == 43 * 512
    assert num_blocks(ENGINE, 0.05) < 0


def test_a_cache_is_one_segment_of_whole_granules() -> None:
    odd = replace(ENGINE, block_bytes=3 * MIB - 512)
    assert cache_bytes(odd, 0) == 0
    assert cache_bytes(odd, 1) == 20 * MIB
    assert cache_bytes(odd, 101) == 304 * MIB


def test_the_least_share_has_room_for_a_request_and_for_the_block_that_is_held_back() -> None:
    least = least_share(ENGINE)
    assert least is not None
    # 5 GiB, 1 GiB for the request and 2 MiB more, in ten-thousandths of 80 GiB.
    assert least == math.ceil((6 * GIB + 2 * MIB) / (80 * GIB) * 10_000) / 10_000
    assert starts(ENGINE, least)
    assert not starts(ENGINE, least - 0.0001)
    assert least_share(replace(ENGINE, request_bytes=80 * GIB)) is None


@pytest.mark.parametrize("awake_gib", [42, 60, 79])
def test_at_the_largest_share_all_fits_and_at_the_next_it_does_not(awake_gib: int) -> None:
    use = Use(asleep_bytes=30 * GIB, awake_bytes=awake_gib * GIB)
    found = largest_share(ENGINE, use)
    assert found is not None
    # What is left of the GPU goes to the KV cache, until the engine finds too little free memory.
    wanted = min(0.5 + (80 - awake_gib) / 80, 76 / 80)
    assert found == pytest.approx(math.floor(wanted * 10_000) / 10_000, abs=1e-9)
    assert fits(ENGINE, use, found)
    assert not fits(ENGINE, use, round(found + 0.0001, 4))


def test_a_run_beyond_the_gpu_needs_a_smaller_share() -> None:
    assert largest_share(ENGINE, Use(30 * GIB, 88 * GIB)) == 0.4
    assert largest_share(ENGINE, Use(30 * GIB, 118 * GIB)) is None, "the engine would not start"


def test_no_share_helps_a_phase_that_does_not_fit_without_the_cache() -> None:
    assert largest_share(ENGINE, Use(80 * GIB + 1, 60 * GIB)) is None
    assert largest_share(ENGINE, Use(80 * GIB, 60 * GIB)) == 0.75


def test_memory_outside_lowers_the_share() -> None:
    assert largest_share(ENGINE, Use(30 * GIB, 60 * GIB), 4 * GIB) == 0.7
    assert largest_share(ENGINE, Use(30 * GIB, 42 * GIB), 4 * GIB) == 0.9, "72 GiB are free as the engine starts"


def test_weights_that_another_process_holds_are_part_of_the_share() -> None:
    external = replace(ENGINE, requested_bytes=38 * GIB, num_blocks=33 * 512)
    assert num_blocks(external, 0.5) == external.num_blocks
    assert num_blocks(external, 0.6) == 41 * 512


def summary_of(made: HandMade, directory: Path) -> Summary:
    made.op("init", 0)
    made.alloc(0, 100 * MIB)
    made.ended()
    run = made.write(new_run(directory / "run", gpu_memory_bytes=80 * GIB))
    build_tables(run)
    summary = load_manifest(run).summary
    assert summary is not None
    return summary


def _ran(made: HandMade, engine: EngineRecord = ENGINE, awake: int = 60 * GIB) -> None:
    made.op("forward", 1)
    made.alloc(200 * MIB, 50 * MIB, mark=("optimizer_state",))
    made.op("forward", 1)
    made.alloc(300 * MIB, MIB)
    made.op("forward", 1)
    made.record("engine", **to_plain(engine))
    made.record(
        "named_phase", name="rollout", step=1, first_op=1, end_op=2, peak_used_bytes=awake, peak_awake_bytes=awake
    )
    made.record("engine_use", peak_asleep_bytes=30 * GIB, peak_awake_bytes=awake)


def test_the_summary_has_the_engine_and_its_shares(made: HandMade, tmp_path: Path) -> None:
    _ran(made)
    found = summary_of(made, tmp_path).engine
    assert found is not None
    assert (found.utilization, found.largest_utilization, found.peak_phase) == (0.5, 0.75, "rollout")
    assert found.largest_cache_bytes - found.cache_bytes == 20 * GIB
    assert found.unknown_because == ""
    assert found.largest_in_addition == 0.75, "nothing is known to be outside"


def test_each_piece_of_advice_has_the_bytes_of_a_recorded_part(made: HandMade, tmp_path: Path) -> None:
    _ran(made)
    made.record("engine_sleep", how="level 1", freed_bytes=38 * GIB, kept={"private pools": GIB})
    made.record("named_phase", name="weight sync", step=1, first_op=0, end_op=1)
    summary = summary_of(made, tmp_path)
    gives = {advice.rule: (advice.gives_bytes, advice.of) for advice in summary.advice}
    assert gives["engine-share"] == (20 * GIB, "cache_bytes")
    assert gives["engine-offload-optimizer"] == (50 * MIB, "peak_used_bytes")
    assert gives["engine-sleep-level"] == (3 * GIB, "host_bytes")
    assert gives["engine-eager"] == (30 * MIB, "peak_used_bytes")
    assert gives["engine-fp8-cache"] == (35 * GIB // 2, "peak_used_bytes")


def test_an_engine_that_never_sleeps_is_advised_to(made: HandMade, tmp_path: Path) -> None:
    _ran(made, replace(ENGINE, can_sleep=False, enforce_eager=True, cache_dtype="fp8"), awake=79 * GIB)
    rules = {advice.rule: advice for advice in summary_of(made, tmp_path).advice}
    assert rules["engine-sleep"].gives_bytes == 38 * GIB
    assert "enable_sleep_mode=True" in rules["engine-sleep"].title
    assert not {"engine-eager", "engine-fp8-cache", "engine-sleep-level"} & set(rules)


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (
            replace(ENGINE, num_blocks=1000),
            "the size of the KV cache does not follow from its share alone",
        ),
        (replace(ENGINE, request_bytes=60 * GIB), "with no share both does the engine start and does every phase fit"),
    ],
)
def test_a_share_that_is_not_known_says_why(made: HandMade, tmp_path: Path, engine: EngineRecord, why: str) -> None:
    _ran(made, engine)
    found = summary_of(made, tmp_path).engine
    assert found is not None
    assert (found.largest_utilization, found.unknown_because) == (None, why)


def test_a_run_that_failed_has_no_share(made: HandMade, tmp_path: Path) -> None:
    _ran(made)
    made.ended("exception", 1, "RuntimeError: x")
    made.op("init", 0)
    run = made.write(new_run(tmp_path / "run", "exception"))
    build_tables(run)
    summary = load_manifest(run).summary
    assert summary is not None
    assert summary.engine is not None
    assert summary.engine.unknown_because == "the run ended before its end"


@pytest.mark.parametrize(("cache_mib", "gives_mib"), [(60, [68]), (300, [])])
def test_the_peak_that_advice_lowers_has_no_memory_that_sleeps(
    made: HandMade, tmp_path: Path, cache_mib: int, gives_mib: list[int]
) -> None:
    """A KV cache, which sleeps while a loss takes 128 MiB, then wakes."""
    made.op("generation", 1)
    made.alloc(GIB, cache_mib * MIB)
    made.op("forward", 1, name="aten._to_copy.default")
    segments = {"address": array("Q", [BASE + GIB]).tobytes(), "size": array("Q", [cache_mib * MIB]).tobytes()}
    made.record("asleep", op=1, **segments)
    line = made.stack(("/site/torch/nn/functional.py", 5, "cross_entropy"), ("/job/train.py", 12, "loss"))
    made.alloc(0, 64 * MIB, stack=line)
    made.op("forward", 1, name="aten._log_softmax.default")
    made.alloc(100 * MIB, 64 * MIB, stack=line)
    for address in (0, 100 * MIB):
        made.op("backward", 1)
        made.free(address, 64 * MIB)
    made.op("generation", 2)
    made.record("asleep", op=5, address=b"", size=b"")
    made.free(GIB, cache_mib * MIB)
    made.gpu = replace(GPU, capacity_bytes=0)
    made.step(1)
    made.ended()
    run = made.write(new_run(tmp_path / "run"))
    build_tables(run)
    summary = load_manifest(run).summary
    assert summary is not None
    assert [piece.gives_bytes for piece in summary.advice if piece.rule == "fuse-loss"] == [
        mib * MIB for mib in gives_mib
    ]
