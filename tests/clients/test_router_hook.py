"""The router hook of docs/experts.md writes a file of counts that --router-load reads."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from tests.conftest import RunFakedist

pytestmark = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="megatron_core")),
    reason="not installed: pip install --no-deps megatron-core==0.16.1",
)
JOB = Path(__file__).parent / "jobs" / "megatron_counts.py"
OPTIONS = ("--device", "virtual", "--gpu", "h100-80g", "--world-size", "4", "--rank", "0", "--steps", "2")


def test_counts_that_the_hook_logs_are_a_load(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    finished = run_fakedist("profile", *OPTIONS, "--router-load", "zipf:1", "-o", "first", JOB, cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    (tmp_path / "counts.jsonl").rename(tmp_path / "logged.jsonl")
    finished = run_fakedist("profile", *OPTIONS, "--router-load", "logged.jsonl", "-o", "again", JOB, cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    logged, again = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("logged.jsonl", "counts.jsonl")
    )
    assert [(line["layer"], line["step"]) for line in logged] == [(n, step) for step in (0, 1) for n in range(3)]
    for before, after in zip(logged, again, strict=True):
        assert max(before["counts"]) > 3 * min(before["counts"])
        assert after["counts"] == pytest.approx(before["counts"], abs=100), "the shares are those of the file"
