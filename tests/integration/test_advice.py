"""Advice is taken, and gives what it said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist

SCRIPT = Path(__file__).parent / "jobs" / "advised_gpt.py"

pytestmark = pytest.mark.integration


#: By rule, the changes of two jobs, of which the second is the first with that advice taken; the rest of both command
#: lines; and the GPU's memory, of which advice gives at least a hundredth.
_JOBS = {
    "fuse-optimizer": ("unfused", "none", ("--batch", "1", "--seq-len", "64"), "1GiB"),
    "drop-gradients": ("kept-gradients", "none", (), "4GiB"),
    "reshard": ("shard-gradients", "shard-parameters", ("--batch", "1"), "2GiB"),
    "loss-parallel": ("gathered-logits", "loss-parallel", (), "4GiB"),
}
#: Rules of which the time is not known, and rules that cost nothing: a step is as long, or shorter.
_UNTIMED, _FREE = {"shard-optimizer", "loss-parallel"}, {"fuse-optimizer", "drop-gradients"}


def profile(
    run_fakedist: RunFakedist, change: str, *more: str, memory: str = "4GiB", page: bool = False
) -> dict[str, Any]:
    place = ("--world-size", "8", "--rank", "0", "--device", "virtual", "--gpu-memory", memory)
    constant = {"FAKEDIST_HOST_CLOCK": "0"}  # two recordings, of which only the change is to differ
    return run_fakedist("profile", *place, "--json", SCRIPT, "--change", change, *more, page=page, env=constant).json()


def hold_to_advice(before: dict[str, Any], after: dict[str, Any], rule: str) -> None:
    """Assert that a job which took advice has its bytes within the range, and its time within the interval."""
    piece = {piece["rule"]: piece for piece in before["advice"]}[rule]
    given = before["peak_allocated_bytes"] - after["peak_allocated_bytes"]
    assert piece["gives_low_bytes"] <= given <= piece["gives_bytes"]
    longer_us = after["time"]["step_us"] - before["time"]["step_us"]
    if rule in _UNTIMED:
        assert piece["price_us"] is None
    elif rule in _FREE:
        assert longer_us <= piece["price_high_us"] == 0
    else:
        assert piece["price_us"] <= longer_us <= piece["price_high_us"]


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
    first, second, rest, memory = _JOBS[rule]
    before, after = (profile(run_fakedist, change, *rest, memory=memory) for change in (first, second))
    hold_to_advice(before, after, rule)
    assert rule not in {piece["rule"] for piece in after["advice"]}
