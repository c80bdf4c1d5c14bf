"""Tensors gathered into parameters are parameters, too, and each layer has its part of them to the byte."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.support.runs import ProfileOnce

JOB = Path(__file__).parent / "jobs" / "flat_shards.py"
#: Elements of the two linear layers, weight and bias; a rank of four has 16,480 of them.
FIRST, SECOND = 256 * 128 + 128, 128 * 256 + 256
PART = (FIRST + SECOND) // 4


@pytest.fixture(scope="module")
def blocks(profile_once: ProfileOnce) -> pd.DataFrame:
    """Rank 1's blocks, with the names of layers, and of each that owns a share its bytes, as ``shares``."""
    ran = profile_once(JOB, world_size=4, rank=1)
    names = ran.table("layers")["name"]
    found = ran.table("blocks").astype({"category": str, "phase": str})
    found["name"] = found["layer"].map(names)
    shares = {
        block: {names[layer]: bytes_ for layer, bytes_ in zip(part["layer"], part["bytes"], strict=True)}
        for block, part in ran.table("shares").groupby("block")
    }
    found["shares"] = [shares.get(block, {}) for block in found.index]
    return found


@pytest.mark.long
def test_a_shard_that_stays_is_a_parameter_of_the_layers_whose_part_it_is(blocks: pd.DataFrame) -> None:
    shard = blocks[(blocks["requested_bytes"] == PART * 2) & (blocks["phase"] == "init")].iloc[0]
    assert shard["category"] == "parameter"
    of_first = FIRST - PART  # rank 1's part begins in the first layer's weight, has its bias, and ends in the second
    assert shard["shares"]["first"] == of_first * 2
    assert shard["shares"]["second"] >= (2 * PART - FIRST) * 2
    assert sum(shard["shares"].values()) == shard["bytes"]


@pytest.mark.long
def test_a_gathered_buffer_is_shared_by_weights_and_biases(blocks: pd.DataFrame) -> None:
    whole = blocks[blocks["requested_bytes"] == (FIRST + SECOND) * 2]
    assert len(whole) == 3  # the gather of a third step is made before its forward
    for _, block in whole.head(2).iterrows():
        assert block["category"] == "parameter"
        assert (block["shares"]["first"], block["shares"]["second"]) == (FIRST * 2, SECOND * 2)


@pytest.mark.long
def test_a_copy_made_for_one_gather_is_for_communication(blocks: pd.DataFrame) -> None:
    copies = blocks[(blocks["requested_bytes"] == 257 * 256 // 4 * 2) & (blocks["step"] > 0)]
    assert copies["category"].tolist() == ["communication"] * 2


@pytest.mark.long
def test_optimizer_states_of_a_flat_parameter_are_shared_by_the_layers_in_it(profile_once: ProfileOnce) -> None:
    ran = profile_once(JOB.with_name("fsdp1.py"), world_size=4, rank=2)
    first, second = 256 * 512 + 512, 512 * 256 + 256
    held = (first + second) // 4
    of_first = first - 2 * held  # rank 2's shard begins with the end of the first layer's bias
    blocks, names = ran.table("blocks"), ran.table("layers")["name"]
    states = blocks.index[(blocks["category"] == "optimizer_state") & (blocks["requested_bytes"] == 4 * held)]
    assert len(states) == 2
    shares = ran.table("shares").groupby("block")
    for state in states:
        part = shares.get_group(state)
        found = dict(zip(names[part["layer"]], part["bytes"], strict=True))
        assert found["0"] == 4 * of_first
        assert found["2"] >= 4 * (held - of_first)  # and the block's rounding
