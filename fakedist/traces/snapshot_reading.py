"""Reads any torch memory snapshot as a recording: blocks, history and stacks, and what these show.

The history is a ring buffer: once it is full, torch drops its beginning. Blocks that were alive before are added in
front of it: those freed without an allocation, and those alive at the end that were never allocated.

Missing values count as 0, as older versions of torch leave some out. A value that torch never writes, such as a text
for a size, makes the file no snapshot.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fakedist.analysis.recording import Array, Recording
from fakedist.analysis.replay import COMMON_POOL, Pool, Segment, Segments, parse_settings, replay
from fakedist.analysis.stack_lines import BACKWARD, stack_lines
from fakedist.rundir import notes
from fakedist.rundir.notes import Note
from fakedist.rundir.records import GpuRecord
from fakedist.rundir.rows import FrameRow
from fakedist.rundir.schema import ACTIONS
from fakedist.traces.inferring import Annotation, infer

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
#: Longer texts are cut. A path of Linux has at most so many characters.
_LONGEST = 4096


class NoSnapshotError(Exception):
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
    return FrameRow(filename, whole(frame.get("line"), "a line", (1 << 31) - 1), function)


def check_blocks(segments: list[Entry]) -> None:
    """Check how many blocks segments have. A file of a megabyte can name one list of blocks a million times."""
    number_of = sum(len(expect_list(segment.get("blocks", []), "'blocks' of a segment")) for segment in segments)
    if number_of > _MOST_BLOCKS:
        raise NoSnapshotError(f"its segments have {number_of:,} blocks")


def check_sizes(trace: list[Entry]) -> None:
    """Check that sizes are those of a GPU's memory, and that all of them together are a figure."""
    sizes = np.array([entry.get("size") for entry in trace], object)
    try:
        bytes_ = sizes.astype("i8")  # fast; None, a text or a number of more bits is none
        moved = bytes_.astype(float).sum()
        is_fine = bool(((bytes_ >= 0) & (bytes_ <= MOST_BYTES)).all())
    except (TypeError, ValueError, OverflowError):
        is_fine = False
    if not is_fine:
        moved = sum(number(entry, "size", MOST_BYTES) for entry in trace)
    if moved > _MOST_MOVED:
        raise NoSnapshotError(f"its events move {moved:,.0f} bytes")


#: A line of Python's traceback, as torch writes the stack of a forward in autograd's anomaly mode.
_FRAME = re.compile(r'File "(.+)", line (\d{1,9}), in (.+)')
#: Files of a notebook's cells: "<ipython-input-7-1a2b>", and "/tmp/ipykernel_12/345.py", whose name has no number.
_CELL = re.compile(r"ipython-input-(\d+)-|/ipykernel_\d+/\w+\.py$")
_CODES = {name: code for code, name in enumerate(ACTIONS)}
_NATIVE = ("torch::", "c10::", "at::")
_GAINS, _LOSSES = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_HELD = ("active_allocated", "active")  # states of blocks that tensors hold; "active" in snapshots without a history

Columns = dict[str, Array]
#: Columns as lists, whose values may still be of any kind, or as arrays.
Values = Mapping[str, Sequence[object] | Array]


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
    # By the id of a list of frames, and of a frame. The snapshot keeps them all alive.
    _seen: dict[int, int] = field(default_factory=dict)
    _seen_frames: dict[int, int] = field(default_factory=dict)
    _cells: dict[str, int] = field(default_factory=dict)
    _rows: list[tuple[int, ...]] = field(default_factory=list)

    def of_event(self, entry: Entry) -> int:
        """The number of an event's stack. Below those of a backward in anomaly mode are the forward's frames."""
        number, forward = self.number(entry.get("frames")), entry.get("forward_frames")
        if not forward:
            return number
        rows = [
            _FRAME.search(name_of(text, "a frame of a forward")) for text in expect_list(forward, "a forward's stack")
        ]
        made = [FrameRow(row[1], int(row[2]), row[3]) for row in reversed(rows) if row]  # traceback's innermost is last
        own = self._rows[number] if number >= 0 else ()
        return self._stack((*own, *(self._numbered(row) for row in (BACKWARD, *made))))

    def number(self, frames: object) -> int:
        """The number of a stack; -1 without frames."""
        if not frames:
            return -1
        if id(frames) not in self._seen:
            rows = tuple(map(self._frame, expect_list(frames, "a stack")))
            self._seen[id(frames)] = self._stack(rows)
        return self._seen[id(frames)]

    def _stack(self, rows: tuple[int, ...]) -> int:
        if rows not in self.stacks:
            self.stacks[rows] = len(self._rows)
            self._rows.append(rows)
        return self.stacks[rows]

    def _frame(self, frame: object) -> int:
        if id(frame) not in self._seen_frames:
            row = FrameRow("", 0, frame) if isinstance(frame, str) else frame_row(frame)
            self._seen_frames[id(frame)] = self._numbered(row)
        return self._seen_frames[id(frame)]

    def _numbered(self, row: FrameRow) -> int:
        """The number of a frame. A notebook's cell has its own number, or how many cells came before it."""
        if cell := _CELL.search(row.filename):
            named = (
                f"In [{cell[1]}]" if cell[1] else f"cell {self._cells.setdefault(row.filename, len(self._cells) + 1)}"
            )
            row = row._replace(filename=named)
        return self.frames.setdefault(row, len(self.frames))


