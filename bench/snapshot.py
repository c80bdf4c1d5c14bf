"""The cost of a large memory snapshot: its report, and its page.

    python bench/snapshot.py [--megabytes 300] [--shapes stacks bare steps segments devices] [--keep FOLDER]

A snapshot has the form in which `torch.cuda.memory._dump_snapshot()` pickles one, and is that of a training:
parameters, and steps of forward, backward and optimizer.

- "stacks": each event has a list of 24 frames of its own, and the keys of torch 2.11: 114 bytes an event. A real
  GPU's snapshot has 164 by default, and so fewer events.
- "bare": Python's frames alone, which events share, and references of two bytes: 44 bytes an event.
- "steps": as bare, with steps of 300 events instead of 14,000.
- "segments": as bare, and each allocation maps and frees a segment; 100,000 segments with 300,000 blocks at the end.
- "devices": as bare, of four GPUs.
"""

from __future__ import annotations

import argparse
import pickle
import struct
import sys
import tempfile
from pathlib import Path
from typing import IO

from processes import run_process

SHAPES = ("stacks", "bare", "steps", "segments", "devices")
SLOT_BYTES = 2 << 20
NUM_PARAMETERS = 500
#: Allocations of a forward and of a backward; lines of the model that make them.
_OF_PHASE, _OF_SHORT_PHASE, _NUM_LINES = 2_000, 40, 40
#: A frame of the C pickler ends behind the object that makes it this long; it adds so many items of a list at once.
_FRAME_BYTES, _ITEMS = 64 << 10, 1_000
_SITE = "/usr/lib/python3.12/site-packages/torch"
Block = tuple[int, int]
Value = str | int | bytes | list[bytes]


