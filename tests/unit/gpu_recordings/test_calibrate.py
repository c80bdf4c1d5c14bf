"""Calibration without a GPU refuses; what it writes replaces the curves of the GPU that was measured alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakedist.errors import JobError
from fakedist.gpu.pricing import DATA, Roofline, load_efficiency
from fakedist.gpu_models.known import find_gpu
from tests.gpu import calibrate

MEASURED_ON = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.15.0", "date": "2026-01-01", "machine": "here"}
FIXED = {"kernel": 1.5, "launch": 2.0, "operation": 3.0, "graph": 8.0}


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "count_real_gpus", lambda: 0)
    with pytest.raises(JobError, match="no GPU here to measure"):
        calibrate.calibrate(None, rehearse=False)


@pytest.mark.parametrize("out", [None, DATA])
def test_a_rehearsal_never_writes_the_packages_data(out: Path | None) -> None:
    before = DATA.read_text()
    with pytest.raises(JobError, match="not measured"):
        calibrate.calibrate(out, rehearse=True)
    assert DATA.read_text() == before


def test_measured_curves_replace_those_of_their_gpu_alone() -> None:
    found = {"fixed_us": FIXED, "curves": {"memory.copy": [[1e6, 0.5], [1e9, 0.95]]}}
    data = calibrate.merged(load_efficiency(), found, find_gpu("h200"), MEASURED_ON)
    hopper, ampere = Roofline(find_gpu("h100-80g"), data), Roofline(find_gpu("a100-80g"), data)
    assert hopper.fraction("memory.copy", 1e9) == 0.95
    assert ampere.fraction("memory.copy", 1e9) == Roofline(find_gpu("a100-80g")).fraction("memory.copy", 1e9)
    assert hopper.fraction("gemm.bf16", 1e12) == Roofline(find_gpu("h100-80g")).fraction("gemm.bf16", 1e12)
    assert (hopper.measured_on, hopper.fixed.kernel) == (MEASURED_ON, 1.5)
    assert ampere.measured_on is None
