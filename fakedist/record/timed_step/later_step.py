"""A timed step after the recorded ones: tells a tracer where the rank is, while nothing else is recorded.

After the last recorded step, the allocator's history and the numbering of operations are switched off. One step warms
up: torch.compile finds that its tensors' dispatch keys have changed, and compiles again. The next step is traced, by
CUPTI through torch.profiler or by Nsight Systems around this process. Its operations come from torch's own observers,
its layers from ranges that the module hooks open. Phases are not a stack, because they may overlap the script's ranges.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.utils import _python_dispatch

from fakedist.patch import present
from fakedist.record.timed_step.script_ranges import script_ranges
from fakedist.record.timed_step.tracer import Tracer
from fakedist.run.encoding import Record
from fakedist.run.records import NoteRecord
from fakedist.run.rows import Place
from fakedist.run.time_notes import not_timed, timed_to_the_end
from fakedist.run.trace_records import CALL_RANGE, LAYER_RANGE, SCRIPT_RANGE, SCRIPT_RANGE_END, TimedStepRecord

#: One step warms up, one is timed.
_NUM_STEPS = 2
#: Torch's fast record_function: an event for torch's observers, and nothing without observers.
_Event = AbstractContextManager[None]


class LaterStep:
    """The step that is traced after the recorded ones, and the warm-up step before it.

    Args:
        name: Returns the name of a layer.

    Attributes:
        is_on: Whether the traced step is running.
    """

    def __init__(self, name: Callable[[int], str]) -> None:
        self.is_on = False
        self._tracer: Tracer | None = None
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

    def trace(self, tracer: Tracer) -> int:
        """Have ``tracer`` trace the step. Returns how many more steps must run for that."""
        self._tracer = tracer
        return _NUM_STEPS

    def begins_after(self, step: int) -> bool:
        """Whether recording may stop after this step, the last recorded one, so that a later one can be timed."""
        if self._tracer is None:
            return False
        self._step = step + _NUM_STEPS
        self._why_not = f"the script ended before step {self._step}, which would have been timed"
        if _python_dispatch._get_current_dispatch_mode_stack():
            self._why_not = "the script was in a TorchDispatchMode when its recorded steps ended"
            return False
        return True

    def step_ended(self, step: int, place: Place, *, is_cut_short: bool = False) -> bool:
        """End a step after the recorded ones, perhaps with the run. Returns whether the next one is timed."""
        if step == self._step - 1:
            self._begin(place)
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

    def _begin(self, place: Place) -> None:
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
        self.place(place)
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
        if any(each == layer for each, _ in events):
            while True:
                ended, event = events.pop()
                event.__exit__(None, None, None)
                if ended == layer:
                    return

    def call(self, sequence: int) -> None:
        """Mark the moment before one of our collectives runs, with its number."""
        self._mark(f"{CALL_RANGE}{sequence}")

    def range_begins(self, name: str) -> int:
        """The script opens a range in this thread. Returns its number. A mark tells it: ranges need not nest."""
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

    def place(self, place: Place) -> None:
        """Tell the tracer that a phase begins. Layers are ranges of their own."""
        assert self._tracer is not None
        self._tracer.place(place)

    def _mark(self, text: str) -> None:
        with self._event(text):
            pass
