"""The timed step: tells a tracer where the rank is, while nothing else is recorded.

After the last recorded step, the allocator's history and the numbering of operations are switched off. One step warms
up: torch.compile finds that its tensors' dispatch keys have changed, and compiles again. The next step is traced, by
CUPTI through torch.profiler or by Nsight Systems around this process. Its operations come from torch's own observers,
its layers from ranges that the module hooks open. Phases are not a stack, because they may overlap the script's ranges.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch.utils import _python_dispatch

from fakedist.patch import present
from fakedist.run.encoding import Record
from fakedist.run.ranges import CALL, CAPTURE, LAYER, PHASE, STEP
from fakedist.run.records import NoteRecord
from fakedist.run.trace_records import TimedStepRecord

#: One step warms up, one is timed.
_NUM_STEPS = 2
#: Torch's fast record_function: an event for torch's observers, and nothing without observers.
_Event = Any


class Tracer(Protocol):
    """Traces the step."""

    def begin(self, text: str) -> None:
        """Trace everything from now on. ``text`` names the step.

        Raises:
            RuntimeError: The step cannot be traced.
        """

    def phase(self, text: str) -> None:
        """Mark that this phase begins."""

    def end(self) -> None:
        """End the step."""

    def records(self) -> list[Record]:
        """The records for the journal."""


class TimedStep:
    """The step that is traced, and the warm-up step before it.

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
        self._why_not = "two more steps than the recorded ones are needed, and the script ended, or --until ended it"
        self._was_timed = False
        self._event = present(torch._C._profiler, "_RecordFunctionFast")
        self._open = threading.local()
        self._texts: dict[int, str] = {}

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

    def step_ended(self, step: int, phase: str) -> bool:
        """End a step after the recorded ones. Returns whether the next one is timed."""
        if step == self._step - 1:
            self._begin(phase)
        elif step == self._step and self.is_on:
            self._end()
            self._was_timed = True
        return self.is_on

    def close(self) -> list[Record]:
        """Finish, and return the remaining records for the journal."""
        if self._tracer is None:
            return []
        if self.is_on:
            self._end()
            self._why_not = f"step {self._step}, which was timed, did not end"
        if not self._was_timed:
            return [NoteRecord(f"no kernels were timed: {self._why_not}")]
        return [TimedStepRecord(self._step), *self._tracer.records()]

    def _begin(self, phase: str) -> None:
        assert self._tracer is not None
        if torch._C._autograd._profiler_enabled():
            self._why_not = "the script runs a profiler of its own, and torch has room for one"
            return
        try:
            self._tracer.begin(f"{STEP}{self._step}")
        except RuntimeError as error:
            self._why_not = f"{error}".splitlines()[0]
            return
        self.is_on = True
        self.phase(phase)

    def _end(self) -> None:
        assert self._tracer is not None
        self.is_on = False
        self._tracer.end()

    def layer_begins(self, layer: int) -> None:
        """Open the range of a layer whose forward starts in this thread."""
        text = self._texts.get(layer)
        if text is None:
            text = self._texts[layer] = LAYER + self._name(layer)
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
        with self._event(f"{CALL}{sequence}"):
            pass

    def phase(self, phase: str) -> None:
        """Mark that this phase begins."""
        assert self._tracer is not None
        self._tracer.phase(f"{PHASE}{phase}")


class NsysTracer:
    """Nsight Systems, which runs this process. Ranges are NVTX ranges, and one of them tells nsys what to capture."""

    def __init__(self) -> None:
        self._inside = ExitStack()
        self._phase: Any = None

    def begin(self, text: str) -> None:
        """Open the range that nsys captures, then have torch emit ranges for its operations."""
        torch.cuda.synchronize()
        for each in (CAPTURE, text):
            self._inside.callback(torch.cuda.nvtx.range_end, torch.cuda.nvtx.range_start(each))
        torch.cuda.synchronize()
        self._inside.enter_context(torch.autograd.profiler.emit_nvtx())

    def phase(self, text: str) -> None:
        """Open the phase's range. It is not on a stack, so the script's own ranges may overlap it."""
        self._end_phase()
        self._phase = torch.cuda.nvtx.range_start(text)

    def end(self) -> None:
        """Wait for what was launched, then close the ranges."""
        torch.cuda.synchronize()
        self._end_phase()
        self._inside.close()

    def records(self) -> list[Record]:
        """No records: they are in nsys's report."""
        return []

    def _end_phase(self) -> None:
        handle, self._phase = self._phase, None
        if handle is not None:
            torch.cuda.nvtx.range_end(handle)
