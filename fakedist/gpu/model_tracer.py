"""Traces a step on the virtual GPU: the recorder's operations and the driver's log of launches, joined."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed import distributed_c10d

from fakedist.frames import script_line
from fakedist.gpu.bare_steps import ReadTape, TimedLaunches
from fakedist.gpu.demand.extension_demand import watched_calls
from fakedist.gpu.demand.launch_demand import Tagged
from fakedist.gpu.demand.operation_demand import Demand, DemandCounter, reduced_demand
from fakedist.gpu.demand.triton_demand import TritonKernel
from fakedist.gpu.demand.work_shapes import Known
from fakedist.gpu.driver_clock import DriverClock, PaceRow
from fakedist.gpu.launch_log import Launch, LaunchLog
from fakedist.gpu.launch_rows import LaunchRows, ScriptRange, StepRanges, Tags
from fakedist.gpu.values.tensors import Arguments, Keywords
from fakedist.patch import patched, present
from fakedist.rundir.collector import no_collector
from fakedist.rundir.encoding import Record
from fakedist.rundir.launch_records import HostWork
from fakedist.rundir.rows import Location

#: The classes that launch Triton's kernels and hold their arguments: Inductor's and Triton's own.
_TRITON = (("torch._inductor.runtime.triton_heuristics", "CachingAutotuner"), ("triton.runtime.jit", "JITFunction"))

#: Functions of torch.ops.symm_mem.fused_*matmul_reduce_scatter: chunks of a product go to the ranks that add them up.
#: Nothing sees the operations inside; of the kernels, all but the sum and a wait of 100 cycles say what they do.
_REDUCING = ("_fused_matmul_reduce_scatter_impl", "_fused_scaled_matmul_reduce_scatter_impl")
_SYMMETRIC = "torch.distributed._symmetric_memory"


class _Outside(threading.local):
    location = Location(0, "other", 0, False)
    op = -1
    operation = ""

    def __init__(self) -> None:
        self.calls: list[int] = []  # tags of the extension's functions that it is in


class ModelTracer:
    """Traces a step's launches and their demand; ``fakedist.cost_model`` estimates times.

    Implements protocol ``record.timed_step.tracer.OperationTracer``. ``known`` returns a tensor's values, or None if no
    kernel computed them; ``numbers`` gives tags, the fast path's also to what it runs. ``inside`` returns the
    location of what a compiled graph launches in this thread, ``known_in_graph`` its buffers' values; None otherwise.
    ``log`` is the driver's. ``clock`` is the host's,
    which runs in a step; None leaves it off. ``timed`` is what the log
    had of the step whose records were made last; ``keep_reads`` gets a tape for what the host reads in a step, and
    None when it ends.
    """

    def __init__(
        self,
        known: Known = lambda tensor: None,
        numbers: Tags | None = None,
        log: LaunchLog | None = None,
        *,
        clock: DriverClock | None = None,
    ) -> None:
        self._clock = clock
        self._paces: list[PaceRow] = []
        self.inside: Callable[[], Location | None] = lambda: None
        self.location_of: Callable[[int], Location] = lambda scope: _Outside.location
        self.known_in_graph: Known = lambda tensor: None
        self.timed: TimedLaunches | None = None
        self.keep_reads: Callable[[ReadTape | None], None] = lambda tape: None
        self._tape = ReadTape()
        self._known = known
        self._kernels: dict[str, TritonKernel] = {}
        self._log = LaunchLog() if log is None else log
        self._tags: dict[int, Tagged] = {}
        self._captured: dict[int, Tagged] = {}
        self._numbers = Tags() if numbers is None else numbers
        self._outsides: dict[tuple[Location, int], int] = {}
        self._counters: dict[OpOverload, DemandCounter] = {}
        self._thread = _Outside()
        self._step = 0
        self._is_on = False
        self._launches: Sequence[Launch] | ctypes.Array[Launch] = []
        self._num_captures = self._may_end = self._num_may_end = 0
        self._once: set[int] = set()
        self._host_work: list[tuple[int, HostWork]] = []
        self._watched = ExitStack()
        self._ranges = StepRanges(self._log.num_launches)
        self._numbers.begin(self._log.tag_address, self._outside_of)

    @property
    def is_compiled(self) -> bool:
        """Return whether compiled code may run operations of the step."""
        return self._numbers.is_compiled

    # ---- the step, and the captures of graphs that it may replay

    def begin(self, step: int) -> None:
        """The step begins."""
        self._step = step
        self._tags = dict(self._captured)
        self._is_on = True
        self._may_end = self._num_may_end = 0
        self._once = set()
        self._host_work = []
        self._tape = ReadTape()
        self.keep_reads(self._tape)
        self._forget()
        self._watch()
        self._log.begin()
        self._ranges.step_begins()
        if self._clock is not None:
            self._clock.step_begins()

    @no_collector()
    def end(self) -> None:
        """The step is over. What it launched is kept, and looked at only if its records are asked for."""
        self._is_on = False
        self._paces = [] if self._clock is None else self._clock.step_ended()
        self.keep_reads(None)
        self._forget()
        self._tags |= self._numbers.take(self.location_of)
        self._launches = self._log.end()
        self._ranges.step_ended(len(self._launches))
        self._watched.close()

    def may_end(self) -> None:
        """The step may end here."""
        self._may_end = self._log.num_launches()
        self._num_may_end += 1

    def cut_short(self) -> None:
        """Drop what the step that ended launched after it might have."""
        if self._may_end:
            self._launches = self._launches[: self._may_end]
            self._paces = self._paces[:-1]  # that of the script's own end
            self._ranges.cut_short(len(self._launches))

    def taken(self) -> Callable[[], Sequence[Record]]:
        """Take what the step that ended launched. The function makes the journal's records of it, now or later."""
        marks = self._num_may_end, self._may_end
        timed = TimedLaunches([], [], *marks, self._step, self._tape, self._paces, self._once)
        made = partial(self._records, timed, self._launches, self._tags, self._ranges.of_step, self._host_work)
        self._tags, self._launches = {}, []
        return made

    @no_collector()
    def _records(
        self,
        timed: TimedLaunches,
        launches: Sequence[Launch] | ctypes.Array[Launch],
        tags: Mapping[int, Tagged],
        ranges: Sequence[ScriptRange],
        host_work: Sequence[tuple[int, HostWork]],
    ) -> Sequence[Record]:
        timed.launches = list(launches)
        rows = LaunchRows(timed.step, timed.launches, tags, self._log.name, ranges=ranges, host_work=host_work)
        record = rows.record()
        timed.rows = rows.positions
        self.timed = timed
        return (record,)

    def capture_begins(self) -> None:
        """The capture of a CUDA graph begins. Its kernels run when the graph is launched, perhaps in the timed step."""
        self._num_captures += 1
        self._forget()
        self._watch()

    def capture_ended(self) -> None:
        """The capture is over."""
        self._num_captures -= 1
        self._forget()
        self._watched.close()

    # ---- what the recorder reports

    def operation(self, op: int, operation: str, location: Location) -> int:
        """An operation begins in this thread. Return its tag."""
        self._thread.location = location
        tag = self._keep(self._numbers.operation(), Tagged(op, operation, location))
        self._log.tag(tag)
        return tag

    def done(self, tag: int, func: OpOverload, args: Arguments, kwargs: Keywords, result: object) -> None:
        """The operation with this tag is over."""
        counter = self._counters.get(func)
        if counter is None:
            counter = self._counters[func] = DemandCounter(func, self._known)
        demand, read = counter.demand(args, kwargs, result), counter.read_bytes(args, kwargs, result)
        self._set_demand(tag, demand)
        if not demand.moved_bytes and (on_host := counter.on_host(args, kwargs, result)):
            work = HostWork(counter.operation, *on_host, demand.flops, torch.get_num_threads(), script_line())
            self._host_work.append((self._log.num_launches(), work))
        is_alike = counter.is_alike and not counter.may_read(args, result)
        self._numbers.learn(tag, counter.operation, demand if is_alike else None)
        if read:
            self._log.tag(tag)
            self._log.read(read, torch.cuda.current_stream().cuda_stream)
        self._log.tag(self._outside())

    def location(self, location: Location) -> None:
        """This thread is at another location now, outside of operations."""
        self._numbers.take_scope()
        self._thread.location = location
        self._log.tag(self._outside())

    def graph(self, op: int, operation: str, location: Location) -> None:
        """This thread runs a compiled graph from now on, by its call's number and name; -1 and "" if it ended."""
        self._thread.op, self._thread.operation = op, operation
        self.location(location)

    @contextmanager
    def collective(self, sequence: int, op: int, operation: str, location: Location) -> Iterator[None]:
        """A collective runs on the current stream. What it launches is part of it."""
        self._log.tag(self._tag(Tagged(op, operation, location)))
        self._log.tag_call(sequence)
        self._log.collective(torch.cuda.current_stream().cuda_stream)
        try:
            yield
        finally:
            self._log.tag_call(-1)
            self._log.tag(self._outside())

    @contextmanager
    def once(self) -> Iterator[None]:
        """Only this step does what is done here, not those after it."""
        first = self._log.num_launches()
        yield
        if self._is_on:
            self._once.update(range(first, self._log.num_launches()))

    @contextmanager
    def waiting(self, op: int, location: Location) -> Iterator[None]:
        """The script waits for the GPU."""
        self._log.tag(self._tag(Tagged(op, "", location, counts=False)))
        try:
            yield
        finally:
            self._log.tag(self._outside())

    def range_begins(self, name: str) -> int:
        """The script opens a range in this thread. Return its number."""
        return self._ranges.begins(name)

    def range_ended(self, number: int) -> None:
        """The script closes the range with that number."""
        self._ranges.ended(number)

    # ---- what an extension's functions report

    def _call_begins(self, operation: str) -> int:
        thread, inside = self._thread, self.inside()
        return self._begun(self._tag(Tagged(thread.op, operation, self._location() if inside is None else inside)))

    def _begun(self, tag: int) -> int:
        self._thread.calls.append(tag)
        self._numbers.called(tag)
        self._log.tag(tag)
        return tag

    def _call_ended(self, tag: int, demand: Demand | None) -> None:
        calls = self._thread.calls
        calls.remove(tag)
        self._numbers.called(calls[-1] if calls else -1)
        if demand is not None:
            self._set_demand(tag, demand)
        self._log.tag(self._outside())

    # ---- inside

    def _forget(self) -> None:
        """Give new tags to what is outside of operations. Captures run in Python: their tags outlast the step."""
        self._outsides = {}
        self._numbers.forget_outsides()
        self._numbers.switch(traced=self._is_on, captured=self._num_captures > 0)

    def _tag(self, tagged: Tagged) -> int:
        return self._keep(self._numbers.tag(), tagged)

    def _keep(self, tag: int, tagged: Tagged) -> int:
        self._tags[tag] = tagged
        if self._num_captures:
            self._captured[tag] = tagged
        return tag

    def _set_demand(self, tag: int, demand: Demand) -> None:
        for tags in (self._tags, self._captured):
            if tag in tags:
                tags[tag] = tags[tag]._replace(demand=demand)

    def _outside(self) -> int:
        thread = self._thread
        if thread.calls:
            return thread.calls[-1]
        return self._outside_at(self._location(), thread.op, thread.operation)

    def _outside_at(self, location: Location, op: int, operation: str) -> int:
        tag = self._outsides.get((location, op))
        if tag is None:
            tag = self._outsides[location, op] = self._tag(Tagged(op, operation, location, counts=False))
        return tag

    def _outside_of(self, scope: int) -> int:
        """The tag for what is launched after an operation in compiled code, which runs none of a compiled graph."""
        return self._outside_at(self.location_of(scope), _Outside.op, _Outside.operation)

    def _location(self) -> Location:
        scope = self._numbers.take_scope()
        if scope >= 0:
            self._thread.location = self.location_of(scope)
        return self._thread.location

    def _watch(self) -> None:
        self._watched.close()
        self._watched.enter_context(watched_calls(self._call_begins, self._call_ended, self._known))
        for module, name in _TRITON:
            if module in sys.modules:
                owner = present(sys.modules[module], name)
                self._watched.enter_context(patched(owner, "run", self._triton_run(present(owner, "run"))))
        for name in _REDUCING:
            if (function := getattr(sys.modules.get(_SYMMETRIC), name, None)) is not None:
                self._watched.enter_context(patched(sys.modules[_SYMMETRIC], name, self._reducing(function)))

    def _reducing(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: object, **kwargs: object) -> torch.Tensor:
            thread, inside = self._thread, self.inside()
            location = self._location() if inside is None else inside
            tag = self._begun(self._tag(Tagged(thread.op, thread.operation, location, counts=False)))
            demand = None
            try:
                result = original(*args, **kwargs)
                matrix = next(value for value in (*args, kwargs.get("A")) if isinstance(value, torch.Tensor))
                demand = reduced_demand(matrix, result, _group_size(args, kwargs))
                return result
            finally:
                self._call_ended(tag, demand)

        return run

    def _triton_run(self, original: Callable[..., object]) -> Callable[..., object]:
        def run(launcher: object, *args: object, **kwargs: object) -> object:
            if kwargs.get("warmup"):  # compiles alone
                return original(launcher, *args, **kwargs)
            thread = self._thread
            function = launcher if hasattr(launcher, "arg_names") else getattr(launcher, "fn", None)
            arguments = dict(zip(getattr(function, "arg_names", ()), args, strict=False)) | kwargs
            kernel = self._kernel(function)
            demand = kernel.demand(arguments, self._known_to_kernel)
            inside = self.inside()
            location = self._location() if inside is None else inside
            tag = self._tag(Tagged(thread.op, thread.operation, location, demand, counts=False))
            self._log.tag(tag)
            try:
                returned = original(launcher, *args, **kwargs)
            finally:
                self._log.tag(self._outside())
            compiled = returned if hasattr(returned, "asm") else _compiled(launcher)
            self._set_demand(tag, kernel.launched(demand, arguments, compiled, self._log.last_grid(), self._known))
            return returned

        return run

    def _known_to_kernel(self, tensor: torch.Tensor) -> torch.Tensor | None:
        values = self.known_in_graph(tensor)
        return self._known(tensor) if values is None else values

    def _kernel(self, function: object) -> TritonKernel:
        source = str(getattr(function, "src", ""))
        kernel = self._kernels.get(source)
        if kernel is None:
            kernel = self._kernels[source] = TritonKernel(str(getattr(function, "__name__", "")), source)
        return kernel


def _group_size(args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """Ranks of the group that is named last."""
    names: list[Any] = [value for value in (*args, kwargs.get("group_name")) if isinstance(value, str)]
    return int(distributed_c10d._get_group_size_by_name(names[-1]))


def _compiled(launcher: object) -> object:
    launchers, results = (getattr(launcher, name, None) or [] for name in ("launchers", "compile_results"))
    config = getattr(launchers[0], "config", None) if launchers else None
    chosen = [result for result in results if config is None or getattr(result, "config", None) == config] or list(
        results
    )
    return getattr(chosen[0], "kernel", None) if chosen else None
