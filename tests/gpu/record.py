"""Record what the caching allocator does in a set of jobs, on whatever CUDA device there is.

    python -m tests.gpu.record --out DIR [--device real|virtual] [--way bare|profiled] [--like REAL.jsonl.gz]

Every job runs in a process of its own; one that fails does not stop the others: its error is written down in words.
``--way profiled`` runs them under ``fakedist profile`` and takes the events from its journal. ``--like`` makes the
virtual GPU the one of another recording, with its memory to the byte. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.gpu.jobs.catalogue import JOBS, GpuJob, find_jobs
from tests.gpu.journal_events import journal_events
from tests.gpu.machine import driver_version
from tests.gpu.recording import Head, JobRecord, Recording, job_from_json, load

ROOT = Path(__file__).parents[2]
PROFILED = "FAKEDIST_GPU_JOB_PROFILED"  # as in one_job.py, which is not a module here
DEFAULT_GPU = "h200"
#: Variables that change what a job allocates: a recording must not follow the shell it was started from.
_FOREIGN = (
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUDA_LAUNCH_BLOCKING",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How to record.

    Attributes:
        device: "real" or "virtual".
        profiled: Under ``fakedist profile``.
        gpu: The virtual GPU's model.
        memory_bytes: The virtual GPU's memory; None for the model's own.
        at_once: Jobs that run at the same time.
        timeout_s: Seconds that a job may take.
        ends_at: ``time.monotonic()`` after which no further job is started.
    """

    device: str
    profiled: bool = False
    gpu: str = DEFAULT_GPU
    memory_bytes: int | None = None
    at_once: int = 1
    timeout_s: float = 240.0
    ends_at: float = float("inf")


class NothingRanError(Exception):
    """No job of a set could be run at all: there is nothing to say what it would have run on."""


@dataclass
class _Ran:
    """One job's process: its record, and what it said of the device."""

    record: JobRecord
    facts: dict[str, Any] = field(default_factory=dict)


def record(
    jobs: Sequence[GpuJob], way: Way, command: str, told: Callable[[str], None] = lambda line: None
) -> Recording:
    """Run the jobs and collect their records; ``told`` gets a line for each as it ends.

    Raises:
        NothingRanError: None of the jobs could even see its device.
    """

    def run(job: GpuJob) -> _Ran:
        if time.monotonic() > way.ends_at:
            return _Ran(JobRecord(job.name, error="not run: the time was over"))
        started = time.monotonic()
        for _ in range(job.num_runs):
            with tempfile.TemporaryDirectory(prefix="gpu-job-") as directory:
                ran = _run(job, way, Path(directory))
        ran.record.seconds = round(time.monotonic() - started, 1)
        events = f"{len(ran.record.events):7d} events"
        told(f"{way.device} {job.name:<24} {ran.record.seconds:6.1f} s {ran.record.error or events}")
        return ran

    with ThreadPoolExecutor(way.at_once) as pool:
        ran = list(pool.map(run, jobs))
    facts = next((each.facts for each in ran if each.facts), None)
    if facts is None:
        raise NothingRanError("no job could be run: " + (ran[0].record.error if ran else "there are none"))
    head = Head(
        device=way.device,
        way="profiled" if way.profiled else "bare",
        gpu=facts["gpu"],
        capacity_bytes=facts["capacity_bytes"],
        driver=driver_version() if way.device == "real" else "",
        torch=facts["torch"],
        python=facts["python"],
        date=datetime.now(UTC).date().isoformat(),
        command=command,
    )
    return Recording(head, {each.record.name: each.record for each in ran})


