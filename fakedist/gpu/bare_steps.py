"""The virtual GPU in bare steps, without the recorder and the value engine: its log with the host's clock.

What the host reads there is what it read in the recorded step, in the same order (:class:`ReadTape`): the driver
answers copies to the host, and Python those operations of which only the result is known.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, empty
from torch import tensor as new_tensor
from torch._ops import OpOverload

from fakedist.gpu.driver_clock import DriverClock, PaceRow
from fakedist.gpu.launch_log import TO_HOST, Launch, LaunchKind, LaunchLog
from fakedist.gpu.values.tensors import Arguments
from fakedist.rundir.launch_records import LaunchKeysRecord

#: Operators that read one value, and those that read how many elements their result has.
_VALUES, _COUNTS = {"_local_scalar_dense", "item", "equal"}, {"nonzero", "masked_select"}
_MASKS = (torch.bool, torch.uint8)


class ReadTape:
    """Keeps the host's reads of a recorded step, in order: values, sizes of results, results of other operations.

    Attributes:
        answers: What the driver copies to the host: a tensor's bytes, or a count as one int64.
        results: By operator, what it returned. Of tensors, only shapes and types are kept.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[Tensor, bool]] = []
        self.results: dict[OpOverload, list[object]] = {}

    def read(self, func: OpOverload, args: Arguments, result: object) -> None:
        """Keep what an operation on device tensors read."""
        name = func._schema.name.partition("::")[2]
        if name in _COUNTS and isinstance(result, Tensor):
            self._count(len(result))
        elif name in _VALUES and isinstance(result, (bool, int, float, complex)):
            dtype = torch.bool if isinstance(result, bool) else torch.float64
            if name != "equal" and isinstance(args[0], Tensor):
                dtype = args[0].dtype
            self.answers.append((new_tensor([result], dtype=dtype), False))
        else:
            self.results.setdefault(func, []).append(_shape_alone(result))

    def copied(self, values: Tensor, result: object, *, is_asynchronous: bool) -> None:
        """Keep values that were copied to the host, as the bytes that torch has the device copy."""
        if isinstance(result, Tensor) and is_asynchronous and result.dtype != values.dtype:
            values = values.to(result.dtype)  # such a copy converts on the device
        is_dense = values.is_contiguous()
        if not is_dense and isinstance(result, Tensor) and values.stride() == result.stride():
            spans = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True)) + 1
            if spans == values.numel():
                values = values.as_strided((spans,), (1,))
        self.answers.append((values.contiguous().clone(), False))

    def masks(self, before: object, after: object) -> None:
        """Keep how many elements masks have that were converted to positions, one tensor for each dim of a mask."""
        assert isinstance(before, (list, tuple))
        assert isinstance(after, (list, tuple))
        position = 0
        for index in before:
            if isinstance(index, Tensor) and index.dtype in _MASKS:
                self._count(after[position].shape[0])
                position += index.dim()
            else:
                position += 1

    def _count(self, number: int) -> None:
        self.answers.append((new_tensor([number], dtype=torch.int64), True))


class _Shape(NamedTuple):
    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _shape_alone(result: object) -> object:
    if isinstance(result, Tensor):
        return _Shape(tuple(result.shape), result.dtype, result.device)
    return type(result)(map(_shape_alone, result)) if type(result) in (list, tuple) else result  # type: ignore[call-arg, call-overload]


def _made(kept: object) -> object:
    if isinstance(kept, _Shape):
        return empty(kept.size, dtype=kept.dtype, device=kept.device)
    return type(kept)(map(_made, kept)) if type(kept) in (list, tuple) else kept  # type: ignore[call-arg, call-overload]


@dataclass
class TimedLaunches:
    """The log of the timed step.

    Attributes:
        launches: All of it.
        rows: Of each row of the journal's record, its position in the log, and whether the host waits for work of its
            own operation, which the log has too.
        num_optimizer_steps: Steps of optimizers.
        last_optimizer: Position in the log at which the last of them ended.
        tape: What the host read.
        paces: The core's pace in the step; none if the host's clock did not run.
        once: Positions in the log of launches that no other step repeats.
    """

    launches: Sequence[Launch]
    rows: list[tuple[int, bool]]
    num_optimizer_steps: int
    last_optimizer: int
    step: int
    tape: ReadTape = field(default_factory=ReadTape)
    paces: list[PaceRow] = field(default_factory=list)
    once: Collection[int] = ()


