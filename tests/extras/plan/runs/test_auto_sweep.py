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
    maps = ("--auto", "mbs=--batch-size:8,128", "--auto", "checkpoint=--checkpoint:full,none")
    said = run_fakedist("sweep", *OPTIONS, *maps, *SCRIPT, cwd=tmp_path).stderr
    auto = fakedist.open_sweep(tmp_path / "swept")
    (pruned,) = (row for row in auto.rows if row.status is Status.PRUNED)
    assert "4 of 4 layouts are legal" in said
    assert "3 recorded, 0 of an earlier sweep, 1 pruned by memory" in said
    assert pruned.reason.startswith("holds no less than mbs=128 checkpoint=full, whose tensors and CUDA context take ")
    placed = ("--batch-size", "{mbs}", "--checkpoint", "{checkpoint}")
    axes = ("--axis", "mbs=8,128", "--axis", "checkpoint=full,none")
    said = run_fakedist("sweep", *OPTIONS, *axes, *SCRIPT, *placed, cwd=tmp_path).stderr
    every = fakedist.open_sweep(tmp_path / "swept")
    assert "3 of them ran before" in said
    assert {row.values: row.status for row in every.rows}[pruned.values] is Status.DOES_NOT_FIT
    assert auto.ranking.best is not None
    assert every.ranking.best is not None
    assert auto.ranking.best.row.values == every.ranking.best.row.values
