"""Exports the timed steps of runs: one rank of a job or several, in one directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fakedist.errors import JobError, RunDirectoryError
from fakedist.extras.chakra.chakra import (
    TracedGroup,
    TracedRank,
    WrittenTrace,
    groups_path,
    message_classes,
    trace_path,
    write_chakra,
    write_groups,
)
from fakedist.rank_list import parse_rank_list
from fakedist.results.run import Run

#: Collectives that ASTRA-sim simulates; a broadcast takes the time that its node has (Workload.cc @0383c203).
ASTRA_SIM_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(frozen=True)
class Exported:
    """Traces that were written, one of each rank, with files that begin with ``prefix`` (with their directory).

    The file ``groups`` has the ranks of each group; ``names`` are by the group's number there.
    """

    prefix: Path
    world_size: int
    traces: list[WrittenTrace]
    groups: Path
    names: dict[int, str]

    @property
    def not_simulated(self) -> dict[str, int]:
        """Collectives that ASTRA-sim refuses, by kind."""
        collectives = sum((Counter(trace.collectives) for trace in self.traces), Counter[str]())
        return {kind: number for kind, number in sorted(collectives.items()) if kind not in ASTRA_SIM_KINDS}


def export_chakra(runs: Sequence[Run], directory: Path, *, name: str = "", force: bool = False) -> Exported:
    """Write the steps of runs as Chakra execution traces, with the times that ``fakedist time`` prices.

    The directory is created if it does not exist. Files begin with ``name``, by default the script's.

    Raises:
        JobError: The runs are not different ranks of one job, or there are such files already.
        RunDirectoryError: A run has no launches, or is damaged.
        SetupError: The protobuf library is not installed.
    """
    message_classes()
    ranks, world_size = _ranks(runs)
    name = name or _script(runs[0])
    paths = [*(trace_path(directory, name, rank) for rank in ranks), groups_path(directory, name)]
    if not force and (there := [path for path in paths if path.exists()]):
        raise JobError(f"{there[0]} exists", "--force replaces it, -o DIR writes elsewhere")
    numbering = _Groups()
    traced = [_traced(rank, run, numbering) for rank, run in sorted(zip(ranks, runs, strict=True), key=lambda x: x[0])]
    directory.mkdir(parents=True, exist_ok=True)
    traces = [write_chakra(rank_trace, directory, name) for rank_trace in traced]
    groups = write_groups(numbering.ranks, directory, name)
    return Exported(directory / name, world_size, traces, groups, numbering.names)


def _ranks(runs: Sequence[Run]) -> tuple[list[int], int]:
    by_rank: dict[int, Run] = {}
    for run in runs:
        rank, first = run.summary.rank, runs[0].summary
        if rank is None:
            raise RunDirectoryError(f"{run.path} is of no rank", "fakedist profile makes runs that can be exported")
        if rank in by_rank:
            raise JobError(f"{by_rank[rank].path} and {run.path} are both rank {rank}", "export each rank once")
        if run.summary.world_size != first.world_size:
            worlds = f"{runs[0].path} has {first.world_size:,} ranks, {run.path} has {run.summary.world_size:,}"
            raise JobError(f"these are not ranks of one job: {worlds}", "export the ranks of one job")
        by_rank[rank] = run
    return list(by_rank), int(runs[0].summary.world_size or 0)


def _script(run: Run) -> str:
    job = run.manifest.job
    target = "" if job is None else job.target
    stem = target.rpartition(".")[2] if job is not None and job.is_module else Path(target).stem
    return stem or "step"


class _Groups:
    """Numbers the groups of several ranks. Names can differ between ranks; ranks and order identify a group."""

    def __init__(self) -> None:
        self.ranks: dict[int, Sequence[int]] = {}
        self.names: dict[int, str] = {}
        self._numbers: dict[tuple[tuple[int, ...], int], int] = {}

    def of_run(self, run: Run) -> list[TracedGroup]:
        """The groups of a rank, in the order of its table."""
        table = run.table("groups")
        seen: Counter[tuple[int, ...]] = Counter()
        groups = []
        for name, description, text in table[["name", "description", "ranks"]].itertuples(index=False):
            ranks = parse_rank_list(str(text)) if text else ()
            number = 0
            if ranks:
                key = (ranks, seen[ranks])
                seen[ranks] += 1
                number = self._numbers.setdefault(key, len(self._numbers) + 1)
                self.ranks.setdefault(number, ranks)
                self.names.setdefault(number, str(description or name))
            groups.append(TracedGroup(number, str(description or name), ranks))
        return groups


def _traced(rank: int, run: Run, numbering: _Groups) -> TracedRank:
    priced = run.priced_for()
    launches, kernels = priced.table("launches"), priced.table("kernels", ["launch", "duration_us"])
    duration = np.full(len(launches), np.nan)
    duration[kernels["launch"].to_numpy("i8")] = kernels["duration_us"].to_numpy("f8")
    return TracedRank(rank, launches, priced.table("work"), priced.table("calls"), numbering.of_run(run), duration)
