"""A sweep of the legal layouts of a script prunes some, and none that would have won."""

from __future__ import annotations

from pathlib import Path

import pytest

import fakedist
from fakedist.sweep.point_rows import Status
from tests.conftest import ROOT, RunFakedist

SCRIPT = (str(ROOT / "examples/llama_fsdp2.py"), "--model", "debug", "--seq-len", "2048", "--steps", "2", "--tp", "1")
OPTIONS = ("--world-size", "8", "--gpu-memory", "6GiB", "-o", "swept", "--jobs", "1")


@pytest.mark.long
def test_the_pruned_points_do_not_fit_and_the_best_is_that_of_all(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    maps = ("--auto", "replicas=--dp-replicate:1,2", "--auto", "mbs=--batch-size:8,128")
    maps = (*maps, "--auto", "checkpoint=--checkpoint:full,none")
    said = run_fakedist("sweep", *OPTIONS, *maps, *SCRIPT, cwd=tmp_path).stderr
    auto = fakedist.open_sweep(tmp_path / "swept")
    by_memory, by_time = (
        [row for row in auto.rows if row.status is status] for status in (Status.PRUNED, Status.SLOWER)
    )
    assert "8 of 8 layouts are legal" in said
    assert "5 recorded and priced, 0 of an earlier sweep, 2 pruned by memory, 1 by time" in said
    assert all("whose tensors and CUDA context take" in row.reason for row in by_memory)
    (slower,) = by_time
    assert slower.reason.startswith("computes no less than replicas=2 mbs=8 checkpoint=none, which fits with ")
    placed = ("--dp-replicate", "{replicas}", "--batch-size", "{mbs}", "--checkpoint", "{checkpoint}")
    axes = ("--axis", "replicas=1,2", "--axis", "mbs=8,128", "--axis", "checkpoint=full,none")
    said = run_fakedist("sweep", *OPTIONS, *axes, *SCRIPT, *placed, cwd=tmp_path).stderr
    every = fakedist.open_sweep(tmp_path / "swept")
    known = {row.values: row for row in every.rows}
    assert "of them ran before" in said
    assert {known[row.values].status for row in by_memory} == {Status.DOES_NOT_FIT}
    assert auto.ranking.best is not None
    assert every.ranking.best is not None
    speeds = every.ranking.speeds
    chosen, pruned = (speeds[known[values].id] for values in (auto.ranking.best.row.values, slower.values))
    # The host is measured, and limits steps of this size: what is tied may change places.
    assert not every.ranking.best.speed.differs_from(chosen)
    assert pruned.value <= chosen.value or not pruned.differs_from(chosen)
