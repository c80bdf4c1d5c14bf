"""Sequences that are mostly equal are aligned: launches of two steps, allocations of two runs."""

import pytest

from fakedist.aligning import align


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


@pytest.mark.parametrize(
    ("one", "other", "matched"),
    [
        ([1, 7, 8, 2, 3, 4], [1, 2, 3, 4], [0, -1, -1, 1, 2, 3]),
        ([1, 4, 3], [1, 5, 3], [0, -1, 2]),
        ([1], [], [-1]),
        ([], [1], []),
    ],
)
def test_an_entry_that_one_side_alone_has_moves_the_others(
    one: list[int], other: list[int], matched: list[int]
) -> None:
    assert align(one, other) == matched


def test_sequences_are_followed_from_where_enough_entries_agree() -> None:
    assert align("aXbcYbcd", "abcd") == [0, -1, -1, -1, -1, 1, 2, 3]
    assert align("aXbcYbcd", "abcd", num_agree=2) == [0, -1, 1, 2, -1, -1, -1, 3]
    assert align("aXXbcd", "abcd") == [0, -1, -1, 1, 2, 3]
    assert align("aXXbcd", "abcd", look_ahead=2) == [0, -1, -1, -1, -1, -1]
