"""The host's memory from a recording: its blocks, its phases, and what a node of such ranks needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

import pandas as pd

from fakedist.analysis.recording import Recording
from fakedist.analysis.typed_tables import rows_of, table_of
from fakedist.options import Job
from fakedist.rundir.host_memory import HostLine, HostMemory, HostPhase, NodeMemory, Save
from fakedist.rundir.memory_records import HostLookRecord
from fakedist.rundir.schema import HOST_CHANGES

_PAGEABLE, _PINNED, _REGISTERED, _MOVED = range(len(HOST_CHANGES))
#: Where what is in memory of its own, and not a file's, has its path.
_SHARED = ("/dev/shm/", "/memfd:", "/dev/zero")
_DELETED = " (deleted)"
#: In these phases all ranks are taken to do the same.
_TRAINING = ("forward", "backward", "optimizer", "generation")
_NUM_LINES = 20


@dataclass
class _Block:
    kind: str
    bytes: int
    place: int
    stack: int
    alloc_us: int
    free_us: int = -1
    at_peak: bool = False


@dataclass
class _Levels:
    pageable: int = 0
    pinned: int = 0
    look: HostLookRecord | None = None

    def held(self) -> tuple[int, int, int, int]:
        """Bytes that are pageable, pinned, shared, and of these those with names."""
        shared = [row for row in (self.look.mappings if self.look else []) if _is_shared(row.path)]
        named = sum(row.size for row in shared if not row.path.endswith(_DELETED))
        return self.pageable, self.pinned, sum(row.size for row in shared), named


@dataclass
class _Replay:
    """Every block, and the most in each place. ``pinned_is_seen``: else torch's statistics have it at each look."""

    recording: Recording
    pinned_is_seen: bool
    blocks: list[_Block] = field(default_factory=list)
    most: dict[tuple[int, str], HostPhase] = field(default_factory=dict)
    at_peak: list[_Block] = field(default_factory=list)
    peak: HostPhase | None = None
    peak_us: int = 0

    def __post_init__(self) -> None:
        self._levels, self._place = _Levels(), -1
        self._alive: dict[tuple[int, int], _Block] = {}
        changes = self.recording.host_blocks
        looks = list(self.recording.host_looks)
        columns = (changes[name].tolist() for name in ("time_us", "change", "address", "size", "stack"))
        for time_us, change, address, size, stack in zip(*columns, strict=True):
            while looks and looks[0].time_us <= time_us:
                self._look(looks.pop(0))
            if change == _MOVED:
                self._place = address
            elif size:
                self._takes(
                    change, address, _Block("pinned" if change else "pageable", size, self._place, stack, time_us)
                )
            else:
                self._frees(change, address, time_us)
            self._note(time_us, self._place)
        for look in looks:
            self._look(look)
        for block in self.at_peak:
            block.at_peak = True

    def _takes(self, change: int, address: int, block: _Block) -> None:
        if change == _REGISTERED and self._is_known(address):
            return  # what is pinned counts already
        self.blocks.append(block)
        self._alive[change, address] = block
        self._add(block, block.bytes)

    def _frees(self, change: int, address: int, time_us: int) -> None:
        block = self._alive.pop((change, address), None)
        if block is not None:
            block.free_us = time_us
            self._add(block, -block.bytes)

    def _add(self, block: _Block, size: int) -> None:
        if block.kind == "pageable":
            self._levels.pageable += size
        else:
            self._levels.pinned += size

    def _is_known(self, address: int) -> bool:
        of_tensors = ((start, block.bytes) for (change, start), block in self._alive.items() if change == _PAGEABLE)
        mapped = ((row.address, row.size) for look in self.recording.host_looks for row in look.mappings)
        return any(start <= address < start + size for pieces in (of_tensors, mapped) for start, size in pieces)

    def _look(self, look: HostLookRecord) -> None:
        levels = self._levels
        levels.look = look
        if not self.pinned_is_seen and look.pinned_bytes >= 0:
            levels.pinned = look.pinned_bytes
        self._note(look.time_us, look.place)
        where = self._where(look.place)
        known = self.most[where]
        files = [row for row in look.mappings if not _is_shared(row.path)]
        other = look.malloc_bytes - levels.pageable
        self.most[where] = replace(
            known,
            prefetched_bytes=max(known.prefetched_bytes, look.prefetched_bytes),
            mapped_bytes=max(known.mapped_bytes, sum(row.size for row in files)),
            private_bytes=max(known.private_bytes, sum(row.size for row in files if row.is_private)),
            other_bytes=known.other_bytes if look.malloc_bytes < 0 else max(other, known.other_bytes or 0),
        )

    def _where(self, place: int) -> tuple[int, str]:
        row = self.recording.host_places[place]
        return row.step, row.phase

    def _note(self, time_us: int, place: int) -> None:
        if place < 0:
            return
        where = self._where(place)
        pageable, pinned, shared, named = self._levels.held()
        total = pageable + pinned + shared
        known = self.most.setdefault(where, HostPhase(*where, peak_bytes=-1))
        if total > known.peak_bytes:
            self.most[where] = replace(
                known,
                peak_bytes=total,
                pageable_bytes=pageable,
                pinned_bytes=pinned,
                shared_bytes=shared,
                named_bytes=named,
            )
        if self.peak is None or total > self.peak.peak_bytes:
            self.peak, self.peak_us, self.at_peak = self.most[where], time_us, list(self._alive.values())


