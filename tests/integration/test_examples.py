"""Whole runs of the two example jobs, on the virtual GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from tests.conftest import RunFakedist

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
WORLDS = (8, 1_024, 16_384)
SMALL_LLAMA = ("llama_fsdp2.py", "--model", "debug", "--seq-len", "128", "--tp", "8")
SMALL_GPT = ("ddp_gpt.py", "--model", "debug", "--batch-size", "2", "--accumulate", "2")


def profile(run_fakedist: RunFakedist, world_size: int, rank: int, *script: str) -> dict[str, Any]:
    """The JSON object of a run on the virtual GPU, checked for what is true of every run."""
    place = ("--world-size", str(world_size), "--rank", str(rank), "--device", "virtual")
    finished = run_fakedist("profile", *place, "--json", EXAMPLES / script[0], *script[1:])
    result = finished.json()
    assert finished.code == 0, finished.stderr
    assert (result["world_size"], result["rank"], result["device"]) == (world_size, rank, "virtual")
    assert result["fits"] is True
    assert sum(result["by_category"].values()) == result["peak_allocated_bytes"]
    assert 0 < result["peak_allocated_bytes"] <= result["peak_reserved_bytes"] <= result["capacity_bytes"]
    assert len(result["steps"]) in (2, 3)  # DDP makes its buckets again in step 2, of other sizes
    assert Path(result["run_directory"]).is_dir()
    return result


#: Ranks of each script that every change runs.
EVERY_CHANGE = {("llama", 8, "last"), ("gpt", 16_384, "last")}


def every_rank() -> Iterator[ParameterSet]:
    for (name, script), world_size, place in product(
        {"llama": SMALL_LLAMA, "gpt": SMALL_GPT}.items(), WORLDS, ("first", "middle", "last")
    ):
        marks = () if (name, world_size, place) in EVERY_CHANGE else (pytest.mark.nightly,)
        yield pytest.param(script, world_size, place, marks=marks, id=f"{name}-{world_size}-{place}")


@pytest.mark.parametrize(("script", "world_size", "place"), list(every_rank()))
def test_every_rank_of_every_world_runs(
    run_fakedist: RunFakedist, script: tuple[str, ...], world_size: int, place: str
) -> None:
    rank = {"first": 0, "middle": world_size // 2 + 1, "last": world_size - 1}[place]
    result = profile(run_fakedist, world_size, rank, *script)
    assert result["collectives"]
    assert result["by_category"]["parameter"] > 0
    assert result["by_category"]["optimizer_state"] > 0


def rounded(num_bytes: int) -> int:
    """The bytes that the caching allocator gives for a small request."""
    return -(-num_bytes // 512) * 512


@pytest.mark.nightly  # `make budgets` holds the peaks of this job
def test_a_70b_llama_at_world_1024_keeps_its_own_shard_to_the_byte(run_fakedist: RunFakedist) -> None:
    result = profile(run_fakedist, 1_024, 0, "llama_fsdp2.py", "--model", "70b", "--tp", "8", "--checkpoint", "full")
    layers = {layer["name"]: layer for layer in result["layers"]}
    assert layers["layers.0-79"]["num_repeats"] == 80

    # A block's rows are divided by 8 (model axis) and 128 (data axis), float32; AdamW keeps two of each.
    matrices = {
        "attention.wq": 8_192 * 8_192,
        "attention.wk": 8_192 * 1_024,
        "attention.wv": 8_192 * 1_024,
        "attention.wo": 8_192 * 8_192,
        "feed_forward.w1": 8_192 * 28_672,
        "feed_forward.w2": 8_192 * 28_672,
        "feed_forward.w3": 8_192 * 28_672,
    }
    for name, num_elements in matrices.items():
        held = layers[f"layers.0-79.{name}"]["peak_bytes"]
        assert held["parameter"] == 80 * rounded(num_elements // (8 * 128) * 4), name
        # The optimizer's step counters are one block of 512 bytes each.
        assert held["optimizer_state"] == 80 * (2 * rounded(num_elements // (8 * 128) * 4) + 512), name
    # 128,256 rows over 8, then 16,032 over 128: 125.25, so the first ranks hold 126.
    assert layers["tok_embeddings"]["peak_bytes"]["parameter"] == rounded(126 * 8_192 * 4)
    # Logits of 8,192 tokens and 128,256 words in float32 are the largest blocks of all.
    assert result["largest_blocks"][0]["bytes"] == 8_192 * 128_256 * 4


@pytest.mark.nightly  # `make budgets` holds the bytes of its mesh
def test_the_collectives_of_a_70b_llama_are_those_of_its_mesh(run_fakedist: RunFakedist) -> None:
    script = ("llama_fsdp2.py", "--model", "70b", "--num-layers", "2", "--tp", "8", "--loss-parallel")
    result = profile(run_fakedist, 1_024, 1_023, *script)
    sizes = {(call["operation"], call["group_size"]) for call in result["collectives"]}
    assert ("all_gather_into_tensor", 128) in sizes
    assert ("reduce_scatter_tensor", 128) in sizes
    assert {group_size for _, group_size in sizes} == {8, 128, 1_024}


@pytest.mark.nightly
def test_the_largest_llama_runs_at_world_16384(run_fakedist: RunFakedist) -> None:
    options = ("--num-layers", "3", "--checkpoint", "selective", "--dp-replicate", "16", "--optimizer", "foreach")
    result = profile(run_fakedist, 16_384, 9_000, "llama_fsdp2.py", "--model", "405b", "--tp", "8", *options)
    assert {call["group_size"] for call in result["collectives"]} == {8, 16, 128, 16_384}


@pytest.mark.nightly
def test_gpt2_xl_holds_four_copies_of_its_weights(run_fakedist: RunFakedist) -> None:
    result = profile(run_fakedist, 1_024, 513, "ddp_gpt.py", "--batch-size", "1", "--accumulate", "2")
    weights_bytes = 1_557_611_200 * 4
    largest = max(layer["peak_bytes"].get("optimizer_state", 0) for layer in result["layers"])
    assert largest >= 2 * weights_bytes
    reduced = [call for call in result["collectives"] if call["operation"] == "all_reduce"]
    assert sum(call["bytes_in"] for call in reduced) >= 2 * weights_bytes
    buckets = result["by_category"]["communication"]
    assert weights_bytes <= buckets <= 1.05 * weights_bytes  # the reducer's buckets, made in a forward and kept


@pytest.mark.nightly
def test_a_llama_that_does_not_fit_reports_it(run_fakedist: RunFakedist) -> None:
    place = ("--world-size", "8", "--rank", "3", "--device", "virtual", "--json")
    finished = run_fakedist("profile", *place, EXAMPLES / "llama_fsdp2.py", "--model", "70b", "--tp", "8")
    assert finished.code == 4
    result = finished.json()
    assert result["fits"] is False
    assert result["out_of_memory"]["requested_bytes"] > 0
