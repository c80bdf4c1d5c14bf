"""Reads any torch memory snapshot as a recording: blocks, history and stacks, and what these show.

The history is a ring buffer: once it is full, torch drops its beginning. Blocks that were alive before are added in
front of it: those freed without an allocation, and those alive at the end that were never allocated.

Missing values count as 0, as older versions of torch leave some out. A value that torch never writes, such as a text
for a size, makes the file no snapshot.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np

from fakedist.analysis.recording import Array, Recording
from fakedist.analysis.replay import COMMON_POOL, Pool, Segment, Segments, parse_settings, replay
from fakedist.analysis.stack_lines import BACKWARD, stack_lines
from fakedist.bounded import UnreadableError
from fakedist.rundir import notes
from fakedist.rundir.notes import Note
from fakedist.rundir.records import GpuRecord
from fakedist.rundir.rows import FrameRow
from fakedist.rundir.schema import ACTIONS
from fakedist.traces.inferring import Annotation, block_lives, infer

#: An event, a segment, a block or a frame.
Entry = dict[str, object]

#: The most that an address, a stream or a time may be.
_MOST = (1 << 63) - 1
#: The most bytes of one block or segment: 1 PiB.
MOST_BYTES = 1 << 50
#: The most bytes that all events of a history may move: 200 times those of 10,000,000 events of 1 GiB.
_MOST_MOVED = 1 << 61
#: The largest number of a device.
MOST_DEVICES = 1023
#: The most blocks of all segments. Those of a GPU of 80 GB have some hundred thousand.
_MOST_BLOCKS = 20_000_000
#: Python's -1 where an instruction has no line, as torch of several versions writes it.
_NO_LINE = (-1, (1 << 64) - 1)
#: Longer texts are cut. A path of Linux has at most so many characters.
_LONGEST = 4096


class NoSnapshotError(UnreadableError):
    """A value is none that torch writes. The message goes after "is not a memory snapshot:"."""


class NoDeviceError(Exception):
    """The snapshot has nothing of a GPU; the arguments follow "has", and say what it has."""


def expect_list(value: object, called: str) -> list[object]:
    """A list."""
    if not isinstance(value, list):
        raise NoSnapshotError(f"{called} is not a list")
    return value


def expect_entries(value: object, called: str) -> list[Entry]:
    """A list of entries."""
    items = expect_list(value, f"the list for {called}")
    if not all(isinstance(item, dict) for item in items):
        raise NoSnapshotError(f"{called} is not a dict")
    return items  # type: ignore[return-value]


def whole(value: object, called: str, most: int = _MOST) -> int:
    """A whole number from 0; 0 for None."""
    if value is None:
        return 0
    if not isinstance(value, int) or not 0 <= value <= most:
        raise NoSnapshotError(f"{called} must be an integer from 0 to {most:,}")
    return value


def address(entry: Entry, key: str) -> int:
    """The address under a key of an entry; 0 if it is missing. torch writes it as a signed number."""
    value = entry.get(key)
    if isinstance(value, int) and -_MOST <= value < 0:
        return value + (1 << 64)
    return whole(value, f"{key!r} of an entry")


def number(entry: Entry, key: str, most: int = _MOST) -> int:
    """The number under a key of an entry; 0 if it is missing, as older versions of torch leave some out."""
    return whole(entry.get(key), f"{key!r} of an entry", most)


def name_of(value: object, called: str) -> str:
    """A text, cut, with lone surrogates written out, which no table can hold."""
    if not isinstance(value, str):
        raise NoSnapshotError(f"{called} is not a text")
    value = value[:_LONGEST]
    return value if value.isascii() else value.encode(errors="backslashreplace").decode()


def frame_row(frame: object) -> FrameRow:
    """A frame of a stack."""
    if not isinstance(frame, dict):
        raise NoSnapshotError("a frame is neither a dict nor a text")
    names = (name_of(frame.get(key, ""), f"{key!r} of a frame") for key in ("filename", "name"))
    filename, function = names
    line = frame.get("line")
    return FrameRow(filename, 0 if line in _NO_LINE else whole(line, "a line", (1 << 31) - 1), function)


def check_blocks(segments: list[Entry]) -> None:
    """Check how many blocks segments have. A file of a megabyte can name one list of blocks a million times."""
    number_of = sum(len(expect_list(segment.get("blocks", []), "'blocks' of a segment")) for segment in segments)
    if number_of > _MOST_BLOCKS:
        raise NoSnapshotError(f"its segments have {number_of:,} blocks")


#: A line of Python's traceback, as torch writes the stack of a forward in autograd's anomaly mode.
_FRAME = re.compile(r'File "(.+)", line (\d{1,9}), in (.+)')
#: Files of a notebook's cells: "<ipython-input-7-1a2b>", and "/tmp/ipykernel_12/345.py", whose name has no number.
_CELL = re.compile(r"ipython-input-(\d+)-|/ipykernel_\d+/\w+\.py$")
_CODES = {name: code for code, name in enumerate(ACTIONS)}
_NATIVE = ("torch::", "c10::", "at::")
_GAINS = (_CODES["segment_alloc"], _CODES["segment_map"])
_LOSSES = (_CODES["segment_free"], _CODES["segment_unmap"])
_PAGES = (_GAINS[1], _LOSSES[1])
_HELD = ("active_allocated", "active")  # states of blocks that tensors hold; "active" in snapshots without a history

Columns = dict[str, Array]


@dataclass
class ForeignSnapshot:
    """A snapshot's recording, and the number of blocks that were alive before its history began.

    ``is_inferred``: its phases, steps, layers and categories are known, as far as its stacks show.
    """

    recording: Recording
    notes: list[Note]
    num_before: int
    is_inferred: bool


@dataclass
class _Stacks:
    """Numbers the stacks. torch repeats the same list objects."""

    frames: dict[FrameRow, int] = field(default_factory=dict)
    stacks: dict[tuple[int, ...], int] = field(default_factory=dict)
    # By the id of a list of frames, and of a frame. The lists are kept, so that no other has the same id.
    _seen: dict[int, int] = field(default_factory=dict)
    _kept: list[object] = field(default_factory=list)
    _seen_frames: dict[int, int] = field(default_factory=dict)
    _cells: dict[str, int] = field(default_factory=dict)
    _rows: list[tuple[int, ...]] = field(default_factory=list)

    def of_events(self, entries: list[Entry]) -> list[int]:
        """The number of each event's stack. Below those of a backward in anomaly mode are the forward's frames."""
        lists = [entry.get("frames") for entry in entries]
        numbers = list(map(self._seen.get, map(id, lists)))
        if None in numbers:
            numbers = [*map(self.number, lists)]
        for at, entry in enumerate(entries):
            if "forward_frames" in entry:
                numbers[at] = self._joined(numbers[at], entry["forward_frames"])
        return numbers  # type: ignore[return-value]

    def _joined(self, number: int | None, forward: object) -> int:
        rows = [
            _FRAME.search(name_of(text, "a frame of a forward"))
            for text in expect_list(forward or [], "a forward's stack")
        ]
        made = [FrameRow(row[1], int(row[2]), row[3]) for row in reversed(rows) if row]  # traceback's innermost is last
        own = self._rows[number] if number is not None and number >= 0 else ()
        return self._stack((*own, *(self._numbered(row) for row in (BACKWARD, *made))))

    def number(self, frames: object) -> int:
        """The number of a stack; -1 without frames."""
        number = self._seen.get(id(frames))
        if number is None:
            rows = tuple(map(self._frame, expect_list(frames, "a stack"))) if frames else ()
            number = self._seen[id(frames)] = self._stack(rows) if rows else -1
            self._kept.append(frames)
        return number

    def _stack(self, rows: tuple[int, ...]) -> int:
        if rows not in self.stacks:
            self.stacks[rows] = len(self._rows)
            self._rows.append(rows)
        return self.stacks[rows]

    def _frame(self, frame: object) -> int:
        number = self._seen_frames.get(id(frame))
        if number is None:
            row = FrameRow("", 0, frame) if isinstance(frame, str) else frame_row(frame)
            number = self._seen_frames[id(frame)] = self._numbered(row)
        return number

    def _numbered(self, row: FrameRow) -> int:
        """The number of a frame. A notebook's cell has its own number, or how many cells came before it."""
        if cell := _CELL.search(row.filename):
            named = (
                f"In [{cell[1]}]" if cell[1] else f"cell {self._cells.setdefault(row.filename, len(self._cells) + 1)}"
            )
            row = row._replace(filename=named)
        return self.frames.setdefault(row, len(self.frames))


