import gc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan, nan
from types import SimpleNamespace

import pytest
import torch

from fakedist.record import host_clock
from fakedist.record.host_clock import (
    HostClock,
    Mark,
    align,
    clock_record,
    mean_times,
    times_of_rows,
    without_waits,
)
from fakedist.record.loading import Loading
from fakedist.rundir.launch_records import HostClockRecord


def mark(
    position: int,
    host_us: float,
    *,
    wall_us: float = 0,
    cpu_us: float = 0,
    loading_us: float = 0,
    collector_us: float = 0,
    score: float = nan,
) -> Mark:
    return Mark(position, host_us, wall_us, cpu_us, loading_us, collector_us, score)


def clocked(
    recorded: str, split: int, bare: str, at_us: list[float], marks: list[Mark], bound_us: float = 0.0
) -> HostClockRecord:
    log = [None if key == "." else key for key in bare]
    record = clock_record(2, (list(recorded), split), (log, at_us), marks, bound_us)
    assert isinstance(record, HostClockRecord)
    return record


def times(record: HostClockRecord) -> list[float]:
    return list(array("d", record.dispatch_us))


def test_launches_of_equal_steps_are_matched_one_by_one() -> None:
    assert align("abcabc", "abcabc") == [0, 1, 2, 3, 4, 5]


def test_a_launch_that_only_the_recorded_step_had_is_not_matched() -> None:
    assert align("abXcde", "abcde") == [0, 1, -1, 2, 3, 4]


def test_a_launch_that_only_the_bare_step_has_is_passed_by() -> None:
    assert align("abcde", "abXYcde") == [0, 1, 4, 5, 6]


def test_between_launches_that_differ_as_many_as_possible_are_matched() -> None:
    # A read of a size: the recorded step has the read alone, the bare one kernels before and after it.
    assert align("grgi", "gkrwgkrwi") == [0, 2, 4, 8]


def test_steps_without_a_common_launch_match_nothing() -> None:
    assert align("aaaa", "bbbb") == [-1] * 4


def test_a_bare_step_may_end_before_the_recorded_one() -> None:
    assert align("abcd", "ab") == [0, 1, -1, -1]


def test_the_time_of_a_launch_of_the_bare_step_alone_counts_for_the_next_one_of_both() -> None:
    assert times_of_rows([0, 2], [10.0, 25.0, 40.0], 7.0) == [3.0, 30.0]


def test_a_row_without_a_launch_has_no_time_and_takes_none_from_the_next() -> None:
    first, second, third = times_of_rows([0, -1, 1], [10.0, 25.0], 0.0)
    assert (first, third) == (10.0, 15.0)
    assert isnan(second)


def test_each_row_has_its_mean_over_the_steps() -> None:
    assert mean_times([[10.0, 25.0, 31.0], [12.0, 20.0, 35.0], [14.0, 27.0, 30.0]]) == [12.0, 24.0, 32.0]


def test_a_step_in_which_a_row_was_preempted_does_not_count_for_that_row() -> None:
    assert mean_times([[10.0, 4000.0, 30.0], [4000.0, 20.0, 40.0]]) == [10.0, 20.0, 35.0]


def test_a_long_row_that_varies_was_not_preempted() -> None:
    assert mean_times([[10_000.0, 12.0], [11_000.0, 10.0]]) == [10_500.0, 11.0]


def test_a_row_that_one_repeat_lacks_has_the_time_of_the_others() -> None:
    first, second = mean_times([[nan, nan], [4.0, nan]])
    assert first == 4.0
    assert isnan(second)


def test_no_row_has_less_than_no_time() -> None:
    assert mean_times([[-0.5]]) == [0.0]


def test_rows_before_the_optimizers_end_come_from_the_middle_of_a_bare_step() -> None:
    # Recorded: a b | z, where the optimizer's step ended at |. Bare steps: z a b.
    record = clocked("abz", 2, "zabzab", [1, 3, 6, 10, 15, 21], [mark(3, 7), mark(6, 22)])
    assert times(record) == [15 - 10, 21 - 15, 10 - 6]


def test_the_time_around_a_mark_counts_for_the_launch_after_it() -> None:
    record = clocked("ab", 2, "abab", [0, 10, 30, 35], [mark(2, 12), mark(4, 36)])
    assert times(record) == [20, 5]
    assert record.step_us == 24


def test_launches_that_a_collective_stands_for_are_none_of_a_bare_step() -> None:
    record = clocked("ab", 2, "ab.a.b", [0, 10, 11, 30, 31, 35], [mark(2, 10), mark(6, 36)])
    assert times(record) == [30 - 10, 35 - 30]


def test_many_launches_that_a_collective_stands_for_do_not_hide_the_next_one() -> None:
    bare = "ab" + "." * 100 + "ab"
    at_us = [float(number) for number in range(len(bare))]
    assert times(clocked("ab", 2, bare, at_us, [mark(2, 1), mark(104, 103)])) == [101, 1]


