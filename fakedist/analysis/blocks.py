"""Every block of memory: its size, its lifetime, what allocated it and what it is for.

Inductor reuses a buffer for the next one of its size: one block to the allocator, held by several layers in turn. The
generated code shows at which line it changes hands (``record/compiled_graphs.py``); the stack of the peak's allocation,
which line ran at the peak.

The host's memory from a recording: its blocks, its phases, and what a node of such ranks needs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import takewhile

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array, Recording
from fakedist.analysis.replay import Replay, parse_settings, replay
from fakedist.analysis.stack_lines import BACKWARD
from fakedist.analysis.typed_tables import rows_of, table_of
from fakedist.options import Job
from fakedist.rundir.host_memory import HostLine, HostMemory, HostPhase, NodeMemory, Save
from fakedist.rundir.memory_records import HostLookRecord
from fakedist.rundir.rows import HeldRow, ScopeRow
from fakedist.rundir.schema import ACTIONS, ALIKE_CODE, CATEGORIES, HOST_CHANGES, SHARD_CODE

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


_NEVER = 1 << 40


@dataclass
class Held:
    """A block as compiled graphs show it, at the peak or when the graph that allocated it ended.

    Attributes:
        layer: The layer that the block was for; -1 if no graph shows it.
        is_saved: Its contents are those that it held when the graph that allocated it ended.
        is_last: They are the last thing it held.
        is_again: They are a result of the graph's forward, computed again.
    """

    layer: Array
    is_saved: Array
    is_last: Array
    is_again: Array


@dataclass(frozen=True)
class _Point:
    """A moment: a call of a graph (its row in ``graphs``) and a line of the graph's code."""

    graph: int
    line: int


def held_blocks(frame: pd.DataFrame, recording: Recording, peak_event: int) -> Held:
    """The layer that each block was for, as compiled graphs show it.

    Args:
        frame: Columns op, stack, address, alloc_event, free_event of the blocks, in order of allocation.
        peak_event: -1 without events.
    """
    num = len(frame)
    held = Held(np.full(num, -1, "i8"), np.ones(num, bool), np.ones(num, bool), np.zeros(num, bool))
    graphs = recording.graphs
    if not graphs or not num:
        return held
    code_of, line_of = _lines(recording)
    op, stack = frame["op"].to_numpy(), frame["stack"].to_numpy()
    of_op = np.array([row.op for row in graphs])
    graph = np.searchsorted(of_op, op, side="right") - 1
    code = np.where(stack >= 0, code_of[stack], -1)
    is_inside = (code >= 0) & (graph >= 0) & (code == np.array([row.code for row in graphs])[graph])
    peak = _peak(recording, peak_event, of_op=of_op, code=code_of, line=line_of)
    alive = ((frame["alloc_event"] <= peak_event) & (frame["free_event"] > peak_event)).to_numpy()
    placings = {row.number: row.layers for row in recording.placings}
    lines = {code.number: {row.line: row.module for row in code.lines} for code in recording.generated}
    again = {(code.number, line) for code in recording.generated for line in code.recomputed}
    chains = _chains(recording)
    for block in np.flatnonzero(is_inside):
        number, of_graph = int(code[block]), int(graph[block])
        line = int(line_of[stack[block]])
        layers = placings[graphs[of_graph].placing]
        held.layer[block], held.is_again[block] = _layer(layers, lines[number].get(line)), (number, line) in again
        for at, module in chains.get((number, line), ()):
            if not alive[block] or _is_before(of_graph, at, peak):
                held.layer[block], held.is_again[block] = _layer(layers, module), (number, at) in again
            else:
                held.is_saved[block] = held.is_last[block] = False
    _inputs(frame, recording, held, alive=alive, peak=peak, of_op=of_op)
    return held


def _layer(layers: tuple[int, ...], module: int | None) -> int:
    return -1 if module is None else int(layers[module])


def _is_before(graph: int, line: int, moment: _Point) -> bool:
    return graph < moment.graph or (graph == moment.graph and line <= moment.line)


