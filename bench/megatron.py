"""Megatron-core's three large jobs: seconds from start to report for two steps of one rank, and host memory.

python bench/megatron.py [--stages] [--layers local]

Needs megatron-core (and Transformer Engine for the figures of the table). ``--stages`` runs every pipeline stage of
DeepSeek-V3 instead, one after another.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "megatron_gpt.py"
WORLDS = {"mixtral-8x7b": 64, "qwen3-235b": 256, "deepseek-v3": 1024}
STAGES = 16


def profile(preset: str, rank: int, layers: str) -> tuple[float, float, int]:
    """Seconds, GB of host memory of the largest process, and exit code of one profile."""
    with tempfile.TemporaryDirectory() as directory:
        where = ["--device", "virtual", "--gpu", "h200", "--gpu-memory", "unlimited", "--output", f"{directory}/run"]
        where += ["--world-size", str(WORLDS[preset]), "--rank", str(rank)]
        job = [str(SCRIPT), "--preset", preset, "--transformer-impl", layers, "--exit-interval", "2"]
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "fakedist", "profile", *where, *job],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return time.perf_counter() - started, usage.ru_maxrss * 1024 / 1e9, process.returncode


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
        elapsed_s, host_gb, code = profile(preset, rank, options.layers)
        total_s += elapsed_s
        job = f"{preset}, rank {rank} of {WORLDS[preset]:,}"
        print(f"{job:<32} {elapsed_s:6.1f} s {host_gb:6.2f} GB of host memory, exit {code}", flush=True)
    print(f"{'all of them':<32} {total_s:6.1f} s")


if __name__ == "__main__":
    main()
