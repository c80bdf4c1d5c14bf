"""Advice is taken, and gives what it said."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import fakedist
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
#: Changes of one job, the one that "none" is, each of which takes a rule's advice.
_CHANGES = (
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
)
#: Rules with a test of their own: the one below, and those of flags of Megatron.
_ELSEWHERE = {"expandable-segments", "recompute-module"}
#: Rules that nothing here applies and records again.
_NOT_APPLIED = {
    "engine-share": "vLLM has to be installed; its share of memory is its own arithmetic, tested by hand-made records",
    "engine-offload-optimizer": "a loop of engine and trainer has to be changed; no time, bytes of the states alone",
    "engine-sleep": "as above; no time, bytes of weights and cache alone",
    "engine-sleep-level": "as above; no time, bytes of the host's weights alone",
    "engine-eager": "no graphs are captured where no kernel runs; no time, bytes that the engine counted",
    "engine-fp8-cache": "vLLM has to be installed; no time, bytes of half the cache",
}


def profile(
    run_fakedist: RunFakedist,
    change: str,
    *more: str,
    memory: str = "4GiB",
    rank: int = 0,
    page: bool = False,
    options: tuple[str, ...] = (),
) -> dict[str, Any]:
    place = ("--world-size", "8", "--rank", str(rank), "--device", "virtual", "--gpu-memory", memory, *options)
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
@pytest.mark.parametrize("change", _CHANGES)
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


@pytest.mark.long
@pytest.mark.nightly
def test_expandable_segments_need_what_the_advice_said(run_fakedist: RunFakedist) -> None:
    expandable = ("--env", "PYTORCH_ALLOC_CONF=expandable_segments:True")
    before, after = (profile(run_fakedist, "growing", options=options) for options in ((), expandable))
    piece = {piece["rule"]: piece for piece in before["advice"]}["expandable-segments"]
    assert piece["needs_low_bytes"] <= after["peak_reserved_bytes"] <= piece["needs_high_bytes"]
    assert after["peak_reserved_bytes"] < before["peak_reserved_bytes"]
    assert piece["price_us"] is None
    assert piece["rule"] not in {piece["rule"] for piece in after["advice"]}


def test_every_rule_of_advice_is_applied_or_named_with_the_reason_why_not() -> None:
    changes = [change if isinstance(change, str) else str(change.values[0]) for change in _CHANGES]
    applied = {*_JOBS, *_ELSEWHERE, *(change.partition(" ")[0] for change in changes)}
    assert not applied & set(_NOT_APPLIED)
    assert rules_of_advice() == applied | set(_NOT_APPLIED)


def rules_of_advice() -> set[str]:
    """The rules that the package's calls of ``Change`` and ``Advice`` name."""
    first: list[ast.expr] = []
    for path in Path(fakedist.__file__).parent.rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        first += [
            call.args[0]
            for call in calls
            if isinstance(call.func, ast.Name) and call.func.id in ("Change", "Advice") and call.args
        ]
    constants = (node for expression in first for node in ast.walk(expression) if isinstance(node, ast.Constant))
    return {node.value for node in constants if isinstance(node.value, str) and node.value}
