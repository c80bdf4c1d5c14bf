"""The host's clock: how long the script's Python, torch's dispatcher and autograd take before each launch.

A recorded step cannot tell: our kernels at torch's dispatch key and our hooks on modules take as long as a step does
without them. So the script goes on for a few *bare* steps after everything is written, on the virtual GPU and among the
faked ranks, but without the recorder and the value engine. The driver's log has the time of each launch on a clock that
stands still in our own code. The launches of a bare step are matched with those of the timed step.

That clock is the monotonic one, not a thread's CPU time: a read of the latter takes a microsecond, as long as some
launches. A thread that was pre-empted shows in one of the steps, launch by launch, and in the CPU time of a whole step.
Forward and backward, which run in two threads, alternate, so one clock serves both.

A core's speed changes, within milliseconds and for seconds, with what its sibling runs: on a virtual machine another's.
That slows the machine's score, which repeats the same instructions, more than a step: 2.2 to 3.6 times against up to
1.35, where a call of a Python function takes 1.7 times as long. So the score is the least of many, and only steps
between scores near it count, if there are any. Where a run is disturbed all the time, they are up to a third too long.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import pairwise
from math import inf, isnan, nan
from statistics import fmean, median, stdev
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils import _python_dispatch

from fakedist.patch import patched
from fakedist.record.ddp_buckets import new_buckets_within
from fakedist.record.dispatch import no_operation
from fakedist.record.ledger import Ledger
from fakedist.record.loading import Loading
from fakedist.record.machine_score import ROOM_BYTES, linear_us
from fakedist.record.steps import SAVES
from fakedist.rundir.encoding import Record
from fakedist.rundir.launch_records import HostClockRecord
from fakedist.rundir.records import NoteRecord
from fakedist.rundir.time_notes import host_clock_disturbed, host_not_measured

#: What a launch is. Those with equal keys are the same work on the same stream.
Key = object

#: Steps to measure at most, and from how many on the first one does not count: caches that the recorder kept cold.
_MOST_STEPS, _SPARES_FIRST = 8, 3
#: Bare steps may take so much of the time of the recorded ones, or so many seconds.
_FRACTION, _LEAST_S = 0.3, 1.5
#: A bare step that takes so many times the longest recorded one, and so many seconds more, has run away.
_RUNS_AWAY, _RUNS_AWAY_S = 10, 5.0
#: Launches that must be those of the timed step.
_LEAST_MATCHED = 0.9
#: Launches to look ahead for those that follow in both steps, and how many of them must agree.
_LOOK_AHEAD, _AGREE = 64, 3
#: The wall time of a step over its CPU time, from which on other processes were in the way.
_DISTURBED = 1.5
#: Bare steps may take so many times as long in all where they were.
_DISTURBED_BUDGET = 2
#: Scores at most so many times the least are of a core that was not disturbed.
_UNDISTURBED = 1.2
#: A launch that takes so many times its least, and so many us more, was pre-empted: time slices are 0.7 ms and longer.
_PREEMPTED, _PREEMPTED_US = 1.5, 300.0


class ClockedGpu(Protocol):
    """The virtual GPU's log of launches with the host's clock, and the log of the timed step."""

    #: The clock stands still between these calls; ``go(ns)`` counts so much of that time.
    stop: Callable[[], object]
    go: Callable[[int], object]

    @property
    def step(self) -> int:
        """The timed step; 0 without one."""

    @property
    def num_optimizer_steps(self) -> int:
        """Steps of optimizers in the timed step."""

    def rows(self) -> tuple[list[Key], int]:
        """A key of each row of the timed step, and how many rows it has until its last optimizer's step ended."""

    def begin(self) -> float:
        """Begin the log. Returns by how many us the clock may be off for each launch."""

    def operators(self) -> Mapping[OpOverload, Callable[[], object]]:
        """Operators that Python answers, and what returns the next result of each."""

    def now(self) -> tuple[int, float]:
        """Launches in the log, and microseconds on the host's clock."""

    def collective(self, sequence: int) -> None:
        """A collective begins on the current stream; -1: it ended."""

    def left_out(self) -> AbstractContextManager[None]:
        """Launches of this thread have no key meanwhile."""

    def reads_itself(self) -> AbstractContextManager[None]:
        """Let this thread read what the device's memory holds, not what it read before."""

    def end(self) -> tuple[list[Key | None], list[float]]:
        """End the log. Returns the keys of its launches, None for those of no script's, and the clock at each."""


