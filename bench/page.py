"""The cost of the page: making it, its size, opening it; against torch's own page of the same snapshot.

    python bench/page.py [--events 1000000 5000000] [--rounds 5]

The runs are synthetic: 80 layers of 8 modules, 10 steps, 1,000 different stacks. "regular": blocks live equally long
and alternate in size, which packs well; "random": sizes and lifetimes are random, which packs as badly as anything can.
Opening lasts from the address to a page that answers, in a headless Chromium without a GPU; it needs
`pip install 'fakedist[browser]'` and a Chromium. torch's page (`_memory_viz.py trace_plot`) loads its program from the
network: without one it shows nothing, so its opening is not measured.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from processes import Ended, run_process
from report import ALLOC, COMPLETED, NUM_STACKS, REQUESTED, Event, address, make_run, records, regular

LONGEST = 1_500  # allocations; addresses come again after 2,000


def irregular(num_blocks: int) -> Iterator[Event]:
    """Blocks of random sizes that live for random numbers of allocations."""
    chance = random.Random(0)
    ends: list[tuple[int, int, int]] = []
    for block in range(num_blocks):
        while ends and ends[0][0] <= block:
            _, old, size = heapq.heappop(ends)
            for what in (REQUESTED, COMPLETED):
                yield what, address(old), size, block, -1
        size = 512 * int(2 ** chance.uniform(1, 17))
        yield ALLOC, address(block), size, block, chance.randrange(NUM_STACKS)
        heapq.heappush(ends, (block + 1 + int(LONGEST * chance.random() ** 3), block, size))


def opened(page: Path, rounds: int) -> float | None:
    """Median milliseconds until a page answers; None without a browser."""
    chromium = os.environ.get("FAKEDIST_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or find_spec("playwright") is None:
        return None
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as playwright:
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as profile:
                context = playwright.chromium.launch_persistent_context(
                    profile, executable_path=chromium, headless=True, args=["--no-sandbox", "--disable-gpu"]
                )
                tab = context.new_page()
                start = time.perf_counter()
                tab.goto(page.as_uri())
                tab.wait_for_selector("html[data-ready]", timeout=60_000)
                tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
                found.append((time.perf_counter() - start) * 1_000)
                context.close()
    return statistics.median(found)


def say(name: str, made: Ended, page: Path, opening: str) -> None:
    """One line of the table."""
    size = page.stat().st_size / 1e6
    took = f"{made.wall_s:7.2f} s {made.cpu_s:7.2f} s CPU {made.host_gb:6.2f} GB"
    print(f"{name:<46}{took} {size:8.2f} MB   {opening}", flush=True)


def bench(history: Callable[[int], Iterator[Event]], num_events: int, rounds: int) -> None:
    """All figures of one run."""
    with tempfile.TemporaryDirectory() as directory:
        run, page = Path(directory) / "run", Path(directory) / "page.html"
        run.mkdir()
        make_run(run, records(num_events, history))
        name = f"{'regular' if history is regular else 'random'}, {num_events:,} events"
        fakedist = [sys.executable, "-m", "fakedist"]
        say(f"{name}: tables and terminal", run_process([*fakedist, "report", str(run)]), run / "journal.bin", "")
        made = run_process([*fakedist, "report", str(run), "--format", "html", "-o", str(page)])
        opening = opened(page, rounds)
        say(f"{name}: page", made, page, "not opened: no browser" if opening is None else f"{opening:.0f} ms to open")
        snapshot = run / "memory_snapshot.pickle"
        made = run_process([*fakedist, "report", str(snapshot), "--format", "html", "-o", str(page)])
        opening = opened(page, rounds)
        say(f"{name}: page of the snapshot", made, page, "" if opening is None else f"{opening:.0f} ms to open")
        torch = find_spec("torch")
        if torch is None or not torch.submodule_search_locations:
            return
        viz = Path(torch.submodule_search_locations[0]) / "cuda" / "_memory_viz.py"
        made = run_process([sys.executable, str(viz), "trace_plot", str(snapshot), "-o", str(page)])
        text = page.read_text()
        say(f"{name}: torch's trace_plot", made, page, "needs the network" if "https://cdn." in text else "")


def main() -> None:
    """Print a line for each page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, nargs="+", default=[1_000_000, 5_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for num_events in args.events:
        for history in (regular, irregular):
            bench(history, num_events, args.rounds)


if __name__ == "__main__":
    main()
