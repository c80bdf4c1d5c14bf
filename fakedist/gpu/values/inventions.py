"""Values drawn on the host: those that no kernel computed, and random numbers where the device's generator would draw.

A value that no kernel computed is generated once, from the seed, and counted where the script reads it. A CUDA
generator is a seed and an offset that each kernel advances, both real here. A host generator seeded from them repeats
its numbers as a GPU's would: after ``manual_seed``, ``set_rng_state``, and in a checkpointed region that runs twice.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.serialization
import torch.storage
from torch import randn, zeros

from fakedist.errors import InventedValueError
from fakedist.frames import calling_frame, is_the_scripts, local_value, script_frame, torch_files
from fakedist.gpu.values.healthy import Answer, Health, Healthy
from fakedist.gpu.values.symbolic import Rows
from fakedist.rundir.notes import Note, assertions_hold, branches_made_up
from fakedist.rundir.rows import InventedRow

#: How often a line may get made-up values, or the same answer computed from them, before it counts as a loop that waits
#: for another value: the script reads one that often too. From then on floats are as good as zero, and one answer is
#: inverted.
LOOP_LIMIT = 1_000
#: After how many assertions at one line one fails: the script may end a loop by raising an exception.
_MOST_ASSERTIONS = 100 * LOOP_LIMIT
#: Torch's code that copies tensors to the host to keep them, and to copy them back or to a file; and its initializers,
#: which draw again until all values are within bounds, as the zeros are that large host floats read as.
_KEEPING = (
    "torch/autograd/graph.py",
    "torch/distributed/tensor/_random.py",
    "torch/nn/init.py",
    "torch/serialization.py",
)
_KEEPING_ROOMS = ("/torch/distributed/fsdp/", "/torch/distributed/checkpoint/")
#: The most lines that the note names.
_NAMED = 4

#: Torch 2.10 cannot assign to chosen elements of these, but to the same bits as a signed integer.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

#: Bytes of a value whose type is not known.
_USUAL_BYTES = 4

#: A file and a line of the script.
_Line = tuple[str, int]


class _Count:
    """Reads of made-up values at a line, the values, and how many of the reads may change what the job does."""

    __slots__ = ("calls", "matter", "values")

    def __init__(self) -> None:
        self.calls = self.values = self.matter = 0


class Inventions:
    """Makes up values, and counts them by operation and line. ``strict`` raises InventedValueError at the first."""

    def __init__(self, seed: int, *, strict: bool = False) -> None:
        self._strict = strict
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._counts: dict[tuple[str, str, int], _Count] = {}
        self._last: _Count | None = None
        self._healthy = Healthy(local_value)
        self._assertions: dict[_Line, int] = {}
        self._draws: dict[_Line, int] = {}
        self._most_reads = 0
        self._branches: dict[_Line, list[int]] = {}
        self._runs: dict[_Line, tuple[bool, int]] = {}
        self._cut: set[_Line] = set()

    def draw_missing(self, host: torch.Tensor, missing: torch.Tensor | None, *, non_negative: bool) -> None:
        """Make up a host tensor's missing elements, or all of them. They are counted when the script reads them."""
        if host.is_quantized:
            host.fill_(0.0) if missing is None else host.masked_fill_(missing, 0.0)
            return
        vanishing = host.is_floating_point() * self._in_loop(script_line())
        count = host.numel() if missing is None else int(missing.sum())
        drawn = _drawn(host.dtype, count, self._generator, non_negative=non_negative)
        _put(host, missing, drawn.fill_(vanishing * torch.finfo(host.dtype).tiny) if vanishing else drawn)

    def _in_loop(self, line: _Line) -> int:
        """0, or where a loop waits the sign of values that are almost zero: the other one after as many again."""
        draws = self._draws[line] = self._draws.get(line, 0) + 1
        if draws <= LOOP_LIMIT or self._most_reads < LOOP_LIMIT or not line[0]:
            return 0
        self._cut.add(line)
        return 1 if draws // LOOP_LIMIT % 2 else -1

    def begin_read(self) -> None:
        """The script reads a value, which :meth:`decide` gets if it depends on made-up ones."""
        self._last = None

    def decide(self, answer: Answer) -> Answer:
        """Return what the script gets when it reads a number, a truth value or rows that depend on made-up values.

        It is what a healthy job would read there (:mod:`fakedist.gpu.values.healthy`).
        """
        line, frame = script_line(), calling_frame()
        outlook = None if frame is None else self._healthy.outlook(frame, answer)
        if outlook is not None and isinstance(answer, (float, Rows)) and not outlook.is_tested:
            if self._last is not None and not isinstance(answer, Rows):
                self._last.matter -= 1
            return answer
        if outlook is not None and outlook.avoids in (Health.FAILS, Health.MAY_FAIL):
            held = self._assertions[line] = self._assertions.get(line, 0) + 1
            if self._last is not None:
                self._last.matter -= 1
            if held <= _MOST_ASSERTIONS:
                return outlook.answer
        if outlook is not None and outlook.avoids in (Health.MAY_STAY, Health.STAYS):
            self._count_branch(line, outlook.answer)
            return outlook.answer
        self._count_branch(line, answer)
        return self._waited_for(line, answer)

    def _count_branch(self, line: _Line, answer: Answer) -> None:
        branch = self._branches.setdefault(line, [0, 0])
        branch[0] += 1
        branch[1] += bool(answer)
        self._most_reads = max(self._most_reads, branch[0])

    def _waited_for(self, line: _Line, answer: Answer) -> Answer:
        """Return an answer, or the other one where a line waits for it."""
        if not isinstance(answer, (bool, Rows)):
            return answer
        before, times = self._runs.get(line, (bool(answer), 0))
        times = times + 1 if before is bool(answer) else 1
        if times > LOOP_LIMIT and line[0]:
            self._cut.add(line)
            answer, times = Rows(int(not answer)) if isinstance(answer, Rows) else not answer, 1
        self._runs[line] = (bool(answer), times)
        return answer

    def decisions(self) -> Iterator[Note]:
        """The report's notes on decisions that depend on made-up values, and on assertions that hold."""
        if (branches := self._branches_note()) is not None:
            yield branches
        if self._assertions:
            lines = sorted(self._assertions.items(), key=lambda entry: -entry[1])
            named = [f"{_named(line)} ({_often(reads)})" for line, reads in lines[:_NAMED]]
            yield assertions_hold(named, max(len(lines) - _NAMED, 0))

    def _branches_note(self) -> Note | None:
        if not self._branches:
            return None
        lines = sorted(self._branches.items(), key=lambda entry: -entry[1][0])
        named = [f"{_named(line)} ({_times(reads, true)})" for line, (reads, true) in lines[:_NAMED]]
        cut = sorted(map(_named, self._cut))
        return branches_made_up(named, max(len(lines) - _NAMED, 0), cut, LOOP_LIMIT)

    def fill(self, host: torch.Tensor, operation: str, *, non_negative: bool = False) -> None:
        """Make up and count a host tensor's elements: normal floats, integers 0, bools by a coin flip."""
        self.count(operation, host.numel())
        _put(host, None, _drawn(host.dtype, host.numel(), self._generator, non_negative=non_negative))

    def element(self, tensor: torch.Tensor, operation: str, *, non_negative: bool = False) -> torch.Tensor:
        """Make up one element of a large tensor, on the host. No memory keeps it: its address seeds it every time."""
        self.count(operation, 1)
        drawn = _drawn(tensor.dtype, 1, self._of(tensor), non_negative=non_negative).view(tensor.shape)
        vanishing = tensor.is_floating_point() * self._in_loop(script_line())
        return drawn.fill_(vanishing * torch.finfo(tensor.dtype).tiny) if vanishing else drawn

    def draw(self, host: torch.Tensor, source: torch.Tensor, operation: str, *, non_negative: bool = False) -> None:
        """Make up a whole host tensor that copies a large one. As with an element, the result is always the same."""
        self.count(operation, host.numel())
        host.copy_(_drawn(host.dtype, host.numel(), self._of(source), non_negative=non_negative).view(host.shape))
        if vanishing := host.is_floating_point() * self._in_loop(script_line()):
            host.fill_(vanishing * torch.finfo(host.dtype).tiny)

    def _of(self, tensor: torch.Tensor) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed ^ tensor.data_ptr())

    def count(self, operation: str, num_values: int) -> None:
        """Count made-up values for the script's current line. InventedValueError if ``strict`` is set."""
        filename, line = script_line()
        if self._strict and num_values:
            where = f"{filename}:{line}" if filename else "a backward"
            raise InventedValueError(
                f"{operation} in {where} needs {num_values:,} {'value' if num_values == 1 else 'values'} that no kernel"
                " computed on the virtual GPU",
                "--values small makes them up and counts them in the report",
            )
        entry = self._last = self._counts.setdefault((operation, filename, line), _Count())
        entry.calls += 1
        entry.values += num_values
        entry.matter += not _is_kept()
        self._most_reads = max(self._most_reads, entry.calls)

    def note(self, event: str, line: _Line) -> None:
        """Count an event at a line of the script that is not a value."""
        count = self._counts.setdefault((event, *line), _Count())
        count.calls += 1
        count.matter += 1

    def take(self) -> tuple[list[InventedRow], list[int]]:
        """The rows since the last call, and the indices of those whose values change nothing that the job does."""
        counts, self._counts = self._counts, {}
        rows = [InventedRow(*key, count.calls, count.values) for key, count in counts.items()]
        return rows, [index for index, count in enumerate(counts.values()) if not count.matter]


