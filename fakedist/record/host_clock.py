"""The host's clock: how long the script's Python, torch's dispatcher and autograd take before each launch.

A recorded step cannot tell: our kernels at torch's dispatch key and our hooks on modules take as long as a step does
without them. So the script goes on for a few *bare* steps after everything is written, on the virtual GPU and among the
faked ranks, but without the recorder and the value engine. The driver's log has the time of each launch on a clock that
stands still in our own code. The launches of a bare step are matched with those of the timed step.

That clock is the monotonic one, not a thread's CPU time: a read of the latter takes a microsecond, as long as some
launches. Forward and backward, which run in two threads, alternate, so one clock serves both. What other processes and
the core's other hardware thread do to it is taken out
(:mod:`fakedist.record.launch_times`), of the machine's score too.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from math import inf, isnan, nan
from statistics import fmean, median, stdev
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils import _python_dispatch

from fakedist.aligning import align
from fakedist.patch import patched
from fakedist.record.ddp_buckets import new_buckets_within
from fakedist.record.dispatch import no_operation
from fakedist.record.launch_times import CalmClock, Key, Pace, Repeats, as_if_warm, calm_clock, times_of, times_of_rows
from fakedist.record.ledger import Ledger
from fakedist.record.loading import Loading
from fakedist.record.machine_score import ROOM_BYTES, linear_over_pace
from fakedist.record.steps import SAVES
from fakedist.rundir.encoding import Record
from fakedist.rundir.launch_records import HostClockRecord
from fakedist.rundir.records import NoteRecord
from fakedist.rundir.time_notes import (
    host_clock_disturbed,
    host_measured_as_recorded,
    host_not_measured,
    second_run_without_time,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
#: Steps to measure at most, and from how many on the first one does not count: caches that the recorder kept cold.
_MOST_STEPS, _SPARES_FIRST = 24, 3
#: With fewer marks, a step counts that ends with the script: up to its last optimizer step.
_FEW_MARKS = 3
#: Bare steps may take so much of the time of the recorded ones, or so many seconds.
_FRACTION, _LEAST_S = 0.3, 1.5
#: A bare step that takes so many times the longest recorded one, and so many seconds more, has run away.
_RUNS_AWAY, _RUNS_AWAY_S = 10, 5.0
#: Launches that must be those of the timed step.
_LEAST_MATCHED = 0.9
#: The wall time of a step over its CPU time, from which on other processes were in the way.
_DISTURBED = 1.5
#: The recorded step's own clock, over that of bare steps, and its error, as a fraction. It took 1.36 (GPT-2 with DDP),
#: 1.65 (DeepSpeed ZeRO-3), 2.35 (Megatron-core) and 1.52 times as long (a pipeline by hand), as the recorder leaves the
#: script's caches cold. With DTensors, whose own Python is faster in a recorded step, it was 0.93 and 1.25 (Llama).
_RECORDED_SLOWER, _SLOWER_WITH_DTENSORS, _RECORDED_BOUND = 1.6, 1.1, 0.5
#: Bare steps may take so many times as long in all where they were.
_DISTURBED_BUDGET = 2


#: The fields of :class:`Pace`.
_PaceRow = tuple[int, float, float, float, float, int, int]


class ClockedGpu(Protocol):
    """The virtual GPU's log of launches with the host's clock, and the log of the timed step."""

    #: This is the script's second run, whose bare steps are matched with the first run's timed step.
    is_second_run: bool

    #: The clock stands still between these calls; ``go(ns)`` counts so much of that time.
    stop: Callable[[], object]
    go: Callable[[int], object]

    #: A hook of the recorder's ran.
    hook_ran: Callable[[], object]

    @property
    def step(self) -> int:
        """The timed step; 0 without one."""

    @property
    def num_optimizer_steps(self) -> int:
        """Steps of optimizers in the timed step."""

    def rows(self) -> tuple[list[Key], int]:
        """A key of each row of the timed step, and how many rows it has until its last optimizer's step ended.

        Work that no other step repeats has None.
        """

    def keys_for_second_run(self) -> Record:
        """The keys of the timed step's rows, as a second run of the script has them."""

    def begin(self) -> float:
        """Begin the log. Returns by how many us the clock may be off for each launch."""

    def operators(self) -> Mapping[OpOverload, Callable[[], object]]:
        """Operators that Python answers, and what returns the next result of each."""

    def num_launches(self) -> int:
        """Launches in the log."""

    def pace_us(self) -> float:
        """How long the core takes for a fixed piece of work now."""

    def pace_here(self) -> None:
        """Keep the core's pace as of now."""

    def paces(self) -> list[_PaceRow]:
        """The core's pace at moments since the beginning: the fields of :class:`Pace`."""

    def collective(self, sequence: int) -> None:
        """A collective begins on the current stream; -1: it ended."""

    def left_out(self) -> AbstractContextManager[None]:
        """Launches of this thread have no key meanwhile."""

    def recorded(self) -> tuple[list[int], list[float], list[_PaceRow]]:
        """The positions of the timed step's rows in its log, the clock at each launch there, and the core's pace."""

    def reads_itself(self) -> AbstractContextManager[None]:
        """Let this thread read what the device's memory holds, not what it read before."""

    def end(self) -> tuple[list[Key | None], list[float]]:
        """End the log. Returns the keys of its launches, None for those of no script's, and the clock at each."""


