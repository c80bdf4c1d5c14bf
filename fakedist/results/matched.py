"""Whether the calls of a job's ranks match: of the runs of several ranks, or of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fakedist.analysis.matching import Call, Made, Matched, Program, match_calls
from fakedist.errors import JobError
from fakedist.rank_list import format_rank_list, parse_rank_list
from fakedist.results.job_time import check_one_job
from fakedist.results.opening import open_run_directory
from fakedist.results.run import Run
from fakedist.rundir.directory import rank_directories
from fakedist.rundir.tape import Channel, ranks_key

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
        matched: What came of playing their calls.
        num_steps: Steps that every rank was recorded to the end of; None where all scripts ended.
        failed: Ranks whose script failed: nothing is known of what they would have called.
        decided: Values that no kernel computed and the script read, by rank: what it did after them may differ.
    """

    runs: dict[int, Run]
    matched: Matched
    num_steps: int | None
    failed: dict[int, str]
    decided: dict[int, int]

    @property
    def not_recorded(self) -> str:
        """The job's ranks that have no run, as a list; empty if all have one."""
        job = next(iter(self.runs.values())).manifest.job
        assert job is not None
        return format_rank_list([rank for rank in range(job.world_size) if rank not in self.runs])

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
    runs = [open_run_directory(run) for path in paths for run in rank_directories(path) or [path]]
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


def _program(rank: int, run: Run) -> Program:
    calls, terms, steps = run.table("calls"), run.table("call_terms"), run.table("steps")["step"]
    if len(calls) and not len(terms):
        raise JobError(f"{run.path} was recorded by an earlier version, which did not keep what has to match", "")
    groups = _groups(run)
    rows = calls[[*_CALLS, "group", "peer"]].join(terms[list(_TERMS)]).to_dict("records")
    made = []
    for row in rows:
        (channel, ranks), peer = groups[row.pop("group")], row.pop("peer")
        others = {str(name): tuple(value) if str(name).endswith("_parts") else value for name, value in row.items()}
        made.append(Call(group=channel, members=ranks, peer=ranks[peer] if peer >= 0 else -1, **others))
    return Program(rank, made, int(steps.max()) if len(steps) else 0, is_over=run.summary.exit.ended_by_itself)


def _groups(run: Run) -> list[tuple[Channel, tuple[int, ...]]]:
    """Each group as all of its ranks name it, and its ranks."""
    seen: Counter[tuple[str | int, ...]] = Counter()
    groups = []
    for text in run.table("groups")["ranks"]:
        ranks = parse_rank_list(text) if text else ()
        key = ranks_key(ranks)
        groups.append(((key, seen[key]), ranks))
        seen[key] += 1
    return groups
