"""The groups of a rank: its calls on each in a step, and what can run at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fakedist.analysis.topology import COMPUTE, HOST, OWN, GroupCalls, Overlap, ProcessGroup, find_topology, ranks_of
from fakedist.report.content.report_blocks import Fact, Facts, Report, Sheet, SheetColumn, Verdict, bytes_column
from fakedist.report.content.wording import run_facts
from fakedist.results.run import Run
from fakedist.rundir.plain import to_plain

_SHORT = ("_into_tensor", "_tensor", "_coalesced", "_single")
AT_ONCE = (
    "calls on one group, and work on one stream, run in order; everything else can run at once, at most until "
    "something waits for it"
)
_MOST_RANKS = 4  # named one by one in the line


@dataclass(frozen=True, slots=True)
class CallsText:
    """The calls of one operation on one group and one stream, with its stream and its overlap as text."""

    group: str
    operation: str
    num_calls: int
    bytes: int
    bytes_in: int
    bytes_out: int
    stream: str
    beside: str


class RunTopology:
    """The groups of a run.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._found = find_topology(run.table)

    @cached_property
    def line(self) -> str:
        """The one line: "TP [0,1] all_reduce every layer; PP [0,2] send, recv; DP [0,4] all_reduce after backward"."""
        parts = []
        for number, group in enumerate(self._found.groups):
            spoken: dict[str, list[str]] = {}
            for row in self._found.calls:
                if row.group == number and group.size > 1:
                    spoken.setdefault(_briefly(row), []).append(short(row.operation))
            if spoken:
                said = ", ".join(f"{', '.join(operations)} {when}".rstrip() for when, operations in spoken.items())
                ranks = ",".join(map(str, ranks_of(group.ranks))) if group.size <= _MOST_RANKS else group.ranks
                parts.append(f"{group.label} [{ranks}] {said}")
        return "; ".join(parts)

    @property
    def when(self) -> str:
        """The part of the run that the calls belong to."""
        return f"step {self._found.step}" if self._found.step else "init"

    def sheets(self) -> list[Sheet]:
        """The tables: the ranks of each group, the calls on it, and what can run at the same time."""
        sheets = [self._groups_sheet()]
        if self._found.calls:
            rows = self._found.calls
            columns = [
                SheetColumn("group", [self._label(row) for row in rows], is_text=True),
                SheetColumn("operation", [short(row.operation) for row in rows], is_text=True),
                SheetColumn("calls", [f"{row.num_calls:,}" for row in rows]),
                bytes_column("bytes in", [row.bytes_in for row in rows]),
                bytes_column("bytes out", [row.bytes_out for row in rows]),
                SheetColumn("when", [_when(row) for row in rows], is_text=True),
            ]
            sheets += [Sheet(f"Calls of this rank in {self.when}, simulated", columns), self._streams_sheet()]
        return sheets

    def rows(self) -> list[CallsText]:
        """Rows by group, operation and stream."""
        return [
            CallsText(
                group=self._label(row),
                operation=short(row.operation),
                num_calls=row.num_calls,
                bytes=row.bytes_in + row.bytes_out,
                bytes_in=row.bytes_in,
                bytes_out=row.bytes_out,
                stream=_stream(row),
                beside=", ".join(self._beside(overlap)) or "-",
            )
            for row, overlap in zip(self._found.calls, self._found.overlaps, strict=True)
        ]

    def as_object(self) -> dict[str, object]:
        """The object of ``fakedist report --section communication --json``."""
        summary = self.run.summary
        return {
            "run_directory": str(self.run.path),
            "world_size": summary.world_size,
            "rank": summary.rank,
            "left_during_init": to_plain(summary.left_during_init),
            "step": self._found.step,
            "line": self.line,
            "groups": [self._group_object(number, group) for number, group in enumerate(self._found.groups)],
        }

    def _label(self, row: GroupCalls) -> str:
        return self._found.groups[row.group].label

    def _num_nodes(self, group: ProcessGroup) -> int:
        job = self.run.manifest.job
        per_node = 1 if job is None else job.gpus_per_node
        return len({rank // per_node for rank in ranks_of(group.ranks)})

    def _group_object(self, number: int, group: ProcessGroup) -> dict[str, object]:
        calls = [
            {name: value for name, value in to_plain(row).items() if name != "group"}
            | {"beside": self._beside(overlap)}
            for row, overlap in zip(self._found.calls, self._found.overlaps, strict=True)
            if row.group == number
        ]
        return {
            "name": group.label,
            "ranks": group.ranks,
            "size": group.size,
            "group_rank": group.group_rank,
            "backend": group.backend,
            "num_nodes": self._num_nodes(group),
            "calls": calls,
        }

    def _beside(self, overlap: Overlap) -> list[str]:
        rows = [self._found.calls[index] for index in overlap.calls]
        names = [f"{self._label(row)} {short(row.operation)}" for row in rows]
        return ["compute", *names] if overlap.compute else names

    def _groups_sheet(self) -> Sheet:
        groups = self._found.groups
        calls = {row.group for row in self._found.calls}
        remarks = []
        if silent := [group.label for number, group in enumerate(groups) if number not in calls]:
            remarks.append(f"no calls in {self.when}: {', '.join(silent)}")
        columns = [
            SheetColumn("group", [group.label for group in groups], is_text=True),
            SheetColumn("ranks", [group.ranks for group in groups], is_text=True),
            SheetColumn("size", [f"{group.size:,}" for group in groups]),
            SheetColumn("this rank is", [f"{group.group_rank:,}" for group in groups]),
            SheetColumn("nodes", [f"{self._num_nodes(group):,}" for group in groups], rank=1),
            SheetColumn("backend", [group.backend for group in groups], is_text=True, rank=2),
        ]
        return Sheet("Groups", columns, remarks)

    def _streams_sheet(self) -> Sheet:
        counted = ("calls", "bytes")  # the table above has them
        columns = [column for column in stream_columns(self.rows()) if column.name not in counted]
        return Sheet("What can run at once, simulated", columns, [AT_ONCE])


def stream_columns(rows: Sequence[CallsText]) -> list[SheetColumn]:
    """Columns for calls, their streams and what runs at the same time, from rows of :meth:`RunTopology.rows`."""
    return [
        SheetColumn("group", [row.group for row in rows], is_text=True),
        SheetColumn("operation", [row.operation for row in rows], is_text=True),
        SheetColumn("calls", [f"{row.num_calls:,}" for row in rows]),
        bytes_column("bytes", [row.bytes for row in rows]),
        SheetColumn("stream", [row.stream for row in rows], is_text=True),
        SheetColumn("at once with", [row.beside for row in rows], is_text=True),
    ]


def topology_report(run: Run) -> Report:
    """The groups of a run, and its calls on them.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    topology = RunTopology(run)
    facts = [
        Fact(name, text, is_code=name in ("job", "run"))
        for name, text in run_facts(run)
        if name in ("job", "rank", "ended", "run")
    ]
    verdict = Verdict(topology.line or "no calls on a group of several ranks", "groups")
    return Report("topology", [verdict, Facts(facts), *topology.sheets()], topology.as_object)


def short(operation: str) -> str:
    """An operation without what describes its tensors' layout: all_gather for all_gather_into_tensor_coalesced."""
    for part in _SHORT:
        operation = operation.replace(part, "")
    return operation


def _briefly(row: GroupCalls) -> str:
    if row.num_layers:
        return "every layer" if row.num_layers == row.of_layers else f"{row.num_layers} layers"
    return "" if row.peers else row.when[0]


def _when(row: GroupCalls) -> str:
    when = ", ".join(row.when)
    num_layers = row.num_layers
    of_layers = row.of_layers
    if not num_layers:
        return when
    return f"{when}; " + ("every layer" if num_layers == of_layers else f"{num_layers} of {of_layers} layers")


def _stream(row: GroupCalls) -> str:
    words = {OWN: "its group's", COMPUTE: "compute", HOST: "none: the host"}
    if row.peers:
        return "one for each peer"
    return words.get(row.stream, f"side {row.stream}")
