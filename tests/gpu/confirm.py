"""Everything that wants a real GPU, in one call: ``make gpu``.

    python -m tests.gpu.confirm --out gpu-results [--limit 450] [--job NAME ...]

Records the jobs on the real GPU, bare and under ``fakedist profile --device cuda``, then both ways on the virtual GPU
with the same name and memory; times the kernels of those that train and estimates them; runs the tests marked ``gpu``;
compares. Under --out: the two recordings and the times to keep, in a directory named as tests/data/gpu wants it, the
virtual GPU's, ``differences.txt``, ``times.md``, ``summary.txt`` and ``tests.txt``.

Where there is no GPU it rehearses: the virtual GPU takes the real one's place, the results say so, and nothing of them
is fit to be kept. Exit code 0: every job the same everywhere, every test passed. Standard library only, but for pytest.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fakedist.gpu.driver.build import ensure_driver
from fakedist.machine import count_real_gpus
from tests.gpu.compare import Difference, compare, summary
from tests.gpu.jobs.catalogue import JOBS, GpuJob, find_jobs
from tests.gpu.record import ROOT, NothingRanError, Way, file_name, like, record
from tests.gpu.recording import Recording
from tests.gpu.times import compare_times, markdown, run_times
from tests.gpu.times import save as save_times

REHEARSAL = """\
*****************************************************************************************
*  NO GPU HERE: THIS IS A REHEARSAL. The virtual GPU stands in the real one's place, so  *
*  that nothing below says anything about a real GPU. Do not keep these recordings.      *
*****************************************************************************************"""
#: Seconds kept for the tests and the comparison, of all that there are.
_RESERVE_S = 60.0
_TESTS_TOOK_TOO_LONG = 124


@dataclass
class Session:
    """One call.

    Attributes:
        out: Directory of the results.
        jobs: What is recorded.
        at_once: Jobs at the same time.
        ends_at: ``time.monotonic()`` by which all is over.
        rehearsal: Whether the virtual GPU stands in for a real one.
        lines: The summary, as it grows.
    """

    out: Path
    jobs: list[GpuJob]
    at_once: int
    ends_at: float
    rehearsal: bool
    lines: list[str] = field(default_factory=list)

    def say(self, *lines: str) -> None:
        """Print, and keep for summary.txt."""
        print(*lines, sep="\n", flush=True)
        self.lines += lines

    def record(self, name: str, way: Way, command: str) -> Recording:
        """One pass over the jobs; the time that is left bounds it.

        Raises:
            NothingRanError: See :func:`tests.gpu.record.record`.
        """
        started = time.monotonic()
        way = replace(way, at_once=self.at_once, ends_at=self.ends_at - _RESERVE_S)
        left_s = max(30.0, way.ends_at - started)
        recording = record(self.jobs, replace(way, timeout_s=min(150.0, left_s)), command, print)
        failed = [job.name for job in recording.jobs.values() if job.error]
        elapsed_s = time.monotonic() - started
        self.say(
            f"{name:<16} {recording.head.gpu}, torch {recording.head.torch}: "
            f"{len(recording.jobs) - len(failed)} jobs recorded in {elapsed_s:.0f} s, {len(failed)} failed"
        )
        return recording


def record_all(session: Session, command: str) -> dict[str, Recording]:
    """The four recordings by name, the real GPU's first: the others need none and could be made later.

    One that cannot be made at all is left out, after saying why.
    """
    real = Way("virtual") if session.rehearsal else Way("real")
    found: dict[str, Recording] = {}
    for name in ("real bare", "real profiled", "virtual bare", "virtual profiled"):
        way = real
        if name.startswith("virtual"):
            gpu, memory_bytes = like(next(iter(found.values())).head) if found else (real.gpu, None)
            way = Way("virtual", gpu=gpu, memory_bytes=memory_bytes)
        try:
            found[name] = session.record(name, replace(way, profiled=name.endswith("profiled")), command)
        except NothingRanError as error:
            session.say(f"{name}: {error}")
        else:
            save(session, name, found[name])
    return found


def save(session: Session, name: str, recording: Recording) -> None:
    """Write a recording: that of a real GPU into a directory that may be kept as it is."""
    side, _, way = name.partition(" ")
    keep = side == "real" and not session.rehearsal
    directory = session.out / recording.head.directory_name if keep else session.out
    recording.save(directory / file_name("rehearsed" if side == "real" and session.rehearsal else side, way))
    if keep:
        session.say(f"{directory / file_name(side, way)}: keep it in tests/data/gpu/{directory.name}")


def time_all(session: Session, found: dict[str, Recording]) -> None:
    """Time the kernels of the jobs that train, on both sides, as far as the time goes; and compare them."""
    if session.rehearsal or not found:
        session.say("", "kernel times: there is no GPU to measure them on")
        return
    head = next(iter(found.values())).head
    gpu, memory_bytes = like(head)
    ends_at = session.ends_at - _RESERVE_S
    sides = {}
    for name, way in (("measured", Way("real")), ("estimated", Way("virtual", gpu=gpu, memory_bytes=memory_bytes))):
        times = sides[name] = run_times(session.jobs, replace(way, ends_at=ends_at, timeout_s=120.0))
        save_times(times, session.out / head.directory_name / f"times-{name}.json")
        failed = {job: each.error for job, each in times.items() if each.error}
        session.say("", f"kernel times, {name}: {len(times) - len(failed)} jobs, {len(failed)} without")
        session.say(*(f"  {job}: {error}" for job, error in failed.items()))
    table = markdown(compare_times(sides["measured"], sides["estimated"]))
    (session.out / "times.md").write_text(table)
    session.say("", "== kernel times: estimated against measured", table)


def compare_all(session: Session, found: dict[str, Recording]) -> bool:
    """Compare the recordings two by two; whether all of them are there and all jobs the same everywhere."""
    same = len(found) == 4
    with (session.out / "differences.txt").open("w") as file:
        for first, second in (
            ("real bare", "virtual bare"),
            ("real bare", "real profiled"),
            ("virtual bare", "virtual profiled"),
        ):
            if first not in found or second not in found:
                continue
            differences = compare(found[first], found[second])
            title = f"{first} against {second}" + (" (rehearsal: no real GPU)" if session.rehearsal else "")
            session.say("", f"== {title}", *summary(differences))
            _write_differences(title, differences, file.write)
            same = same and all(each.is_same for each in differences)
    return same


def _write_differences(title: str, differences: Sequence[Difference], write: object) -> None:
    assert callable(write)
    for each in differences:
        if not each.is_same:
            write("\n".join([f"== {title}: {each.job}: {each.verdict}: {each.reason}", *each.lines, "", ""]))


def run_tests(session: Session) -> bool:
    """The tests marked ``gpu``; whether they passed."""
    if importlib.util.find_spec("pytest") is None:
        session.say("pytest is not installed here: the tests marked gpu were not run")
        return False
    left_s = max(30.0, session.ends_at - time.monotonic() - 10.0)
    # Whatever plugins this Python has, these tests need none but their own timeout, and that is optional.
    options = ["-m", "gpu", "-q", "-ra", "-p", "no:cacheprovider", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu"]
    with (session.out / "tests.txt").open("w") as file:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=left_s).returncode
        except subprocess.TimeoutExpired:
            code = _TESTS_TOOK_TOO_LONG
    lines = (session.out / "tests.txt").read_text().splitlines()
    session.say("", "== tests marked gpu", *lines[-12:])
    return code == 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--limit", type=float, default=450.0, metavar="SECONDS", help="for everything together")
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="jobs at a time")
    parser.add_argument("--job", action="append", default=[], choices=JOBS, metavar="NAME", help="repeatable")
    args = parser.parse_args(arguments)
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = find_jobs(args.job)
    session = Session(args.out, jobs, args.at_once, started + args.limit, rehearsal=count_real_gpus() == 0)
    if session.rehearsal:
        session.say(REHEARSAL)
    ensure_driver()  # once, before many processes want it
    found = record_all(session, " ".join(["python -m tests.gpu.confirm", *arguments]))
    time_all(session, found)
    passed = run_tests(session)
    same = compare_all(session, found)
    session.say("", f"{time.monotonic() - started:.0f} s; results in {args.out}")
    if session.rehearsal:
        session.say(REHEARSAL)
    (args.out / "summary.txt").write_text("\n".join(session.lines) + "\n")
    return 0 if same and passed else 1


if __name__ == "__main__":
    sys.exit(main())
