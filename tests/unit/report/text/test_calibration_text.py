"""The output of `fakedist calibrate`: what was measured, what was left out and why, what changes."""

import dataclasses
import json
from pathlib import Path

from fakedist.cost_model.kernels.calibration_table import CalibrationOrigin, made_table
from fakedist.report.text.calibration_text import calibration_lines, calibration_object
from fakedist.results.calibration.calibrating import Calibrated, CalibrationResult, StepChange, Unmatched
from fakedist.rundir.launch_records import WorkRow

GPU = "NVIDIA H200"
WORK = WorkRow("cublasGemmEx", "product", "gemm", "aten.mm.default", m=1, n=2, k=3)
MADE = Calibrated(
    made_table(CalibrationOrigin(GPU, "torch.profiler", "2026-01-31"), {WORK: [2.0]}),
    num_launches=1200, num_measured=1190, num_steps=3, num_kernels=3600, num_unread=0, num_matched=3570, num_extra=0,
    num_conflicts=0, num_ambiguous=0, num_too_fast=0, num_elsewhere=0, num_unreadable=0, missing=[], extra=[],
)  # fmt: skip
CHANGE = StepChange(GPU, "", 1.8e6, 2.71e6, 2.5e6, 3.0e6, 0.83, 0.1)


def lines(made: Calibrated = MADE, **changes: object) -> list[str]:
    found = CalibrationResult(made, True, -1, CHANGE)
    return calibration_lines(dataclasses.replace(found, **changes), 0, Path("/runs/t.json"))  # type: ignore[arg-type]


def test_a_good_trace_takes_three_lines() -> None:
    assert lines() == [
        "1,190 of the step's 1,200 launches were measured, by 3,570 of 3,600 kernels in t.json (3 steps, NVIDIA H200)",
        "measured on your GPU: 83% of kernel time; 10% is estimated and scaled by similar kernels",
        "the step on NVIDIA H200: 2.71 s (2.50 s to 3.00 s); without the table 1.80 s",
    ]


def test_everything_that_was_left_out_has_a_line_with_its_reason() -> None:
    extra = [Unmatched(f"kernel{number}", "other", 2, 1500.0) for number in range(4)]
    made = dataclasses.replace(
        MADE, num_extra=8, num_conflicts=1, num_ambiguous=2, num_too_fast=3, num_unread=4, num_elsewhere=5,
        num_unreadable=6, missing=[Unmatched("void flash::fwd", "attention", 10, 0.0)], extra=extra,
    )  # fmt: skip
    assert lines(made)[1:-2] == [
        "  not in the trace: 10 launches: 10 x flash::fwd",
        "  not in the run: 8 kernels: 2 x kernel0 (1.50 ms), 2 x kernel1 (1.50 ms), 2 x kernel2 (1.50 ms), ...",
        "  left out: 1 kernel whose grid or bytes are not the run's",
        "  left out: 2 kernels that may be one of several launches",
        "  left out: 3 kernels faster than the GPU's peak",
        "  not read: the last 4 kernels of a long trace",
        "  not read: 5 kernels and copies of other processes and GPUs (--process)",
        "  not read: 6 damaged events",
    ]


def test_what_was_assumed_is_told() -> None:
    assert "  the trace does not name its GPU: it is taken to be the run's, NVIDIA H200" in lines(gpu_is_named=False)
    assert "  the trace is of rank 3, the run of rank 0" in lines(trace_rank=3)
    assert not any("rank" in line for line in lines(trace_rank=0))
    assert lines(change=None)[-1] == (
        '  fakedist does not know NVIDIA H200: a GPU file with product = "NVIDIA H200" makes the table usable'
    )


def test_the_object_has_all_counts_and_the_change() -> None:
    found = calibration_object(CalibrationResult(MADE, True, -1, CHANGE), Path("t.times.json"))
    assert json.loads(json.dumps(found)) == found
    assert (found["table"], found["num_rows"], found["trace_rank"]) == ("t.times.json", 1, None)
    assert found["change"] == dataclasses.asdict(CHANGE)
    assert found["num_matched"] == 3570
