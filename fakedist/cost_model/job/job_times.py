"""The step of a whole job: its ranks are priced one by one, then placed together; throughput, and each rank's parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.analysis.topology import Replicas, find_replicas
from fakedist.cost_model.breakdown import find_busy
from fakedist.cost_model.busiest_rank import own_work
from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.estimated import Models, communication_for
from fakedist.cost_model.hosts import scaled
from fakedist.cost_model.job.micro_batches import Recorded, count_micro_batches, with_micro_batches
from fakedist.cost_model.job.stages import (
    Dependencies,
    PlacedTogether,
    RankStep,
    dependencies_of,
    from_first_transfer,
    num_stages_of,
    only_exchanges,
    place_together,
)
from fakedist.cost_model.model_flops import ModelFlops, flops_of_launches
from fakedist.cost_model.overlap import union, union_us
from fakedist.cost_model.step import Prices, StepLaunches, StepPrices, interval_of
from fakedist.cost_model.what_if import changed_launches
from fakedist.errors import JobError
from fakedist.rundir.notes import counted
from fakedist.rundir.step_time import RankThroughput, SampleThroughput, StepBreakdown

#: Shares of the FLOPs of products with weights: what makes a number of rows worth a look (a head, a table of labels
#: make less), what makes two numbers of rows two parts of a model, and what makes one the model's.
_SOME, _PART, _MOST = 0.05, 0.25, 0.6
_LOOKUP = "aten.embedding.default"
#: Classes that embed tokens, and those that embed something else.
_EMBEDS, _EMBEDS_OTHERS = r"Embedding$", r"Rotary|Posi|Patch|Time|Sinus|Label|Class"
_BY_INDUCTOR = "triton_"


@dataclass(frozen=True)
class StepTokens:
    """The tokens and micro-batches that a rank reads in the timed step; 0 if unknown, for the reason ``why``.

    ``are_embedded``: an embedding looks up that many rows. Else they are the rows of most products.
    """

    number: int
    num_micro_batches: int
    why: str = ""
    are_embedded: bool = True


@dataclass(frozen=True)
class StepSamples:
    """The samples that a rank reads in the timed step, 0 if unknown, and the shape of one, such as "3x224x224"."""

    number: int = 0
    shape: str = ""


def tokens_of(tables: Mapping[str, pd.DataFrame]) -> StepTokens:
    """Count the tokens of a step, by its tables ``launches`` and ``work``, and by ``layers`` and ``steps`` if given."""
    launches, work = tables["launches"], tables["work"]
    forward = forward_of(launches)
    lookups, products = _lookups(forward, work), _products(forward, work)
    if not len(lookups) and not _embeds_compiled(forward, work, tables.get("layers")):
        return StepTokens(0, 0, "no embedding was seen in the forward pass")
    if not len(products):
        return StepTokens(0, 0, "no product follows the embedding")
    found = _found(lookups, products, _convolutions(forward, work))
    if found.number and found.number == samples_of(tables).number and not _attends(forward, work):
        return StepTokens(0, 0, "each sample is a single row")
    return found


def _found(lookups: pd.DataFrame, products: pd.DataFrame, others: float) -> StepTokens:
    """The tokens, from the rows of each embedding and of each product with weights; ``others``: further FLOPs."""
    weights = products.groupby("rows")["flops"].sum().sort_values(ascending=False)
    share = weights / (weights.sum() + others)
    most = int(share.index[0])
    known = share[share.index.isin(lookups["rows"]) & (share >= _SOME)]
    if len(known):
        number = int(known.index[0])
        # Experts, or several products of one layer, multiply a multiple of the tokens.
        if most % number or (len(known) > 1 and known.iloc[1] >= _PART * known.iloc[0]):
            return StepTokens(0, 0, "parts of the model read sequences of different lengths")
        return StepTokens(number, int(products.loc[products["rows"] == number, "runs"].min()))
    own = products[products["rows"] == most]
    runs = int(own["runs"].min())
    per_run = most / own["runs"].min()
    is_same = (lookups["rows"] == per_run * lookups["runs"]) & (lookups["runs"] != runs)
    if is_same.any():
        return StepTokens(0, 0, "the embedding and the products after it do not run equally often")
    if share.iloc[0] < _MOST:
        return StepTokens(0, 0, "the products of the model's layers read different numbers of rows")
    return StepTokens(most, runs, are_embedded=False)


def _lookups(forward: pd.DataFrame, work: pd.DataFrame) -> pd.DataFrame:
    """Find the rows that each embedding looks up in the step: ``rows``, and the ``runs`` that do so."""
    looks_up = ((work["operation"].astype(str) == _LOOKUP) & (work["m"] > 0)).to_numpy(bool)
    own = forward[looks_up[forward["work"].to_numpy("i8")]].drop_duplicates(["op", "layer"])
    rows = work["m"].to_numpy("i8")[own["work"].to_numpy("i8")]
    frame = pd.DataFrame({"layer": own["layer"].to_numpy("i8"), "rows": rows, "runs": 1})
    return frame.groupby("layer", as_index=False).sum()


def _products(forward: pd.DataFrame, work: pd.DataFrame) -> pd.DataFrame:
    """Find the rows that each product with weights multiplies in the step: ``rows``, ``runs`` and ``flops``.

    A product is a layer and the sizes of its weights. Batches of products, such as those of an attention, have none.
    """
    sizes = work[["m", "n", "k", "batch"]].to_numpy("i8")
    has_weights = (work["family"].astype(str) == "gemm").to_numpy(bool) & (sizes[:, :3] > 0).all(axis=1)
    has_weights &= sizes[:, 3] <= 1
    own = forward[has_weights[forward["work"].to_numpy("i8")]]
    at = own["work"].to_numpy("i8")
    frame = pd.DataFrame(
        {
            "layer": own["layer"].to_numpy("i8"),
            "n": sizes[at, 1],
            "k": sizes[at, 2],
            "rows": sizes[at, 0],
            "runs": 1,
            "flops": np.nan_to_num(work["flops"].to_numpy("f8")[at]),
        }
    )
    return frame.groupby(["layer", "n", "k"], as_index=False).sum()


def _convolutions(forward: pd.DataFrame, work: pd.DataFrame) -> float:
    """FLOPs of convolutions, which have no rows."""
    is_one = work["operation"].astype(str).str.contains("conv").to_numpy(bool)
    flops = np.where(is_one, np.nan_to_num(work["flops"].to_numpy("f8")), 0.0)
    return float(flops[forward["work"].to_numpy("i8")].sum())


def _attends(forward: pd.DataFrame, work: pd.DataFrame) -> bool:
    of_work = (work["family"].astype(str) == "attention").to_numpy(bool)
    return bool(of_work[forward["work"].to_numpy("i8")].any())


def _embeds_compiled(forward: pd.DataFrame, work: pd.DataFrame, layers: pd.DataFrame | None) -> bool:
    """Return whether a model that embeds tokens runs in Inductor's code, which looks up without an operation."""
    if layers is None:
        return False
    is_inductors = work["name"].astype(str).str.startswith(_BY_INDUCTOR).to_numpy(bool)
    classes = layers["class_name"].astype(str)
    names = classes + " " + layers["name"].astype(str).str.rpartition(".")[2].str.capitalize()
    embeds = classes.str.contains(_EMBEDS) & ~names.str.contains(_EMBEDS_OTHERS)
    return bool(embeds.any()) and bool(is_inductors[forward["work"].to_numpy("i8")].any())


