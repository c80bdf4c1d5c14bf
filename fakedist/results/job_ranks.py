"""The ranks of a job: whether runs are of one job, which ranks run alike, and whether their calls match."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from fakedist.analysis.alike_ranks import AlikeRanks, CopiedCalls, JobGroup, JobGroups, channels_of, find_kinds
from fakedist.analysis.call_order import CallsMatch, Made, RankCall, RankCalls, match_calls, streams_of
from fakedist.analysis.recording import read_recording
from fakedist.analysis.routed_blocks import Counts, groups_of_stage, passes_of, received_tokens
from fakedist.analysis.topology import find_pipeline, ranks_of
from fakedist.errors import JobError
from fakedist.options import Job
from fakedist.results.opening import open_run_directory
from fakedist.results.run import Run
from fakedist.router_load import RouterLoad
from fakedist.rundir.directory import rank_directories
from fakedist.traces.flight_recorder import read_dumps
from fakedist.units import format_rank_list

#: What the ranks of one job have in common, and its name in a message.
_IN_COMMON = {
    "world_size": "world size",
    "target": "script",
    "arguments": "script's arguments",
    "environment": "environment",
    "gpus_per_node": "GPUs per node",
}


def check_one_job(runs: Sequence[Run]) -> tuple[Run, dict[int, Run]]:
    """The first run, and all by rank.

    Raises:
        JobError: They are not of one job, two are of one rank, or they ran for different GPUs.
    """
    if not runs:
        raise JobError("no run was given", "fakedist time RUN RUN...")
    by_rank: dict[int, Run] = {}
    for run in runs:
        job, first = run.manifest.job, runs[0].manifest.job
        if job is None or first is None:
            raise JobError(f"{run.path} is not the run of a rank of a job", "fakedist profile -o RUN ... makes one")
        if job.rank in by_rank:
            raise JobError(
                f"rank {job.rank} is given twice: {by_rank[job.rank].path} and {run.path}", "give each rank once"
            )
        if differing := _difference(first, job):
            raise JobError(
                f"{runs[0].path} and {run.path} are not of one job: {differing}", "give runs of one job's ranks"
            )
        models = [side.manifest.gpu_model for side in (runs[0], run)]
        if models[0] != models[1]:
            names = " and ".join(model.name if model else "an unknown GPU" for model in models)
            raise JobError(f"{runs[0].path} and {run.path} ran for different GPUs: {names}", "record them for one GPU")
        by_rank[job.rank] = run
    return runs[0], dict(sorted(by_rank.items()))


def _difference(first: Job, other: Job) -> str:
    for name, text in _IN_COMMON.items():
        values = [getattr(job, name) for job in (first, other)]
        if values[0] != values[1]:
            return f"the {text} is {_shown(values[0])} in one and {_shown(values[1])} in the other"
    return ""


def _shown(value: object) -> str:
    return " ".join(map(str, value)) or "empty" if isinstance(value, tuple) else str(value)


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


@dataclass(frozen=True)
class Place:
    """Where a rank made a call.

    Attributes:
        group: The group's description or name, and its ranks.
        layer: Empty outside of layers.
        lines: The script's lines, innermost first; empty in autograd's own threads.
    """

    made: Made
    group: str
    phase: str
    layer: str
    lines: list[str]


@dataclass(frozen=True)
class JobMatch:
    """Whether the calls of a job's ranks match.

    Attributes:
        ranks: Ranks whose calls are known.
        world_size: The job's ranks.
        placed: Where a rank made a call.
        copies: Ranks without a run, of a kind that was checked, and the rank of that kind that ran (docs/match.md).
        matched: The result of playing their calls.
        num_steps: Steps that every rank was recorded to the end of; None where all scripts ended.
        failed: Ranks whose script failed, and how: they are compared until then.
        decided: Values that no kernel computed and the script read, by rank: what it did after them may differ.
        num_unknown_waits: Calls that return before they are over, and whose wait was not seen: it is left out.
        has_streams: Whether ranks make calls on several streams, which may wait for each other: that is left out.
        is_hang: The calls are those of a job that hung, from the dumps of its ranks.
        in_flight: Of such a job, each rank's first call that was not over.
    """

    ranks: list[int]
    world_size: int
    placed: Callable[[Made], Place]
    copies: dict[int, int]
    matched: CallsMatch
    num_steps: int | None
    failed: dict[int, str]
    decided: dict[int, int]
    num_unknown_waits: int
    has_streams: bool
    is_hang: bool = False
    in_flight: list[Made] = field(default_factory=list)

    @property
    def not_recorded(self) -> list[int]:
        """The job's ranks that have no run and are not alike one that has."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks and rank not in self.copies]

    @property
    def at_fault(self) -> list[Made]:
        """The calls that differ, or in which ranks wait forever."""
        if self.matched.difference is not None:
            return self.matched.difference.calls
        return [wait.made for wait in self.matched.waiting]