class Mark(NamedTuple):
    """Where one bare step ended and the next one began: launches in the log, and several clocks in microseconds.

    ``linear_us`` is the machine's score there; NaN without one.
    """

    position: int
    host_us: float
    wall_us: float
    cpu_us: float
    loading_us: float
    collector_us: float
    linear_us: float


# ---- arithmetic on logs


def align(recorded: Sequence[Key], bare: Sequence[Key]) -> list[int]:
    """For each launch of the recorded step, the position of the same launch in a bare one; -1 where it has none.

    Where they differ, both are followed from the nearest launches on from which they agree for a while. Of those
    before, as many as possible are matched in order.
    """
    matched = [-1] * len(recorded)
    at = bare_at = 0
    while at < len(recorded) and bare_at < len(bare):
        if recorded[at] == bare[bare_at]:
            matched[at] = bare_at
            at, bare_at = at + 1, bare_at + 1
            continue
        end, bare_end = _agree_again(recorded, bare, at, bare_at)
        for row, position in _common(recorded[at:end], bare[bare_at:bare_end]):
            matched[at + row] = bare_at + position
        at, bare_at = end, bare_end
    return matched


def _agree_again(recorded: Sequence[Key], bare: Sequence[Key], at: int, bare_at: int) -> tuple[int, int]:
    for total in range(1, _LOOK_AHEAD):
        for left_out in range(total + 1):
            begin, bare_begin = at + left_out, bare_at + total - left_out
            follows = recorded[begin : begin + _AGREE]
            if len(follows) == _AGREE and follows == bare[bare_begin : bare_begin + _AGREE]:
                return begin, bare_begin
    return min(at + _LOOK_AHEAD, len(recorded)), min(bare_at + _LOOK_AHEAD, len(bare))


def _common(recorded: Sequence[Key], bare: Sequence[Key]) -> Iterator[tuple[int, int]]:
    """Positions of a longest common subsequence of two short sequences."""
    longest = [[0] * (len(bare) + 1) for _ in range(len(recorded) + 1)]
    for row in reversed(range(len(recorded))):
        for position in reversed(range(len(bare))):
            is_same = recorded[row] == bare[position]
            longest[row][position] = (
                longest[row + 1][position + 1] + 1
                if is_same
                else max(longest[row + 1][position], longest[row][position + 1])
            )
    row = position = 0
    while row < len(recorded) and position < len(bare):
        if recorded[row] == bare[position]:
            yield row, position
            row, position = row + 1, position + 1
        elif longest[row + 1][position] >= longest[row][position + 1]:
            row += 1
        else:
            position += 1


def times_of_rows(matched: Sequence[int], at_us: Sequence[float], before_us: float) -> list[float]:
    """The time from the launch matched before to each one; NaN for what is not matched.

    ``before_us`` is the clock before the first. What only a bare step launches counts for the next launch of both.
    """
    times, last_us = [], before_us
    for position in matched:
        times.append(nan if position < 0 else at_us[position] - last_us)
        last_us = last_us if position < 0 else at_us[position]
    return times


def mean_times(repeats: Sequence[Sequence[float]]) -> list[float]:
    """The mean time of each row over the steps that have it, not pre-empted, at least 0; NaN for a row of no step."""
    return [_undisturbed_mean([time for time in times if not isnan(time)]) for times in zip(*repeats, strict=True)]


def _undisturbed_mean(times: Sequence[float]) -> float:
    if not times:
        return nan
    most = _PREEMPTED * min(times) + _PREEMPTED_US
    return max(fmean(time for time in times if time <= most), 0.0)


