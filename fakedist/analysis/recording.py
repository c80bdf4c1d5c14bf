"""Reads a journal into memory: the rank's whole recording, as arrays."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fakedist.analysis.timed.kernels import kernel_record
from fakedist.analysis.timed.paths import LayerNumbers
from fakedist.analysis.timed.profiler import profiler_trace
from fakedist.run.directory import JOURNAL_NAME, KERNELS_NAME, SMI_NAME
from fakedist.run.journal import damaged, read_journal
from fakedist.run.kernels import KERNEL_TYPES
from fakedist.run.plain import from_plain
from fakedist.run.smi_calls import calls_notes
from fakedist.run.step_time import KernelSource

Array = npt.NDArray[Any]

_EVENT_TYPES = {"action": "u1", "address": "<u8", "size": "<i8", "stream": "<u8", "time_us": "<i8", "op": "<i8"} | {
    "stack": "<i4"
}
_MARK_TYPES = {"op": "<i8", "address": "<u8", "category": "u1", "layer": "<i4", "start": "<i8", "bytes": "<i8"}
#: Rows about compiled graphs: their code (number, filename, [(line, module)], [(root, line, module)]), the layers of
#: numbered modules (number, layers), their calls (op, code, placing), and the inputs whose memory they reuse (op,
#: address, line, layer). See ``record/placing.py``.
GRAPH_ROWS = ("generated", "placings", "graphs", "held")
#: Tables that arrive in pieces. Each record carries only the new rows.
_ROWS = ("layers", "operations", "scopes", "regions", "collectives", "groups", "invented", *GRAPH_ROWS)
_SIMULATED = "each kernel takes 1 us on the virtual GPU: their order is the job's, their times nobody's"


@dataclass
class Recording:
    """What one rank recorded.

    Attributes:
        gpu: The record about the GPU; empty if the rank died before it was known.
        rows: Rows of layers, operations, scopes, regions, collectives, groups and made-up values, as recorded.
        op_operation: Operation id of each numbered operation.
        op_scope: Scope id of each numbered operation.
        marks: Columns op, address, category, layer, start, bytes.
        events: By device, columns action, address, size, stream, time_us, op, stack.
        frames: (filename, line, function) of each frame.
        stacks: Indices into ``frames``, innermost first.
        kernels: Columns of the timed step's kernels (``run.kernels.KERNEL_TYPES``). Texts are indices into
            ``kernel_texts``.
        kernel_texts: The texts that ``kernels`` refers to.
        profiled: What torch.profiler saw of the timed step; empty if it did not run.
        timed_step: The step that was timed separately, after the recorded ones; -1 if none was.
        kernel_source: Where the kernels come from; None without kernels.
        steps: Records of the steps that ended.
        stats: The allocator's statistics at the end, by device.
        out_of_memory: The last request that failed, if any did.
        nccl: NCCL's version and environment; empty in a recording by an older fakedist.
        bound: Numbers of groups that were bound to a device.
        outside: Used and reserved bytes of the real GPU at the end; empty on a virtual GPU.
        outcome: How the rank ended; empty if it was killed.
        unanswered: Number of calls of each CUDA function that was refused.
        notes: The rank's own notes.
        truncated: Whether the journal ends in the middle of a record.
    """

    gpu: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, list[tuple[Any, ...]]] = field(default_factory=lambda: {name: [] for name in _ROWS})
    op_operation: Array = field(default_factory=lambda: np.zeros(0, "u4"))
    op_scope: Array = field(default_factory=lambda: np.zeros(0, "u4"))
    marks: dict[str, Array] = field(default_factory=dict)
    events: dict[int, dict[str, Array]] = field(default_factory=dict)
    frames: list[tuple[str, int, str]] = field(default_factory=list)
    stacks: list[tuple[int, ...]] = field(default_factory=list)
    kernels: dict[str, Array] = field(default_factory=lambda: _kernel_columns({}))
    kernel_texts: list[str] = field(default_factory=list)
    profiled: dict[str, Any] = field(default_factory=dict)
    timed_step: int = -1
    kernel_source: KernelSource | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    stats: dict[int, dict[str, Any]] = field(default_factory=dict)
    out_of_memory: dict[str, Any] | None = None
    nccl: dict[str, Any] = field(default_factory=dict)
    bound: set[int] = field(default_factory=set)
    outside: dict[str, Any] = field(default_factory=dict)
    outcome: dict[str, Any] = field(default_factory=dict)
    unanswered: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    truncated: bool = False

    @property
    def device(self) -> int:
        """The device whose memory is reported: the rank's own, or the one it used instead."""
        own = int(self.gpu.get("device_index", 0))
        if own in self.events or not self.events:
            return own
        return max(self.events, key=lambda device: len(self.events[device]["op"]))

    @property
    def device_events(self) -> dict[str, Array]:
        """Events of :attr:`device`; empty columns if the device was never used."""
        return self.events.get(self.device) or {name: np.zeros(0, kind) for name, kind in _EVENT_TYPES.items()}


