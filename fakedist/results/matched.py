"""Whether the calls of a job's ranks match: of the runs of several ranks, or of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fakedist.analysis.call_order import CallsMatch, Made, RankCall, RankCalls, match_calls
from fakedist.analysis.topology import ranks_of
from fakedist.errors import JobError
from fakedist.results.job_time import check_one_job
from fakedist.results.opening import open_run_directory
from fakedist.results.run import Run
from fakedist.rundir.directory import rank_directories
from fakedist.rundir.tape import ranks_key

_CALLS = ("sequence", "operation", "bytes_in", "bytes_out", "dtype", "asynchronous", "stream", "step")
_TERMS = ("reduction", "root", "tag", "batch", "sent_parts", "received_parts", "on_host", "own_pair", "waits")


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
        matched: The result of playing their calls.
        num_steps: Steps that every rank was recorded to the end of; None where all scripts ended.
        failed: Ranks whose script failed, and how: they are compared until then.
        decided: Values that no kernel computed and the script read, by rank: what it did after them may differ.
    """

    runs: dict[int, Run]
    matched: CallsMatch
    num_steps: int | None
    failed: dict[int, str]
    decided: dict[int, int]

    @property
    def not_recorded(self) -> list[int]:
        """The job's ranks that have no run."""
        job = next(iter(self.runs.values())).manifest.job
        assert job is not None
        return [rank for rank in range(job.world_size) if rank not in self.runs]

    @property
    def at_fault(self) -> list[Made]:
        """The calls that differ, or in which ranks wait forever."""
        if self.matched.difference is not None:
            return self.matched.difference.calls
        return [wait.made for wait in self.matched.waiting]

    def place(self, made: Made) -> Place:
        """Where a rank made a call."""
        run = self.runs[made.rank]
        calls, terms = run.table("calls"), run.table("call_terms")
        row = int((calls["sequence"] == made.call.sequence).to_numpy().argmax())
        call = calls.iloc[row]
        group = run.table("groups").iloc[int(call["group"])]
        name = f"{group['description'] or group['name']} (ranks {group['ranks']})"
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
    programs = [_program(rank, run) for rank, run in by_rank.items()]
    endings = {rank: run.summary.exit for rank, run in by_rank.items()}
    stopped = [program.last_step for program in programs if not program.is_over]
    return JobMatch(
        runs=by_rank,
        matched=match_calls(programs),
        num_steps=min(stopped) if stopped else None,
        failed={rank: str(ending.outcome) for rank, ending in endings.items() if not ending.ended_well},
        decided={rank: run.summary.invented_values for rank, run in by_rank.items() if run.summary.invented_values},
    )


def _program(rank: int, run: Run) -> RankCalls:
    calls, terms, steps = run.table("calls"), run.table("call_terms"), run.table("steps")["step"]
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
    seen: Counter[tuple[str | int, ...]] = Counter()
    channels = []
    for text in groups:
        ranks = ranks_of(text)
        key = ranks_key(ranks)
        channels.append(((key, seen[key]), ranks))
        seen[key] += 1
    both = calls.join(terms)
    columns = [both[name].tolist() for name in ("group", "peer", *_CALLS, *_TERMS)]
    made = []
    for group, peer, *rest in zip(*columns, strict=True):
        channel, ranks = channels[group]
        made.append(RankCall._make([channel, ranks, ranks[peer] if peer >= 0 else -1, *rest]))
    return made