def _lines(recording: Recording) -> tuple[Array, Array]:
    """For each stack, the generated code that it is in and the line there; -1 if it is in none."""
    codes = {code.filename: code.number for code in recording.generated}
    of_frame = [codes.get(frame.filename, -1) for frame in recording.frames]
    code, line = np.full(len(recording.stacks) + 1, -1, "i8"), np.full(len(recording.stacks) + 1, -1, "i8")
    for number, stack in enumerate(recording.stacks):
        own = takewhile(lambda frame: recording.frames[frame] != BACKWARD, stack)
        inside = next((frame for frame in own if of_frame[frame] >= 0), None)
        if inside is not None:
            code[number], line[number] = of_frame[inside], recording.frames[inside].line
    return code, line


def _chains(recording: Recording) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(code, line that allocates) -> the lines from which another buffer has the memory, and its module."""
    chains: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for code in recording.generated:
        for root, line, module in code.holders:
            if root >= 0:
                chains.setdefault((code.number, root), []).append((line, module))
    return {key: sorted(lines) for key, lines in chains.items()}


def _peak(recording: Recording, peak_event: int, *, of_op: Array, code: Array, line: Array) -> _Point:
    """The peak: inside a graph if its allocation's stack is inside one, else after the last graph that began."""
    events = recording.device_events
    op = int(np.maximum.accumulate(events["op"][: peak_event + 1])[-1]) if peak_event >= 0 else -1
    graph = int(np.searchsorted(of_op, op, side="right")) - 1
    stack = int(events["stack"][peak_event]) if peak_event >= 0 else -1
    inside = graph >= 0 and code[stack] >= 0 and code[stack] == recording.graphs[graph].code
    return _Point(graph, int(line[stack]) if inside else _NEVER)


def _inputs(frame: pd.DataFrame, recording: Recording, held: Held, *, alive: Array, peak: _Point, of_op: Array) -> None:
    """Handle inputs whose memory a graph reuses: mostly what a forward saved and its backward no longer needs."""
    rows = pd.DataFrame(recording.held, columns=HeldRow._fields)
    if not len(rows):
        return
    rows = rows.astype({"op": "int64", "address": "uint64", "line": "int64", "layer": "int64"})
    made = np.maximum.accumulate(frame["op"].to_numpy())
    blocks = pd.DataFrame({"op": made, "address": frame["address"], "block": np.arange(len(frame))})
    blocks = blocks.astype({"op": "int64", "address": "uint64"})
    matched = pd.merge_asof(
        rows.sort_values(["op", "line"], kind="stable"),
        blocks.sort_values(["op", "block"], kind="stable"),
        on="op",
        by="address",
        direction="backward",
    ).dropna(subset=["block"])
    freed, event_op = frame["free_event"].to_numpy(), np.maximum.accumulate(recording.device_events["op"])
    for op, line, layer, block in matched[["op", "line", "layer", "block"]].astype("int64").itertuples(index=False):
        end = freed[block]
        if not alive[block] or (end < len(event_op) and event_op[end] < op):
            continue  # the block was gone by then: the input's memory is not one of these blocks
        if _is_before(int(np.searchsorted(of_op, op, side="right")) - 1, line, peak):
            held.layer[block], held.is_saved[block] = layer, False
        else:
            held.is_last[block] = False


_CODE = {name: code for code, name in enumerate(CATEGORIES)}
_UNMARKED = len(CATEGORIES)
#: Phases in which models run.
_RUNS = ("generation", "forward", "backward")
_FILLS = r"\.(?:new_)?(?:zeros|ones|full|rand|randn|normal)(?:_like)?\b"


@dataclass
class Blocks:
    """The blocks of one rank and the replay they come from.

    Attributes:
        frame: One row per block, columns of the table ``blocks`` without ``at_peak``, plus ``scope``.
        shares: Columns block, layer, bytes: a layer's part of a block that several layers own.
        peak_event: Index of the first event at which the most bytes were allocated; -1 without events.
    """

    frame: pd.DataFrame
    shares: pd.DataFrame
    replay: Replay
    peak_event: int

    @property
    def at_peak(self) -> Array:
        """Return whether each block was alive at the peak."""
        frame = self.frame
        return np.asarray((frame["alloc_event"] <= self.peak_event) & (frame["free_event"] > self.peak_event))