class _Answer(ctypes.Structure):
    """``struct answer`` of driver/submit.c."""

    _fields_ = [("size", ctypes.c_uint64), ("bytes", ctypes.c_void_p)]


_LAUNCH = struct.Struct("<QQqqQQ4q3I3I3i4i3i4B4xQ")
assert _LAUNCH.size == ctypes.sizeof(Launch)
#: Launches that show how far the clock is off, and how often.
_NUM_LAUNCHES, _NUM_ROUNDS = 2_000, 5
#: What launches that are not the script's are tagged with: any collective's number.
_LEFT_OUT = 0


class BareGpu:
    """The driver in bare steps. Implements protocol ``record.host_clock.ClockedGpu``; ``timed`` is asked at the begin.

    Args:
        first_run: The timed step's keys of the script's first run, if this is its second.

    Attributes:
        stop, go, hook_ran, pace_us, pace_here, paces: Those of the clock.
    """

    def __init__(
        self,
        log: LaunchLog,
        clock: DriverClock,
        timed: Callable[[], TimedLaunches | None],
        first_run: LaunchKeysRecord | None = None,
    ) -> None:
        self._log, self._clock = log, clock
        self._timed = timed
        self._first_run, self.is_second_run = first_run, first_run is not None
        library = ctypes.PyDLL(None)
        library.fakedist_answer_reads.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.fakedist_stream_number.argtypes = [ctypes.c_void_p]
        self._library = library
        self.stop, self.go, self.hook_ran = clock.stop, clock.go, clock.hook_ran
        self.pace_us, self.pace_here, self.paces = clock.pace_us, clock.pace_here, clock.paces
        self._kept: list[object] = []

    # ---- the recorded step

    @property
    def step(self) -> int:
        """The timed step; 0 without one."""
        timed = self._timed()
        if timed is None:
            return 0
        return timed.step if self._first_run is None else self._first_run.step

    @property
    def num_optimizer_steps(self) -> int:
        """Steps of optimizers in it."""
        timed = self._timed()
        return 0 if timed is None else timed.num_optimizer_steps

    def rows(self) -> tuple[list[object], int]:
        """A key of each row of the timed step, and how many rows it has until its last optimizer's step ended.

        Work that no other step repeats has None.
        """
        if self._first_run is not None:
            return [key or None for key in array("Q", self._first_run.key)], self._first_run.split
        timed = self._timed()
        assert timed is not None
        keys, _ = _keys(bytes((Launch * len(timed.launches))(*timed.launches)))
        before = sum(position < timed.last_optimizer for position, _ in timed.rows)
        # A wait that the log has as work of its own, too, is none of a bare step.
        own = [("again",) if is_again else keys[position] for position, is_again in timed.rows]
        return [None if at in timed.once else key for key, (at, _) in zip(own, timed.rows, strict=True)], before

    def keys_for_second_run(self) -> LaunchKeysRecord:
        """The keys of the timed step's rows, as a second run of the script has them."""
        keys, split = self.rows()
        return LaunchKeysRecord(self.step, array("Q", _numbered(keys, self._library)).tobytes(), split)

    def recorded(self) -> tuple[list[int], list[float], list[PaceRow]]:
        """The positions of its rows in its log, the host's clock at each of its launches, and the core's pace."""
        timed = self._timed()
        assert timed is not None
        positions = [position for position, _ in timed.rows]
        return positions, [launch.at_ns / 1000 for launch in timed.launches], timed.paces

    # ---- bare steps

    def begin(self) -> float:
        """Answer reads, begin the log, start the clock. Returns by how many us it may be off for each launch."""
        timed = self._timed()
        assert timed is not None
        answers = timed.tape.answers
        array = (_Answer * len(answers))(
            *(_Answer(0 if is_count else tensor.nbytes, tensor.data_ptr()) for tensor, is_count in answers)
        )
        self._kept += [array, answers]
        bound_us = self._calibrate()
        self._library.fakedist_answer_reads(array, len(answers))
        self._log.begin()
        self._clock.pace_begins()
        return bound_us

    def operators(self) -> Mapping[OpOverload, Callable[[], object]]:
        """Operators that Python answers, and what returns the next result of each, over and over."""
        timed = self._timed()
        return {} if timed is None else {func: self._next(results) for func, results in timed.tape.results.items()}

    def num_launches(self) -> int:
        """Launches in the log."""
        return self._log.num_launches()

    def collective(self, sequence: int) -> None:
        """A collective begins on the current stream; -1: it ended."""
        self._log.tag_call(sequence)
        if sequence >= 0:
            self._log.collective(torch.cuda.current_stream().cuda_stream)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Launches of this thread have no key meanwhile."""
        self._log.tag_call(_LEFT_OUT)
        try:
            yield
        finally:
            self._log.tag_call(-1)

    @contextmanager
    def reads_itself(self) -> Iterator[None]:
        """Let this thread read what the device's memory holds, not what it read before."""
        self._library.fakedist_leave_reads(1)
        try:
            yield
        finally:
            self._library.fakedist_leave_reads(0)

    def end(self) -> tuple[list[object], list[float]]:
        """Stop the clock. Returns the key of each launch since it was started, and the time on the host's clock."""
        self._library.fakedist_answer_reads(None, 0)
        launches = self._log.end()
        self._clock.end()
        keys, at_ns = _keys(bytes(launches))
        if self._first_run is not None:
            keys = [number or None for number in _numbered(keys, self._library)]
        return keys, [each / 1000 for each in at_ns]

    def _next(self, results: list[object]) -> Callable[[], object]:
        position = iter(_endless(len(results)))

        def answer() -> object:
            self.stop()
            try:
                return _made(results[next(position)])
            finally:
                self.go(0)

        return answer

    def _calibrate(self) -> float:
        """Start the clock. Tiny operations show by how much it is off.

        Their tensor has a segment without known values, where what the driver does without the clock takes no time.
        """
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            tiny = empty(1, device="cuda")
        plain, clocked = [], []
        for _ in range(_NUM_ROUNDS):
            self._clock.end()
            plain.append(_time_of(tiny, time.perf_counter_ns))
            self._clock.begin()
            self._log.begin()
            clocked.append(_time_of(tiny, self._clock.now_ns))
            self._log.end()
        return abs(min(clocked) - min(plain)) / _NUM_LAUNCHES / 1000


