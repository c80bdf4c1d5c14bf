"""Megatron-LM's own pretrain_gpt.py, where MEGATRON_LM names its directory: with its fake process group and without."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist

SOURCES = Path(os.environ.get("MEGATRON_LM", ""))
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        "MEGATRON_LM" not in os.environ, reason="MEGATRON_LM does not name the directory of Megatron-LM's sources"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("pynvml") is None,
        reason="not installed: pip install nvidia-ml-py, as Megatron-LM asks",
    ),
]
WORLD, RANKS = 16, (0, 15)
#: TP 2, PP 2 with two stages each, EP 4; what `--fake-process-group` leaves out is left out without it too.
JOB = shlex.split("""
    --bf16 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --seq-length 256
    --max-position-embeddings 256 --lr 1e-4 --train-samples 3200 --lr-decay-samples 3200 --global-batch-size 16
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4
    --expert-tensor-parallel-size 1 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 --hidden-size 512
    --ffn-hidden-size 2048 --num-attention-heads 8 --num-experts 8 --moe-ffn-hidden-size 1024 --moe-router-topk 2
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-router-force-load-balancing
    --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --split 99,1,0 --no-mmap-bin-files --num-workers 2
    --log-interval 1 --exit-interval 2 --eval-iters 0 --log-params-norm --log-num-zeros-in-grad
    --no-gradient-accumulation-fusion --no-check-for-nan-in-loss-and-grad
""")


def profile(run: RunFakedist, directory: Path, *more: str) -> dict[int, dict[str, Any]]:
    """The ``--json`` of each rank; ranks after the first are answered from the tapes of those before."""
    where = ("--device", "virtual", "--gpu", "h200", "--world-size", str(WORLD))
    finished = run(
        *("profile", *where, "--rank", ",".join(map(str, RANKS)), "-o", directory, "--json"),
        *(SOURCES / "pretrain_gpt.py", *JOB, *more),
        cwd=directory.parent,
        env={
            "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), str(SOURCES))),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        },
        timeout=900,
    )
    found = json.loads(finished.stdout)
    assert finished.code == 0, finished.stderr[-4000:]
    return dict(zip(RANKS, found["ranks"], strict=True))


@pytest.fixture(scope="module")
def both(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, dict[str, Any]]]:
    """The job on NCCL, and on torch's fake backend with Megatron-LM's recording of memory."""
    directory = tmp_path_factory.mktemp("megatron_lm")
    fake = ("--fake-process-group", "--record-memory-history", "--memory-snapshot-path", str(directory / "snapshot"))
    return [profile(run_fakedist, directory / "nccl"), profile(run_fakedist, directory / "fake", *fake)]


@pytest.mark.parametrize("rank", RANKS)
def test_every_rank_trains_both_ways(both: list[dict[int, dict[str, Any]]], rank: int) -> None:
    """Rank 15 has no data of its own: rank 0 tells it by a broadcast that there is some."""
    for runs in both:
        assert [step["step"] for step in runs[rank]["steps"]] == [1, 2]
        assert all(runs[rank]["by_category"][category] > 0 for category in ("parameter", "gradient", "optimizer_state"))


@pytest.mark.parametrize("rank", RANKS)
def test_a_stock_fake_process_group_is_as_good_as_any(both: list[dict[int, dict[str, Any]]], rank: int) -> None:
    nccl, fake = (runs[rank] for runs in both)
    for key in ("parameter", "gradient", "optimizer_state"):
        assert fake["by_category"][key] == nccl["by_category"][key]

    def calls(run: dict[str, Any]) -> dict[tuple[str, str], int]:
        return {(row["group"], row["operation"]): row["num_calls"] for row in run["collectives"]}

    assert calls(fake) == calls(nccl)
    assert fake["peak_allocated_bytes"] == pytest.approx(nccl["peak_allocated_bytes"], rel=0.01)


def test_a_recording_of_megatron_lm_s_own_does_not_disturb(both: list[dict[int, dict[str, Any]]]) -> None:
    assert [note for note in both[1][0]["notes"] if note["code"] == "history_requests_ignored"]
