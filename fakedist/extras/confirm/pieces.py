"""The pieces of ``fakedist confirm``: each returns whether it went well, and writes the rows of its tables."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from fakedist.extras.confirm.allocator_history import (
    AllocatorRecording,
    HistoryDifference,
    JobRecord,
    compare,
    summary,
)
from fakedist.extras.confirm.jobs import MOST_GIB, GpuJob
from fakedist.extras.confirm.recorded_jobs import (
    ONE_JOB,
    SCRIPTS,
    START,
    TIME_IS_OVER,
    NothingRanError,
    Session,
    Way,
    ended_with,
    job_environment,
    profile_command,
    record,
)

#: Trials of a job that grows: one without a limit, then by the allocator's and by the device's.
NUM_TRIALS = 1 + 2 * MOST_GIB
#: Jobs that train, three steps or more.
_TRAIN = ("transformer_", "amp_", "fp8", "compiled", "convnet", "lstm", "moe_", "ddp_", "fsdp2_")
#: Copies that stand for communication take no time in the real job.
LEFT_OUT = "communication"
#: Families of less than this share of a job's time are not compared one by one.
MIN_SHARE = 0.02


@dataclass
class StepKernels:
    """Kernel times of one step of one job.

    Attributes:
        by_family: Microseconds by family.
        by_layer: Microseconds by layer, its own.
        num_kernels: Kernels.
        error: Why there are none; empty where there are.
    """

    by_family: dict[str, float] = field(default_factory=dict)
    by_layer: dict[str, float] = field(default_factory=dict)
    num_kernels: int = 0
    error: str = ""

    @property
    def total_us(self) -> float:
        """All of it but communication."""
        return sum(us for family, us in self.by_family.items() if family != LEFT_OUT)


@dataclass(frozen=True)
class Compared:
    """One job, or one family of one job, both ways; microseconds."""

    job: str
    what: str
    measured_us: float
    estimated_us: float

    @property
    def error(self) -> float:
        """How far the estimate is off, as a share of what was measured."""
        return self.estimated_us / self.measured_us - 1 if self.measured_us else float("inf")


def run_times(jobs: Sequence[GpuJob], way: Way, *, measured: bool) -> dict[str, StepKernels]:
    """Time a step of each job that trains, one after the other: they would slow each other down.

    Args:
        jobs: The jobs.
        way: Where they run.
        measured: With CUPTI, in a rehearsal the virtual GPU's; else estimated.
    """
    found = {}
    for job in jobs:
        if not job.name.startswith(_TRAIN):
            continue
        if time.monotonic() > way.ends_at:
            found[job.name] = StepKernels(error=TIME_IS_OVER)
            continue
        with tempfile.TemporaryDirectory(prefix="gpu-times-") as directory:
            found[job.name] = _run(job, way, Path(directory), measured)
    return found


def _run(job: GpuJob, way: Way, directory: Path, measured: bool) -> StepKernels:
    run, script = directory / "run", [str(START), ONE_JOB, job.name, str(directory / "result.json")]
    command = profile_command(job, way, run, script, steps=1 if measured else 3)
    environment = job_environment(job, profiled=True)
    if measured and way.device == "virtual":
        environment["FAKEDIST_REHEARSE"] = "cupti"
    ended = ended_with(command, way.timeout_s, folder=directory, environment=environment)
    return StepKernels(error=f"it {ended.why}") if ended.timed_out else read_times(run)


def read_times(run_directory: Path) -> StepKernels:
    """Sums over the kernels of a run, from its tables."""
    try:
        from fakedist.results.opening import open_run
    except ImportError as error:
        return StepKernels(error=f"{error.name} is not installed here")
    run = open_run(run_directory)
    if run.time is None:
        notes = [note.text for note in run.summary.notes if "kernel" in note.text]
        return StepKernels(error=notes[0] if notes else "no kernels")
    kernels = run.time.kernels()
    families = kernels.groupby("family")["duration_us"].sum()
    own = kernels[kernels["family"] != LEFT_OUT].groupby("layer_name")["duration_us"].sum()
    return StepKernels(
        by_family={str(name): round(us, 3) for name, us in families.items() if us},
        by_layer={str(layer): round(us, 3) for layer, us in own.items() if us},
        num_kernels=int((kernels["family"] != LEFT_OUT).sum()),
    )


def compare_times(measured: Mapping[str, StepKernels], estimated: Mapping[str, StepKernels]) -> list[Compared]:
    """Each job that both have, in total; then its families, the largest first; then its layer that is furthest off."""
    found = []
    for job, real in measured.items():
        other = estimated.get(job)
        if other is None or real.error or other.error or not real.total_us:
            continue
        found.append(Compared(job, "total", real.total_us, other.total_us))
        for family in sorted(real.by_family, key=lambda name: -real.by_family[name]):
            us = real.by_family[family]
            if family != LEFT_OUT and us >= MIN_SHARE * real.total_us:
                found.append(Compared(job, family, us, other.by_family.get(family, 0.0)))
        layers = [
            Compared(job, f"layer {name or '(outside of modules)'}", us, other.by_layer.get(name, 0.0))
            for name, us in real.by_layer.items()
            if us >= MIN_SHARE * real.total_us
        ]
        found += sorted(layers, key=lambda each: -abs(each.error))[:1]
    return found


class ScriptFailedError(Exception):
    """It left no result; its last words."""


def run_script(session: Session, way: Way, name: str, job: GpuJob | None = None) -> Any:
    """Run scripts/start.py with a module, and read its result, also that of one that failed after writing it.

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
        directory = session.recordings if side == "real" else session.others
        found[name].save(directory / f"{'rehearsed' if side == 'real' and session.rehearsal else side}-{way}.jsonl.gz")
    compared = _compare(session, found)
    session.write("gpu-recordings", _rows(found.get("real bare"), compared))
    return len(found) == len({name for pair in _COMPARED for name in pair[:2]}) and not any(
        job.error for recording in found.values() for job in recording.jobs.values()
    )