def _time_of(tiny: Tensor, now: Callable[[], int]) -> int:
    add = torch.ops.aten.add_.Tensor
    begin = now()
    for _ in range(_NUM_LAUNCHES):
        add(tiny, tiny)
    return now() - begin


def _endless(length: int) -> Iterator[int]:
    while True:
        yield from range(length)


def _keys(log: bytes) -> tuple[list[object], list[int]]:
    """A key of each launch, the same in each step, and the clock at it; None for one that a collective stands for.

    It lacks sizes, which may change from step to step: the host takes as long. The names' addresses are the
    same all through a process. A copy to the host is a read, with the wait for it.
    """
    keys: list[object] = []
    at_ns: list[int] = []
    reads_on = -1
    for launch in _LAUNCH.iter_unpack(log):
        stream, name, call = launch[0], launch[1], launch[3]
        kind, direction, graph = launch[16], launch[18], launch[23]
        at_ns.append(launch[-1])
        if kind > LaunchKind.HOST_READS:  # of the allocator, which may ask for memory elsewhere in each step
            keys.append(None)
            continue
        if kind == LaunchKind.HOST_READS or (kind == LaunchKind.COPY and direction == TO_HOST):
            keys.append(("read", stream) if call < 0 else None)
            reads_on = stream
            continue
        if kind == LaunchKind.HOST_WAITS and reads_on == stream:
            keys.append(("waits for a read",))
        elif kind >= LaunchKind.STREAM_RECORDS:
            keys.append((kind, stream))
        elif call >= 0 and kind != LaunchKind.COLLECTIVE:
            keys.append(None)
        else:
            keys.append((kind, stream, name, direction, graph > 0))
        reads_on = -1
    return keys, at_ns


def _numbered(keys: Sequence[object], library: ctypes.CDLL) -> list[int]:
    """A number for each key of :func:`_keys` that any process of the script has for the same work; 0 for None.

    A stream's is in the order of their creation, and a name's address gives way to the name.
    """

    @cache
    def number(key: tuple[object, ...]) -> int:
        kind, stream, name, *others = (*key, None, None)[: max(len(key), 3)]
        text = repr(
            (
                kind,
                None if stream is None else library.fakedist_stream_number(stream),
                ctypes.string_at(name) if isinstance(name, int) and name else b"",
                *others,
            )
        )
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())

    return [0 if key is None else number(key) for key in keys]
