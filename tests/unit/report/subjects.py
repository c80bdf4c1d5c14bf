"""Subjects of reports that no small run gives, made by hand: a whole run, a check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fakedist.check.checking import Checked, Mismatch
from fakedist.check.config import Figure, read_config
from fakedist.check.judging import JudgedFigure
from fakedist.errors import ScriptError
from fakedist.rundir.directory import load_manifest, write_manifest
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
