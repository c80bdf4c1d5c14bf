"""Advice is taken, and gives what it said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist

SCRIPT = Path(__file__).parent / "jobs" / "advised_gpt.py"

pytestmark = pytest.mark.integration


def profile(run_fakedist: RunFakedist, change: str, *, page: bool = False) -> dict[str, Any]:
    place = ("--world-size", "8", "--rank", "0", "--device", "virtual", "--gpu-memory", "4GiB")
    constant = {"FAKEDIST_HOST_CLOCK": "0"}  # two recordings, of which only the change is to differ
    return run_fakedist("profile", *place, "--json", SCRIPT, "--change", change, page=page, env=constant).json()


@pytest.fixture(scope="module")
def before(run_fakedist: RunFakedist) -> dict[str, Any]:
    return profile(run_fakedist, "none")


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        "selective-checkpoint",
        "micro-batch",
        "fuse-loss",
        *(
            pytest.param(change, marks=pytest.mark.nightly)
            for change in (
                "checkpoint",
                "offload",
                "fuse-loss alone",
                "shard-optimizer",
                "shard-gradients",
                "shard-parameters",
            )
        ),
    ],
)
def test_a_change_gives_and_costs_what_the_advice_said(
    run_fakedist: RunFakedist, before: dict[str, Any], change: str
) -> None:
    piece = {piece["rule"]: piece for piece in before["advice"]}[change.partition(" ")[0]]
    after = profile(run_fakedist, change, page=change == "selective-checkpoint")
    given = before["peak_allocated_bytes"] - after["peak_allocated_bytes"]
    assert piece["gives_low_bytes"] <= given <= piece["gives_bytes"]
    longer_us = after["time"]["step_us"] - before["time"]["step_us"]
    if change == "shard-optimizer":
        assert piece["price_us"] is None  # broadcasts, of which the time is not known
    else:
        assert piece["price_us"] <= longer_us <= piece["price_high_us"]
    if change == "selective-checkpoint":
        assert change not in {piece["rule"] for piece in after["advice"]}
    assert (Path(after["run_directory"]) / "report.html").exists() == (change == "selective-checkpoint")