def build_blocks(recording: Recording) -> Blocks:
    """Blocks of the rank's device. The table ``blocks`` documents the columns."""
    events = recording.device_events
    settings = parse_settings("" if recording.gpu is None else recording.gpu.alloc_conf)
    changes = [
        (int(np.searchsorted(recording.event_ops, change.op)), parse_settings(change.alloc_conf))
        for change in recording.settings_changes
    ]
    played = replay(events["action"], events["address"], events["size"], settings, changes)
    allocated, made = played.allocated_bytes, played.alloc_event
    frame = pd.DataFrame(
        {
            "address": events["address"][made],
            "requested_bytes": events["size"][made],
            "bytes": played.block_bytes,
            "alloc_event": made,
            "free_event": played.free_event,
            "reuse_event": played.reuse_event,
            "op": events["op"][made],
            "stream": events["stream"][made],
            "stack": events["stack"][made],
        }
    )
    peak_event = int(allocated.argmax()) if len(allocated) else -1
    held = held_blocks(frame, recording, peak_event)
    _add_place(frame, recording, held)
    parts = _add_category(frame, recording, held)
    return Blocks(frame, parts, played, peak_event)


def scope_columns(recording: Recording, op: Array) -> pd.DataFrame:
    """Step, phase, layer and recompute of operations; unknown ones (-1) get step 0, layer 0, ``other``."""
    none = ScopeRow(-1, 0, "other", 0, recompute=False)
    table = pd.DataFrame([none, *recording.scopes], columns=ScopeRow._fields)
    table = table.astype({"step": "int32", "layer": "int32", "phase": pd.CategoricalDtype()})
    known = (op >= 0) & (op < len(recording.op_scope))
    scope = np.where(known, recording.op_scope[np.where(known, op, 0)].astype("i8") + 1 if known.any() else 0, 0)
    return table.iloc[scope].reset_index(drop=True)


def event_places(recording: Recording) -> pd.DataFrame:
    """Step and phase of each event of the rank's device. Events outside any operation belong to the one before."""
    op = recording.device_events["op"]
    return scope_columns(recording, np.maximum.accumulate(op) if len(op) else op)[["step", "phase"]]


def operation_names(recording: Recording, op: Array) -> pd.Categorical[str]:
    """Names of operations, given their numbers; empty where there is no operation."""
    names = ["", *(operation.name for operation in recording.operations)]
    known = (op >= 0) & (op < len(recording.op_operation))
    code = np.where(known, recording.op_operation[np.where(known, op, 0)].astype("i8") + 1 if known.any() else 0, 0)
    return pd.Categorical.from_codes(code, categories=pd.Index(names))


def _add_place(frame: pd.DataFrame, recording: Recording, held: Held) -> None:
    op = frame["op"].to_numpy()
    position = scope_columns(recording, op)
    for name in ("step", "phase", "layer", "recompute"):
        frame[name] = position[name].to_numpy() if name != "phase" else position[name].array
    frame["layer"] = np.where(held.layer >= 0, held.layer, frame["layer"]).astype("i4")
    frame["recompute"] |= held.is_again
    frame["operation"] = operation_names(recording, op)


def _add_category(frame: pd.DataFrame, recording: Recording, held: Held) -> pd.DataFrame:
    """Add ``category``, move marked blocks to the layers that own them, and return the shares of shared blocks.

    A block that changes hands inside a compiled graph has the mark of what it holds last, and counts as saved for
    backward by what it holds when the graph ends.
    """
    marked, owners = _marked(frame, recording.marks)
    marked[_as_large_as_operands(frame, marked)] = _CODE["workspace"]
    marked = np.where(held.is_last, marked, _UNMARKED)
    owners = owners[held.is_last[owners["block"].to_numpy()]] if len(owners) else owners
    activation = _saved_for_backward(frame, recording) & held.is_saved
    # A communication buffer that a forward allocates and that stays (DDP's buckets) was not saved for backward.
    activation &= ~((marked == _CODE["communication"]) & _outlives_backward(frame, recording))
    working = frame["phase"].isin((*_RUNS, "optimizer")).to_numpy()
    code = np.where(marked <= _CODE["workspace"], marked, _UNMARKED)
    code = np.where((code == _UNMARKED) & (marked == _CODE["other"]), _CODE["other"], code)  # a copy that never ran
    code = np.where((code == _UNMARKED) & activation, _CODE["activation"], code)
    code = np.where((code == _UNMARKED) & (marked == _CODE["communication"]), _CODE["communication"], code)
    code = np.where((code == _UNMARKED) & working, _CODE["temporary"], code)
    code = np.where(code == _UNMARKED, _CODE["other"], code)
    frame["category"] = pd.Categorical.from_codes(code, categories=pd.Index(CATEGORIES))
    return _give_to_owners(frame, owners)


