"""Changes that reach a size of memory at the least time: a search over the rules of advice, replayed, then recorded.

Every combination of up to four compatible changes is ordered by its price, and replayed in that order until enough of
them fit. What a combination leaves at least is known without a replay, so most that do not fit are never played.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import combinations, islice
from pathlib import Path

from fakedist.analysis.advice import RULES, are_compatible, expandable_segments, most_replays
from fakedist.analysis.evidence import Change, Evidence, Room
from fakedist.errors import FakedistError, JobError, RunDirectoryError
from fakedist.extras.plan.other_machine import RankNeed
from fakedist.launcher.executors.task import Executor, Task
from fakedist.options import Job
from fakedist.results.opening import open_run
from fakedist.results.run import Run, evidence_of, room_of_run

#: Changes of one plan, and plans that are shown: of all changes, and of those whose flags are known.
_MOST_CHANGES, _NUM_PLANS = 4, 3
_SEGMENTS, _ALLOC_CONF = "expandable_segments:True", "PYTORCH_ALLOC_CONF"
#: Rules of frameworks name their flags in the title: "recompute layers (X): --recompute-granularity full".
_FLAGS = re.compile(r": (--[a-z].*)$")
#: How a title names a change of some layers alone, and the ending of its rule in a map of flags.
_PARTS = {"every second": "-2", "every third": "-3", "every fourth": "-4"}


@dataclass(frozen=True)
class RecordedPlan:
    """A plan that ran.

    Attributes:
        run: Its run, whose GPU had the size that is asked for.
        without_host_us: Its step if the host launched in no time; None if no step was timed.
        failure: Why there is no run; empty if there is one.
    """

    run: Run | None
    without_host_us: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class FitPlan:
    """Changes together.

    Attributes:
        changes: The changes.
        need: Reserved memory with them, *replayed*.
        low_us: How much longer the step is at least, *estimated*, without the changes in ``unpriced``.
        high_us: At most.
        unpriced: Rules of changes whose price is not known.
        job: The job with them; None if the flags of one are not known.
        unmapped: Keys of changes whose flags are not known.
        recorded: Its recording; None if it did not run.
    """

    changes: tuple[Change, ...]
    need: RankNeed
    low_us: float
    high_us: float
    unpriced: tuple[str, ...]
    job: Job | None = None
    unmapped: tuple[str, ...] = ()
    recorded: RecordedPlan | None = None

    @property
    def titles(self) -> list[str]:
        """The changes in words."""
        return [change.title for change in self.changes]


@dataclass(frozen=True)
class Fitted:
    """Plans for a run to need no more than a size.

    Attributes:
        run: The recording that all are replayed from.
        size_bytes: The memory of the GPU.
        room: What of it the rank may reserve.
        need: Of the run as it is.
        without_host_us: The run's step if the host launched in no time; None if no step was timed.
        plans: The least time first, those whose flags are known among them; none if the run fits, or nothing is known
            to be enough.
        nearest: Where there is no plan, the changes that need least, as a limit from below.
        num_tried: Combinations that were weighed.
    """

    run: Run
    size_bytes: int
    room: Room
    need: RankNeed
    without_host_us: float | None
    plans: tuple[FitPlan, ...]
    nearest: FitPlan | None
    num_tried: int


def fit(run: Run, size_bytes: int, flags: Mapping[str, str]) -> Fitted:
    """Find the changes after which a run fits a GPU of so many bytes, at the least time.

    Args:
        run: A run that ended well, or went on beyond its GPU's memory.
        size_bytes: The whole memory of the GPU.
        flags: What the script's command line gets for a change, by its key (:func:`key_of`).

    Raises:
        RunDirectoryError: The run has no history of its memory, or ended before its peak.
    """
    evidence, outside = evidence_of(run), run.summary.estimated_outside
    if evidence is None or not len(evidence.steps):
        raise RunDirectoryError(
            f"{run.path} has no history of a step's memory that could be played again",
            "fakedist profile -o RUN ... makes one",
        )
    low, high = (0, 0) if outside is None else (outside.low_bytes, outside.high_bytes)
    step_us = room_of_run(run).step_us
    room = Room(max(size_bytes - high, 0), max(size_bytes - low, 0), step_us, size_bytes)
    reserved = evidence.reserved_peak
    need = RankNeed(reserved, reserved, room.fits(reserved, reserved))
    if need.fits == "fits":
        return Fitted(run, size_bytes, room, need, _without_host(run), (), None, 0)
    changes = [change for rule in RULES for change in rule(evidence)]
    segments = expandable_segments(evidence)
    plans, nearest, number = _search(evidence, room, changes, segments)
    mapped = [change for change in changes if _flags_of(change, flags) is not None]
    others = _search(evidence, room, mapped, segments)[0] if len(mapped) < len(changes) else ()
    job, known = run.manifest.job, {plan.changes: plan for plan in (*plans, *others)}
    ordered = sorted(known.values(), key=lambda plan: _price(plan.changes))
    applied = tuple(plan if job is None else _applied(plan, job, flags, size_bytes) for plan in ordered)
    return Fitted(run, size_bytes, room, need, _without_host(run), applied, nearest, number)


def _search(
    evidence: Evidence, room: Room, changes: Sequence[Change], segments: Change | None
) -> tuple[tuple[FitPlan, ...], FitPlan | None, int]:
    """The plans of least time, the nearest without a plan, and how many combinations were weighed."""
    gone = {change: evidence.gone_at_samples(change.most) for change in changes}
    ways: list[tuple[tuple[int, float, int], tuple[Change, ...]]] = []
    nearest: tuple[Change, ...] = ()
    least, number = evidence.kept_peak, 0
    for some in (some for size in range(_MOST_CHANGES + 1) for some in combinations(changes, size)):
        if not are_compatible(some):
            continue
        number += 1
        needed = evidence.least_needed([gone[change] for change in some]) if some else evidence.kept_peak
        if needed < least:
            nearest, least = some, needed
        if room.fits(needed, needed) != "does not fit":
            ways.append((_price(some), some))
    plans: list[FitPlan] = []
    for _, some in islice(sorted(ways, key=lambda way: way[0]), most_replays(evidence)):
        plan = _plan(evidence, room, some)
        within = [known for known in plans if set(known.changes) - {segments} <= set(some)]
        if any(known.need.fits == "fits" or known.need.high_bytes <= plan.need.high_bytes for known in within):
            continue  # more changes than one needs, or for nothing
        if plan.need.fits == "may fit" and segments is not None:  # which may make it fit, and cost nothing
            plan = replace(plan, changes=(*some, segments))
        if plan.need.fits != "does not fit" and plan.changes:
            plans.append(plan)
        if sum(known.need.fits == "fits" for known in plans) == _NUM_PLANS:
            break
    sure = [plan for plan in plans if plan.need.fits == "fits"]
    best = plans[:_NUM_PLANS]
    if sure and not any(plan in best for plan in sure):
        best[-1] = sure[0]
    return tuple(best), None if best else _plan(evidence, room, nearest), number


def _price(some: Sequence[Change]) -> tuple[int, float, int]:
    """The order of plans: unknown prices last, then the middle of the price, then fewer changes."""
    known = [change.price for change in some if change.price is not None]
    return len(some) - len(known), sum(price.low_us + price.high_us for price in known) / 2, len(some)


def _plan(evidence: Evidence, room: Room, some: tuple[Change, ...]) -> FitPlan:
    low, high = evidence.needed_without(*(evidence.saved(some) if some else (0, 0)))
    prices = [change.price for change in some if change.price is not None]
    return FitPlan(
        some,
        RankNeed(low, high, room.fits(low, high)),
        sum(price.low_us for price in prices),
        sum(price.high_us for price in prices),
        tuple(change.rule for change in some if change.price is None),
    )


def key_of(change: Change) -> str:
    """The key of a change in a map of flags: its rule, with "-2" for every second layer."""
    return change.rule + next((ending for words, ending in _PARTS.items() if words in change.title), "")


def _flags_of(change: Change, flags: Mapping[str, str]) -> str | None:
    """The flags of the script that make a change: the given ones, else a framework's own; None if not known."""
    own = _FLAGS.search(change.title)
    return flags.get(key_of(change), own[1] if own else None)


