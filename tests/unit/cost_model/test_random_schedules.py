"""Steps of several ranks placed together, whatever their schedules: what holds for all of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.job.stages import PlacedTogether, RankStep, Transfer, place_together
from fakedist.cost_model.overlap import SharedLinks, settle
from fakedist.cost_model.timeline import Timeline
from tests.unit.cost_model.launches_by_hand import Host

hypothesis = pytest.importorskip("hypothesis", reason="not installed: make setup")
st = pytest.importorskip("hypothesis.strategies")

HOST = Host(operation_us=1.0, launch_us=0.5)
NUM_RANKS, NUM_STREAMS = 3, 3
#: As many schedules each time, always the same ones; nothing is kept between runs.
BOUNDED = hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)


class Deed(NamedTuple):
    """Actions of ranks: compute, wait (one stream for another), host_waits, send (first to second) or reduce."""

    kind: str
    ranks: tuple[int, ...]
    stream: int
    other: int
    time_us: float


def deeds() -> st.SearchStrategy[Deed]:
    ranks = st.permutations(range(NUM_RANKS)).map(tuple)
    stream = st.integers(0, NUM_STREAMS - 1)
    kinds = st.sampled_from(("compute", "compute", "wait", "host_waits", "send", "reduce"))
    return st.builds(Deed, kinds, ranks, stream, stream, st.integers(0, 100).map(float))


class Launches:
    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int]] = []
        self.durations: list[float] = []
        self.transfers: list[list[Transfer]] = []

    def add(self, what: str, stream: int, event: int = 0, time_us: float = 0.0) -> int:
        self.rows.append((what, stream, event))
        self.durations.append(time_us)
        return len(self.rows) - 1

    def step(self, rank: int) -> RankStep:
        launches = pd.DataFrame(self.rows, columns=["what", "stream", "event"])
        work = np.where(launches["what"].isin(["kernel", "collective"]), 0, -1)
        launches = launches.assign(num_operations=work + 1, graph=0, device=0, work=work)
        return RankStep(rank, Timeline(launches), np.array(self.durations), self.transfers)


def steps_of(schedule: Sequence[Deed]) -> list[RankStep]:
    """Each rank's part of a schedule. Ranks do it in one order, so none waits for what never comes."""
    ranks = [Launches() for _ in range(NUM_RANKS)]
    for number, deed in enumerate(schedule, start=1):
        first, second = (ranks[rank] for rank in deed.ranks[:2])
        time_us = deed.time_us
        if deed.kind == "compute":
            first.add("kernel", deed.stream, time_us=deed.time_us)
        elif deed.kind == "wait":
            first.add("stream_records", deed.other, number)
            first.add("stream_waits", deed.stream, number)
        elif deed.kind == "host_waits":
            first.add("host_waits", deed.stream)
        elif deed.kind == "send":
            for place, rank in enumerate((first, second)):
                row = rank.add("collective", deed.stream, time_us=time_us)
                rank.transfers.append([Transfer(row, place == 0, deed.ranks[1 - place], "pp", time_us)])
        else:
            for rank in ranks:
                row = rank.add("collective", deed.stream, time_us=time_us)
                rank.transfers.append([Transfer(row, False, -1, "all", time_us, frozenset(range(NUM_RANKS)))])
    return [rank.step(number) for number, rank in enumerate(ranks) if rank.rows]


@dataclass
class CriticalPath:
    """The longest chain of what must follow what, deed by deed."""

    host: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    free: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    longest: float = 0.0

    def of(self, schedule: Sequence[Deed], host: Host) -> float:
        for deed in schedule:
            self._add(deed, host)
        return max(self.longest, *self.host.values(), 0.0)

    def _add(self, deed: Deed, host: Host) -> None:
        rank, stream = deed.ranks[0], deed.stream
        if deed.kind == "wait":
            self.free[rank, stream] = max(self.free[rank, stream], self.free[rank, deed.other], self._recorded(deed))
        elif deed.kind == "host_waits":
            self.host[rank] = max(self.host[rank], self.free[rank, stream])
        else:
            number = {"compute": 1, "send": 2, "reduce": NUM_RANKS}[deed.kind]
            starts = [self._start(each, deed, host) for each in deed.ranks[:number]]
            first = max(starts) if deed.kind == "reduce" else starts[0]
            for each, start in zip(deed.ranks, starts, strict=False):
                end = max(first, start) + deed.time_us
                self.free[each, stream] = end
                self.longest = max(self.longest, end)

    def _recorded(self, deed: Deed) -> float:
        return self.host[deed.ranks[0]]

    def _start(self, rank: int, deed: Deed, host: Host) -> float:
        self.host[rank] += host.operation_us + host.launch_us * (deed.kind == "compute")
        return max(self.host[rank], self.free[rank, deed.stream])


def end_of(found: PlacedTogether) -> float:
    return max((each.end_us for each in found.placed.values()), default=0.0)


@BOUNDED
@hypothesis.given(st.lists(deeds(), min_size=1, max_size=24))
def test_a_step_is_its_critical_path(schedule: list[Deed]) -> None:
    found = place_together(steps_of(schedule), HOST)
    assert not any(found.num_unmatched.values())
    assert end_of(found) == pytest.approx(CriticalPath().of(schedule, HOST))


@BOUNDED
@hypothesis.given(st.lists(deeds(), min_size=1, max_size=24), st.permutations(range(NUM_RANKS)))
def test_the_order_in_which_ranks_are_given_makes_no_difference(schedule: list[Deed], order: list[int]) -> None:
    steps = steps_of(schedule)
    first, second = (place_together(each, HOST) for each in (steps, [steps[at] for at in order if at < len(steps)]))
    assert {rank: placed.ends_us.tolist() for rank, placed in first.placed.items()} == {
        rank: placed.ends_us.tolist() for rank, placed in second.placed.items()
    }


def test_with_interference_a_faster_collective_can_move_another_next_to_a_kernel_that_suffers() -> None:
    """The fabric's rule holds for placing alone.

    Kernels of 100, 100 and 100 us run one after another; only the second one suffers from collectives. The second
    collective follows the first. Once the first takes 100 us instead of 200, the second runs next to that kernel, and
    the step is longer by what the kernel loses.
    """
    calls = np.array([False, False, False, True, True])
    rates = np.array([1.0, 0.5, 1.0, 1.0, 1.0])
    harmless = SharedLinks(np.array([False] * 3 + [True, False]), np.ones(5), np.ones(5))
    harmful = SharedLinks(np.array([False] * 4 + [True]), rates, np.ones(5))

    def end_us(first_us: float) -> float:
        def starts(
            durations: np.ndarray[tuple[int], np.dtype[np.float64]],
        ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            return np.array([0.0, durations[0], durations[:2].sum(), 0.0, durations[3]])

        found = settle(starts, np.array([100.0, 100.0, 100.0, first_us, 50.0]), [harmless, harmful])
        return float(found[~calls].sum())

    slow, fast = end_us(200.0), end_us(100.0)
    assert slow == pytest.approx(300.0)
    assert 300.0 < fast <= 300.0 + 50.0 * 0.5 + 1.0
