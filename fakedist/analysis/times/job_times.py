"""The step of a whole job: ranks of it are priced each for itself, and then placed together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fakedist.analysis.axes import Replicas, find_replicas
from fakedist.analysis.recording import Array
from fakedist.analysis.times.estimated import communication_for
from fakedist.analysis.times.models import Models
from fakedist.analysis.times.stage_parts import LANES, Parts, RankRows, lanes_of, parts_of
from fakedist.analysis.times.throughput import CountedFlops, StepTokens, flops_of, tokens_of
from fakedist.errors import JobError
from fakedist.time.communication import Communication
from fakedist.time.host_times import HOST_RANGE, scaled
from fakedist.time.imbalance import ImbalancedPrices
from fakedist.time.micro_batches import Recorded, count_micro_batches, with_micro_batches
from fakedist.time.placing import StepLaunches, interval_of
from fakedist.time.stages import PlacedTogether, RankStep, place_together
from fakedist.time.step import Prices
from fakedist.time.transfers import Dependencies, dependencies_of, from_first_transfer, num_stages_of, only_exchanges
from fakedist.time.what_if import changed_launches


@dataclass(frozen=True)
class JobRank:
    """A rank of the job, and its step.

    Attributes:
        rank: The rank.
        step: Number of the timed step.
        parts: How it spends the job's step.
        lanes: What it does when: see :func:`fakedist.analysis.times.stage_parts.lanes_of`.
        tokens: The tokens that it reads.
        flops: The FLOPs of its step, as frameworks count them.
        replicas: How many ranks of the job read tokens of their own, as its groups show.
        num_exchanged: Its sends to and receives from the other ranks.
        elsewhere: Ranks that it exchanges with and that are not placed.
        num_unmatched: Its calls whose other side was never reached; they did not wait.
        num_recorded: Micro-batches that were recorded; 0 if that is not known.
    """

    rank: int
    step: int
    parts: Parts
    lanes: pd.DataFrame
    tokens: StepTokens
    flops: CountedFlops
    replicas: Replicas
    num_exchanged: int
    elsewhere: tuple[int, ...]
    num_unmatched: int
    num_recorded: int


@dataclass(frozen=True)
class JobTimes:
    """The step of a job.

    Attributes:
        step_us: The step.
        low_us: The least of its 90 % interval; None if that is not known.
        high_us: The most of it.
        ranks: The ranks, in order.
    """

    step_us: float
    low_us: float | None
    high_us: float | None
    ranks: list[JobRank]


@dataclass(frozen=True)
class _Alone:
    """A rank that is priced for itself."""

    number: int  # of the timed step
    step: RankStep
    rows: tuple[Array, Array]
    varied: list[list[Array]] | None
    dependencies: Dependencies
    tokens: StepTokens
    flops: CountedFlops
    replicas: Replicas
    num_recorded: int
    lacks: JobError | None


@dataclass(frozen=True)
class _Job:
    """What the ranks of the job are priced with."""

    every: frozenset[int]
    world_size: int
    models: Models
    micro_batches: int | None


def job_times(
    ranks: Iterable[tuple[int, Mapping[str, pd.DataFrame]]],
    every: frozenset[int],
    world_size: int,
    models: Models,
    *,
    micro_batches: int | None = None,
) -> JobTimes:
    """Estimate the step of a job from some of its ranks.

    Args:
        ranks: Each rank and its tables ``launches`` (not empty), ``work``, ``calls`` and ``groups``. They are read one
            after the other, and none is kept.
        every: All of the ranks.
        world_size: Ranks of the job.
        models: What to price them with. A group that a what-if names is one of some rank's.
        micro_batches: How many the step shall have, those beyond the recorded ones repeated; None for those recorded.

    Raises:
        RunDirectoryError: The tables are damaged.
        JobError: So many micro-batches cannot be made of those recorded, or no rank has a group that the change names.
    """
    prices = ImbalancedPrices(models.prices, models.network.moe_imbalance)
    job = _Job(every, world_size, replace(models, prices=prices), micro_batches)
    alone = {}
    for rank, tables in ranks:
        alone[rank] = _alone(rank, tables, job)
    _check(alone, micro_batches)
    found = place_together([each.step for each in alone.values()], prices.host)
    step_us = _end_us(found)
    low, high = _interval(list(alone.values()), step_us, prices)
    made = [_rank(each, found, step_us) for _, each in sorted(alone.items())]
    return JobTimes(step_us, low, high, made)


def _alone(rank: int, tables: Mapping[str, pd.DataFrame], job: _Job) -> _Alone:
    work, calls = tables["work"], tables["calls"]
    launches = from_first_transfer(tables["launches"], calls)
    tokens = tokens_of(launches, work)
    num_recorded = tokens.num_micro_batches or count_micro_batches(launches, work)
    if job.micro_batches is not None:
        recorded = Recorded(rank, launches, work, calls, num_stages_of(launches, calls, tables["groups"]), num_recorded)
        launches = with_micro_batches(recorded, job.micro_batches)
        tokens = tokens_of(launches, work)
    of_work = launches["work"].to_numpy("i8")
    counts = np.bincount(of_work[of_work >= 0], minlength=len(work))
    prices = job.models.prices
    priced = prices.price(work, counts)
    launches, communication, lacks = _changed(launches, tables, job)
    step = StepLaunches(launches, work, priced, communication)
    placed = step.place(prices.host)
    durations = np.nan_to_num(placed.time_us)
    dependencies = dependencies_of((launches, calls, tables["groups"]), step.timeline, durations, rank, job.every)
    number = int(launches["step"].iloc[0])
    own = calls[calls["step"] == number]
    return _Alone(
        number=number,
        step=RankStep(rank, step.timeline, durations, dependencies.transfers),
        rows=(durations[of_work >= 0], _lanes(launches, work)),
        varied=step.varied(placed, lambda: prices.step_interval(priced, counts)),
        dependencies=dependencies,
        tokens=tokens,
        flops=flops_of(launches, work),
        replicas=find_replicas(tables["groups"], own, job.world_size),
        num_recorded=num_recorded,
        lacks=lacks,
    )


def _changed(
    launches: pd.DataFrame, tables: Mapping[str, pd.DataFrame], job: _Job
) -> tuple[pd.DataFrame, Communication, JobError | None]:
    """The launches and the communication of a rank with the job's what-if, and why this rank is as before."""
    what_if = job.models.network.what_if
    communication = communication_for(tables, job.models.gpu, job.models.network)
    if what_if is None:
        return launches, communication, None
    try:
        changed, communication = changed_launches(what_if, launches, communication, tables["groups"])
    except JobError as lacks:
        return launches, communication, lacks
    if what_if.kind == "no-overlap":
        # A receive is posted long before its sender sends. On the stream of the kernels it would hold up all of them.
        apart = only_exchanges(launches, tables["calls"])
        changed = changed.assign(stream=np.where(apart, launches["stream"], changed["stream"]))
    return changed, communication, None