class Mark(NamedTuple):
    """Where one bare step ended and the next one began: launches in the log, and several clocks in microseconds.

    ``linear`` is the machine's score there, over the core's pace; NaN without one.
    """

    position: int
    wall_us: float
    cpu_us: float
    loading_us: float
    collector_us: float
    linear: float


def clock_record(
    step: int,
    rows: tuple[Sequence[Key], int],
    log: tuple[Sequence[Key | None], Sequence[float]],
    marks: Sequence[Mark],
    paces: Sequence[Pace],
    *,
    launch_bound_us: float,
    recorded_after_us: float | None = None,
) -> HostClockRecord | str:
    """The record of bare steps between marks, or why there is none. Arguments as :class:`ClockedGpu` returns them.

    A bare step lasts from one mark to the next. The recorded one began with its first forward, so where marks are at
    the end of an optimizer's step, its rows after that belong to the beginning of the next bare step.
    ``recorded_after_us``, the recorded step's time after its last launch: the last bare one ended with its optimizer's.
    """
    recorded, split = rows
    turned = [*recorded[split:], *recorded[:split]]
    (keys, at_us), num_matched, num_launches, after_us = log, 0, 0, 0.0
    times, warm = list[list[float]](), list[list[float]]()
    clock, steps = calm_clock(at_us, paces), list(pairwise(marks))
    for before, after in steps:
        positions = [at for at in range(before.position, after.position) if keys[at] is not None]
        matched = align(turned, [keys[at] for at in positions])
        num_matched = max(num_matched, len(matched) - matched.count(-1))
        num_launches = max(num_launches, len(positions))
        # From the last launch to the mark is time before a first launch: this step's, as no bare one may precede it.
        if recorded_after_us is None or after is not marks[-1]:
            after_us = _at(after, clock, paces) - clock.at_us[positions[-1]] if positions else 0.0
        elif len(steps) == 1:
            after_us = recorded_after_us
        begin_us = _at(before, clock, paces) - after_us
        times.append(times_of_rows(matched, [clock.at_us[at] for at in positions], begin_us))
        warm.append([clock.warm_us[positions[at]] if at >= 0 else 0.0 for at in matched])
    repeated = sum(key is not None for key in recorded)
    if num_matched < _LEAST_MATCHED * repeated:
        return f"only {num_matched:,} of its {repeated:,} launches were those of step {step}"
    repeats = as_if_warm(turned, Repeats(np.array(times), np.array(warm)))
    sums_us = np.nansum(repeats.time_us, axis=1).tolist()
    linears = [mark.linear for mark in marks if not isnan(mark.linear)]
    slowdown = fmean(pace.work_us for pace in paces) / clock.pace_us if clock.pace_us else 1.0
    collector_us = (marks[-1].collector_us - marks[0].collector_us) / len(steps)
    return HostClockRecord(
        step=step,
        dispatch_us=np.roll(times_of(repeats), split).tobytes(),
        num_repeats=len(steps),
        step_us=median(sums_us),
        wall_us=median([after.wall_us - before.wall_us for before, after in steps]),
        cpu_us=median([after.cpu_us - before.cpu_us for before, after in steps]),
        loading_us=median([after.loading_us - before.loading_us for before, after in steps]) / slowdown,
        bound_us=launch_bound_us * num_launches / slowdown,
        spread=stdev(sums_us) / max(fmean(sums_us), 1e-9) if len(steps) > 1 else 0.0,
        linear_us=median(linears) * (clock.pace_us or 1.0) if linears else 0.0,
        collector_us=collector_us / slowdown,
        pace_us=clock.pace_us,
        slowdown=slowdown,
    )


