"""``make gpu``: ``fakedist confirm`` with the pieces that only its developers need, 30 minutes in total.

    python -m tests.gpu.confirm [PIECE ...] [--out gpu-results] [--job NAME ...]

The results are one file, written anew after each piece: one that fails or is cut off loses none of the others.
``python -m tests.accuracy.results gpu-results`` then unpacks it into docs/accuracy and tests/data/gpu, and makes their
tables.

Without a GPU it rehearses: the virtual GPU takes the real one's place, the file is marked, and cannot be kept. Exit
code 0: every piece succeeded.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from fakedist.analysis.recording import read_recording
from fakedist.errors import FakedistError
from fakedist.extras.confirm import confirming
from fakedist.extras.confirm.allocator_history import JobRecord, compare_job, recorded_events
from fakedist.extras.confirm.confirming import MeasuredPiece
from fakedist.extras.confirm.jobs import JOBS
from fakedist.extras.confirm.pieces import ROOT, TIME_IS_OVER, Session, Way, columns, ended_with, peaks
from fakedist.launcher.machine import count_real_gpus
from tests.accuracy import many
from tests.accuracy.results import RESULTS
from tests.gpu import host

#: The examples, each with its world: arguments of ``fakedist profile``.
EXAMPLES = (
    "--world-size 8 --rank 3 examples/ddp_gpt.py --model gpt2-xl",
    "--world-size 64 --rank 0 examples/llama_fsdp2.py --model 8b --checkpoint selective",
    "--world-size 1024 --rank 1023 examples/llama_fsdp2.py --model 70b --tp 8 --checkpoint full",
    "--world-size 64 --rank 5 examples/three_d.py --tp 4 --pp 2 --dp 8 --layers 16",
    "--world-size 8 --rank 0 examples/nonuniform_tp.py",
    "--world-size 64 --rank 0 examples/megatron_gpt.py --preset mixtral-8x7b",
)
#: Ranks of each job; those of eight come last, as far as the time goes. A pipeline has four blocks to share.
_ORDER = tuple((job, ranks) for ranks in (2, 4, 8) for job in many.JOBS if ranks < 8 or job != "pipeline_1f1b")
#: In a rehearsal, which has fewer cores: one of every kind of traffic.
_REHEARSED = (("fsdp2", 2), ("pipeline_1f1b", 2), ("experts_dropless", 2))


def run_program(session: Session, *arguments: str) -> bool:
    """Run Python with these arguments, and keep the end of what it prints; whether it ended well."""
    ended = ended_with(arguments, session.timeout_s())
    session.say(*ended.output.splitlines()[-12:], *([f"{arguments[0]} {ended.why}"] if ended.why else []))
    return not ended.why


def run_tests(session: Session) -> bool:
    """Run the tests marked ``gpu``; where there is no GPU they skip themselves."""
    # Whatever plugins this Python has, these tests need none but their own timeout, and that is optional.
    options = ("-m", "gpu", "-q", "-ra", "-p", "no:cacheprovider", "-W", "ignore")
    return run_program(session, "-m", "pytest", *options, "tests/gpu")


def run_calibration(session: Session) -> bool:
    """Write a calibration table next to the results. ``make calibrate`` alone measures many shapes."""
    path = session.file.resolve().with_name("own.times.json")
    rehearse = ["--rehearse"] if session.rehearsal else []
    return run_program(session, "-m", "tests.gpu.calibrate", "--out", str(path), "--short", *rehearse)


def run_examples(session: Session) -> bool:
    """Run every example on both sides; whether all ran."""
    rows, failed = [], []
    with (
        tempfile.TemporaryDirectory(prefix="gpu-examples-") as text,
        ThreadPoolExecutor(max(1, session.at_once // 2)) as pool,
    ):
        examples = [each for each in EXAMPLES if "megatron" not in each or find_spec("megatron")]
        session.say(*(f"{each}: not run: it is not installed here" for each in EXAMPLES if each not in examples))
        virtual = [pool.submit(_example, session, session.virtual, each, Path(text)) for each in examples]
        for example, other in zip(examples, virtual, strict=True):  # two at a time might not fit into one GPU
            real = _example(session, session.real, example, Path(text, "real"))
            difference = compare_job(real.name, real, other.result())
            session.say(f"{real.name}: {len(real.events)} events, {difference.verdict}", *difference.text())
            error = difference.reason if difference.verdict in ("failed", "error") else ""
            rows.append({"command": real.name, **peaks(real), **columns("virtual", difference), "error": error})
            failed += [error] if error else []
    session.write("gpu-examples", rows)
    return not failed


def _example(session: Session, way: Way, example: str, directory: Path) -> JobRecord:
    record, run = JobRecord(f"fakedist profile {example}"), directory / str(EXAMPLES.index(example))
    command = ["-m", "fakedist", "profile", "--no-kernels", *way.device_options, "-o", str(run), *example.split()]
    record.error = TIME_IS_OVER
    if not session.is_over:
        ended = ended_with(command, session.timeout_s(240.0))
        record.error = f"it {ended.why}" if ended.why else ""
    if not record.error:
        found = read_recording(run)
        record.events = recorded_events(found)
        for kind in ("allocated", "reserved") if found.device in found.statistics else ():
            record.statistics[f"{kind}_bytes.all.peak"] = getattr(found.statistics[found.device], f"{kind}_peak_bytes")
    return record


def run_processes(session: Session) -> bool:
    """Compare every job of tests/accuracy/many; whether each ran and differs only where the cause is known."""
    device = "virtual" if session.rehearsal else "cuda"
    ways = [many.Way(job, ranks, device, "nccl") for job, ranks in (_REHEARSED if session.rehearsal else _ORDER)]
    rows, failed = many.compare_all(ways, session.at_once, session.ends_at - 90.0, session.say)
    session.write("many-processes-cuda", [asdict(row) for row in rows], failed)
    return not failed and all(row.is_same or row.cause for row in rows)


_LAG = str(ROOT / "bench" / "gpu_lag.py")
_SHIPPED = confirming.PIECES
#: In this order: what matters most comes first, as the time may be short.
PIECES = {
    "recordings": _SHIPPED["recordings"],
    "tests": MeasuredPiece("the tests marked gpu", 90.0, run_tests),
    "outside": _SHIPPED["outside"],
    "out-of-memory": _SHIPPED["out-of-memory"],
    "lag": MeasuredPiece("what jobs reserve that use streams", 150.0, lambda session: run_program(session, _LAG)),
    "host": MeasuredPiece("steps and calls: what the host takes", 240.0, host.run),
    "examples": MeasuredPiece("the examples", 160.0, run_examples),
    "processes": MeasuredPiece("real processes against faked ranks", 270.0, run_processes),
    "times": _SHIPPED["times"],
    "calibrate": MeasuredPiece("kernels of a few shapes, as a calibration table", 90.0, run_calibration),
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
    started, is_rehearsal = time.monotonic(), not count_real_gpus()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        went_well = confirming.confirm(
            {name: PIECES[name] for name in args.piece or PIECES}, args.out / RESULTS,
            " ".join(["python -m tests.gpu.confirm", *arguments]), partial(print, flush=True),
            is_rehearsal=is_rehearsal, at_once=args.at_once, patience=args.patience, jobs=args.job,
        )  # fmt: skip
    except FakedistError as error:
        print(error, file=sys.stderr)
        return 2
    kept = confirming.REHEARSAL if is_rehearsal else f"to keep it: python -m tests.accuracy.results {args.out}"
    print(f"{time.monotonic() - started:.0f} s; {kept}")
    return 0 if went_well else 1


if __name__ == "__main__":
    sys.exit(main())
