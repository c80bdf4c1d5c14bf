"""Megatron-LM's golden memory, to the byte, and what fakedist says of the same jobs.

    python -m tests.accuracy.golden [--job NAME ...] [--loads] [--write]

Megatron-LM's functional tests run on real GPUs and keep what they saw: ``mem-max-allocated-bytes`` and
``mem-allocated-bytes`` of the allocator after each iteration, on the last rank, which writes the log
(tests/functional_tests/test_cases/<case>/golden_values_dev_dgx_h100.json in NVIDIA/Megatron-LM). Here the last rank of
the same job runs with examples/megatron_gpt.py, which takes Megatron-LM's own flags: those of the case's
model_config.yaml but for its files and its logging. Needs megatron-core 0.16.1 and Transformer Engine.

``--loads`` draws loads of the last rank's experts in the case that has some, as ``fakedist play`` does for the hottest
rank: which of them have the golden peak?
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from fakedist.launcher.playing import play
from fakedist.results.router_draws import open_playable
from fakedist.rundir.manifest import load_manifest
from fakedist.rundir.plain import to_plain
from tests.accuracy.results import write_result, write_tables

ROOT = Path(__file__).parents[2]
WORLD_SIZE, GPU = 8, "h100-80g"
STEPS = 3
TIMEOUT_S = 600
_GPT = """
--num-layers 12 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 4 --global-batch-size 32
--seq-length 1024 --max-position-embeddings 1024 --lr 0.00015 --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0
--transformer-impl transformer_engine --deterministic-mode --no-gradient-accumulation-fusion
--attention-softmax-in-fp32 --bf16 --attention-backend unfused --log-num-zeros-in-grad
--vocab-size 50257 --make-vocab-size-divisible-by 128
"""
EXPERTS = """
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4
--expert-model-parallel-size 4 --context-parallel-size 1 --expert-tensor-parallel-size 1 --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --attention-backend unfused --sequence-parallel --disable-bias-linear
--micro-batch-size 4 --global-batch-size 32 --no-check-for-nan-in-loss-and-grad --no-rope-fusion
--cross-entropy-loss-fusion --cross-entropy-fusion-impl native --transformer-impl transformer_engine --seq-length
4096 --num-layers 16 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 32 --kv-channels 128
--max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000 --vocab-size 50257
--make-vocab-size-divisible-by 3232 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
--untie-embeddings-and-output-weights --multi-latent-attention --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
--attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 --qk-layernorm --lr 0.00015 --min-lr
1.0e-5 --adam-beta1 0.9 --adam-beta2 0.95 --num-experts 32 --moe-layer-freq ([0]*1+[1]*15) --moe-ffn-hidden-size
1024 --moe-shared-expert-intermediate-size 1024 --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 4
--moe-token-dispatcher-type alltoall --moe-router-pre-softmax --moe-grouped-gemm --moe-aux-loss-coeff 1e-4
--moe-router-group-topk 2 --moe-router-num-groups 4 --moe-router-topk-scaling-factor 2.0 --moe-router-score-function
sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32
--moe-permute-fusion --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim
128 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --init-method-std 0.02 --log-num-zeros-in-grad
--bf16
"""
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
_DETERMINISTIC = _ENVIRONMENT | {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


#: What :4096:8 makes of it, 8 x 4096 KiB; torch 2.15 takes it for each call, those of the tests keep one for a thread.
WORKSPACE_BYTES = 32 << 20


@dataclass(frozen=True)
class Golden:
    """A case of Megatron-LM's functional tests.

    Attributes:
        name: For ``--job``.
        case: Its directory in test_cases.
        commit: Of Megatron-LM, where the golden values were read.
        peak_bytes: mem-max-allocated-bytes after the first iteration, and after the second and all that follow, which
            have the optimizer's state.
        num_workspaces: cuBLAS workspaces that torch had made by then: the backward's thread makes one of its own, which
            counts if the peak comes after a backward.
        flags: Megatron-LM's, as the case has them.
        environment: As the case has it.
    """

    name: str
    case: str
    commit: str
    peak_bytes: tuple[int, int]
    num_workspaces: tuple[int, int]
    flags: str
    environment: dict[str, str]


_CASES = "gpt/gpt3_mcore_te"
GOLDEN = (
    Golden(
        "tp1-pp1", f"{_CASES}_tp1_pp1_dist_optimizer_no_mmap_bin_files", "073db75900a4256ce331fb81393cb5b8468840ba",
        (4_605_813_760, 4_702_430_208), (1, 2), f"{_GPT} --use-distributed-optimizer", _DETERMINISTIC,
    ),
    Golden(
        "tp1-pp4-vp3", f"{_CASES}_tp1_pp4_vp1", "08165aba2f247b3e01b2e10f7d8f63c3b20f71a7",
        (3_866_814_976, 4_148_526_592), (2, 2),
        f"{_GPT} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
        _DETERMINISTIC | _EXPANDABLE,
    ),
    Golden(
        "tp4-pp1", f"{_CASES}_tp4_pp1_dist_optimizer_overlap_grad_reduce_param_gather",
        "08165aba2f247b3e01b2e10f7d8f63c3b20f71a7", (1_478_339_584, 1_543_416_320), (2, 2),
        f"{_GPT} --tensor-model-parallel-size 4 {_OVERLAP}", _DETERMINISTIC,
    ),
    Golden(
        "moe-tp2-pp2-ep4", "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed",
        "fb946948f37a43e4ef2da43760e40f892fa3a91e", (54_204_293_120, 57_317_089_280), (2, 2), EXPERTS,
        _ENVIRONMENT | _EXPANDABLE,
    ),
)  # fmt: skip


#: Loads whose draws are played, each so often, and the one that is recorded.
LOADS, DRAWS, RECORDED = ("lognormal:0.05", "lognormal:0.2", "lognormal:0.5", "lognormal:1"), 40, "lognormal:0.3"


def run_golden(golden: Golden) -> list[dict[str, Any]]:
    """Run a case's last rank; its rows for docs/accuracy/golden.json.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    return _profiled(golden, (), lambda run: rows_of(golden, to_plain(load_manifest(run).summary)))


