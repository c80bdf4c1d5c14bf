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
SCRIPTS = Path(__file__).parent / "scripts"
DEFAULT_GPU = "h200"
#: Variables that change what a job allocates: a recording must not follow the shell it was started from.
_FOREIGN = (
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUDA_LAUNCH_BLOCKING",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A way of recording a job.

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
    """No job of a set could be run at all, so it is not known on which device they would have run."""


@dataclass
class _Ran:
    """One job's process: its record, and its facts of the device."""

    record: JobRecord
    facts: dict[str, Any] = field(default_factory=dict)


def record(
    jobs: Sequence[GpuJob], way: Way, command: str, on_line: Callable[[str], None] = lambda line: None
) -> AllocatorRecording:
    """Run the jobs and collect their records; ``on_line`` gets a line for each as it ends.

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
        on_line(f"{way.device} {job.name:<24} {ran.record.seconds:6.1f} s {ran.record.error or events}")
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
    return AllocatorRecording(head, {each.record.name: each.record for each in ran})


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
    command = [sys.executable, str(SCRIPTS / "one_job.py"), job.name, str(result)]
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
    script = [str(SCRIPTS / "one_job.py"), job.name, str(result)]
    return [sys.executable, "-m", "fakedist", "profile", *world, *device, "-o", str(directory / "run"), *script]


def job_environment(job: GpuJob, profiled: bool) -> dict[str, str]:
    """The variables of a job's process: this process's, without those that change what it allocates."""
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    environment |= {"PYTHONPATH": str(ROOT), **dict(job.environment)}
    if profiled:
        environment[PROFILED] = "1"
    return environment


def _how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"its process ended with {how} and no result: {lines[-1] if lines else 'it lines nothing'}"


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
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=120)
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["it last_line nothing"])[-1]
        raise SetupError(f"torch cannot use the GPU of this machine: {last_line}", "fakedist doctor")
    return {**json.loads(done.stdout), "driver": driver_version(), **_versions()}


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
        on_line: Gets each line of the summary as it comes.
        ends_at: ``time.monotonic()`` by which the piece that runs is over.
        lines: The summary, as it grows.
    """

    out: Path
    machine: dict[str, Any]
    jobs: Sequence[GpuJob]
    at_once: int
    rehearsal: bool
    command: str
    on_line: Callable[[str], None]
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
            self.on_line(line)
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