def test_a_pause_in_one_of_the_steps_is_in_none_of_the_rows_but_in_the_spread() -> None:
    at_us = [0, 10, 20, 30, 1040, 1050]
    marks = [mark(2, 10), mark(4, 30), mark(6, 1050)]
    record = clocked("ab", 2, "ababab", at_us, marks)
    assert times(record) == [10, 10]
    assert (record.num_repeats, record.spread) == (2, pytest.approx(1000 / 2**0.5 / 520))


def test_steps_and_scores_of_a_core_that_was_not_disturbed_count() -> None:
    # While the third and fourth step ran, the core's sibling did, too.
    marks = [mark(2, 10, score=7.0), mark(4, 40, score=8.0), mark(6, 72, score=7.0)]
    marks += [mark(8, 160, score=14.0), mark(10, 220, score=14.0)]
    record = clocked("ab", 2, "ababababab", [0, 10, 30, 40, 60, 72, 130, 160, 200, 220], marks)
    assert times(record) == pytest.approx([(20 + 20) / 2, (10 + 12) / 2])
    assert (record.num_repeats, record.linear_us, record.step_us) == (2, 7.0, 31)


def test_time_without_a_core_is_taken_from_the_rows_that_exceed_the_same_work_the_most() -> None:
    times = [10.0, 4010.0, 12.0, 2012.0, 5000.0, 5000.0, 14.0]
    assert without_waits(times, "aaaabba", 3000) == [10, 1010, 12, 2012, 5000, 5000, 14]
    assert without_waits(times, "aaaabba", 5000) == [10, 14, 12, 1008, 5000, 5000, 14]
    assert without_waits(times, "aaaabba", 9000) == [10, 14, 12, 14, 5000, 5000, 14]
    assert without_waits(times, "aaaabba", -1) == times
    assert without_waits([10.0, nan, 250.0, 12.0], "aaaa", 500)[2] == 250  # shorter than a time slice


def test_a_step_that_was_pre_empted_counts_with_its_cpu_time() -> None:
    marks = [mark(1, 0, score=9.0), mark(4, 5040, wall_us=5050, cpu_us=100, score=9.0)]
    record = clocked("aaa", 3, "aaaa", [0, 20, 5020, 5040], marks)
    assert times(record) == [20, 50, 20]
    assert (record.step_us, record.wall_us, record.cpu_us) == (5040, 5050, 100)


def test_without_two_such_scores_the_step_between_the_least_disturbed_ones_counts() -> None:
    marks = [mark(1, 0, score=20.0), mark(2, 30, score=10.0), mark(3, 54, score=15.0), mark(4, 90, score=30.0)]
    record = clocked("a", 1, "aaaa", [0, 30, 54, 90], marks)
    assert (record.num_repeats, times(record), record.linear_us) == (1, [24], 10.0)


def test_a_score_that_could_not_be_taken_does_not_count() -> None:
    marks = [mark(1, 0, score=7.0), mark(2, 20), mark(3, 44, score=9.0)]
    assert clocked("a", 1, "aaa", [0, 20, 44], marks).linear_us == 7.0
    assert clocked("a", 1, "aaa", [0, 20, 44], [mark(1, 0), mark(2, 20), mark(3, 44)]).linear_us == 0.0


def test_launches_for_the_score_are_none_of_a_step_and_not_in_its_bound() -> None:
    marks = [mark(2, 10), mark(6, 36)]
    record = clocked("ab", 2, "ab..ab", [0, 10, 10, 10, 30, 35], marks, bound_us=0.25)
    assert (times(record), record.bound_us) == ([30 - 10, 35 - 30], 0.5)


def test_the_collectors_pauses_are_the_mean_of_the_steps() -> None:
    marks = [mark(1, 0, collector_us=5), mark(2, 10, collector_us=5), mark(3, 20, collector_us=95)]
    assert clocked("a", 1, "aaa", [0, 10, 20], marks).collector_us == 45


def test_the_record_has_the_medians_of_the_other_clocks() -> None:
    marks = [
        mark(1, 0),
        mark(2, 10, wall_us=40, cpu_us=30, loading_us=1),
        mark(3, 30, wall_us=60, cpu_us=40, loading_us=3),
        mark(4, 33, wall_us=90, cpu_us=90, loading_us=9),
    ]
    record = clocked("a", 1, "aaaa", [0, 10, 30, 33], marks)
    assert (record.step_us, record.wall_us, record.cpu_us, record.loading_us) == (10, 30, 30, 2)


def test_the_bound_grows_with_the_launches_of_a_step() -> None:
    record = clocked("ab", 2, "abab", [0, 1, 2, 3], [mark(2, 1), mark(4, 3)], bound_us=0.25)
    assert record.bound_us == 0.5


def test_a_step_of_other_launches_has_no_clock() -> None:
    record = clock_record(2, (list("abcdefghij"), 10), (list("abcdefgh"), [0.0] * 8), [mark(0, 0), mark(8, 9)], 0.0)
    assert record == "only 8 of its 10 launches were those of step 2"


