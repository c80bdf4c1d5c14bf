"""Record three jobs alone and with other work in turns, and print how far their hosts and verdicts are apart.

    python bench/host_load.py [--recordings 3] [--minutes 25] [--only NAME] [--loads alone,1,4,jobs] [--csv FILE]

The jobs are layers of the 70B Llama of ``make demo``, DeepSpeed ZeRO-3 and Megatron-core; a job whose framework is
missing is left out. The loads are none, one and four busy loops, and the same job twice at once, as ``--jobs 2`` runs
them. Each round records every job under every load once, so what else runs on the machine meets all of them alike. On
two cores three rounds take at most 25 minutes; no round begins that would end after ``--minutes``, by the longest so
far.

Printed is the table of docs/time.md, in Markdown. A line is one job under one load: the host's total for a DGX H100
(the median of its recordings, how far that is from the median of all of the job's, and how far the furthest recording
is), the estimated step, the core's slowdown while it was clocked, the load average, and what limits the step. A last
line for each job says whether it meets the goal: medians within 10 % of each other, each recording within 20 %, and one
verdict.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from statistics import median

from fakedist.rundir.directory import read_journal
from fakedist.rundir.launch_records import HostClockRecord

ROOT = Path(__file__).parent.parent
#: The goal: how far medians under any two loads may be apart, and a recording from the median of all.
_APART, _OFF = 0.10, 0.20


@dataclass(frozen=True)
class LoadedJob:
    """A job to record: its name, the package that it needs, the number of ranks, and its command."""

    name: str
    package: str
    world_size: int
    command: str


JOBS = [
    LoadedJob(
        "Llama 70B, 4 layers, FSDP2 and TP 8", "torch", 1024,
        "examples/llama_fsdp2.py --model 70b --num-layers 4 --tp 8 --checkpoint full --steps 100",
    ),
    LoadedJob("DeepSpeed ZeRO-3", "deepspeed", 64, "tests/clients/jobs/deepspeed_zero.py --stage 3 --steps 100"),
    LoadedJob(
        "Megatron-core, 4 layers, TP 2", "megatron.core", 8,
        "examples/megatron_gpt.py --tensor-model-parallel-size 2 --num-layers 4 --hidden-size 512 "
        "--num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --lr 1e-4 --micro-batch-size 1 "
        "--global-batch-size 4 --train-iters 1000 --exit-interval 1000 --bf16 --use-distributed-optimizer "
        "--no-check-for-nan-in-loss-and-grad",
    ),
]  # fmt: skip
#: Busy loops during a recording; "jobs": the same job twice at once.
LOADS = {"alone": 0, "1": 1, "4": 4, "jobs": 0}
#: The loads in the table.
WORDS = {"alone": "alone", "1": "one busy loop", "4": "four busy loops", "jobs": "`--jobs 2`"}


@dataclass(frozen=True)
class Recorded:
    """One recording. Times in milliseconds; ``load_average`` is that of the last minute, at its end."""

    job: str
    load: str
    host_ms: float
    step_ms: float
    slowdown: float
    num_steps: int
    limited_by: str
    load_average: float


@contextmanager
def busy(number: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def record(job: LoadedJob, load: str) -> list[Recorded]:
    """Record a job once under a load; with "jobs" twice at once."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    options = ["--world-size", str(job.world_size), "--rank", "0", "--device", "virtual", "--no-page", "--json"]
    command = [sys.executable, "-m", "fakedist", "profile", *options]
    with tempfile.TemporaryDirectory() as directory, busy(LOADS[load]):
        paths = [Path(directory) / str(number) for number in range(2 if load == "jobs" else 1)]
        outputs = [path.with_suffix(".json").open("wb") for path in paths]
        runs = [
            subprocess.Popen(
                [*command, "-o", str(path), *job.command.split()],
                cwd=ROOT, env=environment, stdout=output, stderr=subprocess.DEVNULL,
            )
            for path, output in zip(paths, outputs, strict=True)
        ]  # fmt: skip
        for output in outputs:
            output.close()
        if sum([run.wait() for run in runs]):  # waits for all of them
            raise SystemExit(f"{job.name}: a recording failed: {job.command}")
        return [recorded(job.name, load, path) for path in paths]


