"""Further micro-batches: the extended step is the step that a longer run records, launch by launch."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.job.micro_batches import (
    Recorded,
    backward_kind,
    backward_parts,
    count_micro_batches,
    repeated_passes,
    unit_rows,
    with_micro_batches,
)
from fakedist.cost_model.job.stages import num_stages_of
from fakedist.errors import JobError
from tests.unit.cost_model.pipelines_by_hand import Recording, Shape

_LAUNCH = ["what", "phase", "recompute", "layer", "stream", "num_operations"]


def recorded(shape: Shape, rank: int) -> Recorded:
    tables = Recording(shape, rank).tables()
    launches, work, calls = tables["launches"], tables["work"], tables["calls"]
    stages = num_stages_of(launches, calls, tables["groups"])
    return Recorded(rank, launches, work, calls, stages, count_micro_batches(launches, work))


def plain(step: Recorded, launches: pd.DataFrame) -> pd.DataFrame:
    """Each launch in words, and the row that records the event it waits for."""
    found = launches[_LAUNCH].astype(str)
    work = [f"{row.operation} {row.accumulates}" for row in step.work.itertuples()]
    found["work"] = np.append(work, "")[launches["work"].to_numpy("i8")]
    calls = step.calls.set_index("sequence")
    for name in ("operation", "group", "peer"):
        found[f"call_{name}"] = calls[name].reindex(launches["call"]).astype(str).to_numpy()
    events, waits = launches["event"].to_numpy("u8"), launches["what"].astype(str) == "stream_waits"
    records = dict(zip(events[~waits].tolist(), np.flatnonzero(~waits).tolist(), strict=True))
    found["waits_for"] = [
        records.get(int(event), -1) if wait else -1 for event, wait in zip(events, waits, strict=True)
    ]
    return found


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_chunks", "fewer", "more"),
    [
        ("GPipe", 2, 1, 6, 11),
        ("GPipe", 1, 1, 4, 5),
        ("1F1B", 1, 1, 4, 9),
        ("1F1B", 4, 1, 8, 19),
        ("LoopedBFS", 2, 2, 6, 8),
        ("Interleaved1F1B", 2, 2, 8, 14),
        ("Interleaved1F1B", 4, 2, 20, 28),
        ("InterleavedZeroBubble", 4, 2, 20, 24),
        ("ZBVZeroBubble", 4, 2, 16, 21),
        ("DualPipeV", 4, 2, 16, 23),
    ],
)
def test_the_extended_step_is_that_of_a_longer_run(
    schedule: str, num_ranks: int, num_chunks: int, fewer: int, more: int
) -> None:
    for rank in range(num_ranks):
        step, longer = (recorded(Shape(schedule, num_ranks, num_chunks, number), rank) for number in (fewer, more))
        assert (step.num_micro_batches, longer.num_micro_batches) == (fewer, more)
        found = with_micro_batches(step, more)
        pd.testing.assert_frame_equal(plain(step, found), plain(longer, longer.launches))


def test_each_repetition_has_operations_of_its_own() -> None:
    step = recorded(Shape("1F1B", 1, 1, 4), 0)
    numbered = step.launches.assign(op=np.arange(len(step.launches)))
    found = with_micro_batches(Recorded(0, numbered, step.work, step.calls, 1, 4), 40)
    assert found["op"].is_unique


def test_as_many_as_were_recorded_change_nothing_and_fewer_are_refused() -> None:
    step = recorded(Shape("1F1B", 1, 1, 4), 0)
    assert with_micro_batches(step, 4) is step.launches
    with pytest.raises(JobError, match="recorded 4 micro-batches, and 3 is fewer"):
        with_micro_batches(step, 3)


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "number", "hint"),
    [("GPipe", 1, 4, "record 8 micro-batches"), ("1F1B", 1, 3, "record 8"), ("Interleaved1F1B", 2, 4, "record 8")],
)
def test_too_few_to_be_steady_are_refused_with_the_number_to_record(
    schedule: str, num_chunks: int, number: int, hint: str
) -> None:
    """Four micro-batches of GPipe on two ranks could be the warm-up of another schedule."""
    with pytest.raises(JobError, match=f"rank 0: none of its {number} micro-batches is steady") as caught:
        with_micro_batches(recorded(Shape(schedule, 2, num_chunks, number), 0), 64)
    assert hint in (caught.value.hint or "")


def test_a_warm_up_is_not_taken_for_gpipe() -> None:
    """The first of eight stages has run all its forwards before its first backward: that says nothing of the ninth."""
    with pytest.raises(JobError, match="record 32 micro-batches"):
        with_micro_batches(recorded(Shape("1F1B", 8, 1, 8), 0), 9)


def test_micro_batches_that_come_in_rounds_are_repeated_in_rounds() -> None:
    step = recorded(Shape("Interleaved1F1B", 4, 2, 20), 0)
    with pytest.raises(JobError, match="4 at a time") as caught:
        with_micro_batches(step, 30)
    assert caught.value.hint == "--micro-batches 28 or 32"


def with_idle_records(launches: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Records of events that nothing waits for, here and there, each after an operation of the host."""
    places = np.random.default_rng(seed).choice(len(launches), 20) + 0.5
    idle = launches.iloc[:20].assign(what="stream_records", work=-1, call=-1, event=1 << 40, num_operations=1)
    idle = idle.set_index(pd.Index(places))
    return pd.concat([launches, idle]).sort_index(kind="stable").reset_index(drop=True)


