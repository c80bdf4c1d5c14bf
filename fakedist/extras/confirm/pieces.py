"""The pieces of ``fakedist confirm``: each returns whether it went well, and writes the rows of its tables.

Record the caching allocator's history in a set of jobs, on the real GPU or on a virtual one of its model and memory.

Every job runs in a process of its own. The error of one that fails becomes part of its record, and the others go on.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fakedist.analysis.recording import read_recording
from fakedist.errors import JobError, SetupError
from fakedist.extras.confirm.allocator_history import (
    AllocatorRecording,
    Head,
    HistoryDifference,
    JobRecord,
    compare,
    job_from_json,
    recorded_events,
    summary,
)
from fakedist.extras.confirm.jobs import MOST_GIB, PROFILED, GpuJob
from fakedist.gpu.driver.build import torch_build
from fakedist.gpu.models.catalogue import GPUS, find_gpu

#: The folder that holds the package, which the processes import from, and what they run.
ROOT = Path(__file__).parents[3]
START = Path(__file__).parent / "scripts" / "start.py"
MEASURES = "fakedist.extras.confirm.scripts.measures"
ONE_JOB = f"{MEASURES}:one_job"
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
    jobs: Sequence[GpuJob], way: Way, command: str, on_line: Callable[[str], None] = lambda line: None
) -> AllocatorRecording:
    """Run the jobs and collect their records; ``on_line`` gets a line for each as it ends.

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
        found.events = recorded_events(read_recording(directory / "run"), found.statistics)
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
#: Seconds that a piece keeps for writing its results.
_RESERVE_S = 15.0


@dataclass
class Session:
    """One confirmation while it is made.

    Attributes:
        file: Where it goes. A piece writes into the same folder what it does not hold.
        machine: ``gpu``, ``capacity_bytes``, ``driver``, ``torch``, ``python``.
        jobs: Jobs of the accuracy set.
        at_once: Processes at the same time.
        rehearsal: Whether the virtual GPU stands in for a real one.
        command: What was typed.
        on_line: Gets each line of the summary as it comes.
        ends_at: ``time.monotonic()`` by which the piece that runs is over.
        tables, recordings, log: See :class:`fakedist.extras.confirm.confirming.Confirmation`; they grow.
    """

    file: Path
    machine: dict[str, Any]
    jobs: Sequence[GpuJob]
    at_once: int
    rehearsal: bool
    command: str
    on_line: Callable[[str], None]
    ends_at: float = float("inf")
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    recordings: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

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

    def say(self, *lines: str) -> None:
        """Add lines to the summary."""
        for line in lines:
            self.on_line(line)
        self.log += lines

    def write(self, name: str, rows: Sequence[Row], failed: Sequence[str] = ()) -> None:
        """Keep the data of a table of docs/accuracy/results.md, and why rows are missing."""
        head = {"date": datetime.now(UTC).date().isoformat(), **self.machine, "command": self.command}
        head.pop("capacity_bytes")
        head |= {"failed": list(failed)} if failed else {}
        head |= {"rehearsal": True} if self.rehearsal else {}
        self.tables[name] = {"head": head, "rows": list(rows)}
        self.say(f"{name}: {len(rows)} rows", *(f"  missing: {text}" for text in failed))

    def keep(self, way: str, recording: AllocatorRecording) -> None:
        """Keep what a real GPU, or its stand-in, recorded: "bare" or "profiled"."""
        model = f"{self.machine['gpu'].lower().replace(' ', '-')}-torch{self.machine['torch'].partition('+')[0]}"
        name = f"{model}/{'rehearsed' if self.rehearsal else 'real'}-{way}.jsonl.gz"
        self.recordings[name] = base64.b64encode(recording.packed()).decode()


#: Trials of a job that grows: one without a limit, then by the allocator's and by the device's.
NUM_TRIALS = 1 + 2 * MOST_GIB
#: Jobs that train, three steps or more.
_TRAIN = ("transformer_", "amp_", "fp8", "compiled", "convnet", "lstm", "moe_", "ddp_", "fsdp2_")
#: Copies that stand for communication take no time in the real job.
LEFT_OUT = "communication"
#: Families of less than this share of a job's time are not compared one by one.
MIN_SHARE = 0.02


