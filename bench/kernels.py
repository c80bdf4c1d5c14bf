"""The cost of a timed step of a million kernels: times by layer, family and name, the trace, the page, a comparison.

    python bench/kernels.py [--kernels 1000000] [--rounds 3]

The step is synthetic: 80 layers of 8 modules forward and back, three streams, a collective every 30 kernels, 500 names.
"tables" is what `profile` does once the rank has ended, including the trace; the others read the run directory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from processes import ROOT, Ended, run_process

sys.path.insert(0, str(ROOT))

from fakedist.options import Job
from fakedist.rundir.directory import JournalWriter, new_manifest
from fakedist.rundir.encoding import columns_of
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.records import CallsRecord, GpuRecord, GroupsRecord, LayersRecord, OutcomeRecord
from fakedist.rundir.rows import CallRow, GroupRow, LayerRow
from fakedist.rundir.schema import FAMILIES, PHASES
from fakedist.rundir.step_time import KernelSource, Peaks
from fakedist.rundir.trace_records import KernelsRecord

NUM_LAYERS, NUM_MODULES, NUM_NAMES = 80, 8, 500
GIB = 1 << 30


def kernels_record(num: int, seed: int) -> KernelsRecord:
    """The journal's record of a step of so many kernels."""
    random = np.random.default_rng(seed)
    number = np.arange(num)
    is_call = number % 30 == 29
    family = np.where(is_call, FAMILIES.index("communication"), random.integers(0, 6, num))
    third = number * 3 // num
    within = number % max(num // 3, 1) * (NUM_LAYERS * (NUM_MODULES + 1)) // max(num // 3, 1)
    duration = random.gamma(2.0, 15.0, num)
    start = np.cumsum(duration + 0.5)
    columns = {
        "name": random.integers(0, NUM_NAMES, num),
        "family": family,
        "stream": np.where(is_call, 7, np.where(number % 50 == 0, 9, 0)),
        "start_us": start,
        "duration_us": np.where(is_call, np.nan, duration),
        "launch_us": start - random.gamma(2.0, 20.0, num),
        "grid": np.full(num, NUM_NAMES),
        "block": np.full(num, NUM_NAMES),
        "operation": np.full(num, NUM_NAMES + 1),
        "op": number,
        "step": np.full(num, 2),
        "phase": np.array([PHASES.index(name) for name in ("forward", "backward", "optimizer")])[np.minimum(third, 2)],
        "recompute": (third == 1) & (number % 4 == 0),
        "layer": np.where(third == 1, NUM_LAYERS * (NUM_MODULES + 1) - within, within) % (NUM_LAYERS * NUM_MODULES) + 3,
        "call": np.where(is_call, number // 30, -1),
        "flops": np.where(family < 2, duration * 5e8, np.nan),
        "moved_bytes": duration * 2e6,
        "bound": np.where(family < 2, 1, 2),
    }
    names = [f"void at::native::kernel_{at}<4, c10::BFloat16, std::array<char*, {at}>>(int)" for at in range(NUM_NAMES)]
    source = KernelSource("estimated", "model", 2, "made up", 0.0)
    data = {name: np.asarray(columns[name]).astype(code).tobytes() for name, code in columns_of(KernelsRecord).items()}
    return KernelsRecord(source, [*names, "1,1,1", "aten.mm.default"], **data)


def write_run(run: Path, num: int, seed: int) -> None:
    """A run that has ended, without its tables."""
    run.mkdir()
    new_manifest(run, Job(world_size=1_024, rank=0, target="train.py"))
    layers = [(0, "", "", -1), (1, "(Transformer)", "Transformer", 0), (2, "layers", "ModuleList", 1)]
    for block in range(NUM_LAYERS):
        parent = len(layers)
        layers.append((parent, f"layers.{block}", "Block", 2))
        layers += [(parent + 1 + at, f"layers.{block}.w{at}", "Linear", parent) for at in range(NUM_MODULES)]
    peaks = Peaks({"bf16": 989.4e12, "fp32": 66.9e12}, 3.352e12)
    journal = JournalWriter(run / "journal.bin")
    journal.append(GpuRecord("made up", 85 * GIB, peaks=peaks, torch="-"))
    journal.append(LayersRecord([LayerRow(*layer) for layer in layers]))
    journal.append(GroupsRecord([GroupRow(0, "0", "tp", tuple(range(8)), 0, 0, "nccl")]))
    call = CallRow(0, "all_reduce", 0, 1 << 20, 1 << 20, "bfloat16", True, 7, 0, 0, -1, 0, 0)
    journal.append(CallsRecord([call._replace(sequence=at, op=at * 30) for at in range(num // 30)]))
    journal.append(kernels_record(num, seed))
    journal.append(OutcomeRecord(Outcome.STOPPED, 0))
    journal.close()


def run_statements(code: str, a: Path, b: Path) -> Ended:
    """Run statements about two runs in a process of its own, imports included."""
    head = "import contextlib, io, sys\nfrom pathlib import Path\n_, a, b = sys.argv\n"
    return run_process([sys.executable, "-c", head + code, os.fspath(a), os.fspath(b)], cwd=ROOT)


_BUILD = """
from fakedist.results.building import build_tables
build_tables(Path(a))
"""
_PAGE = """
from fakedist.report.render.html import write_page
from fakedist.results.opening import open_run
write_page(open_run(Path(a)), Path(a) / 'report.html')
"""
_COMMAND = """
from fakedist.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main({})
"""
STATEMENTS = {
    "tables and trace": _BUILD,
    "report.html": _PAGE,
    "fakedist report": _COMMAND.format("['report', a]"),
    "fakedist compare": _COMMAND.format("['compare', a, b]"),
}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "a", Path(folder) / "b"
        for seed, run in enumerate((a, b)):
            write_run(run, chosen.kernels, seed)
        run_statements(_BUILD, b, a)
        print(f"{chosen.kernels:,} kernels, median of {chosen.rounds} rounds, each in a process of its own\n")
        print("| | time | CPU | host memory |\n|---|---|---|---|")
        for what, code in STATEMENTS.items():
            rounds = [run_statements(code, a, b) for _ in range(chosen.rounds)]
            figures = zip(*((each.wall_s, each.cpu_s, each.host_gb) for each in rounds), strict=True)
            wall_s, cpu_s, host_gb = map(statistics.median, figures)
            print(f"| {what} | {wall_s:.2f} s | {cpu_s:.2f} s | {host_gb:.2f} GB |", flush=True)
        for name in ("report.html", "trace.json.gz"):
            print(f"\n{name}: {(a / name).stat().st_size / 1e6:.2f} MB", end="")
        print(f"\nload: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
