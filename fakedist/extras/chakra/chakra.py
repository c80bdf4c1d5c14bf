"""Writes a rank's timed step as an MLCommons Chakra execution trace, which ASTRA-sim and other simulators read.

Source: mlcommons/chakra, schema/protobuf/et_def.proto @6dc63e14 (proto3, package ChakraProtoMsg), without the fields
that a trace does not need.

A node is a launch. Its data dependencies are the launch before it on its stream, and those whose events its stream
waited for; its control dependencies, what the host waited for. Sends and receives that run at once do not depend on
each other.

ASTRA-sim (astra-sim/workload/Workload.cc, CommunicatorGroup.cc @0383c203) reads groups as positive integers, and the
bytes of a collective as those of one rank's input.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.cost_model.job.stages import Transfer, transfers_of
from fakedist.cost_model.nccl.settings import collective_of
from fakedist.errors import JobError, RunDirectoryError, SetupError
from fakedist.results.run import Run
from fakedist.rundir.launch_records import LAUNCH_KINDS
from fakedist.units import parse_rank_list

#: Values of ``NodeType``.
INVALID, COMPUTE, SEND, RECEIVE, COLLECTIVE = 0, 4, 5, 6, 7
#: Values of ``CollectiveCommType``, by our name of the collective.
COLLECTIVE_TYPES = {
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "barrier": 9,
}
#: Scalar fields of AttributeProto's value, by number.
_VALUES = {"int32": 7, "int64": 9, "uint32": 11, "uint64": 13, "bool": 27, "string": 29}
_PACKAGE = "ChakraProtoMsg"


class Attributes(Protocol):
    """A repeated field of the protobuf library."""

    def add(self, **fields: object) -> object:
        """Append a message with these fields."""


class Message(Protocol):
    """A message of the protobuf library."""

    type: int
    attr: Attributes

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes:  # noqa: N802 - protobuf's name
        """Its bytes."""


@cache
def message_classes() -> dict[str, type]:
    """The classes GlobalMetadata, Node, IOInfo and AttributeProto; SetupError if protobuf is not installed."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise SetupError("Chakra traces need the protobuf library", "pip install 'fakedist[chakra]'") from None
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=_PACKAGE, syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    scalar = {name: getattr(field, f"TYPE_{name.upper()}") for name in _VALUES}

    def add(message: str, *rows: tuple[str, int, str, bool]) -> None:
        made = file.message_type.add(name=message)
        for name, number, kind, repeated in rows:
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if kind in scalar:
                made.field.add(name=name, number=number, type=scalar[kind], label=label)
            elif kind == "NodeType":
                made.field.add(
                    name=name, number=number, type=field.TYPE_ENUM, label=label, type_name=f".{_PACKAGE}.{kind}"
                )
            else:
                made.field.add(
                    name=name, number=number, type=field.TYPE_MESSAGE, label=label, type_name=f".{_PACKAGE}.{kind}"
                )

    names = ("INVALID", "METADATA", "MEM_LOAD", "MEM_STORE", "COMP", "COMM_SEND", "COMM_RECV", "COMM_COLL")
    node_type = file.enum_type.add(name="NodeType")
    for number, name in enumerate(names):
        node_type.value.add(name=f"{name}_NODE", number=number)
    add("AttributeProto", ("name", 1, "string", False), ("doc_string", 2, "string", False))
    attribute = file.message_type[-1]
    attribute.oneof_decl.add(name="value")
    for kind, number in _VALUES.items():
        attribute.field.add(name=f"{kind}_val", number=number, type=scalar[kind], oneof_index=0, label=1)
    add("GlobalMetadata", ("version", 1, "string", False), ("attr", 2, "AttributeProto", True))
    add("IOInfo", ("values", 1, "string", False), ("shapes", 2, "string", False), ("types", 3, "string", False))
    add(
        "Node",
        ("id", 1, "uint64", False),
        ("name", 2, "string", False),
        ("type", 3, "NodeType", False),
        ("ctrl_deps", 4, "uint64", True),
        ("data_deps", 5, "uint64", True),
        ("start_time_micros", 6, "uint64", False),
        ("duration_micros", 7, "uint64", False),
        ("inputs", 8, "IOInfo", False),
        ("outputs", 9, "IOInfo", False),
        ("attr", 10, "AttributeProto", True),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kinds = ("GlobalMetadata", "Node", "IOInfo", "AttributeProto")
    return {kind: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{kind}")) for kind in kinds}


def write_message(file: IO[bytes], message: Message) -> None:
    """Write a message after its length, a varint, as Chakra's readers expect."""
    text = message.SerializeToString(deterministic=True)
    length = len(text)
    while length > 0x7F:
        file.write(bytes([length & 0x7F | 0x80]))
        length >>= 7
    file.write(bytes([length]) + text)


VERSION = "0.0.4"


@dataclass(frozen=True)
class TracedGroup:
    """A process group in a trace: its ranks, empty if unknown, and its number.

    The number, from 1 on, is ``pg_name`` and ``comm_tag`` of nodes in the traces of all ranks.
    """

    number: int
    name: str
    ranks: Sequence[int]


@dataclass(frozen=True)
class TracedRank:
    """The tables that a trace is written from; ``duration_us`` is by row, NaN if unknown."""

    rank: int
    launches: pd.DataFrame
    work: pd.DataFrame
    calls: pd.DataFrame
    groups: Sequence[TracedGroup]
    duration_us: npt.NDArray[np.float64]


@dataclass(frozen=True)
class WrittenTrace:
    """A trace that was written, with its number of kernels, collectives, sends, receives and unknown nodes.

    An unknown node is a call of unknown operation or ranks: it keeps its dependencies and does nothing.
    """

    path: Path
    rank: int
    num_nodes: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Prerequisites:
    """The launches that a launch waits for, as rows of the table ``launches``.

    Attributes:
        data: On the GPU: the launch before it on its stream, and those that its stream waited for.
        control: On the host: what it waited for since the launch before on this stream.
    """

    data: tuple[int, ...]
    control: tuple[int, ...]


def trace_path(directory: Path, name: str, rank: int) -> Path:
    """Path of a rank's trace."""
    return directory / f"{name}.{rank}.et"


def groups_path(directory: Path, name: str) -> Path:
    """Path of the groups' file."""
    return directory / f"{name}.groups.json"


def write_chakra(traced: TracedRank, directory: Path, name: str) -> WrittenTrace:
    """Write ``NAME.RANK.et``; SetupError if the protobuf library is not installed."""
    path = trace_path(directory, name, traced.rank)
    classes = message_classes()
    with path.open("wb") as file:
        head = classes["GlobalMetadata"](version=VERSION)
        _attribute(head, "schema", "string", f"fakedist {VERSION}")
        _attribute(head, "rank", "int64", traced.rank)
        write_message(file, head)
        num_nodes, collectives = _write_nodes(file, traced, classes["Node"])
    return WrittenTrace(path, traced.rank, dict(num_nodes), dict(collectives))


def write_groups(groups: Mapping[int, Sequence[int]], directory: Path, name: str) -> Path:
    """Write the ranks of each group by the number that nodes have as ``pg_name``: ASTRA-sim's group configuration."""
    path = groups_path(directory, name)
    path.write_text(json.dumps({str(group): list(ranks) for group, ranks in groups.items()}, indent=1) + "\n")
    return path


def dependencies(launches: pd.DataFrame, together: Sequence[Sequence[int]] = ()) -> dict[int, Prerequisites]:
    """The launches that each launch with work waits for, by row; those ``together`` wait as the first does."""
    batch = {row: number for number, rows in enumerate(together) for row in rows}
    before: dict[int, Prerequisites] = {}
    last: dict[tuple[int, int], tuple[int, ...]] = {}
    recorded: dict[int, tuple[int, ...]] = {}
    waits = {}
    columns = [launches[name].tolist() for name in ("what", "device", "stream", "event", "work")]
    host = _HostWaits(list(zip(columns[1], columns[2], strict=True)))
    for row, (kind, device, stream, event, work) in enumerate(zip(*columns, strict=True)):
        at = (device, stream)
        if work >= 0:
            waits[row] = Prerequisites(last.get(at, ()), host.taken(at))
            if (number := batch.get(row)) is not None:
                own = before.setdefault(number, waits[row])
                others = tuple(earlier for earlier in waits[row].data if batch.get(earlier) != number)
                waits[row] = Prerequisites(_joined(own.data, others), _joined(own.control, waits[row].control))
                siblings = tuple(earlier for earlier in last.get(at, ()) if batch.get(earlier) == number)
                last[at] = (*siblings, row)
            else:
                last[at] = (row,)
            if kind == "host_reads":
                host.waits((row,))
        elif kind == "stream_records":
            recorded[event] = last.get(at, ())
        elif kind == "stream_waits":
            last[at] = _joined(last.get(at, ()), recorded.get(event, ()))
        elif kind == "host_waits_for_device":
            host.waits(_joined(*last.values()))
        else:
            host.waits(recorded.get(event, ()) if event else last.get(at, ()))
    return waits


class _HostWaits:
    """The launches that the host has waited for since each stream's last launch."""

    def __init__(self, streams: Sequence[tuple[int, int]]) -> None:
        self._streams = streams
        self._of_new: tuple[int, ...] = ()  # for a stream without launches
        self._of: dict[tuple[int, int], tuple[int, ...]] = {}

    def waits(self, rows: tuple[int, ...]) -> None:
        # A later launch of a stream stands for the earlier ones.
        streams = {self._streams[row] for row in rows}

        def joined(pending: tuple[int, ...]) -> tuple[int, ...]:
            return (*(row for row in pending if self._streams[row] not in streams), *rows)

        self._of_new = joined(self._of_new)
        self._of = {at: joined(pending) for at, pending in self._of.items()}

    def taken(self, at: tuple[int, int]) -> tuple[int, ...]:
        pending = self._of.get(at, self._of_new)
        self._of[at] = ()
        return pending


def _joined(*parts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(row for part in parts for row in part))


class _CallRow(NamedTuple):
    operation: str
    group: int
    bytes_in: int
    bytes_out: int
    peer: int


def _calls(table: pd.DataFrame) -> dict[int, _CallRow]:
    columns = [table[name].tolist() for name in _CallRow._fields]
    return dict(zip(table["sequence"].tolist(), map(_CallRow, *columns), strict=True))


def _write_nodes(file: IO[bytes], traced: TracedRank, node_class: type) -> tuple[Counter[str], Counter[str]]:
    """Write the nodes, and count them by what they are, and collectives by kind."""
    calls = _calls(traced.calls)
    waits = dependencies(traced.launches, _batches(traced.launches, calls))
    numbers = {row: number for number, row in enumerate(waits)}
    work_of, call_of = traced.launches["work"].tolist(), traced.launches["call"].tolist()
    columns = [traced.work[name].tolist() for name in ("name", "flops", "moved_bytes")]
    work = list(zip(*columns, strict=True))
    num_nodes: Counter[str] = Counter()
    collectives: Counter[str] = Counter()
    for row, number in numbers.items():
        wait = waits[row]
        name, flops, moved_bytes = work[work_of[row]]
        node = node_class(
            id=number,
            name=name,
            type=COMPUTE,
            data_deps=[numbers[row_before] for row_before in wait.data],
            ctrl_deps=[numbers[row_before] for row_before in wait.control],
            duration_micros=round(float(np.nan_to_num(traced.duration_us[row]))),
        )
        _attribute(node, "is_cpu_op", "bool", value=False)
        if call_of[row] >= 0:
            became, kind = _call(node, calls[call_of[row]], traced)
            collectives.update([kind] if became == "collectives" else [])
        else:
            became = "kernels"
            _attribute(node, "num_ops", "int64", _whole(flops))
            _attribute(node, "tensor_size", "uint64", _whole(moved_bytes))
        num_nodes[became] += 1
        write_message(file, node)
    return num_nodes, collectives


def _batches(launches: pd.DataFrame, calls: Mapping[int, _CallRow]) -> list[list[int]]:
    known = {
        sequence: Transfer(0, call.operation.startswith("send"), call.peer, str(call.group), 0.0)
        for sequence, call in calls.items()
        if call.operation.startswith(("send", "recv"))
    }
    kinds = [LAUNCH_KINDS.index(str(kind)) for kind in launches["what"].tolist()]
    streams = list(zip(launches["device"].tolist(), launches["stream"].tolist(), strict=True))
    return [
        [transfer.row for transfer in batch] for batch in transfers_of(launches["call"].tolist(), kinds, streams, known)
    ]


def _call(node: Message, call: _CallRow, traced: TracedRank) -> tuple[str, str]:
    """Make a node a collective, a send or a receive. Returns what it became, and the kind of collective."""
    kind, largest = collective_of(call.operation, call.bytes_in, call.bytes_out)
    group = traced.groups[call.group]
    if kind == "send":
        if not 0 <= call.peer < len(group.ranks):
            node.type = INVALID
            return "unknown", ""
        other, is_send = group.ranks[call.peer], call.operation.startswith("send")
        node.type = SEND if is_send else RECEIVE
        _attribute(node, "comm_src", "int32", traced.rank if is_send else other)
        _attribute(node, "comm_dst", "int32", other if is_send else traced.rank)
        _attribute(node, "comm_tag", "int32", group.number)
        _attribute(node, "comm_size", "int64", largest)
        return ("sends" if is_send else "receives"), ""
    if kind not in COLLECTIVE_TYPES or not group.ranks:
        node.type = INVALID
        return "unknown", ""
    node.type = COLLECTIVE
    _attribute(node, "comm_type", "int64", COLLECTIVE_TYPES[kind])
    _attribute(node, "pg_name", "string", str(group.number))
    # The root of a scatter has all inputs, any other rank none.
    _attribute(node, "comm_size", "int64", call.bytes_in or largest)
    return "collectives", kind


def _attribute(message: Message, name: str, kind: str, value: object) -> None:
    message.attr.add(name=name, **{f"{kind}_val": value})


def _whole(number: float) -> int:
    return round(number) if number == number else 0


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
