"""Features that releases of torch lack, and the replacement of each: one table, which docs/versions.md shows.

Code asks a row of it, ``VOTE_OF_STAGES.is_missing()``, unless it can look for an attribute in torch: that also
works with builds between two releases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

#: The oldest release that is supported.
OLDEST = (2, 10)


@dataclass(frozen=True)
class Difference:
    """One feature that releases before ``since``, such as (2, 15), lack, and what fakedist does ``instead``."""

    since: tuple[int, int]
    what: str
    instead: str

    def is_missing(self) -> bool:
        """Return whether the installed torch is older than the release that has it."""
        return installed() < self.since


def release_of(text: str) -> tuple[int, int]:
    """The release of a version: (2, 10) for "2.10.0a0+0123abcd"; (0, 0) if it is none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


@cache
def installed() -> tuple[int, int]:
    """The release of the installed torch: (2, 15). It is not imported."""
    from importlib.metadata import version  # which imports the parsers of mail

    return release_of(version("torch"))


VOTE_OF_STAGES = Difference(
    (2, 15),
    "pipeline stages vote with one all-reduce on whether all were given their shapes beforehand",
    "where the vote goes from stage to stage, the other stages are taken to vote as this one does",
)
