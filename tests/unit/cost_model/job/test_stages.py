"""Pipelines: what comes out of the ranks' own schedules equals the formulas where those hold."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.job.stages import RankStep, Transfer, only_exchanges, place_together, transfers_of
from fakedist.cost_model.timeline import Timeline
from fakedist.rundir.launch_records import LAUNCH_KINDS
from tests.unit.cost_model.launches_by_hand import Host

FORWARD_US, BACKWARD_US = 100.0, 200.0


class Schedule:
    """The launches of one stage; transfers run on streams of their own, and the stage waits for what it receives."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.rows: list[tuple[str, int, int]] = []
        self.durations: list[float] = []
        self.transfers: list[list[Transfer]] = []

    def compute(self, time_us: float) -> None:
        self.rows.append(("kernel", 0, 0))
        self.durations.append(time_us)

    def transfer(self, peer: int, *, is_send: bool, time_us: float = 0.0) -> None:
        event = 2 * len(self.rows) + 1
        stream = 1 if is_send else 2
        self.rows += [("stream_records", 0, event), ("stream_waits", stream, event)]
        self.durations += [0.0, 0.0]
        self.transfers.append([Transfer(len(self.rows), is_send, peer, "pp", time_us)])
        self.rows.append(("collective", stream, 0))
        self.durations.append(time_us)
        if not is_send:
            self.rows += [("stream_records", stream, event + 1), ("stream_waits", 0, event + 1)]
            self.durations += [0.0, 0.0]

    def step(self) -> RankStep:
        launches = pd.DataFrame(self.rows, columns=["what", "stream", "event"])
        launches = launches.assign(num_operations=0, graph=0, device=0)
        launches["work"] = np.where(launches["what"].isin(["kernel", "collective"]), 0, -1)
        return RankStep(self.rank, Timeline(launches), np.array(self.durations), self.transfers)


class Stage:
    """One stage of a pipeline: forwards and backwards, with what they receive and send."""

    def __init__(self, rank: int, num_stages: int, send_us: float = 0.0) -> None:
        self.made, self.rank, self.last, self.send_us = Schedule(rank), rank, num_stages - 1, send_us

    def forward(self) -> None:
        self._compute(FORWARD_US, self.rank - 1, self.rank + 1)

    def backward(self) -> None:
        self._compute(BACKWARD_US, self.rank + 1, self.rank - 1)

    def _compute(self, time_us: float, source: int, target: int) -> None:
        if 0 <= source <= self.last:
            self.made.transfer(source, is_send=False, time_us=self.send_us)
        self.made.compute(time_us)
        if 0 <= target <= self.last:
            self.made.transfer(target, is_send=True, time_us=self.send_us)


def one_f_one_b(num_stages: int, num_batches: int, send_us: float = 0.0) -> list[RankStep]:
    stages = [Stage(rank, num_stages, send_us) for rank in range(num_stages)]
    for stage in stages:
        warm_up = min(num_stages - stage.rank - 1, num_batches)
        for _ in range(warm_up):
            stage.forward()
        for _ in range(num_batches - warm_up):
            stage.forward()
            stage.backward()
        for _ in range(warm_up):
            stage.backward()
    return [stage.made.step() for stage in stages]


def bubble(steps: list[RankStep], num_batches: int) -> float:
    placed = place_together(steps, Host()).placed
    whole = max(each.end_us for each in placed.values())
    return 1 - num_batches * (FORWARD_US + BACKWARD_US) / whole


@pytest.mark.parametrize(("stages", "batches"), [(1, 4), (2, 4), (4, 4), (4, 16), (8, 64)])
def test_the_bubble_is_the_formulas(stages: int, batches: int) -> None:
    expected = (stages - 1) / (batches + stages - 1)
    assert bubble(one_f_one_b(stages, batches), batches) == pytest.approx(expected, abs=1e-9)


def test_a_step_without_its_first_receive_has_the_later_ones_in_their_places() -> None:
    steps = one_f_one_b(4, 16)
    whole = place_together(steps, Host())
    cut = [steps[0], *(replace(step, transfers=step.transfers[1:]) for step in steps[1:])]
    found = place_together(cut, Host())
    assert (dict(found.num_lacking), found.num_unmatched) == ({1: 1, 2: 1, 3: 1}, whole.num_unmatched)
    ends = [max(each.end_us for each in together.placed.values()) for together in (found, whole)]
    assert ends == [5500.0, 5700.0]  # 5,400 if each receive were the one before it
    assert not whole.num_lacking


def test_slow_stages_and_sends_lengthen_the_step_in_any_order_of_the_ranks() -> None:
    free, slow = bubble(one_f_one_b(4, 16), 16), bubble(one_f_one_b(4, 16, send_us=10.0), 16)
    assert free < slow < free + 0.1
    steps = one_f_one_b(4, 8, send_us=7.0)
    first, second = (place_together(each, Host()).placed for each in (steps, steps[::-1]))
    assert {rank: each.end_us for rank, each in first.items()} == {rank: each.end_us for rank, each in second.items()}
    steps = one_f_one_b(4, 32)
    slow = RankStep(2, steps[2].timeline, steps[2].duration_us * 2, steps[2].transfers)
    placed = place_together([*steps[:2], slow, steps[3]], Host()).placed
    whole = max(each.end_us for each in placed.values())
    assert whole >= 32 * 2 * (FORWARD_US + BACKWARD_US)