def test_records_that_nothing_waits_for_do_not_hide_what_repeats() -> None:
    step = recorded(Shape("Interleaved1F1B", 4, 2, 20), 1)
    untidy = dataclasses.replace(step, launches=with_idle_records(step.launches, seed=0))
    with pytest.raises(JobError, match="none of its 20 micro-batches is steady"):
        with_micro_batches(dataclasses.replace(untidy, launches=untidy.launches.assign(host_us=1.0)), 28)
    found, expected = with_micro_batches(untidy, 28), with_micro_batches(step, 28)
    others = [
        plain(step, each).drop(columns=["num_operations", "waits_for"])[each["what"].astype(str) != "stream_records"]
        for each in (found, expected)
    ]
    pd.testing.assert_frame_equal(*(each.reset_index(drop=True) for each in others))
    assert found["num_operations"].sum() >= expected["num_operations"].sum() + 20 - 1  # one may come last


def test_sizes_that_the_routing_made_up_do_not_hide_what_repeats() -> None:
    step = recorded(Shape("1F1B", 1, 1, 6), 0)
    rows = np.flatnonzero((step.launches["phase"].astype(str) == "forward") & (step.launches["work"] == 1))
    work = pd.concat([step.work, step.work.iloc[np.ones(len(rows), int)].assign(m=1000 + np.arange(len(rows)))])
    numbers = step.launches["work"].to_numpy("i8", copy=True)
    numbers[rows] = len(step.work) + np.arange(len(rows))
    varied = Recorded(0, step.launches.assign(work=numbers), work.reset_index(drop=True), step.calls, 1, 6)
    found = with_micro_batches(varied, 10)
    assert plain(varied, found)["work"].tolist() == plain(step, with_micro_batches(step, 10))["work"].tolist()


def test_units_are_layers_and_modules_around_them() -> None:
    names = ["", "(Model)", "embedding", "layers", "layers.4", "layers.4.up", "layers.4.experts.0", "head", "head.norm"]
    assert unit_rows(names, [0, 0, 1, 1, 3, 4, 4, 1, 7]) == (
        [0, 0, 2, 0, 4, 4, 4, 7, 7],
        [-1, -1, -1, -1, 4, -1, 0, -1, -1],
    )


def test_backwards_are_whole_or_in_two_parts_by_what_their_products_make() -> None:
    unit_of = np.ones(8, "i8")
    whole, parts = np.array([1, -1, 1, -1, 0]), np.array([1, 1, 0, -1, -1])
    assert backward_parts([0, 1, 2, 3, 4], whole, unit_of) == [[0, 1, 2, 3, 4]]
    assert backward_parts([0, 1, 2, 3, 4], parts, unit_of) == [[0, 1], [2, 3, 4]]
    assert [backward_kind(np.array(makes), "I") for makes in ([1, -1], [1, 1], [-1], [0])] == ["B", "W", "I", "I"]


def test_passes_of_a_layer_that_follow_one_another_are_told_apart_by_what_each_does_once() -> None:
    token, unit = list("abacabac"), np.array([0, 1, 1, 1] * 2)
    assert repeated_passes([0, 1, 2, 3, 4, 5, 6, 7], token, unit) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert repeated_passes([0, 1, 2, 3], token, unit) == [[0, 1, 2, 3]]
