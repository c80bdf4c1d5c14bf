"""Kept tables of recorded ranks come back as they were, but for the host's times, which are rounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from pandas.testing import assert_frame_equal

from fakedist.rundir.step_time import ClockSteadiness, HostTime
from tests.truth import kept
from tests.truth.catalogue import Made

HOST = HostTime("measured", "dgx-h100", 0.7, 0.6, 1.6, 9.0, 6.5, ClockSteadiness(1, 0.0, 0.01))
MADE = Made("0123abcd", "2026-01-01", "2.15.0+cu132", 70.0)


def tables(first_event: int) -> dict[str, pd.DataFrame]:
    launches = pd.DataFrame(
        {
            "what": ["kernel", "stream_records", "stream_waits", "kernel", "stream_records", "stream_waits", "kernel"],
            "event": np.array([0, first_event, first_event, 0, first_event + 7, first_event, 0], dtype=np.uint64),
            "op": np.array([-1, 40, -1, 41, 7, -1, 42]),
            "call": np.array([-1, -1, 3, -1, 2, -1, -1]),
            "dispatch_us": [1.0, 2.26, np.nan, 4.0, 0.04, 6.0, 7.0],
            "layer": np.arange(7, dtype=np.int32),
        }
    )
    calls = pd.DataFrame({"sequence": np.array([0, 1, 5]), "op": np.array([2, -1, 9]), "operation": ["a", "b", "c"]})
    return {
        "launches": launches,
        "work": pd.DataFrame({"name": ["x"]}),
        "calls": calls,
        "groups": pd.DataFrame({"s": [8]}),
    }


def test_ranks_of_several_rows_come_back_and_one_may_be_replaced(tmp_path: Path) -> None:
    for row, rank, event in (("b", 0, 5), ("a", 0, 1), ("a", 8, 2), ("b", 0, 1000)):
        kept.keep(row, rank, tables(event), kept.Rank(HOST if rank else None, MADE), tmp_path)
    assert kept.ranks_of("a", tmp_path) == {0: kept.Rank(None, MADE), 8: kept.Rank(HOST, MADE)}
    assert kept.ranks_of("c", tmp_path) == {} == kept.tables_of("c", tmp_path)
    for row, rank, event in (("a", 0, 1), ("a", 8, 2), ("b", 0, 1000)):
        found = kept.tables_of(row, tmp_path)[rank]
        for name, table in tables(event).items():
            expected = table.assign(dispatch_us=table["dispatch_us"].round(1)) if name == "launches" else table
            assert_frame_equal(found[name], expected)


def test_a_column_that_earlier_recordings_lack_is_empty_there(tmp_path: Path) -> None:
    kept.keep("old", 0, tables(1), kept.Rank(None, MADE), tmp_path)
    newer = tables(2)
    newer["launches"]["allocator"] = ["", "cudaMalloc 1 2097152", *[""] * 5]
    kept.keep("new", 0, newer, kept.Rank(None, MADE), tmp_path)
    assert set(kept.tables_of("old", tmp_path)[0]["launches"]["allocator"]) == {""}
    assert (
        kept.tables_of("new", tmp_path)[0]["launches"]["allocator"].tolist() == newer["launches"]["allocator"].tolist()
    )
