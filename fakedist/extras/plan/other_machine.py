"""A recorded job on another machine: whether it fits there, its step, and which parts of its recipe no longer pay.

The recording is played again: memory with shards of the other job's size, the step's launches priced anew. Without
recomputation, what it would recompute stays from a layer's forward on, and the launches that run again are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.analysis.activation_advice import blocks_of_batch, micro_batch_of
from fakedist.analysis.advice import find_advice
from fakedist.analysis.evidence import Change, Evidence, Fits, Room, Saving, owners, passes_of, stacks
from fakedist.analysis.memory_tables import fold_layers
from fakedist.analysis.recording import Array
from fakedist.cost_model.outside_memory import estimate_outside
from fakedist.errors import JobError, RunDirectoryError
from fakedist.extras.plan.resizing import Resized, resize
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options.pricing import Pricing
from fakedist.results.job_time import check_every_stage, time_job
from fakedist.results.repricing import gpu_of
from fakedist.results.run import Run, setup_of_run
from fakedist.results.token_budget import Estimate
from fakedist.rundir.summary import Remedy

_LARGEST_BATCHES = (8, 4, 2)  # times the recorded one
_DROPPED = {1: "", 2: " in every second layer"}


@dataclass(frozen=True)
class RankNeed:
    """Memory that a rank needs reserved, *replayed*, and whether it fits with what is outside of the allocator."""

    low_bytes: int
    high_bytes: int
    fits: Fits


@dataclass(frozen=True)
class RankThere:
    """A rank on the other machine.

    Attributes:
        rank: As it was recorded.
        recorded_bytes: Peak reserved of the recording.
        need: On the other machine.
        outside_low_bytes: The least that the CUDA context and NCCL take there, *estimated*.
        outside_high_bytes: The most.
        unknown: What is outside of it and not known: "NCCL: not known for NVIDIA GB200".
        remedy: Changes after which it fits, where it does not.
    """

    rank: int
    recorded_bytes: int
    need: RankNeed
    outside_low_bytes: int
    outside_high_bytes: int
    unknown: Sequence[str]
    remedy: Remedy | None


@dataclass(frozen=True)
class GroupThere:
    """A group of ranks here and there.

    Attributes:
        group: Its label.
        operation: The collective.
        size: Ranks, there.
        num_nodes: NVLink domains that it spans: here, there.
        exposed_us: Time of the step in which nothing else runs: here, there.
    """

    group: str
    operation: str
    size: int
    num_nodes: tuple[int, int]
    exposed_us: tuple[float, float]


@dataclass(frozen=True)
class Alternative:
    """A change of the recipe on the other machine.

    Attributes:
        title: The change.
        need: Of the rank that needs most.
        step: With it; None if only a recording says it.
        why: Its reason, or its limit.
    """

    title: str
    need: RankNeed
    step: Estimate | None
    why: str


@dataclass(frozen=True)
class MachinePlan:
    """A recorded job on another machine.

    Attributes:
        gpu: The other GPU.
        num_gpus: Their number: recorded, there.
        fabric: The interconnect there.
        sharded: What the ranks shard whose number changed; empty for nothing, or the same number.
        ranks: Those that ran.
        here: The step as it was recorded, priced for its own machine.
        there: The step there.
        tokens: Of a step of the job: here, there; None if not known.
        groups: Its collectives, the most exposed there first; none of a job with several stages.
        alternatives: Changes of the recipe that the machine makes possible.
    """

    gpu: GpuSpec
    num_gpus: tuple[int, int]
    fabric: str
    sharded: str
    ranks: Sequence[RankThere]
    here: Estimate
    there: Estimate
    tokens: tuple[int | None, int | None]
    groups: Sequence[GroupThere]
    alternatives: Sequence[Alternative]


def plan_machine(runs: Sequence[Run], pricing: Pricing, num_gpus: int | None = None) -> MachinePlan:
    """Plan a job on the machine of ``pricing``, from the run of a rank, or of a rank of each pipeline stage.

    Raises:
        JobError: The groups do not show the job of that size, or runs of stages are missing.
        RunDirectoryError: A run has no launches to price, or no history of its memory.
    """
    first = runs[0]
    job = first.manifest.job
    if job is None:
        raise JobError(f"{first.path} is not the run of a rank of a job", "fakedist profile -o RUN ... makes one")
    check_every_stage(runs)
    gpu = gpu_of(first.manifest, pricing.gpu, pricing.power_watts)
    resized = [resize(run, num_gpus or job.world_size) for run in runs]
    own = Pricing(host=pricing.host if pricing.gpu is None else None)
    here, there = _Step.of(runs, own), _Step.of([one.run for one in resized], pricing)
    ranks, evidences = [], []
    for run, one in zip(runs, resized, strict=True):
        tables = _tables(one, there.priced)
        folds, setup = fold_layers(tables["layers"]), setup_of_run(one.run, gpu)
        evidence = Evidence(tables, folds, setup)
        room, outside = _room(one.run, gpu, pricing, there.step)
        need = _needed(evidence, room, (0, 0))
        if not one.sharded:  # as measured
            need = RankNeed(evidence.reserved_peak, evidence.reserved_peak, room.fits(*[evidence.reserved_peak] * 2))
        remedy = find_advice(tables, folds, room, setup)[1] if need.fits == "does not fit" else None
        rank = 0 if run.summary.rank is None else run.summary.rank
        ranks.append(RankThere(rank, run.peak_reserved_bytes, need, *outside, remedy=remedy))
        evidences.append((evidence, room, one.run))
    most = max(range(len(ranks)), key=lambda at: ranks[at].need.high_bytes)
    alternatives = [*_alternatives(*evidences[most], pricing)] if len(runs) == 1 else []
    return MachinePlan(
        gpu=gpu,
        num_gpus=(job.world_size, num_gpus or job.world_size),
        fabric=there.fabric,
        sharded=next((one.sharded for one in resized if one.sharded), ""),
        ranks=ranks,
        here=here.step,
        there=there.step,
        tokens=(here.tokens, there.tokens),
        groups=_groups(here.priced, there.priced),
        alternatives=alternatives,
    )


@dataclass(frozen=True)
class _Step:
    """The priced step of a job: of one run, or of several stages together (``priced`` is None)."""

    step: Estimate
    tokens: int | None
    fabric: str
    priced: Run | None

    @classmethod
    def of(cls, runs: Sequence[Run], pricing: Pricing) -> _Step:
        options = {name: value for name, value in vars(pricing).items() if name != "gpu"}
        if len(runs) > 1:
            job = time_job(runs, pricing.gpu, **options).summary
            step = Estimate(job.step_us, job.step_low_us, job.step_high_us)
            return cls(step, job.throughput.tokens_per_step, job.fabric, None)
        priced = runs[0].priced_for(pricing.gpu, **options)
        if priced.summary.timed is None:
            raise RunDirectoryError(
                f"{runs[0].path} has no times", "fakedist profile -o RUN ... makes a run with times"
            )
        time, source = priced.summary.timed
        tokens = None if time.throughput is None else time.throughput.tokens_per_step
        return cls(Estimate(time.step_us, time.step_low_us, time.step_high_us), tokens, source.fabric, priced)


def _tables(resized: Resized, priced: Run | None) -> dict[str, pd.DataFrame]:
    """The tables of advice, with the kernels of the other machine."""
    if resized.tables is None:
        raise RunDirectoryError(
            f"{resized.run.path} has no history of its memory that could be played again",
            "fakedist profile -o RUN ... makes one",
        )
    return {**resized.tables, **({"kernels": priced.table("kernels")} if priced is not None else {})}


def _room(run: Run, gpu: GpuSpec, pricing: Pricing, step: Estimate) -> tuple[Room, tuple[int, int, list[str]]]:
    """The memory that a rank may reserve on another GPU; the least and most outside of it, and what is not known."""
    job, known = run.manifest.job, run.summary.estimated_outside
    assert job is not None
    tables = {name: run.table(name) for name in ("groups", "calls")}
    per_node = pricing.gpus_per_node or job.gpus_per_node
    version, variables = ("", {}) if known is None else (known.nccl_version, known.nccl_environment)
    # Whether groups are bound to a device, which makes NCCL begin early, is not kept: both ends.
    least, most = (
        estimate_outside(
            tables,
            gpu_name=gpu.product,
            gpus_per_node=per_node,
            fabric=pricing.fabric,
            nccl_version=version,
            nccl_environment=variables,
            bound=bound,
        )
        for bound in ((), range(len(tables["groups"])))
    )
    taken = 0 if known is None else known.taken_bytes
    low, high = least.low_bytes + taken, most.high_bytes + taken
    capacity = gpu.memory_bytes
    return Room(max(capacity - high, 0), max(capacity - low, 0), step.value, capacity), (low, high, most.left_out)


def _needed(evidence: Evidence, room: Room, saved: tuple[int, int]) -> RankNeed:
    low, high = evidence.needed_without(*saved)
    return RankNeed(low, high, room.fits(low, high))


def _groups(here: Run | None, there: Run | None) -> list[GroupThere]:
    """The collectives of a step, the most exposed there first."""
    if here is None or there is None or here.summary.time is None or there.summary.time is None:
        return []
    before = {(row.group, row.operation): row for row in here.summary.time.by_group}
    rows = [(before.get((row.group, row.operation)), row) for row in there.summary.time.by_group]
    return [
        GroupThere(
            row.group,
            row.operation,
            row.group_size,
            (own.num_nodes, row.num_nodes),
            (own.exposed_us, row.exposed_us),
        )
        for own, row in sorted(rows, key=lambda pair: -pair[1].exposed_us)
        if own is not None and row.group_size > 1
    ]


def _alternatives(evidence: Evidence, room: Room, run: Run, pricing: Pricing) -> Iterator[Alternative]:
    """Changes that more memory makes possible: less recomputation, larger micro-batches."""
    again = evidence.blocks["recompute"].to_numpy(bool)
    if again.any():
        yield from _without_recomputation(evidence, room, run, pricing)
    batch, flag = micro_batch_of(evidence)
    if not batch:
        return
    may, surely = blocks_of_batch(evidence, batch)
    for times in _LARGEST_BATCHES:
        size = evidence.blocks["bytes"].to_numpy() * (1 - times)
        change = Change("", "", "", Saving(np.where(surely, size, 0)), Saving(np.where(may, size, 0)))
        need = _needed(evidence, room, evidence.saved([change]))
        if need.fits == "fits" and surely.any():
            how = f": {flag} {times * batch}" if flag else ""
            title = f"micro-batches of {times * batch} instead of {batch}{how}"
            why = f"{times} times the tokens of a step, or as many with fewer micro-batches; record it for its step"
            yield Alternative(title, need, None, why)
            return


def _without_recomputation(evidence: Evidence, room: Room, run: Run, pricing: Pricing) -> Iterator[Alternative]:
    launches = run.table("launches")
    for every, where in _DROPPED.items():
        dropped = _kept_instead(evidence, every)
        if dropped is None:
            continue
        change, layers = dropped
        need = _needed(evidence, room, evidence.saved([change]))
        own = launches["recompute"].to_numpy(bool) & (launches["work"] >= 0).to_numpy(bool)
        own &= layers[launches["layer"].to_numpy("i8")]
        fewer = run.changed(run.manifest, {"launches": launches[~own].reset_index(drop=True)})
        step = _Step.of([fewer], pricing).step
        why = "what is computed again stays from forward on, and nothing runs twice"
        yield Alternative(f"without recomputation{where}", need, step, why)
        if need.fits == "fits":
            return


def _kept_instead(evidence: Evidence, every: int) -> tuple[Change, Array] | None:
    """Activations that are recomputed, kept from their layer's forward on; and the layers that no longer recompute.

    The k-th recomputation of a layer in a step is that of its k-th forward. Its temporaries go, or do not.
    """
    blocks = evidence.blocks
    again = blocks["recompute"].to_numpy(bool)
    saved = again & evidence.category("activation")
    bytes_, made = blocks["bytes"].to_numpy(), blocks["alloc_event"].to_numpy()
    freed, of_layer = blocks["free_event"].to_numpy(), blocks["layer"].to_numpy()
    kept, starts, ends = np.zeros(len(blocks)), made.copy(), made.copy()
    layers = np.zeros(len(evidence.layers), bool)
    for fold in stacks(evidence):
        owner = owners(evidence.layers, fold.layers)
        passes = passes_of(evidence, owner)
        mine = np.flatnonzero(saved & (owner[of_layer] >= 0) & (owner[of_layer] % every == 0))
        if passes is None or not len(mine):
            continue
        layers |= (owner >= 0) & (owner % every == 0)
        of_block, step = owner[of_layer[mine]], blocks["step"].to_numpy()[mine]
        begins = (np.diff(of_block, prepend=-1) != 0) | (np.diff(step, prepend=-1) != 0)
        number = np.cumsum(begins) - 1
        firsts = pd.DataFrame({"owner": of_block[begins], "step": step[begins]})
        firsts["place"] = firsts.groupby(["owner", "step"]).cumcount()
        forwards = pd.DataFrame({"owner": passes.owner, "step": passes.step, "first": passes.first_event})
        forwards["place"] = forwards.groupby(["owner", "step"]).cumcount()
        first = firsts.merge(forwards, "left", on=["owner", "step", "place"])["first"].to_numpy("f8")
        known = np.isfinite(first[number])
        kept[mine[known]], starts[mine[known]] = -bytes_[mine[known]], first[number][known].astype("i8")
    if not kept.any():
        return None
    gone = again & ~saved & layers[of_layer]
    least = Saving(kept, starts, ends)
    most = Saving(np.where(gone, bytes_, kept), starts, np.where(gone, freed, ends))
    return Change("", "", "", most, least), layers
