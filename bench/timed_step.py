"""The cost of a timed step on a GPU: a step of the bare script, and the step that ``fakedist profile`` times.

    python bench/timed_step.py [--layers 4] [--rounds 3]

The transformer of bench/step.py with fewer layers, both sides in turns; a figure is the least of a round's steps. The
bare script's step lasts from one synchronisation to the next, the timed step from its beginning to the end of all that
it launched. Without a GPU, nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile

from processes import ROOT, run_process
from step import JOB

sys.path.insert(0, str(ROOT))

from fakedist.launcher.machine import count_real_gpus


def bare_ms(script: list[str]) -> float:
    """A steady step of the bare script."""
    printed = run_process([sys.executable, *script, "--steps", "8", "--synchronize"]).output
    steps = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("step_ms")]
    return min(steps[3:])


def timed_ms(script: list[str], *options: str) -> float:
    """The timed step."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["profile", "--world-size", "1", "--rank", "0", "--device", "cuda", "--json", *options]
        run_directory = ["-o", f"{directory}/run"]
        profile = [sys.executable, "-m", "fakedist", *command, *run_directory, *script, "--steps", "8"]
        printed = run_process(profile).output
    kernels = json.loads(printed)["kernels"]
    if kernels is None:
        raise SystemExit("the profiled run has no kernel times")
    return float(kernels["step_us"]) / 1e3


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nsys", action="store_true", help="the step that nsys times, too")
    arguments = parser.parse_args()
    if count_real_gpus() == 0:
        print("no GPU here: what a timed step costs was not measured")
        return
    script = [str(JOB), "--layers", str(arguments.layers)]
    ways = {"bare": lambda: bare_ms(script), "timed with CUPTI": lambda: timed_ms(script)}
    if arguments.nsys:
        ways["timed with nsys"] = lambda: timed_ms(script, "--nsys")
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, measure in ways.items():
            found[name].append(measure())
    bare = statistics.median(found["bare"])
    for name, steps in found.items():
        step = statistics.median(steps)
        print(f"{name:<18} {step:8.1f} ms a step   {step / bare - 1:+.1%}")


if __name__ == "__main__":
    main()
