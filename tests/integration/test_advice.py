"""Advice is taken, and gives what it said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist

SCRIPT = Path(__file__).parent / "jobs" / "advised_gpt.py"

pytestmark = pytest.mark.integration


def profile(run_fakedist: RunFakedist, change: str, *, page: bool = False) -> dict[str, Any]:
    place = ("--world-size", "8", "--rank", "0", "--device", "virtual")
    return run_fakedist("profile", *place, "--json", SCRIPT, "--change", change, page=page).json()


@pytest.mark.long
@pytest.mark.parametrize(
    "change", ["selective-checkpoint", pytest.param("shard-parameters", marks=pytest.mark.nightly)]
)
def test_a_change_lowers_the_peak_by_what_the_advice_said(run_fakedist: RunFakedist, change: str) -> None:
    before = profile(run_fakedist, "none")
    advice = {piece["rule"]: piece for piece in before["advice"]}
    assert set(advice) >= {"checkpoint", "selective-checkpoint", "offload", "micro-batch", "shard-parameters"}
    # Which blocks are cut from larger ones, and get up to 1 MiB more, depends on those before them.
    rounded = {moment["moment"]: moment["rounding_bytes"] for moment in before["reserved"]}["peak_allocated"]
    after = profile(run_fakedist, change, page=change == "selective-checkpoint")
    given = before["peak_allocated_bytes"] - after["peak_allocated_bytes"]
    piece = advice[change]
    assert piece["gives_low_bytes"] - rounded <= given <= piece["gives_bytes"] + rounded
    assert 0 <= piece["price_us"] <= piece["price_high_us"]
    assert change not in {piece["rule"] for piece in after["advice"]}
    assert (Path(after["run_directory"]) / "report.html").exists() == (change == "selective-checkpoint")