def _timed(session: Session, job: GpuJob, run: Path, *, measured: bool) -> Any:
    """The table ``kernels`` of a job's timed step, with layers; or why there are no times, in words.

    They are measured with CUPTI, in a rehearsal the virtual GPU's; else estimated.
    """
    if session.is_over:
        return TIME_IS_OVER
    try:
        from fakedist.results.opening import open_run
    except ImportError as error:
        return f"{error.name} is not installed here"
    way = session.real if measured else session.virtual
    script = [str(START), ONE_JOB, job.name, str(run.with_suffix(".json"))]
    command = profile_command(job, way, run, script, steps=1 if measured else 3)
    environment = job_environment(job, profiled=True)
    if measured and way.device == "virtual":
        environment["FAKEDIST_REHEARSE"] = "cupti"
    ended = ended_with(command, way.timeout_s, folder=run.parent, environment=environment)
    if ended.why:
        return f"it {ended.why}"
    opened = open_run(run)
    if opened.time is None:
        return next((note.text for note in opened.summary.notes if "kernel" in note.text), "no kernels")
    return opened.time.kernels()


def compared_times(job: str, measured: Any, estimated: Any) -> list[Row]:
    """A job's kernels both ways: in total; by family, the largest first; and of the layer that is furthest off."""
    from fakedist.results.compare.change_tables import side_by_side

    sides = [side[side["family"].astype(str) != LEFT_OUT] for side in (measured, estimated)]
    families, layers = (
        side_by_side(
            [
                side["duration_us"].groupby(side[key].astype(str)).sum().rename_axis("name").reset_index(name="{}_us")
                for side in sides
            ],
            ["name"],
            "us",
        )[["name", "a_us", "b_us"]]
        for key in ("family", "layer_name")
    )
    total = families[["a_us", "b_us"]].sum()
    least_us = max(MIN_SHARE * total["a_us"], 1e-3)
    families, layers = (table[table["a_us"] >= least_us] for table in (families, layers))
    order = (layers["b_us"] / layers["a_us"] - 1).abs().sort_values(ascending=False, kind="stable").index
    names = ("layer " + layers["name"].where(layers["name"] != "", "(outside of modules)")).rename("name")
    found = [
        ("total", *total),
        *families.sort_values("a_us", ascending=False, kind="stable").itertuples(index=False, name=None),
        *layers.assign(name=names).loc[order[:1]].itertuples(index=False, name=None),
    ]
    return [
        {"job": job, "what": what, "measured_us": round(real_us, 3), "estimated_us": round(us, 3)}
        for what, real_us, us in found
        if real_us
    ]


class ScriptFailedError(Exception):
    """A script that left no result, with its last line."""


def run_script(session: Session, way: Way, name: str, job: GpuJob | None = None) -> Any:
    """Run scripts/start.py with a function, and read its result, also that of one that failed after writing it.

    Raises:
        ScriptFailedError: It wrote none.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-script-") as text:
        result = Path(text) / "result.json"
        command = [str(START), name, *([job.name] if job else []), str(result), *way.device_options]
        environment = job_environment(job, profiled=False)
        ended = ended_with(command, session.timeout_s(240.0), folder=Path(text), environment=environment)
        if not result.exists():
            raise ScriptFailedError(f"it {ended.why or 'left no result'}")
        if ended.why:
            session.say(f"{name} {ended.why}")
        return json.loads(result.read_text())


#: Recording and the names it is compared by, with the prefix of the columns of gpu-recordings.json.
_COMPARED = (
    ("real bare", "virtual bare", "virtual"),
    ("real bare", "real profiled", "recorded"),
    ("virtual bare", "virtual profiled", ""),
)


def run_recordings(session: Session) -> bool:
    """Record and compare; whether every job could be recorded in every way."""
    found: dict[str, AllocatorRecording] = {}
    for name in ("real bare", "virtual bare", "real profiled", "virtual profiled"):
        side, _, way = name.partition(" ")
        try:
            given = session.real if side == "real" else session.virtual
            found[name] = _record(session, name, replace(given, profiled=way == "profiled"))
        except NothingRanError as error:
            session.say(f"{name}: {error}")
            continue
        if side == "real":
            session.keep(way, found[name])
    compared = _compare(session, found)
    session.write("gpu-recordings", _rows(found.get("real bare"), compared))
    return len(found) == len({name for pair in _COMPARED for name in pair[:2]}) and not any(
        job.error for recording in found.values() for job in recording.jobs.values()
    )


def _record(session: Session, name: str, way: Way) -> AllocatorRecording:
    started = time.monotonic()
    recording = record(session.jobs, way, session.command, session.on_line)
    failed = [job.name for job in recording.jobs.values() if job.error]
    session.say(
        f"{name:<16} {recording.head.gpu}, torch {recording.head.torch}: {len(recording.jobs) - len(failed)} jobs "
        f"recorded in {time.monotonic() - started:.0f} s, {len(failed)} failed"
    )
    return recording


def _compare(session: Session, found: Mapping[str, AllocatorRecording]) -> dict[str, dict[str, HistoryDifference]]:
    compared = {}
    for first, second, prefix in _COMPARED:
        if first in found and second in found:
            differences = compare(found[first], found[second])
            title = f"{first} against {second}" + (" (rehearsal: no real GPU)" if session.rehearsal else "")
            session.say("", f"== {title}", *summary(differences))
            session.log += [line for each in differences for line in each.text()]
            compared[prefix] = {each.job: each for each in differences}
    return compared


def _rows(
    real: AllocatorRecording | None, compared: Mapping[str, Mapping[str, HistoryDifference]]
) -> list[dict[str, str | int]]:
    return [
        {
            "job": job.name,
            **peaks(job),
            **columns("virtual", compared.get("virtual", {}).get(job.name)),
            **columns("recorded", compared.get("recorded", {}).get(job.name)),
        }
        for job in (real.jobs.values() if real is not None else ())
    ]


def peaks(job: JobRecord) -> dict[str, int]:
    """A row's cells on the real GPU."""
    return {
        "num_events": len(job.events),
        "allocated_bytes": job.peak_allocated_bytes,
        "reserved_bytes": job.peak_reserved_bytes,
    }


