"""The cost of estimating a step on the virtual GPU: the last step with the log of launches and without.

    python bench/estimated_step.py [--steps 4] [--rounds 3]

A transformer of 10 B parameters: with `--kernels` and with `--no-kernels` in turns, in processes of their own. A figure
is the last step's wall time, the median of the rounds. The estimate itself is made when the step is over.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from processes import run_process
from step import JOB

from fakedist.rundir.tables import count_rows


def last_step(directory: Path, steps: int, option: str) -> float:
    """Milliseconds of the last step of a run, which is left in the directory."""
    number = ["--steps", str(steps)]
    options = ["--world-size", "1", "--rank", "0", "--device", "virtual", "--gpu-memory", "unlimited", *number, option]
    command = [sys.executable, "-m", "fakedist", "profile", *options, "--force", "-o", str(directory), str(JOB)]
    run_process([*command, "--steps", str(steps + 1)])
    found = json.loads((directory / "run.json").read_text())["summary"]["steps"]
    return float(found[-1]["wall_us"]) / 1e3


def main() -> None:
    """Print both, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[float]] = {"--no-kernels": [], "--kernels": []}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "run"
        for _ in range(args.rounds):
            for option, times in found.items():
                times.append(last_step(directory, args.steps, option))
        num_kernels = count_rows(directory, "kernels")
    plain, timed = (statistics.median(times) for times in found.values())
    print(f"recorded            {plain:9.1f} ms a step")
    print(f"recorded and timed  {timed:9.1f} ms a step {timed / plain:6.2f} of recorded, {num_kernels:,} kernels")


if __name__ == "__main__":
    main()