def _check(ranks: Mapping[int, _Alone], micro_batches: int | None) -> None:
    """See that a change changes something, and that the ranks recorded equally many micro-batches.

    Raises:
        JobError: They do not.
    """
    lacking = [each.lacks for each in ranks.values() if each.lacks is not None]
    if len(lacking) == len(ranks):
        raise lacking[0]
    if micro_batches is None:
        return
    first, *others = ranks.items()
    for rank, each in others:
        if each.num_recorded != first[1].num_recorded:
            raise JobError(
                f"rank {first[0]} recorded {first[1].num_recorded} micro-batches, and rank {rank} {each.num_recorded}",
                "give runs of one job's ranks",
            )


def _lanes(launches: pd.DataFrame, work: pd.DataFrame) -> Array:
    """What each launch with work is for: a place in LANES."""
    rows = launches[launches["work"] >= 0]
    names = rows["phase"].astype(str)
    names = names.where(names.isin(LANES), "other").where(~rows["recompute"].astype(bool), "recompute")
    is_call = (work["family"].astype(str) == "communication").to_numpy(bool)[rows["work"].to_numpy("i8")]
    codes = pd.Categorical(names.mask(is_call, "communication"), categories=list(LANES)).codes
    return np.asarray(codes)


def _end_us(found: PlacedTogether) -> float:
    return max(each.end_us for each in found.placed.values())


def _interval(alone: list[_Alone], step_us: float, prices: Prices) -> tuple[float | None, float | None]:
    """The step's interval: kernels of all ranks are faster or slower together, so are their collectives and hosts."""
    ends: list[list[float]] = []
    for side in range(2):
        ends.append([])
        for part in range(2):
            steps = []
            for each in alone:
                if each.varied is None:
                    return None, None
                varied = each.varied[side]
                durations = varied[part] if part < len(varied) else each.step.duration_us
                steps.append(each.step.with_durations(durations))
            ends[-1].append(_end_us(place_together(steps, prices.host)))
        host = scaled(prices.host, HOST_RANGE[side])
        ends[-1].append(_end_us(place_together([each.step for each in alone], host)))
    return interval_of(step_us, ends)


def _rank(alone: _Alone, found: PlacedTogether, step_us: float) -> JobRank:
    rank = alone.step.rank
    placed = found.placed[rank]
    durations, lane = alone.rows
    rows = RankRows(placed.start_us, placed.launch_us, placed.ends_us, durations, lane)
    return JobRank(
        rank=rank,
        step=alone.number,
        parts=parts_of(rows, placed.end_us, step_us),
        lanes=lanes_of(rows, placed.end_us, step_us),
        tokens=alone.tokens,
        flops=alone.flops,
        replicas=alone.replicas,
        num_exchanged=alone.dependencies.num_exchanged,
        elsewhere=alone.dependencies.elsewhere,
        num_unmatched=found.num_unmatched[rank],
        num_recorded=alone.num_recorded,
    )
