"""Features that releases of torch lack, and the replacement of each: one table, which docs/versions.md shows.

Code asks a row of it, ``ALLOCATOR_METADATA.is_missing()``, unless it can look for an attribute in torch: that also
works with builds between two releases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

#: The oldest release that is supported.
OLDEST = (2, 8)


@dataclass(frozen=True)
class Difference:
    """One feature that releases before ``since``, such as (2, 10), lack, and what fakedist does ``instead``."""

    since: tuple[int, int]
    what: str
    instead: str

    def is_missing(self) -> bool:
        """Return whether the installed torch is older than the release that has it."""
        return installed() < self.since


def release_of(text: str) -> tuple[int, int]:
    """The release of a version: (2, 8) for "2.8.0a0+5228986c39.nv25.05"; (0, 0) if it is none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


@cache
def installed() -> tuple[int, int]:
    """The release of the installed torch: (2, 15). It is not imported."""
    from importlib.metadata import version  # which imports the parsers of mail

    return release_of(version("torch"))


ALLOCATOR_METADATA = Difference(
    (2, 10),
    "the allocator's history keeps metadata with each event (`torch._C._cuda_setMemoryMetadata`)",
    "a small C++ library follows the allocator's events and numbers them (`gpu/fast_path`); it needs g++ or clang++. "
    "Every recorded operation runs in Python",
)
FAKE_GROUP_CONSTRUCTOR = Difference(
    (2, 10),
    "`_create_internal` constructs torch's own `FakeProcessGroup`",
    "its class is called directly, which later releases forbid",
)
SEND_THAT_CONNECTS = Difference(
    (2, 10),
    "a pipeline stage's first send, which only connects it, has the dtype that the next stage receives",
    "the integer that it sends is read as a float32, in the same block",
)
VOTE_OF_STAGES = Difference(
    (2, 15),
    "pipeline stages vote with one all-reduce on whether all were given their shapes beforehand",
    "where the vote goes from stage to stage, the other stages are taken to vote as this one does",
)
FAKE_GROUP_OPTIONS = Difference(
    (2, 9), "torch's own `FakeProcessGroup` takes options", "it is constructed without options"
)
PLAN_OF_ONE_RANK = Difference(
    (2, 9),
    "`torch.distributed.checkpoint` does not require that the plan of one rank covers every tensor",
    "`frameworks/checkpoints` makes the other checks of a plan",
)
PROFILER_METADATA = Difference(
    (2, 10),
    "the profiler's events carry CUPTI's metadata: grids, nodes of graphs, what a wait waits for",
    "a step measured with `--device cuda` has no grids and no waits, and its collectives are not priced",
)
