"""TRL's GRPO with vLLM in the trainer's process: what the engine gets, and what both hold, by arithmetic.

Runs where TRL and vLLM are installed; docs/rl.md says how to make the environment.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from tests.conftest import RunFakedist

pytestmark = pytest.mark.skipif(
    not all(any(importlib.metadata.distributions(name=name)) for name in ("trl", "vllm")),
    reason="TRL or vLLM is not installed: docs/rl.md",
)
JOB = Path(__file__).parent / "jobs/trl_grpo.py"
MIB = 1 << 20

# As in the job.
HIDDEN, INNER, LAYERS, VOCABULARY, KEYS, SIZE = 1024, 4096, 8, 32768, 256, 2
LAYER = HIDDEN * (2 * HIDDEN + 2 * KEYS + 3 * INNER + 2)
WEIGHTS = (2 * VOCABULARY * HIDDEN + LAYERS * LAYER + HIDDEN) * SIZE
TOKEN = 2 * KEYS * SIZE * LAYERS
UTILIZATION = 0.3


@pytest.fixture(scope="module")
def found(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Return what the job said of its engine as the training began."""
    directory = tmp_path_factory.mktemp("trl")
    options = ["--device", "virtual", "--world-size", "1", "--gpus-per-node", "1", "--output", "run"]
    finished = run_fakedist("profile", *options, JOB, str(UTILIZATION), cwd=directory)
    assert finished.code == 0, finished.stderr
    (line,) = [line for line in finished.stdout.splitlines() if line.startswith("HELD ")]
    held: dict[str, int] = json.loads(line.removeprefix("HELD "))
    return held


def test_the_engine_gets_what_its_weights_and_its_measuring_leave(found: dict[str, int]) -> None:
    cache = found["blocks"] * found["block_size"] * TOKEN
    left = int(UTILIZATION * found["total"]) - cache
    assert WEIGHTS < left < WEIGHTS + 512 * MIB, "activations, and CUDA graphs"


def test_as_the_training_begins_the_trainer_has_its_weights_and_the_engine_sleeps(found: dict[str, int]) -> None:
    assert WEIGHTS < found["used"] < WEIGHTS + 256 * MIB
