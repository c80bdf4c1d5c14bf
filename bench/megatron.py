"""Megatron-core's three large jobs: seconds from start to report for two steps of one rank, and host memory.

python bench/megatron.py [--stages] [--layers local]

Needs megatron-core (and Transformer Engine for the figures of the table). ``--stages`` runs every pipeline stage of
DeepSeek-V3 instead, one after another.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile

from processes import ROOT, Ended, run_process

SCRIPT = ROOT / "examples" / "megatron_gpt.py"
WORLDS = {"mixtral-8x7b": 64, "qwen3-235b": 256, "deepseek-v3": 1024}
STAGES = 16


def profile(preset: str, rank: int, layers: str) -> Ended:
    """Profile one rank."""
    with tempfile.TemporaryDirectory() as directory:
        where = ["--device", "virtual", "--gpu", "h200", "--gpu-memory", "unlimited", "--output", f"{directory}/run"]
        where += ["--world-size", str(WORLDS[preset]), "--rank", str(rank)]
        job = [str(SCRIPT), "--preset", preset, "--transformer-impl", layers, "--exit-interval", "2"]
        return run_process([sys.executable, "-m", "fakedist", "profile", *where, *job], may_fail=True)


def main() -> None:
    """Print one line a run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", choices=("transformer_engine", "local", "auto"), default="auto")
    parser.add_argument("--stages", action="store_true", help="every pipeline stage of DeepSeek-V3")
    options = parser.parse_args()
    if importlib.util.find_spec("megatron") is None:
        print("megatron-core is not installed: pip install --no-deps megatron-core==0.16.1")
        return
    jobs = [("deepseek-v3", 64 * stage) for stage in range(STAGES)] if options.stages else [(p, 0) for p in WORLDS]
    total_s = 0.0
    for preset, rank in jobs:
        run = profile(preset, rank, options.layers)
        total_s += run.wall_s
        job = f"{preset}, rank {rank} of {WORLDS[preset]:,}"
        print(f"{job:<32} {run.wall_s:6.1f} s {run.host_gb:6.2f} GB of host memory, exit {run.code}", flush=True)
    print(f"{'all of them':<32} {total_s:6.1f} s")


if __name__ == "__main__":
    main()
