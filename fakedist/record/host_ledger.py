"""The host's memory: tensors' blocks and pinned memory one by one, mapped files at a few moments, and checkpoints.

Blocks come from compiled code (gpu/fast_path/host.cpp). Everything else is looked at where a step, a checkpoint or the
run ends: what malloc gave, and which files and pieces of /dev/shm are mapped.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fakedist.frames import script_line
from fakedist.patch import now_and_when_imported, patched, present
from fakedist.record.device_memory import without_inductor
from fakedist.record.numbering import FastPath
from fakedist.record.position import Position
from fakedist.record.steps import Training
from fakedist.rundir import notes
from fakedist.rundir.encoding import Record
from fakedist.rundir.memory_records import HostBlocksRecord, HostLookRecord, HostPlacesRecord, SaveRecord
from fakedist.rundir.records import NoteRecord
from fakedist.rundir.rows import MappingRow, ScopeRow

#: Modules and their functions that write a checkpoint, or read one. A nested call among them is part of the same.
SAVES = {
    "torch": ("save",),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save", "save_state_dict"),
    "torch.distributed.checkpoint": ("save", "async_save", "save_state_dict"),
    "safetensors.torch": ("save_file", "save_model"),
    "megatron.core.dist_checkpointing.serialization": ("save",),
    "megatron.core.dist_checkpointing": ("save",),
}
LOADS = {
    "torch": ("load",),
    "torch.distributed.checkpoint.state_dict_loader": ("load", "load_state_dict"),
    "torch.distributed.checkpoint": ("load", "load_state_dict"),
    "safetensors.torch": ("load_file", "load_model"),
    "megatron.core.dist_checkpointing.serialization": ("load",),
    "megatron.core.dist_checkpointing": ("load",),
}
_MAPS, _IO = Path("/proc/self/maps"), Path("/proc/self/io")
#: A line of /proc/self/maps that maps a file: addresses, permissions, path.
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (....) [0-9a-f]+ [0-9a-f:]+ [1-9]\d* +(/.*)$", re.MULTILINE)
_LIBRARY = re.compile(r"\.so[.\d]*$|^/dev/nvidia")
_LEAST_BYTES = 1 << 20
_WATCHED = "is_watched_by_fakedist"
_SAVER, _SERIALIZATION = ".state_dict_saver", ".serialization"
#: How long the run's end waits for a checkpoint that is being written.
_MOST_WAIT_S = 20.0


@dataclass
class _Save:
    function: str
    line: str
    place: int
    begin_us: int
    written_before: int
    end_us: int = 0
    asynchronous: bool = False
    running: Any = None  # a Future

    def made(self, written_bytes: int) -> SaveRecord:
        return SaveRecord(
            self.function, self.line, self.place, self.begin_us, self.end_us, written_bytes, self.asynchronous
        )


class HostLedger:
    """Records the host's memory.

    Args:
        reader: Compiled code that watches the CPU allocator. None records nothing but checkpoints.
        keep_numbers: Called with each record of blocks, whose frames and stacks continue the run's numbers.
    """

    def __init__(
        self,
        append: Callable[[Record], None],
        position: Position,
        reader: FastPath | None,
        keep_numbers: Callable[[HostBlocksRecord], None],
    ) -> None:
        self._append, self._position, self._reader = append, position, reader
        self._keep_numbers = keep_numbers
        self._training: Training | None = None
        self._own_bytes: Callable[[], int] = lambda: 0
        self._is_on = False
        self._pid = os.getpid()
        self._places: dict[tuple[int, str], int] = {}
        self._place = -1
        self._activity, self._depth = "", 0
        self._known_files: set[str] = set()
        self._running: list[_Save] = []

    def follow(self, training: Training, own_bytes: Callable[[], int]) -> None:
        """Follow the training. ``own_bytes``: written by the recording, less what the script wrote as holes."""
        self._training, self._own_bytes = training, own_bytes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the CPU allocator, pinned memory and checkpoints."""
        self._known_files = {row.path for row in _mappings()}
        if self._reader is not None and not self._reader.watch_host(True):
            self._reader = None
            self._append(NoteRecord(notes.host_memory_not_recorded()))
        self._is_on = True
        self.moved()
        try:
            with self._checkpoints(), self._storages():
                yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Record nothing more. The allocator is torch's own again."""
        if self._is_on and os.getpid() == self._pid:
            self._is_on = False
            if self._reader is not None:
                self._reader.watch_host(False)

    def moved(self) -> None:
        """The rank may be in another step or phase."""
        if not self._is_on:
            return
        position = self._position
        phase = self._activity or position.phase
        if phase in ("forward", "other") and self._training is not None and self._training.evaluates:
            phase = "evaluation"
        step = 0 if phase == "init" else position.step
        place = self._places.get((step, phase))
        if place is None:
            place = self._places[step, phase] = len(self._places)
            self._append(HostPlacesRecord([ScopeRow(place, step, phase, 0, recompute=False)]))
        if place != self._place:
            self._place = place
            if self._reader is not None:
                self._reader.host_moved(place)

    def look(self) -> None:
        """Record what no event tells of: what malloc gave, and what is mapped."""
        if not self._is_on or self._reader is None or os.getpid() != self._pid:
            return
        pinned, used = _pinned()
        prefetched = 0 if self._training is None else self._training.loading.prefetched_bytes()
        mappings = [row for row in _mappings() if row.path not in self._known_files]
        self._append(
            HostLookRecord(_now_us(), self._place, self._reader.malloc_bytes(), pinned, used, prefetched, mappings)
        )

    def drain(self) -> None:
        """Move what happened since the last call to the journal."""
        if not self._is_on or self._reader is None:
            return
        with without_inductor():
            record = self._reader.read_host()
        if record is not None and record.change:
            self._keep_numbers(record)
            self._append(record)

    def close(self) -> None:
        """Record how it is at the end, and the checkpoints that are not done."""
        if self._is_on:
            self.look()
            for save in list(self._running):
                with suppress(Exception):  # the script's, or it takes longer
                    save.running.result(timeout=_MOST_WAIT_S)
                    self._done(save)
            for save in self._running:
                self._append(save.made(-1))
            self._running.clear()

    @contextmanager
    def _storages(self) -> Iterator[None]:
        """Have the storages that Python makes take memory from the allocator that is set, which torch does not ask."""
        make, owner = torch.UntypedStorage.__new__, torch.UntypedStorage

        def made(kind: type[torch.UntypedStorage], *args: Any, **kwargs: Any) -> torch.UntypedStorage:
            device = kwargs.get("device")
            is_on_host = device is None or torch.device(device).type == "cpu"
            if self._is_on and self._reader is not None and args and is_on_host and "allocator" not in kwargs:
                kwargs = {"allocator": self._reader.host_allocator}  # torch takes no device with one
            return make(kind, *args, **kwargs)

        setattr(owner, "__new__", made)  # noqa: B010 (mypy: a method)
        try:
            yield
        finally:
            delattr(owner, "__new__")

    # ---- checkpoints

    @contextmanager
    def _checkpoints(self) -> Iterator[None]:
        with ExitStack() as stack:

            def watch(module: ModuleType) -> None:
                for activity, functions in (("save", SAVES), ("load", LOADS)):
                    for name in functions.get(module.__name__, ()):
                        original = getattr(module, name, None)
                        if original is not None and not hasattr(original, _WATCHED):
                            called = f"{module.__name__.removesuffix(_SAVER).removesuffix(_SERIALIZATION)}.{name}"
                            stack.enter_context(patched(module, name, self._watched(original, activity, called)))

            with now_and_when_imported(SAVES.keys() | LOADS.keys(), watch):
                yield

    def _watched(self, original: Callable[..., object], activity: str, name: str) -> Callable[..., object]:
        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            is_main = threading.current_thread() is threading.main_thread()
            is_part = self._depth or (self._running and not is_main)  # of an asynchronous checkpoint
            if not self._is_on or is_part or os.getpid() != self._pid:
                return original(*args, **kwargs)
            with self._during(activity):
                return self._save(name, original, args, kwargs) if activity == "save" else original(*args, **kwargs)

        setattr(call, _WATCHED, True)
        return call

    @contextmanager
    def _during(self, activity: str) -> Iterator[None]:
        self.look()
        self._activity, self._depth = activity, self._depth + 1
        self.moved()
        try:
            yield
        finally:
            self.look()
            self._activity, self._depth = "", self._depth - 1
            self.moved()

    def _save(
        self, name: str, original: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        save = _Save(name, script_line(), self._place, _now_us(), self._written())
        result = original(*args, **kwargs)
        save.end_us = _now_us()
        upload = getattr(result, "upload_completion", result)
        if _goes_elsewhere(name, result, kwargs):
            self._append(dataclasses.replace(save, asynchronous=True).made(-1))
        elif name.endswith(".async_save"):
            save.asynchronous, save.running = True, upload
            self._running.append(save)
            present(upload, "add_done_callback")(lambda done: self._done(save))
        else:
            self._append(save.made(self._written() - save.written_before))
        return result

    def _done(self, save: _Save) -> None:
        if save in self._running and os.getpid() == self._pid:
            self._running.remove(save)
            self._append(save.made(self._written() - save.written_before))

    def _written(self) -> int:
        """Bytes that this process has written to files, those of holes included and the recording left out."""
        text = next((line for line in _IO.read_text().splitlines() if line.startswith("wchar: ")), "wchar: 0")
        return int(text.partition(" ")[2]) - self._own_bytes()


def _goes_elsewhere(name: str, result: object, kwargs: dict[str, object]) -> bool:
    """Whether another process writes a checkpoint: DCP's own, or those that Megatron starts for what it returned."""
    is_megatrons = name.startswith("megatron") and result is not None
    return is_megatrons or "PROCESS" in str(kwargs.get("async_checkpointer_type"))


def _now_us() -> int:
    return time.time_ns() // 1000


def _mappings() -> list[MappingRow]:
    """Files of 1 MiB and more in this process's memory that are neither programs nor libraries."""
    rows: dict[str, list[MappingRow]] = {}
    programs = set()
    for begin, end, rights, path in _MAPPING.findall(_MAPS.read_text(errors="replace")):
        if path in programs or "x" in rights or _LIBRARY.search(path):
            programs.add(path)
        elif (size := int(end, 16) - int(begin, 16)) >= _LEAST_BYTES:
            rows.setdefault(path, []).append(MappingRow(int(begin, 16), size, path, rights[1::2] == "wp"))
    return [row for path, of_path in rows.items() if path not in programs for row in of_path]


def _pinned() -> tuple[int, int]:
    """Bytes that torch's pinned allocator has taken, and those of them that tensors hold; -1 if that is not known."""
    statistics = getattr(torch._C, "_cuda_hostMemoryStats", None)
    if statistics is None or not torch.cuda.is_initialized():
        return -1, -1
    known: dict[str, Any] = statistics()
    taken, used = (known.get(name, {}).get("current", -1) for name in ("allocated_bytes", "active_bytes"))
    return taken, used
