"""The pieces of ``make gpu`` turn their results into rows of data, and whether it went well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakedist.extras.confirm import pieces
from fakedist.extras.confirm.allocator_history import JobRecord
from fakedist.extras.confirm.jobs import JOBS
from fakedist.extras.confirm.pieces import ScriptFailedError, Session, StepKernels, Way
from tests.gpu.pieces import examples, processes

MACHINE = {"gpu": "NVIDIA H200", "capacity_bytes": 150 << 30, "driver": "580.1", "torch": "2.11.0+cu130", "python": "3"}
FAILED = {"step": 2, "phase": "forward", "num_allocations": 9, "requested_bytes": 512, "peak_reserved_bytes": 1}


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path, MACHINE, [JOBS["lstm"], JOBS["ddp_8"]], 4, False, "make gpu", lambda line: None)


def written(session: Session, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((session.out / "accuracy" / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_trials_of_both_sides_stand_in_one_row_though_one_side_fails(
    session: Session, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def run_script(made: Session, way: Way, name: str) -> list[dict[str, Any]]:
        if fails and way.device == "virtual":
            raise ScriptFailedError("exit code 1: no compiler")
        later = {"limit": "device", "gib": 1, "found": FAILED | {"step": 3 if way.device == "virtual" else 1}}
        return [{"limit": "allocator", "gib": 2, "found": FAILED}, later]

    monkeypatch.setattr(pieces, "run_script", run_script)
    monkeypatch.setattr(pieces, "NUM_TRIALS", 3 if fails else 2)
    assert pieces.run_out_of_memory(session) is not fails
    data = written(session, "gpu-out-of-memory")
    first, second = data["rows"]
    assert (first["real"], first["virtual"]) == (FAILED, None if fails else FAILED)
    assert (second["gib"], second["real"]["step"], fails or second["virtual"]["step"]) == (1, 1, fails or 3)
    failed = ["the real GPU: the time was over after 2 of 3 trials", "the virtual GPU: exit code 1: no compiler"]
    assert sorted(data["head"].get("failed", [])) == (failed if fails else [])


def test_a_library_that_could_not_be_used_is_no_row(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [
        {"after": "context", "used_bytes": 5, "reserved_bytes": 0, "error": ""},
        {"after": "NCCL", "used_bytes": 5, "reserved_bytes": 0, "error": "RuntimeError: no"},
    ]
    monkeypatch.setattr(pieces, "run_script", lambda made, way, name: stages)
    assert not pieces.run_outside(session)
    data = written(session, "gpu-outside")
    assert [row["after"] for row in data["rows"]] == ["context"]
    assert data["head"]["failed"] == ["NCCL: RuntimeError: no"]


def test_kernels_are_told_bare_recorded_and_estimated(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_times(jobs: Any, way: Way, *, measured: bool) -> dict[str, StepKernels]:
        us = 100.0 if measured else 150.0
        return {job.name: StepKernels({"gemm": us, "communication": 7.0}, {"a": us}, 3) for job in jobs}

    monkeypatch.setattr(pieces, "run_times", run_times)
    monkeypatch.setattr(pieces, "run_script", lambda made, way, name, job: {"kernels_us": 104.0})
    assert pieces.run_kernel_times(session)
    totals = [row for row in written(session, "gpu-estimates")["rows"] if row["what"] == "total"]
    assert [(row["job"], row["measured_us"], row["estimated_us"]) for row in totals] == [
        *(("lstm", 100.0, 150.0), ("ddp_8", 100.0, 150.0)),
    ]
    # Only a job of no world runs without fakedist: the others' ranks are not there.
    cost = written(session, "gpu-recording-cost")["rows"]
    assert cost == [{"job": "lstm", "bare_us": 104.0, "recorded_us": 107.0}]


def test_an_example_that_differs_is_told_with_its_peaks(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(example: examples.Example, way: Way, directory: Path, made: Session) -> JobRecord:
        peak = 300 if way.device == "virtual" else 100
        statistics = {"allocated_bytes.all.peak": peak, "reserved_bytes.all.peak": 400}
        return JobRecord(example.command, statistics=statistics)

    monkeypatch.setattr(examples, "EXAMPLES", examples.EXAMPLES[:1])
    monkeypatch.setattr(examples, "_run", run)
    assert examples.run(session)
    (row,) = written(session, "gpu-examples")["rows"]
    assert row["command"].startswith("fakedist profile --world-size 8 --rank 3 examples/ddp_gpt.py")
    assert (row["virtual_verdict"], row["allocated_bytes"], row["virtual_allocated_difference_bytes"]) == (
        "statistics", 100, 200,
    )  # fmt: skip


def test_real_processes_run_on_the_gpu_and_a_rehearsals_on_virtual_ones(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def compare_all(ways: Any, *rest: Any) -> tuple[list[Any], list[str]]:
        seen.extend(f"{way.device} {way.job} {way.num_ranks}" for way in ways)
        return [], ["ddp: no"]

    monkeypatch.setattr(processes, "compare_all", compare_all)
    assert not processes.run(session)
    assert "cuda fsdp2 8" in seen
    assert "cuda pipeline_1f1b 8" not in seen
    assert len(seen) == 20
    seen.clear()
    session.rehearsal = True
    processes.run(session)
    assert {text.split()[0] for text in seen} == {"virtual"}
