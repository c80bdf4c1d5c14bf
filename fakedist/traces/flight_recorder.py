"""Reads torch's Flight Recorder: the last calls of each rank of a job that hung, one file a rank.

The format is that of torch.distributed.flight_recorder: pickled, with the lines of the calls, or JSON. A ring that lost
its beginning has the last calls of each group alone, so that groups are read from the first call that all files have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fakedist.analysis.call_order import ELEMENTS, RankCall, RankCalls
from fakedist.analysis.stack_lines import frame_lines
from fakedist.errors import ReportError
from fakedist.rundir.rows import FrameRow
from fakedist.traces.foreign_files import DUMP_HINT, other_values, read_values

_WANTED = "a dump of torch's Flight Recorder"
#: Torch's names of calls, where those of ``torch.distributed`` are others.
_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    **dict.fromkeys(("allgather_coalesced", "ALLGATHER_coalesced"), "all_gather_coalesced"),
    "REDUCE_SCATTER_coalesced": "reduce_scatter_coalesced",
    "all_reduce_barrier": "barrier",
    "all_to_all_v_single": "all_to_all_single",
}
_DTYPES = {
    "Float": ("float32", 4), "Double": ("float64", 8), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8), "Int": ("int32", 4), "Short": ("int16", 2), "Char": ("int8", 1), "Byte": ("uint8", 1),
    "Bool": ("bool", 1), "ComplexFloat": ("complex64", 8), "ComplexDouble": ("complex128", 16),
}  # fmt: skip
#: Tensors of other dtypes, such as Float8_e4m3fn, have a byte an element.
_OTHER_BYTES = 1
#: The most entries of a file, and the most bytes of a call.
_MOST_ENTRIES, _MOST_BYTES = 2_000_000, 1 << 60


#: A group's name, and its ranks as the file has them.
_Group = tuple[str, tuple[int, ...]]
_Members = dict[_Group, tuple[int, ...]]


@dataclass(frozen=True)
class HungCall:
    """Facts of a call in a file, besides what is compared.

    Attributes:
        group: The group's description and name.
        state: scheduled, started or completed; "completed" for what has been waited for, too.
        lines: The script's lines, innermost first.
    """

    group: str
    state: str
    lines: list[str]


@dataclass(frozen=True)
class HungRank:
    """The calls of one rank, as far as all files have them, and what else is known of each by its sequence number."""

    calls: RankCalls
    known: dict[int, HungCall]


@dataclass
class _Entry:
    group: _Group
    number: int
    is_p2p: bool
    name: str
    peer_text: str
    sizes: tuple[int, int]
    dtype: str
    batch: int
    known: HungCall


def dumps_among(paths: Sequence[Path]) -> list[Path]:
    """The dumps that are given: files, or directories of files that end with a rank. Empty if none is a file.

    Raises:
        ReportError: One path is a file, and another is neither a file nor a directory of dumps.
    """
    dumps: list[Path] = []
    for path in paths:
        if path.is_file():
            dumps.append(path)
            continue
        inside = sorted(path.iterdir()) if path.is_dir() else []
        found = [file for file in inside if file.is_file() and _rank_of(file) is not None]
        if not found or len(found) < len(inside):
            if any(other.is_file() for other in paths):
                raise ReportError(f"{path} is neither a dump nor a directory of dumps, and others are", DUMP_HINT)
            return []
        dumps += found
    return dumps


def _rank_of(path: Path) -> int | None:
    match = re.search(r"rank[_-]?(\d{1,9})|(\d{1,9})(?:\.(?:json|pickle|pkl|gz))*$", path.name)
    return int(match[1] or match[2]) if match else None


def read_dumps(paths: Sequence[Path]) -> list[HungRank]:
    """Read the dumps of several ranks: a file each, named after its rank, or one for several, by rank.

    Raises:
        ReportError: A file is not a dump, tries to run code, is not named after its rank, or two are of one rank.
    """
    by_rank: dict[int, list[_Entry]] = {}
    for path in paths:
        for rank, dump in _dumps_in(path).items():
            if rank in by_rank:
                raise ReportError(f"{path} is a second file of rank {rank}", "give one file for each rank")
            try:
                by_rank[rank] = _entries(dump)
            except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
                raise ReportError(f"{path} is not {_WANTED}: {error!r}", DUMP_HINT) from None
    members = _members(by_rank)
    firsts = _firsts(by_rank)
    return [_hung(rank, entries, members, firsts) for rank, entries in sorted(by_rank.items())]


def _dumps_in(path: Path) -> dict[int, dict[str, object]]:
    """The dumps of a file, by rank."""
    value = read_values(path, _WANTED, DUMP_HINT)
    if isinstance(value, dict) and value and all(str(key).isdecimal() and len(str(key)) < 10 for key in value):
        ranks = {int(key): dump for key, dump in value.items()}
    elif isinstance(value, dict) and type(value.get("rank")) is int:
        ranks = {value["rank"]: value}
    else:
        ranks = {-1 if (rank := _rank_of(path)) is None else rank: value}
    for dump in ranks.values():
        if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
            raise other_values(path, dump, _WANTED, "entries", DUMP_HINT)
    if min(ranks) < 0:
        raise ReportError(f"{path} does not end with its rank", "torch names them PREFIX0, PREFIX1, ...")
    return ranks


def _entries(dump: dict[str, object]) -> list[_Entry]:
    rows = dump["entries"]
    assert isinstance(rows, list)
    if len(rows) > _MOST_ENTRIES:
        raise ValueError(f"{len(rows):,} entries")
    ranks = _ranks_of_groups(dump.get("pg_config"))
    entries: list[_Entry] = []
    open_batch = 0
    for index, row in enumerate(rows):
        backend_name = str(row["profiling_name"]).rpartition(":")[2]
        name, _, peers = backend_name.partition(" ")
        if name == "coalesced":  # it closes the calls before it that have its number
            for entry in entries[open_batch:]:
                entry.batch = index + 1
            open_batch = len(entries)
            continue
        # torch 2.3 wrote neither the name of a group nor two counts.
        group, description = (str(part)[:200] for part in row.get("process_group") or (row["pg_id"], ""))
        is_p2p = bool(row.get("is_p2p", False))
        number = row.get("p2p_seq_id" if is_p2p else "collective_seq_id", row.get("seq_id"))
        if not isinstance(number, int):
            raise TypeError("a sequence number is not an integer")
        if entries and not (is_p2p and entries[-1].is_p2p):
            open_batch = len(entries)
        dtypes = [*(row.get("input_dtypes") or []), *(row.get("output_dtypes") or [])]
        state = "completed" if row.get("retired") else str(row.get("state", ""))[:40]
        frames = [FrameRow(str(f["filename"]), int(f["line"]), str(f["name"])) for f in row.get("frames") or []]
        label = group if description in ("", "undefined") else f"{description} ({group})"
        entries.append(
            _Entry(
                group=(group, ranks.get(group, ())),
                number=number,
                is_p2p=is_p2p,
                name=_NAMES.get(name, name)[:80],
                peer_text=peers,
                sizes=(_bytes(row, "input"), _bytes(row, "output")),
                dtype=_DTYPES.get(dtypes[0], (str(dtypes[0])[:40], 0))[0] if dtypes else ELEMENTS,
                batch=0,
                known=HungCall(label, state, list(filter(None, frame_lines(frames)))),
            )
        )
    return entries


def _ranks_of_groups(config: object) -> dict[str, tuple[int, ...]]:
    groups = {}
    for name, facts in config.items() if isinstance(config, dict) else ():
        ranks = facts.get("ranks") if isinstance(facts, dict) else None
        if isinstance(ranks, str):
            ranks = [int(number) for number in re.findall(r"\d{1,9}", ranks)]
        name = (isinstance(facts, dict) and facts.get("name")) or name
        if name and isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
            groups[str(name)] = tuple(ranks)  # gloo's only group has no name, and is the one made last
    return groups


def _bytes(row: dict[str, object], side: str) -> int:
    sizes, dtypes = row.get(f"{side}_sizes") or [], row.get(f"{side}_dtypes") or []
    if not isinstance(sizes, list) or not isinstance(dtypes, list):
        raise TypeError("sizes are not a list")
    total = 0
    for index, shape in enumerate(sizes):
        dtype = dtypes[min(index, len(dtypes) - 1)] if dtypes else ""
        if not all(type(size) is int and size >= 0 for size in shape):
            raise TypeError("a size is not an integer from 0")
        total += math.prod(shape) * _DTYPES.get(str(dtype), ("", _OTHER_BYTES))[1]
    if total > _MOST_BYTES:
        raise ValueError(f"a call of {total:,} bytes")
    return total


def _members(by_rank: dict[int, list[_Entry]]) -> _Members:
    """The ranks of each group: those that the file names, else all that call in it."""
    callers: dict[_Group, set[int]] = {}
    for rank, entries in by_rank.items():
        for entry in entries:
            callers.setdefault(entry.group, set()).add(rank)
    return {group: group[1] or tuple(sorted(by_rank if group[0] == "0" else ranks)) for group, ranks in callers.items()}


def _firsts(by_rank: dict[int, list[_Entry]]) -> dict[_Group, int]:
    """The first collective of each group that the files of all ranks that call in it have."""
    firsts: dict[_Group, int] = {}
    for entries in by_rank.values():
        own: dict[_Group, int] = {}
        for entry in entries:
            if not entry.is_p2p:
                own.setdefault(entry.group, entry.number)
        for group, number in own.items():
            firsts[group] = max(firsts.get(group, 0), number)
    return firsts


def _hung(rank: int, entries: list[_Entry], members: _Members, firsts: dict[_Group, int]) -> HungRank:
    calls: list[RankCall] = []
    known: dict[int, HungCall] = {}
    numbers = {group: number for number, group in enumerate(members)}
    for index, entry in enumerate(entries):
        if entry.known.state == "completed" if entry.is_p2p else entry.number < firsts[entry.group]:
            continue
        ranks = members[entry.group]
        calls.append(_call(entry, index, ranks, numbers[entry.group]))
        known[index] = entry.known
    return HungRank(RankCalls(rank, calls, last_step=0, is_over=True, is_traced=True), known)


def _call(entry: _Entry, index: int, ranks: tuple[int, ...], stream: int) -> RankCall:
    # A file does not have the parts of an all_to_all.
    bytes_in, bytes_out = (0, 0) if entry.name.startswith(("all_to_all", "barrier")) else entry.sizes
    peer = -1
    if entry.name in ("send", "recv"):
        other = entry.peer_text.rpartition(">" if entry.name == "send" else "-")[2]
        peer = ranks[int(other)] if other.isdecimal() and int(other) < len(ranks) else -1
    return RankCall(
        group=((entry.group[0], *ranks), 0),
        members=ranks,
        peer=peer,
        sequence=index,
        operation=entry.name,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        dtype="" if entry.name == "barrier" else entry.dtype,
        asynchronous=True,
        stream=stream,
        step=0,
        reduction="",
        root=-1,
        tag=0,
        batch=entry.batch if entry.is_p2p else 0,
        sent_parts=(),
        received_parts=(),
        on_host=False,
        own_pair=False,
        waits=False,
        parts="",
        join="",
        awaited=-1,
        awaited_on=-1,
    )
