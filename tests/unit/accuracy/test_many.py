"""Real processes against faked ranks: what is faked where, without running anything."""

from dataclasses import replace
from pathlib import Path

import pytest

from fakedist.options import Job
from fakedist.rundir.directory import create_run_directory, load_manifest, new_manifest, write_manifest
from tests.accuracy import many
from tests.accuracy.many import JobFailedError, Way, compare_all
from tests.unit.report.handmade import summary_of_nothing


def test_with_a_real_gpu_each_rank_is_faked_on_it_and_on_a_virtual_one_like_it(tmp_path: Path) -> None:
    way = Way("fsdp2", 2, "cuda", "nccl")
    with create_run_directory(tmp_path / "real", force=False) as made:
        new_manifest(made, Job(2, 0, "job.py", device="cuda"))
    summary = replace(summary_of_nothing(), gpu="NVIDIA H200", capacity_bytes=150_119_383_040)
    write_manifest(tmp_path / "real", replace(load_manifest(tmp_path / "real"), summary=summary))
    assert way.faked_on == ("cuda", "virtual")
    assert many._device_options(way, "cuda", tmp_path / "real") == ["--device", "cuda"]
    virtual = many._device_options(way, "virtual", tmp_path / "real")
    assert virtual == ["--device", "virtual", "--gpu", "h200", "--gpu-memory", "150119383040B"]


def test_a_job_that_fails_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(way: Way, at_once: int) -> list[many.Row]:
        if way.job == "ddp":
            raise JobFailedError("ddp: real-0: a long story\nRuntimeError: the end of it")
        return [many.Row(way.job, way.backend, way.num_ranks, 0, "virtual", 1, 2, 0, 0, 0, 3, 4, -1, "")]

    monkeypatch.setattr(many, "compare", compare)
    ways = [Way(job, 2, "virtual", "nccl") for job in ("ddp", "fsdp2")]
    told: list[str] = []
    rows, failed = compare_all(ways, told=told.append)
    assert [row.job for row in rows] == ["fsdp2"]
    assert failed == ["ddp, 2 ranks, nccl: RuntimeError: the end of it"]
    assert len(told) == 2


def test_what_the_time_did_not_allow_is_told() -> None:
    rows, failed = compare_all([Way("ddp", 2, "virtual", "nccl")], ends_at=0.0)
    assert (rows, failed) == ([], ["ddp, 2 ranks, nccl: not run: the time was over"])
