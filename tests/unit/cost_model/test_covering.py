import pandas as pd

from fakedist.cost_model.breakdown import timed
from fakedist.cost_model.step_axis import hidden_parts, hidden_us
from tests.unit.cost_model.times_by_hand import NAN, kernel, table


def kernels() -> pd.DataFrame:
    """Compute from 0 to 20 and from 20.5 to 40 on two streams; collectives from 10 to 50, from 60 on, and unknown."""
    return timed(
        table(
            kernel(0, 15),
            kernel(5, 15, stream=3),
            kernel(20.5, 19.5),
            kernel(10, 40, "communication", stream=9),
            kernel(60, 10, "communication", stream=9),
            kernel(12, NAN, "communication", stream=9),
        )
    )


def test_parts_are_where_something_computes_during_a_collective_and_can_be_seen() -> None:
    exact = hidden_parts(kernels(), 0.1)
    assert exact.to_numpy("f8").tolist() == [[9, 10, 20], [9, 20.5, 40]]
    assert hidden_parts(kernels(), 1.0).to_numpy("f8").tolist() == [[9, 10, 40]]
    assert len(hidden_parts(kernels(), 31.0)) == 0
    bars = pd.DataFrame({"start_us": [10.0, 60.0, 18.0], "end_us": [50.0, 70.0, 21.0]})
    assert hidden_us(bars, kernels()).tolist() == [29.5, 0.0, 2.5]
    collectives, compute = kernels()[lambda rows: ~rows["is_compute"]], kernels()[lambda rows: rows["is_compute"]]
    assert len(hidden_parts(collectives, 0.1)) == 0
    assert len(hidden_parts(compute, 0.1)) == 0
