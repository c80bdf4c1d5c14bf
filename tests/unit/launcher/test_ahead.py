"""Work done while the rank runs, and once it has written its last record."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fakedist.launcher.fork_servers import Ahead, priced_gpu
from fakedist.options import Job
from fakedist.rundir.directory import JOURNAL_NAME
from tests.unit.analysis.recorded import MIB, HandMade, new_run

JOB = Job(world_size=8, rank=0, target="train.py", page=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = HandMade()
    made.op("forward", 1, made.layer("head"))
    made.alloc(0, 4 * MIB)
    made.step(1)
    made.ended()
    return made.write(new_run(tmp_path / "run"))


def test_tables_are_computed_once_all_is_recorded(run: Path) -> None:
    before = sorted(run.iterdir())
    with Ahead(JOB, run) as work:
        work.recorded()
    assert work.computed is not None
    assert work.computed.tables["blocks"]["requested_bytes"].tolist() == [4 * MIB]
    assert sorted(run.iterdir()) == before  # nothing is written before it is known how the rank ended


@pytest.mark.parametrize("is_recorded", [False, True])
def test_tables_are_not_computed_of_half_a_recording(run: Path, is_recorded: bool) -> None:
    with Ahead(dataclasses.replace(JOB, nsys=is_recorded), run) as work:  # nsys's part comes when the rank has ended
        if is_recorded:
            work.recorded()
    assert work.computed is None


def test_what_cannot_be_computed_is_left_for_later(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / JOURNAL_NAME).unlink()
    with Ahead(JOB, run) as work:
        work.recorded()
    assert work.computed is None
    assert capsys.readouterr() == ("", "")


def test_a_step_is_priced_on_the_virtual_gpu_if_kernels_are_wanted() -> None:
    jobs = [dataclasses.replace(JOB, **more) for more in ({}, {"kernels": False}, {"device": "cuda"})]
    assert [priced_gpu(job) for job in jobs] == [JOB.gpu, "", ""]
