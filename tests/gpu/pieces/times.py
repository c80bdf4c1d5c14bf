"""Kernel times of the jobs that train: without fakedist, under it, and estimated."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from tests.gpu.pieces.single import ScriptFailedError, run_script
from tests.gpu.session import Session
from tests.gpu.times import JobTimes, compare_times, run_times, save


def run(session: Session) -> bool:
    """Time them all; whether each has times on every side."""
    # One after the other: they would slow each other down.
    measured = run_times(session.jobs, session.real, measured=True)
    with ThreadPoolExecutor(session.at_once) as pool:
        each = pool.map(lambda job: run_times([job], session.virtual, measured=False), session.jobs)
        estimated = {name: times for found in each for name, times in found.items()}
    save(measured, session.others / "times-measured.json")
    save(estimated, session.others / "times-estimated.json")
    compared = compare_times(measured, estimated)
    failed = _errors("measured", measured) + _errors("estimated", estimated)
    session.write("gpu-estimates", [asdict(each) for each in compared], failed)
    costs, not_bare = _costs(session, measured)
    session.write("gpu-recording-cost", costs, not_bare)
    return not failed and not not_bare


def _errors(side: str, times: dict[str, JobTimes]) -> list[str]:
    return [f"{job}, {side}: {each.error}" for job, each in times.items() if each.error]


def _costs(session: Session, measured: dict[str, JobTimes]) -> tuple[list[dict[str, Any]], list[str]]:
    """Jobs of one rank, one after another: kernels without fakedist, and under it."""
    rows, failed = [], []
    for job in session.jobs:
        times = measured.get(job.name)
        if times is None or times.error or job.world_size:
            continue
        if session.is_over:
            failed.append(f"{job.name}, bare: not run: the time was over")
            continue
        try:
            bare = run_script(session, session.real, "steps", job.name, job=job)
        except ScriptFailedError as error:
            failed.append(f"{job.name}, bare: {error}")
            continue
        rows.append({"job": job.name, "bare_us": bare["kernels_us"], "recorded_us": sum(times.by_family.values())})
    return rows, failed
