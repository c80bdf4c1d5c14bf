"""Places a step's kernels and collectives in time, and finds the step's interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.hosts import HostCosts, scaled
from fakedist.cost_model.overlap import SharedLinks, settle
from fakedist.cost_model.timeline import Array, Placed, Timeline
from fakedist.rundir.launch_records import LAUNCH_KINDS

_COLLECTIVE = LAUNCH_KINDS.index("collective")
#: Families of kernels that arithmetic limits.
_ARITHMETIC = ("gemm", "attention", "convolution")
#: The interval of a sum over kernels, from all their prices.
_KernelInterval = Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class PlacedStep:
    """A step in time; ``time_us`` has the time of each row of ``launches``, NaN if unknown."""

    placed: Placed
    time_us: Array


class StepInterval(NamedTuple):
    """The 90 % interval of a step, in microseconds; None if unknown.

    ``kernels_us`` is by how much longer the step may be because of its kernels alone.
    """

    low_us: float | None = None
    high_us: float | None = None
    kernels_us: float = 0.0
    calls_us: float = 0.0
    host_us: float = 0.0
    allocator_us: float = 0.0


class StepLaunches:
    """The launches of a step with the prices of their work: time_us, bound, filled.

    A measured time replaces a price. Without ``communication``, collectives take no time.

    Raises:
        RunDirectoryError: The tables are damaged.
    """

    def __init__(
        self, launches: pd.DataFrame, work: pd.DataFrame, priced: pd.DataFrame, communication: Communication | None
    ) -> None:
        self._call = launches["call"].to_numpy("i8")
        queues = None if communication is None else communication.queues(self._call)
        self.timeline = timeline = Timeline(launches, queues)
        self._work, self._priced, self._communication = work, priced, communication
        self._of_work = launches["work"].to_numpy("i8")
        self._is_call = timeline.has_work & (timeline.what == _COLLECTIVE)
        is_kernel = timeline.has_work & ~self._is_call
        self._alone_us = np.where(is_kernel, priced["time_us"].to_numpy("f8")[self._of_work], np.nan)
        filled = priced["filled"].to_numpy("f8") if "filled" in priced else np.zeros(len(priced))
        self._filled = np.where(is_kernel, filled[self._of_work], 0.0)
        if "measured_us" in launches:
            measured = launches["measured_us"].to_numpy("f8")
            is_measured = is_kernel & np.isfinite(measured)
            self._alone_us = np.where(is_measured, measured, self._alone_us)
            self._filled[is_measured] = 0.0  # measured next to whatever ran on other streams
        if communication is not None:
            self._alone_us[self._is_call] = communication.of_rows(self._call[self._is_call], "time_us")

    @property
    def kernels_us(self) -> float:
        """The sum of what the kernels take, each alone."""
        return float(np.nansum(np.where(self._is_call, 0.0, self._alone_us)))

    def place(self, host: HostCosts, kept: npt.NDArray[np.bool_] | None = None) -> PlacedStep:
        """Place the launches. Where kernels and collectives overlap, they take as long as they leave each other.

        With ``kept``, flags of the rows of ``launches``, only those take time on the GPU.
        """
        durations, rows = np.nan_to_num(self._alone_us), np.flatnonzero(self.timeline.has_work)
        durations = durations if kept is None else np.where(kept, durations, 0.0)
        last: list[Placed] = []

        def starts(of_rows: Array) -> Array:
            durations[rows] = of_rows
            last[:] = [self.timeline.place(durations, host)]
            return last[0].start_us

        settle(starts, durations[rows], *self._shared(rows, durations[rows] > 0))
        return PlacedStep(last[0], np.where(np.isnan(self._alone_us), np.nan, durations))

    def interval(self, step: PlacedStep, host: HostCosts, of_kernels: _KernelInterval) -> StepInterval:
        """The step's 90 % interval, from that of the sum of all kernels."""
        varied = self.varied(step, of_kernels)
        if varied is None:
            return StepInterval()
        end = step.placed.end_us
        ends = [[self.timeline.place(durations, host).end_us for durations in side] for side in varied]
        kernels_us, calls_us = ([abs(other - end) for other in ends[1]] + [0.0])[:2]
        durations = np.nan_to_num(step.time_us)
        for side, factor in zip(ends, host.range, strict=True):
            side.append(self.timeline.place(durations, scaled(host, factor)).end_us)
        host_us, allocator_us = abs(ends[1][-1] - end), 0.0
        if bounds := self.timeline.allocator_bounds():
            for side, timeline in zip(ends, bounds, strict=True):
                side.append(timeline.place(durations, host).end_us)
            allocator_us = abs(ends[1][-1] - end)
        return StepInterval(*interval_of(end, ends), kernels_us, calls_us, host_us, allocator_us)

    def varied(self, step: PlacedStep, of_kernels: _KernelInterval) -> list[list[Array]] | None:
        """Durations of the rows at both ends of their 90 % intervals; None if those are unknown.

        Kernels vary together, by the interval of their sum; so do collectives. Each side has kernels, then any
        collectives.
        """
        durations = np.nan_to_num(step.time_us)
        whole, bounds = self.kernels_us, of_kernels()
        if not whole or any(math.isnan(bound) for bound in bounds):
            return None
        sides = []
        for bound, column in zip(bounds, ("low_us", "high_us"), strict=True):
            side = [durations * np.where(self._is_call, 1.0, bound / whole)]
            if self._communication is not None and self._is_call.any():
                factors = np.ones(len(durations))
                bound_us = self._communication.of_rows(self._call[self._is_call], column)
                with np.errstate(divide="ignore", invalid="ignore"):
                    ratios = bound_us / self._alone_us[self._is_call]
                factors[self._is_call] = np.nan_to_num(ratios, nan=1.0, posinf=1.0)
                side.append(durations * factors)
            sides.append(side)
        return sides

    def _memory_bound(self) -> Array:
        """The rows of work that memory limits: as the price says, else (of a measured kernel) by family."""
        bound = self._priced["bound"].astype(str)
        if (bound != "").any() or "family" not in self._work:
            return (bound == "memory").to_numpy(bool)
        return (~self._work["family"].isin(_ARITHMETIC)).to_numpy(bool)

    def _shared(self, rows: Array, takes_time: Array) -> tuple[list[SharedLinks], Array | None]:
        """The links and the SMs that rows with work share, as :func:`settle` takes them, where they take time."""
        communication = self._communication
        if communication is not None and not communication.interferes:
            return [], None
        if communication is not None and (takes_time & self._is_call[rows]).any():
            groups = self._shared_links(rows, communication)
        else:
            groups = []
        streams, _ = self.timeline.streams_and_queues()
        filled = np.where(takes_time, self._filled[rows], 0.0)
        return groups, filled if len(np.unique(streams[filled > 0])) > 1 else None

    def _shared_links(self, rows: Array, communication: Communication) -> list[SharedLinks]:
        work = self._of_work[rows]
        memory_bound = self._memory_bound().astype("f8")
        over_nodes = np.zeros(len(rows), bool)
        is_call = self._is_call[rows]
        over_nodes[is_call] = communication.of_rows(self._call[rows][is_call], "num_nodes") > 1
        shares = np.zeros(len(rows))
        shares[is_call] = np.nan_to_num(communication.of_rows(self._call[rows][is_call], "link_share"))
        groups = []
        for members, across in ((is_call & ~over_nodes, False), (is_call & over_nodes, True)):
            if members.any():
                rates = communication.slowed(self._work, memory_bound, over_nodes=across)[work]
                groups.append(SharedLinks(members, rates, shares))
        return groups


def interval_of(end_us: float, ends_us: Sequence[Sequence[float]]) -> tuple[float, float]:
    """An interval from the step's end with each part at its least and at its most, which are independent."""
    low, high = (math.hypot(*(end - end_us for end in side)) for side in ends_us)
    return end_us - low, end_us + high
