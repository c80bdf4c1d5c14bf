from collections.abc import Sequence
from math import inf, isnan, nan

import numpy as np
import pytest

from fakedist.record.launch_times import Pace, Repeats, as_if_warm, calm_clock, times_of, times_of_rows


def test_the_time_of_a_launch_of_the_bare_step_alone_counts_for_the_next_one_of_both() -> None:
    assert times_of_rows([0, 2], [10.0, 25.0, 40.0], 7.0) == [3.0, 30.0]


def test_a_row_without_a_launch_has_no_time_and_takes_none_from_the_next() -> None:
    first, second, third = times_of_rows([0, -1, 1], [10.0, 25.0], 0.0)
    assert (first, third) == (10.0, 15.0)
    assert isnan(second)


def paces(*rows: tuple[int, float, float, float]) -> list[Pace]:
    """Paces at launches, with wall time, CPU time and pace; the host's clock is the wall time."""
    return [Pace(position, wall_us, wall_us, cpu_us, work_us) for position, wall_us, cpu_us, work_us in rows]


def test_between_two_moments_the_clock_goes_by_their_mean_pace() -> None:
    moments = paces((0, 0, 0, 6), (2, 40, 40, 6), (4, 160, 160, 18), (6, 340, 340, 18))
    clock = calm_clock([20, 40, 100, 160, 250, 340], moments)
    assert clock.pace_us == 6
    assert clock.at_us == [20, 40, 70, 100, 130, 160]
    assert clock.warm_us == [inf] * 6


def test_before_the_first_moment_and_after_the_last_one_the_nearest_counts() -> None:
    assert calm_clock([10, 20, 30, 50], paces((2, 20, 20, 5), (2, 20, 20, 10))).at_us == [0, 10, 15, 25]


def test_without_moments_the_clock_goes_as_it_went() -> None:
    assert calm_clock([5, 20, 30], []) == (0.0, [0, 15, 25], [inf] * 3, [])
    assert calm_clock([], []) == (0.0, [], [], [])


def test_a_wait_for_a_core_is_taken_from_the_longest_time_since_the_moment_before() -> None:
    moments = paces((0, 0, 0, 5), (3, 3030, 130, 5), (4, 3040, 140, 5), (5, 3070, 170, 5))
    clock = calm_clock([10, 3020, 3030, 3040, 3070], moments)
    assert clock.at_us == [10, 120, 130, 140, 170]
    assert clock.warm_us == [0, 0, 0, 10, 40]


def test_a_wait_in_our_own_code_is_taken_from_no_launch() -> None:
    # The clock stood still meanwhile: 3 ms of wall time, 30 us on it.
    moments = [Pace(0, 0, 0, 0, 5), Pace(3, 30, 3030, 130, 5)]
    assert calm_clock([10, 20, 30], moments).at_us == [10, 20, 30]


def test_of_waits_in_our_own_code_and_between_launches_the_latter_is_taken() -> None:
    moments = [Pace(0, 0, 0, 0, 5), Pace(3, 2030, 9030, 30, 5)]
    assert calm_clock([10, 2020, 2030], moments).at_us == [10, 10, 20]


def test_a_wait_after_the_last_launch_before_a_moment_is_taken_from_the_next_launch() -> None:
    # Between the launches at 10 and 4040: 30 us of the script's, 4 ms without a core, and the moment, at 4030.
    clock = calm_clock([10, 4040], paces((0, 0, 0, 5), (1, 4030, 30, 5), (2, 4040, 40, 5)))
    assert (clock.at_us, clock.paces_us) == ([10, 40], [0, 30, 40])


def test_a_short_sleep_leaves_the_caches_warm() -> None:
    clock = calm_clock([10, 60], paces((0, 0, 0, 5), (2, 60, 10, 5)))
    assert (clock.at_us, clock.warm_us) == ([10, 60], [inf] * 2)


def test_what_the_recorder_costs_besides_is_taken_from_the_time_between_two_moments() -> None:
    moments = [Pace(0, 0, 0, 0, 10), Pace(2, 100, 100, 100, 10, num_operations=4, num_hooks=2)]
    at_us = calm_clock([40, 100], moments).at_us
    assert at_us == pytest.approx([40 * 0.48, 100 * 0.48])  # 1 - (4 * 0.55 + 2 * 1.5) * 10 / 100


def test_something_is_left_for_the_script_however_much_the_recorder_costs() -> None:
    moments = [Pace(0, 0, 0, 0, 10), Pace(1, 100, 100, 100, 10, num_operations=400)]
    assert calm_clock([100], moments).at_us == pytest.approx([20])


def repeats(*rows: tuple[Sequence[float], float | Sequence[float]]) -> Repeats:
    """The times of each repeat, and for how long its caches had been warm."""
    times = np.array([row for row, _ in rows], float)
    return Repeats(times, np.array([np.broadcast_to(warm_us, times.shape[1]) for _, warm_us in rows], float))


def test_only_repeats_with_warm_caches_count() -> None:
    assert times_of(repeats(([10, 25], inf), ([12, 21], inf), ([90, 80], 100))).tolist() == [11, 23]


def test_a_row_without_a_warm_repeat_has_the_one_that_waited_the_longest_ago() -> None:
    assert times_of(repeats(([10], 100), ([14], 700), ([90], 0))).tolist() == [14]


def test_a_row_that_one_repeat_lacks_has_the_time_of_the_others() -> None:
    first, second = times_of(repeats(([nan, nan], inf), ([4.0, nan], inf)))
    assert first == 4.0
    assert isnan(second)


def test_no_row_has_less_than_no_time() -> None:
    assert times_of(repeats(([-0.5], inf))).tolist() == [0.0]


def test_the_number_of_repeats_does_not_change_what_the_time_of_a_row_tends_to() -> None:
    rows = [([time_us], inf) for time_us in (8, 9, 10, 11, 12)]
    assert times_of(repeats(*rows[2:3])) == times_of(repeats(*rows[1:4])) == times_of(repeats(*rows)) == [10]


def test_a_cold_launch_is_shortened_by_how_much_longer_others_of_the_step_took_when_cold() -> None:
    # Layers of one kind: 200 of them are seen warm and, in the other repeat, 1.5 times as long soon after a wait.
    keys = ["a", *["layer"] * 400]
    warm = [10] * 201 + [15] * 200, [inf] * 201 + [100] * 200
    cold = [15] * 201 + [12] * 200, [100] * 201 + [700] * 200
    both = as_if_warm(keys, repeats(warm, cold))
    assert set(both.time_us.flat) == {10}
    assert set(times_of(both)) == {10}


def test_too_few_launches_say_nothing_on_cold_caches() -> None:
    assert as_if_warm("aaaa", repeats(([10] * 4, inf), ([15] * 4, 100))).time_us[1].tolist() == [15] * 4


def test_after_a_wait_no_launch_is_made_longer() -> None:
    found = as_if_warm(["a"] * 200, repeats(([10] * 200, inf), ([5] * 200, 100)))
    assert found.time_us[1].tolist() == [5] * 200


@pytest.mark.parametrize("keys", ["", "a"])
def test_a_step_of_next_to_nothing_is_kept(keys: str) -> None:
    assert as_if_warm(keys, repeats(([10] * len(keys), inf))).time_us.tolist() == [[10] * len(keys)]
