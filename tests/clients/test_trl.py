"""TRL's GRPO with vLLM in the trainer's process: what the engine gets, and what both hold, by arithmetic.

Runs where TRL and vLLM are installed; docs/rl.md says how to make the environment.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist

pytestmark = pytest.mark.skipif(
    not all(any(importlib.metadata.distributions(name=name)) for name in ("trl", "vllm")),
    reason="TRL or vLLM is not installed: docs/rl.md",
)
JOB = Path(__file__).parent / "jobs/trl_grpo.py"
MIB, GRANULE = 1 << 20, 2 << 20

# As in the job.
HIDDEN, INNER, LAYERS, VOCABULARY, KEYS, SIZE = 1024, 4096, 8, 32768, 256, 2
LAYER = HIDDEN * (2 * HIDDEN + 2 * KEYS + 3 * INNER + 2)
WEIGHTS = (2 * VOCABULARY * HIDDEN + LAYERS * LAYER + HIDDEN) * SIZE
NORMS = (2 * LAYERS + 1) * HIDDEN * SIZE
TOKEN = 2 * KEYS * SIZE * LAYERS
UTILIZATION = 0.3


def engine_weights(ranks: int) -> int:
    """Weights of an engine that so many ranks share: its norms are whole on each."""
    return (WEIGHTS - NORMS) // ranks + NORMS


@pytest.fixture(scope="module", params=[(1, 1), (8, 1), (8, 2)], ids=["1 rank", "rank 0 of 8", "engine of 2 ranks"])
def found(
    request: pytest.FixtureRequest, run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return the ranks, what the job said of its engine as the training began, and the report's object."""
    directory = tmp_path_factory.mktemp("trl")
    ranks, of_engine = request.param
    options = ["--device", "virtual", "--world-size", str(ranks), "--gpus-per-node", str(ranks), "--output", "run"]
    finished = run_fakedist("profile", *options, JOB, str(UTILIZATION), str(of_engine), cwd=directory)
    assert finished.code == 0, finished.stderr
    (line,) = [line for line in finished.stdout.splitlines() if line.startswith("HELD ")]
    report = json.loads((directory / "run/run.json").read_text())["summary"]
    return {"ranks": ranks, "of_engine": of_engine, "report": report, **json.loads(line.removeprefix("HELD "))}


def cache_of(found: dict[str, Any]) -> int:
    """Bytes of the KV cache, of whose heads each rank of the engine has its part."""
    return int(found["blocks"]) * int(found["block_size"]) * TOKEN // int(found["of_engine"])


def test_the_engine_gets_what_its_weights_and_its_measuring_leave(found: dict[str, Any]) -> None:
    left = int(UTILIZATION * found["total"]) - cache_of(found)
    weights = engine_weights(found["of_engine"])
    assert weights < left < weights + 512 * MIB, "activations, and CUDA graphs"


def test_as_the_training_begins_the_trainer_has_its_weights_and_the_engine_sleeps(found: dict[str, Any]) -> None:
    buckets = WEIGHTS if found["ranks"] > 1 else 0  # DistributedDataParallel's, of gradients
    kept = found["report"]["named_phases"][0]["end_outside_bytes"]
    assert (kept > 0) == (found["of_engine"] > 1), "buffers that ranks of the engine share"
    assert WEIGHTS + buckets + kept < found["used"] < WEIGHTS + buckets + kept + 256 * MIB


def test_each_hand_over_rollout_and_training_is_a_phase(found: dict[str, Any]) -> None:
    step = ["wake", "weight sync", "wake", "rollout", "sleep", "log-probs", "training"]
    assert [row["phase"] for row in found["report"]["named_phases"]] == ["sleep", *step, *step]


def test_the_engine_takes_its_weights_then_its_kv_cache_and_gives_back_both(found: dict[str, Any]) -> None:
    rows = found["report"]["named_phases"]
    end = [row["end_backed_bytes"] for row in rows]
    cache, engines = cache_of(found), engine_weights(found["of_engine"])
    for first in (1, 8):
        synced, woken, slept = end[first + 1], end[first + 2], end[first + 4]
        assert 0 <= woken - synced - cache < GRANULE * LAYERS, "a segment of the cache ends at a granule"
        weights = end[first + 3] - slept - (woken - synced)
        assert engines < weights < engines + 32 * MIB
        assert rows[first]["end_backed_bytes"] == synced, "the weights are copied in place"


