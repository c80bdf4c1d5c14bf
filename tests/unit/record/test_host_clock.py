from array import array
from math import isnan, nan

import pytest

from fakedist.record.host_clock import Mark, align, clock_record, least, scores, times_of_rows
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


def test_the_least_of_all_repeats_counts_for_each_row() -> None:
    assert least([[5.0, 900.0, 2.0], [700.0, 4.0, 2.0]]) == [5.0, 4.0, 2.0]


def test_the_rows_add_up_to_the_least_whole_step() -> None:
    # The least of each row: 10, 20 and 30, but no step took less than 66.
    assert least([[10.0, 25.0, 31.0], [12.0, 20.0, 35.0], [16.0, 28.0, 30.0]]) == [11.0, 22.0, 33.0]


def test_a_row_that_was_preempted_in_every_step_makes_none_longer() -> None:
    assert least([[10.0, 4000.0, 30.0], [4000.0, 20.0, 30.0]]) == [10.0, 20.0, 30.0]


def test_a_long_row_that_varies_was_not_preempted() -> None:
    assert sum(least([[10_000.0, 12.0], [11_000.0, 10.0]])) == pytest.approx(10_012.0)


def test_a_row_that_one_repeat_lacks_has_the_time_of_the_others() -> None:
    first, second = least([[nan, nan], [4.0, nan]])
    assert first == 4.0
    assert isnan(second)


def test_no_row_has_less_than_no_time() -> None:
    assert least([[-0.5]]) == [0.0]


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
    assert (record.num_repeats, record.spread) == (2, 1020 / 20 - 1)


def test_steps_at_two_speeds_of_the_core_count_as_if_it_had_one() -> None:
    # The second step is the first on a core half as fast.
    marks = [mark(2, 10, score=7.0), mark(4, 40, score=7.0), mark(6, 100, score=14.0), mark(8, 160, score=14.0)]
    record = clocked("ab", 2, "abababab", [0, 10, 30, 40, 80, 100, 140, 160], marks)
    assert times(record) == pytest.approx([20, 10])
    assert record.linear_us == 7.0
    assert record.step_us == 60
    assert record.spread == 1.0, "the step in which the speed changed counts for the lesser score"


def test_the_clock_is_for_the_score_of_the_least_step_whichever_ran_on_the_faster_core() -> None:
    marks = [mark(1, 0, score=14.0), mark(2, 20, score=14.0), mark(3, 32, score=7.0), mark(4, 44, score=7.0)]
    record = clocked("a", 1, "aaaa", [0, 20, 32, 44], marks)
    # 20 us at 14, 12 at 7 and 12 at 7: for one score 1.43, 1.71 and 1.71.
    assert (times(record), record.linear_us) == ([pytest.approx(20)], 14.0)
    assert record.spread == pytest.approx(12 / 7 / (20 / 14) - 1)


def test_one_score_next_to_a_step_is_enough_and_with_none_the_steps_count_alike() -> None:
    marks = [mark(1, 0, score=7.0), mark(2, 20), mark(3, 44, score=14.0)]
    record = clocked("a", 1, "aaa", [0, 20, 44], marks)
    assert (times(record), record.linear_us) == ([pytest.approx(24)], 14.0)
    unscored = clocked("a", 1, "aaa", [0, 20, 44], [marks[0], mark(2, 20), mark(3, 44)])
    assert (times(unscored), unscored.linear_us) == ([20], 0.0)
    assert scores([mark(1, 0), mark(2, 1), mark(3, 2, score=7.0)]) == []


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
