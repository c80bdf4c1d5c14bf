"""How close estimated steps are to published ones: ``accuracy_steps.json``, typed.

``make accuracy-steps`` (bench/accuracy_steps.py) runs the jobs and writes the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fakedist.errors import SetupError
from fakedist.run.plain import PlainValueError, from_plain
from fakedist.time.measurements import DATA


@dataclass(frozen=True)
class StepRow:
    """A published step, and what is estimated for the same job. Times are in seconds.

    Attributes:
        name: Short name of the job.
        job: What ran, and on how many GPUs.
        gpu: The GPU model, or the name of the GPU file in bench/jobs.
        watts: Its power limit.
        source: Who published the step.
        note: What the source leaves open, or differs in ours; empty if nothing.
        is_fitted: Whether the power model's parameter was fitted on this row among others.
        is_host_bound: Whether the host sets the step's pace.
        published_s: The published step.
        step_s: The estimate: kernels, host and communication.
        low_s: The lower end of its 90 % interval.
        high_s: The upper end.
        left_out_s: The estimate with the parameter fitted on the other rows only; None for a row that is not fitted.
        kernels_s: The estimate if communication took no time; None for stages of a pipeline, which wait for each other.
    """

    name: str
    job: str
    gpu: str
    watts: float
    source: str
    note: str
    is_fitted: bool
    is_host_bound: bool
    published_s: float
    step_s: float
    low_s: float
    high_s: float
    left_out_s: float | None
    kernels_s: float | None

    @property
    def error(self) -> float:
        """The estimate's relative error."""
        return self.step_s / self.published_s - 1

    @property
    def error_without_communication(self) -> float | None:
        """The relative error if communication took no time."""
        return None if self.kernels_s is None else self.kernels_s / self.published_s - 1


@dataclass(frozen=True)
class StepAccuracy:
    """Every published step, and the fit.

    Attributes:
        heat: The power model's parameter as fitted on all rows that count.
        rows: The steps.
    """

    heat: float
    rows: list[StepRow]

    @property
    def filled(self) -> list[StepRow]:
        """The steps that GPUs fill, not the host."""
        return [row for row in self.rows if not row.is_host_bound]


@cache
def step_accuracy(path: Path = DATA / "accuracy_steps.json") -> StepAccuracy:
    """The contents of the file.

    Raises:
        SetupError: The file is missing or damaged.
    """
    try:
        return from_plain(StepAccuracy, json.loads(path.read_text()))
    except FileNotFoundError:
        raise SetupError(f"the accuracy of steps is missing: {path}", "make accuracy-steps writes it") from None
    except (OSError, ValueError, PlainValueError) as error:
        raise SetupError(f"the accuracy of steps is damaged: {path}: {error}", "make accuracy-steps") from error