def _is_shared(path: str) -> bool:
    return path.startswith(_SHARED)


def host_tables(recording: Recording, job: Job | None) -> dict[str, pd.DataFrame]:
    """The tables ``host_blocks``, ``host_phases``, ``host_files`` and ``saves``."""
    replay = _replay(recording, job)
    places = {number: (row.step, row.phase) for number, row in enumerate(recording.host_places)}
    places[-1] = 0, "init"  # before the first was known
    blocks = [(b.kind, b.bytes, *places[b.place], b.stack, b.alloc_us, b.free_us, b.at_peak) for b in replay.blocks]
    phases = map(astuple, _phases(replay))
    saves = [
        (s.function, s.line, places[s.place][0], s.begin_us, s.end_us, s.written_bytes, s.asynchronous)
        for s in recording.saves
    ]
    rows = {"host_blocks": blocks, "host_phases": phases, "host_files": _files(recording, places), "saves": saves}
    return {name: table_of(name, of_table) for name, of_table in rows.items()}


def _phases(replay: _Replay) -> list[HostPhase]:
    return sorted(replay.most.values(), key=lambda phase: phase.step)


def _files(recording: Recording, places: Mapping[int, tuple[int, str]]) -> list[tuple[object, ...]]:
    files: dict[tuple[str, bool], tuple[int, int, str]] = {}
    for look in recording.host_looks:
        sizes: Counter[tuple[str, bool]] = Counter()
        for row in look.mappings:
            sizes[row.path, row.is_private] += row.size
        for key, size in sizes.items():
            most, step, phase = files.get(key, (0, *places[look.place]))
            files[key] = max(most, size), step, phase
    return [(path, _is_shared(path), most, private, *place) for (path, private), (most, *place) in files.items()]


def _replay(recording: Recording, job: Job | None) -> _Replay:
    return _Replay(recording, pinned_is_seen=job is None or job.device == "virtual")


def host_memory(recording: Recording, job: Job | None, lines: Sequence[str]) -> HostMemory | None:
    """The host's memory; None if it was not recorded. ``lines`` are those of the recording's stacks."""
    replay = _replay(recording, job)
    if replay.peak is None or job is None or not recording.host_looks:
        return None
    peak = replay.most[replay.peak.step, replay.peak.phase]
    held: dict[tuple[str, str], tuple[int, int]] = {}
    for block in replay.at_peak:
        key = (lines[block.stack] if block.stack >= 0 else "", block.kind)
        bytes_, number = held.get(key, (0, 0))
        held[key] = bytes_ + block.bytes, number + 1
    ordered = sorted(held.items(), key=lambda row: -row[1][0])[:_NUM_LINES]
    nearest = min(recording.host_looks, key=lambda look: abs(look.time_us - replay.peak_us))
    unknown = ["the CUDA context's and NCCL's own host memory, and programs' code, are not part of this"]
    if job.device == "cuda":
        unknown.append("pinned memory is from torch's statistics where steps and checkpoints end, without lines")
    phases = _phases(replay)
    return HostMemory(
        peak=peak,
        phases=phases,
        lines=[HostLine(*key, *counts) for key, counts in ordered],
        pinned_used_bytes=None if nearest.pinned_used_bytes < 0 else nearest.pinned_used_bytes,
        node=node_memory({job.rank: phases}, job),
        saves=rows_of(Save, host_tables(recording, job)["saves"]),
        storage_bytes_per_s=job.storage_bytes_per_s,
        unknown=unknown,
    )


def node_memory(ranks: Mapping[int, Sequence[HostPhase]], job: Job) -> NodeMemory:
    """A node's need, by the phases of the ranks of it that ran; the others are taken as copies of the last."""
    last = max(ranks)
    others = job.local_world_size - len(ranks)
    levels = {rank: {(row.step, row.phase): row for row in rows} for rank, rows in ranks.items()}
    training = {
        rank: max((row.peak_bytes for row in rows if row.phase in _TRAINING), default=0) for rank, rows in ranks.items()
    }
    high: dict[tuple[int, str], int] = {}
    low: dict[tuple[int, str], int] = {}
    for where in dict.fromkeys(where for rows in levels.values() for where in rows):
        held = {rank: rows[where].peak_bytes if where in rows else training[rank] for rank, rows in levels.items()}
        high[where] = sum(held.values()) + others * held[last]
        does_same = where[1] in _TRAINING
        row = levels[last].get(where)
        shared = row.named_bytes if row is not None and does_same else 0
        low[where] = sum(held.values()) + others * ((held[last] if does_same else training[last]) - shared)
    most, least = max(high, key=high.__getitem__), max(low, key=low.__getitem__)
    return NodeMemory(
        num_ranks=job.local_world_size,
        recorded=sorted(ranks),
        step=most[0],
        phase=most[1],
        high_bytes=high[most],
        low_bytes=low[least],
        low_step=least[0],
        low_phase=least[1],
        limit_bytes=job.host_memory_bytes,
    )
