"""Which ranks of a job run alike, from the runs of some of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fakedist.analysis.alike_ranks import AlikeRanks, CopiedCalls, JobGroup, JobGroups, channels_of, find_kinds
from fakedist.analysis.call_order import RankCall, RankCalls
from fakedist.analysis.recording import read_recording
from fakedist.analysis.routed_blocks import Counts, groups_of_stage, passes_of, received_tokens
from fakedist.analysis.topology import find_pipeline, ranks_of
from fakedist.errors import JobError
from fakedist.rank_list import format_rank_list
from fakedist.results.opening import open_run_directory
from fakedist.results.run import Run
from fakedist.router_load import RouterLoad

_CALLS = ("sequence", "operation", "bytes_in", "bytes_out", "dtype", "asynchronous", "stream", "step")
_TERMS = (
    *("reduction", "root", "tag", "batch", "sent_parts", "received_parts", "on_host", "own_pair", "waits"),
    *("parts", "join", "awaited", "awaited_on"),
)


@dataclass(frozen=True)
class JobKinds:
    """The kinds of a job's ranks.

    Attributes:
        kinds: By stage and first rank.
        wanted: Ranks that have to run to check the kinds that are not, or to divide them.
        groups: The groups of all ranks.
    """

    kinds: list[AlikeRanks]
    wanted: list[int]
    groups: JobGroups

    @property
    def copies(self) -> Iterator[tuple[int, int]]:
        """The ranks without a run of kinds that were checked, and one each that ran."""
        for kind in self.kinds:
            ran = frozenset(kind.ran)
            if kind.is_checked:
                yield from ((rank, kind.ran[0]) for rank in kind.ranks if rank not in ran)

    def copied(self, program: RankCalls, rank: int) -> RankCalls:
        """The calls of an alike rank."""
        calls = CopiedCalls(program.calls, self.groups, program.rank, rank)
        return RankCalls(rank, calls, program.last_step, program.is_over, is_copied=True)


def find_job_kinds(runs: Mapping[int, Run], programs: Mapping[int, RankCalls]) -> JobKinds | None:
    """The kinds of a job's ranks, from the runs of some and their calls.

    Returns:
        None if the runs do not say alike which groups the job has: they are of an earlier version, or ranks make
        groups that others do not.
    """
    first = next(iter(runs.values()))
    job = first.manifest.job
    assert job is not None
    groups = job_groups(first.table("groups"), first.table("other_groups"))
    for rank, run in runs.items():
        if [group.channel for group in groups.of(rank)] != channels_of(map(ranks_of, run.table("groups")["ranks"])):
            return None
    kinds, wanted = find_kinds(groups, programs, job.world_size, _pipeline(first, job.rank, groups))
    return JobKinds(kinds, wanted, groups)


class KindSearch:
    """Finds the kinds of a job's ranks from ever more runs, each of which is read once."""

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        self._programs: dict[int, RankCalls] = {}

    @property
    def ranks(self) -> Collection[int]:
        """Ranks of the runs."""
        return self._runs.keys()

    @property
    def num_runs(self) -> int:
        """Number of runs."""
        return len(self._runs)

    def add(self, path: Path) -> None:
        """Take the run in a directory.

        Raises:
            RunDirectoryError: It is damaged.
        """
        run = open_run_directory(path)
        assert run.manifest.job is not None
        rank = run.manifest.job.rank
        self._runs[rank], self._programs[rank] = run, rank_program(rank, run)

    def found(self) -> JobKinds | None:
        """The kinds, as of :func:`find_job_kinds`."""
        return find_job_kinds(self._runs, self._programs)


def job_groups(own: pd.DataFrame, others: pd.DataFrame) -> JobGroups:
    """The groups of a job, from a rank's tables ``groups`` and ``other_groups``."""
    return JobGroups(list(_made(own, others)))


def _made(own: pd.DataFrame, others: pd.DataFrame) -> Iterator[tuple[str, Sequence[int]]]:
    """The groups with the rank and without it, in the order in which they were made."""
    after = others["after"].tolist()
    rest = list(zip(others["description"].tolist(), others["ranks"].tolist(), strict=True))
    at = 0
    for number, (description, name, ranks) in enumerate(
        zip(own["description"].tolist(), own["name"].tolist(), own["ranks"].tolist(), strict=True)
    ):
        while at < len(rest) and after[at] <= number:
            yield rest[at][0], ranks_of(rest[at][1])
            at += 1
        yield description or name, ranks_of(ranks)
    yield from ((description, ranks_of(ranks)) for description, ranks in rest[at:])


