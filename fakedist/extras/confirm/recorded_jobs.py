"""Record the caching allocator's history in a set of jobs, on the real GPU or on a virtual one of its model and memory.

Every job runs in a process of its own. The error of one that fails becomes part of its record, and the others go on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fakedist.errors import JobError, SetupError
from fakedist.extras.confirm.allocator_history import AllocatorRecording, Head, JobRecord, job_from_json, journal_events
from fakedist.extras.confirm.jobs import PROFILED, GpuJob
from fakedist.gpu.driver.build import torch_build
from fakedist.gpu.models.catalogue import GPUS, find_gpu

#: The folder that holds the package, which the processes import from, and the folder of their scripts.
ROOT = Path(__file__).parents[3]
START = Path(__file__).parent / "scripts" / "start.py"
SCRIPTS = "fakedist.extras.confirm.scripts"
ONE_JOB = f"{SCRIPTS}.one_job"
TIME_IS_OVER = "not run: the time was over"
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

    @property
    def device_options(self) -> list[str]:
        """Options of ``fakedist profile``, and of scripts/start.py."""
        if self.device == "real":
            return ["--device", "cuda"]
        memory = [] if self.memory_bytes is None else ["--gpu-memory", f"{self.memory_bytes}B"]
        return ["--device", "virtual", "--gpu", self.gpu, *memory]


class NothingRanError(Exception):
    """No job of a set could be run at all, so it is not known on which device they would have run."""


@dataclass
class _Ran:
    """One job's process: its record, and what it said of the device."""

    record: JobRecord
    facts: dict[str, Any] = field(default_factory=dict)


def record(
    jobs: Sequence[GpuJob], way: Way, command: str, told: Callable[[str], None] = lambda line: None
) -> AllocatorRecording:
    """Run the jobs and collect their records; ``told`` gets a line for each as it ends.

    Raises:
        NothingRanError: None of the jobs could even see its device.
    """

    def run(job: GpuJob) -> _Ran:
        if time.monotonic() > way.ends_at:
            return _Ran(JobRecord(job.name, error=TIME_IS_OVER))
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
        driver=driver_version() if way.device == "real" else "",
        date=datetime.now(UTC).date().isoformat(),
        command=command,
        **facts,
    )
    return AllocatorRecording(head, {each.record.name: each.record for each in ran})


def _run(job: GpuJob, way: Way, directory: Path) -> _Ran:
    result = directory / "result.json"
    script = [str(START), ONE_JOB, job.name, str(result)]
    command = profile_command(job, way, directory / "run", script) if way.profiled else [*script, *way.device_options]
    ended = ended_with(command, way.timeout_s, folder=directory, environment=job_environment(job, way.profiled))
    if ended.timed_out or not result.exists():
        return _Ran(JobRecord(job.name, error=f"no result: its process {ended.why or 'ended well'}"))
    facts = json.loads(result.read_text())
    found = job_from_json(facts.pop("job"))
    if way.profiled and not found.error:
        found.events = journal_events(directory / "run", found.statistics)
    return _Ran(found, facts)


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended: what it printed, and ``why`` that is not well, in words; empty if it is."""

    output: str = ""
    why: str = ""
    timed_out: bool = False


def ended_with(
    arguments: Sequence[str], timeout_s: float, *, folder: Path = ROOT, environment: Mapping[str, str] | None = None
) -> ProcessEnd:
    """Run Python with these arguments until its end, for so many seconds at most."""
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=max(timeout_s, 0.0)
        )
    except subprocess.TimeoutExpired:
        return ProcessEnd(why=f"did not end within {timeout_s:.0f} seconds", timed_out=True)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    why = f"ended with {how}: {lines[-1] if lines else 'it said nothing'}" if done.returncode else ""
    return ProcessEnd(done.stdout, why)


def profile_command(
    job: GpuJob, way: Way, run_directory: Path, script: Sequence[str], steps: int | None = None
) -> list[str]:
    """The script of a job under ``fakedist profile``. Without ``steps`` it ends by itself and no step is timed."""
    world = ["--world-size", str(max(1, job.world_size)), "--rank", "0"]
    world += ["--steps", "1000", "--no-kernels"] if steps is None else ["--steps", str(steps)]
    return ["-m", "fakedist", "profile", *world, *way.device_options, "-o", str(run_directory), *script]


def job_environment(job: GpuJob | None, profiled: bool) -> dict[str, str]:
    """The variables of a job's process: this process's, without those that change what it allocates."""
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    environment |= {"PYTHONPATH": str(ROOT), **dict(job.environment if job else ())}
    return environment | ({PROFILED: "1"} if profiled else {})


def like(product: str, capacity_bytes: int) -> tuple[str, int]:
    """Model and memory of the virtual GPU that stands in for a GPU of this name and memory.

    Raises:
        JobError: fakedist knows no such GPU.
    """
    for spec in GPUS.values():
        if spec.product == product:
            return spec.name, capacity_bytes
    raise JobError(f"fakedist does not know a GPU with the name {product!r}", f"it knows {', '.join(GPUS)}")


_LOOK = """
import json, torch
found = torch.cuda.get_device_properties(0)
print(json.dumps({"gpu": found.name, "capacity_bytes": found.total_memory}))
"""


def driver_version() -> str:
    """The NVIDIA driver's version, from the kernel module; empty where it cannot be read."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def real_machine() -> dict[str, Any]:
    """``gpu``, ``capacity_bytes``, ``driver``, ``torch``, ``python`` of the real GPU.

    Raises:
        SetupError: torch cannot use it.
    """
    looked = ended_with(["-c", _LOOK], 120.0)
    if looked.why:
        raise SetupError(f"torch cannot use the GPU of this machine: looking for it {looked.why}", "fakedist doctor")
    return {**json.loads(looked.output), "driver": driver_version(), **_versions()}