def _at(mark: Mark, clock: CalmClock, paces: Sequence[Pace]) -> float:
    """The calm clock at a mark, when the pace was kept; without a pace, at the launch before it."""
    kept = zip(paces, clock.paces_us, strict=True)
    near = [(abs(pace.wall_us - mark.wall_us), us) for pace, us in kept if pace.position == mark.position]
    return min(near)[1] if near else clock.at_us[mark.position - 1] if mark.position else 0.0


def _after_last_launch(at_us: Sequence[float], paces: Sequence[Pace]) -> float:
    """The time from the last launch of the recorded step to its end, as if in a calm moment; 0 if it was cut short."""
    if not at_us or not paces or paces[-1].position < len(at_us):
        return 0.0
    clock = calm_clock(at_us, paces)
    return clock.paces_us[-1] - clock.at_us[-1]


def recorded_clock(
    step: int,
    keys: Sequence[Key],
    positions: Sequence[int],
    at_us: Sequence[float],
    paces: Sequence[Pace],
    *,
    slower: float = _RECORDED_SLOWER,
) -> HostClockRecord | str:
    """The record of the recorded step itself, or why there is none. Arguments as :class:`ClockedGpu` returns them.

    Its clock ran so many times ``slower`` than that of bare steps.
    """
    if not paces or not positions:
        return "no step was timed"
    clock, first, last = calm_clock(at_us, paces), paces[0], paces[-1]
    repeats = Repeats(
        np.array([times_of_rows(positions, clock.at_us, 0.0)]), np.array([[clock.warm_us[at] for at in positions]])
    )
    dispatch_us = times_of(as_if_warm(keys, repeats)) / slower
    slowdown = fmean(pace.work_us for pace in paces) / clock.pace_us
    dispatch_us[0] += _after_last_launch(at_us, paces)  # the script's own work, as slow there as later
    return HostClockRecord(
        step=step,
        dispatch_us=dispatch_us.tobytes(),
        num_repeats=1,
        step_us=float(dispatch_us.sum()),
        wall_us=last.wall_us - first.wall_us,
        cpu_us=last.cpu_us - first.cpu_us,
        loading_us=0.0,
        bound_us=_RECORDED_BOUND * float(dispatch_us.sum()),
        spread=0.0,
        pace_us=clock.pace_us,
        slowdown=slowdown,
        is_recorded=True,
    )


# ---- the bare steps


