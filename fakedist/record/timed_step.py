"""The timed step: reports to a tracer where the rank is and what runs, in a recorded step or in a later one.

Ranges that torch opens, such as FSDP's and the optimizers', are not the script's.

After the last recorded step, the allocator's history and the numbering of operations are off. One step warms up:
torch.compile finds that its tensors' dispatch keys have changed, and compiles again. The next step is traced, by CUPTI
through torch.profiler or by Nsight Systems around this process. Its operations come from torch's own observers, its
layers from ranges that the module hooks open. Phases are not a stack, because they may overlap the script's ranges.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from types import FrameType
from typing import Protocol

import torch
import torch.cuda.nvtx
from torch.autograd import profiler
from torch.utils import _python_dispatch

from fakedist.frames import is_the_scripts
from fakedist.graph_captures import GraphObserver
from fakedist.patch import patched, present
from fakedist.record.ddp_buckets import new_buckets_within
from fakedist.record.ledger import Ledger
from fakedist.record.operations import Operations
from fakedist.record.position import Position
from fakedist.record.tracer import OperationTracer, Tracer
from fakedist.rundir.encoding import Record
from fakedist.rundir.records import NoteRecord
from fakedist.rundir.rows import Location
from fakedist.rundir.time_notes import not_timed, timed_early, timed_to_its_optimizer, timed_to_the_end
from fakedist.rundir.trace_records import (
    CALL_RANGE,
    LAYER_RANGE,
    OWN_RANGE,
    SCRIPT_RANGE,
    SCRIPT_RANGE_END,
    TimedStepRecord,
)

#: Files whose functions only forward the script's call.
_FIRST_HANDLE = 1 << 62  # of ranges that NVTX gives none; no tool counts that far
_FORWARDING = (contextlib.__file__, torch.cuda.nvtx.__file__)


class RangeTracer(Protocol):
    """Receives ranges."""

    def range_begins(self, name: str) -> int:
        """A range begins in this thread. Returns its number."""

    def range_ended(self, number: int) -> None:
        """The range with that number ended."""


class _Open(threading.local):
    """The ranges that a thread pushed; None for one that is not the script's."""

    def __init__(self) -> None:
        self.pushed: list[int | None] = []


@contextlib.contextmanager
def script_ranges(tracer: RangeTracer) -> Iterator[None]:
    """Report the script's ranges to a tracer.

    Raises:
        RecordingError: This version of torch opens ranges in another way.
    """
    thread, started, entered = _Open(), dict[int, int | None](), dict[int, int]()
    handles = itertools.count(_FIRST_HANDLE)
    nvtx, function = present(torch._C, "_nvtx"), profiler.record_function

    def push(text: str) -> object:
        thread.pushed.append(_begin(tracer, text, sys._getframe(1)))
        return original_push(text)

    def pop() -> object:
        if thread.pushed and (number := thread.pushed.pop()) is not None:
            tracer.range_ended(number)
        return original_pop()

    def start(text: str) -> int:
        handle: int = original_start(text)
        if not handle:  # without a tool, all ranges have handle 0
            handle = next(handles)
        started[handle] = _begin(tracer, text, sys._getframe(1))
        return handle

    def end(handle: int) -> object:
        if (number := started.pop(handle, None)) is not None:
            tracer.range_ended(number)
        return original_end(0 if handle >= _FIRST_HANDLE else handle)

    def mark(text: str) -> object:
        if (number := _begin(tracer, text, sys._getframe(1))) is not None:
            tracer.range_ended(number)
        return original_mark(text)

    def enter(own: profiler.record_function) -> object:
        if (number := _begin(tracer, own.name, sys._getframe(1))) is not None:
            entered[id(own)] = number
        return original_enter(own)

    def leave(own: profiler.record_function, *error: object) -> object:
        if (number := entered.pop(id(own), None)) is not None:
            tracer.range_ended(number)
        return original_leave(own, *error)

    with (
        patched(nvtx, "rangePushA", push) as original_push,
        patched(nvtx, "rangePop", pop) as original_pop,
        patched(nvtx, "rangeStartA", start) as original_start,
        patched(nvtx, "rangeEnd", end) as original_end,
        patched(nvtx, "markA", mark) as original_mark,
        patched(function, "__enter__", enter) as original_enter,
        patched(function, "__exit__", leave) as original_leave,
    ):
        yield


