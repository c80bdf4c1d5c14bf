"""Lists of ranks as text: ``0,4,8``, ``0-15``, ``0-1023:64`` (every 64th rank), and back."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from fakedist.errors import JobError

#: More ranks than any job has. A list with more would only fill the memory.
MAX_RANKS = 1 << 24
_PART = re.compile(r"(\d{1,18})(?:-(\d{1,18})(?::([1-9]\d{0,17}))?)?")


def parse_rank_list(text: str) -> tuple[int, ...]:
    """Parse a list of ranks: numbers, inclusive ranges, and ranges with a step.

    Raises:
        JobError: The text is not such a list, or a rank appears twice.
    """
    listed: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise _refused(text)
        first, last, step = match.groups()
        ranks = range(int(first), int(last or first) + 1, int(step or 1))
        if not ranks or len(listed) + len(ranks) > MAX_RANKS:
            raise _refused(text)
        listed.extend(ranks)
    if len(set(listed)) < len(listed):
        twice = next(rank for rank, after in itertools.pairwise(sorted(listed)) if rank == after)
        raise JobError(f"{text} has rank {twice} twice", "give each rank once")
    return tuple(listed)


def format_rank_list(ranks: Sequence[int]) -> str:
    """Ranks as text that :func:`parse_rank_list` reads: "0,3,5" or "0-56:8". Empty without ranks."""
    if len(ranks) < 3:
        return ",".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    if step > 0 and all(after - before == step for before, after in itertools.pairwise(ranks)):
        return f"{ranks[0]}-{ranks[-1]}" + ("" if step == 1 else f":{step}")
    return ",".join(map(str, ranks))


def _refused(text: str) -> JobError:
    return JobError(f"{text!r} is not a list of ranks", "write it like 0,4,8 or 0-15 or 0-1023:64")