class Pickled:
    """Writes a pickle in frames and memoizes what pickle.dump does, without its values in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self.size, self.last = 0, b""
        self._file, self._frame, self._memo = file, bytearray(), dict[str, bytes]()
        self._num_memoized = 0
        file.write(pickle.PROTO + b"\x04")

    def put(self, opcodes: bytes, *, memoizes: bool = False) -> None:
        """Add opcodes; if they memoize an object, ``last`` are those that refer to it."""
        self._frame += opcodes
        if memoizes:
            self._frame += pickle.MEMOIZE
            number = self._num_memoized
            self.last = pickle.LONG_BINGET + struct.pack("<I", number) if number > 255 else b"h" + bytes([number])
            self._num_memoized += 1
        if len(self._frame) >= _FRAME_BYTES:
            self.flush()

    def text(self, text: str) -> None:
        """Add a text: once, and then what refers to it."""
        if text in self._memo:
            self.put(self._memo[text])
        else:
            self.put(pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode(), memoizes=True)
            self._memo[text] = self.last

    def begin(self, opcode: bytes) -> bytes:
        """Begin a list or a dict, and return what refers to it."""
        self.put(opcode, memoizes=True)
        own = self.last
        self.put(pickle.MARK)
        return own

    def entry(self, **items: Value) -> bytes:
        """Add a dict, and return what refers to it."""
        own = self.begin(pickle.EMPTY_DICT)
        for name, value in items.items():
            self.text(name)
            self.value(value)
        self.put(pickle.SETITEMS)
        return own

    def value(self, value: Value) -> None:
        """Add a text, a number, what is known by its opcodes, or a list of these."""
        if isinstance(value, str):
            self.text(value)
        elif isinstance(value, list):
            self.begin(pickle.EMPTY_LIST)
            self.put(b"".join(value) + pickle.APPENDS)
        else:
            self.put(_number(value) if isinstance(value, int) else value)

    def flush(self) -> None:
        """Write the frame."""
        self._file.write(pickle.FRAME + struct.pack("<Q", len(self._frame)) + self._frame)
        self.size += len(self._frame)
        self._frame.clear()


def _number(value: int) -> bytes:
    if value < 256:
        return pickle.BININT1 + bytes([value])
    if value < 1 << 31:
        return pickle.BININT + struct.pack("<i", value)
    length = value.bit_length() // 8 + 1
    return pickle.LONG1 + bytes([length]) + value.to_bytes(length, "little")


def address(slot: int) -> int:
    """Where a block is."""
    return (1 << 45) + slot * SLOT_BYTES


class Training:
    """The events of a training on one GPU. ``ranges`` are those of its optimizer's steps: stages and times."""

    def __init__(self, pickled: Pickled, shape: str, stacks: dict[str, list[Value]]) -> None:
        self.ranges: list[tuple[str, int]] = []
        self.num_events = 0
        self._pickled, self._shape, self._stacks = pickled, shape, stacks
        self._time_us, self._num_slots = 1_783_874_422_287_973, 0
        self._slots: list[int] = []

    def run(self, until: int) -> None:
        """Write a list of the events of whole steps, until the pickle has so many bytes."""
        self._pickled.begin(pickle.EMPTY_LIST)
        for number in range(NUM_PARAMETERS):
            self._makes("init", number)
        num = _OF_SHORT_PHASE if self._shape == "steps" else _OF_PHASE
        while self._pickled.size < until:
            saved = [self._makes("forward", number) for number in range(num)]
            gradients: list[Block] = []
            for number in reversed(range(num)):
                gradients += [self._makes("backward", number)] if number % 4 == 0 else []
                self._frees("backward", number, self._makes("backward", number))
                self._frees("backward", number, saved.pop())
            self.ranges.append(("START", self._time_us))
            for number in range(num // 4):
                self._frees("optimizer", number, self._makes("optimizer", number))
            self.ranges.append(("END", self._time_us))
            for gradient in gradients:
                self._frees("init", 0, gradient)
        self._pickled.put(pickle.APPENDS)

    def _makes(self, phase: str, number: int) -> Block:
        if not self._slots:
            self._slots.append(address(self._num_slots))
            self._num_slots += 1
        block = self._slots.pop(), 512 * (1 + number % 977)
        if self._shape == "segments":
            for action in ("segment_alloc", "segment_free"):
                self._event(action, phase, number, ((1 << 46) + number * 32 * SLOT_BYTES, 10 * SLOT_BYTES))
        self._event("alloc", phase, number, block)
        return block

    def _frees(self, phase: str, number: int, block: Block) -> None:
        for action in ("free_requested", "free_completed"):
            self._event(action, phase, number, block)
        self._slots.append(block[0])

    def _event(self, action: str, phase: str, number: int, block: Block) -> None:
        self._time_us += 3
        self.num_events += 1
        more: dict[str, Value] = {"frames": self._stacks[phase][number % _NUM_LINES]}
        if self._shape == "stacks":
            more |= {"compile_context": "N/A", "user_metadata": ""}
        self._pickled.entry(action=action, addr=block[0], size=block[1], stream=0, time_us=self._time_us, **more)
        if self.num_events % _ITEMS == 0:
            self._pickled.put(pickle.APPENDS + pickle.MARK)


def frames_of(phase: str, line: int) -> list[tuple[str, int, str]]:
    """Python's frames of a stack, innermost first."""
    outer = ("/job/train.py", 90, "<module>")
    module = f"{_SITE}/nn/modules/module.py"
    optimizer = [
        (f"{_SITE}/optim/adamw.py", 100 + line, "_init_group"),
        (f"{_SITE}/optim/optimizer.py", 533, "wrapper"),
    ]
    inner = {
        "init": [("/job/train.py", line, "main")],
        "forward": [("/job/model.py", line, "forward"), (module, 1790, "_call_impl"), ("/job/train.py", 70, "step")],
        "backward": [],
        "optimizer": [*optimizer, ("/job/train.py", 72, "step")],
    }[phase]
    return [*inner, outer] if inner else []


def write_stacks(pickled: Pickled, shape: str) -> dict[str, list[Value]]:
    """Write the frames, and the stacks that events share, as a list; return the stacks of each phase."""
    known: dict[tuple[str, int, str], bytes] = {}
    stacks: dict[str, list[Value]] = {}
    pickled.begin(pickle.EMPTY_LIST)
    for text in ("action", "addr", "size", "stream", "time_us", "frames", "alloc", "free_requested", "free_completed"):
        pickled.text(text)  # among the first 256 objects: two bytes refer to each
    for phase in ("init", "forward", "backward", "optimizer"):
        stacks[phase] = []
        for line in range(_NUM_LINES):
            rows = frames_of(phase, line)
            if shape == "stacks":
                engine = [("??", 0, "torch::autograd::Engine::evaluate_function()")] if phase == "backward" else []
                native = [("??", 0, f"c10::function{number}()") for number in range(24 - len(rows) - len(engine))]
                rows = [*native, *engine, *rows]
            for row in rows:
                if row not in known:
                    known[row] = pickled.entry(filename=row[0], line=row[1], name=row[2])
            own: Value = [known[row] for row in rows]
            if shape != "stacks":
                pickled.value(own)
                own = pickled.last
            stacks[phase].append(own)
    pickled.put(pickle.APPENDS)
    return stacks


def write_segment(pickled: Pickled, start: int, sizes: list[int], state: str) -> None:
    """Write a segment whose blocks have these sizes."""
    total = max(SLOT_BYTES, sum(sizes))
    pickled.begin(pickle.EMPTY_DICT)
    for name, number in (("device", 0), ("address", start), ("total_size", total), ("stream", 0)):
        pickled.text(name)
        pickled.value(number)
    pickled.text("blocks")
    pickled.begin(pickle.EMPTY_LIST)
    for size in sizes:
        pickled.entry(address=start, size=size, requested_size=size, state=state)
        start += size
    pickled.put(pickle.APPENDS + pickle.SETITEMS)


def write_snapshot(path: Path, shape: str, megabytes: int) -> int:
    """Write a snapshot, and return the number of its events."""
    with path.open("wb") as file:
        pickled = Pickled(file)
        pickled.begin(pickle.EMPTY_DICT)
        pickled.text("stacks")  # a key that torch does not write, so that events can refer to them
        stacks = write_stacks(pickled, shape)
        pickled.text("segments")
        pickled.begin(pickle.EMPTY_LIST)
        for number in range(NUM_PARAMETERS):
            write_segment(pickled, address(number), [512 * (1 + number)], "active_allocated")
        for number in range(100_000 if shape == "segments" else 0):
            write_segment(pickled, (1 << 47) + number * SLOT_BYTES, [1 << 19] * 3, "active_allocated")
        pickled.put(pickle.APPENDS)
        pickled.text("device_traces")
        pickled.begin(pickle.EMPTY_LIST)
        num_devices = 4 if shape == "devices" else 1
        before, num_events = pickled.size, 0
        for device in range(num_devices):
            training = Training(pickled, shape, stacks)
            training.run(before + (megabytes * 1_000_000 - before) * (device + 1) // num_devices)
            num_events += training.num_events
        pickled.put(pickle.APPENDS)
        pickled.text("external_annotations")
        pickled.begin(pickle.EMPTY_LIST)
        for stage, time_us in training.ranges:
            pickled.entry(stage=stage, name="Optimizer.step#AdamW.step", device=num_devices - 1, time_us=time_us)
        pickled.put(pickle.APPENDS + pickle.SETITEMS + pickle.STOP)
        pickled.flush()
    return num_events


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--keep", type=Path, help="where the snapshots stay")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = args.keep or Path(directory)
        for shape in args.shapes:
            snapshot, page = folder / f"{shape}.pickle", Path(directory) / "page.html"
            num_events = write_snapshot(snapshot, shape, args.megabytes)
            made = run_process(
                [sys.executable, "-m", "fakedist", "report", str(snapshot), "--format", "html", "-o", str(page)]
            )
            size = f"{snapshot.stat().st_size / 1e6:.0f} MB, {num_events:,} events"
            took = f"{made.wall_s:6.1f} s {made.cpu_s:6.1f} s CPU {made.host_gb:5.2f} GB"
            print(f"{shape:<10}{size:<28}{took}   page {page.stat().st_size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