def _applied(plan: FitPlan, job: Job, flags: Mapping[str, str], size_bytes: int) -> FitPlan:
    """The plan with its job, as far as its flags are known."""
    arguments, variables, unmapped = list(job.arguments), dict(job.environment), []
    for change in plan.changes:
        text = _flags_of(change, flags)
        if change.rule == "expandable-segments":
            variables[_ALLOC_CONF] = ",".join(filter(None, (variables.get(_ALLOC_CONF), _SEGMENTS)))
        elif text is None:
            unmapped.append(key_of(change))
        else:
            arguments = with_flags(arguments, shlex.split(text))
    if unmapped:
        return replace(plan, unmapped=tuple(unmapped))
    environment = tuple(sorted(variables.items()))
    return replace(
        plan, job=replace(job, arguments=tuple(arguments), environment=environment, gpu_memory_bytes=size_bytes)
    )


def with_flags(arguments: Sequence[str], words: Sequence[str], others: Sequence[str] = ()) -> list[str]:
    """Arguments with flags, in place of the same ones, and of ``others``, that were there with their values."""
    names = {word.partition("=")[0] for word in (*words, *others) if word.startswith("--")}
    kept, is_dropped = list[str](), False
    for argument in arguments:
        if argument.startswith("-"):
            is_dropped = argument.partition("=")[0] in names
        if not is_dropped:
            kept.append(argument)
    return [*kept, *words]


def record(fitted: Fitted, directory: Path, executor: Executor, say: Callable[[str], None]) -> Fitted:
    """Run the plans whose flags are known, each on a GPU of the size, and close the executor.

    Raises:
        FakedistError: The executor cannot run anything.
    """
    jobs = {str(number): plan.job for number, plan in enumerate(fitted.plans, 1) if plan.job is not None}
    found: dict[str, RecordedPlan] = {}
    with closing(executor):
        cwd = Path(fitted.run.manifest.cwd)
        tasks = [Task(key=key, job=job, directory=directory / f"plan{key}", cwd=cwd) for key, job in jobs.items()]
        for result in executor.run(tasks):
            found[result.key] = _recorded(result.directory, result.failure)
            say(f"plan {result.key} of {len(fitted.plans)} ran{': ' * bool(result.failure)}{result.failure}")
    plans = [replace(plan, recorded=found.get(str(number))) for number, plan in enumerate(fitted.plans, 1)]
    return replace(fitted, plans=tuple(plans))


def _recorded(path: Path, failure: str) -> RecordedPlan:
    try:
        run = open_run(path).keeping_tables()
    except FakedistError as error:
        return RecordedPlan(None, failure=failure or error.message)
    if not run.summary.exit.ended_well and run.summary.out_of_memory is None:
        return RecordedPlan(None, failure=failure or str(run.summary.exit.message))
    return RecordedPlan(run, _without_host(run))


def _without_host(run: Run) -> float | None:
    """The step if the host launched in no time, which no other work of this machine moves; None without one."""
    try:
        time = run.priced_for(what_if="no-host-waits").summary.time
    except (JobError, RunDirectoryError):
        return None
    return None if time is None else time.step_us
