"""`make calibrate` refuses without a GPU, with an unknown one, and to pass off a rehearsal as measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakedist.errors import JobError, ScriptError
from tests.gpu import calibrate


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "count_real_gpus", lambda: 0)
    with pytest.raises(JobError, match="no GPU here to measure"):
        calibrate.calibrate(None, None, rehearse=False)


def test_a_rehearsal_writes_only_where_it_is_told_to() -> None:
    with pytest.raises(JobError, match="not measured"):
        calibrate.calibrate(None, None, rehearse=True)


def test_a_gpu_is_found_by_the_name_that_cuda_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calibrate.model_named("NVIDIA H200").name == "h200"
    monkeypatch.setattr(calibrate, "count_real_gpus", lambda: 1)
    monkeypatch.setattr(calibrate, "real_name", lambda: "NVIDIA H900")
    with pytest.raises(JobError, match="does not know NVIDIA H900") as caught:
        calibrate.calibrate(None, None, rehearse=False)
    assert 'product = "NVIDIA H900"' in caught.value.hint


@pytest.mark.long
def test_a_job_that_fails_is_told_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "shapes.py"
    broken.write_text("raise SystemExit('no such kernel')")
    monkeypatch.setattr(calibrate, "SHAPES", broken)
    with pytest.raises(ScriptError, match="ended with exit code") as caught:
        calibrate.calibrate(tmp_path / "own.json", None, rehearse=True)
    assert "no such kernel" in caught.value.output
    assert not (tmp_path / "own.json").exists()