def read_foreign(snapshot: Entry, device: int | None = None) -> ForeignSnapshot:
    """Read a device, by default that with the longest history, or without any, with the most memory.

    The snapshot's histories are empty afterwards: events as columns take a fifth of the memory.

    Raises:
        NoSnapshotError: It is not a snapshot, or has nothing of the device.
    """
    traces = [expect_list(trace, "a history") for trace in expect_list(snapshot["device_traces"], "device_traces")]
    segments = expect_entries(snapshot["segments"], "a segment")
    device = _device(traces, segments, device)
    trace = expect_entries(traces[device], "an event") if device < len(traces) else []
    own = [segment for segment in segments if _device_of(segment) == device]
    check_blocks(own)
    actions = [name_of(entry.get("action"), "an action") for entry in trace]
    check_sizes(trace)
    unknown = Counter(action for action in actions if action not in _CODES)
    stacks = _Stacks()
    known = [entry for entry, action in zip(trace, actions, strict=True) if action in _CODES]
    before, is_held = _alive_before(known, own)
    time_us = number(known[0], "time_us") if known else 0
    rest, has_history = _columns(known, stacks), bool(known)
    moves = {index: entry for index, entry in enumerate(known) if entry["action"] in (*_GAINS, *_LOSSES)}
    reserved = _reserved_before(moves, own)
    others = [number for number, trace in enumerate(traces) if trace and number != device]
    refused = [entry for entry in known if entry["action"] == "oom"]
    known.clear()
    actions.clear()
    for history in traces:
        history.clear()
    first = _first_columns(before, reserved, time_us, stacks)
    if more := _more_before(first, rest, own, _settings(snapshot)):
        before.append((0, more, None))
        first = _first_columns(before, reserved, time_us, stacks)
    recording = Recording(gpu=GpuRecord(device_index=device, alloc_conf=_settings(snapshot)))
    recording.frames, recording.stacks = list(stacks.frames), list(stacks.stacks)
    recording.num_events_before = len(first["op"])
    recording.segments_before = _segments_before(moves, own)
    recording.pools[device] = _pools(moves, own, len(first["op"]))
    if len(first["op"]) + len(rest["op"]):
        events = {name: np.concatenate([first[name], rest[name]]) for name in first}
        stack = events["stack"]
        recording.events[device] = events | {"stack": np.where(events["action"] == _CODES["alloc"], stack, -1)}
    is_native = any(frame.function.startswith(_NATIVE) for frame in recording.frames)
    named = _annotations(snapshot, device)
    is_inferred = has_history and infer(recording, stack.astype(np.int64), named, is_native=is_native)
    limits = [notes.snapshot_action_unknown(name, count) for name, count in unknown.items()]
    if before and has_history:
        limits.insert(0, notes.snapshot_starts_late(len(before), sum(size for _, size, _ in before)))
    known_limits = (
        (others, notes.snapshot_of_several_devices(device, others)),
        (not has_history, notes.snapshot_without_history()),
        (is_held and not own, notes.snapshot_without_segments()),
    )
    limits += [note for is_so, note in known_limits if is_so]
    limits += _out_of_memory(refused, recording, stacks)
    limits.append(
        notes.snapshot_inferred(is_native) if is_inferred else notes.snapshot_without_layers(bool(recording.stacks))
    )
    return ForeignSnapshot(recording, limits, len(before), is_inferred)


def _out_of_memory(refused: list[Entry], recording: Recording, stacks: _Stacks) -> list[Note]:
    """A note on requests that the GPU could not serve, and the last one's facts."""
    if not refused:
        return []
    stack = stacks.of_event(refused[-1])
    line = stack_lines(recording.frames, [recording.stacks[stack]])[0] if 0 <= stack < len(recording.stacks) else ""
    size, free = (number(refused[-1], key, MOST_BYTES) for key in ("size", "device_free"))
    return [notes.snapshot_ran_out(len(refused), size, free, line)]


def _device_of(segment: Entry) -> int:
    return number(segment, "device", MOST_DEVICES)


def _device(traces: list[list[object]], segments: list[Entry], wanted: int | None) -> int:
    """The device that is wanted, else that with the longest history, or without any, with the most memory."""
    sizes: Counter[int] = Counter()
    for segment in segments:
        sizes[_device_of(segment)] += number(segment, "total_size", MOST_BYTES)
    recorded = [number for number, trace in enumerate(traces) if trace]
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