def play_golden(golden: Golden) -> list[dict[str, Any]]:
    """Draw loads of a case's last rank; its rows for docs/accuracy/golden-loads.json.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    return _profiled(golden, ("--router-load", RECORDED), lambda run: [_load_row(golden, run, load) for load in LOADS])


def _load_row(golden: Golden, run: Path, load: str) -> dict[str, Any]:
    playable = open_playable(run)
    program = run.parent / "program.npz"
    playable.write(program)
    draws = list(playable.draws(load, range(DRAWS), rank=WORLD_SIZE - 1))
    left = golden.num_workspaces[1] * WORKSPACE_BYTES - golden.peak_bytes[1]
    played = play(program, (draw.counts for draw in draws), playable.alloc_conf)
    rest = [row["peak_allocated_bytes"] + left for row in played]
    shares = [draw.share for draw in draws]
    return {
        "name": golden.name, "load": load, "draws": DRAWS, "shares": [min(shares), max(shares)],
        "left_bytes": [min(rest), int(median(rest)), max(rest)], "below": sum(one <= 0 for one in rest),
    }  # fmt: skip


def _profiled(
    golden: Golden, options: Sequence[str], use: Callable[[Path], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="golden-") as text:
        run = Path(text) / "run"
        profile = ["profile", "--world-size", str(WORLD_SIZE), "--rank", str(WORLD_SIZE - 1), "--device", "virtual"]
        profile += ["--gpu", GPU, "--steps", str(STEPS), "--no-kernels", *options, "-o", str(run)]
        script = [str(ROOT / "examples" / "megatron_gpt.py"), *golden.flags.split()]
        environment = {**os.environ, **golden.environment, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "fakedist", *profile, *script],
            cwd=text, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            done.check_returncode()
        return use(run)


def rows_of(golden: Golden, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for the first iteration and one for those after it, given the run's summary."""
    peaks: dict[int, int] = {}
    for phase in summary["by_phase"]:
        peaks[phase["step"]] = max(peaks.get(phase["step"], 0), phase["peak_allocated_bytes"])
    ours = max(peaks[0], peaks[1]), max(peaks.values())
    figures = zip(("1", "2 and later"), golden.peak_bytes, ours, golden.num_workspaces, strict=True)
    return [
        {
            "name": golden.name, "case": golden.case, "commit": golden.commit, "iteration": iteration,
            "golden_bytes": theirs, "bytes": found, "workspaces_bytes": number * WORKSPACE_BYTES,
        }
        for iteration, theirs, found, number in figures
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", action="append", choices=[golden.name for golden in GOLDEN])
    parser.add_argument("--loads", action="store_true", help="draw loads of experts instead")
    parser.add_argument("--write", action="store_true", help="the data and the table into docs/accuracy")
    chosen = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    if chosen.loads:
        rows = [row for golden in GOLDEN if "--num-experts" in golden.flags for row in play_golden(golden)]
        print(*rows, sep="\n")
    for golden in () if chosen.loads else GOLDEN:
        if not chosen.job or golden.name in chosen.job:
            for row in run_golden(golden):
                left = row["bytes"] + row["workspaces_bytes"] - row["golden_bytes"]
                print(f"{golden.name:<12} {row['iteration']:<11} golden {row['golden_bytes']:,}, left {left:+,}")
                rows.append(row)
    if chosen.write:
        packages = {name: version(name) for name in ("megatron-core", "transformer-engine")}
        name = "golden-loads" if chosen.loads else "golden"
        write_result(name, rows, instead_of=lambda each: (each["name"], each.get("load")), **packages)
        write_tables()
    return 0


if __name__ == "__main__":
    sys.exit(main())
