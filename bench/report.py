"""The cost of `fakedist report` for a run of a million allocator events: from the tables, and from the journal alone.

    python bench/report.py [--events 1000000] [--rounds 3]

The run is synthetic: 80 layers of 8 modules, 10 steps, 1,000 different stacks of 20 frames. "from the journal alone" is
what `profile` does once when the rank has ended (or `report`, if profile was killed): replay, tables, snapshot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from processes import ROOT, Ended, run_process

sys.path.insert(0, str(ROOT))

from fakedist.options import Job
from fakedist.rundir.directory import JournalWriter, new_manifest
from fakedist.rundir.encoding import Record
from fakedist.rundir.memory_records import EventsRecord, MarksRecord
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.records import (
    GpuRecord,
    LayersRecord,
    OperationNamesRecord,
    OperationsRecord,
    OutcomeRecord,
    RegionsRecord,
    ScopesRecord,
    StepRecord,
)
from fakedist.rundir.rows import FrameRow, LayerRow, OperationRow, RegionRow, ScopeRow
from fakedist.rundir.schema import ACTIONS, CATEGORIES

NUM_STEPS, NUM_LAYERS, NUM_MODULES, NUM_STACKS = 10, 80, 8, 1_000
SLOT_BYTES = 64 << 20
ALLOC, REQUESTED, COMPLETED = (ACTIONS.index(name) for name in ("alloc", "free_requested", "free_completed"))
Event = tuple[int, int, int, int, int]  # action, address, size, op, stack
PARAMETER = CATEGORIES.index("parameter")


def records(num_events: int, history: Callable[[int], Iterator[Event]] | None = None) -> Iterator[Record]:
    """A journal's records.

    Args:
        num_events: About how many allocator events.
        history: The events of so many blocks; :func:`regular` unless given.
    """
    yield GpuRecord("made up", 85 << 30, torch="-")
    layers = [(0, "", "", -1), (1, "(Transformer)", "Transformer", 0), (2, "layers", "ModuleList", 1)]
    for block in range(NUM_LAYERS):
        parent = len(layers)
        layers.append((parent, f"layers.{block}", "Block", 2))
        layers += [(parent + 1 + at, f"layers.{block}.w{at}", "Linear", parent) for at in range(NUM_MODULES)]
    yield LayersRecord([LayerRow(*layer) for layer in layers])
    yield OperationNamesRecord([OperationRow(0, "aten.mm.default"), OperationRow(1, "aten.add.Tensor")])
    phases = ("forward", "backward", "optimizer")
    scopes = [
        (step, phase, layer, False)
        for step in range(1, NUM_STEPS + 1)
        for phase in phases
        for layer in range(len(layers))
    ]
    yield ScopesRecord([ScopeRow(number, *scope) for number, scope in enumerate(scopes)])
    frames = [
        FrameRow(f"/job/model{stack}.py", depth + 1, f"forward_{depth}")
        for stack in range(NUM_STACKS)
        for depth in range(20)
    ]
    num_blocks = num_events // 3
    numbers = range(num_blocks)
    yield OperationsRecord(
        first=0,
        operation=array("I", [at & 1 for at in numbers]).tobytes(),
        scope=array("I", [at * len(scopes) // num_blocks for at in numbers]).tobytes(),
    )
    yield from events((history or regular)(num_blocks), frames)
    marked = numbers[::50]
    yield MarksRecord(
        op=array("q", marked).tobytes(),
        address=array("Q", [address(at) for at in marked]).tobytes(),
        category=bytes([PARAMETER]) * len(marked),
        layer=array("i", [3 + at % 700 for at in marked]).tobytes(),
        start=bytes(8 * len(marked)),
        size=array("q", [1_000] * len(marked)).tobytes(),
    )
    of_step = num_blocks // NUM_STEPS
    yield RegionsRecord([RegionRow(first, first + of_step // 3, 0) for first in numbers[:: of_step + 1]])
    for step in range(1, NUM_STEPS + 1):
        yield StepRecord(step, step * 1_000, step * 1_000 + 900)
    yield OutcomeRecord(Outcome.STOPPED, 0)


def address(block: int) -> int:
    """Where the `block`th block lies: one of 2,000 segments in turn."""
    return (1 << 44) + block % 2_000 * SLOT_BYTES


def regular(num_blocks: int) -> Iterator[Event]:
    """Blocks that are freed 1,500 allocations later."""
    for block in range(num_blocks):
        yield ALLOC, address(block), 4_096 + block % 5_000_000, block, block % NUM_STACKS
        if block >= 1_500:
            old = block - 1_500
            for what in (REQUESTED, COMPLETED):
                yield what, address(old), 4_096 + old % 5_000_000, block, -1


def events(history: Iterator[Event], frames: list[FrameRow]) -> Iterator[Record]:
    """2,000 segments, then the blocks in them."""
    rows = [(ACTIONS.index("segment_alloc"), address(at), SLOT_BYTES, -1, -1) for at in range(2_000)]
    rows += history
    for start in range(0, len(rows), 100_000):
        action, at, size, op, stack = zip(*rows[start : start + 100_000], strict=True)
        stacks = [tuple(range(number * 20, number * 20 + 20)) for number in range(NUM_STACKS)]
        yield EventsRecord(
            device=0,
            frames=[] if start else frames,
            stacks=[] if start else stacks,
            action=bytes(action),
            address=array("Q", at).tobytes(),
            size=array("q", size).tobytes(),
            stream=bytes(8 * len(at)),
            time_us=array("q", range(start, start + len(at))).tobytes(),
            op=array("q", op).tobytes(),
            stack=array("i", stack).tobytes(),
        )


def make_run(run: Path, content: Iterator[Record]) -> None:
    """A run whose rank has ended, and of which nothing was read yet."""
    new_manifest(run, Job(world_size=1_024, rank=0, target="train.py"))
    journal = JournalWriter(run / "journal.bin")
    for record in content:
        journal.append(record)
    journal.close()


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory)
        make_run(run, records(args.events))
        command = [sys.executable, "-m", "fakedist", "report", str(run)]
        unfinished = (run / "run.json").read_text()
        found: dict[str, list[Ended]] = {"from the journal alone": [], "from the tables": []}
        for _ in range(args.rounds):
            (run / "run.json").write_text(unfinished)
            found["from the journal alone"].append(run_process(command))
            found["from the tables"].append(run_process(command))
        peak = json.loads((run / "run.json").read_text())["summary"]["peak_allocated_bytes"]
    print(f"{args.events:,} events, peak {peak:,} bytes")
    for name, rounds in found.items():
        wall_s = statistics.median(each.wall_s for each in rounds)
        cpu_s = statistics.median(each.cpu_s for each in rounds)
        host_gb = max(each.host_gb for each in rounds)
        print(f"{name:<24} {wall_s:6.2f} s {cpu_s:6.2f} s of CPU {host_gb:6.2f} GB of host memory")


if __name__ == "__main__":
    main()