def rehearsed_machine(gpu: str) -> dict[str, Any]:
    """Describe the virtual GPU that stands in for a real one, like :func:`real_machine`."""
    spec = find_gpu(gpu)
    return {"gpu": spec.product, "capacity_bytes": spec.memory_bytes, "driver": "", **_versions()}


def _versions() -> dict[str, str]:
    return {"torch": torch_build()[0], "python": sys.version.split()[0]}


Row = dict[str, Any]
#: Where the results of measurements and recordings go, and what a rehearsal calls its files.
MEASURED, RECORDINGS, REHEARSED = "accuracy", "recordings", "rehearsal-"
#: Seconds that a piece keeps for writing its results.
_RESERVE_S = 15.0


@dataclass
class Session:
    """One confirmation.

    Attributes:
        out: Directory of the results.
        machine: ``gpu``, ``capacity_bytes``, ``driver``, ``torch``, ``python``.
        jobs: Jobs of the accuracy set.
        at_once: Processes at the same time.
        rehearsal: Whether the virtual GPU stands in for a real one.
        command: What was typed.
        told: Gets each line of the summary as it comes.
        ends_at: ``time.monotonic()`` by which the piece that runs is over.
        lines: The summary, as it grows.
    """

    out: Path
    machine: dict[str, Any]
    jobs: Sequence[GpuJob]
    at_once: int
    rehearsal: bool
    command: str
    told: Callable[[str], None]
    ends_at: float = float("inf")
    lines: list[str] = field(default_factory=list)

    @property
    def real(self) -> Way:
        """How a job runs on the real GPU, or on what stands in its place."""
        return self.virtual if self.rehearsal else self._way("real")

    @property
    def virtual(self) -> Way:
        """How a job runs on the virtual GPU: of the real one's model and memory."""
        return self._way("virtual")

    def _way(self, device: str) -> Way:
        gpu, memory_bytes = like(self.machine["gpu"], self.machine["capacity_bytes"])
        return Way(device, False, gpu, memory_bytes, self.at_once, self.timeout_s(150.0), self.ends_at - _RESERVE_S)

    def timeout_s(self, most: float = 600.0) -> float:
        """Seconds that a process that begins now may take."""
        return min(most, max(1.0, self.ends_at - _RESERVE_S - time.monotonic()))

    @property
    def is_over(self) -> bool:
        """Whether no further process should begin."""
        return time.monotonic() > self.ends_at - _RESERVE_S

    @property
    def recordings(self) -> Path:
        """Where recordings of the real GPU go, or those of its stand-in."""
        name = f"{self.machine['gpu'].lower().replace(' ', '-')}-torch{self.machine['torch'].partition('+')[0]}"
        return self.out / "rehearsal" / name if self.rehearsal else self.out / RECORDINGS / name

    @property
    def others(self) -> Path:
        """Where results go that are not kept."""
        directory = self.out / ("rehearsal" if self.rehearsal else "others")
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def say(self, *lines: str) -> None:
        """Add lines to the summary."""
        for line in lines:
            self.told(line)
        self.lines += lines

    def write(self, name: str, rows: Sequence[Row], failed: Sequence[str] = ()) -> None:
        """Write the data of a table of docs/accuracy/results.md, and why rows are missing."""
        head = {"date": datetime.now(UTC).date().isoformat(), **self.machine, "command": self.command}
        head.pop("capacity_bytes")
        head |= {"failed": list(failed)} if failed else {}
        if self.rehearsal:
            path = self.out / "rehearsal" / f"{REHEARSED}{name}.json"
            head["rehearsal"] = True
        else:
            path = self.out / MEASURED / f"{name}.json"
        write_rows(path, head, rows)
        self.say(f"{path.name}: {len(rows)} rows", *(f"  missing: {text}" for text in failed))


def write_rows(path: Path, head: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write a table's data as JSON, a row on each line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"head": {json.dumps(head)},\n"rows": [\n{lines}\n]}}\n')
