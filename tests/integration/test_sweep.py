"""A whole sweep on this machine: it is interrupted or killed, and goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

import fakedist
from fakedist.rundir.outcome import Outcome
from fakedist.sweep.point_rows import Row, Status
from tests.conftest import clean_environment

SCRIPT = """
import sys

kind, size = sys.argv[1], int(sys.argv[2])
assert kind != "refused", "tp does not divide the heads"
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
if kind == "failed":
    raise RuntimeError("shapes differ")
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(size, 1024, device="cuda")).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
"""
#: One of the sizes takes 128 GiB.
SWEEP = """
script = "train.py"
arguments = "{kind} {size}"
world_size = 8
gpu = "h100"
steps = 2
page = false
ranks = "0"
tokens_per_step = "8 * size"
where = "kind == 'trained' or size == 8192"

[axes]
kind = ["refused", "trained", "failed"]
size = [8192, 16384, 33554432]
"""
POINTS = 5


def start(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fakedist", "sweep", "sweep.toml", "--jobs", "1", "-o", "made"],
        cwd=directory,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(directory: Path, after: int, number: signal.Signals) -> tuple[int, str]:
    """The exit code of a sweep that a signal ends once so many of its points are done, and what it printed then."""
    sweep = start(directory)
    assert sweep.stderr is not None
    for line in sweep.stderr:
        if line.startswith(f"fakedist: {after} of {POINTS}: "):
            sweep.send_signal(number)
            break
    _, said = sweep.communicate()
    while left(directory):  # as the sweep is gone, what ran for it leaves
        time.sleep(0.1)
    return sweep.returncode, said


def left(directory: Path) -> list[Path]:
    """The processes whose working directory this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(directory) and process.name != str(os.getpid()):
                found.append(process)
        except OSError:
            continue
    return found


@pytest.fixture(scope="module", params=["interrupted", pytest.param("killed", marks=pytest.mark.nightly)])
def swept(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The directory of a sweep that was interrupted after its first point, or killed after its third, then let run."""
    directory = tmp_path_factory.mktemp("sweep").resolve()
    (directory / "train.py").write_text(SCRIPT)
    (directory / "sweep.toml").write_text(SWEEP)
    if request.param == "interrupted":
        code, said = ended(directory, 1, signal.SIGINT)
        assert code == 130
        assert "1 of 5 points are done; the same command goes on from here" in said
        assert len(pd.read_parquet(directory / "made" / "sweep.parquet")) == 1
    else:
        assert ended(directory, 3, signal.SIGKILL)[0] == -signal.SIGKILL
        assert len(fakedist.open_sweep(directory / "made").rows) == 3
    last = start(directory)
    answer, said = last.communicate()
    assert last.returncode == 0, said
    assert f"{1 if request.param == 'interrupted' else 3} of them ran before" in said
    assert "5 points: 2 fit, 1 does not fit, 1 invalid layout, 1 failed" in answer
    return directory / "made"


def rows(sweep: Path) -> dict[tuple[object, ...], Row]:
    return {tuple(value for _, value in row.values): row for row in fakedist.open_sweep(sweep).rows}


@pytest.mark.long
def test_every_point_is_a_row_that_says_how_it_ended(swept: Path) -> None:
    found = rows(swept)
    assert {values: row.status for values, row in found.items()} == {
        ("refused", 8192): Status.INVALID,
        ("trained", 8192): Status.FITS,
        ("trained", 16384): Status.FITS,
        ("trained", 33554432): Status.DOES_NOT_FIT,
        ("failed", 8192): Status.FAILED,
    }
    assert found["refused", 8192].reason == "AssertionError: tp does not divide the heads"
    assert "train.py:5" in found["refused", 8192].line
    needs = r"out of memory( in \S+)?: needs [\d.]+ GiB reserved \([\d.]+ GiB allocated\) of 79\.\d+ GiB"
    assert re.fullmatch(needs, found["trained", 33554432].reason)
    assert found["failed", 8192].reason == "RuntimeError: shapes differ"
    (rank,) = found["trained", 16384].ranks
    assert rank.outcome is Outcome.STOPPED
    assert 16384 * 1024 * 4 < rank.peak_allocated_bytes <= rank.peak_reserved_bytes < rank.capacity_bytes


@pytest.mark.long
def test_no_rank_ran_twice(swept: Path) -> None:
    lines = [json.loads(line) for line in (swept / "journal.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "rank" in line]) == POINTS
    assert len([line for line in lines if "row" in line]) == POINTS


@pytest.mark.long
def test_the_table_and_the_page_have_the_answer(swept: Path) -> None:
    sweep = fakedist.open_sweep(swept)
    frame = pd.read_parquet(swept / "sweep.parquet")
    assert list(frame["status"]) == [str(row.status) for row in sweep.rows]
    assert frame["step_us"].notna().sum() == 2
    best = sweep.ranking.best
    assert best is not None
    assert dict(best.row.values) == {"kind": "trained", "size": 16384}
    page = (swept / "report.html").read_text()
    assert "kind=trained size16384" in page
    assert "tp does not divide the heads" in page