def test_ranks_that_exchange_at_once_do_not_wait_for_each_other_forever() -> None:
    steps = []
    for rank in (0, 1):
        made = Schedule(rank)
        made.compute(50.0 * (rank + 1))
        made.transfer(1 - rank, is_send=False, time_us=5.0)
        first, second = made.transfers.pop(), len(made.rows)
        made.rows.append(("collective", 2, 0))
        made.durations.append(5.0)
        made.transfers.append([*first, Transfer(second, True, 1 - rank, "pp", 5.0)])
        steps.append(made.step())
    found = place_together(steps, Host())
    assert [found.placed[rank].end_us for rank in (0, 1)] == [105.0, 105.0]
    assert found.num_unmatched == {0: 0, 1: 0}


@pytest.mark.parametrize(("peer", "num_unmatched"), [(1, 1), (9, 0)], ids=["a given rank", "a rank outside"])
def test_a_receive_that_no_rank_sends_takes_its_own_time_and_is_counted(peer: int, num_unmatched: int) -> None:
    made, other = Schedule(0), Schedule(1)
    made.transfer(peer, is_send=False, time_us=5.0)
    other.compute(10.0)
    found = place_together([made.step(), other.step()], Host())
    assert found.placed[0].end_us == 5.0
    assert found.num_unmatched == {0: num_unmatched, 1: 0}


def test_consecutive_transfers_of_a_stream_run_at_once_unless_something_ran_between() -> None:
    kinds = ["collective", "stream_records", "collective", "kernel", "collective", "collective"]
    known = {sequence: Transfer(-1, True, sequence, "pp", 1.0) for sequence in (5, 6, 7, 8)}
    found = transfers_of([5, -1, 6, -1, 7, 8], [LAUNCH_KINDS.index(kind) for kind in kinds], [1, 0, 1, 0, 1, 2], known)
    assert [[each.row for each in rows] for rows in found] == [[0, 2], [4], [5]]


def test_a_receive_that_was_posted_early_holds_up_only_what_waits_for_it() -> None:
    """Both ranks post a receive, compute, send, and then wait: neither waits at the receive itself."""
    steps = []
    for rank in (0, 1):
        made = Schedule(rank)
        made.rows.append(("collective", 2, 0))
        made.durations.append(5.0)
        made.transfers.append([Transfer(0, False, 1 - rank, "pp", 5.0)])
        made.rows.append(("stream_records", 2, 99))
        made.durations.append(0.0)
        made.compute(50.0 * (rank + 1))
        made.transfer(1 - rank, is_send=True)
        made.compute(7.0)
        made.rows.append(("stream_waits", 0, 99))
        made.durations.append(0.0)
        made.compute(1.0)
        steps.append(made.step())
    found = place_together(steps, Host())
    assert found.num_unmatched == {0: 0, 1: 0}
    assert [found.placed[rank].end_us for rank in (0, 1)] == [100.0 + 5.0 + 1.0, 100.0 + 7.0 + 1.0]
    first = found.placed[0]
    assert (first.start_us[0], first.ends_us[0]) == (0.0, 105.0)
    assert first.start_us.tolist()[1:] == [0.0, 50.0, 50.0, 105.0]


def test_the_host_waits_for_a_receive() -> None:
    made, other = Schedule(0), Schedule(1)
    made.transfer(1, is_send=False, time_us=5.0)
    made.rows.append(("host_waits_for_device", 0, 0))
    made.durations.append(0.0)
    made.compute(1.0)
    other.compute(10.0)
    other.transfer(0, is_send=True, time_us=5.0)
    found = place_together([made.step(), other.step()], Host())
    assert found.placed[0].launch_us.tolist() == [0.0, 15.0]
    assert found.placed[0].end_us == 16.0


def test_a_collective_begins_when_its_last_rank_is_there() -> None:
    steps = []
    for rank in (0, 1, 2):
        made = Schedule(rank)
        made.compute(10.0 * rank)
        made.transfers.append([Transfer(1, False, -1, "all", 4.0, members=frozenset((0, 1, 2, 3)))])
        made.rows.append(("collective", 0, 0))
        made.durations.append(4.0)
        steps.append(made.step())
    found = place_together(steps, Host())
    assert {each.end_us for each in found.placed.values()} == {24.0}
    assert found.num_unmatched == {0: 0, 1: 0, 2: 0}


def test_a_stream_that_also_computes_does_more_than_exchange() -> None:
    launches = pd.DataFrame({"call": [5, -1, 6], "work": [-1, 0, -1], "stream": [1, 1, 2]})
    calls = pd.DataFrame({"operation": ["send", "recv"], "sequence": [5, 6]})
    assert only_exchanges(launches, calls).tolist() == [False, False, True]
