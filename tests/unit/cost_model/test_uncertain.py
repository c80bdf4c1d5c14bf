from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.accuracy import KERNELS_WIDER, half_width, variances
from fakedist.cost_model.breakdown import call_spreads, uncertain_parts
from fakedist.cost_model.collectives.collective_times import FABRICS
from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.step import PricedStep, PriceList, StepInterval
from fakedist.cost_model.timeline import CriticalPath, Placed
from fakedist.gpu.models.catalogue import GPUS
from fakedist.report.content.time import uncertainty_sheets
from fakedist.rundir.step_time import GroupTime, KernelSource

SOURCE = KernelSource("estimated", "model", 1, "GPU", step_us=1000.0)
GROUPS = pd.DataFrame(
    [("0", "dp", "nccl", 8, 0, "0-7"), ("1", "tp", "nccl", 8, 0, "0-7"), ("2", "", "nccl", 8, 0, "0-7")],
    columns=["name", "description", "backend", "size", "group_rank", "ranks"],
)
CALLS = pd.DataFrame({"sequence": [4, 5, 6, 7], "group": [0, 0, 1, 2], "operation": ["all_gather"] * 4})
TABLES = {"calls": CALLS, "groups": GROUPS}
PRICES = pd.DataFrame({"time_us": [10.0, 30.0, 10.0], "high_us": [12.0, 40.0, 12.0]}, index=[4, 5, 6])
STEP = PricedStep(
    pd.DataFrame(),
    pd.DataFrame(),
    Communication(PRICES, GPUS["h100-80g"], FABRICS["dgx-h100-ndr"]),
    1000.0,
    StepInterval(900.0, 1050.0, 30.0, 40.0),
    notes=[],
    families=[],
    variances={"products bf16": 75.0, "norms": 25.0},
    path=CriticalPath(np.zeros(0, "i8"), np.zeros(0, "i8"), np.zeros(0)),
    placed=Placed(np.zeros(0), np.zeros(0), np.zeros(0), 1000.0, *(np.zeros(0) for _ in range(3))),
    price_list=PriceList(pd.DataFrame(), None),
)
DP = GroupTime("dp", 16, 2, "all_gather", 1, 0, 1.0, time_us=200.0, hidden_us=100.0, exposed_us=100.0)
TP = replace(DP, group="tp", num_nodes=1, exposed_us=50.0)


def test_shares_of_the_variance_add_up_and_the_largest_come_first() -> None:
    found = uncertain_parts(STEP, [DP, TP], TABLES)
    assert [(part.kind, part.name, part.group) for part in found] == [
        ("collectives", "all_gather", "dp"),
        ("kernels", "products bf16", ""),
        ("collectives", "all_gather", "tp"),
    ]
    # Of 30 and 40 us, squared: 2,500. dp and tp could add 30 and 10 us of exposed time.
    assert [part.share for part in found] == pytest.approx([0.64 * 0.75, 0.36 * 0.75, 0.64 * 0.25])
    assert [part.half_width_us for part in found] == pytest.approx([30.0, 30 * 0.75**0.5, 10.0])
    assert uncertain_parts(replace(STEP, interval=StepInterval()), [DP], TABLES) == []


def test_the_host_is_a_part_where_the_gpu_waits_for_it() -> None:
    late = replace(STEP, interval=StepInterval(900.0, 1100.0, 30.0, 40.0, 120.0))
    found = uncertain_parts(late, [DP, TP], TABLES)
    assert (found[0].kind, found[0].half_width_us, found[0].share) == ("host", 120.0, pytest.approx(144 / 169))
    (sheet,) = uncertainty_sheets(replace(SOURCE, uncertain=found))
    assert sheet.columns[0].cells[0] == "the host"
    assert "waits for launches" in sheet.columns[3].cells[0]


def test_errors_of_one_family_partly_go_together() -> None:
    priced = pd.DataFrame(
        {
            "time_us": [10.0, 10.0, 10.0, np.nan],
            "low_us": [9.0, 9.0, 8.0, np.nan],
            "high_us": [11.0, 12.0, 13.0, np.nan],
            "accuracy": ["norms", "norms", "", ""],
            "basis": ["", "", "arithmetic", ""],
        }
    )
    counts = np.array([2, 1, 1, 5])
    # Two norms may take 2 x 1 and 1 x 2 us longer: half of the variance as 4 us together, half as 2 and 2 alone.
    assert variances(priced, counts) == {"norms": 0.5 * 16 + 0.5 * 8, "arithmetic": 9.0}
    assert half_width(priced, counts, "high_us") == pytest.approx(KERNELS_WIDER * 21**0.5)


def test_spreads_are_those_of_the_calls_of_a_group_and_operation() -> None:
    assert STEP.communication is not None
    spreads = call_spreads(CALLS, GROUPS, STEP.communication)
    assert spreads == {("dp", "all_gather"): pytest.approx(0.3), ("tp", "all_gather"): pytest.approx(0.2)}


def test_each_part_has_a_measurement_that_would_narrow_it() -> None:
    (sheet,) = uncertainty_sheets(replace(SOURCE, uncertain=uncertain_parts(STEP, [DP, TP], TABLES)))
    names, alone, shares, with_ = (column.cells for column in sheet.columns)
    assert list(names) == ["all_gather on dp", "products bf16", "all_gather on tp"]
    assert (list(alone), list(shares)) == (["+3.0%", "+2.6%", "+1.0%"], ["48%", "27%", "16%"])
    assert "nccl-tests over 2 of your nodes" in with_[0]
    assert "fakedist calibrate RUN --from-trace" in with_[1]
    assert "nccl-tests in one of your nodes" in with_[2]
    assert uncertainty_sheets(SOURCE) == []
