"""The host's clock in the driver, and the pace of the core that it runs on (driver/launches.c, driver/pace.c)."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

#: What the clock runs for: in bare steps, launches have no effect.
_BARE, _RECORDED = 1, 2
#: Calls of which the clock's own cost is the mean, and how often they are timed.
_NUM_STOPS, _NUM_ROUNDS = 10_000, 5
#: The least time between two measurements of the core's pace, which take 15 us. What disturbs it lasts a millisecond.
_APART_NS = 250_000


_PACE = ("position", "host_ns", "wall_ns", "cpu_ns", "work_ns", "num_operations", "num_hooks")
#: A moment: launches in the log, us of the host's clock, of the wall and of CPU, us of the fixed piece of work, and how
#: often the recorder's operations and hooks had run.
PaceRow = tuple[int, float, float, float, float, int, int]


class _Pace(ctypes.Structure):
    """``struct pace`` of driver/pace.c."""

    _fields_ = [(name, ctypes.c_uint64) for name in _PACE]


class DriverClock:
    """The clock. The driver must be loaded (:func:`fakedist.gpu.virtual.virtual_gpu`).

    Attributes:
        stop, go: It stands still between these calls of a thread, which may nest; ``go(ns)`` counts so much of it.
        hook_ran: A hook of the recorder's ran.
    """

    def __init__(self) -> None:
        library = ctypes.PyDLL(None)
        library.fakedist_clock.argtypes = [ctypes.c_int, ctypes.c_uint64]
        library.fakedist_clock_go.argtypes = library.fakedist_pace.argtypes = [ctypes.c_uint64]
        library.fakedist_clock_ns.restype = library.fakedist_pace_now.restype = ctypes.c_uint64
        library.fakedist_paces.restype = ctypes.c_size_t
        self._library = library
        self._residue_ns = -1
        self.stop: Callable[[], object] = library.fakedist_clock_stop
        self.go: Callable[[int], object] = library.fakedist_clock_go
        self.hook_ran: Callable[[], object] = library.fakedist_hook_ran
        #: The clock now, in nanoseconds.
        self.now_ns: Callable[[], int] = library.fakedist_clock_ns

    def begin(self) -> None:
        """Start it for bare steps: launches have no effect from now on."""
        residue_ns = self._residue()
        self._library.fakedist_clock(_BARE, residue_ns)

    def end(self) -> None:
        """Switch it off."""
        self._library.fakedist_clock(0, 0)

    def step_begins(self) -> None:
        """Start it for a recorded step, with the core's pace."""
        self._library.fakedist_clock(_RECORDED, self._residue())
        self.pace_begins()
        self.pace_here()
        gc.callbacks.append(self._collects)

    def step_ended(self) -> list[PaceRow]:
        """Switch it off. Returns the core's pace in the step (:meth:`paces`)."""
        gc.callbacks.remove(self._collects)
        self.pace_here()
        self.end()
        return self.paces()

    @contextmanager
    def without_effects(self) -> Iterator[None]:
        """Let launches have no effect, as in bare steps."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def pace_begins(self) -> None:
        """Measure the core's pace over and over while the log of launches is on."""
        self._library.fakedist_pace(_APART_NS)

    def pace_us(self) -> float:
        """How long this thread's core takes for a fixed piece of work now."""
        return int(self._library.fakedist_pace_now()) / 1e3

    def pace_here(self) -> None:
        """Measure the core's pace now, as is done every 250 us or so."""
        self._library.fakedist_pace_here()

    def paces(self) -> list[PaceRow]:
        """The core's pace so far."""
        self._library.fakedist_pace(0)
        first = ctypes.POINTER(_Pace)()
        number = self._library.fakedist_paces(ctypes.byref(first))
        return [
            (
                at.position,
                at.host_ns / 1e3,
                at.wall_ns / 1e3,
                at.cpu_ns / 1e3,
                at.work_ns / 1e3,
                at.num_operations,
                at.num_hooks,
            )
            for at in first[:number]
        ]

    def _residue(self) -> int:
        """Nanoseconds that a stop of the clock leaves on it, from an empty job."""
        if self._residue_ns < 0:
            self._library.fakedist_clock(_BARE, 0)
            costs = []
            for _ in range(_NUM_ROUNDS):
                begin = self.now_ns()
                self._library.fakedist_clock_stops(_NUM_STOPS)
                costs.append((self.now_ns() - begin) / _NUM_STOPS)
            self.end()
            self._residue_ns = round(min(costs))
        return self._residue_ns

    def _collects(self, phase: str, _: Mapping[str, int]) -> None:
        """Have the clock stand still while Python collects garbage."""
        if phase == "start":
            self.stop()
        else:
            self.go(0)
