"""The timed step: what tells a tracer where the rank is, while nothing else is recorded.

When the last recorded step has ended, the allocator's history and the numbering of operations are switched off. One
step warms up (torch.compile finds its tensors' dispatch keys changed, and compiles again), the next one is traced: by
CUPTI through torch.profiler, or by Nsight Systems around this process. Its operations come from torch's own observers,
its layers from ranges that the module hooks open; phases, which may overlap the script's own ranges, are no stack.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch.utils import _python_dispatch

from fakedist.patch import present
from fakedist.run.ranges import CALL, CAPTURE, LAYER, PHASE, STEP

#: One warms up, one is timed.
_NUM_STEPS = 2
#: torch's fast record_function: an event for its observers, nothing where there are none.
_Event = Any


class Tracer(Protocol):
    """Who traces the step."""

    def begin(self, text: str) -> None:
        """From now on everything is traced; ``text`` says which step it is.

        Raises:
            RuntimeError: It cannot be.
        """

    def phase(self, text: str) -> None:
        """From now on it is this phase."""

    def end(self) -> None:
        """The step is over."""

    def records(self) -> list[dict[str, Any]]:
        """What the journal gets of it."""


class TimedStep:
    """The step that is traced, and the one before it that warms up.

    Args:
        name: Gives the name of a layer.

    Attributes:
        is_on: Whether the step runs.
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
        """Have ``tracer`` trace the step; returns how many steps there are to run for that."""
        self._tracer = tracer
        return _NUM_STEPS

    def begins_after(self, step: int) -> bool:
        """Whether the script may go on untold after this step, the last recorded one."""
        if self._tracer is None:
            return False
        self._step = step + _NUM_STEPS
        self._why_not = f"the script ended before step {self._step}, which would have been timed"
        if _python_dispatch._get_current_dispatch_mode_stack():
            self._why_not = "the script was in a TorchDispatchMode when its recorded steps ended"
            return False
        return True

    def step_ended(self, step: int, phase: str) -> bool:
        """Tell of the end of a step after the recorded ones; returns whether the next one is timed."""
        if step == self._step - 1:
            self._begin(phase)
        elif step == self._step and self.is_on:
            self._end()
            self._was_timed = True
        return self.is_on

    def close(self) -> list[dict[str, Any]]:
        """Nothing runs any more: what is left for the journal."""
        if self._tracer is None:
            return []
        if self.is_on:
            self._end()
            self._why_not = f"step {self._step}, which was timed, did not end"
        if not self._was_timed:
            return [{"kind": "note", "text": f"no kernels were timed: {self._why_not}"}]
        return [{"kind": "timed", "step": self._step}, *self._tracer.records()]

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
        """A module's forward starts in this thread."""
        text = self._texts.get(layer)
        if text is None:
            text = self._texts[layer] = LAYER + self._name(layer)
        event = self._event(text)
        event.__enter__()
        self._open.__dict__.setdefault("events", []).append((layer, event))

    def layer_ended(self, layer: int) -> None:
        """It is over, and so are those in it that an error cut short."""
        events: list[tuple[int, _Event]] = self._open.__dict__.setdefault("events", [])
        if any(each == layer for each, _ in events):
            while True:
                ended, event = events.pop()
                event.__exit__(None, None, None)
                if ended == layer:
                    return

    def call(self, sequence: int) -> None:
        """A collective of ours is about to run: a moment that says its number."""
        with self._event(f"{CALL}{sequence}"):
            pass

    def phase(self, phase: str) -> None:
        """From now on it is this phase."""
        assert self._tracer is not None
        self._tracer.phase(f"{PHASE}{phase}")


class NsysTracer:
    """Nsight Systems, which runs this process: ranges are NVTX's, and one of them says what to capture."""

    def __init__(self) -> None:
        self._inside = ExitStack()
        self._phase: Any = None

    def begin(self, text: str) -> None:
        """Open the range that nsys captures, then have torch push its operations."""
        torch.cuda.synchronize()
        for each in (CAPTURE, text):
            self._inside.callback(torch.cuda.nvtx.range_end, torch.cuda.nvtx.range_start(each))
        torch.cuda.synchronize()
        self._inside.enter_context(torch.autograd.profiler.emit_nvtx())

    def phase(self, text: str) -> None:
        """The range of the phase: no stack, so that the script's own ranges may overlap it."""
        self._end_phase()
        self._phase = torch.cuda.nvtx.range_start(text)

    def end(self) -> None:
        """What was launched ends before the range does."""
        torch.cuda.synchronize()
        self._end_phase()
        self._inside.close()

    def records(self) -> list[dict[str, Any]]:
        """Nothing: nsys has it all."""
        return []

    def _end_phase(self) -> None:
        handle, self._phase = self._phase, None
        if handle is not None:
            torch.cuda.nvtx.range_end(handle)