class _History:
    """The events of a device as columns, which take a tenth of the memory. Events of unknown actions are left out.

    ``len`` counts these, too. ``stack`` is also that of events that free. ``pool`` is a row of ``pools`` for events of
    segments that name their pool, else -1.
    """

    def __init__(self) -> None:
        self.stacks = _Stacks()
        self.unknown: Counter[str] = Counter()
        self.pools: dict[Pool, int] = {}
        self._pieces: list[Columns] = []
        self._num, self._moved = 0, 0.0

    def __len__(self) -> int:
        return self._num

    def take(self, events: list[object]) -> None:
        """Take events, and empty them and their list."""
        entries = expect_entries(events, "an event")
        self._num += len(entries)
        actions = [entry.get("action") for entry in entries]
        try:
            codes = [_CODES[action] for action in actions]  # type: ignore[index]
            known = entries
        except (KeyError, TypeError):
            names = [name_of(action, "an action") for action in actions]
            self.unknown.update(name for name in names if name not in _CODES)
            known = [entry for entry, name in zip(entries, names, strict=True) if name in _CODES]
            codes = [_CODES[name] for name in names if name in _CODES]
        if known:
            self._pieces.append(self._columns(known, np.array(codes, "u1")))
        for entry in entries:
            entry.clear()
        events.clear()

    def _columns(self, entries: list[Entry], action: Array) -> Columns:
        columns = {
            "action": action,
            "address": _addresses(entries),
            "size": _array([entry.get("size") for entry in entries], "<i8", "'size' of an entry", MOST_BYTES),
            "stream": _array([entry.get("stream") for entry in entries], "<u8"),
            "time_us": _array([entry.get("time_us") for entry in entries], "<i8"),
            "stack": np.array(self.stacks.of_events(entries), "<i4"),
            "pool": np.full(len(entries), -1, "<i4"),
        }
        self._moved += float(columns["size"].sum(dtype=float))
        if self._moved > _MOST_MOVED:
            raise NoSnapshotError(f"its events move {self._moved:,.0f} bytes")
        for row in np.flatnonzero(np.isin(action, (*_GAINS, *_LOSSES))).tolist():
            named = entries[row].get("pool_id", entries[row].get("segment_pool_id"))
            if named is not None:
                columns["pool"][row] = self.pools.setdefault(_pool(named), len(self.pools))
        return columns

    def columns(self) -> Columns:
        """All events."""
        kinds = {"action": "u1", "address": "<u8", "size": "<i8", "stream": "<u8", "time_us": "<i8"}
        kinds |= {"stack": "<i4", "pool": "<i4"}
        pieces, self._pieces = self._pieces, []
        return {
            name: np.concatenate([np.zeros(0, kind), *(piece.pop(name) for piece in pieces)])
            for name, kind in kinds.items()
        }


