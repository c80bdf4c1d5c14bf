"""How close estimated kernel times are to measured ones that were left out: ``accuracy.json``, typed.

``make accuracy-times`` (bench/accuracy_times.py) writes the file with the estimators of this package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fakedist.errors import SetupError
from fakedist.gpu_models.spec import GpuSpec
from fakedist.run.plain import PlainValueError, from_plain
from fakedist.time.gpus import nearest_table
from fakedist.time.measurements import DATA

#: Widths of intervals are given by estimated time, in microseconds, and by distance from the nearest measured sizes, in
#: powers of two: below, between and above these.
TIME_EDGES_US = (16.0, 64.0, 256.0, 1024.0)
OCTAVE_EDGES = (0.2, 0.5)


@dataclass(frozen=True)
class AccuracyRow:
    """How close the estimates of one family are on one GPU.

    Attributes:
        family: What was estimated.
        gpu: The measured GPU model, a name of ``time.gpus.MEASURED_GPUS``.
        kernels: Kernels that were left out.
        median: Median of the relative error's size.
        p95: Its 95 % quantile.
        half_widths: Half the width of the 90 % interval, of the logarithm of estimate over measurement: by the bins of
            ``TIME_EDGES_US``, and in each by those of ``OCTAVE_EDGES``.
        inside: The share of left-out kernels within an interval that the others gave.
        noise: 5 % and 95 % quantiles of the logarithm of one collector's time over the median of all, on the same
            shapes; None if only one measured.
    """

    family: str
    gpu: str
    kernels: int
    median: float
    p95: float
    half_widths: list[list[float]]
    inside: float
    noise: tuple[float, float] | None = None


@cache
def accuracy_rows(path: Path = DATA / "accuracy.json") -> tuple[AccuracyRow, ...]:
    """Every row.

    Raises:
        SetupError: The file is missing or damaged.
    """
    try:
        return tuple(from_plain(list[AccuracyRow], json.loads(path.read_text())))
    except FileNotFoundError:
        raise SetupError(f"the accuracy of kernel times is missing: {path}", "make accuracy-times writes it") from None
    except (OSError, ValueError, PlainValueError) as error:
        raise SetupError(f"the accuracy of kernel times is damaged: {path}: {error}", "make accuracy-times") from error


def closest(gpu: GpuSpec, families: Iterable[str]) -> list[AccuracyRow]:
    """The rows that say how close a job's estimates are: those of these families, on the GPU most like its own.

    Args:
        gpu: The job's GPU.
        families: Families, as the column ``accuracy`` of priced work has them.
    """
    wanted, name = dict.fromkeys(families), nearest_table(gpu).name
    found = []
    for family in wanted:
        rows = [row for row in accuracy_rows() if row.family == family]
        own = [row for row in rows if row.gpu == name]
        found += own or rows[:1]
    return found
