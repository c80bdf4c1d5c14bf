"""The cost of a step: bare on the virtual GPU, recorded, and under torch's own tools for the same question.

    python bench/step.py [--steps 6] [--rounds 3]

A transformer of 10 B parameters: all in turns, in processes of their own; a figure is the least of a round's steps
after the first two (they pay for lazy state), and the median of the rounds. FakeTensorMode, alone and under torch's
MemTracker, runs the same script with fewer steps. Then the recorded step by the number of layers, and one of Llama 3
405B.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from processes import ROOT, run_process

JOB = ROOT / "bench" / "jobs" / "transformer_10b.py"
LARGE_JOB = ROOT / "bench" / "jobs" / "llama_405b.py"
LAYERS = (12, 48, 126)
BARE = """
import runpy, sys
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.virtual import virtual_gpu
from fakedist.units import UNLIMITED_BYTES
sys.argv = sys.argv[1:]
with virtual_gpu(find_gpu("h100-80g"), 1, UNLIMITED_BYTES):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Measured:
    """One run: its steady step in milliseconds, on the clock and of CPU time, and the most host memory any of its
    processes held, in GB.
    """

    step_ms: float
    cpu_ms: float
    host_gb: float


def measure(command: list[str]) -> Measured:
    """Run `command` and read the steps' times from what it prints; the first step does not count, nor the second."""
    ended = run_process(command)
    steps = [line.split() for line in ended.output.splitlines() if line.startswith("step_ms")]
    step_ms, cpu_ms = (min(float(words[at]) for words in steps[2:] or steps[1:]) for at in (1, 3))
    return Measured(step_ms, cpu_ms, ended.host_gb)


def bare(steps: int) -> list[str]:
    """The command of `steps` steps on the virtual GPU alone."""
    return [sys.executable, "-c", BARE, str(JOB), "--steps", str(steps)]


def fake(steps: int, *options: str) -> list[str]:
    """The command of `steps` steps of FakeTensorMode."""
    return [sys.executable, str(JOB), "--fake", *options, "--steps", str(steps)]


def recorded(directory: Path, steps: int, script: list[str]) -> list[str]:
    """The command that records `steps` steps of a script."""
    # The run is stopped inside its last step, before the job prints it: one step more.
    number = ["--steps", str(steps + 1)]
    options = ["--world-size", "1", "--rank", "0", "--device", "virtual", "--gpu-memory", "unlimited", *number]
    output = ["--force", "--output", str(directory / "run")]
    return [sys.executable, "-m", "fakedist", "profile", *options, *output, *script, *number]


def compare_with_peers(directory: Path, steps: int, rounds: int) -> None:
    """Print the step of 10 B parameters every way, and how much longer torch's own tools take."""
    commands = {
        "bare virtual GPU": bare(steps + 1),
        "everything recorded": recorded(directory, steps, [str(JOB)]),
        "FakeTensorMode": fake(3),
        "MemTracker": fake(2, "--tracker"),
    }
    found = [{name: measure(command) for name, command in commands.items()} for _ in range(rounds)]
    middle = {name: statistics.median(each[name].step_ms for each in found) for name in commands}
    for name, step_ms in middle.items():
        host_gb = max(each[name].host_gb for each in found)
        ratio = step_ms / middle["everything recorded"]
        print(f"{name:<22} {step_ms:9.1f} ms a step {host_gb:6.2f} GB of host memory {ratio:7.2f} of recorded")
    print(flush=True)


def grow(directory: Path, steps: int) -> None:
    """Print the recorded step by the number of layers."""
    for layers in LAYERS:
        found = measure(recorded(directory, steps, [str(JOB), "--layers", str(layers)]))
        each = found.step_ms / layers
        print(f"{layers:4d} layers recorded {found.step_ms:12.1f} ms a step {each:6.2f} ms a layer", flush=True)


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        compare_with_peers(directory, args.steps, args.rounds)
        grow(directory, args.steps)
        large = measure(recorded(directory, 4, [str(LARGE_JOB)]))
        print(f"\nLlama 3 405B recorded {large.step_ms:12.1f} ms a step {large.host_gb:6.2f} GB of host memory")


if __name__ == "__main__":
    main()
