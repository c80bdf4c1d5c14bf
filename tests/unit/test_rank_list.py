from __future__ import annotations

import pytest

from fakedist.errors import JobError
from fakedist.rank_list import format_rank_list, parse_rank_list

RANKS = {"0": (0,), "8,0,4": (8, 0, 4), "0-3": (0, 1, 2, 3), "5-5": (5,), "0-15:4": (0, 4, 8, 12)}


@pytest.mark.parametrize(("text", "found"), [*RANKS.items(), ("0,8-12:2", (0, 8, 10, 12))])
def test_ranks_are_numbers_and_ranges(text: str, found: tuple[int, ...]) -> None:
    assert parse_rank_list(text) == found


@pytest.mark.parametrize(
    "text", ["", "a", "-1", "3-1", "0-8:0", "4:2", "0,,1", "0, 1", "1-2-3", "0-", "0-99999999999", "+1"]
)
def test_what_is_no_list_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="is not a list of ranks"):
        parse_rank_list(text)
    with pytest.raises(JobError, match="0-3,2 has rank 2 twice"):
        parse_rank_list("0-3,2")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((), ""), ((4,), "4"), ((0, 1), "0,1"), (range(8), "0-7"), (range(0, 64, 8), "0-56:8"), ((7, 5, 3), "7,5,3")],
)
def test_ranks_are_read_as_they_were_written(ranks: tuple[int, ...], text: str) -> None:
    assert format_rank_list(ranks) == text
    assert not text or parse_rank_list(text) == tuple(ranks)
