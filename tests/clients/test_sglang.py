"""SGLang's engine on the virtual GPU, in the processes that it starts: what it holds awake and asleep, by arithmetic.

Runs where SGLang is installed; docs/rl.md says how to make its environment.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist

pytestmark = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="sglang")), reason="SGLang is not installed: docs/rl.md"
)
JOB = Path(__file__).parent / "jobs/sglang_engine.py"
MIB = 1 << 20

# As in the job.
HIDDEN, INNER, LAYERS, VOCABULARY, KEYS, SIZE = 2048, 8192, 16, 128256, 512, 2
LAYER = HIDDEN * (2 * HIDDEN + 2 * KEYS + 3 * INNER)
NORMS = (2 * LAYERS + 1) * HIDDEN * SIZE
TOKEN = 2 * KEYS * SIZE * LAYERS


def weights_of(ranks: int) -> int:
    """Bytes of a rank's weights: norms are whole on each."""
    return (VOCABULARY * HIDDEN + LAYERS * LAYER) * SIZE // ranks + NORMS


@pytest.fixture(scope="module", params=["", "--graphs", "--tensor-parallel"])
def found(
    request: pytest.FixtureRequest, run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Bytes of the rank's GPU that all processes held, as the job said, by point, and the ranks of its engine."""
    directory = tmp_path_factory.mktemp("sglang")
    ranks = "2" if request.param == "--tensor-parallel" else "1"
    options = ["--device", "virtual", "--world-size", "1", "--gpus-per-node", ranks, "--output", "run"]
    finished = run_fakedist("profile", *options, JOB, *filter(None, [request.param]), cwd=directory)
    assert finished.code == 0, finished.stderr
    lines = [line.removeprefix("HELD ") for line in finished.stdout.splitlines() if line.startswith("HELD ")]
    return {point.pop("at"): point for point in map(json.loads, lines)} | {"ranks": int(ranks)}


def test_the_kv_cache_fills_what_its_share_leaves(found: dict[str, Any]) -> None:
    started = found["started"]
    cache = started["cached_tokens"] * TOKEN // found["ranks"]
    assert 0 < started["total"] / 2 - weights_of(found["ranks"]) - cache < 512 * MIB
    assert found["decoded"]["tokens"] == 16


def test_asleep_it_gives_back_its_kv_cache_and_its_weights(found: dict[str, Any]) -> None:
    cache = found["decoded"]["used"] - found["asleep kv_cache"]["used"]
    assert 1 < cache / (found["started"]["cached_tokens"] * TOKEN // found["ranks"]) < 1.005
    weights = found["asleep kv_cache"]["used"] - found["asleep weights"]["used"]
    assert 1 < weights / weights_of(found["ranks"]) < 1.02
    assert 0 <= found["awake"]["used"] - found["decoded"]["used"] < 32 * MIB