def forward_of(launches: pd.DataFrame) -> pd.DataFrame:
    """The launches with work of the forward passes, without those that backward runs again."""
    is_forward = (launches["phase"].astype(str) == "forward") & ~launches["recompute"].astype(bool)
    return launches[is_forward & (launches["work"] >= 0)]


def samples_of(tables: Mapping[str, pd.DataFrame]) -> StepSamples:
    """The samples of the timed step, of ``launches``, as ``steps`` knows them; of the last step that has any, else."""
    launches = tables["launches"]
    steps = tables.get("steps")
    if steps is None or "samples" not in steps or not len(launches):
        return StepSamples()
    known = steps[steps["samples"] > 0]
    if not len(known):
        return StepSamples()
    timed = known[known["step"] == int(launches["step"].iloc[0])]
    row = (timed if len(timed) else known).iloc[-1]
    return StepSamples(int(row["samples"]), str(row["sample_shape"]))


def tokens_text(tokens: StepTokens, rank: int, replicas: Replicas) -> str:
    """The arithmetic of the tokens of a job."""
    batches = counted(tokens.num_micro_batches, "micro-batch", "micro-batches")
    does = f"that rank {rank} embeds" if tokens.are_embedded else f"rows that most layers of rank {rank} multiply"
    return f"{tokens.number:,} {does} in {batches}, times {replicas.number:,} ({replicas.text})"