def columns(prefix: str, found: HistoryDifference | None) -> dict[str, str | int]:
    """A row's cells on another side."""
    difference = found or HistoryDifference("", "not compared")
    return {
        f"{prefix}_verdict": difference.verdict,
        f"{prefix}_reason": difference.reason,
        f"{prefix}_allocated_difference_bytes": difference.peaks[2] - difference.peaks[0],
        f"{prefix}_reserved_difference_bytes": difference.peaks[3] - difference.peaks[1],
    }


def run_out_of_memory(session: Session) -> bool:
    """Shrink the memory by GiB on both sides; whether both ran."""
    failed: list[str] = []

    def trials_of(side: str) -> dict[tuple[str, int], Any]:
        try:
            found = run_script(session, session.real if side == "real" else session.virtual, f"{MEASURES}:growing")
        except ScriptFailedError as error:
            failed.append(f"the {side} GPU: {error}")
            return {}
        if len(found) < NUM_TRIALS:
            failed.append(f"the {side} GPU: the time was over after {len(found)} of {NUM_TRIALS} trials")
        return {(row["limit"], row["gib"]): row["found"] for row in found}

    with ThreadPoolExecutor(2) as pool:  # one of them needs no GPU
        sides = dict(zip(("real", "virtual"), pool.map(trials_of, ("real", "virtual")), strict=True))
    trials = list(dict.fromkeys([*sides["real"], *sides["virtual"]]))
    rows = [
        {"limit": limit, "gib": gib, **{side: found.get((limit, gib)) for side, found in sides.items()}}
        for limit, gib in trials
    ]
    same = sum(row["real"] == row["virtual"] for row in rows)
    session.say(f"out of memory: {same} of {len(rows)} trials end at the same allocation")
    session.write("gpu-out-of-memory", rows, failed)
    return not failed


def run_outside(session: Session) -> bool:
    """The memory outside the allocator; whether every library could be used."""
    try:
        rows = run_script(session, session.real, f"{MEASURES}:outside")
    except ScriptFailedError as error:
        session.write("gpu-outside", [], [str(error)])
        return False
    for row in rows:
        session.say(f"{row['after']:<48} {row['used_bytes'] - row['reserved_bytes']:>14,} bytes  {row['error']}")
    failed = [f"{row['after']}: {row['error']}" for row in rows if row["error"]]
    session.write("gpu-outside", [row for row in rows if not row["error"]], failed)
    return not failed


def run_kernel_times(session: Session) -> bool:
    """Time a step of each job that trains; whether each has times on both sides."""
    jobs = [job for job in session.jobs if job.name.startswith(_TRAIN)]
    rows, failed = [], []
    with tempfile.TemporaryDirectory(prefix="gpu-times-") as text, ThreadPoolExecutor(session.at_once) as pool:
        # On the GPU one after the other: they would slow each other down.
        measured = [_timed(session, job, Path(text, f"real-{job.name}"), measured=True) for job in jobs]
        estimated = pool.map(lambda job: _timed(session, job, Path(text, job.name), measured=False), jobs)
        for job, *sides in zip(jobs, measured, estimated, strict=True):
            named = zip(("measured", "estimated"), sides, strict=True)
            errors = [f"{job.name}, {name}: {side}" for name, side in named if isinstance(side, str)]
            failed += errors
            rows += [] if errors else compared_times(job.name, *sides)
    session.write("gpu-estimates", rows, failed)
    return not failed
