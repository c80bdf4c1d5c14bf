"""The cost of `fakedist check` for four jobs of 70 billion parameters, on all cores.

    python bench/check.py [--rounds 1]

The jobs are examples/llama_fsdp2.py on 1,024 ranks in four layouts; every round makes their baselines and compares
a second run with them.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYOUTS = {
    "tp8": "--tp 8 --checkpoint full",
    "tp8-loss-parallel": "--tp 8 --checkpoint full --loss-parallel",
    "tp8-selective": "--tp 8 --checkpoint selective",
    "tp4-hybrid": "--tp 4 --checkpoint full --dp-replicate 2",
}


def configuration() -> str:
    """A fakedist.toml with the four jobs."""
    lines = ["[check]", 'max_increase = "0%"']
    for name, layout in LAYOUTS.items():
        lines += ["[[check.jobs]]", f'name = "{name}"', f'script = "{ROOT}/examples/llama_fsdp2.py"']
        lines += [f'arguments = "--model 70b {layout}"', "world_size = 1024"]
    return "\n".join(lines) + "\n"


def measure(folder: Path, *options: str) -> tuple[float, float]:
    """Seconds of one `fakedist check`, and CPU seconds of all that it ran."""
    start, before = time.perf_counter(), cpu_seconds()
    command = [sys.executable, "-m", "fakedist", "check", *options]
    finished = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    if finished.returncode:
        raise SystemExit(f"exit {finished.returncode}: {' '.join(command)}\n{finished.stderr.decode()}")
    return time.perf_counter() - start, cpu_seconds() - before


def cpu_seconds() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the seconds of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"check --update": [], "check": []}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "fakedist.toml").write_text(configuration())
        for _ in range(args.rounds):
            found["check --update"].append(measure(folder, "--update"))
            found["check"].append(measure(folder))
    print(f"{len(LAYOUTS)} jobs on {len(os.sched_getaffinity(0))} cores")
    for name, rounds in found.items():
        wall, cpu = (statistics.median(each) for each in zip(*rounds, strict=True))
        print(f"{name:<16} {wall:6.1f} s, {cpu:6.1f} s of CPU")


if __name__ == "__main__":
    main()
