"""verl's worker of one rank of eight, in the rank's process: what its FSDP actor holds, by arithmetic."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from tests.conftest import RunFakedist

pytestmark = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="verl")), reason="verl is not installed: docs/rl.md"
)
JOB = Path(__file__).parent / "jobs/verl_grpo.py"
MIB = 1 << 20

# As in the job.
VOCABULARY, HIDDEN, INNER, KEYS, LAYERS, RANKS = 16000, 512, 1536, 256, 4, 8
LAYER = HIDDEN * (2 * HIDDEN + 2 * KEYS + 3 * INNER + 3) + 2 * KEYS
PARAMETERS = 2 * VOCABULARY * HIDDEN + LAYERS * LAYER + HIDDEN
SHARD = PARAMETERS // RANKS * 4  # bytes, float32
WORKSPACES = 2 * 32 * MIB  # cuBLAS's on an H100, of the forward and of the backward thread
LOGITS = 2 * 256 * VOCABULARY * 4  # of a micro-batch, float32


def test_the_actor_holds_its_shards_and_adams_of_them(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    options = ["--device", "virtual", "--world-size", str(RANKS), "--rank", "0", "--output", "run"]
    finished = run_fakedist("profile", *options, JOB, cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    lines = [line.removeprefix("HELD ") for line in finished.stdout.splitlines() if line.startswith("HELD ")]
    started, *trained = (json.loads(line)["allocated"] for line in lines)
    assert SHARD <= started < SHARD + MIB
    assert len(trained) == 2
    for held in trained:
        assert 2 * SHARD <= held - started - WORKSPACES < 2 * SHARD + MIB, "Adam has two values of each parameter"
    phases = json.loads((tmp_path / "run/run.json").read_text())["summary"]["named_phases"]
    assert [row["phase"] for row in phases] == ["start", *["log-probs", "training"] * 2]
    for row, held in zip(phases[1::2], (started, trained[0]), strict=True):
        assert row["peak_allocated_bytes"] > held + 4 * LOGITS, "the entropy of a micro-batch's logits in float32"
