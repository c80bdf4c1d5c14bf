"""Everything that needs a real GPU: ``make gpu``, in pieces of at most 8 minutes, 30 minutes in total.

    python -m tests.gpu.confirm [PIECE ...] [--out gpu-results] [--job NAME ...]

Each piece writes its results as soon as it has them, so a piece that fails or is cut off loses none of the others.
``python -m tests.accuracy.results gpu-results`` then copies the measurements into docs/accuracy and tests/data/gpu, and
makes their tables.

Without a GPU it rehearses: the virtual GPU takes the real one's place, the results are marked as rehearsals in their
names and heads, and they cannot be kept. Exit code 0: every piece succeeded.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fakedist.errors import FakedistError
from fakedist.gpu.driver.build import ensure_driver
from fakedist.launcher.machine import count_real_gpus
from tests.gpu.jobs.catalogue import JOBS, find_jobs
from tests.gpu.machine import NoGpuError, real_machine, rehearsed_machine
from tests.gpu.pieces import calibrate, examples, host, marked, memory, processes, recordings, times
from tests.gpu.record import DEFAULT_GPU
from tests.gpu.session import REHEARSAL, Session


@dataclass(frozen=True)
class Piece:
    """Something to measure: what, for how many seconds at most, and how; ``run`` says whether it went well."""

    title: str
    limit_s: float
    run: Callable[[Session], bool]


#: In this order; what is read first when time is short comes first.
PIECES = {
    "recordings": Piece("the accuracy set, event by event", 360.0, recordings.run),
    "tests": Piece("the tests marked gpu", 90.0, marked.run),
    "outside": Piece("what the device holds outside the allocator", 45.0, memory.run_outside),
    "out-of-memory": Piece("where a job fails with less and less memory", 65.0, memory.run_out_of_memory),
    "lag": Piece("what jobs reserve that use streams", 210.0, memory.run_lag),
    "host": Piece("steps and calls: what the host takes", 240.0, host.run),
    "examples": Piece("the examples", 160.0, examples.run),
    "processes": Piece("real processes against faked ranks", 300.0, processes.run),
    "times": Piece("kernel times: bare, recorded, estimated", 330.0, times.run),
    "calibrate": Piece("kernels of a few shapes, as a calibration table", 90.0, calibrate.run),
}


def run_piece(session: Session, name: str, patience: float = 1.0) -> bool:
    """One piece, within its time or ``patience`` times that; one that breaks says how."""
    piece, started = PIECES[name], time.monotonic()
    session.ends_at = started + piece.limit_s * patience
    session.say("", f"==== {name}: {piece.title}")
    try:
        went_well = piece.run(session)
    except Exception:
        session.say(traceback.format_exc())
        went_well = False
    result = "done" if went_well else "NOT AS IT HAS TO BE"
    session.say(f"==== {name}: {result}, {time.monotonic() - started:.0f} of {piece.limit_s:.0f} s")
    return went_well


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", nargs="*", metavar="PIECE", help=f"{', '.join(PIECES)}; all where none is named")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="processes at a time")
    parser.add_argument("--patience", type=float, default=1.0, metavar="FACTOR", help="times as long for every piece")
    parser.add_argument("--job", action="append", default=[], choices=JOBS, metavar="NAME", help="repeatable")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.piece if name not in PIECES]:
        parser.error(f"there is no piece {unknown[0]!r}; there are {', '.join(PIECES)}")
    started = time.monotonic()
    rehearsal = count_real_gpus() == 0
    try:
        machine = rehearsed_machine(DEFAULT_GPU) if rehearsal else real_machine()
    except NoGpuError as error:
        print(f"torch cannot use the GPU of this machine: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python -m tests.gpu.confirm", *arguments])
    session = Session(args.out, machine, find_jobs(args.job), args.at_once, rehearsal, command)
    if rehearsal:
        session.say(REHEARSAL)
    session.say(", ".join(f"{key} {value}" for key, value in machine.items() if value != ""))
    try:
        ensure_driver()  # once, before many processes want it
    except FakedistError as error:
        session.say(f"there will be no virtual GPU: {error.message}: {error.hint}")
    results = [run_piece(session, name, args.patience) for name in args.piece or PIECES]
    session.say("", f"{time.monotonic() - started:.0f} s; {sum(results)} of {len(results)} pieces went well")
    session.say(REHEARSAL if rehearsal else f"to keep what was measured: python -m tests.accuracy.results {args.out}")
    with (session.others / "summary.txt").open("a") as file:
        file.write("\n".join(session.lines) + "\n")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