def _as_large_as_operands(frame: pd.DataFrame, marked: Array) -> Array:
    """Workspaces of products that were not marked, since copies of their operands would have the same size.

    Such a block has the size of other products' workspaces, and is the last that a product allocates, after its output.
    """
    is_workspace, op = marked == _CODE["workspace"], frame["op"]
    of_products = frame[is_workspace & (op >= 0)]
    is_one = frame["requested_bytes"].isin(of_products["requested_bytes"].unique())
    is_one &= frame["operation"].isin(of_products["operation"].unique()) & ~op.isin(of_products["op"])
    is_last = op.duplicated(keep="first") & ~op.duplicated(keep="last")
    return np.asarray(is_one & is_last & (marked == _UNMARKED), bool)


def _marked(frame: pd.DataFrame, marks: dict[str, Array]) -> tuple[Array, pd.DataFrame]:
    """Each block's first marked category (``_UNMARKED`` if none), and (block, layer, bytes) of its owners."""
    best = np.full(len(frame), _UNMARKED, "u1")
    no_owners = pd.DataFrame({"block": [], "layer": [], "bytes": []}, dtype="int64")
    if not len(frame) or not len(marks["op"]):
        return best, no_owners
    wanted = pd.DataFrame(marks).rename(columns={"size": "bytes"})
    wanted = wanted.astype({"address": "uint64", "category": "int64"})
    # Once a compiled graph has called an operation, its next allocations have the graph's own, smaller number.
    op = np.maximum.accumulate(frame["op"].to_numpy())
    blocks = pd.DataFrame({"op": op, "address": frame["address"], "block": np.arange(len(frame))})
    # The last block allocated at the address by an operation up to the mark's.
    marked = pd.merge_asof(
        wanted.sort_values("op", kind="stable"),
        blocks.sort_values(["op", "block"], kind="stable"),
        on="op",
        by="address",
        direction="backward",
    ).dropna(subset=["block"])
    marked["block"] = marked["block"].astype("int64")
    marked = _kept_copies(_kept_shards(marked, frame["phase"]), frame)
    first = marked.groupby("block")["category"].min()
    best[first.index.to_numpy()] = first.to_numpy()
    deciding = marked[(marked["category"] == best[marked["block"]]) & (marked["layer"] >= 0)]
    return best, _covered(deciding)


def _covered(marks: pd.DataFrame) -> pd.DataFrame:
    """Columns block, layer, bytes: what a layer's tensors, some marked twice or overlapping, cover of a block."""
    owner = ["block", "layer"]
    parts = marks.groupby([*owner, "start"])["bytes"].max().reset_index()
    parts["end"] = parts["start"] + parts["bytes"]
    parts["reached"] = parts.groupby(owner)["end"].cummax()
    parts["reached"] = parts.groupby(owner)["reached"].shift(fill_value=0)
    parts["bytes"] = (parts["end"] - parts[["start", "reached"]].max(axis=1)).clip(lower=0)
    return parts.groupby(owner)["bytes"].sum().reset_index()


def _kept_shards(marked: pd.DataFrame, phase: pd.Series) -> pd.DataFrame:
    """Turn marks of shards into marks of parameters. Drop those of blocks made for one gather (a copy in bfloat16)."""
    is_shard = (marked["category"] == SHARD_CODE).to_numpy()
    is_made_for_it = phase.isin(_RUNS).to_numpy()[marked["block"]]
    marked = marked.assign(category=marked["category"].where(~is_shard, _CODE["parameter"]))
    return marked[~(is_shard & is_made_for_it)]