def _place_in(run: Run, made: Made) -> Place:
    """The place in a run where a rank made a call."""
    calls, terms = run.table("calls"), run.table("call_terms")
    row = int((calls["sequence"] == made.call.sequence).to_numpy().argmax())
    call = calls.iloc[row]
    group = run.table("groups").iloc[int(call["group"])]
    name = f"{group['description'] or group['name']} (ranks {format_rank_list(made.call.members)})"
    layer = run.table("layers")["name"].iloc[int(call["layer"])]
    return Place(made, name, call["phase"], layer, terms["lines"].iloc[row].splitlines())


def match_runs(paths: Sequence[Path]) -> JobMatch:
    """Play the calls of several ranks of a job against each other.

    Args:
        paths: Run directories, and directories of several ranks' runs.

    Raises:
        JobError: The runs are not of one job, or of one rank, or one was recorded by an earlier version.
        RunDirectoryError: A run is damaged.
    """
    runs = [open_run_directory(run).keeping_tables() for path in paths for run in rank_directories(path) or [path]]
    if len(runs) < 2:
        raise JobError(
            f"{' '.join(map(str, paths))} holds the run of one rank, and it takes two or more to match",
            "fakedist profile --rank 0-7 -o DIR ... runs several",
        )
    _, by_rank = check_one_job(runs)
    programs = {rank: rank_program(rank, run) for rank, run in by_rank.items()}
    kinds = find_job_kinds(by_rank, programs)
    copies = {} if kinds is None else dict(kinds.copies)
    played = [*programs.values(), *(kinds.copied(programs[like], rank) for rank, like in copies.items() if kinds)]
    endings = {rank: run.summary.exit for rank, run in by_rank.items()}
    stopped = [program.last_step for program in programs.values() if not program.is_over]
    job = runs[0].manifest.job
    assert job is not None
    return JobMatch(
        ranks=list(by_rank),
        world_size=job.world_size,
        placed=lambda made: _place_in(by_rank[copies.get(made.rank, made.rank)], made),
        copies=copies,
        matched=replace(match_calls(played), groups=groups_in_turn(by_rank)),
        num_steps=min(stopped) if stopped else None,
        failed={rank: str(ending.outcome) for rank, ending in endings.items() if not ending.ended_well},
        decided={rank: run.summary.invented_values for rank, run in by_rank.items() if run.summary.invented_values},
        num_unknown_waits=sum(call.has_unknown_wait for program in programs.values() for call in program.calls),
        has_streams=any(len(streams_of(program.calls)) > 1 for program in programs.values()),
    )


def match_dumps(paths: Sequence[Path]) -> JobMatch:
    """Play the last calls of a job that hung, from its ranks' dumps of torch's Flight Recorder.

    Raises:
        ReportError: A file is not a dump, or tries to run code.
    """
    ranks = {rank.calls.rank: rank for rank in read_dumps(paths)}
    members = {member for rank in ranks.values() for call in rank.calls.calls for member in call.members}

    def placed(made: Made) -> Place:
        known = ranks[made.rank].known[made.call.sequence]
        return Place(made, f"{known.group} (ranks {format_rank_list(made.call.members)})", "other", "", known.lines)

    first_open = {
        number: next((call for call in rank.calls.calls if rank.known[call.sequence].state != "completed"), None)
        for number, rank in ranks.items()
    }
    return JobMatch(
        ranks=list(ranks),
        world_size=max({*ranks, *members}) + 1,
        placed=placed,
        copies={},
        matched=match_calls([rank.calls for rank in ranks.values()]),
        num_steps=None,
        failed={},
        decided={},
        num_unknown_waits=0,
        has_streams=False,
        is_hang=True,
        in_flight=[Made(rank, call) for rank, call in first_open.items() if call is not None],
    )
