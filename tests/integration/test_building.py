"""Whose memory it is before training begins: jobs/building.py moves, casts, loads, copies and wraps models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import ProfileOnce

pytestmark = pytest.mark.long

JOB = Path(__file__).parent / "jobs" / "building.py"
MIB = 1 << 20
#: Each way, and the bytes of the weights that it allocates, in order of size.
WAYS = {
    "moved": [4, 4, 4],
    "cast": [2, 2, 2, 4, 4, 4, 4, 4, 4],
    "materialized": [4, 4, 4],
    "__init__": [4, 4, 4],
    "loaded": [4, 4, 4, 4, 4, 4],
    "assigned": [4, 4, 4],
    "to": [2, 8, 8],
    "sharded": [0.5, 0.5, 4, 4, 4],
    "flattened": [0.5, 0.5, 4, 4, 4, 4, 4],
    "flattened_on_device": [1, 4, 4, 4, 8],
    "replicated": [4, 4, 4],
}


@pytest.fixture(scope="module")
def run(profile_once: ProfileOnce) -> dict[str, Any]:
    """The job's summary, and its blocks of half a MiB and more from before training, each with layer and function."""
    ran = profile_once(JOB)
    blocks, layers = ran.table("blocks"), ran.table("layers")
    blocks["name"] = layers["name"].to_numpy()[blocks["layer"]]
    lines = ran.table("stacks")["line"].to_numpy()[blocks["stack"]]
    blocks["function"] = [line.rpartition("(")[2].rstrip(")") for line in lines]
    blocks = blocks[(blocks["step"] == 0) & (blocks["bytes"] >= MIB // 2)]
    return {"summary": ran.summary, "blocks": blocks, "layers": layers, "shares": ran.table("shares")}


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_parameters_of_their_layers_before_anything_has_run(run: dict[str, Any], way: str) -> None:
    blocks = run["blocks"]
    made = blocks[(blocks["function"] == way) & (blocks["category"] != "communication")]
    held = made[made["category"] == "parameter"]
    assert sorted(held["bytes"] / MIB) == WAYS[way]
    shared = held.index.isin(run["shares"]["block"])
    assert all(held["name"][~shared] != "")
    assert len(made) == len(held)


def test_the_one_buffer_of_a_collective_is_no_parameter(run: dict[str, Any]) -> None:
    """Broadcasting parameters together copies them into a buffer of its own."""
    blocks = run["blocks"]
    sent = blocks[(blocks["function"] == "flattened_on_device") & (blocks["category"] == "communication")]
    assert list(sent["bytes"] / MIB) == [12]


def test_a_flat_parameter_is_shared_by_the_layers_whose_weights_it_holds(run: dict[str, Any]) -> None:
    blocks, shares, names = run["blocks"], run["shares"], run["layers"]["name"]
    flat = blocks[(blocks["function"] == "flattened_on_device") & (blocks["bytes"] == 8 * MIB)]
    parts = shares[shares["block"].isin(flat.index)]
    assert list(parts["bytes"]) == [4 * MIB, 4 * MIB]
    assert [name.rpartition(".")[2] for name in names[parts["layer"]]] == ["up", "down"]


def test_a_copy_of_a_model_is_not_the_model(run: dict[str, Any]) -> None:
    blocks = run["blocks"]
    copied = blocks[blocks["name"] == "copy of the parameters (average)"]
    assert list(copied["category"].unique()) == ["other"]
    assert copied["bytes"].sum() == 12 * MIB


def test_the_peak_lies_in_init_and_its_categories_add_up_to_it(run: dict[str, Any]) -> None:
    summary = run["summary"]
    assert (summary["peak_step"], summary["peak_phase"]) == (0, "init")
    assert sum(summary["by_category"].values()) == summary["peak_allocated_bytes"]
    assert run["layers"]["peak_own_bytes"].sum() == summary["peak_allocated_bytes"]
    alive = run["blocks"][run["blocks"]["at_peak"]]
    assert set(alive["category"]) <= {"parameter", "communication", "other"}
