import gc
import math
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import nan
from types import SimpleNamespace

import pytest
import torch

from fakedist.record import host_clock
from fakedist.record.host_clock import (
    HostClock,
    Mark,
    clock_record,
    recorded_clock,
)
from fakedist.record.launch_times import Pace
from fakedist.record.loading import Loading
from fakedist.rundir.launch_records import HostClockRecord, LaunchKeysRecord


def mark(
    position: int,
    *,
    wall_us: float = 0,
    cpu_us: float = 0,
    loading_us: float = 0,
    collector_us: float = 0,
    score: float = nan,
) -> Mark:
    return Mark(position, wall_us, cpu_us, loading_us, collector_us, score)


def clocked(
    recorded: str,
    split: int,
    bare: str,
    at_us: list[float],
    marks: list[Mark],
    *,
    bound_us: float = 0.0,
    paces: Sequence[Pace] = (),
) -> HostClockRecord:
    log = [None if key == "." else key for key in bare]
    record = clock_record(2, (list(recorded), split), (log, at_us), marks, paces, launch_bound_us=bound_us)
    assert isinstance(record, HostClockRecord)
    return record


def times(record: HostClockRecord) -> list[float]:
    return list(array("d", record.dispatch_us))


def test_rows_before_the_optimizers_end_come_from_the_middle_of_a_bare_step() -> None:
    # Recorded: a b | z, where the optimizer's step ended at |. Bare steps: z a b.
    record = clocked("abz", 2, "zabzab", [1, 3, 6, 10, 15, 21], [mark(3), mark(6)])
    assert times(record) == [15 - 10, 21 - 15, 10 - 6]


def test_the_time_around_a_mark_counts_for_the_launch_after_it() -> None:
    record = clocked("ab", 2, "abab", [0, 10, 30, 35], [mark(2), mark(4)])
    assert times(record) == [20, 5]
    assert record.step_us == 25


def test_work_between_steps_counts_also_where_one_step_is_bare() -> None:
    # The recorded step came before the log, so the time before the first mark is not in it.
    paces = [Pace(0, 1, 1, 1, 5.0), Pace(2, 45, 45, 45, 5.0)]
    record = clocked("ab", 2, "ab", [3, 8], [mark(0, wall_us=1), mark(2, wall_us=45)], paces=paces)
    assert times(record) == [3 - 1 + (45 - 8), 5]


def test_a_bare_step_that_was_cut_short_has_the_recorded_ones_work_between_steps() -> None:
    paces = [Pace(0, 1, 1, 1, 5.0), Pace(2, 9, 9, 9, 5.0)]
    marks = [mark(0, wall_us=1), mark(2, wall_us=9)]
    record = clock_record(
        2, (["a", "b"], 2), (["a", "b"], [3, 8]), marks, paces, launch_bound_us=0.0, recorded_after_us=37.0
    )
    assert isinstance(record, HostClockRecord)
    assert times(record) == [3 - 1 + 37, 5]


def test_launches_that_a_collective_stands_for_are_none_of_a_bare_step() -> None:
    record = clocked("ab", 2, "ab.a.b", [0, 10, 11, 30, 31, 35], [mark(2), mark(6)])
    assert times(record) == [30 - 10, 35 - 30]


def test_many_launches_that_a_collective_stands_for_do_not_hide_the_next_one() -> None:
    bare = "ab" + "." * 100 + "ab"
    at_us = [float(number) for number in range(len(bare))]
    assert times(clocked("ab", 2, bare, at_us, [mark(2), mark(104)])) == [101, 1]


def test_a_score_that_could_not_be_taken_does_not_count() -> None:
    marks = [mark(1, score=7.0), mark(2), mark(3, score=9.0)]
    assert clocked("a", 1, "aaa", [0, 20, 44], marks).linear_us == 8.0
    assert clocked("a", 1, "aaa", [0, 20, 44], [mark(1), mark(2), mark(3)]).linear_us == 0.0


def test_times_and_score_are_those_of_a_calm_moment() -> None:
    # While the second step ran, the core took twice as long for everything.
    paces = [Pace(0, 0, 0, 0, 5.0), Pace(2, 30, 30, 30, 5.0), Pace(2, 30, 30, 30, 10.0), Pace(4, 90, 90, 90, 10.0)]
    marks = [mark(0, score=1.4), mark(2, score=1.4, loading_us=3), mark(4, score=1.4, loading_us=6)]
    record = clocked("ab", 2, "abab", [10, 30, 50, 90], marks, paces=paces)
    assert times(record) == [10, 20]
    assert (record.pace_us, record.linear_us, record.slowdown) == (5.0, 7.0, 1.5)
    assert (record.step_us, record.loading_us, record.spread) == (30, 2, 0)


