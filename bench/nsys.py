"""Join a report of Nsight Systems: a million kernels with ten million NVTX ranges.

    python bench/nsys.py [--kernels N] [--ranges N] [--keep FILE]

The report is synthetic, in the schema of nsys: a training loop of steps, phases, layers four deep, an operation with
autograd's sequence number around each launch, a backward in a thread of its own; so the layer of every kernel is known
and is checked. Seconds are this machine's and include starting Python; memory is the peak of the process that joins.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
_PROCESS = 7 << 24
_MAIN, _AUTOGRAD = _PROCESS | 1, _PROCESS | 2
_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category
    INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL,
    gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL,
    blockZ INTEGER NOT NULL, graphNodeId INTEGER);
INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_PRODUCT_VERSION', '2025.5.1');
INSERT INTO StringIds VALUES (1, 'void at::native::vectorized_elementwise_kernel<4>(int)'), (2, 'sm90_xmma_gemm_bf16'),
    (3, 'cudaLaunchKernel_v7000');
"""
_NUM_BLOCKS, _PER_LAYER = 40, 5


class _Report:
    """The events of a training step, in the order in which they happen."""

    def __init__(self, ranges_per_kernel: int) -> None:
        self.ranges: list[tuple[int, int, str, int]] = []
        self.launches: list[tuple[int, int, int]] = []  # time, thread, correlation
        self.now, self.correlation, self._extra = 0, 0, ranges_per_kernel - 1

    def range(self, text: str, thread: int) -> Iterator[None]:
        start = self.now = self.now + 1
        yield
        self.now += 1
        self.ranges.append((start, self.now, text, thread))

    def kernel(self, text: str, thread: int) -> None:
        for extra in range(self._extra):
            for _ in self.range(f"aten::view, op_id = {extra}", thread):
                pass
        for _ in self.range(text, thread):
            self.correlation += 1
            self.launches.append((self.now, thread, self.correlation))


def _microbatch(report: _Report, sequence: int) -> int:
    first = sequence
    for _ in report.range("forward", _MAIN):
        for block in range(_NUM_BLOCKS):
            for _ in report.range(f"layers.{block}", _MAIN):
                for part in ("attention", "mlp"):
                    for _ in report.range(part, _MAIN):
                        for _ in range(_PER_LAYER):
                            report.kernel(f"aten::mm, seq = {sequence}", _MAIN)
                            sequence += 1
    for _ in report.range("backward", _MAIN):
        for back in reversed(range(first, sequence)):
            name = f"autograd::engine::evaluate_function: MmBackward0, seq = {back}"
            for _ in report.range(name, _AUTOGRAD):
                report.kernel("aten::mm", _AUTOGRAD)
    return sequence


def write_report(path: Path, num_kernels: int, num_ranges: int) -> tuple[int, int]:
    """Write a report of one step with at least so many kernels and ranges; how many there are."""
    connection = sqlite3.connect(path)
    connection.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;" + _SCHEMA)
    insert = "INSERT INTO NVTX_EVENTS VALUES (?,?,59,NULL,NULL,NULL,?,?,NULL,NULL,0)"
    connection.execute(insert, (0, 0, "step 1", _MAIN))
    kernels, ranges, sequence = 0, 1, 0
    report = _Report(max(2, round(num_ranges / num_kernels)))
    while kernels < num_kernels or ranges < num_ranges:
        sequence = _microbatch(report, sequence)
        connection.executemany(insert, sorted(report.ranges))
        connection.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,0,?,?,3,0)",
            [(at, at, thread, correlation) for at, thread, correlation in report.launches],
        )
        connection.executemany(
            f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,0,1,7,?,{_PROCESS},?,1,8,4,1,128,1,1,NULL)",
            [(at + 9, at + 10, correlation, 1 + correlation % 2) for at, _, correlation in report.launches],
        )
        kernels, ranges = kernels + len(report.launches), ranges + len(report.ranges)
        report.ranges, report.launches = [], []
    connection.execute("UPDATE NVTX_EVENTS SET end = ? WHERE text = 'step 1'", (report.now + 1,))
    connection.commit()
    connection.close()
    return kernels, ranges


_JOIN = """
import json, resource, sys, time
from pathlib import Path
import numpy as np
started = time.monotonic()
from fakedist.rundir.records import LayersRecord
from fakedist.traces.nsys_report import read_report
from fakedist.traces.one_step import StepChoice
found = read_report(Path(sys.argv[1]), Path(sys.argv[1]), StepChoice())
seconds = time.monotonic() - started
counts = np.unique(np.frombuffer(found.kernels.layer, "<i4"), return_counts=True)
named = next(record.rows for record in found.records if isinstance(record, LayersRecord))
layers = {named[layer][1]: int(count) for layer, count in zip(*counts)}
used = resource.getrusage(resource.RUSAGE_SELF)
cpu = used.ru_utime + used.ru_stime
print(json.dumps({"seconds": seconds, "cpu": cpu, "bytes": used.ru_maxrss * 1024, "layers": layers}))
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--ranges", type=int, default=10_000_000)
    parser.add_argument("--keep", type=Path, help="write the report here, and leave it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = arguments.keep or Path(scratch) / "report.sqlite"
        started = time.monotonic()
        kernels, ranges = write_report(path, arguments.kernels, arguments.ranges)
        size = path.stat().st_size / 1e9
        took = f"made in {time.monotonic() - started:.0f} s"
        print(f"{took}: {kernels:,} kernels, {ranges:,} ranges, {size:.2f} GB of SQLite")
        run = [sys.executable, "-c", _JOIN, str(path)]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    wanted = {f"layers.{block}.{part}" for block in range(_NUM_BLOCKS) for part in ("attention", "mlp")}
    exact = set(found["layers"]) == wanted and len(set(found["layers"].values())) == 1
    took = f"joined in {found['seconds']:.1f} s ({found['cpu']:.1f} s of CPU), {found['bytes'] / 1e9:.2f} GB"
    print(f"{took}; every layer as it was pushed: {exact}")
    if not exact:
        sys.exit(1)


if __name__ == "__main__":
    main()