def without_waits(times: Sequence[float], keys: Sequence[Key], waited_us: float) -> list[float]:
    """The rows of a step without the time in which the process had no core.

    It is taken from the rows that exceed the median of the same work by more than a time slice, the longest first.
    """
    by_key = dict[Key, list[float]]()
    for key, time_us in zip(keys, times, strict=True):
        if not isnan(time_us):
            by_key.setdefault(key, []).append(time_us)
    typical = {key: median(each) for key, each in by_key.items()}
    found = list(times)
    rows = [row for row, time_us in enumerate(times) if not isnan(time_us)]
    for row in sorted(rows, key=lambda row: typical[keys[row]] - times[row]):
        excess_us = times[row] - typical[keys[row]]
        if waited_us <= 0 or excess_us <= _PREEMPTED_US:
            break
        found[row] -= min(excess_us, waited_us)
        waited_us -= excess_us
    return found


def clock_record(
    step: int,
    rows: tuple[Sequence[Key], int],
    log: tuple[Sequence[Key | None], Sequence[float]],
    marks: Sequence[Mark],
    launch_bound_us: float,
) -> HostClockRecord | str:
    """The record of bare steps between marks, or why there is none. Arguments as :class:`ClockedGpu` returns them.

    A bare step lasts from one mark to the next. The recorded one began with its first forward, so where marks are at
    the end of an optimizer's step, its rows after that belong to the beginning of the next bare step.
    """
    recorded, split = rows
    turned = [*recorded[split:], *recorded[:split]]
    (keys, at_us), repeats, num_matched, num_launches = log, [], 0, 0
    pairs = undisturbed(marks)
    for before, after in pairs:
        positions = [at for at in range(before.position, after.position) if keys[at] is not None]
        matched = align(turned, [keys[at] for at in positions])
        num_matched = max(num_matched, len(matched) - matched.count(-1))
        num_launches = max(num_launches, len(positions))
        # The time between the mark and the last launch before it belongs to the first launch after it.
        begin_us = at_us[before.position - 1] if before.position else before.host_us
        times = times_of_rows(matched, [at_us[at] for at in positions], begin_us)
        in_order = [*times[len(recorded) - split :], *times[: len(recorded) - split]]
        waited_us = (after.wall_us - before.wall_us) - (after.cpu_us - before.cpu_us)
        repeats.append(without_waits(in_order, recorded, waited_us))
    if num_matched < _LEAST_MATCHED * len(recorded):
        return f"only {num_matched:,} of its {len(recorded):,} launches were those of step {step}"
    steps_us = [after.host_us - before.host_us for before, after in pairs]
    sums_us = [sum(time_us for time_us in times if not isnan(time_us)) for times in repeats]
    scores = [mark.linear_us for mark in marks if not isnan(mark.linear_us)]
    return HostClockRecord(
        step=step,
        dispatch_us=array("d", mean_times(repeats)).tobytes(),
        num_repeats=len(pairs),
        step_us=median(steps_us),
        wall_us=median([after.wall_us - before.wall_us for before, after in pairs]),
        cpu_us=median([after.cpu_us - before.cpu_us for before, after in pairs]),
        loading_us=median([after.loading_us - before.loading_us for before, after in pairs]),
        bound_us=launch_bound_us * num_launches,
        spread=stdev(sums_us) / max(fmean(sums_us), 1e-9) if len(pairs) > 1 else 0.0,
        linear_us=min(scores, default=0.0),
        collector_us=(marks[-1].collector_us - marks[0].collector_us) / (len(marks) - 1),
    )


def undisturbed(marks: Sequence[Mark]) -> list[tuple[Mark, Mark]]:
    """The bare steps between two scores near the least one. If there are none, that between the lowest scores.

    Without all scores, every step.
    """
    pairs = list(pairwise(marks))
    if any(isnan(mark.linear_us) for mark in marks):
        return pairs
    highest_us = [max(before.linear_us, after.linear_us) for before, after in pairs]
    most_us = max(_UNDISTURBED * min(mark.linear_us for mark in marks), min(highest_us))
    return [pair for pair, high_us in zip(pairs, highest_us, strict=True) if high_us <= most_us]


# ---- the bare steps