def test_the_second_rollout_has_adams_moments_beside_it(found: dict[str, Any]) -> None:
    rollouts = [row for row in found["report"]["named_phases"] if row["phase"] == "rollout"]
    more = rollouts[1]["peak_allocated_bytes"] - rollouts[0]["peak_allocated_bytes"]
    assert 2 * WEIGHTS < more < 2 * WEIGHTS + 64 * MIB, "and cuBLAS's workspace of 32 MiB"


def test_training_has_gradients_and_no_memory_of_the_engine(found: dict[str, Any]) -> None:
    rows = [row for row in found["report"]["named_phases"] if row["phase"] in ("sleep", "training")]
    asleep, trained = rows[1], rows[2]  # of the first step
    more = trained["end_backed_bytes"] - asleep["end_backed_bytes"]
    least = WEIGHTS if found["ranks"] == 1 else 0  # of several ranks, buckets may hold them
    assert least < more < WEIGHTS + 128 * MIB


def test_what_is_kept_asleep_is_all_that_the_process_has_in_use(found: dict[str, Any]) -> None:
    """Of the trainer, the engine's buffers, those of its CUDA graphs, and what ranks share."""
    report = found["report"]
    (asleep,) = report["engine_sleeps"]
    assert (asleep["process"], asleep["how"], asleep["times"]) == ("", "level 2", 3)
    last = [row for row in report["named_phases"] if row["phase"] == "sleep"][-1]
    kept = asleep["kept"]
    later = last["end_backed_bytes"] + last["end_outside_bytes"] - sum(kept.values())
    assert later in (0, GRANULE), "LLM.sleep may take a small segment after the worker's"
    buckets = WEIGHTS if found["ranks"] > 1 else 0
    assert 3 * WEIGHTS + buckets < kept["other tensors"] < 3 * WEIGHTS + buckets + 64 * MIB, "and Adam's moments"
    assert 0 < kept["private pools"] + kept["engine's tensors"] < 128 * MIB


def test_the_report_has_what_the_engine_measured(found: dict[str, Any]) -> None:
    engine = found["report"]["engine"]
    assert (engine["utilization"], engine["num_blocks"]) == (UTILIZATION, found["blocks"])
    assert engine["cache_bytes"] == cache_of(found)
    weights = engine_weights(found["of_engine"])
    assert weights < engine["weights_bytes"] < weights + 8 * MIB
    measured = engine["weights_bytes"] + engine["activations_bytes"] + engine["graphs_bytes"]
    left = int(UTILIZATION * found["total"]) - engine["cache_bytes"]
    assert 0 < left - measured < 32 * MIB, "workspaces, and what the graphs were estimated to take"
    assert engine["peak_awake_bytes"] == max(row["peak_used_bytes"] for row in found["report"]["named_phases"])


def test_at_the_largest_share_the_job_fits_and_beyond_it_does_not(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    """On a GPU of 12 GiB, where 0.01 are 123 MiB."""

    def ran(share: float) -> tuple[int, str, Any]:
        output = f"run-{share:g}"
        options = ["--device", "virtual", "--gpu-memory", "12GiB", "--world-size", "1", "--no-page", "--output", output]
        finished = run_fakedist("profile", *options, JOB, f"{share:g}", cwd=tmp_path)
        return finished.code, finished.stderr, json.loads((tmp_path / output / "run.json").read_text())["summary"]

    code, errors, first = ran(0.5)
    assert code == 0, errors
    largest, least = (first["engine"][f"{which}_utilization"] for which in ("largest", "least"))
    code, errors, at = ran(largest)
    assert code in (0, 4), errors
    assert at["exit"]["outcome"] == "finished"
    assert at["engine"]["num_blocks"] == first["engine"]["largest_num_blocks"]
    assert max(row["peak_used_bytes"] for row in at["named_phases"]) <= 12 << 30
    code, errors, _ = ran(largest + 0.01)
    assert code == 4, errors
    assert "the rank does not fit the GPU" in errors
    code, errors, started = ran(least)
    assert started["engine"]["num_blocks"] * 16 >= 1024, "tokens of a request"
    code, errors, _ = ran(least - 0.0001)
    assert code != 0
    assert "To serve at least one request" in errors


def test_only_several_ranks_hold_buckets_of_gradients(found: dict[str, Any]) -> None:
    held = found["report"]["by_category"]["communication"]
    assert held < MIB if found["ranks"] == 1 else WEIGHTS <= held < WEIGHTS + MIB