#: Events are looked for after so many pieces of a pickle without any, and after a quarter of those before.
_FIRST_LOOK, _NEXT_LOOK = 16, 4


class Histories:
    """Takes events out of their lists, as soon as they are unpickled: 300 MB of them would take 3.5 GB."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[list[object], _History]] = {}
        self._growing: list[object] = []
        self._num, self._num_idle = 0, 0

    def watch(self, memoized: Callable[[], list[object]]) -> None:
        """Take the events that were unpickled by now. The arguments are those of ``bounded.load_builtins``."""
        self._num += 1
        self._num_idle += 1
        if not self._growing and self._num_idle > max(_FIRST_LOOK, self._num // _NEXT_LOOK):
            self._num_idle = 0
            self._growing = next(filter(_is_history, memoized()), self._growing)
        if self._growing:
            self._num_idle = 0
            self.of(self._growing)

    def of(self, events: list[object]) -> _History:
        """The history of this list, with the events that it has now."""
        history = self._taken.setdefault(id(events), (events, _History()))[1]
        history.take(events)
        return history


def _is_history(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "action" in value[0]


def read_foreign(snapshot: Entry, device: int | None = None, histories: Histories | None = None) -> ForeignSnapshot:
    """Read a device, by default that with the longest history, or without any, with the most memory.

    The snapshot's histories are empty afterwards. ``histories`` has the events that were taken out of them before.

    Raises:
        NoSnapshotError: It is not a snapshot, or has nothing of the device.
    """
    histories = histories or Histories()
    lists = [expect_list(trace, "a history") for trace in expect_list(snapshot["device_traces"], "device_traces")]
    traces = [histories.of(trace) for trace in lists]
    segments = expect_entries(snapshot["segments"], "a segment")
    device = _device(traces, segments, device)
    trace = traces[device] if device < len(traces) else _History()
    own = [segment for segment in segments if _device_of(segment) == device]
    check_blocks(own)
    (rest, skipped), stacks = _with_skipped(trace.columns()), trace.stacks
    before, is_held = _alive_before(rest, own)
    has_history = bool(len(rest["action"]))
    time_us = int(rest["time_us"][0]) if has_history else 0
    reserved = _reserved_before(rest, own)
    others = [number for number, trace in enumerate(traces) if len(trace) and number != device]
    first = _first_columns(before, reserved, time_us, stacks)
    if more := _more_before(first, rest, own, _settings(snapshot)):
        before.append((0, more, None))
        first = _first_columns(before, reserved, time_us, stacks)
    recording = Recording(gpu=GpuRecord(device_index=device, alloc_conf=_settings(snapshot)))
    recording.frames, recording.stacks = list(stacks.frames), list(stacks.stacks)
    recording.num_events_before = len(first["action"])
    recording.segments_before = _segments_before(rest, list(trace.pools), own)
    recording.pools[device] = _private_pools(rest, list(trace.pools), own, len(first["action"]))
    events = {name: np.concatenate([first[name], rest.pop(name)]) for name in first}
    refused = _out_of_memory(events, recording)
    stack = events["stack"]
    if len(stack):
        events["op"] = np.full(len(stack), -1, "<i8")
        recording.events[device] = events | {"stack": np.where(events["action"] == _CODES["alloc"], stack, -1)}
    is_native = any(frame.function.startswith(_NATIVE) for frame in recording.frames)
    named = _annotations(snapshot, device)
    is_inferred = has_history and infer(recording, stack, named, is_native=is_native)
    limits = [notes.snapshot_action_unknown(name, count) for name, count in trace.unknown.items()]
    if before and has_history:
        limits.insert(0, notes.snapshot_starts_late(len(before), sum(size for _, size, _ in before)))
    known_limits = (
        (others, notes.snapshot_of_several_devices(device, others)),
        (not has_history, notes.snapshot_without_history(skipped)),
        (is_held and not own, notes.snapshot_without_segments()),
    )
    limits += [note for is_so, note in known_limits if is_so]
    inferred = notes.snapshot_inferred(is_native) if is_inferred else notes.snapshot_without_layers(bool(stacks.stacks))
    return ForeignSnapshot(recording, [*limits, *refused, inferred], len(before), is_inferred)


def _out_of_memory(events: Columns, recording: Recording) -> list[Note]:
    """A note on requests that the GPU could not serve, and the last one's facts."""
    refused = np.flatnonzero(events["action"] == _CODES["oom"])
    if not len(refused):
        return []
    stack, size, free = (int(events[name][refused[-1]]) for name in ("stack", "size", "address"))
    line = stack_lines(recording.frames, [recording.stacks[stack]])[0] if stack >= 0 else ""
    return [notes.snapshot_ran_out(len(refused), size, free, line)]