class HostClock:
    """Has the script run bare steps once everything is recorded.

    Args:
        gpu: The virtual GPU's log; None where the host's time is not wanted.
        go_bare: Writes and ends everything that is recorded, before the bare steps; raises nothing.
        why_not: Why there can be no bare steps; empty if there can.
    """

    def __init__(
        self, gpu: ClockedGpu | None, go_bare: Callable[[], None], why_not: Callable[[], str], loading: Loading
    ) -> None:
        self.is_on = False
        self._gpu = gpu
        self._go_bare, self._why_none = go_bare, why_not
        self._loading = loading
        self._why_not = "that takes up to two steps more than the recorded ones, and the script or --until ended before"
        self._marks: list[Mark] = []
        self._begins_with_forward = self._is_over = False
        self._num_optimizer_steps = 0
        self._launch_bound_us = self._loading_us = self._collector_us = self._collects_at_us = 0.0
        self._begin_s = self._last_s = time.monotonic()
        self._budget_s = self._limit_s = inf
        self._inside = ExitStack()
        self._told = threading.Event()

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
        self._loading.clock = self._load
        self._begin_s = self._last_s = time.monotonic()
        self._budget_s = max(_FRACTION * recorded_s, _LEAST_S)
        self._limit_s = _RUNS_AWAY * longest_s + _RUNS_AWAY_S
        self._is_over, self.is_on = False, True
        if root is not None and not _is_compiled(root):
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
        return not self._begins_with_forward and self._may_mark(gpu)

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
        position, host_us = gpu.now()
        now_s = time.monotonic()
        clocks = (host_us, now_s * 1e6, time.process_time() * 1e6, self._loading_us, self._collector_us)
        self._marks.append(Mark(position, *clocks, self._score(gpu)))
        took_s, self._last_s = now_s - self._last_s, now_s
        self._told.set()
        num_steps = len(self._marks) - 1
        used_s = now_s - self._begin_s
        # With one disturbed step alone, nothing would tell what the others had in the way.
        budget_s = self._budget_s * (_DISTURBED_BUDGET if num_steps and self._was_disturbed() else 1)
        self._is_over = num_steps >= _MOST_STEPS or (num_steps > 0 and used_s + took_s > budget_s)

    def _was_disturbed(self) -> bool:
        before, after = self._marks[-2:]
        return after.wall_us - before.wall_us > _DISTURBED * (after.cpu_us - before.cpu_us)

    def _score(self, gpu: ClockedGpu) -> float:
        """The machine's score now; NaN inside a CUDA graph's capture, or where the GPU is nearly full."""
        if torch.cuda.is_current_stream_capturing():
            return nan
        with suppress(RuntimeError), gpu.left_out():
            if torch.cuda.mem_get_info()[0] >= ROOM_BYTES:  # else a step may lack what the score has taken
                return linear_us()
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
        if not self.is_on:
            return [NoteRecord(host_not_measured(self._why_not))]
        self.is_on, self._is_over = False, True
        self._told.set()
        self._inside.close()
        log, self._loading.clock = gpu.end(), None
        if len(self._marks) < 2:
            return [NoteRecord(host_not_measured(how or "the script ended before such a step did"))]
        keys, split = gpu.rows()
        if self._begins_with_forward:
            split = len(keys)
        marks = self._marks[len(self._marks) > _SPARES_FIRST :]
        record = clock_record(gpu.step, (keys, split), log, marks, self._launch_bound_us)
        if isinstance(record, str):
            return [NoteRecord(host_not_measured(record))]
        blocked = record.wall_us / max(record.cpu_us, 1.0)
        return [record, *([NoteRecord(host_clock_disturbed(blocked))] if blocked > _DISTURBED else [])]

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
        begin_ns = time.thread_time_ns()
        try:
            return load()
        finally:
            loading_ns = time.thread_time_ns() - begin_ns
            self._loading_us += loading_ns / 1000
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


def _is_compiled(module: nn.Module) -> bool:
    """Return whether hooks of a module are part of a compiled graph, so that one more hook has it compiled again."""
    return module._compiled_call_impl is not None


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