def test_launches_for_the_score_are_none_of_a_step_and_not_in_its_bound() -> None:
    marks = [mark(2), mark(6)]
    record = clocked("ab", 2, "ab..ab", [0, 10, 10, 10, 30, 35], marks, bound_us=0.25)
    assert (times(record), record.bound_us) == ([30 - 10, 35 - 30], 0.5)


def test_the_collectors_pauses_are_the_mean_of_the_steps() -> None:
    marks = [mark(1, collector_us=5), mark(2, collector_us=5), mark(3, collector_us=95)]
    assert clocked("a", 1, "aaa", [0, 10, 20], marks).collector_us == 45


def test_the_record_has_the_medians_of_the_other_clocks() -> None:
    marks = [
        mark(1),
        mark(2, wall_us=40, cpu_us=30, loading_us=1),
        mark(3, wall_us=60, cpu_us=40, loading_us=3),
        mark(4, wall_us=90, cpu_us=90, loading_us=9),
    ]
    record = clocked("a", 1, "aaaa", [0, 10, 30, 33], marks)
    assert (record.step_us, record.wall_us, record.cpu_us, record.loading_us) == (10, 30, 30, 2)


def test_the_bound_grows_with_the_launches_of_a_step() -> None:
    record = clocked("ab", 2, "abab", [0, 1, 2, 3], [mark(2), mark(4)], bound_us=0.25)
    assert record.bound_us == 0.5


def test_a_step_of_other_launches_has_no_clock() -> None:
    log = (list("abcdefgh"), [0.0] * 8)
    record = clock_record(2, (list("abcdefghij"), 10), log, [mark(0), mark(8)], [], launch_bound_us=0.0)
    assert record == "only 8 of its 10 launches were those of step 2"


def test_work_that_no_other_step_repeats_need_not_be_in_one() -> None:
    log = (list("abcabc"), [0.0, 10.0, 30.0, 40.0, 50.0, 70.0])
    recorded = [*"a", None, None, *"bc"]
    record = clock_record(2, (recorded, 5), log, [mark(3), mark(6)], [], launch_bound_us=0.0)
    assert not isinstance(record, str)
    assert times(record) == pytest.approx([10, math.nan, math.nan, 10, 20], nan_ok=True)
    assert isinstance(clock_record(2, (list("axxbc"), 5), log, [mark(3), mark(6)], [], launch_bound_us=0.0), str)


@pytest.mark.parametrize("split", [0, 1, 4])
def test_each_row_gets_its_own_time_wherever_the_optimizer_ended(split: int) -> None:
    recorded, gaps = "abcd", {"a": 1.0, "b": 20.0, "c": 300.0, "d": 4000.0}
    bare = (recorded[split:] + recorded[:split]) * 3
    at_us, now = [], 0.0
    for key in bare:
        now += gaps[key]
        at_us.append(now)
    marks = [mark(4), mark(8), mark(12)]
    assert times(clocked(recorded, split, bare, at_us, marks)) == [gaps[key] for key in recorded]


class Gpu:
    """The log of an empty step."""

    step = num_optimizer_steps = 1
    is_second_run = False

    def __init__(self) -> None:
        self.num_stops = self.num_scores = self.num_paces = 0
        self.num_hooks = 0
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

    def num_launches(self) -> int:
        return 0

    def pace_us(self) -> float:
        return 1.0

    def pace_here(self) -> None:
        self.num_paces += 1

    def paces(self) -> list[tuple[int, float, float, float, float, int, int]]:
        return []

    @contextmanager
    def left_out(self) -> Iterator[None]:
        self.num_scores += 1
        yield

    def recorded(self) -> tuple[list[int], list[float], list[tuple[int, float, float, float, float, int, int]]]:
        return [], [], []

    def keys_for_second_run(self) -> LaunchKeysRecord:
        return LaunchKeysRecord(self.step, b"", 0)

    def hook_ran(self) -> None:
        self.num_hooks += 1

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
        record, *_ = clock.records("")
        gc.enable()
    assert is_over == [False] * 3
    assert (gpu.num_stops, gpu.gone) == (3, [0, 0, 0])
    assert gpu.num_paces == 6
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

    def num_launches(self) -> int:
        return len(self.log)

    def paces(self) -> list[tuple[int, float, float, float, float, int, int]]:
        return [(0, 0.0, 0.0, 0.0, 6.0, 0, 0)]

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


class OneMore(Logged):
    """A step of ten rows until its optimizer's end and one after it."""

    num_optimizer_steps = 1

    def rows(self) -> tuple[list[object], int]:
        return [*"abcdefghij", "batch"], 10


