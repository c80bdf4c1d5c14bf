"""The cost of pricing a step again: a million launches on four streams, with events between them.

    python bench/priced_step.py [--launches 1000000] [--work 5000] [--gpu h100-80g] [--rounds 3]

Made-up launches of the mix of a dense transformer: for each product, five kernels that move memory, and an event that
another stream waits for. It prints the seconds of the tables, of the prices, and of placing the launches; least of the
rounds. Budget: 3 s together.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from fakedist.analysis.launches import launch_table, work_table  # noqa: E402
from fakedist.cost_model.kernels.kernel_times import KernelTimes  # noqa: E402
from fakedist.cost_model.step import price_step  # noqa: E402
from fakedist.gpu.models.catalogue import find_gpu  # noqa: E402
from fakedist.rundir.encoding import Columns  # noqa: E402
from fakedist.rundir.launch_records import LAUNCH_KINDS, LaunchesRecord, WorkRow  # noqa: E402

KERNEL, PRODUCT, RECORDS, WAITS = map(LAUNCH_KINDS.index, ("kernel", "product", "stream_records", "stream_waits"))
STREAMS = (0, 7, 13, 20)


def made_up(num_launches: int, num_work: int) -> LaunchesRecord:
    """The record of a step."""
    random = np.random.default_rng(1)
    work = []
    for number in range(num_work):
        m, n, k = (int(size) for size in 64 * random.integers(1, 256, 3))
        moved = 2.0 * (m * k + k * n + m * n)
        product = WorkRow("nvjet", "product", "gemm", "aten.mm.default", 2.0 * m * n * k, moved, "bf16")
        sizes = {"batch": 1, "m": m, "n": n, "k": k, "layout": "TN", "a_bytes": 2.0, "b_bytes": 2.0, "d_bytes": 2.0}
        kernel = WorkRow(f"elementwise_{number % 40}", "kernel", "elementwise", "aten.mul.Tensor", 0.0, moved, "bf16")
        work.append(kernel._replace(threads=m * n) if number % 6 else product._replace(**sizes))
    rows = []
    for number in range(num_launches):
        stream, place = STREAMS[number // 1000 % len(STREAMS)], number % 8
        what = (PRODUCT, KERNEL, KERNEL, RECORDS, KERNEL, KERNEL, WAITS, KERNEL)[place]
        has_work = what in (KERNEL, PRODUCT)
        of = int(random.integers(0, num_work // 6)) * 6 + (place and 1 + place % 5) if has_work else -1
        event = 0 if has_work else number // 8 + 1
        layer = number // (num_launches // 100 + 1)
        rows.append((what, of, stream, event, has_work, 0, 0, has_work, has_work, number, 1, 0, layer, -1, 0))
    columns = Columns(LaunchesRecord)
    columns.extend(rows)
    return columns.made(step=2, work_rows=work, texts=["", "8192,1,1"])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=1_000_000)
    parser.add_argument("--work", type=int, default=5000)
    parser.add_argument("--gpu", default="h100-80g")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    record = made_up(arguments.launches, arguments.work)
    least: dict[str, float] = {}
    for _ in range(arguments.rounds):
        began = time.perf_counter()
        launches, work = launch_table(record), work_table(record)
        tables = time.perf_counter()
        prices = KernelTimes(find_gpu(arguments.gpu))
        prices.price(work, np.bincount(pd.to_numeric(launches["work"]).clip(0), minlength=len(work)))
        priced = time.perf_counter()
        step = price_step(launches, work, prices)
        done = time.perf_counter()
        took = {"tables": tables - began, "prices": priced - tables, "prices and places": done - priced}
        least = {name: min(seconds, least.get(name, seconds)) for name, seconds in took.items()}
    print(f"{len(launches):,} launches, {len(work):,} pieces of work, {len(step.kernels):,} kernels")
    for name, seconds in least.items():
        print(f"{name:<18} {seconds:6.2f} s")


if __name__ == "__main__":
    main()
