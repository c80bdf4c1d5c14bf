"""A session: a rehearsal's tables and recordings are marked, and no process gets more time than its piece has."""

from __future__ import annotations

import time
from pathlib import Path

import pandas as pd

from fakedist.extras.confirm.jobs import JOBS
from fakedist.extras.confirm.pieces import Session, compared_times, run_kernel_times
from tests.extras.confirm.made_up import job, recording

MACHINE = {"gpu": "NVIDIA H200", "capacity_bytes": 150 << 30, "driver": "580.1", "torch": "2.11.0+cu130", "python": "3"}


def session(out: Path, *, rehearsal: bool) -> Session:
    return Session(out / "a.json", MACHINE, [], 4, rehearsal, "make gpu", lambda line: None)


def test_a_table_has_the_machine_and_what_is_missing(tmp_path: Path) -> None:
    made = session(tmp_path, rehearsal=False)
    made.write("gpu-outside", [{"after": "context"}], ["NCCL"])
    head = made.tables["gpu-outside"]["head"]
    assert (head["gpu"], head["driver"], head["torch"]) == ("NVIDIA H200", "580.1", "2.11.0+cu130")
    assert head["failed"] == ["NCCL"]
    assert "rehearsal" not in head


def test_a_rehearsal_is_marked_in_its_tables_and_recordings(tmp_path: Path) -> None:
    made = session(tmp_path, rehearsal=True)
    made.write("gpu-outside", [])
    made.keep("bare", recording(job()))
    assert made.tables["gpu-outside"]["head"]["rehearsal"] is True
    assert list(made.recordings) == ["nvidia-h200-torch2.11.0/rehearsed-bare.jsonl.gz"]
    made.rehearsal = False
    made.keep("profiled", recording(job()))
    assert list(made.recordings)[-1] == "nvidia-h200-torch2.11.0/real-profiled.jsonl.gz"


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


def kernels(**us: float) -> pd.DataFrame:
    """Of a family and a layer each, `gemm__a`."""
    rows = [(*name.split("__"), time) for name, time in us.items()]
    return pd.DataFrame(rows, columns=["family", "layer_name", "duration_us"])


MEASURED = kernels(
    gemm__a=600.0, gemm__b=200.0, elementwise__b=100.0, elementwise__=90.0, copy__=10.0, communication__a=5e3
)


def test_a_job_is_compared_in_total_by_family_and_by_its_worst_layer() -> None:
    estimated = kernels(gemm__a=630.0, gemm__b=250.0, elementwise__b=95.0, elementwise__=0.0, copy__=90.0)
    rows = compared_times("job", MEASURED, estimated)
    errors = {row["what"]: round(row["estimated_us"] / row["measured_us"] - 1, 3) for row in rows}
    # Copies that stand for communication do not count, nor does a family of less than 2 %.
    assert errors == {"total": 0.065, "gemm": 0.1, "elementwise": -0.5, "layer b": 0.15}
    assert list(errors)[:3] == ["total", "gemm", "elementwise"]
    assert rows[0]["measured_us"] == 1000.0


def test_a_family_that_is_not_estimated_is_compared_and_a_job_without_times_is_not() -> None:
    rows = compared_times("job", MEASURED, kernels(gemm__a=1.0))
    assert [row["estimated_us"] for row in rows if row["what"] == "elementwise"] == [0.0]
    assert compared_times("job", kernels(communication__a=5.0), MEASURED) == []


def test_jobs_that_do_not_train_are_not_timed_and_what_time_is_over_for_says_so(tmp_path: Path) -> None:
    made = session(tmp_path, rehearsal=True)
    made.jobs, made.ends_at = [JOBS["allocations"], JOBS["ddp_1"]], 0.0
    assert not run_kernel_times(made)
    assert made.tables["gpu-estimates"]["rows"] == []
    over = [f"ddp_1, {side}: not run: the time was over" for side in ("measured", "estimated")]
    assert made.tables["gpu-estimates"]["head"]["failed"] == over