def _begin(tracer: RangeTracer, name: str, frame: FrameType | None) -> int | None:
    """The number of a range that begins now in a frame; None if it is torch's or ours."""
    while frame is not None and frame.f_code.co_filename in _FORWARDING:
        frame = frame.f_back
    if frame is None or not is_the_scripts(frame.f_code.co_filename) or name.startswith(OWN_RANGE):
        return None
    return tracer.range_begins(name)


#: Where Python waits for a device, a stream and an event.
_WAITS = (
    (torch._C, "_cuda_synchronize"),
    (torch._C, "_accelerator_synchronizeDevice"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
)


@contextmanager
def _waits(operations: Operations) -> Iterator[None]:
    """Number the waits that the script asks for.

    Raises:
        RecordingError: This version of torch waits in another way.
    """

    def numbered(original: Callable[..., object]) -> Callable[..., object]:
        def synchronize(*args: object, **kwargs: object) -> object:
            with operations.waiting():
                return original(*args, **kwargs)

        return synchronize

    with contextlib.ExitStack() as stack:
        for owner, name in _WAITS:
            stack.enter_context(patched(owner, name, numbered(present(owner, name))))
        yield


#: One step warms up, one is timed.
_NUM_STEPS = 2
#: Torch's fast record_function: an event for torch's observers, and nothing without observers.
_Event = AbstractContextManager[None]


class LaterStep:
    """The step that a tracer traces after the recorded ones, and the warm-up step before it."""

    def __init__(self, name: Callable[[int], str], tracer: Tracer | None = None) -> None:
        self.num_steps = 0 if tracer is None else _NUM_STEPS
        self.is_on = False
        self._tracer = tracer
        self._name = name
        self._step = 0
        self._why_not = "that takes two steps more than the recorded ones, and the script or --until ended before"
        self._was_timed = self._is_cut_short = False
        self._event = present(torch._C._profiler, "_RecordFunctionFast")
        self._open = threading.local()
        self._texts: dict[int, str] = {}
        self._numbers = itertools.count()
        self._ranges: dict[int, str] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the ranges that the script opens, once a step is to be traced."""
        if self._tracer is None:
            yield
            return
        with script_ranges(self):
            yield

    def begins_after(self, step: int) -> bool:
        """Return whether recording may stop after this step, the last recorded one, to time a later one."""
        if self._tracer is None:
            return False
        self._step = step + _NUM_STEPS
        self._why_not = f"the script ended before step {self._step}, which would have been timed"
        if _python_dispatch._get_current_dispatch_mode_stack():
            self._why_not = "the script was in a TorchDispatchMode when its recorded steps ended"
            return False
        return True

    def step_ended(self, step: int, location: Location, *, is_cut_short: bool = False) -> bool:
        """End a step after the recorded ones, perhaps with the run. Returns whether the next one is timed."""
        if step == self._step - 1:
            self._begin(location)
        elif step == self._step and self.is_on:
            self._end()
            self._was_timed, self._is_cut_short = True, is_cut_short
        return self.is_on

    def close(self) -> list[Record]:
        """Finish, and return the remaining records for the journal."""
        if self._tracer is None:
            return []
        if self.is_on:
            self._end()
            self._why_not = f"step {self._step}, which was timed, did not end"
        if not self._was_timed:
            return [NoteRecord(not_timed(self._why_not))]
        notes = [NoteRecord(timed_to_the_end(self._step))] if self._is_cut_short else []
        return [TimedStepRecord(self._step), *self._tracer.records(), *notes]

    def _begin(self, location: Location) -> None:
        assert self._tracer is not None
        if torch._C._autograd._profiler_enabled():
            self._why_not = "the script runs its own profiler, and torch allows only one"
            return
        try:
            self._tracer.begin(self._step)
        except RuntimeError as error:
            self._why_not = f"{error}".splitlines()[0]
            return
        self.is_on = True
        self.location(location)
        for number, name in self._ranges.items():
            self._mark(f"{SCRIPT_RANGE}{number}:{name}")

    def _end(self) -> None:
        assert self._tracer is not None
        self.is_on = False
        self._tracer.end()

    def layer_begins(self, layer: int) -> None:
        """Open the range of a layer whose forward starts in this thread."""
        text = self._texts.get(layer)
        if text is None:
            text = self._texts[layer] = LAYER_RANGE + self._name(layer)
        event = self._event(text)
        event.__enter__()
        self._open.__dict__.setdefault("events", []).append((layer, event))

    def layer_ended(self, layer: int) -> None:
        """Close a layer's range, and the ranges inside it that an error cut short."""
        events: list[tuple[int, _Event]] = self._open.__dict__.setdefault("events", [])
        if any(opened == layer for opened, _ in events):
            while True:
                ended, event = events.pop()
                event.__exit__(None, None, None)
                if ended == layer:
                    return

    def call(self, sequence: int) -> None:
        """Mark the moment before one of our collectives runs, with its number."""
        self._mark(f"{CALL_RANGE}{sequence}")

    def range_begins(self, name: str) -> int:
        """The script opens a range in this thread. Returns its number. A mark shows it: ranges need not nest."""
        number = next(self._numbers)
        self._ranges[number] = name
        if self.is_on:
            self._mark(f"{SCRIPT_RANGE}{number}:{name}")
        return number

    def range_ended(self, number: int) -> None:
        """The range with that number ended."""
        self._ranges.pop(number, None)
        if self.is_on:
            self._mark(f"{SCRIPT_RANGE_END}{number}")

    def location(self, location: Location) -> None:
        """Report a phase that begins. Layers are ranges of their own."""
        assert self._tracer is not None
        self._tracer.location(location)

    def _mark(self, text: str) -> None:
        with self._event(text):
            pass


class RecordedStep(GraphObserver):
    """Has recorded steps timed. Of several, the last one with the most typical input (``size`` in elements) counts: the
    nearest to the median of all steps so far after the first; of two as near, the larger.

    A step that ends with the run counts only if none did before, and as far as its last optimizer step: nothing
    distinguishes what follows it in the step (averages of parameters) from the script's own end (a checkpoint).

    The first steps are traced even if they are not ``wanted``, until one after the first has ended: the run may end
    before a wanted one does. Then that one stands in for it; the first step, which alone creates optimizers' state,
    only if no other ended. What such a step launched stays in memory until the end.
    """

    def __init__(
        self,
        tracer: OperationTracer | None,
        wanted: Callable[[int], bool],
        size: Callable[[int], int],
        position: Position,
        *,
        operations: Operations,
        ledger: Ledger,
    ) -> None:
        self._tracer = tracer
        self._wanted, self._size = wanted, size
        self._sizes: list[int] = []  # of steps that ended, after the first
        self._timed_size, self._cut_short = -1, 0
        self._is_wanted = False  # a wanted step has begun
        self._stand_in, self._is_whole = 0, False
        self._its_records: Callable[[], Sequence[Record]] = tuple
        self._position = position
        self._operations = operations
        self._ledger = ledger
        self._step = 0  # the step that is timed now
        self._at = 0
        self._was_timed = False
        self._why_not = ""
        self._num_captures = 0
        self._switch_tracing()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the script's ranges, its waits for the GPU, and the buckets that DDP builds anew."""
        if self._tracer is None:
            yield
            return
        with script_ranges(self._tracer), _waits(self._operations), new_buckets_within(self._tracer.once):
            yield

    def follow(self) -> None:
        """Take up the position's step, which may have changed."""
        step = self._position.step
        if self._tracer is None or step == self._at:
            return
        self._at = step
        is_wanted = self._wanted(step)
        if self._step and not self._is_wanted:
            self._end()  # it was not known at once that this step had ended, so it cannot stand in
        may_stand_in = step > 0 and not self._is_wanted and self._stand_in <= 1
        if not self._step and (is_wanted or may_stand_in):
            self._is_wanted |= is_wanted
            self._step = step
            self._switch_tracing()
            self._tracer.begin(step)

    def optimizer_ended(self) -> None:
        """An optimizer's step ended, perhaps the last one of the step."""
        if self._step and self._tracer is not None:
            self._tracer.may_end()

    def step_ended(self, step: int, *, is_cut_short: bool) -> Sequence[Record]:
        """End a step, perhaps with the run. Returns the records of its kernels if it was timed, and counts."""
        if self._tracer is None:
            return ()
        size = self._size(step)
        if step > 1:  # a pipeline's first step probes shapes, too
            self._sizes.append(size)
        if step != self._step:
            return ()
        self._end()
        if not self._is_wanted:
            self._may_stand_in(step, is_cut_short)
            return ()
        if self._was_timed and (is_cut_short or self._less_typical(size)):
            return ()
        if is_cut_short:
            self._tracer.cut_short()
            self._cut_short = step
        if self._at != step:  # its end is known only now, so the times contain work of the next step too
            self._why_not = f"it was not known at once that step {step}, which was timed, had ended"
            return ()
        self._was_timed, self._timed_size = True, size
        return self._tracer.taken()()

    def _less_typical(self, size: int) -> bool:
        """Return whether an input is less typical than that of the step that counts so far."""
        middle = median(self._sizes)
        return (abs(size - middle), -size) > (abs(self._timed_size - middle), -self._timed_size)

    def _may_stand_in(self, step: int, is_cut_short: bool) -> None:
        """Keep what a step launched that is not wanted itself, but better than what was kept before."""
        assert self._tracer is not None
        if self._at != step:
            return
        if is_cut_short:
            self._tracer.cut_short()
        self._stand_in, self._is_whole, self._its_records = step, not is_cut_short, self._tracer.taken()

    def step_went_on(self, step: int) -> None:
        """Undo the end of a step. The next one has not begun after all, and the times of this one are incomplete."""
        self._at = step
        del self._sizes[max(step - 2, 0) :]
        if self._stand_in == step:
            self._stand_in = 0
        if self._step == step + 1:
            self._end()
        elif self._step != step and self._was_timed:
            self._was_timed = False
            self._why_not = f"step {step}, which was timed, went on"

    def moved(self) -> None:
        """Report to the tracer that a module or a phase began or ended in this thread."""
        tracer = self._operations.tracer
        if tracer is not None:
            tracer.location(self._location())

    def close(self, last_step: int) -> list[Record]:
        """End the run. Returns the records of a step that stands in for the wanted one, and notes on what was timed."""
        if self._tracer is None:
            return []
        unfinished = self._step
        if unfinished:
            self._end()
        if self._was_timed:
            return [NoteRecord(timed_to_its_optimizer(self._cut_short))] if self._cut_short else []
        if self._stand_in and last_step:
            short = [] if self._is_whole else [NoteRecord(timed_to_its_optimizer(self._stand_in))]
            return [*self._its_records(), NoteRecord(timed_early(self._stand_in)), *short]
        return [NoteRecord(not_timed(self._why_no_step(unfinished, last_step)))]

    def _why_no_step(self, unfinished: int, last_step: int) -> str:
        if self._why_not:
            return self._why_not
        if not last_step:
            return "there was no training step"
        return f"step {unfinished or last_step}, which is timed, did not end"

    def _end(self) -> None:
        assert self._tracer is not None
        self._step = 0
        self._switch_tracing()
        self._tracer.end()

    def _location(self) -> Location:
        return self._position.places[self._position.scope()]

    def _switch_tracing(self) -> None:
        """Report operations and collectives to the tracer only while a step is timed or a graph is captured."""
        tracer = self._tracer if self._step or self._num_captures else None
        self._operations.trace(tracer)
        self._ledger.around = None if tracer is None else self._around

    def _around(self, sequence: int, operation: str) -> AbstractContextManager[None]:
        assert self._tracer is not None
        return self._tracer.collective(sequence, self._position.op, operation, self._location())

    def capture_begins(self) -> None:
        """Begin the capture of a CUDA graph, which the timed step may launch later."""
        if self._tracer is not None:
            self._num_captures += 1
            self._switch_tracing()
            self._tracer.capture_begins()

    def capture_ended(self, graph: torch.cuda.CUDAGraph) -> None:
        """End the capture."""
        if self._tracer is not None:
            self._num_captures -= 1
            self._switch_tracing()
            self._tracer.capture_ended()