class HostClock:
    """Has the script run bare steps once everything is recorded.

    Args:
        gpu: The virtual GPU's log; None where the host's time is not wanted.
        go_bare: Writes and ends everything that is recorded, before the bare steps; raises nothing.
        why_not: Why there can be no bare steps; empty if there can.
        runs_again: Whether the script runs a second time if there were none.
    """

    def __init__(
        self,
        gpu: ClockedGpu | None,
        go_bare: Callable[[], None],
        why_not: Callable[[], str],
        loading: Loading,
        *,
        runs_again: bool = False,
    ) -> None:
        self.is_on = False
        self._gpu, self._runs_again = gpu, runs_again
        self._go_bare, self._why_none = go_bare, why_not
        self._loading = loading
        if gpu is not None:
            loading.clock = self._load
        self._why_not = "that takes up to two steps more than the recorded ones, and the script or --until ended before"
        self._marks: list[Mark] = []
        self._last_optimizer: Mark | None = None  # of a step that began at the last mark
        self._begins_with_forward = self._is_over = False
        self._num_optimizer_steps = 0
        self._slower = _RECORDED_SLOWER
        self._launch_bound_us = self._loading_us = self._collector_us = self._collects_at_us = 0.0
        self._begin_s = self._last_s = time.monotonic()
        self._budget_s = self._limit_s = inf
        self._inside = ExitStack()
        self._told = threading.Event()

    def still(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """The function, with the clock standing still in it, for the recorder's own hooks."""
        gpu = self._gpu
        if gpu is None:
            return function

        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            gpu.stop()
            try:
                return function(*args, **kwargs)
            finally:
                gpu.hook_ran()
                gpu.go(0)

        return run

    @property
    def is_wanted(self) -> bool:
        """Return whether the host's time is to be measured."""
        return self._gpu is not None

    def begins(
        self, recorded_s: float, longest_s: float, ledger: Ledger, root: nn.Module | None, stop: Callable[[], None]
    ) -> bool:
        """Begin the bare steps. Returns whether they can be.

        ``recorded_s`` are seconds that the recorded steps took, ``longest_s`` those of the longest. A step begins with
        a forward of ``root``, which is about to run. Without it, a step ends with an optimizer's, and the first, which
        is not whole, does not count. ``stop`` raises what ends the script.
        """
        gpu = self._gpu
        if gpu is None or self._is_over:
            return False
        self._is_over = True
        if why := self._why_none() or self._why_none_now(gpu):
            self._why_not = why
            return False
        self._go_bare()
        self._launch_bound_us = gpu.begin()
        self._inside.enter_context(no_operation(gpu.operators()))
        self._inside.enter_context(_no_saves(stop))
        # C++ goes by what it reads there without a check: the indices of buckets that it has just uploaded.
        self._inside.enter_context(new_buckets_within(gpu.reads_itself))
        self._inside.callback(gc.callbacks.remove, self._collects)
        gc.callbacks.append(self._collects)
        ledger.around = self._around
        self._loading.is_over = True
        self._loading_us = 0.0
        self._begin_s = self._last_s = time.monotonic()
        self._budget_s = max(_FRACTION * recorded_s, _LEAST_S)
        self._limit_s = _RUNS_AWAY * longest_s + _RUNS_AWAY_S
        self._is_over, self.is_on = False, True
        if root is not None and root._compiled_call_impl is None:
            self._begins_with_forward = True
            handle = root.register_forward_pre_hook(lambda *_: self._forward(stop), prepend=True)
            self._inside.callback(handle.remove)
            self._num_optimizer_steps = 0 if _has_compiled() else gpu.num_optimizer_steps
            self._may_mark(gpu)
        threading.Thread(target=self._watch, name="fakedist-host-clock", daemon=True).start()
        return True

    def _why_none_now(self, gpu: ClockedGpu) -> str:
        if not gpu.step:
            return "no step was timed"
        if not gpu.num_optimizer_steps:
            return "no optimizer stepped in the timed step, so nothing says where a step ends"
        if _python_dispatch._get_current_dispatch_mode_stack():
            return "the script was in a TorchDispatchMode when its recorded steps ended"
        if torch._C._autograd._profiler_enabled():
            return "the script runs its own profiler"
        return ""

    def optimizer_ended(self) -> bool:
        """An optimizer's step ended, in a bare step. Returns whether the script is to be stopped here."""
        gpu = self._gpu
        assert gpu is not None
        if self._is_over:
            return True
        self._num_optimizer_steps += 1
        if not self._begins_with_forward:
            return self._may_mark(gpu)
        if self._marks and self._num_optimizer_steps == gpu.num_optimizer_steps:
            gpu.pace_here()
            self._last_optimizer = self._moment(gpu)  # of the script, perhaps
        return False

    def optimizer_recorded(self, optimizer: object) -> None:
        """An optimizer's step ended, in a recorded step."""
        dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        groups = getattr(optimizer, "param_groups", None) or []
        if dtensor and any(isinstance(parameter, dtensor) for group in groups for parameter in group["params"][:1]):
            self._slower = _SLOWER_WITH_DTENSORS

    def _forward(self, stop: Callable[[], None]) -> None:
        """The module whose forward begins a step is called, in a bare step."""
        gpu = self._gpu
        assert gpu is not None
        if self.is_on and (self._is_over or self._may_mark(gpu)):
            stop()

    def _may_mark(self, gpu: ClockedGpu) -> bool:
        """Take a mark if the optimizers' steps of a whole step ended since the last one. Returns whether it is over."""
        gpu.stop()
        try:
            if self._num_optimizer_steps >= gpu.num_optimizer_steps:
                self._num_optimizer_steps = 0
                self._mark(gpu)
            return self._is_over
        finally:
            gpu.go(0)

    def _mark(self, gpu: ClockedGpu) -> None:
        gpu.pace_here()
        mark = self._moment(gpu)
        self._marks.append(mark._replace(linear=self._score(gpu)))
        self._last_optimizer = None
        gpu.pace_here()
        now_s = mark.wall_us / 1e6
        took_s, self._last_s = now_s - self._last_s, now_s
        self._told.set()
        num_steps = len(self._marks) - 1
        used_s = now_s - self._begin_s
        # With one disturbed step alone, nothing would tell what the others had in the way.
        budget_s = self._budget_s * (_DISTURBED_BUDGET if num_steps and self._was_disturbed() else 1)
        self._is_over = num_steps >= _MOST_STEPS or (num_steps > 0 and used_s + took_s > budget_s)

    def _moment(self, gpu: ClockedGpu) -> Mark:
        clocks = (time.monotonic() * 1e6, time.process_time() * 1e6, self._loading_us, self._collector_us)
        return Mark(gpu.num_launches(), *clocks, nan)

    def _was_disturbed(self) -> bool:
        before, after = self._marks[-2:]
        return after.wall_us - before.wall_us > _DISTURBED * (after.cpu_us - before.cpu_us)

    def _score(self, gpu: ClockedGpu) -> float:
        """The machine's score over its pace; NaN inside a CUDA graph's capture, or where the GPU is nearly full."""
        if torch.cuda.is_current_stream_capturing():
            return nan
        with suppress(RuntimeError), gpu.left_out():
            if torch.cuda.mem_get_info()[0] >= ROOM_BYTES:  # else a step may lack what the score has taken
                return linear_over_pace(gpu.pace_us)
        return nan

    def _collects(self, phase: str, _: Mapping[str, int]) -> None:
        """Have the clock stand still while Python collects garbage."""
        gpu = self._gpu
        assert gpu is not None
        if phase == "start":
            gpu.stop()
            self._collects_at_us = time.monotonic() * 1e6
        else:
            self._collector_us += time.monotonic() * 1e6 - self._collects_at_us
            gpu.go(0)

    def records(self, how: str) -> list[Record]:
        """End the bare steps. Returns their record, or a note; ``how`` is how the script ended."""
        gpu = self._gpu
        if gpu is None:
            return []
        record = self._bare_record(gpu, how) if self.is_on else self._why_not
        if isinstance(record, str):
            why = record
            if gpu.is_second_run:
                return [NoteRecord(second_run_without_time(why))]
            record = (
                recorded_clock(gpu.step, *self._recorded(gpu), slower=self._slower) if gpu.step else "no step was timed"
            )
            if isinstance(record, str):
                return [NoteRecord(host_not_measured(why))]
            # With a second run to come, what reads its result says where the time came from.
            said = gpu.keys_for_second_run() if self._runs_again else NoteRecord(host_measured_as_recorded(why))
            return [record, said]
        blocked = record.wall_us / max(record.cpu_us, 1.0)
        return [record, *([NoteRecord(host_clock_disturbed(blocked))] if blocked > _DISTURBED else [])]

    def _bare_record(self, gpu: ClockedGpu, how: str) -> HostClockRecord | str:
        self.is_on, self._is_over = False, True
        self._told.set()
        self._inside.close()
        log = gpu.end()
        recorded_after_us = None
        if self._last_optimizer is not None and len(self._marks) < _FEW_MARKS:
            self._marks.append(self._last_optimizer)
            recorded_after_us = _after_last_launch(*self._recorded(gpu)[2:])
        if len(self._marks) < 2:
            return how or "the script ended before such a step did"
        keys, split = gpu.rows()
        if self._last_optimizer is not None and len(self._marks) == 2:
            keys = [*keys[:split], *[None] * (len(keys) - split)]  # no such step has what follows the optimizer's end
        if self._begins_with_forward:
            split = len(keys)
        marks, paces = self._marks[len(self._marks) > _SPARES_FIRST :], [Pace(*pace) for pace in gpu.paces()]
        record = clock_record(
            gpu.step,
            (keys, split),
            log,
            marks,
            paces,
            launch_bound_us=self._launch_bound_us,
            recorded_after_us=recorded_after_us,
        )
        return record if isinstance(record, str) else replace(record, is_second_run=gpu.is_second_run)

    @staticmethod
    def _recorded(gpu: ClockedGpu) -> tuple[Sequence[Key], Sequence[int], Sequence[float], Sequence[Pace]]:
        positions, at_us, paces = gpu.recorded()
        return gpu.rows()[0], positions, at_us, [Pace(*pace) for pace in paces]

    @contextmanager
    def _around(self, sequence: int, operation: str) -> Iterator[None]:
        assert self._gpu is not None
        self._gpu.collective(sequence)
        try:
            yield
        finally:
            self._gpu.collective(-1)

    def _load(self, load: Callable[[], object]) -> object:
        """Take a batch. Of that time, only CPU time of this thread counts: the real GPU leaves workers more time."""
        gpu = self._gpu
        assert gpu is not None
        gpu.stop()
        gpu.pace_here()  # between these two, the process may wait for other processes: no wait for a core
        begin_ns = time.thread_time_ns()
        try:
            return load()
        finally:
            loading_ns = time.thread_time_ns() - begin_ns
            self._loading_us += loading_ns / 1000
            gpu.pace_here()
            gpu.go(loading_ns)

    def _watch(self) -> None:
        """End the process if a bare step takes too long: everything but the host's time is written."""
        while self._told.wait(self._limit_s):
            self._told.clear()
            if not self.is_on:
                return
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)  # as any end of the script, it closes the recording


def _has_compiled() -> bool:
    """Return whether Dynamo compiled anything. It does so again in the first bare step, whose hooks are others."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


@contextmanager
def _no_saves(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop``, which raises, before a checkpoint is written: it would have the values of no step."""
    with ExitStack() as stack:
        for name, functions in SAVES:
            for function in functions if name in sys.modules else ():

                def save(*args: object, **kwargs: object) -> None:
                    stop()

                stack.enter_context(patched(sys.modules[name], function, save))
        yield
