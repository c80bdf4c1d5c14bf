from __future__ import annotations

import pytest

from fakedist.extras.confirm.jobs import JOBS
from fakedist.extras.confirm.pieces import StepKernels, Way, compare_times, run_times

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
