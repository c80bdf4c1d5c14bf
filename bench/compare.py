"""The cost of `fakedist compare` for two runs of a million allocator events each.

    python bench/compare.py [--events 1000000] [--rounds 3]

The runs are those of bench/report.py, the second one with a tenth more events.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from processes import ROOT, run_process
from report import records

sys.path.insert(0, str(ROOT))

from fakedist.options import Job
from fakedist.results.building import build_tables
from fakedist.rundir.directory import JournalWriter, new_manifest


def make_run(run: Path, num_events: int) -> None:
    """A finished run directory."""
    run.mkdir()
    new_manifest(run, Job(world_size=1_024, rank=0, target="train.py"))
    journal = JournalWriter(run / "journal.bin")
    for record in records(num_events):
        journal.append(record)
    journal.close()
    build_tables(run)


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
            rounds = [run_process([*compare, *options]) for _ in range(args.rounds)]
            if name == "terminal":
                first = rounds[0].output.partition("\n")[0]
                print(f"{args.events:,} and {args.events * 11 // 10:,} events: {first}")
            wall_s = statistics.median(each.wall_s for each in rounds)
            print(f"{name:<14} {wall_s:6.2f} s {max(each.host_gb for each in rounds):6.2f} GB of host memory")


if __name__ == "__main__":
    main()
