"""The report of a calibration, as the terminal, Markdown and JSON have it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from fakedist.cost_model.kernels.calibration_table import CalibrationOrigin, made_table
from fakedist.extras.calibration.calibrating import (
    Calibrated,
    CalibrationResult,
    StepChange,
    Unmatched,
    calibration_report,
)
from fakedist.rundir.launch_records import WorkRow
from tests.unit.report.test_faces import FORMATS, faces


def calibrated(*, is_good: bool = True) -> CalibrationResult:
    """A table made of a trace that fits its run, and one of which much was left out and assumed."""
    origin = CalibrationOrigin("NVIDIA H200", "torch.profiler", "2026-01-31")
    work = WorkRow("cublasGemmEx", "product", "gemm", "aten.mm.default", m=1, n=2, k=3)
    made = Calibrated(
        made_table(origin, {work: [2.0]}),
        num_launches=1200, num_measured=1190, num_steps=3, num_kernels=3600, num_unread=0, num_matched=3570,
        num_extra=0, num_conflicts=0, num_ambiguous=0, num_too_fast=0, num_elsewhere=0, num_unreadable=0,
        missing=[], extra=[],
    )  # fmt: skip
    if is_good:
        change = StepChange("NVIDIA H200", "h200", 1.8e6, 2.71e6, 2.5e6, 3.0e6, 0.83, 0.1)
        return CalibrationResult(made, True, 0, change)
    extra = [Unmatched(f"kernel{number}", "other", 2, 1500.0) for number in range(4)]
    made = replace(
        made, num_extra=8, num_conflicts=1, num_ambiguous=2, num_too_fast=3, num_unread=4, num_elsewhere=5,
        num_unreadable=6, missing=[Unmatched("void flash::fwd", "attention", 10, 0.0)], extra=extra,
    )  # fmt: skip
    return CalibrationResult(made, False, 3, None)


def test_calibration(snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    paths = {"run_directory": Path("my run"), "trace_file": Path("/runs/t.json"), "table_file": Path("t.times.json")}
    for is_good in (True, False):
        for form, text in faces(calibration_report(calibrated(is_good=is_good), 0, **paths), *FORMATS):
            assert text == snapshot(name=f"{is_good}-{form}")
