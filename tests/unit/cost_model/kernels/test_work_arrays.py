"""Rows of work as arrays: which rows are chosen, how assumptions widen an interval, what limits a kernel."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.kernels.measurements import Assumptions, Estimates, WorkArrays, which_limits

WORK = pd.DataFrame(
    {
        "operation": pd.Categorical(["mm", "add", "mm", "add"]),
        "dtype": ["bf16", "bf16", "f32", "bf16"],
        "flops": [8, 0, 2, 4],
        "is_view": [0, 1, 0, 1],
    }
)
FIRST, LAST = np.array([True, False, False]), np.array([False, False, True])


def test_chosen_rows_of_chosen_rows_are_those_of_the_table() -> None:
    work = WorkArrays(WORK).only(np.array([True, False, True, True])).only(np.array([False, True, True]))
    assert (len(work), work.indices.tolist()) == (2, [2, 3])
    assert (work.numbers("flops").tolist(), work.numbers("flops").dtype) == ([2.0, 4.0], np.float64)
    assert (work.counts("flops").tolist(), work.counts("flops").dtype) == ([2, 4], np.int64)
    assert (work.flags("is_view").tolist(), work.flags("is_view").dtype) == ([False, True], np.bool_)
    assert (work.texts("operation").tolist(), work.texts("operation").dtype) == (["mm", "add"], np.object_)


def test_each_combination_of_texts_has_a_number_in_the_order_of_its_first_row() -> None:
    codes, combinations = WorkArrays(WORK, np.array([1, 2, 3])).combinations("operation", "dtype")
    assert (codes.tolist(), combinations) == ([0, 1, 0], [("add", "bf16"), ("mm", "f32")])
    codes, combinations = WorkArrays(WORK, np.array([], np.int64)).combinations("operation")
    assert (codes.tolist(), combinations) == ([], [])


def test_estimates_of_chosen_rows_replace_theirs_alone() -> None:
    everything = Estimates.unknown(3)
    found = Estimates(np.array([7.0]), np.array([0.2]), *(np.array([text], object) for text in ("memory", "copy", "a")))
    everything.put(LAST, found)
    assert everything.spare is None
    assert np.isnan(everything.time_us[:2]).all()
    assert np.isnan(everything.spread[:2]).all()
    assert (everything.time_us[2], everything.spread[2]) == (7.0, 0.2)
    assert [list(getattr(everything, name)) for name in ("bound", "accuracy", "basis")] == [
        ["", "", "memory"],
        ["", "", "copy"],
        ["", "", "a"],
    ]
    found.spare = np.array([0.5])
    everything.put(FIRST, found)
    assert everything.spare.tolist() == [0.5, 0.0, 0.0]
    found.spare = np.array([0.25])
    everything.put(LAST, found)
    assert everything.spare.tolist() == [0.5, 0.0, 0.25]


def test_assumptions_add_as_squares_and_are_named_in_the_rows_that_they_are_of() -> None:
    assumed = Assumptions(3)
    clock = (~LAST, np.array([1.2, 0.3, 9.0]), "the clock")
    assumed.add((FIRST, 0.4, "the layout"), clock, (np.zeros(3, bool), 5.0, "nothing"))
    assert assumed.spread(np.array([0.3, 0.4, 0.1])) == pytest.approx([1.3, 0.5, 0.1])
    texts = np.array(["mm", "add", "copy"], object)
    assert assumed.basis(texts).tolist() == [
        "mm; assumed: the layout; assumed: the clock",
        "add; assumed: the clock",
        "copy",
    ]
    assert texts.tolist() == ["mm", "add", "copy"]


def test_the_longer_of_compute_and_memory_limits_unless_a_start_takes_as_long() -> None:
    limits = which_limits(np.array([5.0, 2.0, 3.0, 1.0, 3.0]), np.array([4.0, 4.0, 3.0, 2.0, 1.0]), 2.0)
    assert limits.tolist() == ["compute", "memory", "memory", "launch", "compute"]
