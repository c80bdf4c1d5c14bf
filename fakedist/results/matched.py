"""Whether the calls of a job's ranks match: of the runs of several ranks, or of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fakedist.analysis.call_order import CallsMatch, Made, match_calls, streams_of
from fakedist.errors import JobError
from fakedist.rank_list import format_rank_list
from fakedist.results.job_time import check_one_job
from fakedist.results.opening import open_run_directory
from fakedist.results.rank_kinds import find_job_kinds, rank_program
from fakedist.results.run import Run
from fakedist.rundir.directory import rank_directories


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
        runs: The runs, by rank.
        copies: Ranks without a run, of a kind that was checked, and the rank of that kind that ran (docs/match.md).
        matched: The result of playing their calls.
        num_steps: Steps that every rank was recorded to the end of; None where all scripts ended.
        failed: Ranks whose script failed, and how: they are compared until then.
        decided: Values that no kernel computed and the script read, by rank: what it did after them may differ.
        num_unknown_waits: Calls that return before they are over, and whose wait was not seen: it is left out.
        has_streams: Whether ranks make calls on several streams, which may wait for each other: that is left out.
    """

    runs: dict[int, Run]
    copies: dict[int, int]
    matched: CallsMatch
    num_steps: int | None
    failed: dict[int, str]
    decided: dict[int, int]
    num_unknown_waits: int
    has_streams: bool

    @property
    def not_recorded(self) -> list[int]:
        """The job's ranks that have no run and are not alike one that has."""
        job = next(iter(self.runs.values())).manifest.job
        assert job is not None
        return [rank for rank in range(job.world_size) if rank not in self.runs and rank not in self.copies]

    @property
    def at_fault(self) -> list[Made]:
        """The calls that differ, or in which ranks wait forever."""
        if self.matched.difference is not None:
            return self.matched.difference.calls
        return [wait.made for wait in self.matched.waiting]

    def place(self, made: Made) -> Place:
        """Where a rank made a call."""
        run = self.runs[self.copies.get(made.rank, made.rank)]
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
    return JobMatch(
        runs=by_rank,
        copies=copies,
        matched=match_calls(played),
        num_steps=min(stopped) if stopped else None,
        failed={rank: str(ending.outcome) for rank, ending in endings.items() if not ending.ended_well},
        decided={rank: run.summary.invented_values for rank, run in by_rank.items() if run.summary.invented_values},
        num_unknown_waits=sum(call.has_unknown_wait for program in programs.values() for call in program.calls),
        has_streams=any(len(streams_of(program.calls)) > 1 for program in programs.values()),
    )