def _with_skipped(trace: Columns) -> tuple[Columns, str]:
    """The history with what ``skip_actions`` left out of it: one of a free's from the other.

    Without allocations, or without frees, it means nothing: it is then empty, and their name is returned.
    """
    action, at = trace["action"], trace["address"]
    alloc, *frees = (_CODES[name] for name in ("alloc", "free_requested", "free_completed"))
    rows = np.flatnonzero(np.isin(action, (alloc, *frees)))
    rows = rows[np.argsort(at[rows], kind="stable")]
    follows = np.diff(at[rows]) == 0
    pairs = {(first, then) for first, then in np.unique(action[[rows[:-1], rows[1:]]][:, follows], axis=1).T.tolist()}
    lacks = {code for code in (alloc, *frees) if not (action == code).any()}
    if (lacks == {alloc} and pairs & {(frees[1], frees[0])}) or (lacks == {*frees} and (alloc, alloc) in pairs):
        return {name: column[:0] for name, column in trace.items()}, "allocations" if alloc in lacks else "frees"
    for code, other, shows in ((*frees, (alloc, frees[1])), (*frees[::-1], (frees[0], alloc))):
        if lacks == {code} and shows in pairs:
            row = np.repeat(np.arange(len(action)), 1 + (action == other))
            is_second = np.diff(row, prepend=-1) == 0
            trace = {name: column[row] for name, column in trace.items()}
            trace["action"][np.append(is_second[1:], False)] = frees[0]
            trace["action"][is_second] = frees[1]
    return trace, ""


