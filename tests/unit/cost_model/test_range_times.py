import json

import pandas as pd
import pytest

from fakedist.cost_model.breakdown import by_range, range_lanes, range_table, timed
from fakedist.cost_model.step_axis import range_events
from fakedist.rundir.launch_records import RangeRow
from fakedist.rundir.schema import RANGES
from tests.unit.cost_model.times_by_hand import NAN, kernel, table


def ranges(*rows: tuple[str, int, int, int, int]) -> pd.DataFrame:
    """The table ``ranges`` over five launches: rows 0, 1, 3 and 4 are kernels, 5 is a collective."""
    kernels = [
        kernel(10, 5, launch=0, launch_us=1.0),
        kernel(15, 50, launch=1, launch_us=2.0),
        kernel(12, 8, launch=3, launch_us=4.0, stream=7),  # begins earlier, on another stream
        kernel(70, NAN, "other", launch=4, launch_us=6.0),
        kernel(80, NAN, "communication", launch=5, launch_us=7.0, call=3),
    ]
    recorded = pd.DataFrame([RangeRow(*row) for row in rows], columns=RangeRow._fields)
    return range_table(recorded, timed(table(*kernels)))


def test_a_range_has_the_kernels_that_were_launched_in_it() -> None:
    found = ranges(("step", 0, 0, 0, 6), ("two", 0, 1, 1, 4))
    assert list(found.columns) == [column.name for column in RANGES.columns]
    step, two = found.itertuples(index=False)
    assert (step.num_kernels, step.num_unknown, step.kernel_us, step.num_calls) == (4, 1, 63, 1)
    assert (two.num_kernels, two.kernel_us, two.num_calls) == (2, 58, 0)
    assert (two.begin_us, two.end_us, two.gpu_begin_us, two.gpu_end_us) == (2, 4, 12, 65)
    (found,) = ranges(("mark", 0, 0, 2, 2)).itertuples(index=False)
    assert (found.num_kernels, found.kernel_us) == (0, 0)
    assert found.begin_us != found.begin_us


def test_ranges_of_one_name_are_summed_most_time_first() -> None:
    small, large = by_range(ranges(("a", 0, 1, 0, 1), ("b", 0, 0, 1, 2), ("a", 0, 2, 3, 4)))[::-1]
    assert (large.name, large.kernel_us) == ("b", 50)
    assert (small.name, small.num_ranges, small.depth, small.num_kernels, small.kernel_us) == ("a", 2, 1, 2, 13)
    assert small.gpu_us == pytest.approx(13)


def test_ranges_that_overlap_on_the_gpu_are_below_each_other() -> None:
    found = range_lanes(ranges(("in", 0, 1, 0, 1), ("out", 0, 0, 0, 2), ("late", 0, 0, 3, 4), ("none", 0, 0, 2, 2)), 9)
    assert [(row.name, row.lane, row.start_us, row.end_us) for row in found.itertuples()] == [
        ("out", 0, 10, 65),
        ("in", 1, 10, 15),
        ("late", 2, 12, 20),
    ]
    after = range_lanes(ranges(("one", 0, 0, 0, 1), ("two", 0, 0, 1, 2)), 9)
    assert after["lane"].tolist() == [0, 0]
    assert range_lanes(ranges(("in", 0, 1, 0, 1), ("out", 0, 0, 0, 2)), 1)["name"].tolist() == ["out"]


def test_the_trace_has_a_track_of_them_by_thread_and_names_are_text() -> None:
    found = ranges(('</script>"', 0, 0, 0, 2), ("other thread", 1, 0, 1, 4), ("empty", 0, 0, 2, 2))
    events = [json.loads(line) for line in range_events(found)]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert set(slices) == {'</script>"', "other thread"}
    assert (slices["other thread"]["ts"], slices["other thread"]["dur"]) == (2, 2)
    assert len({event["tid"] for event in slices.values()}) == 2
