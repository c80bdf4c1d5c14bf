"""A sweep as it was asked for: the space, what each point runs, which ranks, and what is kept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fakedist.errors import JobError, SweepError
from fakedist.rank_list import parse_rank_list
from fakedist.sweep.command import SweptCommand
from fakedist.sweep.expressions import Expression
from fakedist.sweep.space import Point, Space
from fakedist.units import parse_share

SAMPLERS = ("tpe", "random")
#: How many of the best points run every stage, with ``ranks = "stages"``.
NUM_BEST = 10
#: Free memory that the ranking asks for, as a share of the GPU's.
HEADROOM = 0.05
_COUNTED = re.compile(r"(?P<word>stages|best):(?P<number>\d{1,6}|all)")


@dataclass(frozen=True)
class RankChoice:
    """Which ranks of a point run.

    Attributes:
        which: "ends": the first and the last pipeline stage. "stages": those, and every stage of the best points.
            "listed": the ranks below.
        ranks: The ranks.
        num_best: Of how many points every stage runs; None for all.
    """

    which: Literal["ends", "stages", "listed"] = "ends"
    ranks: tuple[int, ...] = (0,)
    num_best: int | None = NUM_BEST

    @property
    def text(self) -> str:
        """As it is written."""
        if self.which == "stages":
            return "stages:all" if self.num_best is None else f"stages:{self.num_best}"
        return ",".join(map(str, self.ranks)) if self.which == "listed" else self.which


@dataclass(frozen=True)
class SweepPlan:
    """A sweep as it was asked for.

    Attributes:
        name: What its directory is called after.
        space: The points.
        command: What each runs.
        ranks: Which ranks of each.
        num_kept: Of how many of the best points the run directories stay; None for all.
        headroom: Free memory that the ranking asks for, as a share of the GPU's.
        tokens: Tokens of a step, of all ranks; None to find them in the runs.
        micro_batches: Micro-batches of a step; None for those that run.
        context_bytes: Memory of the CUDA context; None for what is published.
        num_trials: How many points a sampler chooses; None runs all.
        sampler: Who chooses them: "tpe" or "random".
        seed: The sampler's seed.
    """

    name: str
    space: Space
    command: SweptCommand
    ranks: RankChoice = RankChoice()
    num_kept: int | None = None
    headroom: float = HEADROOM
    tokens: Expression | None = None
    micro_batches: Expression | None = None
    context_bytes: int | None = None
    num_trials: int | None = None
    sampler: str = "tpe"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise SweepError(f"there is no sampler {self.sampler!r}", f"--sampler {' or '.join(SAMPLERS)}")
        if self.num_trials is not None and not self.space.axes:
            raise SweepError("a sampler has nothing to choose: there is no axis", "--axis tp=1,2,4")
        self.command.check(self.space)

    def counts_at(self, point: Point) -> tuple[int | None, int | None]:
        """Tokens and micro-batches of a step at a point, as the sweep gives them.

        Raises:
            SweepError: An expression gives no whole number above 0 there.
        """
        tokens, micro_batches = (self._count(each, point) for each in (self.tokens, self.micro_batches))
        return tokens, micro_batches

    def _count(self, expression: Expression | None, point: Point) -> int | None:
        if expression is None:
            return None
        value = expression.value(self.space.named_values(point))
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 1 or value != int(value):
            raise SweepError(f"{expression.text!r} is {value} at {point.label}, not a whole number", "use // to divide")
        return int(value)


def read_ranks(plain: object) -> RankChoice:
    """Which ranks run, from a plain value: "ends", "stages", "stages:5", "stages:all", or ranks.

    Raises:
        SweepError: It is none of these.
    """
    if plain is None or plain == "ends":
        return RankChoice()
    if plain == "stages":
        return RankChoice("stages")
    if isinstance(plain, str) and (found := _COUNTED.fullmatch(plain)) and found["word"] == "stages":
        return RankChoice("stages", num_best=None if found["number"] == "all" else int(found["number"]))
    try:
        numbers = parse_rank_list(plain) if isinstance(plain, str) else plain
    except JobError:
        numbers = None
    if isinstance(numbers, int) and not isinstance(numbers, bool):
        numbers = [numbers]
    if not isinstance(numbers, list | tuple) or not numbers or not all(type(each) is int for each in numbers):
        raise SweepError(f"ranks is ends, stages or a list of ranks, not {plain!r}", 'ranks = "ends"')
    return RankChoice("listed", tuple(dict.fromkeys(numbers)))


def read_keep(plain: object) -> int | None:
    """How many of the best points keep their run directories, from "all", "none" or "best:10".

    Raises:
        SweepError: It is none of these.
    """
    if plain in (None, "all"):
        return None
    if plain == "none":
        return 0
    found = _COUNTED.fullmatch(plain) if isinstance(plain, str) else None
    if found is None or found["word"] != "best" or found["number"] == "all":
        raise SweepError(f"keep is all, none or best:10, not {plain!r}", 'keep = "best:10"')
    return int(found["number"])


def read_headroom(plain: object) -> float:
    """A share of the GPU's memory from "5%".

    Raises:
        SweepError: It is none.
    """
    if plain is None:
        return HEADROOM
    try:
        share = parse_share(plain) if isinstance(plain, str) else -1.0
    except JobError:
        share = -1.0
    if not 0 <= share < 1:
        raise SweepError(f"headroom is a share of the GPU's memory, not {plain!r}", 'headroom = "5%"')
    return share