def _device_of(segment: Entry) -> int:
    return number(segment, "device", MOST_DEVICES)


def _device(traces: list[_History], segments: list[Entry], wanted: int | None) -> int:
    """The device that is wanted, else that with the longest history, or without any, with the most memory."""
    sizes: Counter[int] = Counter()
    for segment in segments:
        sizes[_device_of(segment)] += number(segment, "total_size", MOST_BYTES)
    recorded = [number for number, trace in enumerate(traces) if len(trace)]
    if wanted is None:
        longest = max(recorded, key=lambda device: len(traces[device]), default=None)
        return max(sizes, key=sizes.__getitem__, default=0) if longest is None else longest
    if wanted not in {*recorded, *sizes}:
        there = ", ".join(map(str, sorted({*recorded, *sizes})))
        raise NoDeviceError(f"nothing of GPU {wanted}", f"it has that of {there or 'none'}")
    return wanted


def _settings(snapshot: Entry) -> str:
    settings = snapshot.get("allocator_settings")
    if not isinstance(settings, dict):
        return ""
    text = settings.get("PYTORCH_ALLOC_CONF") or settings.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return name_of(text, "the allocator's settings")


def _annotations(snapshot: Entry, device: int) -> list[Annotation]:
    """The ranges that a snapshot names, in the order in which they end. One may begin before, or end after it."""
    begun: dict[str, list[int]] = {}
    ranges = []
    for entry in expect_entries(snapshot.get("external_annotations") or [], "an annotation"):
        if number(entry, "device", MOST_DEVICES) != device:
            continue
        name, at = name_of(entry.get("name"), "the name of an annotation"), number(entry, "time_us")
        if entry.get("stage") == "START":
            begun.setdefault(name, []).append(at)
        else:
            ranges.append(Annotation(name, begun[name].pop() if begun.get(name) else 0, at))
    return ranges + [Annotation(name, at, _MOST) for name, times in begun.items() for at in times]


def _alive_before(trace: Columns, segments: list[Entry]) -> tuple[list[tuple[int, int, object]], bool]:
    """Blocks from before the history: (address, bytes, frames); and whether it leaves some that it made."""
    action, at = trace["action"], trace["address"]
    made, freed = block_lives(action, at)
    is_lost = action == _CODES["free_requested"]
    is_lost[freed[freed < len(action)]] = False
    lost, alive = np.flatnonzero(is_lost), set(at[made[freed == len(action)]].tolist())
    before: list[tuple[int, int, object]] = [
        (start, size, None) for start, size in zip(at[lost].tolist(), trace["size"][lost].tolist(), strict=True)
    ]
    for segment in segments:
        end = address(segment, "address")
        for block in expect_entries(segment.get("blocks", []), "a block"):
            size = number(block, "size", MOST_BYTES)
            here = address(block, "address") or end  # torch 2.1 writes no addresses: blocks are contiguous
            if block.get("state") in _HELD and here not in alive:
                before.append((here, size, _block_frames(block)))
            end = here + size
    return before, bool(alive)


def _more_before(first: Columns, rest: Columns, segments: list[Entry], settings: str) -> int:
    """Bytes that the end holds and the history does not explain, if any: a block may be given more than is requested,
    and how much follows from what was free before the history.
    """
    if not len(rest["action"]):
        return 0
    action, address_, size = (np.concatenate([first[name], rest[name]]) for name in ("action", "address", "size"))
    explained = int(replay(action, address_, size, parse_settings(settings)).allocated_bytes[-1])
    blocks = (block for segment in segments for block in expect_entries(segment.get("blocks", []), "a block"))
    held = sum(number(block, "size", MOST_BYTES) for block in blocks if block.get("state") in _HELD)
    return max(held - explained, 0)


def _block_frames(block: Entry) -> object:
    """Frames of a block. Older snapshots keep them in the block's history."""
    history = block.get("history")
    if isinstance(history, list) and history and isinstance(history[0], dict):
        return history[0].get("frames")
    return block.get("frames")


