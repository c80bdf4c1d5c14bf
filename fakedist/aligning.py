"""Aligns two sequences that are mostly equal: launches of two steps, allocations of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def align(one: Sequence[object], other: Sequence[object], look_ahead: int = 64, num_agree: int = 3) -> list[int]:
    """For each entry of one sequence, the position of its equal in the other; -1 where it has none.

    Where they differ, both are followed from the nearest places on, ``look_ahead`` entries away together at most, from
    which ``num_agree`` entries agree. Of those before, as many as possible are matched in order.
    """
    matched = [-1] * len(one)
    at = other_at = 0
    while at < len(one) and other_at < len(other):
        if one[at] == other[other_at]:
            matched[at] = other_at
            at, other_at = at + 1, other_at + 1
            continue
        end, other_end = _agree_again(one, other, at, other_at, look_ahead=look_ahead, num_agree=num_agree)
        for row, position in _common(one[at:end], other[other_at:other_end]):
            matched[at + row] = other_at + position
        at, other_at = end, other_end
    return matched


def _agree_again(
    one: Sequence[object], other: Sequence[object], at: int, other_at: int, *, look_ahead: int, num_agree: int
) -> tuple[int, int]:
    for total in range(1, look_ahead):
        for left_out in range(total + 1):
            begin, other_begin = at + left_out, other_at + total - left_out
            follows = one[begin : begin + num_agree]
            if len(follows) == num_agree and follows == other[other_begin : other_begin + num_agree]:
                return begin, other_begin
    return min(at + look_ahead, len(one)), min(other_at + look_ahead, len(other))


def _common(one: Sequence[object], other: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Positions of a longest common subsequence of two short sequences."""
    longest = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for row in reversed(range(len(one))):
        for position in reversed(range(len(other))):
            is_same = one[row] == other[position]
            longest[row][position] = (
                longest[row + 1][position + 1] + 1
                if is_same
                else max(longest[row + 1][position], longest[row][position + 1])
            )
    row = position = 0
    while row < len(one) and position < len(other):
        if one[row] == other[position]:
            yield row, position
            row, position = row + 1, position + 1
        elif longest[row + 1][position] >= longest[row][position + 1]:
            row += 1
        else:
            position += 1
