"""Collectives in compiled code run as they do with NCCL, and none of our code is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import ProfileOnce

JOB = Path(__file__).parent / "jobs" / "compiled_collectives.py"
PARTS = {
    "asynchronous", "given_group", "optimizer_with_collectives", "whole_step", "compiled_optimizer", "sharded_model",
    "tensor_parallel", "one_graph", "one_graph_of_calls", "traced", "inference", "experts", "exported",
}  # fmt: skip


@pytest.mark.long
def test_compiled_code_calls_collectives(profile_once: ProfileOnce) -> None:
    finished = profile_once(JOB, rank=3, options=("--steps", "50", "--no-kernels")).finished
    assert finished.code == 0, finished.stderr
    said = dict(line.split()[:2] for line in finished.stdout.splitlines() if line.split()[:1] and len(line.split()) > 1)
    assert {part: said.get(part) for part in PARTS} == dict.fromkeys(PARTS, "ok"), finished.stderr
