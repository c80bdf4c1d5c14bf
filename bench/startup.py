"""How long the command line takes to answer, compared with a bare interpreter.

    python bench/startup.py [--rounds 15]

Figures are the median of processes started in turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from processes import run_process

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "fakedist --help": [sys.executable, "-m", "fakedist", "--help"],
    "fakedist profile --help": [sys.executable, "-m", "fakedist", "profile", "--help"],
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
}


def main() -> None:
    """Print one line a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    times = [{name: run_process(command).wall_s for name, command in COMMANDS.items()} for _ in range(rounds)]
    for name in COMMANDS:
        print(f"{name:<26} {statistics.median(each[name] for each in times) * 1e3:8.0f} ms")


if __name__ == "__main__":
    main()
