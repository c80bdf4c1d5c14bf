"""Subjects of reports that no small run gives, made by hand: played loads, a check, a sweep, a calibration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd

from fakedist.analysis.routed_blocks import Counts
from fakedist.check.checking import Checked, Mismatch
from fakedist.check.config import Figure, read_config
from fakedist.check.judging import JudgedFigure
from fakedist.cost_model.kernels.calibration_table import CalibrationOrigin, made_table
from fakedist.errors import ScriptError
from fakedist.results.calibration.calibrating import Calibrated, CalibrationResult, StepChange, Unmatched
from fakedist.results.long_runs import FailedRequest, PlayedSetting, PlayedSteps
from fakedist.results.router_draws import Draw, Playable, Played, PlayedChange, PlayedSize
from fakedist.router_load import RouterPass
from fakedist.rundir.launch_records import WorkRow
from fakedist.rundir.manifest import load_manifest, write_manifest
from fakedist.rundir.notes import not_answered, values_made_up
from fakedist.rundir.step_time import (
    GroupTime,
    HostPart,
    HostWait,
    LateLaunches,
    PathPart,
    RangeTime,
    RankThroughput,
    StepLimit,
    TimeGain,
)
from fakedist.rundir.summary import Advice, Communicator, EngineSleep, NamedPhase, Outside
from fakedist.units import GIB, MIB
from tests.unit.report.content.test_host_memory import MEMORY as HOST_MEMORY
from tests.unit.report.content.test_memory import ENGINE
from tests.unit.report.handmade import timed

_NONE = np.zeros((0, 0), np.int64)


_PHASES = [
    NamedPhase("rollout", 3, 3, 0, 4, MIB, 2 * MIB, 300 * MIB, 350 * MIB, 400 * MIB, 100 * MIB, 20 * MIB, 0),
    NamedPhase("<i>train</i>", 3, 3, 4, 9, 0, 0, 500 * MIB, 550 * MIB, 600 * MIB, 100 * MIB, 0, 200 * MIB),
]


def _outside() -> Outside:
    parts = {"buffers": (2 * MIB, 4 * MIB), "peers": (MIB, 2 * MIB), "rest": (0, MIB)}
    return Outside(
        3 * MIB,
        7 * MIB,
        400 * MIB,
        "on an H100",
        "2.30.7",
        nccl_environment={"NCCL_ALGO": "Ring"},
        communicators=[Communicator("tp", 8, 8, 1, (1, 2), parts=parts, low_bytes=3 * MIB, high_bytes=7 * MIB)],
        num_unused_groups=1,
        left_out=["cuDNN: not known for this GPU"],
        measured_bytes=None,
    )


def full_run(directory: Path) -> Path:
    """A run with all that few have: phases of the script, an engine, host memory, what is outside, limits, findings."""
    run = timed(directory)
    manifest = load_manifest(run)
    summary = manifest.summary
    assert summary is not None
    assert summary.time is not None
    time, step_us = summary.time, summary.time.step_us
    path = [
        PathPart("kernels", "layers.0-2.mlp", "", "", 3, 6, 700.0),
        PathPart("collectives", "", "dp", "all_gather", 0, 2, 200.0),
        PathPart("host", "", "", "", 1, 4, 90.0),
        PathPart("idle", "", "", "", 0, 0, 10.0),
    ]
    limits = [StepLimit("kernels", "", 0, 895.0, 800.0, 1_000.0), StepLimit("host", "", 0, 179.0, 90.0, 300.0)]
    late = [LateLaunches("/job/train.py:60 (main)", "layers.0.mlp", 3, 40, 200.0)]
    wait = HostWait("/job/train.py:57 (main)", False, "read", "aten._local_scalar_dense.default", "", 1, 3, 50.0, 120.0)
    known = replace(
        time,
        by_group=[GroupTime("tp", 8, 2, "all_gather", 1_234, 0, 3e9, 100.0, 40.0, 60.0)],
        critical_path=path,
        limits=limits,
        gains=[TimeGain("b200", "--gpu b200", 0.6 * step_us), TimeGain("no host", "--what-if no-sync", 0.9 * step_us)],
        host=[HostPart("forward", 500.0), HostPart("waits for the GPU", 400.0)],
        host_waits=[wait],
        late_launches=late,
        ranges=[
            RangeTime("rollout", 2, 0, 9, 0, 300.0, 350.0, 4),
            RangeTime("<b>inner</b>", 1, 1, 3, 1, 20.0, 30.0, 0),
        ],
        step_low_us=0.9 * step_us,
        step_high_us=1.2 * step_us,
        model_flops=1e12,
        step_flops_utilisation=0.26,
        throughput=RankThroughput(8_192, "all of them", 573.0),
    )
    kept = {"tensors": 3 * MIB, "private pools": 200 * MIB}
    advice = [
        Advice("checkpoint", "checkpoint layers.0-2 (Block)", "recompute them", 24 * MIB, gives_low_bytes=20 * MIB),
        Advice("segments", "use expandable segments", "fewer holes", 64 * MIB, of="peak_reserved_bytes"),
    ]
    summary = replace(
        summary,
        estimated_outside=_outside(),
        time=known,
        named_phases=_PHASES,
        engine=ENGINE,
        engine_sleeps=[EngineSleep("EngineCore", "level 1", 12, 2 * GIB, kept)],
        host_memory=HOST_MEMORY,
        advice=advice,
        notes=[*summary.notes, values_made_up(4, "/job/model.py:12"), not_answered("cuMemAdvise", 3)],
    )
    write_manifest(run, replace(manifest, summary=summary))
    return run


def playable(**more: Any) -> Playable:
    """A recording of two layers with 8 experts on 4 ranks, as far as its report reads it."""
    passes = [RouterPass(layer, 0, 0, 64, 8, 2) for layer in range(2)]
    program = SimpleNamespace(
        base=np.array([5 * MIB, MIB, 3 * MIB]),
        follows=np.array([-1, 0, 1]),
        bounded=np.array([0]),
        largest_bounded_bytes=5 * MIB,
    )
    settings: dict[str, Any] = {
        "run": SimpleNamespace(path=Path("/runs/moe")),
        "job": SimpleNamespace(rank=1, world_size=8),
        "counts": Counts(passes, (0, 1, 2, 3)),
        "groups": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "room_bytes": 70 * GIB,
        "program": program,
        **more,
    }
    return cast(Playable, SimpleNamespace(**settings))


def played(*, has_steps: bool = True) -> Played:
    """Four draws of a load, of which one has too little memory."""
    draws = pd.DataFrame(
        {
            "seed": range(4),
            "rank": [1, 2, 1, 6],
            "share": [1.5, 1.25, 2.0, 1.75],
            "busiest": [1.6, 1.3, 2.1, 1.8],
            "peak_allocated_bytes": [60 * GIB, 55 * GIB, 72 * GIB, 65 * GIB],
            "peak_reserved_bytes": [62 * GIB, 58 * GIB, 74 * GIB, 68 * GIB],
            "fits": [True, True, False, True],
            "step_us": [9e5, 8e5, 1e6, 9.5e5] if has_steps else np.nan,
            "step_low_us": [8e5, 7e5, 9e5, 8.5e5] if has_steps else np.nan,
            "step_high_us": [1e6, 9e5, 1.1e6, 1.05e6] if has_steps else np.nan,
        }
    )
    worst = [Draw(seed, rank, share, share, _NONE, 1.0, _NONE) for seed, rank, share in ((2, 1, 2.0), (3, 6, 1.75))]
    remedies = [
        PlayedChange("--recompute", [50 * GIB, 48 * GIB], 0),
        PlayedChange("capacity factor 1.25", [66 * GIB, 60 * GIB], 1, 0.125),
    ]
    sizes = [PlayedSize(2, 1.2, 50 * GIB), PlayedSize(4, 1.5, 60 * GIB)]
    even_us = 7.5e5 if has_steps else float("nan")
    return Played(playable(), "lognormal:1", draws, 40 * GIB, even_us, worst, remedies, sizes)


def rank_draws(*, has_steps: bool = True) -> pd.DataFrame:
    """One draw on each of three ranks."""
    return pd.DataFrame(
        {
            "seed": [5] * 3,
            "rank": [0, 1, 2],
            "share": [0.5, 1.5, 1.0],
            "tokens": [1024, 3072, 2048],
            "peak_allocated_bytes": [30 * GIB, 75 * GIB, 40 * GIB],
            "peak_reserved_bytes": [32 * GIB, 76 * GIB, 42 * GIB],
            "fits": [True, False, True],
            "step_us": 9e5 if has_steps else np.nan,
            "step_low_us": 8e5 if has_steps else np.nan,
            "step_high_us": 1e6 if has_steps else np.nan,
        }
    )


def played_steps(*, fails: bool = True) -> PlayedSteps:
    """Forty steps of two names with two seeds, of which the second runs out of memory."""
    lengths = [1024, 4096, 2048, 1024]
    kinds = SimpleNamespace(
        steps=[
            SimpleNamespace(number=n + 2, name="evaluation" if n == 3 else "train", length=length)
            for n, length in enumerate(lengths)
        ],
        left_out=[1],
        sequence=["train", "train", "train", "evaluation", "saving"],
        fitted_part=lambda: 0.975,
    )
    names = ["evaluation" if step % 4 == 0 else "train" for step in range(1, 41)]
    rows = [
        (seed, step, names[step - 1], 1024 + 120 * step, (10 + step + seed) * GIB, (12 + step + seed) * GIB, 3 * step)
        for seed in (0, 1)
        for step in range(1, 41 if seed == 0 or not fails else 32)
    ]
    columns = ["seed", "step", "name", "length", "peak_allocated_bytes", "peak_reserved_bytes", "num_mallocs"]
    failure = FailedRequest(1, 32, "evaluation", 4864, "aten.addmm", "/job/train.py:7 (main)", GIB, 42 * GIB, 44 * GIB)
    settings = [
        PlayedSetting("as recorded", 2, [32] if fails else [], 52 * GIB, 3.0),
        PlayedSetting("expandable_segments:True", 2, [], 48 * GIB, 0.25),
    ]
    run = SimpleNamespace(path=Path("/runs/long"), manifest=SimpleNamespace(cwd="/job"))
    playable = cast(Any, SimpleNamespace(run=run, kinds=kinds, room_bytes=70 * GIB))
    frame = pd.DataFrame(rows, columns=columns)
    return PlayedSteps(playable, "lognormal:1", names, frame, settings, failure if fails else None)


def checked(folder: Path) -> Checked:
    """A check that has one of everything."""
    (folder / "src").mkdir(parents=True)
    (folder / "src/model, 2.py").write_text("pass\n")
    (folder / "pyproject.toml").write_text(
        '[[tool.fakedist.check.jobs]]\nname = "net"\nscript = "train.py"\nworld_size = 8\n'
    )
    made = {"blame": "activations of h.*", "line": "src/model, 2.py:7 (forward)"}
    grew = JudgedFigure("net", 0, Figure("peak_allocated"), 6.0 * GIB, None, 5.0 * GIB, 5.05 * GIB, "1%", **made)
    over = JudgedFigure("net", 0, Figure("layers", "h.*.mlp"), 3.0 * GIB, 2.0 * GIB, line="/elsewhere/lib.py:3 (call)")
    return Checked(
        read_config(folder / "pyproject.toml"),
        judged=[
            grew,
            over,
            JudgedFigure("net", 0, Figure("headroom"), 3.0 * GIB, 2.0 * GIB),
            JudgedFigure("net", 1, Figure("peak_reserved"), 5.0 * GIB),
            JudgedFigure("net", 1, Figure("step_time"), 21_000.0, 25_000.0, source="estimated"),
        ],
        warnings=["the baseline of net was made with other settings: torch 1 -> 2"],
        misfits=["net rank 1 does not fit the GPU: CUDA out of memory"],
        mismatches=[Mismatch("net", "net: the job hangs", "src/model, 2.py:1 (forward)")],
        failures=[ScriptError("net rank 2: the script failed", output="Traceback ```")],
    )


def calibrated(*, is_good: bool = True) -> CalibrationResult:
    """A table made of a trace that fits its run, and one of which much was left out and assumed."""
    origin = CalibrationOrigin("NVIDIA H200", "torch.profiler", "2026-01-31")
    work = WorkRow("cublasGemmEx", "product", "gemm", "aten.mm.default", m=1, n=2, k=3)
    made = Calibrated(
        made_table(origin, {work: [2.0]}),
        num_launches=1200, num_measured=1190, num_steps=3, num_kernels=3600, num_unread=0, num_matched=3570,
        num_extra=0, num_conflicts=0, num_ambiguous=0, num_too_fast=0, num_elsewhere=0, num_unreadable=0,
        missing=[], extra=[],
    )  # fmt: skip
    if is_good:
        change = StepChange("NVIDIA H200", "h200", 1.8e6, 2.71e6, 2.5e6, 3.0e6, 0.83, 0.1)
        return CalibrationResult(made, True, 0, change)
    extra = [Unmatched(f"kernel{number}", "other", 2, 1500.0) for number in range(4)]
    made = replace(
        made, num_extra=8, num_conflicts=1, num_ambiguous=2, num_too_fast=3, num_unread=4, num_elsewhere=5,
        num_unreadable=6, missing=[Unmatched("void flash::fwd", "attention", 10, 0.0)], extra=extra,
    )  # fmt: skip
    return CalibrationResult(made, False, 3, None)
