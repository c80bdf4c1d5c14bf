"""The cost of `fakedist check` for four jobs of 70 billion parameters, on all cores.

    python bench/check.py [--rounds 1]

The jobs are examples/llama_fsdp2.py on 1,024 ranks in four layouts; every round makes their baselines and compares
a second run with them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from processes import ROOT, Ended, run_process

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


def main() -> None:
    """Print the seconds of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    found: dict[str, list[Ended]] = {"check --update": [], "check": []}
    command = [sys.executable, "-m", "fakedist", "check"]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "fakedist.toml").write_text(configuration())
        for _ in range(args.rounds):
            found["check --update"].append(run_process([*command, "--update"], cwd=folder))
            found["check"].append(run_process(command, cwd=folder))
    print(f"{len(LAYOUTS)} jobs on {len(os.sched_getaffinity(0))} cores")
    for name, rounds in found.items():
        wall_s = statistics.median(each.wall_s for each in rounds)
        cpu_s = statistics.median(each.cpu_s for each in rounds)
        print(f"{name:<16} {wall_s:6.1f} s, {cpu_s:6.1f} s of CPU")


if __name__ == "__main__":
    main()
