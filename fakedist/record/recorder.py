"""The recorder: combines steps, layers, operations, marks and the allocator's history, and writes the journal."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Literal

import torch
from torch import nn
from torch._ops import OpOverload

from fakedist.errors import RecordingError
from fakedist.frames import script_line
from fakedist.options import Until
from fakedist.record.compiled_graphs import Modules, Watched, compilations, compiled_graphs, is_tracing
from fakedist.record.construction import Construction
from fakedist.record.copies import Copies
from fakedist.record.device_memory import AllocatorHistory, Beginning, EventTracker, allocator_history
from fakedist.record.draining import Drain, Sources
from fakedist.record.graph_layers import Placing, is_dynamos, layers_of
from fakedist.record.hooks import (
    backward_hook,
    fsdp_is_loaded,
    fsdp_unshard_hook,
    made_optimizers,
    module_hooks,
    optimizer_hooks,
    out_of_memory_observer,
    tensor_swaps,
)
from fakedist.record.ledger import Journal, Ledger
from fakedist.record.marker import Piece
from fakedist.record.marks import KEEP_LAYER, Marks
from fakedist.record.module_names import OUTSIDE, LayerTable, remember_parents
from fakedist.record.numbering import FastPath
from fakedist.record.operations import Execute, Operations
from fakedist.record.position import Position
from fakedist.record.running_graphs import GraphIntegers, RunningGraphs
from fakedist.record.steps import Training
from fakedist.record.timed_step import LaterStep, RecordedStep
from fakedist.record.tracer import OperationTracer, Tracer
from fakedist.record.unseen import Unseen, compiles_backwards
from fakedist.rundir import notes
from fakedist.rundir.memory_records import FailedRequestRecord
from fakedist.rundir.outcome import Ending
from fakedist.rundir.records import NoteRecord, OutcomeRecord, StepRecord, StepWentOnRecord

_active: Recorder | None = None


def active() -> Recorder | None:
    """The recorder that runs in this process, or None."""
    return _active


def _forked() -> None:
    """Drop the recorder in a forked process (a DataLoader's worker). It is not the rank and must not touch CUDA."""
    global _active
    if _active is not None:
        recorder, _active = _active, None
        recorder.forget()


os.register_at_fork(after_in_child=_forked)


class Recorder:
    """Records one rank from before its model is built until it ends.

    A context manager: entering it hooks torch, leaving it removes every hook.

    Args:
        journal: Receives the records.
        steps: Steps to record, or "auto". After them :class:`~fakedist.record.steps.StopRun` is raised in the script.
        execute: Runs an operation: ``execute(func, args, kwargs) -> result``. None lets torch run it.
        progress: Called with (phase, step, allocated peak in bytes), at most ten times a second.
        tracer: Traces the last of the steps. None traces no recorded step.
        until: What ends the recording instead: a step, "validation", "save" or "end" (the script's own end).
        fast_path: Runs operations that do not need Python. None runs all of them in Python.
        integers: Gives compiled graphs their integers. None leaves them without.
        make_tracker: Numbers the allocator's events if :func:`~fakedist.record.device_memory.keeps_metadata` is
            false.

    Attributes:
        cuda: Reports when CUDA is initialised. The allocator's history starts at that moment.
        ledger: Records the calls on process groups.
    """

    def __init__(
        self,
        journal: Journal,
        steps: int | Literal["auto"],
        execute: Execute | None,
        progress: Callable[[str, int, int], None] | None = None,
        tracer: OperationTracer | None = None,
        *,
        until: int | Until | None = None,
        make_tracker: Callable[[], EventTracker] | None = None,
        fast_path: FastPath | None = None,
        integers: GraphIntegers | None = None,
    ) -> None:
        self._journal = journal
        self._layers = LayerTable()
        self._position = Position(self._phase_changed)
        self._marks = Marks(self._position, self._layers, None if fast_path is None else fast_path.marker)
        self._copies = Copies(self._layers, self._marks)
        self._position.owner_of_node = self._marks.owner_of_node
        self.cuda = Beginning()
        self._execute, self._executes = execute or _run_plainly, execute is not None
        # Before CUDA is initialised, the allocator cannot take the number of an operation: it would ask for the device.
        self._operations = Operations(
            self._position, self._execute_before_cuda, self._tick, lambda text: None, fast_path=fast_path
        )
        self._building = Construction(
            self._position, self._layers, self._marks, self._copies, self._operations.tell_results
        )
        self._watched = Watched(self._compiles, lambda: self._position.layer)
        self._placing = Placing(self._layers, self._watched)
        self._running = RunningGraphs(self._operations, integers)
        if tracer is not None:
            tracer.known_in_graph = self._running.known
            tracer.inside, tracer.place_of = self._operations.place_in_graph, lambda scope: self._position.places[scope]
        self._history = AllocatorHistory(journal.append, self._operations.numbering.take_gemms, make_tracker, fast_path)
        self._history.on_workspace = self._workspace
        self._later_step = LaterStep(self._layers.name)
        self._training = Training(self._position, steps, until)
        self._training.ended, self._training.went_on = self._step_ended, self._step_went_on
        self._steps = self._training.steps
        self.ledger = Ledger(journal, self._operation_and_scope, self._communication, self._gathered)
        self._recorded_step = RecordedStep(
            tracer,
            self._training.goal.is_timed,
            lambda step: self._training.size_of(step).elements,
            self._position,
            operations=self._operations,
            ledger=self.ledger,
        )
        self._training.moved = self._recorded_step.follow
        self._exit, self._memory = ExitStack(), ExitStack()
        self._records, self._closed = True, False
        sources = Sources(self._layers, self._operations, self._history, self._marks, self._placing, ledger=self.ledger)
        self._drain = Drain(journal, self._position, sources, progress or (lambda phase, step, allocated_bytes: None))
        self._scanned: set[int] = set()
        self._names_again = False  # what ran first was not the model that trains
        self._watches_fsdp = False
        self._backwards: list[Callable[[], None] | None] = []

    def __enter__(self) -> Recorder:
        global _active
        if _active is not None:
            raise RecordingError("a recorder is already running in this process", "this is a bug in fakedist")
        with ExitStack() as stack:
            memory = stack.enter_context(ExitStack())
            memory.enter_context(allocator_history(self._history))
            memory.callback(self._marks.close)
            self._observe_failures = stack.enter_context(out_of_memory_observer(self._out_of_memory))
            unseen = Unseen()
            stack.enter_context(remember_parents(self._layers, lambda: self._position.layer != OUTSIDE, unseen))
            stack.enter_context(self._building.watching(unseen))
            stack.enter_context(module_hooks(self._module_begins, self._module_ended, unseen))
            stack.enter_context(backward_hook(self._backward_begins, self._backward_ended))
            stack.enter_context(tensor_swaps(self._marks.released))
            stack.enter_context(made_optimizers(self._training.optimizer_made))
            stack.enter_context(optimizer_hooks(self._optimizer_begins, self._optimizer_ended, unseen))
            stack.enter_context(compiled_graphs(self._graph, self._watched))
            stack.enter_context(compilations(self._drain.compiling))
            stack.enter_context(self._recorded_step.watching())
            stack.enter_context(self._later_step.watching())
            stack.enter_context(self._training.watching())
            # With an `execute` of its own, the run needs it until the end, past the memory recording.
            (stack if self._executes else memory).enter_context(self._operations)
            stack.enter_context(self.cuda.watching())
            self.cuda.then(self._cuda_begins)
            self._exit, self._memory = stack.pop_all(), memory
        _active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _active
        _active = None
        self._exit.close()

    def _cuda_begins(self) -> None:
        if self._records:
            self._history.start()
        self._observe_failures()
        tell = self._history.tell
        tell(str(self._position.op - 1))  # the operation that is running, if any
        self._operations.cuda_begins(self._execute, tell)

    def _execute_before_cuda(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        self.cuda.before(kwargs)
        return self._execute(func, args, kwargs)

    def record_this_thread(self) -> None:
        """Also record the operations of this thread. Recording started in another thread."""
        self._operations.also_this_thread()

    def trace_later_step(self, tracer: Tracer) -> None:
        """Have one more step traced after the recorded ones. Call this before entering the recorder."""
        self._steps.more = self._later_step.trace(tracer)

    @property
    def stopped(self) -> bool:
        """Whether :class:`~fakedist.record.steps.StopRun` ended the run."""
        return self._steps.stopped

    def step(self) -> None:
        """End a training step here, at the script's request (``fakedist.step()``)."""
        self._training.step()

    def close(self, ending: Ending, line: str = "") -> None:
        """Write what is still in memory, and how the run ended. Further calls do nothing.

        Args:
            ending: How it ended.
            line: Where, as ``file:line (function)``.
        """
        if self._closed:
            return
        self._closed = True
        self._steps.decide_on_init()
        outcome = OutcomeRecord(
            ending.outcome,
            ending.code,
            ending.message,
            line,
            last_phase=self._position.phase,
            last_step=self._steps.last,
            training=self._training.facts(),
        )
        if self._records:
            self._marks.optimizers()
            for root in self._layers.roots():
                self._marks.scan(root)
            self._copies.mark(self._position.op)
            self._building.mark(is_over=True)
            self._position.close()
        self._steps.close()
        if self._records:
            self._drain.all()
            self._write_statistics()
        found = self._training.goal.notes() if self._steps.stopped else []
        found += self._training.notes()
        found += self._recorded_step.close(self._steps.last if self._training.is_counted else 0)
        for note in found:
            self._journal.append(NoteRecord(note))
        for record in self._later_step.close():
            self._journal.append(record)
        self._drain.names()
        if self._history.requests_ignored:
            self._journal.append(NoteRecord(notes.history_requests_ignored()))
        self._journal.append(outcome)

    def forget(self) -> None:
        """Remove every hook from torch and write nothing more."""
        self._closed = True
        self._exit.close()

    # ---- called by hooks

    def _module_begins(self, module: nn.Module, args: tuple[object, ...]) -> None:
        position = self._position
        calling = position.calling()
        if calling is None:
            generates = self._training.root_forward(module, args)
            if self._names_again and torch.is_grad_enabled():
                self._names_again = False
                self._layers.name_first(module)
            self._scan_once(module)
            position.root_forward(generates=generates)
        elif is_dynamos(module):
            return
        layer = self._layers.layer(module, calling or OUTSIDE)
        position.module_begins(layer)
        if self._later_step.is_on:
            self._later_step.layer_begins(layer)
        self._recorded_step.moved()

    def _module_ended(self, module: nn.Module) -> None:
        position = self._position
        if is_dynamos(module) and not self._layers.knows(module):
            return
        layer = self._layers.layer(module, position.layer)
        if self._later_step.is_on:
            self._later_step.layer_ended(layer)
        elif self._records and module._parameters:
            self._marks.module(module, layer)
        position.module_ended(layer)
        self._recorded_step.moved()

    def _scan_once(self, module: nn.Module) -> None:
        """Mark a model's parameters before it first runs, while FSDP's are still sharded."""
        if not self._records:
            return
        if fsdp_is_loaded() and not self._watches_fsdp:
            self._watches_fsdp = True
            self._exit.enter_context(fsdp_unshard_hook(self._unsharded))
        if id(module) not in self._scanned:
            self._scanned.add(id(module))
            self._marks.scan(module)
            self._building.mark()

    def _unsharded(self, module: nn.Module, parameter: torch.Tensor) -> None:
        if self._records:
            self._marks.parameter(parameter, self._layers.layer(module))

    def _backward_begins(self, creates_graph: bool) -> bool:
        if is_tracing():
            return False
        if not self._position.in_backward():
            self._training.backward()
        self._position.backward_begins(creates_graph)
        is_compiled = self._records and compiles_backwards()
        self._backwards.append(self._marks.compiled_backward() if is_compiled else None)
        return True

    def _backward_ended(self) -> None:
        self._position.backward_ended()
        if (compiled := self._backwards.pop()) is not None:
            compiled()

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._training.optimizer_begins(optimizer)
        if self._records:
            self._marks.optimizer(optimizer)
            self._copies.mark_once(self._position.step, self._position.op)
        self._position.optimizer_begins()

    def _optimizer_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self._training.optimizer_ended(optimizer)
        self._recorded_step.optimizer_ended()
        if self._records:
            self._marks.optimizer(optimizer)
        self._position.optimizer_ended()

    def _step_ended(self, step: int, start_us: int, end_us: int) -> None:
        for record in self._recorded_step.step_ended(step, is_cut_short=self._steps.is_cut_short):
            self._journal.append(record)
        if self._records:
            for root in self._layers.roots():
                self._marks.scan(root)
            self._copies.mark(self._position.op)
            self._marks.step_ended()
            self._drain.all()
            samples = self._training.samples_of(step)
            self._journal.append(StepRecord(step, start_us, end_us, samples.number, samples.shape))
            if step == self._steps.done and self._later_step.begins_after(step) and not self._closed:
                self._stop_recording()
        if not self._records:
            is_cut_short = self._steps.is_cut_short
            self.ledger.is_on = self._later_step.step_ended(step, self._position.place, is_cut_short=is_cut_short)
            self.ledger.told = self._later_step.call if self._later_step.is_on else None

    def _step_went_on(self, step: int) -> None:
        """Reopen a step that was reported as ended, because another optimizer stepped in it; 0 is ``init``."""
        self._recorded_step.step_went_on(step)
        if self._records:
            self._drain.names()
            self._journal.append(StepWentOnRecord(step))
        self._position.step_went_on(step)
        self._names_again |= step == 0

    def _stop_recording(self) -> None:
        """Stop recording before the timed step, which it must not slow down and which is not in the memory tables."""
        self._building.mark(is_over=True)
        self._position.close()
        self._drain.all()
        self._write_statistics()
        self._records = False
        self._operations.stop_recording()
        self._drain.is_recording = False
        self._memory.close()

    def _write_statistics(self) -> None:
        for record in self._history.statistics():
            self._journal.append(record)

    def _compiles(self, modules: Modules) -> None:
        modules.layers = layers_of(modules, self._layers)

    def _graph(self, compiled: object, inputs: Sequence[object]) -> AbstractContextManager[Callable[[object], None]]:
        if not self._records:
            return nullcontext(lambda results: None)
        placed = self._operations.graph(lambda op: self._placing.begins(compiled, inputs, op, self._position.layer))
        return self._running.graph(placed, inputs)

    def _out_of_memory(self, device: int, requested: int, device_total: int, device_free: int) -> None:
        failed = FailedRequestRecord(
            device,
            requested,
            op=self._position.op - 1,
            layer=self._layers.name(self._position.layer),
            line=script_line(),
            message=f"{device_free} bytes of the device were free",
        )
        self._journal.append(failed)

    # ---- called by the ledger

    def _operation_and_scope(self) -> tuple[int, int]:
        return self._position.op, self._position.scope()

    def _communication(self, address: int, bytes_: int) -> None:
        if self._records:
            self._marks.mark(Piece(address, 0, bytes_), "communication", KEEP_LAYER)

    def _gathered(self, mine: torch.Tensor, whole: torch.Tensor, place: int) -> None:
        if self._records:
            self._marks.gathered(mine, whole, place)

    def _workspace(self, address: int, op: int, bytes_: int) -> None:
        self._marks.mark(Piece(address, 0, bytes_), "workspace", KEEP_LAYER, op)

    # ---- writing

    def _phase_changed(self, phase: str) -> None:
        if self._later_step.is_on:
            self._later_step.place(self._position.place)
        self._recorded_step.moved()  # an extension may launch kernels here without any torch operation
        self._tick()

    def _tick(self) -> None:
        if self._records:
            self._drain.tick()


def _run_plainly(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return func(*args, **kwargs)