def _run(job: GpuJob, way: Way, directory: Path) -> _Ran:
    result = directory / "result.json"
    command = (profile_command if way.profiled else _bare)(job, way, directory, result)
    try:
        environment = job_environment(job, way.profiled)
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=way.timeout_s
        )
    except subprocess.TimeoutExpired:
        return _Ran(JobRecord(job.name, error=f"it did not end within {way.timeout_s:.0f} seconds"))
    if not result.exists():
        return _Ran(JobRecord(job.name, error=_how_it_ended(done)))
    facts = json.loads(result.read_text())
    found = job_from_json(facts.pop("job"))
    if way.profiled and not found.error:
        found.events = journal_events(directory / "run", found.statistics)
    return _Ran(found, facts)


def _bare(job: GpuJob, way: Way, directory: Path, result: Path) -> list[str]:
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "one_job.py"), job.name, str(result)]
    if way.device == "virtual":
        command += ["--device", "virtual", "--gpu", way.gpu]
        command += ["--gpu-memory", str(way.memory_bytes)] if way.memory_bytes is not None else []
    return command


def profile_command(job: GpuJob, way: Way, directory: Path, result: Path, steps: int | None = None) -> list[str]:
    """The job under ``fakedist profile``, its run directory in ``directory``.

    Without ``steps`` it ends by itself and no step is timed.
    """
    world = ["--world-size", str(max(1, job.world_size)), "--rank", "0"]
    world += ["--steps", "1000", "--no-kernels"] if steps is None else ["--steps", str(steps)]
    device = ["--device", "cuda"] if way.device == "real" else ["--device", "virtual", "--gpu", way.gpu]
    if way.device == "virtual" and way.memory_bytes is not None:
        device += ["--gpu-memory", f"{way.memory_bytes}B"]
    script = [str(ROOT / "tests" / "gpu" / "one_job.py"), job.name, str(result)]
    return [sys.executable, "-m", "fakedist", "profile", *world, *device, "-o", str(directory / "run"), *script]


def job_environment(job: GpuJob, profiled: bool) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    environment |= {"PYTHONPATH": str(ROOT), **dict(job.environment)}
    if profiled:
        environment[PROFILED] = "1"
    return environment


def _how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"its process ended with {how} and no result: {said[-1] if said else 'it said nothing'}"


def like(product: str, capacity_bytes: int) -> tuple[str, int]:
    """Model and memory of the virtual GPU that stands in for a GPU of this name and memory.

    Raises:
        LookupError: fakedist knows no such GPU.
    """
    from fakedist.gpu.models.catalogue import GPUS

    for spec in GPUS.values():
        if spec.product == product:
            return spec.name, capacity_bytes
    raise LookupError(f"fakedist knows no GPU that calls itself {product!r}")


def file_name(device: str, way: str) -> str:
    return f"{device}-{way}.jsonl.gz"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the recording into")
    parser.add_argument("--device", choices=("real", "virtual"), default="real")
    parser.add_argument("--way", choices=("bare", "profiled"), default="bare")
    parser.add_argument("--gpu", default=DEFAULT_GPU, help="model of the virtual GPU")
    parser.add_argument("--like", type=Path, help="recording whose GPU the virtual one is to be")
    parser.add_argument("--job", action="append", default=[], choices=JOBS, metavar="NAME", help="repeatable")
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--timeout", type=float, default=240.0, metavar="SECONDS", help="of one job")
    args = parser.parse_args(arguments)
    gpu, memory_bytes = args.gpu, None
    if args.like is not None:
        head = load(args.like).head
        gpu, memory_bytes = like(head.gpu, head.capacity_bytes)
    way = Way(args.device, args.way == "profiled", gpu, memory_bytes, args.at_once, args.timeout)
    try:
        recording = record(find_jobs(args.job), way, " ".join(["python -m tests.gpu.record", *arguments]), print)
    except NothingRanError as error:
        print(error, file=sys.stderr)
        return 2
    path = args.out / file_name(args.device, args.way)
    recording.save(path)
    failed = sum(bool(job.error) for job in recording.jobs.values())
    print(f"{path}: {len(recording.jobs) - failed} jobs on {recording.head.gpu}, {failed} failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