def _record(session: Session, name: str, way: Way) -> AllocatorRecording:
    started = time.monotonic()
    recording = record(session.jobs, way, session.command, session.told)
    failed = [job.name for job in recording.jobs.values() if job.error]
    session.say(
        f"{name:<16} {recording.head.gpu}, torch {recording.head.torch}: {len(recording.jobs) - len(failed)} jobs "
        f"recorded in {time.monotonic() - started:.0f} s, {len(failed)} failed"
    )
    return recording


def _compare(session: Session, found: Mapping[str, AllocatorRecording]) -> dict[str, dict[str, HistoryDifference]]:
    compared = {}
    with (session.others / "differences.txt").open("w") as file:
        for first, second, prefix in _COMPARED:
            if first not in found or second not in found:
                continue
            differences = compare(found[first], found[second])
            title = f"{first} against {second}" + (" (rehearsal: no real GPU)" if session.rehearsal else "")
            session.say("", f"== {title}", *summary(differences))
            for each in differences:
                _write(file, title, each)
            compared[prefix] = {each.job: each for each in differences}
    return compared


def _write(file: TextIO, title: str, each: HistoryDifference) -> None:
    if not each.is_same:
        file.write("\n".join([f"== {title}: {each.job}: {each.verdict}: {each.reason}", *each.lines, "", ""]))


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
            found = run_script(session, session.real if side == "real" else session.virtual, f"{SCRIPTS}.growing")
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
        rows = run_script(session, session.real, f"{SCRIPTS}.outside")
    except ScriptFailedError as error:
        session.write("gpu-outside", [], [str(error)])
        return False
    for row in rows:
        session.say(f"{row['after']:<48} {row['used_bytes'] - row['reserved_bytes']:>14,} bytes  {row['error']}")
    failed = [f"{row['after']}: {row['error']}" for row in rows if row["error"]]
    session.write("gpu-outside", [row for row in rows if not row["error"]], failed)
    return not failed


def run_kernel_times(session: Session) -> bool:
    """Time them all; whether each has times on every side."""
    # One after the other: they would slow each other down.
    measured = run_times(session.jobs, session.real, measured=True)
    with ThreadPoolExecutor(session.at_once) as pool:
        each = pool.map(lambda job: run_times([job], session.virtual, measured=False), session.jobs)
        estimated = {name: times for found in each for name, times in found.items()}
    compared = compare_times(measured, estimated)
    failed = _errors("measured", measured) + _errors("estimated", estimated)
    session.write("gpu-estimates", [asdict(each) for each in compared], failed)
    costs, not_bare = _costs(session, measured)
    session.write("gpu-recording-cost", costs, not_bare)
    return not failed and not not_bare


def _errors(side: str, times: dict[str, StepKernels]) -> list[str]:
    return [f"{job}, {side}: {each.error}" for job, each in times.items() if each.error]


def _costs(session: Session, measured: dict[str, StepKernels]) -> tuple[list[dict[str, Any]], list[str]]:
    """Jobs of one rank, one after another: kernels without fakedist, and under it."""
    rows, failed = [], []
    for job in session.jobs:
        times = measured.get(job.name)
        if times is None or times.error or job.world_size:
            continue
        if session.is_over:
            failed.append(f"{job.name}, bare: {TIME_IS_OVER}")
            continue
        try:
            bare = run_script(session, session.real, f"{SCRIPTS}.third_step", job)
        except ScriptFailedError as error:
            failed.append(f"{job.name}, bare: {error}")
            continue
        rows.append({"job": job.name, "bare_us": bare["kernels_us"], "recorded_us": sum(times.by_family.values())})
    return rows, failed