def rank_throughput(
    tables: Mapping[str, pd.DataFrame], time: StepBreakdown, rank: int, world_size: int
) -> tuple[RankThroughput | None, SampleThroughput | None]:
    """The tokens and the samples per second of a job whose ranks are all as fast as this one.

    None unless they are certain: the rank's groups show how many ranks read tokens of their own, and it neither waits
    for a pipeline nor has collectives of unknown duration.
    """
    launches, calls = tables["launches"], tables["calls"]
    own = calls[calls["step"] == int(launches["step"].iloc[0])]
    if time.num_unknown_calls or own["operation"].astype(str).isin(("send", "recv")).any():
        return None, None
    replicas = find_replicas(tables["groups"], own, world_size)
    if not replicas.number:
        return None, None
    tokens, samples = tokens_of(tables), samples_of(tables)
    of_all = replicas.number / (time.step_us * 1e-6) / world_size
    number, read = tokens.number * replicas.number, samples.number * replicas.number
    text = tokens_text(tokens, rank, replicas)
    return (
        RankThroughput(number, text, tokens.number * of_all) if number else None,
        SampleThroughput(read, samples.shape, samples.number * of_all) if read else None,
    )


#: A backward pass takes twice the arithmetic of its forward.
_FORWARD_AND_BACKWARD = 3.0


@dataclass(frozen=True)
class CountedFlops:
    """A rank's FLOPs as frameworks count them: three times those of the forward pass, none computed twice.

    Attributes:
        megatron: Each query meets half of the keys.
        torchtitan: Each query meets all keys.
        num_lacking: Products and attention of the forward pass without known FLOPs.
        models: Those of :mod:`fakedist.cost_model.model_flops`.
    """

    megatron: float
    torchtitan: float
    num_lacking: int
    models: ModelFlops


def flops_of(launches: pd.DataFrame, work: pd.DataFrame) -> CountedFlops:
    """Count the FLOPs of a step."""
    counts = np.bincount(forward_of(launches)["work"].to_numpy("i8"), minlength=len(work))
    family = work["family"].astype(str).to_numpy()
    flops = own_work(work, "flops")
    is_attention = (family == "attention") & (work["attention"].astype(str) == "forward").to_numpy(bool)
    is_product = family == "gemm"
    width, value_width = work["width"].to_numpy("f8"), work["value_width"].to_numpy("f8")
    widths = width + np.where(value_width > 0, value_width, width)
    every = (
        2.0 * np.prod([work[name].to_numpy("f8") for name in ("batch", "heads", "queries", "keys")], axis=0) * widths
    )
    of_attention = (family == "attention") & (flops != 0)  # kernels that prepare one have none
    lacks = (is_product & ~np.isfinite(flops)) | (of_attention & ~(is_attention & (every > 0)))
    products = float((np.where(is_product, np.nan_to_num(flops), 0.0) * counts).sum())
    attention = float((np.where(is_attention, every, 0.0) * counts).sum())
    return CountedFlops(
        megatron=_FORWARD_AND_BACKWARD * (products + attention / 2),
        torchtitan=_FORWARD_AND_BACKWARD * (products + attention),
        num_lacking=int(counts[lacks].sum()),
        models=flops_of_launches(launches, work),
    )


#: What a lane shows, the first covering the later ones.
LANES = ("generation", "forward", "recompute", "backward", "optimizer", "other", "communication", "bubble")
#: Breaks shorter than this fraction of the step are not drawn.
_DRAWN = 1 / 4000


@dataclass(frozen=True)
class RankRows:
    """The launches with work of a rank, in order, once placed.

    ``alone_us`` is without waiting for other ranks; ``lane`` an index into :data:`LANES`.
    """

    start_us: Array
    launch_us: Array
    end_us: Array
    alone_us: Array
    lane: Array

    @property
    def is_call(self) -> Array:
        """True for collectives, sends and receives."""
        return np.asarray(self.lane == LANES.index("communication"))

    @property
    def works_from_us(self) -> Array:
        """When each goes on to work, once it has waited for other ranks."""
        return np.asarray(np.maximum(self.end_us - self.alone_us, self.start_us))


@dataclass(frozen=True)
class Parts:
    """A rank's time in parts that add up to the job's step.

    Attributes:
        communication_us: It communicates and does not compute.
        bubble_us: It waits for other ranks, or has finished before them.
        host_us: The GPU waits for the rank's own host.
        wait_us: Anything else.
    """

    own_us: float
    compute_us: float
    communication_us: float
    bubble_us: float
    host_us: float
    wait_us: float


