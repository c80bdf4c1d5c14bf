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
from collections.abc import Sequence
from pathlib import Path

from fakedist.errors import FakedistError
from fakedist.extras.confirm.confirming import PIECES as SHIPPED
from fakedist.extras.confirm.confirming import REHEARSAL, MeasuredPiece, open_session, run_piece
from fakedist.extras.confirm.jobs import JOBS
from fakedist.launcher.machine import count_real_gpus
from tests.gpu.pieces import calibrate, examples, host, lag, marked, processes

#: In this order: what matters most comes first, as the time may be short.
PIECES = {
    "recordings": SHIPPED["recordings"],
    "tests": MeasuredPiece("the tests marked gpu", 90.0, marked.run),
    "outside": SHIPPED["outside"],
    "out-of-memory": SHIPPED["out-of-memory"],
    "lag": MeasuredPiece("what jobs reserve that use streams", 150.0, lag.run),
    "host": MeasuredPiece("steps and calls: what the host takes", 240.0, host.run),
    "examples": MeasuredPiece("the examples", 160.0, examples.run),
    "processes": MeasuredPiece("real processes against faked ranks", 270.0, processes.run),
    "times": SHIPPED["times"],
    "calibrate": MeasuredPiece("kernels of a few shapes, as a calibration table", 90.0, calibrate.run),
}


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
    started, rehearsal = time.monotonic(), count_real_gpus() == 0
    args.out.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python -m tests.gpu.confirm", *arguments])
    try:
        session = open_session(
            args.out, command, lambda line: print(line, flush=True),
            is_rehearsal=rehearsal, at_once=args.at_once, jobs=args.job,
        )  # fmt: skip
    except FakedistError as error:
        print(error, file=sys.stderr)
        return 2
    names = args.piece or PIECES
    results = [run_piece(session, name, PIECES[name], args.patience).went_well for name in names]
    session.say("", f"{time.monotonic() - started:.0f} s; {sum(results)} of {len(results)} pieces went well")
    session.say(REHEARSAL if rehearsal else f"to keep what was measured: python -m tests.accuracy.results {args.out}")
    with (session.others / "summary.txt").open("a") as file:
        file.write("\n".join(session.lines) + "\n")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
