"""Whether the calls of a job's ranks match: of the runs of several ranks, or of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fakedist.analysis.call_order import CallsMatch, Made, match_calls, streams_of
from fakedist.errors import JobError
from fakedist.rank_list import format_rank_list
from fakedist.results.job_time import check_one_job
from fakedist.results.opening import open_run_directory
from fakedist.results.rank_kinds import find_job_kinds, groups_in_turn, rank_program
from fakedist.results.run import Run
from fakedist.rundir.directory import rank_directories
from fakedist.traces.flight_recorder import read_dumps


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
        JobError: There is one dump alone.
        ReportError: A file is not a dump, or tries to run code.
    """
    ranks = {rank.calls.rank: rank for rank in read_dumps(paths)}
    if len(ranks) < 2:
        raise JobError(f"{paths[0]} is the dump of one rank, and it takes two or more to match", "give all of them")
    members = {member for rank in ranks.values() for call in rank.calls.calls for member in call.members}

    def placed(made: Made) -> Place:
        known = ranks[made.rank].known[made.call.sequence]
        name = f"{known.group} (ranks {format_rank_list(made.call.members)})"
        return Place(made, name, "other", "", known.lines)

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