def _moves(trace: Columns, pools: list[Pool], order: int = 1) -> Iterator[tuple[int, bool, Segment, bool]]:
    """The events that take segments and pages, or give them back; backwards, if ``order`` is -1.

    Each has its number, whether it takes, the segment, and whether it names the pool: the column has rows of ``pools``.
    """
    events = np.flatnonzero(np.isin(trace["action"], (*_GAINS, *_LOSSES)))[::order]
    names = ("action", "address", "size", "stream", "pool")
    rows = zip(events.tolist(), *(trace[name][events].tolist() for name in names), strict=True)
    for event, action, at, size, stream, pool in rows:
        of = pools[pool] if pool >= 0 else COMMON_POOL
        yield event, action in _GAINS, Segment(at & _MOST, size, stream, action in _PAGES, of), pool >= 0


def _reserved_before(trace: Columns, segments: list[Entry]) -> int:
    gained, lost = (int(trace["size"][np.isin(trace["action"], of)].sum()) for of in (_GAINS, _LOSSES))
    end = sum(number(segment, "total_size", MOST_BYTES) for segment in segments)
    return max(end - gained + lost, 0)


def _segments_before(trace: Columns, pools: list[Pool], segments: list[Entry]) -> list[Segment]:
    """The segments before the history began: those at its end, with the history played backwards."""
    held = Segments(
        Segment(
            address(segment, "address") & _MOST,
            number(segment, "total_size", MOST_BYTES),
            number(segment, "stream"),
            bool(segment.get("is_expandable")),
            _pool(segment.get("segment_pool_id")),
        )
        for segment in segments
    )
    for _, is_gain, segment, _ in _moves(trace, pools, -1):
        (held.remove if is_gain else held.add)(segment)
    return held.to_list()


def _private_pools(trace: Columns, pools: list[Pool], segments: list[Entry], num_before: int) -> dict[int, Pool]:
    """The private pools, by the events that take segments. Older snapshots name them only in what the end has."""
    at_the_end = {address(entry, "address") & _MOST: _pool(entry.get("segment_pool_id")) for entry in segments}
    taken = {
        num_before + event: segment.pool_id if is_named else at_the_end.get(segment.address, COMMON_POOL)
        for event, is_gain, segment, is_named in _moves(trace, pools)
        if is_gain
    }
    return {event: pool for event, pool in taken.items() if pool != COMMON_POOL}


def _pool(value: object) -> Pool:
    if not isinstance(value, list | tuple) or len(value) != len(COMMON_POOL):
        return COMMON_POOL
    return whole(value[0], "a pool's number"), whole(value[1], "a pool's number")


def _first_columns(before: list[tuple[int, int, object]], reserved: int, time_us: int, stacks: _Stacks) -> Columns:
    """Synthetic events in front of the history, for what was alive before it."""
    # The segments' addresses are unknown. At address 0 they serve no block.
    rows = [(_CODES["segment_alloc"], 0, reserved, -1)] if reserved else []
    rows += [(_CODES["alloc"], at, size, stacks.number(frames)) for at, size, frames in before]
    action, addresses, size, stack = zip(*rows, strict=True) if rows else ((), (), (), ())
    return {
        "action": np.array(action, "u1"),
        "address": np.array(addresses, "<u8"),
        "size": np.array(size, "<i8"),
        "stream": np.zeros(len(rows), "<u8"),
        "time_us": np.full(len(rows), time_us, "<i8"),
        "stack": np.array(stack, "<i4"),
    }


def _addresses(entries: list[Entry]) -> Array:
    """Addresses of events; of one that ran out of memory, what was free."""
    values = [entry.get("addr") for entry in entries]
    try:
        array = np.array(values)
        if array.dtype.kind in "iu" and array.min(initial=0) >= 0:
            return array.astype("<u8")
    except (ValueError, OverflowError):
        pass  # lists of several lengths
    keys = ("addr" if "addr" in entry else "device_free" for entry in entries)
    return np.array([address(entry, key) for key, entry in zip(keys, entries, strict=True)], "<u8")


def _array(values: list[object], kind: str, called: str = "a value of an event", most: int = _MOST) -> Array:
    try:
        array = np.array(values)
        if array.dtype.kind in "iu" and array.ndim == 1 and array.min(initial=0) >= 0 and array.max(initial=0) <= most:
            return array.astype(kind)
    except (ValueError, OverflowError):
        pass  # lists of several lengths
    return np.array([whole(value, called, most) for value in values], kind)  # some are missing
