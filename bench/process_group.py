"""The cost of the faked world against torch's own ``fake`` backend: groups at world 65,536 and single calls.

    python bench/process_group.py [--rounds 5]

Both sides run in turns, in processes of their own; a figure is the least of the rounds. Ours writes every call into a
ledger whose journal is a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WORLD_SIZE = 65_536
#: Megatron's: tensor parallel in a node, pipeline across nodes, context parallel between.
TENSOR, PIPELINE, CONTEXT = 8, 16, 2
#: Seconds that one call is repeated for.
BATCH_S = 0.1


@dataclass(frozen=True)
class Limit:
    """One line of the table: what is measured, its unit, and the ratio that it must not exceed (None: for reading)."""

    name: str
    unit: str
    ratio: float | None


LIMITS = [
    Limit("init_process_group, 65,536 ranks", "ms", None),
    Limit("45,312 groups, 65,536 ranks", "ms", 0.3),
    Limit("mesh of 4 axes, 65,536 ranks", "ms", None),
    Limit("all_reduce of 8 floats", "us", 2.0),
    Limit("all_reduce of 8 floats, AVG", "us", None),
    Limit("all_gather_into_tensor, 8 ranks", "us", None),
    Limit("all_gather_into_tensor, 1,024 ranks", "us", 0.1),
    Limit("all_gather_into_tensor, 8,192 ranks", "us", None),
    Limit("reduce_scatter_tensor, 1,024 ranks", "us", None),
    Limit("all_to_all with splits, 1,024 ranks", "us", None),
    Limit("all_gather of a list, 1,024 ranks", "us", None),
]


def ranks_of_groups() -> Iterator[range | list[int]]:
    """The groups of Megatron's parallel_state: data, tensor, pipeline and context parallel; 45,312 in all."""
    stage = WORLD_SIZE // PIPELINE
    for first in range(0, WORLD_SIZE, TENSOR):
        yield range(first, first + TENSOR)
    for first in range(stage):
        yield range(first, WORLD_SIZE, stage)
    for start in range(0, WORLD_SIZE, stage):
        for lane in range(TENSOR * CONTEXT):
            yield range(start + lane, start + stage, TENSOR * CONTEXT)
        for first in range(start, start + stage, TENSOR * CONTEXT):
            for lane in range(TENSOR):
                yield range(first + lane, first + TENSOR * CONTEXT, TENSOR)


@contextmanager
def world(kind: str, size: int) -> Iterator[None]:
    """The default group, by torch's own ``fake`` backend or by ours with a ledger."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if kind == "stock":
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        yield
        dist.destroy_process_group()
        return
    from fakedist.options import Job
    from fakedist.record.ledger import Ledger
    from fakedist.rundir.directory import JournalWriter
    from fakedist.world.reroute import fake_world

    with tempfile.TemporaryDirectory() as directory:
        journal = JournalWriter(Path(directory) / "journal.bin")
        ledger = Ledger(journal.append, lambda: (0, 0), lambda address, num_bytes: None, lambda *gather: None)
        with fake_world(Job(world_size=size, rank=0, target="bench"), ledger):
            dist.init_process_group("nccl")
            yield
        ledger.flush()
        journal.close()


def call_us(call: Callable[[], object]) -> float:
    """Microseconds of one call: the least of three batches."""
    call()
    batches = []
    for _ in range(3):
        count, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < BATCH_S:
            for _ in range(10):
                call()
            count += 10
        batches.append(elapsed / count * 1e6)
    return min(batches)


def measure_groups(kind: str) -> dict[str, float]:
    """Milliseconds to make groups at world 65,536."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    figures = {}
    start = time.perf_counter()
    with world(kind, WORLD_SIZE):
        figures[LIMITS[0].name] = (time.perf_counter() - start) * 1e3
        listed = [list(ranks) for ranks in ranks_of_groups()]
        start = time.perf_counter()
        for ranks in listed:
            dist.new_group(ranks)
        figures[LIMITS[1].name] = (time.perf_counter() - start) * 1e3
    with world(kind, WORLD_SIZE):
        start = time.perf_counter()
        init_device_mesh("cpu", (256, CONTEXT, PIPELINE, TENSOR), mesh_dim_names=("dp", "cp", "pp", "tp"))
        figures[LIMITS[2].name] = (time.perf_counter() - start) * 1e3
    return figures


def calls(size: int) -> dict[str, Callable[[], object]]:
    """Calls whose results are as large as ``size`` ranks make them, one float a rank."""
    import torch
    import torch.distributed as dist

    anything: Any = dist  # torch 2.15 has other names, and warns of these
    gather = getattr(anything, "all_gather_single", anything.all_gather_into_tensor)
    scatter = getattr(anything, "reduce_scatter_single", anything.reduce_scatter_tensor)
    one, small, many, ones = torch.ones(1), torch.ones(8), torch.ones(size), [1] * size
    into, slots = torch.empty(size), list(torch.empty(size).split(1))
    ranks = f"{size:,} ranks"
    made: dict[str, Callable[[], object]] = {
        "all_reduce of 8 floats": lambda: dist.all_reduce(small),  # a sum: here ours computes and stock does not
        "all_reduce of 8 floats, AVG": lambda: dist.all_reduce(small, dist.ReduceOp.AVG),
        f"all_gather_into_tensor, {ranks}": lambda: gather(into, one),
        f"reduce_scatter_tensor, {ranks}": lambda: scatter(one, many, op=dist.ReduceOp.AVG),
        f"all_to_all with splits, {ranks}": lambda: dist.all_to_all_single(into, many, ones, ones),
        f"all_gather of a list, {ranks}": lambda: dist.all_gather(slots, one),
    }
    wanted = {limit.name for limit in LIMITS}
    return {name: call for name, call in made.items() if name in wanted and (size == 8 or "floats" not in name)}


def measure(kind: str) -> dict[str, float]:
    """Every figure of one side."""
    figures = measure_groups(kind)
    for size in (8, 1024, 8192):
        with world(kind, size):
            figures |= {name: call_us(call) for name, call in calls(size).items()}
    return figures


def measured_apart(kind: str) -> dict[str, float]:
    """:func:`measure` in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--side", kind]
    finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Print the table; a ratio over its limit is marked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=["stock", "ours"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args.side)))
        return
    rounds = [{kind: measured_apart(kind) for kind in ("stock", "ours")} for _ in range(args.rounds)]
    print(f"{'':<38}{'stock fake':>14}{'fakedist':>14}{'ratio':>8}   limit")
    for limit in LIMITS:
        stock, ours = (min(each[kind][limit.name] for each in rounds) for kind in ("stock", "ours"))
        ratio = ours / stock
        bound = "" if limit.ratio is None else f"{limit.ratio:.1f}" + (" OVER" if ratio > limit.ratio else "")
        print(f"{limit.name:<38}{stock:>11,.1f} {limit.unit}{ours:>11,.1f} {limit.unit}{ratio:>8.3f}   {bound}")


if __name__ == "__main__":
    main()