def _alive_before(trace: list[Entry], segments: list[Entry]) -> tuple[list[tuple[int, int, object]], bool]:
    """Blocks from before the history: (address, bytes, frames); and whether it leaves some that it made."""
    alive: set[int] = set()
    before: list[tuple[int, int, object]] = []
    for entry in trace:
        action, at = entry["action"], address(entry, "addr")
        if action == "alloc":
            alive.add(at)
        elif action == "free_requested":
            if at in alive:
                alive.remove(at)
            else:
                before.append((at, number(entry, "size", MOST_BYTES), None))
    for segment in segments:
        at = address(segment, "address")
        for block in expect_entries(segment.get("blocks", []), "a block"):
            size = number(block, "size", MOST_BYTES)
            here = address(block, "address") or at  # torch 2.1 writes no addresses: blocks are contiguous
            if block.get("state") in _HELD and here not in alive:
                before.append((here, size, _block_frames(block)))
            at = here + size
    return before, bool(alive)


def _more_before(first: Columns, rest: Columns, segments: list[Entry], settings: str) -> int:
    """Bytes that the end holds and the history does not explain, if any: a block may be given more than is requested,
    and how much follows from what was free before the history.
    """
    if not len(rest["op"]):
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


def _reserved_before(moves: dict[int, Entry], segments: list[Entry]) -> int:
    end = sum(number(segment, "total_size", MOST_BYTES) for segment in segments)
    gained = sum(number(entry, "size", MOST_BYTES) for entry in moves.values() if entry["action"] in _GAINS)
    lost = sum(number(entry, "size", MOST_BYTES) for entry in moves.values() if entry["action"] in _LOSSES)
    return max(end - gained + lost, 0)


def _segments_before(moves: dict[int, Entry], segments: list[Entry]) -> list[Segment]:
    """The segments before the history began: those at its end, with the history played backwards."""
    held = Segments(
        _segment(segment, "address", "total_size", bool(segment.get("is_expandable"))) for segment in segments
    )
    for entry in reversed(moves.values()):
        if (action := entry["action"]) in _GAINS:
            held.remove(_segment(entry, "addr", "size", action == "segment_map"))
        elif action in _LOSSES:
            held.add(_segment(entry, "addr", "size", action == "segment_unmap"))
    return held.to_list()


def _segment(entry: Entry, key: str, size: str, is_expandable: bool) -> Segment:
    """The segment of an entry, or the pages that it maps or unmaps."""
    pool = _pool(entry.get("segment_pool_id", entry.get("pool_id")))
    at, bytes_ = address(entry, key) & _MOST, number(entry, size, MOST_BYTES)
    return Segment(at, bytes_, number(entry, "stream"), is_expandable, pool)


def _pools(moves: dict[int, Entry], segments: list[Entry], num_before: int) -> dict[int, Pool]:
    """The private pools of segments, by their events. Older snapshots name pools only in what the end has."""
    at_the_end = {address(segment, "address"): segment.get("segment_pool_id") for segment in segments}
    pools = {}
    for index, entry in moves.items():
        if entry["action"] in _GAINS:
            pool = _pool(entry.get("pool_id", at_the_end.get(address(entry, "addr"))))
            if pool != COMMON_POOL:
                pools[num_before + index] = pool
    return pools


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
    columns: Values = {"action": action, "address": np.array(addresses, "<u8"), "size": size, "stack": stack}
    return _arrays({**columns, "stream": [0] * len(rows), "time_us": [time_us] * len(rows)})


def _columns(trace: list[Entry], stacks: _Stacks) -> Columns:
    """The history as columns, since it may have millions of events."""
    return _arrays(
        {
            "action": [_CODES[str(entry["action"])] for entry in trace],
            "address": _addresses(trace),
            "size": [entry.get("size") for entry in trace],
            "stream": [entry.get("stream") for entry in trace],
            "time_us": [entry.get("time_us") for entry in trace],
            "stack": [
                stacks.of_event(entry) if "forward_frames" in entry else stacks.number(entry.get("frames"))
                for entry in trace
            ],
        }
    )


def _addresses(trace: list[Entry]) -> Sequence[object] | Array:
    """Addresses of events, as plain numbers where all are there, and not negative."""
    keys = ["addr" if "addr" in entry else "device_free" for entry in trace]
    values = [entry.get(key) for key, entry in zip(keys, trace, strict=True)]
    if all(type(value) is int and value >= 0 for value in values):
        return values
    return np.array([address(entry, key) for key, entry in zip(keys, trace, strict=True)], "<u8")


def _arrays(columns: Values) -> Columns:
    kinds = {"action": "u1", "address": "<u8", "size": "<i8", "stream": "<u8", "time_us": "<i8", "stack": "<i4"}
    arrays = {name: _array(columns[name], kind) for name, kind in kinds.items()}
    return arrays | {"op": np.full(len(columns["action"]), -1, "<i8")}


def _array(values: Sequence[object] | Array, kind: str) -> Array:
    try:
        array = np.asarray(values)
        if kind == "<i4" or (array.dtype == "<u8" and kind == "<u8"):
            return array.astype(kind)
        if array.dtype.kind in "iu" and array.ndim == 1 and array.min(initial=0) >= 0:
            return array.astype(kind)
    except (ValueError, OverflowError):
        pass  # lists of several lengths
    return np.array([whole(value, "a value of an event") for value in values], kind)  # some are missing
