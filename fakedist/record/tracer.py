"""The timed step under Nsight Systems, which traces this process from outside: NVTX ranges say where we are.

The *timed step* is the step whose kernels are seen: a recorded or a later one
(:mod:`fakedist.record.timed_step`). A *trace* is what a tool saw of it. *Kernels* are the table that is made of a
trace, *times* the sums over that table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import torch
from torch._ops import OpOverload

from fakedist.rundir.encoding import Record
from fakedist.rundir.rows import Location
from fakedist.rundir.trace_records import CAPTURE_RANGE, PHASE_RANGE, STEP_RANGE


class StepTracer(Protocol):
    """Sees the kernels of one step."""

    def begin(self, step: int) -> None:
        """Begin the step.

        Raises:
            RuntimeError: The step cannot be traced.
        """

    def location(self, location: Location) -> None:
        """Take this thread's new location: a module, a phase or a backward began or ended."""

    def end(self) -> None:
        """End the step."""


class Tracer(StepTracer, Protocol):
    """A tool, which needs no more than where the rank is."""

    def records(self) -> Sequence[Record]:
        """The journal's records of the step that ended. Empty if the tool keeps what it saw."""


class OperationTracer(StepTracer, Protocol):
    """A tracer that receives what runs, because its device knows nothing of torch: the virtual GPU's model.

    ``inside`` returns the location of a launch by this thread's compiled graph, ``known_in_graph`` a buffer's values
    there; both may be None. With ``is_compiled``, the fast path reports the operations that it runs.
    """

    inside: Callable[[], Location | None]
    location_of: Callable[[int], Location]
    known_in_graph: Callable[[torch.Tensor], torch.Tensor | None]

    @property
    def is_compiled(self) -> bool:
        """See above."""

    def operation(self, op: int, operation: str, location: Location) -> int:
        """Begin an operation in this thread. Returns a tag for it."""

    def done(
        self, tag: int, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], result: object
    ) -> None:
        """End the operation with that tag."""

    def graph(self, op: int, operation: str, location: Location) -> None:
        """This thread runs a compiled graph from now on, by its call's number and name; -1 and "" if it ended."""

    def collective(self, sequence: int, op: int, operation: str, location: Location) -> AbstractContextManager[None]:
        """The context for a collective, on its stream."""

    def once(self) -> AbstractContextManager[None]:
        """The context for work that only this step does, not those after it."""

    def waiting(self, op: int, location: Location) -> AbstractContextManager[None]:
        """The context for a wait that the script asks for."""

    def range_begins(self, name: str) -> int:
        """The script opens a range in this thread. Returns its number."""

    def range_ended(self, number: int) -> None:
        """The script closes the range with that number."""

    def may_end(self) -> None:
        """The step may end here: an optimizer's step did."""

    def taken(self) -> Callable[[], Sequence[Record]]:
        """Take what the step that ended launched. The function makes the journal's records of it, now or later."""

    def cut_short(self) -> None:
        """Drop what the step that ended launched after the last :meth:`may_end`, if there was one."""

    def capture_begins(self) -> None:
        """Begin the capture of a CUDA graph. Its kernels run when the graph is launched, perhaps in the timed step."""

    def capture_ended(self) -> None:
        """End the capture."""


class NsysTracer:
    """Nsight Systems, which runs this process. Ranges are NVTX ranges, and one of them is what nsys captures."""

    def __init__(self) -> None:
        self._inside = ExitStack()
        self._phase: int | None = None

    def begin(self, step: int) -> None:
        """Open the range that nsys captures, then have torch emit ranges for its operations."""
        torch.cuda.synchronize()
        for name in (CAPTURE_RANGE, f"{STEP_RANGE}{step}"):
            self._inside.callback(torch.cuda.nvtx.range_end, torch.cuda.nvtx.range_start(name))
        torch.cuda.synchronize()
        self._inside.enter_context(torch.autograd.profiler.emit_nvtx())

    def location(self, location: Location) -> None:
        """Open the phase's range. It is not on a stack, so the script's own ranges may overlap it."""
        self._end_phase()
        self._phase = torch.cuda.nvtx.range_start(f"{PHASE_RANGE}{location.phase}")

    def end(self) -> None:
        """Wait for what was launched, then close the ranges."""
        torch.cuda.synchronize()
        self._end_phase()
        self._inside.close()

    def records(self) -> Sequence[Record]:
        """No records: they are in nsys's report."""
        return ()

    def _end_phase(self) -> None:
        handle, self._phase = self._phase, None
        if handle is not None:
            torch.cuda.nvtx.range_end(handle)
