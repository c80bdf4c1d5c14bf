"""Operations on large CPU tensors: their rates, their place in the step, and its interval."""

from __future__ import annotations

import numpy as np
import pytest

from fakedist.analysis.launches import launch_table
from fakedist.cost_model.cpu_work import cpu_work, cpu_work_us
from fakedist.cost_model.timeline import Timeline
from fakedist.rundir.launch_records import HostWork
from fakedist.rundir.time_notes import cpu_work_estimated
from tests.unit.cost_model.launches_by_hand import COPY, Host, launch, record

MEAN = HostWork("aten.mean.default", 16_000_000, 64e6, 0.0, 1, "train.py:7 (main)")
SORT = MEAN._replace(operation="aten.sort.default", moved_bytes=256e6, line="train.py:9 (a name, with a comma)")


def test_the_gpu_waits_for_work_between_two_launches_which_widens_the_interval() -> None:
    launches = launch_table(record([launch(COPY), launch(COPY, host_work=f"{MEAN}\n{SORT}")]))
    timeline = Timeline(launches)
    us, least, most = (each.place(np.zeros(2), Host()).end_us for each in (timeline, *timeline.bounds("cpu")))
    assert us == pytest.approx(16_000 + 16_000 * 5 * np.log2(16e6))  # 0.25 ns a byte; 5 ns an element and level
    assert (0.1e6 < least < 0.2e6, most > 3 * us) == (True, True)
    work = cpu_work(launches)
    assert work is not None
    assert (work.num_operations, work.line) == (2, SORT.line)
    assert "2 operations on large floats in the host's memory" in cpu_work_estimated(work).text


def test_threads_share_bytes_and_flops_and_not_a_sort() -> None:
    works = (MEAN, SORT, MEAN._replace(operation="aten.mm.default", flops=1e9))
    alone, shared = ([launch(COPY, host_work=str(work._replace(threads=n))) for work in works] for n in (1, 8))
    ratios = cpu_work_us(launch_table(record(alone))) / cpu_work_us(launch_table(record(shared)))
    assert ratios.round(6).tolist() == [[16.0] * 3, [8.0, 1.0, 8.0], [1.0] * 3]