def read_recording(run_directory: Path, *, may_be_empty: bool = True) -> Recording:
    """Read the journal of a run directory. A cut-off journal yields the records it has.

    Args:
        run_directory: The run directory.
        may_be_empty: Whether a rank that was killed before its first record yields an empty recording.

    Raises:
        RunDirectoryError: The journal is missing, damaged, or not fakedist's.
    """
    recording = Recording()
    pieces: dict[Any, list[bytes]] = defaultdict(list)
    for name in (JOURNAL_NAME, KERNELS_NAME):
        _read(recording, run_directory / name, pieces, may_be_empty=may_be_empty)
    recording.notes += calls_notes(run_directory / SMI_NAME)
    if recording.profiled and not recording.profiled["device"]["start"]:
        recording.notes.append(
            "no kernels were timed: torch.profiler saw none in the timed step; where CUPTI is refused (another "
            "profiler, no permission), the output above says so"
        )
    elif recording.profiled:
        trace, layers = profiler_trace(recording.profiled), LayerNumbers(recording.rows["layers"])
        source = {"tool": "cupti", "gpu": recording.profiled["gpu"], "source": recording.profiled["source"]}
        if source["source"] == "simulated":
            trace.notes.append(_SIMULATED)
        _take(recording, kernel_record(trace, layers, source), pieces)
    try:
        _join(recording, pieces)
    except (TypeError, ValueError) as error:
        raise damaged(run_directory / JOURNAL_NAME, f"has a column that is not fakedist's: {error}") from error
    return recording


def _join(recording: Recording, pieces: dict[Any, list[bytes]]) -> None:
    """Join the pieces of all records into columns."""
    recording.op_operation = np.frombuffer(b"".join(pieces["operation"]), "<u4")
    recording.op_scope = np.frombuffer(b"".join(pieces["scope"]), "<u4")
    recording.marks = {name: np.frombuffer(b"".join(pieces["marks", name]), kind) for name, kind in _MARK_TYPES.items()}
    recording.kernels = _kernel_columns(pieces)
    for device in sorted({key[1] for key in pieces if isinstance(key, tuple) and key[0] == "events"}):
        recording.events[device] = {
            name: np.frombuffer(b"".join(pieces["events", device, name]), kind) for name, kind in _EVENT_TYPES.items()
        }


def _read(recording: Recording, path: Path, pieces: dict[Any, list[bytes]], *, may_be_empty: bool) -> None:
    is_empty = True
    if path.exists():
        reader = read_journal(path)
        for record in reader:
            is_empty = False
            try:
                _take(recording, record, pieces)
            except (KeyError, TypeError, ValueError) as error:
                kind = str(record["kind"])[:40]
                raise damaged(path, f"has a record {kind!r} that is not fakedist's: {error}") from error
        recording.truncated |= reader.truncated
    elif path.name == JOURNAL_NAME:
        raise damaged(path, "is missing")
    if is_empty and path.name == JOURNAL_NAME and not may_be_empty:
        raise damaged(path, "holds no record")


def _kernel_columns(pieces: dict[Any, list[bytes]]) -> dict[str, Array]:
    return {
        name: np.frombuffer(b"".join(pieces.get(("kernels", name), [])), code) for name, code in KERNEL_TYPES.items()
    }


def _take(recording: Recording, record: dict[str, Any], pieces: dict[Any, list[bytes]]) -> None:
    kind = record["kind"]
    if kind in _ROWS:
        recording.rows[kind].extend(tuple(row) for row in record["rows"])
    elif kind == "ops":
        pieces["operation"].append(record["operation"])
        pieces["scope"].append(record["scope"])
    elif kind == "marks":
        for name in _MARK_TYPES:
            pieces["marks", name].append(record[name])
    elif kind == "events":
        recording.frames.extend(record["frames"])
        recording.stacks.extend(record["stacks"])
        for name in _EVENT_TYPES:
            pieces["events", record["device"], name].append(record[name])
    elif kind == "profiler":
        recording.profiled = record
    elif kind == "timed":
        recording.timed_step = record["step"]
    elif kind == "kernels":
        # There is one source: a measurement replaces the estimate that the rank wrote.
        recording.kernel_texts, recording.kernel_source = (
            list(record["texts"]),
            from_plain(KernelSource, record["source"]),
        )
        for name in KERNEL_TYPES:
            pieces["kernels", name] = [record[name]]
    elif kind == "gpu":
        recording.gpu = record
        recording.notes += record.get("notes", [])
    elif kind == "step":
        recording.steps.append(record)
    elif kind == "step_went_on":
        _went_on(recording, record["step"], pieces)
    elif kind == "stats":
        recording.stats[int(record.get("device", 0))] = record
    elif kind == "oom":
        recording.out_of_memory = record
    elif kind in ("outcome", "nccl", "outside"):
        setattr(recording, kind, record)
    elif kind == "bound":
        recording.bound.add(record["group"])
    elif kind == "unanswered":
        recording.unanswered.update(dict(record["rows"]))
    elif kind == "note":
        recording.notes.append(record["text"])


def _went_on(recording: Recording, step: int, pieces: dict[Any, list[bytes]]) -> None:
    """Undo the end of a step that went on: the next step's records belong to it, and its times are incomplete."""
    recording.steps = [record for record in recording.steps if record["step"] != step]
    scopes = recording.rows["scopes"]
    scopes[:] = [(scope, min(number, step), *rest) for scope, number, *rest in scopes]
    if recording.kernel_source is not None and recording.kernel_source.step == step:
        recording.kernel_source, recording.kernel_texts = None, []
        pieces |= {("kernels", name): [] for name in KERNEL_TYPES}