def parts_of(rows: RankRows, own_us: float, step_us: float) -> Parts:
    """Divide the job's step for a rank."""
    is_call = rows.is_call
    frame = pd.DataFrame(
        {
            "start_us": rows.start_us,
            "launch_us": rows.launch_us,
            "known_us": rows.end_us - rows.start_us,
            "is_known": True,
            "is_compute": ~is_call,
        }
    )
    busy = find_busy(frame, own_us)
    working = union_us(
        np.concatenate([rows.start_us[~is_call], rows.works_from_us[is_call]]),
        np.concatenate([rows.end_us[~is_call], rows.end_us[is_call]]),
    )
    communication = max(working - busy.busy_us, 0.0)
    waits = max(busy.communication_us - communication, 0.0)
    return Parts(own_us, busy.busy_us, communication, waits + step_us - own_us, busy.launch_gap_us, busy.wait_us)


def lanes_of(rows: RankRows, own_us: float, step_us: float) -> pd.DataFrame:
    """The activity of a rank over time: ``lane`` (of :data:`LANES`), ``start_us``, ``end_us`` of each stretch.

    Breaks too short to draw are closed within a lane; stretches of different lanes may overlap.
    """
    lanes = []
    for number, name in enumerate(LANES):
        own = rows.lane == number
        starts = np.where(rows.is_call, rows.works_from_us, rows.start_us)[own]
        ends = rows.end_us[own]
        if name == "bubble":
            own = rows.is_call
            starts = np.append(rows.start_us[own], own_us)
            ends = np.append(rows.works_from_us[own], step_us)
        starts, ends = union(starts, ends)
        if not len(starts):
            continue
        is_break = starts[1:] - ends[:-1] > step_us * _DRAWN
        first, last = np.concatenate([[True], is_break]), np.concatenate([is_break, [True]])
        lanes.append(pd.DataFrame({"lane": name, "start_us": starts[first], "end_us": ends[last]}))
    return pd.concat(lanes, ignore_index=True) if lanes else pd.DataFrame(columns=["lane", "start_us", "end_us"])


@dataclass(frozen=True)
class JobRank:
    """A rank of the job, and its step.

    Attributes:
        lanes: From :func:`lanes_of`.
        replicas: Ranks of the job that read tokens of their own.
        num_exchanged: Sends to and receives from the other ranks.
        elsewhere: Ranks that it exchanges with and that are not placed.
        num_unmatched: Calls whose other side was never reached; they did not wait.
        num_lacking: Receives that its step lacks, for what the others send.
        num_recorded: Micro-batches; 0 if unknown.
    """

    rank: int
    step: int
    parts: Parts
    lanes: pd.DataFrame
    tokens: StepTokens
    samples: StepSamples
    flops: CountedFlops
    replicas: Replicas
    num_exchanged: int
    elsewhere: tuple[int, ...]
    num_unmatched: int
    num_lacking: int
    num_recorded: int


@dataclass(frozen=True)
class JobTimes:
    """The step of a job. ``low_us``, the least of its 90 % interval, is None if unknown.

    ``least_us`` is the most that the kernels of a rank take on one stream, each alone: no step is shorter.
    """

    step_us: float
    low_us: float | None
    high_us: float | None
    least_us: float
    ranks: list[JobRank]


@dataclass(frozen=True)
class _Alone:
    """A rank that is priced for itself."""

    number: int  # of the timed step
    step: RankStep
    rows: tuple[Array, Array]
    varied: list[list[Array]] | None
    least_us: float
    dependencies: Dependencies
    tokens: StepTokens
    samples: StepSamples
    flops: CountedFlops
    replicas: Replicas
    num_recorded: int
    lacks: JobError | None


