"""The cost of `fakedist compare` for two runs of a million allocator events each.

    python bench/compare.py [--events 1000000] [--rounds 3]

The runs are those of bench/report.py, the second one with a tenth more events.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from report import records  # noqa: E402

from fakedist.options import Job  # noqa: E402
from fakedist.results.building import build_tables  # noqa: E402
from fakedist.rundir.journal import JournalWriter  # noqa: E402
from fakedist.rundir.manifest import new_manifest  # noqa: E402


def make_run(run: Path, num_events: int) -> None:
    """A finished run directory."""
    run.mkdir()
    new_manifest(run, Job(world_size=1_024, rank=0, target="train.py"))
    journal = JournalWriter(run / "journal.bin")
    for record in records(num_events):
        journal.append(record)
    journal.close()
    build_tables(run)


def measure(command: list[str]) -> tuple[float, float, str]:
    """Seconds, GB of host memory and the first line of a command."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit {process.returncode}: {' '.join(command)}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024 / 1e9, text.partition("\n")[0]


def main() -> None:
    """Print the figures of every format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        runs = [Path(directory) / name for name in "ab"]
        make_run(runs[0], args.events)
        make_run(runs[1], args.events * 11 // 10)
        compare = [sys.executable, "-m", "fakedist", "compare", *map(str, runs)]
        for name, options in (
            ("terminal", []),
            ("--json", ["--json"]),
            ("--format html", ["--format", "html", "-o", f"{directory}/page.html"]),
        ):
            rounds = [measure([*compare, *options]) for _ in range(args.rounds)]
            if name == "terminal":
                print(f"{args.events:,} and {args.events * 11 // 10:,} events: {rounds[0][2]}")
            seconds = statistics.median(each[0] for each in rounds)
            print(f"{name:<14} {seconds:6.2f} s {max(each[1] for each in rounds):6.2f} GB of host memory")


if __name__ == "__main__":
    main()
