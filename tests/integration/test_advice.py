"""Advice is taken, and gives what it said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist

SCRIPT = Path(__file__).parent / "jobs" / "advised_gpt.py"

pytestmark = pytest.mark.integration


#: By rule, the changes of two jobs, of which the second is the first with that advice taken; the rest of both command
#: lines; the GPU's memory, of which advice gives at least a hundredth; and the rank.
_JOBS = {
    "fuse-optimizer": ("unfused", "none", ("--batch", "1", "--seq-len", "64"), "1GiB", 0),
    "drop-gradients": ("kept-gradients", "none", (), "4GiB", 0),
    "reshard": ("shard-gradients", "shard-parameters", ("--batch", "1"), "2GiB", 0),
    "loss-parallel": ("gathered-logits", "loss-parallel", (), "4GiB", 0),
    "one-forward-one-backward": ("all-forwards-first", "one-forward-one-backward", ("--batch", "16"), "4GiB", 6),
    "checkpoint": ("compiled", "compiled checkpoint", (), "4GiB", 0),
}
#: Rules of which the time is not known.
_UNTIMED = {"shard-optimizer", "loss-parallel"}


def profile(
    run_fakedist: RunFakedist, change: str, *more: str, memory: str = "4GiB", rank: int = 0, page: bool = False
) -> dict[str, Any]:
    place = ("--world-size", "8", "--rank", str(rank), "--device", "virtual", "--gpu-memory", memory)
    constant = {"FAKEDIST_HOST_CLOCK": "0"}  # two recordings, of which only the change is to differ
    return run_fakedist("profile", *place, "--json", SCRIPT, "--change", change, *more, page=page, env=constant).json()


def hold_to_advice(before: dict[str, Any], after: dict[str, Any], rule: str) -> None:
    """Assert that a job which took advice has its bytes within the range, and its time within the interval.

    A step that is shorter costs nothing.
    """
    piece = {piece["rule"]: piece for piece in before["advice"]}[rule]
    given = before["peak_allocated_bytes"] - after["peak_allocated_bytes"]
    assert piece["gives_low_bytes"] <= given <= piece["gives_bytes"]
    longer_us = after["time"]["step_us"] - before["time"]["step_us"]
    if piece["price_us"] is None:
        assert rule in _UNTIMED
    else:
        assert piece["price_us"] <= max(longer_us, 0) <= piece["price_high_us"]


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
    after = profile(run_fakedist, change, page=change == "selective-checkpoint")
    hold_to_advice(before, after, change.partition(" ")[0])
    if change == "selective-checkpoint":
        assert change not in {piece["rule"] for piece in after["advice"]}
    assert (Path(after["run_directory"]) / "report.html").exists() == (change == "selective-checkpoint")


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.parametrize("rule", _JOBS)
def test_a_job_that_takes_advice_gives_and_costs_what_was_said(run_fakedist: RunFakedist, rule: str) -> None:
    first, second, rest, memory, rank = _JOBS[rule]
    before, after = (profile(run_fakedist, change, *rest, memory=memory, rank=rank) for change in (first, second))
    hold_to_advice(before, after, rule)
    assert rule not in {piece["rule"] for piece in after["advice"]}
    if first == "compiled":  # the text says this of another way, without figures
        kept = profile(run_fakedist, "compiled checkpoint, products kept", memory=memory)
        assert after["peak_allocated_bytes"] < kept["peak_allocated_bytes"] < before["peak_allocated_bytes"]
        assert kept["time"]["step_us"] < after["time"]["step_us"]