@dataclass(frozen=True)
class _Job:
    """The models and sizes that the ranks of a job are priced with."""

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
        ranks: Each rank with ``launches`` (not empty), ``work``, ``calls`` and ``groups``, read one by one; none is
            kept.
        models: A group that a what-if names is one of some rank's.
        micro_batches: Those beyond the recorded ones are repeated; None for those recorded.

    Raises:
        RunDirectoryError: The tables are damaged.
        JobError: So many micro-batches cannot be made of those recorded, or no rank has a group that the change names.
    """
    prices = StepPrices(models.prices, models.network.experts, models.host.costs)
    job = _Job(every, world_size, replace(models, prices=prices), micro_batches)
    alone = {rank: _alone(rank, tables, job) for rank, tables in ranks}
    _check(alone, micro_batches)
    placed = place_together([priced.step for priced in alone.values()], prices.host)
    step_us = _end_us(placed)
    low, high = _interval(list(alone.values()), step_us, prices)
    made = [_rank(priced, placed, step_us) for _, priced in sorted(alone.items())]
    return JobTimes(step_us, low, high, max(priced.least_us for priced in alone.values()), made)


def _alone(rank: int, tables: Mapping[str, pd.DataFrame], job: _Job) -> _Alone:
    work, calls = tables["work"], tables["calls"]
    launches = from_first_transfer(tables["launches"], calls)
    recorded = {**tables, "launches": launches}
    tokens, samples = tokens_of(recorded), samples_of(recorded)
    num_recorded = tokens.num_micro_batches or count_micro_batches(launches, work)
    if job.micro_batches is not None:
        ran = Recorded(rank, launches, work, calls, num_stages_of(launches, calls, tables["groups"]), num_recorded)
        launches = with_micro_batches(ran, job.micro_batches)
        tokens = tokens_of({**tables, "launches": launches})
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
        least_us=step.least_us,
        dependencies=dependencies,
        tokens=tokens,
        samples=samples,
        flops=flops_of(launches, work),
        replicas=find_replicas(tables["groups"], own, job.world_size),
        num_recorded=num_recorded,
        lacks=lacks,
    )


def _changed(
    launches: pd.DataFrame, tables: Mapping[str, pd.DataFrame], job: _Job
) -> tuple[pd.DataFrame, Communication, JobError | None]:
    """The launches and the communication of a rank with the job's what-ifs, and why this rank is as before."""
    changed = launches
    communication = communication_for(tables, job.models.gpu, job.models.network)
    lacks = None
    for what_if in job.models.network.what_ifs:
        try:
            changed, communication = changed_launches(what_if, changed, communication, tables)
        except JobError as error:
            lacks = error
    if any(what_if.kind == "no-overlap" for what_if in job.models.network.what_ifs):
        # A receive is posted long before its sender sends. On the stream of the kernels it would hold up all of them.
        apart = only_exchanges(launches, tables["calls"])
        changed = changed.assign(stream=np.where(apart, launches["stream"], changed["stream"]))
    return changed, communication, lacks


def _check(ranks: Mapping[int, _Alone], micro_batches: int | None) -> None:
    """Raise JobError if the change changes nothing, or if ranks recorded different numbers of micro-batches."""
    lacking = [priced.lacks for priced in ranks.values() if priced.lacks is not None]
    if len(lacking) == len(ranks):
        raise lacking[0]
    if micro_batches is None:
        return
    first, *others = ranks.items()
    for rank, priced in others:
        if priced.num_recorded != first[1].num_recorded:
            raise JobError(
                f"rank {first[0]} recorded {first[1].num_recorded} micro-batches, "
                f"and rank {rank} {priced.num_recorded}",
                "give runs of one job's ranks",
            )


def _lanes(launches: pd.DataFrame, work: pd.DataFrame) -> Array:
    rows = launches[launches["work"] >= 0]
    names = rows["phase"].astype(str)
    names = names.where(names.isin(LANES), "other").where(~rows["recompute"].astype(bool), "recompute")
    is_call = (work["family"].astype(str) == "communication").to_numpy(bool)[rows["work"].to_numpy("i8")]
    codes = pd.Categorical(names.mask(is_call, "communication"), categories=list(LANES)).codes
    return np.asarray(codes)


def _end_us(together: PlacedTogether) -> float:
    return max(placed.end_us for placed in together.placed.values())


def _interval(alone: list[_Alone], step_us: float, prices: Prices) -> tuple[float | None, float | None]:
    """The step's interval: kernels of all ranks are faster or slower together, so are their collectives and hosts."""
    ends: list[list[float]] = []
    for side in range(2):
        ends.append([])
        for part in range(2):
            steps = []
            for priced in alone:
                if priced.varied is None:
                    return None, None
                varied = priced.varied[side]
                durations = varied[part] if part < len(varied) else priced.step.duration_us
                steps.append(priced.step.with_durations(durations))
            ends[-1].append(_end_us(place_together(steps, prices.host)))
        host = scaled(prices.host, prices.host.range[side])
        ends[-1].append(_end_us(place_together([priced.step for priced in alone], host)))
    return interval_of(step_us, ends)


def _rank(alone: _Alone, together: PlacedTogether, step_us: float) -> JobRank:
    rank = alone.step.rank
    placed = together.placed[rank]
    durations, lane = alone.rows
    rows = RankRows(placed.start_us, placed.launch_us, placed.ends_us, durations, lane)
    return JobRank(
        rank=rank,
        step=alone.number,
        parts=parts_of(rows, placed.end_us, step_us),
        lanes=lanes_of(rows, placed.end_us, step_us),
        tokens=alone.tokens,
        samples=alone.samples,
        flops=alone.flops,
        replicas=alone.replicas,
        num_exchanged=alone.dependencies.num_exchanged,
        elsewhere=alone.dependencies.elsewhere,
        num_unmatched=together.num_unmatched[rank],
        num_lacking=together.num_lacking.get(rank, 0),
        num_recorded=alone.num_recorded,
    )
