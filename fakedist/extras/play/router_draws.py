"""Draws of the load of experts, and what the hottest rank then needs: memory played, time priced, no script run.

A draw is what ``fakedist profile --seed`` would draw: its seed and rank run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd

from fakedist.analysis.blocks import build_blocks
from fakedist.analysis.recording import read_recording
from fakedist.analysis.routed_blocks import Counts, Ints, groups_of_stage, passes_of, received_tokens, routed_table
from fakedist.cost_model.busiest_rank import ExpertsLoad
from fakedist.errors import JobError, RunDirectoryError
from fakedist.extras.play.player import play as play_program
from fakedist.extras.play.step_kinds import AllocationProgram, program_of
from fakedist.options import Job
from fakedist.options.pricing import Pricing
from fakedist.results.opening import open_run_directory
from fakedist.results.repricing import ReadTable, models_of, price_again
from fakedist.results.run import Run
from fakedist.router_load import RouterLoad, RouterPass
from fakedist.rundir.summary import RouterLoadFacts

#: The step of so many draws is priced. That of the others follows from these by straight lines.
_PRICES = 8
#: Draws that remedies are played with, and the capacity factors among them.
_WORST, _CAPACITIES = 20, (1.25, 1.5)
_MOST_RANKS = 64
_NONE = np.zeros((0, 0), np.int64)


@dataclass(frozen=True)
class Draw:
    """One draw of the loads, of the rank that receives the most tokens.

    Attributes:
        seed, rank: ``fakedist profile --seed SEED --rank RANK`` runs it.
        share: Tokens that the rank receives over all recorded calls, in times the mean of its group.
        busiest: The same of the rank that receives most in each call, in the group of ranks where that is most.
        pace: Tokens that the busiest rank of any group receives in each call.
        kept: The part of all choices that no capacity drops.
        counts: What sizes follow (``Counts.of_rank``), [calls, counts].
    """

    seed: int
    rank: int
    share: float
    busiest: float
    pace: Ints
    kept: float
    counts: Ints


@dataclass(frozen=True)
class Playable:
    """A recorded run whose allocations can be played with other loads of experts.

    Attributes:
        groups: The groups of ranks that exchange tokens, in the recorded rank's pipeline stage; its own is the first.
        room_bytes: The GPU's memory less what is estimated to be outside of the allocator.
        alloc_conf: The allocator's settings.
        routed: The run's table of that name.
    """

    run: Run
    job: Job
    facts: RouterLoadFacts
    counts: Counts
    program: AllocationProgram
    groups: tuple[tuple[int, ...], ...]
    room_bytes: int
    alloc_conf: str
    recorded: Draw
    routed: pd.DataFrame

    def write(self, path: Path) -> None:
        """Write the program for player.py."""
        names = ("events", "base", "per", "follows", "stream", "is_shared")
        arrays = {name: getattr(self.program, name) for name in names}
        sizes = [self.recorded.counts.size, int(self.program.stream.max(initial=0)), self.room_bytes]
        np.savez(path, sizes=np.array(sizes), gpu=np.array(self.job.gpu), **arrays)

    def player(self, program: Path) -> PlayCounts:
        """Return a player of rows of counts. Its program is written to this file."""
        self.write(program)
        return lambda counts: play_program(program, counts, self.alloc_conf)

    def draws(
        self, load: str, seeds: Iterable[int], capacity: float | None = None, *, rank: int = -1
    ) -> Iterator[Draw]:
        """Draw a load with each seed, for a rank or the hottest (-1).

        A capacity factor drops what an expert gets beyond it from a rank.
        """
        for seed in seeds:
            yield _drawn(self.counts, RouterLoad(load, seed), self.groups, capacity, rank)

    def every_rank(self, load: str, seed: int) -> Iterator[Draw]:
        """One draw, of each rank of all groups."""
        for rank in sorted(rank for ranks in self.groups for rank in ranks):
            yield _drawn(self.counts, RouterLoad(load, seed), self.groups, rank=rank)


def _drawn(
    counts: Counts, load: RouterLoad, groups: Sequence[tuple[int, ...]], capacity: float | None = None, rank: int = -1
) -> Draw:
    """A draw of the hottest rank of all groups, or of the one given."""
    sent = [_capped(counts.passes, counts.sent(load, ranks), capacity) for ranks in groups]
    received = [received_tokens(one) for one in sent]
    chosen = len(groups[0]) * len(groups) * sum(of.tokens * of.top_k for of in counts.passes)
    kept = sum(int(one.sum()) for one in sent) / chosen
    if rank < 0:
        of, at = max(
            ((of, at) for of, one in enumerate(received) for at in range(one.shape[1])),
            key=lambda place: int(received[place[0]][:, place[1]].sum()),
        )
    else:
        of, at = next((of, ranks.index(rank)) for of, ranks in enumerate(groups) if rank in ranks)
    mean = received[of].sum() / received[of].shape[1]
    busiest = max(one.max(axis=1).sum() / one.mean(axis=1).sum() for one in received)
    own = received[of][:, at].sum() / mean
    pace = np.max([one.max(axis=1) for one in received], axis=0)
    return Draw(load.seed, groups[of][at], float(own), float(busiest), pace, kept, counts.of_rank(sent[of], at))


def _capped(passes: Sequence[RouterPass], sent: Ints, capacity: float | None) -> Ints:
    if capacity is None:
        return sent
    most = [int(np.ceil(of.tokens * of.top_k / of.num_experts * capacity)) for of in passes]
    kept: Ints = np.minimum(sent, np.array(most)[:, None, None])
    return kept


def open_playable(path: Path) -> Playable:
    """Read a run, and find which of its blocks follow the counts of experts.

    Raises:
        RunDirectoryError: It is not a run directory, or is damaged.
        JobError: Its allocations cannot be played with other loads.
    """
    run = open_run_directory(path)
    recording, facts, job = read_recording(path), run.summary.router_load, run.manifest.job
    if facts is None or job is None or not facts.ranks or not recording.router_passes:
        raise JobError(
            "the run has no load of experts to draw again: no router picked by --router-load and exchanged tokens",
            "fakedist profile --router-load lognormal:1 ... records one",
        )
    if not run.summary.exit.ended_well and recording.beyond is None:
        raise RunDirectoryError("the run ended before its last step", "play a run that finished its steps")
    counts = Counts(passes_of(recording), tuple(facts.ranks))
    tables = {name: run.table(name) for name in ("launches", "work", "calls", "groups")}
    recorded = _drawn(counts, RouterLoad(facts.load, job.seed), [counts.ranks], rank=job.rank)
    blocks = build_blocks(recording)
    program = program_of(recording, blocks, counts, recorded.counts)
    gpu, outside = recording.gpu, run.summary.estimated_outside
    assert gpu is not None
    return Playable(
        run,
        job,
        facts,
        counts,
        program,
        groups_of_stage(tables["groups"], tables["calls"], job.rank, counts.ranks),
        gpu.capacity_bytes - (0 if outside is None else outside.low_bytes),
        gpu.alloc_conf,
        recorded,
        routed_table(recording, blocks, tables, job),
    )


def price_draws(playable: Playable, load: str, draws: Sequence[Draw]) -> pd.DataFrame:
    """The time of the step in each draw: step_us, step_low_us, step_high_us; NaN if the run's step cannot be priced.

    In each call of a router the busiest rank's products, what else follows its tokens, and its exchanges are priced.
    That of draws between those that are priced is interpolated, by the mean of what the busiest ranks get.
    """
    names, run = ["step_us", "step_low_us", "step_high_us"], playable.run
    if run.summary.time is None:
        return pd.DataFrame(np.nan, range(len(draws)), names)
    number = {(of.layer, of.number): at for at, of in enumerate(playable.counts.passes)}
    of_row = np.array([number[key] for key in zip(playable.routed["layer"], playable.routed["number"], strict=True)])
    timed = np.unique(of_row)
    pace = np.array([draw.pace[timed].mean() for draw in draws])
    order = np.argsort(pace, kind="stable")
    chosen = np.unique(order[np.linspace(0, len(order) - 1, _PRICES).astype(int)])
    chosen = chosen[np.argsort(pace[chosen], kind="stable")]
    models, rows = models_of(Pricing(), run.manifest, run.summary, ExpertsLoad(load)), []
    for at in chosen.tolist():
        priced = price_again(run.manifest, run.summary, _at_pace_of(playable, draws[at], of_row), models).summary
        rows.append([np.nan] * 3 if priced is None else [priced.step_us, priced.step_low_us, priced.step_high_us])
    values = np.maximum.accumulate(np.array(rows, np.float64))
    columns = {name: np.interp(pace, pace[chosen], values[:, n]) for n, name in enumerate(names)}
    return pd.DataFrame(columns)


def _at_pace_of(playable: Playable, draw: Draw, of_row: Ints) -> ReadTable:
    """The run's tables at the pace of a draw; ``of_row`` is the call of each row of ``routed``."""

    def read(name: str, columns: list[str] | None = None) -> pd.DataFrame:
        return (
            playable.routed.assign(busiest=draw.pace[of_row]) if name == "routed" else playable.run.table(name, columns)
        )

    return read