def script_line() -> tuple[str, int]:
    """File and line of the innermost frame outside torch and this package; ("", 0) in autograd's own threads."""
    frame = script_frame()
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _is_kept() -> bool:
    """Return whether torch reads values to keep them, or to draw them again."""
    return any(file.endswith(_KEEPING) or any(room in file for room in _KEEPING_ROOMS) for file in torch_files())


def values_in(num_elements: int, tensor: torch.Tensor) -> int:
    """The number of values in so many elements of a tensor that the script reads.

    ``torch.save`` and a storage's own methods read bytes: ``torch.save`` knows the type of the values in a storage, and
    elsewhere they are taken to have four bytes. The script's own view of bytes counts in bytes, which it reads.
    """
    if tensor.dtype is not torch.uint8:
        return num_elements
    frame: FrameType | None = sys._getframe(1)
    is_storage = False
    while frame is not None and not is_the_scripts(frame.f_code.co_filename):
        is_storage |= frame.f_code.co_filename == torch.storage.__file__
        if frame.f_code.co_filename == torch.serialization.__file__ and "storage_dtypes" in frame.f_locals:
            dtype = frame.f_locals["storage_dtypes"].get(tensor.data_ptr())
            return num_elements if dtype is None else -(-num_elements // dtype.itemsize)
        frame = frame.f_back
    return -(-num_elements // _USUAL_BYTES) if is_storage else num_elements


def _named(line: _Line) -> str:
    return f"{line[0]}:{line[1]}" if line[0] else "a backward"


def _often(reads: int) -> str:
    return "once" if reads == 1 else f"{reads:,} times"


def _times(reads: int, true: int) -> str:
    times = _often(reads)
    return f"{times}, {'true' if true else 'false'}" if true in (0, reads) else f"{times}, {true:,} of them true"


def _put(host: torch.Tensor, missing: torch.Tensor | None, values: torch.Tensor) -> None:
    if missing is None:
        host.copy_(values.view(host.shape))
        return
    if (signed := _SIGNED.get(host.dtype)) is not None:
        host, values = host.view(signed), values.view(signed)
    host[missing] = values


def _drawn(dtype: torch.dtype, count: int, generator: torch.Generator, *, non_negative: bool) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        real = randn(count, generator=generator)
        # Non-negative values are made positive, because scripts divide by losses and norms.
        return (real.abs() if non_negative else real).to(dtype)
    return zeros(count, dtype=dtype)


#: The state of a CUDA generator.
SeedAndOffset = tuple[int, int]


class Randoms:
    """Supplies operations with random numbers. ``seed`` is that of devices that the script does not seed."""

    def __init__(self, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)
        self._generators = threading.local()
        self._default = threading.Lock()

    def seed_and_offset(self, device: torch.device, generator: torch.Generator | None) -> SeedAndOffset:
        """Seed and offset of the generator that an operation on ``device`` draws from."""
        if generator is None or generator.device.type != "cuda":
            generator = _default_generator(device)
        try:
            return generator.initial_seed(), generator.get_offset()
        except RuntimeError:  # unavailable while the stream captures a graph
            return generator.initial_seed(), 0

    def generator(self, state: SeedAndOffset) -> torch.Generator:
        """Return a host generator for that seed and offset. Each thread has one."""
        generator: torch.Generator | None = getattr(self._generators, "own", None)
        if generator is None:
            generator = self._generators.own = torch.Generator()
        return generator.manual_seed(_mixed(state))

    @contextmanager
    def as_default(self, state: SeedAndOffset) -> Iterator[None]:
        """For operations without a generator argument: seed the host's default generator, and restore it afterwards."""
        default = torch.default_generator
        with self._default:
            before = default.get_state()
            default.manual_seed(_mixed(state))
            try:
                yield
            finally:
                default.set_state(before)

    def advance(self, device: torch.device, generator: torch.Generator | None) -> None:
        """Advance the generator for an operation that drew on the host alone, by four: the least that a kernel does."""
        if generator is None or generator.device.type != "cuda":
            generator = _default_generator(device)
        generator.set_offset(generator.get_offset() + 4)


def _default_generator(device: torch.device) -> torch.Generator:
    """The device's own generator. Python has it once ``torch.cuda`` is initialised, which C++ does not need."""
    if not torch.cuda.default_generators:
        torch.cuda.init()
    return torch.cuda.default_generators[device.index or 0]


def _mixed(state: SeedAndOffset) -> int:
    """Mix two numbers into one seed with splitmix64's finisher, so that neighbours get unrelated seeds."""
    seed, offset = state
    mixed = (seed ^ (offset * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) & 0x7FFFFFFFFFFFFFFF
