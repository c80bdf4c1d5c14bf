"""verl on rank 0 of eight: what its FSDP actor holds, and vLLM's server on the same GPU, by arithmetic.

Runs where verl and vLLM are installed; docs/rl.md says how to make the environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist

pytestmark = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="verl")), reason="verl is not installed: docs/rl.md"
)
JOBS = Path(__file__).parent / "jobs"
MIB = 1 << 20

# As in the jobs.
VOCABULARY, HIDDEN, INNER, KEYS, LAYERS, RANKS = 16000, 512, 1536, 256, 4, 8
LAYER = HIDDEN * (2 * HIDDEN + 2 * KEYS + 3 * INNER + 3) + 2 * KEYS
PARAMETERS = 2 * VOCABULARY * HIDDEN + LAYERS * LAYER + HIDDEN
SHARD = PARAMETERS // RANKS * 4  # bytes, float32
WORKSPACES = 2 * 32 * MIB  # cuBLAS's on an H100, of the forward and of the backward thread
LOGITS = 2 * 256 * VOCABULARY * 4  # of a micro-batch, float32
OPTIONS = ["--device", "virtual", "--world-size", str(RANKS), "--rank", "0", "--output", "run"]
TOKEN = 2 * KEYS * 2 * LAYERS  # in vLLM's KV cache
BUCKET = 2048 * MIB  # in which the worker sends its weights: update_weights_bucket_megabytes
LARGEST = VOCABULARY * HIDDEN * 4

#: Of ``python -m verl.trainer.main_ppo``.
SETTINGS = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=model/prompts.parquet",
    "data.val_files=model/prompts.parquet",
    "data.train_batch_size=16",
    "data.max_prompt_length=128",
    "data.max_response_length=128",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.model.use_remove_padding=false",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_model_len=1024",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.resume_mode=disable",
    "trainer.logger=[console]",
    "ray_kwargs.ray_init.num_cpus=4",
    "+ray_kwargs.ray_init.include_dashboard=false",
    "+ray_kwargs.ray_init.object_store_memory=200000000",
]
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
}


def test_the_actor_holds_its_shards_and_adams_of_them(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    finished = run_fakedist("profile", *OPTIONS, JOBS / "verl_grpo.py", cwd=tmp_path)
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


@pytest.fixture(scope="module")
def controlled(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report's object of two steps of verl's controller."""
    directory = tmp_path_factory.mktemp("verl")
    subprocess.run([sys.executable, JOBS / "verl_model.py", directory / "model", "64"], check=True)
    job = ["-m", "verl.trainer.main_ppo", f"trainer.n_gpus_per_node={RANKS}", *SETTINGS]
    finished = run_fakedist("profile", *OPTIONS, *job, cwd=directory, env=ENVIRONMENT)
    assert finished.code == 0, finished.stderr
    report: dict[str, Any] = json.loads((directory / "run/run.json").read_text())["summary"]
    return report


def test_each_hand_over_of_the_controllers_steps_is_a_phase(controlled: dict[str, Any]) -> None:
    step = ["rollout", "sleep", "log-probs", "training", "weight sync"]
    assert [row["phase"] for row in controlled["named_phases"]] == ["sleep", "weight sync", *step, *step]


def test_the_server_takes_its_weights_and_its_kv_cache_and_gives_back_both(controlled: dict[str, Any]) -> None:
    rows, engine = controlled["named_phases"], controlled["engine"]
    asleep = {row["end_others_bytes"] for row in rows if row["phase"] in ("sleep", "training")}
    awake = {row["end_others_bytes"] for row in rows if row["phase"] == "weight sync"}
    assert (len(asleep), len(awake)) == (1, 1), "the worker's buffer, which the server maps, is not the server's"
    assert engine["cache_bytes"] == engine["num_blocks"] * engine["block_tokens"] * TOKEN
    held = max(awake) - max(asleep) - engine["cache_bytes"]
    assert 2 * PARAMETERS < held < 2 * PARAMETERS + 16 * MIB, "weights in bfloat16, in segments"
    reserved = max(row["peak_reserved_bytes"] for row in rows if row["phase"] == "weight sync")
    assert engine["peak_asleep_bytes"] == reserved + max(asleep) + held, "the buffer counts once"


def test_a_weight_sync_takes_a_bucket_and_the_whole_weight_that_goes_into_it(controlled: dict[str, Any]) -> None:
    pairs = [(a, b) for a, b in pairwise(controlled["named_phases"]) if a["phase"] == "weight sync"]
    assert [after["phase"] for _, after in pairs] == ["rollout", "rollout"]
    for sync, rollout in pairs:
        more = sync["peak_allocated_bytes"] - rollout["handover_allocated_bytes"]
        assert BUCKET + LARGEST < more < BUCKET + 2 * LARGEST


def test_the_second_rollout_has_adams_moments_too(controlled: dict[str, Any]) -> None:
    first, second = (row["peak_allocated_bytes"] for row in controlled["named_phases"] if row["phase"] == "rollout")
    assert SHARD <= first < SHARD + MIB
    assert 2 * SHARD <= second - first - WORKSPACES < 2 * SHARD + MIB