@pytest.mark.parametrize("split", [0, 1, 4])
def test_each_row_gets_its_own_time_wherever_the_optimizer_ended(split: int) -> None:
    recorded, gaps = "abcd", {"a": 1.0, "b": 20.0, "c": 300.0, "d": 4000.0}
    bare = (recorded[split:] + recorded[:split]) * 3
    at_us, now = [], 0.0
    for key in bare:
        now += gaps[key]
        at_us.append(now)
    marks = [mark(4, at_us[3]), mark(8, at_us[7]), mark(12, at_us[11])]
    assert times(clocked(recorded, split, bare, at_us, marks)) == [gaps[key] for key in recorded]


class Gpu:
    """The log of an empty step."""

    step = num_optimizer_steps = 1

    def __init__(self) -> None:
        self.num_stops = self.num_scores = 0
        self.gone: list[int] = []

    def stop(self) -> None:
        self.num_stops += 1

    def go(self, ns: int) -> None:
        self.gone.append(ns)

    def rows(self) -> tuple[list[object], int]:
        return [], 0

    def begin(self) -> float:
        return 0.0

    def operators(self) -> dict[object, object]:
        return {}

    def now(self) -> tuple[int, float]:
        return 0, 0.0

    @contextmanager
    def left_out(self) -> Iterator[None]:
        self.num_scores += 1
        yield

    @contextmanager
    def reads_itself(self) -> Iterator[None]:
        yield

    def end(self) -> tuple[list[object], list[float]]:
        return [], []


@pytest.mark.parametrize("is_capturing", [False, True])
def test_the_clock_stands_still_at_a_mark_and_no_score_is_taken_in_a_graphs_capture(
    monkeypatch: pytest.MonkeyPatch, *, is_capturing: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))  # no room for a score
    gpu = Gpu()
    clock = HostClock(gpu, lambda: None, str, Loading())
    gc.disable()  # the clock stands still for that, too
    try:
        assert clock.begins(3600.0, 3600.0, SimpleNamespace(), None, lambda: None)
        is_over = [clock.optimizer_ended() for _ in range(3)]
    finally:
        (record,) = clock.records("")
        gc.enable()
    assert is_over == [False] * 3
    assert (gpu.num_stops, gpu.gone) == (3, [0, 0, 0])
    assert gpu.num_scores == (0 if is_capturing else 3)
    assert isinstance(record, HostClockRecord)
    assert record.num_repeats == 2


class Logged(Gpu):
    """A step of two rows, the second after the optimizer's; 10 us pass from one launch to the next."""

    num_optimizer_steps = 2

    def __init__(self) -> None:
        super().__init__()
        self.log: list[object] = []

    def rows(self) -> tuple[list[object], int]:
        return ["forward", "batch"], 1

    def now(self) -> tuple[int, float]:
        return len(self.log), len(self.log) * 10.0

    def end(self) -> tuple[list[object], list[float]]:
        return self.log, [10.0 * (position + 1) for position in range(len(self.log))]


def test_the_first_bare_step_counts_from_its_forward_to_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(host_clock, "_has_compiled", lambda: False)
    gpu, root, stops = Logged(), torch.nn.Identity(), list[None]()
    clock = HostClock(gpu, lambda: None, str, Loading())
    assert clock.begins(0.0, 3600.0, SimpleNamespace(), root, lambda: stops.append(None))
    root(torch.ones(1))  # a second micro-batch of the step: no optimizer stepped
    gpu.log.append("forward")
    assert not clock.optimizer_ended()
    root(torch.ones(1))  # one of two
    assert not clock.optimizer_ended()
    gpu.log.append("batch")
    clock._budget_s = 0.0
    assert not stops
    root(torch.ones(1))
    assert stops
    record, *_ = clock.records("")
    assert isinstance(record, HostClockRecord)
    assert (times(record), record.num_repeats, record.step_us) == ([10.0, 10.0], 1, 20.0)
    assert not root._forward_pre_hooks


def test_where_code_was_compiled_the_first_bare_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(host_clock, "_has_compiled", lambda: True)
    gpu, root = Logged(), torch.nn.Identity()
    clock = HostClock(gpu, lambda: None, str, Loading())
    assert clock.begins(3600.0, 3600.0, SimpleNamespace(), root, lambda: None)
    gpu.log += ["compiles"] * 7
    for _ in range(2):
        assert not clock.optimizer_ended()
        assert not clock.optimizer_ended()
        root(torch.ones(1))
        gpu.log += ["forward", "batch"]
    record, *_ = clock.records("")
    assert isinstance(record, HostClockRecord)
    assert (record.num_repeats, record.step_us) == (1, 20.0)


def test_hooks_that_a_compiled_module_would_take_into_its_graph_are_not_added() -> None:
    gpu, root = Logged(), torch.nn.Identity()
    root.compile(backend="eager")
    clock = HostClock(gpu, lambda: None, str, Loading())
    assert clock.begins(3600.0, 3600.0, SimpleNamespace(), root, lambda: None)
    assert not root._forward_pre_hooks
    clock.records("")
