"""Work that follows the tokens of experts is priced as on the busiest rank of each call."""

import numpy as np
import pandas as pd
import pytest

from fakedist.analysis.launches import launch_table, work_table
from fakedist.cost_model.busiest_rank import ExpertsLoad, own_work, scale_to_busiest_rank
from fakedist.errors import JobError
from fakedist.router_load import RouterLoad, RouterPass
from fakedist.rundir.table_rows import TABLES
from tests.unit.cost_model.launches_by_hand import COPY, PRODUCT, launch, record

CALL = RouterPass(0, 3, 1, 64, 8, 2)
SIZES = {"bytes_in": 100, "bytes_out": 80, "largest_part_bytes": 50, "exchanged_bytes": 70}


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    """A copy, three products and two calls; the last two products and both calls belong to a router's call."""
    made = record([launch(COPY), *(launch(PRODUCT) for _ in range(3)), launch(COPY, call=5), launch(COPY, call=6)])
    rows = [(row, row == 3, *CALL, 40, 100) for row in (2, 3, 4, 5)]
    names = ["launch", "sums", *RouterPass._fields, "received", "busiest"]
    calls = [{"sequence": 5, "group": 0, "operation": "all_to_all_single", "peer": -1, **SIZES}]
    calls += [{**calls[0], "sequence": 6, "operation": "all_reduce"}]
    return {
        "launches": launch_table(made),
        "work": work_table(made),
        "calls": pd.DataFrame(calls),
        "groups": pd.DataFrame(
            {"name": ["0"], "description": [""], "backend": ["nccl"], "ranks": ["0-3"], "size": [4], "group_rank": [0]}
        ),
        "routed": pd.DataFrame(rows, columns=names)[TABLES["routed"].names],
    }


def test_products_have_the_rows_of_the_busiest_rank_or_sum_over_them(tables: dict[str, pd.DataFrame]) -> None:
    found = scale_to_busiest_rank(tables, ExpertsLoad())
    rows = found["work"].iloc[found["launches"]["work"].to_numpy()]
    m, k, flops = (rows[name].to_numpy("f8") for name in ("m", "k", "flops"))
    assert (m[2] / m[1], k[2] / k[1], m[3] / m[1], k[3] / k[1]) == (2.5, 1.0, 1.0, 2.5)
    assert (flops[2:4] / flops[1]).tolist() == [2.5, 2.5]
    assert own_work(rows, "flops")[1:4].tolist() == [flops[1]] * 3, "the rank itself has no more to compute"
    assert tables["launches"]["work"].nunique() == 2, "what was recorded stays"


def test_exchanges_take_as_many_bytes_and_other_calls_theirs(tables: dict[str, pd.DataFrame]) -> None:
    found = scale_to_busiest_rank(tables, ExpertsLoad())["calls"][list(SIZES)].to_numpy()
    assert found.tolist() == [[250, 200, 125, 175], list(SIZES.values())]


def test_another_load_is_drawn_for_the_same_calls(tables: dict[str, pd.DataFrame]) -> None:
    experts = ExpertsLoad("zipf:1", is_recorded=False, seed=4, ranks=(0, 1, 2, 3))
    most = int(RouterLoad("zipf:1", 4).received(CALL, range(4)).max())
    found = scale_to_busiest_rank(tables, experts)["calls"]["bytes_in"].tolist()
    assert found == [round(100 * most / 40), 100]
    with pytest.raises(JobError, match="no launch of the run is known to follow"):
        scale_to_busiest_rank(tables | {"routed": tables["routed"][:0]}, experts)


def test_an_even_load_changes_nothing(tables: dict[str, pd.DataFrame]) -> None:
    even = tables | {"routed": tables["routed"].assign(busiest=40)}
    found = scale_to_busiest_rank(even, ExpertsLoad())
    assert found["work"] is tables["work"]
    assert np.array_equal(found["launches"]["work"], tables["launches"]["work"])