def _kept_copies(marked: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
    """Turn marks of tensors with parameters' shapes into marks of copies, unless made as zeros or in backward."""
    is_alike = (marked["category"] == ALIKE_CODE).to_numpy()
    is_filled = frame["operation"].astype(str).str.contains(_FILLS)
    is_none = (is_filled | frame["phase"].isin(_RUNS)).to_numpy()[marked["block"]]
    marked = marked.assign(category=marked["category"].where(~is_alike, _CODE["other"]))
    return marked[~(is_alike & is_none)]


def _saved_for_backward(frame: pd.DataFrame, recording: Recording) -> Array:
    """Blocks allocated while autograd recorded a graph, and still alive when its backward began."""
    regions = sorted((region.first, region.last) for region in recording.regions if region.last >= region.first)
    if not regions or not len(frame):
        return np.zeros(len(frame), bool)
    op = frame["op"].to_numpy()
    firsts, lasts = (np.array(bound) for bound in zip(*regions, strict=True))
    # Recomputed pieces lie inside backward and forward passes outside it, so regions never overlap.
    region = np.searchsorted(firsts, op, side="right") - 1
    inside = (region >= 0) & (op <= lasts[region])
    event_op = np.maximum.accumulate(recording.device_events["op"])
    end_event = np.searchsorted(event_op, lasts, side="right")[region]
    return np.asarray(inside & (frame["free_event"].to_numpy() >= end_event))


def _outlives_backward(frame: pd.DataFrame, recording: Recording) -> Array:
    """Blocks still alive when their step's optimizer started or the next step began, whichever came first."""
    op = recording.device_events["op"]
    positions = event_places(recording)
    positions["event"] = np.arange(len(positions))
    begins = positions[positions["phase"] == "optimizer"].groupby("step")["event"].min()
    event_step = np.maximum.accumulate(positions["step"].to_numpy()) if len(op) else positions["step"].to_numpy()
    next_step = np.searchsorted(event_step, frame["step"].to_numpy(), side="right")
    end = np.minimum(frame["step"].map(begins).fillna(len(op)).to_numpy(), next_step)
    inside = (frame["alloc_event"].to_numpy() < end) & (end < len(op))
    return np.asarray(inside & (frame["free_event"].to_numpy() > end))


def _give_to_owners(frame: pd.DataFrame, owners: pd.DataFrame) -> pd.DataFrame:
    layer = frame["layer"].to_numpy().copy()
    sizes = frame["bytes"].to_numpy()
    num_owners = owners.groupby("block")["layer"].transform("size") if len(owners) else pd.Series(dtype="int64")
    alone = owners[num_owners == 1] if len(owners) else owners
    layer[alone["block"].to_numpy()] = alone["layer"].to_numpy()
    rows: list[tuple[int, int, int]] = []
    shared: dict[int, list[tuple[int, int]]] = defaultdict(list)
    if len(owners):
        for block, owner, bytes_ in owners[num_owners > 1].itertuples(index=False):
            shared[int(block)].append((int(owner), int(bytes_)))
    for block, parts in shared.items():
        rows += _divide(block, int(sizes[block]), int(layer[block]), parts)
    frame["layer"] = layer
    return pd.DataFrame(rows, columns=["block", "layer", "bytes"]).astype("int64")


def _divide(block: int, bytes_: int, own_layer: int, parts: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Shares of one block: what each owner's tensors use; overlapping ones (tied weights, views) share in proportion.

    The rest goes to the layer that allocated it, or if layer 0 is an owner (a bucket of gradients), outside of modules.
    """
    total = sum(part for _, part in parts)
    bytes_of = {layer: part * bytes_ // total if total > bytes_ else part for layer, part in parts}
    heir = max(bytes_of, key=bytes_of.__getitem__) if total > bytes_ else 0 if 0 in bytes_of else own_layer
    if rest := bytes_ - sum(bytes_of.values()):
        bytes_of[heir] = bytes_of.get(heir, 0) + rest
    return [(block, layer, part) for layer, part in bytes_of.items() if part]


def action_names(recording: Recording) -> pd.Categorical[str]:
    """The allocator's word for each event of the rank's device."""
    return pd.Categorical.from_codes(recording.device_events["action"].astype("i8"), categories=pd.Index(ACTIONS))
