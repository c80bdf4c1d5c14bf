"""The timed step under Nsight Systems, which traces this process from outside: NVTX ranges tell it where we are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from fakedist.run.encoding import Record
from fakedist.run.rows import Place
from fakedist.run.trace_records import CAPTURE_RANGE, PHASE_RANGE, STEP_RANGE


class NsysTracer:
    """Nsight Systems, which runs this process. Ranges are NVTX ranges, and one of them tells nsys what to capture."""

    def __init__(self) -> None:
        self._inside = ExitStack()
        self._phase: int | None = None

    def begin(self, step: int) -> None:
        """Open the range that nsys captures, then have torch emit ranges for its operations."""
        torch.cuda.synchronize()
        for each in (CAPTURE_RANGE, f"{STEP_RANGE}{step}"):
            self._inside.callback(torch.cuda.nvtx.range_end, torch.cuda.nvtx.range_start(each))
        torch.cuda.synchronize()
        self._inside.enter_context(torch.autograd.profiler.emit_nvtx())

    def place(self, place: Place) -> None:
        """Open the phase's range. It is not on a stack, so the script's own ranges may overlap it."""
        self._end_phase()
        self._phase = torch.cuda.nvtx.range_start(f"{PHASE_RANGE}{place.phase}")

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
