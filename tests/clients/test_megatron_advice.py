"""Advice in Megatron-LM's flags is taken, and gives what it said: on megatron-core's own layers.

Recorded are the flags that those layers have: of ``--recompute-modules`` ``core_attn`` alone. The other modules and
``--cpu-offloading`` need Transformer Engine, which no CPU builds in a test's time; Megatron-FSDP's strategies have
recordings in ``test_megatron_fsdp.py``.
"""

from __future__ import annotations

import importlib.metadata
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist
from tests.integration.test_advice import hold_to_advice

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not any(importlib.metadata.distributions(name="megatron_core")),
        reason="not installed: pip install --no-deps megatron-core==0.16.1",
    ),
]
SCRIPT = Path(__file__).parents[2] / "examples/megatron_gpt.py"
#: Attention that is not fused, so that recomputing it gives something; two samples a micro-batch.
JOB = shlex.split("""
    --bf16 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --no-rope-fusion
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --seq-length 1024
    --max-position-embeddings 1024 --lr 1e-4 --exit-interval 2 --global-batch-size 16 --micro-batch-size 2
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 4 --hidden-size 1024
    --ffn-hidden-size 4096 --num-attention-heads 16 --transformer-impl local
""")
#: By rule, the flags that its advice names.
FLAGS = {
    "shard-optimizer": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "recompute-module": "--recompute-granularity selective --recompute-modules core_attn",
    "checkpoint": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "micro-batch": "--micro-batch-size 1",
}


def profile(run_fakedist: RunFakedist, flags: str) -> dict[str, Any]:
    place = ("--world-size", "8", "--rank", "0", "--device", "virtual", "--gpu", "h100-80g", "--gpu-memory", "16GiB")
    constant = {"FAKEDIST_HOST_CLOCK": "0"}
    return run_fakedist("profile", *place, "--json", SCRIPT, *JOB, *shlex.split(flags), env=constant).json()


@pytest.fixture(scope="module")
def before(run_fakedist: RunFakedist) -> dict[str, Any]:
    return profile(run_fakedist, "")


@pytest.mark.parametrize("rule", FLAGS)
def test_flags_give_and_cost_what_the_advice_said(run_fakedist: RunFakedist, before: dict[str, Any], rule: str) -> None:
    assert FLAGS[rule] in {piece["rule"]: piece["title"] for piece in before["advice"]}[rule]
    hold_to_advice(before, profile(run_fakedist, FLAGS[rule]), rule)
