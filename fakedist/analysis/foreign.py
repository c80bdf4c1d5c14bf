"""Any torch memory snapshot as a recording: its blocks, its history and its stacks; nobody knows layers or phases.

The history is a ring: when it was full, torch forgot its beginning. What was alive before is put in front of it, from
the frees without an allocation and from the blocks that are there at the end and were never allocated in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fakedist.analysis.recording import Recording
from fakedist.run.schema import ACTIONS

_CODES = {name: code for code, name in enumerate(ACTIONS)}
_GAINS, _LOSSES = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_HELD = ("active_allocated", "active")  # blocks that tensors hold; "active" in snapshots without a history


@dataclass
class ForeignSnapshot:
    """A snapshot, read.

    Attributes:
        recording: What it says of one device.
        notes: What a reader must know about it, one sentence each.
        num_before: Blocks that were alive before its history began.
    """

    recording: Recording
    notes: list[str]
    num_before: int


@dataclass
class _Stacks:
    """Stacks by number; torch repeats them as objects."""

    frames: dict[tuple[str, int, str], int] = field(default_factory=dict)
    stacks: dict[tuple[int, ...], int] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)  # id of a list of frames, all of which the snapshot keeps

    def number(self, frames: Any) -> int:
        """Number of a stack; -1 for none."""
        if not isinstance(frames, list) or not frames:
            return -1
        if id(frames) not in self._seen:
            rows = tuple(self.frames.setdefault(_frame(each), len(self.frames)) for each in frames)
            self._seen[id(frames)] = self.stacks.setdefault(rows, len(self.stacks))
        return self._seen[id(frames)]


def _frame(frame: Any) -> tuple[str, int, str]:
    if not isinstance(frame, dict):
        return "", 0, str(frame)
    return str(frame.get("filename", "")), _int(frame.get("line")), str(frame.get("name", ""))


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def read_foreign(snapshot: dict[str, Any]) -> ForeignSnapshot:
    """The device of a snapshot with the longest history, or with the most memory where there is none.

    Args:
        snapshot: What :func:`fakedist.run.snapshot.read_snapshot` gave.
    """
    traces = [trace if isinstance(trace, list) else [] for trace in snapshot["device_traces"]]
    segments = [segment for segment in snapshot["segments"] if isinstance(segment, dict)]
    device = _device(traces, segments)
    trace = [entry for entry in traces[device] if isinstance(entry, dict)] if device < len(traces) else []
    own = [segment for segment in segments if _int(segment.get("device")) == device]
    unknown = Counter(str(entry.get("action")) for entry in trace if entry.get("action") not in _CODES)
    stacks = _Stacks()
    known = [entry for entry in trace if entry.get("action") in _CODES]
    before = _alive_before(known, own)
    rows = [*_first_rows(before, _reserved_before(known, own), known, stacks), *_rows(known, stacks)]
    recording = Recording(gpu={"device_index": device, "alloc_conf": _settings(snapshot)})
    recording.marks = {name: np.zeros(0, "i8") for name in ("op", "address", "category", "layer", "bytes")}
    recording.frames, recording.stacks = list(stacks.frames), list(stacks.stacks)
    if rows:
        recording.events[device] = _columns(rows)
    notes = [f"entries of the unknown action {name!r} were left out: {count}" for name, count in unknown.items()]
    if before and known:
        notes.insert(0, _overflow_note(len(before), sum(size for _, size, _ in before)))
    others = [number for number, each in enumerate(traces) if each and number != device]
    if others:
        notes.append(f"this is cuda:{device}; the snapshot has a history of {_named(others)} too")
    if not known:
        notes.append("the snapshot has no history (torch.cuda.memory._record_memory_history was off): its end is shown")
    notes.append("a snapshot of torch says nothing of layers, phases and categories")
    return ForeignSnapshot(recording, notes, len(before))


def _overflow_note(number: int, bytes_: int) -> str:
    were = "1 block was" if number == 1 else f"{number} blocks were"
    return (
        f"{were} alive before the history begins ({bytes_} bytes): shown at its beginning, in sizes rounded to 512 "
        "bytes; a peak before that is not in the snapshot"
    )


def _named(devices: list[int]) -> str:
    return ", ".join(f"cuda:{device}" for device in devices)


def _device(traces: list[list[Any]], segments: list[dict[str, Any]]) -> int:
    if any(traces):
        return max(range(len(traces)), key=lambda device: len(traces[device]))
    sizes: Counter[int] = Counter()
    for segment in segments:
        sizes[_int(segment.get("device"))] += _int(segment.get("total_size"))
    return max(sizes, key=sizes.__getitem__, default=0)


def _settings(snapshot: dict[str, Any]) -> str:
    """PYTORCH_CUDA_ALLOC_CONF, where the snapshot has it."""
    settings = snapshot.get("allocator_settings")
    if not isinstance(settings, dict):
        return ""
    return str(settings.get("PYTORCH_ALLOC_CONF") or settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")


def _alive_before(trace: list[dict[str, Any]], segments: list[dict[str, Any]]) -> list[tuple[int, int, Any]]:
    """Blocks that were alive before the history: (address, bytes, frames)."""
    alive: set[int] = set()
    found: list[tuple[int, int, Any]] = []
    for entry in trace:
        action, at = entry["action"], _int(entry.get("addr"))
        if action == "alloc":
            alive.add(at)
        elif action == "free_requested":
            if at in alive:
                alive.remove(at)
            else:
                found.append((at, _int(entry.get("size")), None))
    for segment in segments:
        at = _int(segment.get("address"))
        for block in segment.get("blocks") or []:
            size = _int(block.get("size"))
            here = _int(block.get("address")) or at  # 2.1 gives no addresses: blocks lie one after the other
            if block.get("state") in _HELD and here not in alive:
                found.append((here, size, _block_frames(block)))
            at = here + size
    return found


def _block_frames(block: dict[str, Any]) -> Any:
    """Frames of a block; older snapshots keep them in its history."""
    history = block.get("history")
    if isinstance(history, list) and history and isinstance(history[0], dict):
        return history[0].get("frames")
    return block.get("frames")


def _reserved_before(trace: list[dict[str, Any]], segments: list[dict[str, Any]]) -> int:
    """Bytes in segments before the history."""
    end = sum(_int(segment.get("total_size")) for segment in segments)
    gained = sum(_int(entry.get("size")) for entry in trace if entry["action"] in _GAINS)
    lost = sum(_int(entry.get("size")) for entry in trace if entry["action"] in _LOSSES)
    return max(end - gained + lost, 0)


_Row = tuple[int, int, int, int, int, int]  # action, address, size, stream, time_us, stack


def _first_rows(
    before: list[tuple[int, int, Any]], reserved: int, trace: list[dict[str, Any]], stacks: _Stacks
) -> Iterable[_Row]:
    time_us = _int(trace[0].get("time_us")) if trace else 0
    if reserved:
        # Where these segments are is not known; at address 0 they serve no block.
        yield _CODES["segment_alloc"], 0, reserved, 0, time_us, -1
    for at, size, frames in before:
        yield _CODES["alloc"], at, size, 0, time_us, stacks.number(frames)


def _rows(trace: list[dict[str, Any]], stacks: _Stacks) -> Iterable[_Row]:
    for entry in trace:
        action = entry["action"]
        at = entry.get("addr", entry.get("device_free"))
        stack = stacks.number(entry.get("frames")) if action == "alloc" else -1
        rest = (_int(entry.get("size")), _int(entry.get("stream")), _int(entry.get("time_us")), stack)
        yield _CODES[action], _int(at), *rest


def _columns(rows: list[_Row]) -> dict[str, Any]:
    kinds = {"action": "u1", "address": "<u8", "size": "<i8", "stream": "<u8", "time_us": "<i8", "stack": "<i4"}
    columns = dict(zip(kinds, zip(*rows, strict=True), strict=True))
    mask = (1 << 64) - 1  # a stream may be written as a negative number
    found: dict[str, Any] = {
        name: np.array([value & mask for value in columns[name]] if kind == "<u8" else columns[name], kind)
        for name, kind in kinds.items()
    }
    return found | {"op": np.full(len(rows), -1, "<i8")}
