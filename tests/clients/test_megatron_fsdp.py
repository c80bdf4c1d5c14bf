"""Megatron-FSDP: its flat buffers in their categories, and what a group of its own for gathers changes."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest

from tests.clients.conftest import RunEntry
from tests.clients.running import Ran
from tests.conftest import RunFakedist

NAMES = (
    "Megatron-FSDP: all-gather and reduce-scatter on one group, GPT of 6.9 B parameters",
    "Megatron-FSDP: all-gather on a group of its own, so that both overlap",
)
RANK, WORLD = 31, 64
HIDDEN, LAYERS = 4_096, 32
#: Elements of a block's weights; of its flat buffer every rank holds a 64th, and what fills it up.
BLOCK = 12 * HIDDEN * HIDDEN + 2 * HIDDEN


@pytest.fixture(scope="module")
def sides(ran: RunEntry, run_fakedist: RunFakedist) -> dict[str, Any]:
    """The comparison of the two jobs."""
    runs = [ran(name, RANK).directory for name in NAMES]
    finished = run_fakedist("compare", *runs, "--json")
    assert finished.code == 0, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


def test_shards_of_each_block_are_parameters_of_its_layers(ran: RunEntry) -> None:
    run = ran(NAMES[0], RANK)
    names = run.table("layers")["name"]
    shares = run.table("shares")
    blocks = run.table("blocks").astype({"category": str, "phase": str})
    blocks["name"] = blocks["layer"].map(names).astype(str)
    least, most = BLOCK // WORLD, BLOCK // WORLD * 1.01
    kept = blocks[(blocks["step"] == 0) & blocks["at_peak"] & blocks["name"].str.startswith("layers.")]
    for category, element_bytes, number in (("parameter", 2, 1), ("parameter", 4, 1), ("optimizer_state", 4, 2)):
        size = kept["requested_bytes"] / element_bytes
        found = kept[(kept["category"] == category) & (size >= least) & (size <= most)]
        assert found.groupby(found["name"].str.extract(r"(layers\.\d+)")[0]).size().tolist() == [number] * LAYERS
    gradients = blocks[(blocks["category"] == "gradient") & (blocks["step"] == 0)]
    owners = shares[shares["block"].isin(gradients.index)]["layer"].map(names)
    assert owners.str.extract(r"(layers\.\d+)")[0].nunique() == LAYERS


def test_two_groups_of_the_same_ranks_overlap_where_one_does_not(sides: dict[str, Any]) -> None:
    streams = pd.DataFrame(sides["streams"]).set_index(["side", "operation"])
    assert streams["group"].to_dict() == {
        ("A", "all_gather"): "default_pg",
        ("A", "reduce_scatter"): "default_pg",
        ("B", "all_gather"): "gather",
        ("B", "reduce_scatter"): "default_pg",
    }
    assert streams["beside"].to_dict() == {
        ("A", "all_gather"): "compute",
        ("A", "reduce_scatter"): "compute",
        ("B", "all_gather"): "compute, default_pg reduce_scatter",
        ("B", "reduce_scatter"): "compute, gather all_gather",
    }
    for column in ("num_calls", "bytes", "stream"):
        assert streams.loc["A"][column].to_dict() == streams.loc["B"][column].to_dict()
    # Units: embedding, the blocks, and the rest. All but the last are gathered again in backward.
    assert streams.loc["A"]["num_calls"].to_dict() == {"all_gather": 2 * (LAYERS + 2) - 1, "reduce_scatter": LAYERS + 2}


def test_what_a_group_for_gathers_gives_is_told_without_running_it(ran: RunEntry, run_fakedist: RunFakedist) -> None:
    def priced(name: str, *options: str) -> dict[str, Any]:
        finished = run_fakedist("time", ran(name, RANK).directory, "--gpu", "h100-80g", "--json", *options)
        assert finished.code == 0, finished.stderr
        found: dict[str, Any] = json.loads(finished.stdout)
        return found

    one, two = priced(NAMES[0], "--what-if", "separate=default_pg"), priced(NAMES[1])
    (what_if,) = one["what_ifs"]
    assert what_if["change_us"] < 0
    assert what_if["step_us"] == pytest.approx(two["time"]["step_us"], rel=0.01)
    # The gathers of backward no longer wait behind reductions: they are what the step waits for less.
    changes = {row["operation"][:10]: row["change_us"] for row in what_if["groups"]}
    assert changes["all_gather"] < 0
    assert changes["all_gather"] < changes["reduce_sca"]


def calls_of_a_step(run: Ran) -> pd.DataFrame:
    """Number of calls and bytes of the second step, by group and operation."""
    calls = run.table("calls")
    calls["group"] = calls["group"].map(run.table("groups")["description"]).astype(str)
    calls["operation"] = calls["operation"].astype(str).str.extract("^(all_gather|all_reduce|reduce_scatter)")[0]
    columns = {"number": ("op", "size"), "bytes_in": ("bytes_in", "sum"), "bytes_out": ("bytes_out", "sum")}
    return calls[calls["step"] == 2].groupby(["group", "operation"]).agg(**columns)


def test_replicas_add_up_their_shards_of_the_gradients_once_a_step(ran: RunEntry) -> None:
    calls = calls_of_a_step(ran("Megatron-FSDP: hybrid sharding, 3 micro-batches", 31))
    units, micro_batches = 5, 3
    scattered, summed = calls.loc["mesh_dp", "reduce_scatter"], calls.loc["mesh_outer", "all_reduce"]
    assert (scattered["number"], summed["number"]) == (micro_batches * units, units)
    assert scattered["bytes_out"] == micro_batches * summed["bytes_in"]
    assert scattered["bytes_in"] == 16 * scattered["bytes_out"]


def test_weights_in_fp8_are_gathered_as_such_and_their_gradients_are_not(ran: RunEntry) -> None:
    names = ("layers in bf16", "weights in fp8, delayed scaling")
    wide, narrow = (calls_of_a_step(ran(f"Megatron-FSDP: Transformer Engine: {name}", 31)) for name in names)
    elements = 49 * 2_048**2  # of the matrices: four layers of 12, and one
    gathered = [calls.loc["default_pg", "all_gather"]["bytes_out"] for calls in (wide, narrow)]
    # Before forward and again before backward, and what fills up the buffers.
    assert gathered == pytest.approx([2 * 2 * elements, 2 * elements], rel=0.05)
    scattered = [calls.loc["default_pg", "reduce_scatter"]["bytes_in"] for calls in (wide, narrow)]
    assert scattered == pytest.approx([2 * elements] * 2, rel=0.05)