@dataclass(frozen=True)
class PlayedChange:
    """A change, and what it does to the draws that need the most memory.

    Attributes:
        peaks: What these need with it, allocated.
        dropped: The part of the tokens' choices that it drops.
    """

    name: str
    peaks: list[int]
    num_without_memory: int
    dropped: float = 0.0


@dataclass(frozen=True)
class PlayedSize:
    """A number of ranks that share the experts.

    Attributes:
        busiest: What the busiest rank of a call gets, in times the mean, over the first draws.
        peak_allocated_bytes: The peak if the recorded rank got so much of each expert, its weights as they are.
    """

    num_ranks: int
    busiest: float
    peak_allocated_bytes: int


def wilson(count: int, number: int) -> tuple[float, float, float]:
    """So many of a number as a part, and the interval of its probability (Wilson, 95%)."""
    part, z = count / number, 1.96
    middle = (part + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * float(np.sqrt(part * (1 - part) / number + z * z / (4 * number**2)))
    return part, max(middle - half, 0.0), min(middle + half, 1.0)


@dataclass(frozen=True)
class Played:
    """The memory and the time that the hottest rank needs in each draw.

    Attributes:
        load: As ``--router-load`` gives it.
        draws: A row a draw: seed, rank, share, busiest, peak_allocated_bytes, peak_reserved_bytes (*simulated*: the
            allocator's, with drawn sizes), fits, and of :func:`price_draws` (*estimated*). What does not fit has the
            peaks that it needs.
        even_peak_bytes: The peak where every expert gets the same.
        even_step_us: The time of that step.
        worst: The draws that the remedies are played with, most memory first.
    """

    playable: Playable
    load: str
    draws: pd.DataFrame
    even_peak_bytes: int
    even_step_us: float
    worst: list[Draw]
    remedies: list[PlayedChange]
    sizes: list[PlayedSize]

    @property
    def num_following(self) -> int:
        """Blocks whose sizes follow the counts of experts."""
        program = self.playable.program
        return int((np.delete(program.follows, program.bounded) >= 0).sum())

    @property
    def without_memory(self) -> tuple[float, float, float]:
        """The part of the draws that does not fit, and the interval of its probability (Wilson, 95%)."""
        return wilson(int((~self.draws["fits"]).sum()), len(self.draws))


#: Plays rows of counts: :func:`fakedist.extras.play.player.play`, of a program.
PlayCounts = Callable[[Iterable[Ints]], Iterator[dict[str, int]]]


def play_draws(
    playable: Playable,
    load: str,
    seeds: Sequence[int],
    play: PlayCounts,
    changed: Sequence[tuple[Playable, PlayCounts]] = (),
) -> Played:
    """Play the recorded counts, which must give the recorded peaks, each draw, and what would help the worst.

    Args:
        changed: Recordings of the same job with a change, which the worst draws are played with too.

    Raises:
        JobError: The peaks are not those of the recording, or a changed one has other routers.
    """
    check_alike(playable, [other for other, _ in changed])
    drawn: list[Draw] = []

    def kept() -> Iterator[Ints]:
        yield playable.recorded.counts
        yield _even(playable)
        for draw in playable.draws(load, seeds):
            drawn.append(replace(draw, counts=_NONE))  # a thousand take a gigabyte
            yield draw.counts

    recorded, even, *played = play(kept())
    check_recorded(playable.run, recorded)
    names = ("peak_allocated_bytes", "peak_reserved_bytes")
    draws = pd.DataFrame(
        {
            **{name: [getattr(draw, name) for draw in drawn] for name in ("seed", "rank", "share", "busiest")},
            **{name: [row[name] for row in played] for name in names},
            "fits": [row["failed_event"] < 0 for row in played],
        }
    )
    even_draw = replace(playable.recorded, pace=_even(playable)[:, 0])
    steps = price_draws(playable, load, [even_draw, *drawn])
    draws = pd.concat([draws, steps[1:].reset_index(drop=True)], axis=1)
    order = np.argsort(-draws["peak_allocated_bytes"].to_numpy(), kind="stable")[:_WORST]
    worst = [drawn[at] for at in order]
    return Played(
        playable,
        load,
        draws,
        even["peak_allocated_bytes"],
        float(steps["step_us"][0]),
        worst,
        [
            *(_recorded_change(playable, other, load, worst, play_it) for other, play_it in changed),
            *(_with_capacity(playable, load, worst, factor, play) for factor in _CAPACITIES),
        ],
        _by_size(playable, load, seeds[:_WORST], play),
    )


def fitting_share(playable: Playable, seeds: Iterable[int], play: PlayCounts) -> float:
    """The part of the draws of the run's load in which the hottest rank has enough memory.

    Raises:
        JobError: The peaks of the recorded counts are not those of the recording.
    """
    draws = playable.draws(playable.facts.load, seeds)
    recorded, *played = play(chain([playable.recorded.counts], (draw.counts for draw in draws)))
    check_recorded(playable.run, recorded)
    return sum(row["failed_event"] < 0 for row in played) / len(played)


def play_ranks(playable: Playable, load: str, seed: int, play: PlayCounts) -> pd.DataFrame:
    """Play one draw on each rank that exchanges tokens: rows as of :class:`Played`, with the tokens that it receives.

    Raises:
        JobError: The peaks of the recorded counts are not those of the recording.
    """
    draws = list(playable.every_rank(load, seed))
    recorded, *played = play([playable.recorded.counts, *(draw.counts for draw in draws)])
    check_recorded(playable.run, recorded)
    columns = {name: [getattr(draw, name) for draw in draws] for name in ("seed", "rank", "share")}
    columns["tokens"] = [int(draw.counts[:, 0].sum()) for draw in draws]
    columns |= {name: [row[name] for row in played] for name in ("peak_allocated_bytes", "peak_reserved_bytes")}
    table = pd.DataFrame({**columns, "fits": [row["failed_event"] < 0 for row in played]})
    return pd.concat([table, price_draws(playable, load, draws)], axis=1)


def check_alike(playable: Playable, changed: Sequence[Playable]) -> None:
    """Raise JobError if a recording of a changed job has other routers, or another rank."""
    for other in changed:
        facts = [(one.job.rank, one.groups, one.counts.passes) for one in (other, playable)]
        if facts[0] != facts[1]:
            raise JobError(
                f"{other.run.path} is of another rank, or its routers were not called as those of {playable.run.path}",
                "record the job with one change, and its rank, steps and batches as they are",
            )


def _recorded_change(
    playable: Playable, other: Playable, load: str, worst: Sequence[Draw], play: PlayCounts
) -> PlayedChange:
    """A change that was recorded: its recording, with the same draws."""
    same = [next(other.draws(load, [draw.seed], rank=draw.rank)).counts for draw in worst]
    recorded, *played = play([other.recorded.counts, *same])
    check_recorded(other.run, recorded)
    own, arguments = set(playable.job.arguments), other.job.arguments
    name = " ".join(text for text in arguments if text not in own) or other.run.path.name
    without = sum(row["failed_event"] >= 0 for row in played)
    return PlayedChange(name, [row["peak_allocated_bytes"] for row in played], without)


def _even(playable: Playable) -> Ints:
    """Counts where each rank sends each expert the same, as nearly as whole tokens allow."""
    counts = playable.counts
    sent = np.zeros((len(counts.passes), len(counts.ranks), counts.passes[0].num_experts), np.int64)
    for call, of in enumerate(counts.passes):
        every, more = divmod(of.tokens * of.top_k, of.num_experts)
        sent[call] = every + (np.arange(of.num_experts) < more)
    return counts.of_rank(sent, counts.ranks.index(playable.job.rank))


def _with_capacity(
    playable: Playable, load: str, worst: Sequence[Draw], factor: float, play: PlayCounts
) -> PlayedChange:
    """A capacity factor: an expert drops what a rank sends it beyond its even part times this."""
    seeds = [draw.seed for draw in worst]
    capped = list(playable.draws(load, seeds, factor))
    played = list(play(draw.counts for draw in capped))
    # The counts' first column is all that the rank receives.
    kept = sum(float(draw.kept) for draw in capped) / len(capped)
    without = sum(row["failed_event"] >= 0 for row in played)
    return PlayedChange(
        f"capacity factor {factor:g}", [row["peak_allocated_bytes"] for row in played], without, 1 - kept
    )


def _by_size(playable: Playable, load: str, seeds: Sequence[int], play: PlayCounts) -> list[PlayedSize]:
    counts, found = playable.counts, dict[int, float]()
    experts = counts.passes[0].num_experts
    for size in (2**power for power in range(1, experts.bit_length())):
        if experts % size or size > _MOST_RANKS:
            continue
        sent = [counts.sent(RouterLoad(load, seed), tuple(range(size))).sum(axis=1) for seed in seeds]
        ranks = np.array(sent).reshape(len(sent), len(counts.passes), size, -1).sum(axis=3)
        found[size] = float(ranks.max(axis=2).sum() / ranks.mean(axis=2).sum())
    played = play(np.rint(_even(playable) * busiest).astype("i8") for busiest in found.values())
    return [
        PlayedSize(size, busiest, row["peak_allocated_bytes"])
        for (size, busiest), row in zip(found.items(), played, strict=True)
    ]


def check_recorded(run: Run, played: dict[str, int]) -> None:
    """Compare the play of the recorded counts with the recording: its peak, and what was reserved if all of it fit.

    Raises:
        JobError: They differ.
    """
    summary, names = run.summary, ["peak_allocated_bytes"]
    if played["failed_event"] < 0 and not played["num_retries"]:
        names.append("peak_reserved_bytes")
    for name in names:
        if played[name] != getattr(summary, name):
            raise JobError(
                f"played as recorded, the run has {name} {played[name]:,} instead of {getattr(summary, name):,}",
                "this is a bug in fakedist",
            )
