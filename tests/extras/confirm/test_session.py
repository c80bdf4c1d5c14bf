"""A session: a rehearsal's files lie and are called otherwise, and no process gets more time than its piece has."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fakedist.extras.confirm.jobs import JOBS
from fakedist.extras.confirm.pieces import Session, StepKernels, Way, compare_times, run_times
from tests.accuracy.results import NotMeasuredError, keep

MACHINE = {"gpu": "NVIDIA H200", "capacity_bytes": 150 << 30, "driver": "580.1", "torch": "2.11.0+cu130", "python": "3"}


def session(out: Path, *, rehearsal: bool) -> Session:
    return Session(out, MACHINE, [], 4, rehearsal, "make gpu", lambda line: None)


def test_what_was_measured_is_where_it_is_kept_from(tmp_path: Path) -> None:
    session(tmp_path, rehearsal=False).write("gpu-outside", [{"after": "context"}], ["NCCL"])
    head = json.loads((tmp_path / "accuracy" / "gpu-outside.json").read_text())["head"]
    assert (head["gpu"], head["driver"], head["torch"]) == ("NVIDIA H200", "580.1", "2.11.0+cu130")
    assert head["failed"] == ["NCCL"]
    assert "rehearsal" not in head


def test_a_rehearsal_leaves_nothing_that_could_be_kept(tmp_path: Path) -> None:
    made = session(tmp_path, rehearsal=True)
    made.write("gpu-outside", [])
    (path,) = tmp_path.rglob("*.json")
    assert path.name == "rehearsal-gpu-outside.json"
    assert json.loads(path.read_text())["head"]["rehearsal"] is True
    assert made.recordings.is_relative_to(tmp_path / "rehearsal")
    with pytest.raises(NotMeasuredError):
        keep(tmp_path)


def test_the_virtual_gpu_is_of_the_real_ones_model_and_memory(tmp_path: Path) -> None:
    made = session(tmp_path, rehearsal=False)
    assert made.real.device == "real"
    assert (made.virtual.device, made.virtual.gpu, made.virtual.memory_bytes) == ("virtual", "h200", 150 << 30)
    assert session(tmp_path, rehearsal=True).real == session(tmp_path, rehearsal=True).virtual


def test_a_process_gets_no_more_time_than_its_piece_has(tmp_path: Path) -> None:
    made = session(tmp_path, rehearsal=False)
    made.ends_at = time.monotonic() + 100.0
    assert 50.0 < made.timeout_s() < 90.0
    assert made.timeout_s(30.0) == 30.0
    made.ends_at = time.monotonic() + 10.0
    assert made.is_over


MEASURED = StepKernels(
    {"gemm": 800.0, "elementwise": 190.0, "copy": 10.0, "communication": 5000.0}, {"": 100.0, "a": 600.0, "b": 300.0}, 9
)
ESTIMATED = StepKernels({"gemm": 880.0, "elementwise": 95.0, "copy": 90.0}, {"": 100.0, "a": 630.0, "b": 150.0}, 8)


def test_a_job_is_compared_in_total_by_family_and_by_its_worst_layer() -> None:
    found = compare_times({"job": MEASURED}, {"job": ESTIMATED})
    errors = {each.what: round(each.error, 3) for each in found}
    assert errors == {"total": 0.065, "gemm": 0.1, "elementwise": -0.5, "layer b": -0.5}
    assert MEASURED.total_us == 1000.0  # copies that stand for communication do not count


@pytest.mark.parametrize("other", [{}, {"job": StepKernels(error="it did not end")}])
def test_a_job_without_times_on_one_side_is_not_compared(other: dict[str, StepKernels]) -> None:
    assert compare_times({"job": MEASURED}, other) == []


def test_jobs_that_do_not_train_are_not_timed_and_what_time_is_over_for_says_so() -> None:
    over = Way("virtual", ends_at=0.0)
    found = run_times([JOBS["allocations"], JOBS["ddp_1"]], over, measured=True)
    assert found == {"ddp_1": StepKernels(error="not run: the time was over")}
