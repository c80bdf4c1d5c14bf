"""Kernel times of the recorded jobs: measured on a GPU, estimated on the virtual one, and both compared.

The jobs train for three steps: on a GPU the first is recorded, the second warms up, the third is timed; on the virtual
GPU the third is estimated.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fakedist.extras.confirm.jobs import GpuJob
from fakedist.extras.confirm.recorded_jobs import Way, job_environment, profile_command

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
            found[job.name] = StepKernels(error="not run: the time was over")
            continue
        with tempfile.TemporaryDirectory(prefix="gpu-times-") as directory:
            found[job.name] = _run(job, way, Path(directory), measured)
    return found


def _run(job: GpuJob, way: Way, directory: Path, measured: bool) -> StepKernels:
    steps = 1 if measured else 3
    command = profile_command(job, way, directory, directory / "result.json", steps)
    environment = job_environment(job, profiled=True)
    if measured and way.device == "virtual":
        environment["FAKEDIST_REHEARSE"] = "cupti"
    try:
        subprocess.run(command, cwd=directory, env=environment, capture_output=True, timeout=way.timeout_s)
    except subprocess.TimeoutExpired:
        return StepKernels(error=f"it did not end within {way.timeout_s:.0f} seconds")
    return read_times(directory / "run")


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
