"""Compares what fakedist costs with what it cost before (bench/pace.csv), and fails where it got slower.

    python bench/pace.py [--rounds 5] [--keep]

The script of bench/step.py: bare on the virtual GPU, recorded, and under FakeTensorMode; and `make demo` with times and
without, all in turns, in processes of their own. The times are of the CPU, the least of a run's steps: on cores that
others use too, the clock may show six times as much. A ratio is the median of the rounds' ratios. It fails if it is
more than 20 % above the median of the last ten lines of the same Python and torch, and is so again after everything
was measured once more. ``--keep`` appends a line, also where a ratio fails. Where a gain raises a ratio (a faster bare
step, recorded/bare), or more time is the price of something wanted, delete the lines before it.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from processes import ROOT, run_process
from step import JOB, bare, fake, measure, recorded
from whole_runs import LARGE, LLAMA

KEPT = ROOT / "bench" / "pace.csv"
#: Column of a ratio -> the columns of its two times.
RATIOS = {
    "bare/fake": ("bare_ms", "fake_ms"),
    "recorded/fake": ("recorded_ms", "fake_ms"),
    "recorded/bare": ("recorded_ms", "bare_ms"),
    "demo/fake": ("demo_ms", "fake_ms"),
    "demo/no_kernels": ("demo_ms", "no_kernels_ms"),
}
TIMES = ("bare_ms", "recorded_ms", "fake_ms", "demo_ms", "no_kernels_ms")
COLUMNS = ("date", "commit", "machine", "python", "torch", *RATIOS, *TIMES)
#: What a ratio is compared with: the median of so many lines; and by how much it may be above.
NUM_LINES, MOST_ABOVE = 10, 0.2

Line = Mapping[str, str]
Figures = dict[str, float]


def measure_round(directory: Path) -> Figures:
    """Measure every time once, in milliseconds of CPU, and print them."""
    demo = [sys.executable, "-m", "fakedist", "profile", *LARGE, "--device", "virtual", "--force"]
    demo += ["--output", str(directory / "demo")]
    llama = [*LLAMA, "--model", "70b"]
    # The same fake CPU tensors on every machine, whether it has a GPU or not.
    no_gpu = ["env", "CUDA_VISIBLE_DEVICES="]
    times = {
        "bare_ms": measure(bare(12)).cpu_ms,
        "recorded_ms": measure(recorded(directory, 12, [str(JOB)])).cpu_ms,
        "fake_ms": measure([*no_gpu, *fake(5)]).cpu_ms,
        "demo_ms": run_process([*demo, *llama]).cpu_s * 1e3,
        "no_kernels_ms": run_process([*demo, "--no-kernels", *llama]).cpu_s * 1e3,
    }
    print(", ".join(f"{name} {value:.1f}" for name, value in times.items()), flush=True)
    return times


def medians(rounds: Sequence[Figures]) -> Figures:
    """The median of each ratio and each time."""
    ratios = {name: [each[a] / each[b] for each in rounds] for name, (a, b) in RATIOS.items()}
    times = {name: [each[name] for each in rounds] for name in TIMES}
    return {name: statistics.median(values) for name, values in (ratios | times).items()}


def lines_of(path: Path, python: str, torch: str) -> list[Line]:
    """The last lines of a Python and a torch."""
    with path.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if (line["python"], line["torch"]) == (python, torch)]
    return lines[-NUM_LINES:]


def usual_ratios(lines: Sequence[Line]) -> Figures:
    """The median of each ratio; empty if there are no lines."""
    return {name: statistics.median(float(line[name]) for line in lines) for name in RATIOS if lines}


def slower(figures: Figures, usual: Figures) -> set[str]:
    """The ratios that are too far above the usual ones."""
    return {name for name, ratio in usual.items() if figures[name] > ratio * (1 + MOST_ABOVE)}


def judge(measure_all: Callable[[], Figures], usual: Figures) -> tuple[Figures, set[str]]:
    """Measure, and once more if a ratio is too high: the last figures, and the ratios that were too high each time."""
    figures = measure_all()
    too_high = slower(figures, usual)
    if too_high:
        print(f"measuring once more, because of {', '.join(sorted(too_high))}", flush=True)
        figures = measure_all()
        too_high &= slower(figures, usual)
    return figures, too_high


def keep(path: Path, figures: Figures, facts: Line) -> None:
    """Append a line."""
    with path.open("a", newline="") as file:
        rounded = {name: f"{float(f'{value:.4g}'):g}" for name, value in figures.items()}
        csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow({**facts, **rounded})


def commit_of(root: Path) -> str:
    """The commit that is checked out, with a `+` if tracked files other than pace.csv differ from it."""
    git = ["git", "-C", str(root)]
    commit = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True).stdout
    differs = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!bench/pace.csv"]).returncode
    return commit.strip() + "+" * bool(differs)


def machine() -> str:
    """The processor and the number of cores."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({len(os.sched_getaffinity(0))} cores)"


def table(figures: Figures, usual: Figures, too_high: set[str]) -> list[str]:
    """Lines: each ratio with the usual one, then each time."""
    lines = []
    for name in RATIOS:
        before = "" if name not in usual else f"   usually {usual[name]:7.3f}   {figures[name] / usual[name] - 1:+6.1%}"
        lines.append(f"{name:<16} {figures[name]:9.3f}{before}{'   SLOWER' if name in too_high else ''}")
    return lines + [f"{name:<16} {figures[name]:9.1f}" for name in TIMES]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a ratio is too high."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="append the figures to bench/pace.csv")
    args = parser.parse_args(arguments)
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit_of(ROOT),
        "machine": machine(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": version("torch").partition("+")[0],
    }
    lines = lines_of(KEPT, facts["python"], facts["torch"])
    with tempfile.TemporaryDirectory() as scratch:

        def measure_all() -> Figures:
            return medians([measure_round(Path(scratch)) for _ in range(args.rounds)])

        figures, too_high = judge(measure_all, usual_ratios(lines))
    same = f"Python {facts['python']} and torch {facts['torch']}"
    print(f"medians of {args.rounds} rounds, load {os.getloadavg()[0]:.1f}; {len(lines)} lines of {same}")
    print("\n".join(table(figures, usual_ratios(lines), too_high)))
    if not lines:
        print(f"compared with nothing: bench/pace.csv has no line of {same} (make bench-pace ARGS=--keep)")
    if args.keep:
        keep(KEPT, figures, facts)
    return int(bool(too_high))


if __name__ == "__main__":
    sys.exit(main())
