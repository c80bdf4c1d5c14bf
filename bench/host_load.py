"""Record three jobs alone and with other work, and compare their hosts and verdicts.

    python bench/host_load.py [--times 5] [--only NAME] [--loads alone,1,4,jobs] [--csv FILE]

The jobs are the 70B Llama of ``make demo``, DeepSpeed ZeRO-3 and Megatron-core; a job whose framework is missing is
left out. The loads are none, one and four busy loops, and the same job twice at once, as ``--jobs 2`` runs them. A line
of the table is one job under one load: the host's total for a DGX H100 (median, and how far the recordings are from the
median of all of the job's), the estimated step, the core's slowdown while it was clocked, and the verdicts. The load
average says what else ran. On a machine with other work, no line is of a quiet one.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
_READ = (
    "import json, sys, array, math; from pathlib import Path\n"
    "import fakedist; from fakedist.analysis.recording import read_recording\n"
    "from fakedist.results.verdict import limit_text\n"
    "path = Path(sys.argv[1]); clock = read_recording(path).host_clock; run = fakedist.open(path)\n"
    "time, source = run.summary.timed\n"
    "host_us = sum(us for us in array.array('d', clock.dispatch_us) if us == us) * source.host.scale\n"
    "print(json.dumps([host_us, time.step_us, clock.slowdown, clock.num_repeats, limit_text(time)]))"
)


@dataclass(frozen=True)
class LoadedJob:
    """A job to record: its name, the package that it needs, the number of ranks, and its command."""

    name: str
    package: str
    world_size: int
    command: str


JOBS = [
    LoadedJob("Llama 70B, FSDP2", "torch", 1024, "examples/llama_fsdp2.py --model 70b --tp 8 --checkpoint full"),
    LoadedJob("DeepSpeed ZeRO-3", "deepspeed", 64, "tests/clients/jobs/deepspeed_zero.py --stage 3 --steps 100"),
    LoadedJob(
        "Megatron-core", "megatron.core", 8,
        "examples/megatron_gpt.py --tensor-model-parallel-size 2 --num-layers 4 --hidden-size 512 "
        "--num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --lr 1e-4 --micro-batch-size 1 "
        "--global-batch-size 4 --train-iters 1000 --exit-interval 1000 --bf16 --use-distributed-optimizer "
        "--no-check-for-nan-in-loss-and-grad",
    ),
]  # fmt: skip
#: Busy loops during a recording; "jobs": the same job twice at once.
LOADS = {"alone": 0, "1": 1, "4": 4, "jobs": 0}


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
    with tempfile.TemporaryDirectory() as directory, busy(LOADS[load]):
        paths = [f"{directory}/{number}" for number in range(2 if load == "jobs" else 1)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        }
        options = ["--world-size", str(job.world_size), "--rank", "0", "--device", "virtual", "--no-page"]
        runs = [
            subprocess.Popen(
                [sys.executable, "-m", "fakedist", "profile", *options, "-o", path, *job.command.split()],
                cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for path in paths
        ]  # fmt: skip
        if sum(run.wait() for run in runs):  # waits for all of them
            raise SystemExit(f"{job.name}: a recording failed: {job.command}")
        return [_read(job, load, path, environment) for path in paths]


def _read(job: LoadedJob, load: str, path: str, environment: dict[str, str]) -> Recorded:
    done = subprocess.run(
        [sys.executable, "-c", _READ, path], env=environment, capture_output=True, text=True, check=True
    )
    host_us, step_us, slowdown, num_steps, verdict = json.loads(done.stdout.splitlines()[-1])
    limit = verdict.removeprefix("limited by ").partition(":")[0].partition(" (")[0]
    return Recorded(job.name, load, host_us / 1e3, step_us / 1e3, slowdown, num_steps, limit, os.getloadavg()[0])


def print_job(recordings: Sequence[Recorded]) -> None:
    """A line for each load."""
    of_all = median(recorded.host_ms for recorded in recordings)
    for load in dict.fromkeys(recorded.load for recorded in recordings):
        rows = [recorded for recorded in recordings if recorded.load == load]
        host_ms = [row.host_ms for row in rows]
        off = max(abs(ms / of_all - 1) for ms in host_ms)
        print(
            f"{rows[0].job:<18} {load:>6} {len(rows):3} {median(host_ms):9.1f} ms {median(host_ms) / of_all - 1:+7.1%} "
            f"{off:7.1%} {median(row.step_ms for row in rows):9.1f} ms {median(row.slowdown for row in rows):6.2f} "
            f"{median(row.load_average for row in rows):5.1f}  {', '.join(sorted({row.limited_by for row in rows}))}",
            flush=True,
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="recordings of each job under each load")
    parser.add_argument("--only", default="", help="jobs with this in their name")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--csv", type=Path, help="append every recording to this file")
    arguments = parser.parse_args()
    print(
        f"{'job':<18} {'with':>6} {'n':>3} {'host':>12} {'median':>7} {'most':>7} {'step':>12} {'slower':>6} "
        f"{'load':>5}  limited by"
    )
    for job in JOBS:
        if arguments.only not in job.name:
            continue
        if subprocess.run([sys.executable, "-c", f"import {job.package}"], capture_output=True).returncode:
            print(f"{job.name:<18} not recorded: {job.package} is not installed")
            continue
        recordings = list[Recorded]()
        for _ in range(arguments.times):  # in turns: what else runs changes by the hour
            for load in arguments.loads.split(","):
                made = record(job, load)
                recordings += made
                if arguments.csv is not None:
                    with arguments.csv.open("a", newline="") as file:
                        csv.writer(file).writerows([list(asdict(one).values()) for one in made])
        print_job(recordings)


if __name__ == "__main__":
    main()
