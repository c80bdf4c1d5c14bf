"""The pieces of ``make gpu`` turn their results into rows of data, and whether it went well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fakedist.extras.confirm import pieces
from fakedist.extras.confirm.allocator_history import JobRecord
from fakedist.extras.confirm.jobs import JOBS, GpuJob
from fakedist.extras.confirm.pieces import ScriptFailedError, Session, Way
from tests.gpu import confirm, host

MACHINE = {"gpu": "NVIDIA H200", "capacity_bytes": 150 << 30, "driver": "580.1", "torch": "2.11.0+cu130", "python": "3"}
FAILED = {"step": 2, "phase": "forward", "num_allocations": 9, "requested_bytes": 512, "peak_reserved_bytes": 1}


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path / "a.json", MACHINE, [JOBS["lstm"], JOBS["ddp_8"]], 4, False, "make gpu", lambda line: None)


def written(session: Session, name: str) -> dict[str, Any]:
    return session.tables[name]


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


def test_kernels_are_compared_where_both_sides_have_times(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(made: Session, job: GpuJob, run: Path, *, measured: bool) -> Any:
        if not measured and job.name == "ddp_8":
            return "no kernels"
        us = 100.0 if measured else 150.0
        return pd.DataFrame({"family": ["gemm", "communication"], "layer_name": ["a", "a"], "duration_us": [us, 7.0]})

    session.jobs = [JOBS["lstm"], JOBS["ddp_8"], JOBS["allocations"]]
    monkeypatch.setattr(pieces, "_timed", timed)
    assert not pieces.run_kernel_times(session)
    data = written(session, "gpu-estimates")
    assert data["head"]["failed"] == ["ddp_8, estimated: no kernels"]
    assert [(row["job"], row["what"], row["measured_us"], row["estimated_us"]) for row in data["rows"]] == [
        ("lstm", what, 100.0, 150.0) for what in ("total", "gemm", "layer a")
    ]


def test_an_example_that_differs_is_shown_with_its_peaks(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(made: Session, way: Way, example: str, directory: Path) -> JobRecord:
        peak = 300 if way.device == "virtual" else 100
        statistics = {"allocated_bytes.all.peak": peak, "reserved_bytes.all.peak": 400}
        return JobRecord(f"fakedist profile {example}", statistics=statistics)

    monkeypatch.setattr(confirm, "EXAMPLES", confirm.EXAMPLES[:1])
    monkeypatch.setattr(confirm, "_example", run)
    assert confirm.run_examples(session)
    (row,) = written(session, "gpu-examples")["rows"]
    assert row["command"].startswith("fakedist profile --world-size 8 --rank 3 examples/ddp_gpt.py")
    assert (row["virtual_verdict"], row["allocated_bytes"], row["virtual_allocated_difference_bytes"]) == (
        "statistics", 100, 200,
    )  # fmt: skip


def test_an_example_for_which_the_time_is_over_is_not_run(session: Session, tmp_path: Path) -> None:
    session.ends_at = 0.0
    assert confirm._example(session, session.virtual, confirm.EXAMPLES[0], tmp_path).error == pieces.TIME_IS_OVER


def test_a_step_without_times_on_one_side_is_no_row(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def estimated(made: Session, job: str, directory: Path) -> dict[str, Any]:
        if "1 sequence" in job:
            raise ScriptFailedError("it ended with exit code 1: no compiler")
        return {"this_us": 5.0}

    monkeypatch.setattr(host, "JOBS", dict(list(host.JOBS.items())[:2]))
    monkeypatch.setattr(host, "_calls", lambda made: True)
    monkeypatch.setattr(host, "_measured", lambda made, job, directory: {"step_us": 4.0})
    monkeypatch.setattr(host, "_estimated", estimated)
    assert not host.run(session)
    data = written(session, "gpu-steps")
    assert data["rows"] == [{"job": "GPT-2, DDP, 8 sequences", "step_us": 4.0, "this_us": 5.0}]
    assert data["head"]["failed"] == ["GPT-2, DDP, 1 sequence: it ended with exit code 1: no compiler"]


def test_a_program_that_fails_is_reported_with_the_end_of_its_output(session: Session) -> None:
    assert confirm.run_program(session, "-c", "print('fine')")
    assert not confirm.run_program(session, "-c", "raise SystemExit('no such kernel')")
    assert session.log == ["fine", "-c ended with exit code 1: no such kernel"]


def test_real_processes_run_on_the_gpu_and_a_rehearsals_on_virtual_ones(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def compare_all(ways: Any, *rest: Any) -> tuple[list[Any], list[str]]:
        seen.extend(f"{way.device} {way.job} {way.num_ranks}" for way in ways)
        return [], ["ddp: no"]

    monkeypatch.setattr(confirm.many, "compare_all", compare_all)
    assert not confirm.run_processes(session)
    assert "cuda fsdp2 8" in seen
    assert "cuda pipeline_1f1b 8" not in seen
    assert len(seen) == 20
    seen.clear()
    session.rehearsal = True
    confirm.run_processes(session)
    assert {text.split()[0] for text in seen} == {"virtual"}
