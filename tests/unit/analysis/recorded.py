"""A rank's recording written by hand, record by record, for tests of everything that reads one."""

import pickle
import struct
import zlib
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fakedist.analysis.blocks import Blocks, build_blocks
from fakedist.analysis.recording import Recording, read_recording
from fakedist.options import Job
from fakedist.rundir.directory import JOURNAL_NAME, MAGIC, JournalWriter, load_manifest, new_manifest, write_manifest
from fakedist.rundir.encoding import Record, columns_of, decode
from fakedist.rundir.memory_records import EventsRecord, MarksRecord
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.records import (
    RECORDS,
    GpuRecord,
    LayersRecord,
    OperationNamesRecord,
    OperationsRecord,
    RegionsRecord,
    ScopesRecord,
    StepRecord,
)
from fakedist.rundir.rows import FrameRow, LayerRow, OperationRow, PoolRow, RegionRow, ScopeRow
from fakedist.rundir.schema import ACTIONS, CATEGORIES, SHARD, SHARD_CODE

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: Where the one segment of 1 GiB begins that every device has; addresses in tests count from here.
BASE = 0x7F0000000000
GPU = GpuRecord("NVIDIA H100 80GB HBM3", 80 * GIB, "9.0", torch="2.15.0", cuda="13.2", python="3.11.0")


@dataclass
class HandMade:
    """Records to write; every method that adds one returns its number."""

    layers: list[LayerRow] = field(default_factory=lambda: [LayerRow(0, "", "", -1)])
    scopes: dict[tuple[int, str, int, bool], int] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)
    ops: list[tuple[int, int]] = field(default_factory=list)
    events: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    pools: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    marks: list[tuple[int, ...]] = field(default_factory=list)
    frames: list[FrameRow] = field(default_factory=list)
    stacks: list[tuple[int, ...]] = field(default_factory=list)
    others: list[Record] = field(default_factory=list)
    gpu: GpuRecord | None = GPU
    directory: Path = Path()

    def layer(self, name: str, class_name: str = "Linear", parent: int = 0) -> int:
        self.layers.append(LayerRow(len(self.layers), name, class_name, parent))
        return len(self.layers) - 1

    def op(self, phase: str = "forward", step: int = 1, layer: int = 0, **more: Any) -> int:
        """Run an operation; what comes next happens in it."""
        key = (step, phase, layer, bool(more.get("recompute", False)))
        scope = self.scopes.setdefault(key, len(self.scopes))
        operation = self.operations.setdefault(more.get("name", "aten.mm.default"), len(self.operations))
        self.ops.append((operation, scope))
        return len(self.ops) - 1

    def event(self, action: str, address: int, size: int, device: int = 0, **more: int) -> None:
        if device not in self.events:
            self.events[device] = []
            self.event("segment_alloc", 0, GIB, device)
        op, stream, stack = more.get("op", len(self.ops) - 1), more.get("stream", 0), more.get("stack", -1)
        self.events[device].append((ACTIONS.index(action), BASE + address, size, stream, 0, op, stack))

    def alloc(self, address: int, size: int, *, mark: tuple[Any, ...] = (), **more: int) -> None:
        """Allocate a block, and say what it is for."""
        self.event("alloc", address, size, **more)
        if mark:
            self.mark(address, *mark)

    def free(self, address: int, size: int, **more: int) -> None:
        self.event("free_requested", address, size, **more)
        self.event("free_completed", address, size, **more)

    def mark(self, address: int, category: str, layer: int = -1, bytes_: int = 0, start: int = 0) -> None:
        """Say what the block at the address is for, as it is now."""
        op = len(self.ops) - 1
        code = SHARD_CODE if category == SHARD else CATEGORIES.index(category)
        self.marks.append((op, BASE + address, code, layer, start, bytes_))

    def stack(self, *frames: tuple[str, int, str]) -> int:
        self.stacks.append(tuple(range(len(self.frames), len(self.frames) + len(frames))))
        self.frames += [FrameRow(*frame) for frame in frames]
        return len(self.stacks) - 1

    def region(self, first: int, last: int) -> None:
        self.others.append(RegionsRecord([RegionRow(first, last, 0)]))

    def step(self, number: int) -> None:
        self.others.append(StepRecord(number, number * 1000, number * 1000 + 900))

    def record(self, kind: str, **fields: Any) -> None:
        """Add a record of this kind. Its rows may be plain tuples."""
        self.others.append(decode({"kind": kind, **fields}, RECORDS))

    def ended(self, outcome: str = "stopped", code: int = 0, message: str = "") -> None:
        self.record("outcome", outcome=outcome, code=code, message=message, last_phase="other", last_step=1)

    def stats(self, allocated: int, reserved: int, *, peaks_were_reset: bool = False) -> None:
        peaks = {"allocated_peak_bytes": allocated, "reserved_peak_bytes": reserved}
        self.record("stats", device=0, num_ooms=0, peaks_were_reset=peaks_were_reset, **peaks)

    def records(self) -> list[Record]:
        written: list[Record] = [self.gpu] if self.gpu else []
        written.append(LayersRecord(self.layers))
        written.append(ScopesRecord([ScopeRow(number, *scope) for scope, number in self.scopes.items()]))
        written.append(OperationNamesRecord([OperationRow(number, name) for name, number in self.operations.items()]))
        operation, scope = (array("I", column).tobytes() for column in zip(*self.ops or [(0, 0)], strict=True))
        written.append(OperationsRecord(0, operation, scope))
        frames, stacks = self.frames, self.stacks
        for device, rows in self.events.items():
            columns = _columns(EventsRecord, rows)
            pools = [PoolRow(*row) for row in self.pools.get(device, [])]
            written.append(EventsRecord(device, frames, stacks, **columns, pools=pools))
            frames, stacks = [], []
        written.append(MarksRecord(**_columns(MarksRecord, self.marks)))
        return written + self.others

    def write(self, directory: Path) -> Path:
        directory.mkdir(exist_ok=True)
        journal = JournalWriter(directory / JOURNAL_NAME)
        for record in self.records():
            journal.append(record)
        journal.close()
        return directory

    def read(self, directory: Path | None = None) -> Recording:
        return read_recording(self.write(directory or self.directory))

    def blocks(self) -> Blocks:
        return build_blocks(self.read())


def new_run(directory: Path, outcome: str = "stopped", **job: Any) -> Path:
    """A run directory whose rank ended like this, without a journal."""
    directory.mkdir(exist_ok=True)
    new_manifest(directory, replace(Job(world_size=8, rank=1, target="train.py"), **job))
    code = 4 if outcome == "out_of_memory" else 0
    ending = Ending(Outcome(outcome), code)
    write_manifest(directory, replace(load_manifest(directory), exit=ending, cwd="/job"))
    return directory


def wrote_nothing(directory: Path) -> Path:
    """A run directory whose rank was killed before its first record."""
    JournalWriter(new_run(directory, "killed") / JOURNAL_NAME).close()
    return directory


def write_plain(path: Path, plain: object) -> None:
    """Write a journal that fakedist would never write: one whole record that holds ``plain``."""
    body = pickle.dumps(plain, protocol=4)
    path.write_bytes(MAGIC + struct.pack("<II", len(body), zlib.crc32(body)) + body)


def _columns(kind: type[Record], rows: list[tuple[int, ...]]) -> dict[str, bytes]:
    codes = columns_of(kind).items()
    return {name: array(code, (row[index] for row in rows)).tobytes() for index, (name, code) in enumerate(codes)}