@pytest.mark.parametrize(("is_second_run", "num_whole"), [(False, 0), (True, 0), (True, 1), (False, 2)])
def test_a_step_that_ends_with_the_script_counts_up_to_its_optimizers_end(
    monkeypatch: pytest.MonkeyPatch, *, is_second_run: bool, num_whole: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(host_clock, "_has_compiled", lambda: False)
    gpu, root = OneMore(), torch.nn.Identity()
    gpu.is_second_run = is_second_run
    clock = HostClock(gpu, lambda: None, str, Loading(), runs_again=not is_second_run)
    assert clock.begins(3600.0, 3600.0, SimpleNamespace(), root, lambda: None)
    for _ in range(num_whole):
        gpu.log += [*"abcdefghij", "batch"]
        assert not clock.optimizer_ended()
        root(torch.ones(1))
    gpu.log += "abcdefghij"
    assert not clock.optimizer_ended()
    gpu.log += ["an evaluation"] * 100
    record, *_ = clock.records("")
    assert isinstance(record, HostClockRecord)
    assert record.num_repeats == max(num_whole + (num_whole < 2), 1)
    assert times(record) == pytest.approx([10.0] * 10 + [10.0 if num_whole else nan], nan_ok=True)
    assert (record.is_recorded, record.is_second_run) == (False, is_second_run)


def test_a_second_run_without_bare_steps_says_why() -> None:
    gpu = Recorded()
    gpu.is_second_run = True
    (note,) = HostClock(gpu, lambda: None, str, Loading()).records("")
    assert note.note.code == "second_run_without_time"
    assert "the script or --until ended before" in note.note.text


def test_before_a_second_run_the_steps_keys_are_kept_instead_of_a_note() -> None:
    record, keys = HostClock(Recorded(), lambda: None, str, Loading(), runs_again=True).records("")
    assert isinstance(record, HostClockRecord)
    assert record.is_recorded
    assert keys == LaunchKeysRecord(1, b"", 0)


class Recorded(Logged):
    """A recorded step of two rows, with the clock on: 16 us to the first launch, 32 to the second, 48 to the end."""

    def recorded(self) -> tuple[list[int], list[float], list[tuple[int, float, float, float, float, int, int]]]:
        paces = [(0, 100.0, 0.0, 0.0, 5.0, 0, 0), (3, 196.0, 96.0, 96.0, 5.0, 0, 0)]
        return [0, 2], [116.0, 120.0, 148.0], paces


@pytest.mark.parametrize("how", ["", "the script ended"])
def test_a_script_without_bare_steps_has_the_clock_of_the_recorded_one(how: str) -> None:
    clock = HostClock(Recorded(), lambda: None, str, Loading())
    record, note = clock.records(how)
    assert isinstance(record, HostClockRecord)
    assert times(record) == [16 / 1.6 + 48, 32 / 1.6]
    assert (record.is_recorded, record.num_repeats, record.step_us, record.bound_us) == (True, 1, 78, 39)
    assert (record.linear_us, record.pace_us) == (0, 5)
    assert note.note.code == "host_measured_as_recorded"


def test_bare_steps_that_are_not_the_recorded_one_leave_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    gpu = Recorded()
    clock = HostClock(gpu, lambda: None, str, Loading())
    assert clock.begins(3600.0, 3600.0, SimpleNamespace(), torch.nn.Identity(), lambda: None)
    record, note = clock.records("error in a step that is ours")
    assert isinstance(record, HostClockRecord)
    assert record.is_recorded
    assert "error in a step that is ours" in note.note.text


def test_a_step_that_was_cut_short_has_nothing_after_its_last_launch() -> None:
    moments = [Pace(0, 100, 0, 0, 5), Pace(9, 196, 96, 96, 5)]
    record = recorded_clock(2, "ab", [0, 2], [116, 120, 148], moments)
    assert isinstance(record, HostClockRecord)
    assert times(record) == [16 / 1.6, 32 / 1.6]


@pytest.mark.parametrize("has_dtensors", [False, True])
def test_dtensors_are_not_as_much_slower_in_a_recorded_step(
    monkeypatch: pytest.MonkeyPatch, *, has_dtensors: bool
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(DTensor=Sharded))
    clock = HostClock(Recorded(), lambda: None, str, Loading())
    parameter = Sharded() if has_dtensors else object()
    clock.optimizer_recorded(SimpleNamespace(param_groups=[{"params": []}, {"params": [parameter]}]))
    clock.optimizer_recorded(SimpleNamespace())
    record, _ = clock.records("")
    assert isinstance(record, HostClockRecord)
    assert record.step_us == pytest.approx(48 / (1.1 if has_dtensors else 1.6) + 48)


class Sharded:
    """In a DTensor's place."""


def test_without_any_clock_the_host_was_not_measured() -> None:
    (note,) = HostClock(Logged(), lambda: None, str, Loading()).records("")
    assert note.note.code == "host_not_measured"


def test_a_hook_of_the_recorder_is_counted_and_the_clock_stands_still_in_it() -> None:
    gpu = Gpu()
    assert HostClock(gpu, lambda: None, str, Loading()).still(lambda x: (x, gpu.num_stops, list(gpu.gone)))(7) == (
        7,
        1,
        [],
    )
    assert (gpu.num_hooks, gpu.gone) == (1, [0])


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