def groups_in_turn(runs: Mapping[int, Run]) -> dict[int, str]:
    """The first process groups that ranks make that are not the same, by rank; empty if all are.

    torch names groups by their turn, so ranks of one group meet only if it has the same for all of them, and
    ``new_group`` waits for every rank. Groups that are named by their ranks are left out.
    """
    tables = {rank: (run.table("groups"), run.table("other_groups")) for rank, run in runs.items()}
    if not all(own["name"].iloc[1:].str.isdecimal().all() for own, _ in tables.values()):
        return {}
    made = {rank: list(_made(*both)) for rank, both in tables.items()}
    for turn in range(max(map(len, made.values()))):
        ours = {rank: groups[turn] if turn < len(groups) else ("", ()) for rank, groups in made.items()}
        ended = {rank: group for rank, group in ours.items() if group[1] or runs[rank].summary.exit.ended_by_itself}
        if len({tuple(members) for _, members in ended.values()}) > 1:
            return {rank: _group_text(*group) for rank, group in ended.items()}
    return {}


def _group_text(description: str, members: Sequence[int]) -> str:
    return f"the group of ranks {format_rank_list(members)}, at {description}" if members else "none"


def _pipeline(run: Run, rank: int, groups: JobGroups) -> JobGroup | None:
    try:
        found = find_pipeline(run.table("groups"), run.table("calls"), rank)
    except JobError:
        return None
    return next((group for group in groups.of(rank) if found and tuple(group.members) == found.ranks), None)


def rank_program(rank: int, run: Run) -> RankCalls:
    """The calls of a run, and where they end.

    Raises:
        JobError: The run is of an earlier version.
    """
    calls = run.table("calls")
    terms = run.table("call_terms")
    steps = run.table("steps")["step"]
    if len(calls) and not len(terms):
        raise JobError(f"{run.path} was recorded by an earlier version, which did not keep what has to match", "")
    made = job_calls(calls, terms, run.table("groups")["ranks"].tolist())
    return RankCalls(rank, made, int(steps.max()) if len(steps) else 0, is_over=run.summary.exit.ended_by_itself)


def job_calls(calls: pd.DataFrame, terms: pd.DataFrame, groups: Sequence[str]) -> list[RankCall]:
    """The calls of a rank, by groups that all of its job's ranks name alike.

    Args:
        calls: The table ``calls``.
        terms: The table ``call_terms``.
        groups: The ranks of each group, as in the table ``groups``.
    """
    members = [ranks_of(text) for text in groups]
    channels = list(zip(channels_of(members), members, strict=True))
    both = calls.join(
        terms.fillna({"awaited": -1, "awaited_on": -1}).astype({"awaited": "int64", "awaited_on": "int64"})
    )
    columns = [both[name].tolist() for name in ("group", "peer", *_CALLS, *_TERMS)]
    made = []
    for group, peer, *rest in zip(*columns, strict=True):
        channel, ranks = channels[group]
        made.append(RankCall._make([channel, ranks, ranks[peer] if peer >= 0 else -1, *rest]))
    return made


def ranks_by_load(path: Path) -> list[tuple[int, float]]:
    """The ranks of a recorded rank's pipeline stage that exchange tokens for experts, most tokens first.

    With each are its tokens in times the mean. Empty if none were seen to exchange any by a load.
    """
    run = open_run_directory(path)
    passes = passes_of(read_recording(path))
    facts, job = run.summary.router_load, run.manifest.job
    if facts is None or job is None or not facts.ranks or not passes:
        return []
    load = RouterLoad(facts.load, job.seed)
    received = dict[int, int]()
    counts = Counts(passes, tuple(facts.ranks))
    for ranks in groups_of_stage(run.table("groups"), run.table("calls"), job.rank, counts.ranks):
        received |= dict(zip(ranks, received_tokens(counts.sent(load, ranks)).sum(axis=0).tolist(), strict=True))
    mean = sum(received.values()) / len(received)
    return sorted(((rank, tokens / mean) for rank, tokens in received.items()), key=lambda pair: (-pair[1], pair[0]))
