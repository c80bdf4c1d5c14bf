"""What recording costs: a training step of a 10 B-parameter transformer on the bare virtual GPU and under fakedist.

    python bench/step.py [--steps 6] [--rounds 3]

Both run in turns, in processes of their own; a figure is the least of a round's steps after the first two (lazy state
is paid there), and the median of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
JOB = ROOT / "bench" / "jobs" / "transformer_10b.py"
BARE = """
import runpy, sys
from fakedist.gpu.spec import find_gpu
from fakedist.gpu.virtual import virtual_gpu
from fakedist.units import UNLIMITED_BYTES
sys.argv = sys.argv[1:]
with virtual_gpu(find_gpu("h100-80g"), 1, UNLIMITED_BYTES):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Measured:
    """One run: its steady step in milliseconds and the most host memory any of its processes held, in GB."""

    step_ms: float
    host_gb: float


def measure(command: list[str]) -> Measured:
    """Run `command` and read the steps' times from what it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    # wait4 counts the processes that this one waited for too, and keeps the largest.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit {process.returncode}: {' '.join(command)}")
    steps = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("step_ms")]
    return Measured(min(steps[2:]), usage.ru_maxrss * 1024 / 1e9)


def main() -> None:
    """Print a table of both ways and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    # The recorded run is stopped inside its last step, before the job prints it: one step more.
    steps = ["--steps", str(args.steps + 1)]
    script = [str(JOB), *steps]
    with tempfile.TemporaryDirectory() as directory:
        options = ["--world-size", "1", "--rank", "0", "--device", "virtual", "--gpu-memory", "unlimited", *steps]
        output = ["--force", "--output", str(Path(directory) / "run")]
        commands = {
            "bare virtual GPU": [sys.executable, "-c", BARE, *script],
            "everything recorded": [sys.executable, "-m", "fakedist", "profile", *options, *output, *script],
        }
        rounds = [{name: measure(command) for name, command in commands.items()} for _ in range(args.rounds)]
    middle = {name: statistics.median(each[name].step_ms for each in rounds) for name in commands}
    for name, step_ms in middle.items():
        print(
            f"{name:<22} {step_ms:8.1f} ms a step {max(each[name].host_gb for each in rounds):6.2f} GB of host memory"
        )
    bare, recorded = middle.values()
    print(f"{'ratio':<22} {recorded / bare:8.2f}")


if __name__ == "__main__":
    main()