def recorded(job: str, load: str, path: Path) -> Recorded:
    """Read a recording in a run directory and its ``--json`` next to it."""
    summary = json.loads(path.with_suffix(".json").read_text())
    records = read_journal(path / "journal.bin")
    clock = next((record for record in records if isinstance(record, HostClockRecord)), None)
    if clock is None or clock.is_recorded:
        raise SystemExit(f"{job}: no bare step was clocked")
    host_us = sum(us for us in array("d", clock.dispatch_us) if not isnan(us)) * summary["kernels"]["host"]["scale"]
    times = summary["time"]
    return Recorded(
        job, load, host_us / 1e3, times["step_us"] / 1e3, clock.slowdown, clock.num_repeats,
        limits_of(times["limits"]), os.getloadavg()[0],
    )  # fmt: skip


def limits_of(limits: Sequence[dict[str, object]]) -> str:
    """The part that would take longest alone: "host", "kernels" or the collectives of a group."""
    first = limits[0]
    return " ".join(filter(None, (str(first["group"]), str(first["kind"]))))


def markdown(recordings: Sequence[Recorded]) -> str:
    """The table: a line for each job and load, and one for each job's goal."""
    lines = [
        "| job | with | n | host | from the job's median | furthest | step | core slower | load average | limited by |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    goals = []
    for job in dict.fromkeys(row.job for row in recordings):
        rows = [row for row in recordings if row.job == job]
        whole_ms, medians_ms = median(row.host_ms for row in rows), []
        for load in dict.fromkeys(row.load for row in rows):
            own = [row for row in rows if row.load == load]
            medians_ms.append(median(row.host_ms for row in own))
            furthest = max((row.host_ms / whole_ms - 1 for row in own), key=abs)
            cells = [
                job,
                WORDS[load],
                str(len(own)),
                f"{medians_ms[-1]:,.1f} ms",
                f"{medians_ms[-1] / whole_ms - 1:+.0%}",
                f"{furthest:+.0%}",
                f"{median(row.step_ms for row in own):,.1f} ms",
                f"{median(row.slowdown for row in own):.2f} x",
                f"{median(row.load_average for row in own):.1f}",
                " or ".join(sorted({row.limited_by for row in own})),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        goals.append(goal(job, rows, medians_ms))
    return "\n".join([*lines, "", *goals])


def goal(job: str, rows: Sequence[Recorded], medians_ms: Sequence[float]) -> str:
    """Whether a job's recordings are as close as they should be, in a sentence."""
    whole_ms = median(row.host_ms for row in rows)
    apart = max(medians_ms) / min(medians_ms) - 1
    off = max(abs(row.host_ms / whole_ms - 1) for row in rows)
    verdicts = len({row.limited_by for row in rows})
    is_met = apart <= _APART and off <= _OFF and verdicts == 1
    said = f"medians at most {apart:.0%} apart, recordings at most {off:.0%} from the median, {verdicts} verdict"
    return f"- {job}: {said}{'s' * (verdicts > 1)}: {'met' if is_met else 'missed'}"


def rounds(jobs: Sequence[LoadedJob], loads: Sequence[str], number: int, limit_s: float) -> Iterator[Recorded]:
    """Record round after round, as far as the time suffices."""
    begin_s = last_s = time.monotonic()
    longest_s = 0.0
    for made in range(number):
        if made and last_s - begin_s + longest_s > limit_s:
            print(f"stopped after {made} of {number} rounds: the next would take too long", file=sys.stderr)
            return
        for load in loads:
            for job in jobs:
                yield from record(job, load)
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=int, default=3, help="recordings of each job under each load")
    parser.add_argument("--minutes", type=float, default=25, help="begin no round that would end later")
    parser.add_argument("--only", default="", help="jobs with this in their name")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--csv", type=Path, help="append every recording to this file")
    arguments = parser.parse_args()
    loads = arguments.loads.split(",")
    if unknown := {*loads} - {*LOADS}:
        parser.error(f"no such load: {', '.join(sorted(unknown))}")
    jobs = []
    for job in JOBS:
        if arguments.only not in job.name:
            continue
        if subprocess.run([sys.executable, "-c", f"import {job.package}"], capture_output=True).returncode:
            print(f"{job.name} is left out: {job.package} is not installed", file=sys.stderr)
        else:
            jobs.append(job)
    recordings = []
    for one in rounds(jobs, loads, arguments.recordings, 60 * arguments.minutes):
        recordings.append(one)
        print(
            f"{one.job}, {WORDS[one.load]}: {one.host_ms:.1f} ms, {one.limited_by}, {one.num_steps} steps",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        if arguments.csv is not None:
            with arguments.csv.open("a", newline="") as file:
                csv.writer(file).writerow(asdict(one).values())
    if recordings:
        print(markdown(recordings))


if __name__ == "__main__":
    main()
