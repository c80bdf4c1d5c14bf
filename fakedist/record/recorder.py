"""The recorder: hooks torch, follows the steps, and has memory and times recorded. It writes the journal."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from fakedist import extras
from fakedist.errors import RecordingError
from fakedist.graph_captures import watched_graphs
from fakedist.options import Until
from fakedist.record.beyond_capacity import Capacity, beyond_capacity
from fakedist.record.compiled_graphs import is_tracing
from fakedist.record.cuda_graphs import Graphs
from fakedist.record.device_memory import Beginning
from fakedist.record.graph_layers import is_dynamos
from fakedist.record.hooks import backward_hook, made_optimizers, module_hooks, optimizer_hooks
from fakedist.record.host_clock import ClockedGpu, HostClock
from fakedist.record.ledger import Ledger
from fakedist.record.memory_recording import Append, MemoryRecording
from fakedist.record.module_names import OUTSIDE, LayerTable, remember_parents
from fakedist.record.named_phases import DeviceInUse, NamedPhases
from fakedist.record.numbering import FastPath
from fakedist.record.operations import Execute
from fakedist.record.position import Position
from fakedist.record.running_graphs import GraphIntegers
from fakedist.record.steps import StepListener, Training
from fakedist.record.timed_step import LaterStep, RecordedStep
from fakedist.record.tracer import OperationTracer, Tracer
from fakedist.record.unseen import Unseen
from fakedist.rundir import notes
from fakedist.rundir.outcome import Ending
from fakedist.rundir.records import NoteRecord, OutcomeRecord, StepRecord, StepWentOnRecord

_active: Recorder | None = None


def active() -> Recorder | None:
    """The recorder that runs in this process, or None."""
    return _active


def _forked() -> None:
    """Drop the recorder in a forked process (a DataLoader's worker), which must not touch CUDA."""
    global _active
    if _active is not None:
        recorder, _active = _active, None
        recorder.forget()


os.register_at_fork(after_in_child=_forked)


class Recorder(StepListener):
    """Records one rank from before its model is built until it ends.

    A context manager: entering it hooks torch, leaving it removes every hook.

    Args:
        steps: Steps to record, or "auto". After them :class:`~fakedist.errors.StopRun` is raised in the script.
        execute: Runs an operation: ``execute(func, args, kwargs) -> result``. None lets torch run it.
        progress: Called with (phase, step, allocated peak in bytes), at most ten times a second.
        tracer: Traces the last of the steps; ``later_tracer`` one more step after them.
        until: Ends the recording instead: a step, "validation", "save" or "end" (the script's own end).
        updates: Optimizer steps that make one step.
        fast_path: Runs operations that do not need Python. None runs all of them in Python.
        clocked: The virtual GPU's log for bare steps, after the recorded ones (:mod:`fakedist.record.host_clock`).
        go_bare: Writes everything that is recorded, when the bare steps begin; ``why_not_bare`` says why they cannot.
        runs_again: Whether the script runs a second time if there were no bare steps.
        own_bytes: What the recording itself has written to files.
        capacity: The virtual GPUs whose memory the run may exceed. None lets torch raise its error.
        device: What is in use of the virtual GPU.
    """

    def __init__(
        self,
        append: Append,
        steps: int | Literal["auto"],
        execute: Execute | None,
        progress: Callable[[str, int, int], None] = lambda phase, step, allocated_bytes: None,
        tracer: OperationTracer | None = None,
        *,
        later_tracer: Tracer | None = None,
        until: int | Until | None = None,
        updates: int = 1,
        fast_path: FastPath | None = None,
        integers: GraphIntegers | None = None,
        capacity: Capacity | None = None,
        clocked: ClockedGpu | None = None,
        go_bare: Callable[[], None] = lambda: None,
        why_not_bare: Callable[[], str] = lambda: "",
        runs_again: bool = False,
        own_bytes: Callable[[], int] = lambda: 0,
        device: DeviceInUse | None = None,
    ) -> None:
        self._append, self._capacity = append, capacity
        self._layers = LayerTable()
        self._position = Position(self._phase_changed, self._layers.owners.owner_of_node)
        self._memory = MemoryRecording(
            append,
            self._position,
            self._layers,
            execute,
            progress,
            fast_path=fast_path,
            integers=integers,
        )
        if tracer is not None:
            tracer.known_in_graph = self._memory.graphs.known
            tracer.inside = self._memory.operations.position_in_graph
            tracer.location_of = lambda scope: self._position.places[scope]
        self._later_step = LaterStep(self._layers.name, later_tracer)
        self._graphs = Graphs()
        more, goes_on = self._later_step.num_steps, self._goes_on
        self._training = Training(
            self._position, steps, until, self._graphs, self, num_more=more, goes_on=goes_on, updates=updates
        )
        self._memory.host.follow(self._training, own_bytes)
        self._go_bare = go_bare
        self.host_clock = HostClock(clocked, self._finish, why_not_bare, self._training.loading, runs_again=runs_again)
        self._lengths_s: list[float] = []  # of recorded steps
        self._root: nn.Module | None = None  # an uncalled module whose forward is about to run
        self._begin = (-1, 0)  # of the latest step: its number, and the id of the module whose forward began it
        self._recorded_step = RecordedStep(
            tracer,
            self._training.goal.is_timed,
            lambda step: self._training.size_of(step).elements,
            self._position,
            operations=self._memory.operations,
            ledger=self._memory.ledger,
        )
        self._exit = self._until_bare = ExitStack()
        self._named_phases = NamedPhases(append, self._position, device, tracer)
        self._is_closed = self._names_again = False  # the latter: what ran first was not the model that trains

    def __enter__(self) -> Recorder:
        global _active
        if _active is not None:
            raise RecordingError("a recorder is already running in this process", "this is a bug in fakedist")
        unseen, recorded, alone = Unseen(), self._recorded_step, self._alone
        with ExitStack() as stack:
            if self._capacity is not None:
                stack.enter_context(beyond_capacity(self._capacity, self._append, self._position))
            stack.enter_context(optimizer_hooks(alone(self._optimizer_begins), alone(self._optimizer_ended), unseen))
            stack.enter_context(self._memory.host.watching())
            stack.enter_context(self._training.watching())  # what it does when a checkpoint is written comes last
            until_bare = stack.enter_context(ExitStack())
            until_bare.enter_context(self._memory.watching(unseen))
            until_bare.enter_context(remember_parents(self._layers, lambda: self._position.layer != OUTSIDE, unseen))
            until_bare.enter_context(module_hooks(self._module_begins, self._module_ended, unseen, alone))
            until_bare.enter_context(backward_hook(alone(self._backward_begins), alone(self._backward_ended)))
            until_bare.enter_context(made_optimizers(self._training.steps.optimizer_made))
            until_bare.enter_context(recorded.watching())
            until_bare.enter_context(self._later_step.watching())
            until_bare.enter_context(watched_graphs(recorded, self._graphs, self._training))
            until_bare.enter_context(self._memory.routing())
            for part in extras.parts("step_hooks"):
                until_bare.enter_context(part.hooked(self._named_phases, self._capacity))
            self._until_bare = until_bare
            self._exit = stack.pop_all()
        _active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _active
        _active = None
        self._exit.close()

    @property
    def cuda(self) -> Beginning:
        """Reports when CUDA is initialised. The allocator's history starts at that moment."""
        return self._memory.cuda

    @property
    def ledger(self) -> Ledger:
        """Records the calls on process groups."""
        return self._memory.ledger

    @property
    def stopped(self) -> bool:
        """Return whether :class:`~fakedist.errors.StopRun` ended the run."""
        return self._training.steps.stopped

    @property
    def position(self) -> Position:
        """Where the rank is: step, phase and layer."""
        return self._position

    def record_this_thread(self) -> None:
        """Also record the operations of this thread. Recording started in another thread."""
        self._memory.operations.also_this_thread()

    def step(self, shape: Sequence[int] = (), name: str = "") -> None:
        """End a training step here, at the script's request (``fakedist.step``)."""
        if not self.host_clock.is_on:
            self._training.step(shape, name)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Record what runs inside as a phase of this name, at the script's request (``fakedist.phase``)."""
        return self._named_phases.of_script(name)

    def _finish(self) -> None:
        """Write everything, then remove all hooks but those that follow optimizers and DataLoaders."""
        self._training.steps.stopped = True
        self._go_bare()
        self._until_bare.close()

    def _goes_on(self) -> bool:
        """Begin the bare steps where the script would be stopped. Returns whether there are any."""
        clock, steps = self.host_clock, self._training.steps
        # Operations pass by in one thread: that of the recorder.
        if not clock.is_wanted or self._is_closed or threading.current_thread() is not threading.main_thread():
            return False
        self._position.step = steps.number
        # Another module may run first for once: layers that are captured, a validation.
        root = self._root if self._root is not None and id(self._root) == self._begin[1] else None
        return clock.begins(sum(self._lengths_s), max(self._lengths_s, default=0.0), self.ledger, root, steps.stop)

    def close(self, ending: Ending, line: str = "") -> None:
        """Write what is still in memory, and how the run ended, at ``file:line (function)``. Later calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._named_phases.close()
        steps = self._training.steps
        steps.decide_on_init()
        outcome = OutcomeRecord(
            ending.outcome,
            ending.code,
            ending.message,
            line,
            last_phase=self._position.phase,
            last_step=steps.last,
            training=self._training.facts(),
        )
        self._memory.close()
        steps.close()
        self._memory.write()
        own_notes = self._training.goal.notes() if steps.stopped else []
        own_notes += self._training.notes()
        for note in own_notes:
            self._append(NoteRecord(note))
        for record in self._recorded_step.close(steps.last if self._training.is_counted else 0):
            self._append(record)
        for record in self._later_step.close():
            self._append(record)
        self._memory.drain.names()
        self.ledger.flush()
        if self._memory.history.requests_ignored:
            self._append(NoteRecord(notes.history_requests_ignored()))
        self._append(outcome)

    def forget(self) -> None:
        """Remove every hook from torch and write nothing more."""
        self._is_closed = True
        self._named_phases.close()
        self._exit.close()

    # ---- called by hooks

    def _alone(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that runs while no other thread records anything, with the clock standing still."""

        def run(*args: object) -> Any:
            with self._position.lock:
                return hook(*args)

        return self.host_clock.still(run)

    def _module_begins(self, module: nn.Module, args: tuple[object, ...]) -> None:
        position = self._position
        calling = position.calling()
        if calling is None:
            self._memory.operations.also_this_thread()
            self._root = module
            generates = self._training.root_forward(module, args)
            self._root = None
            if self._is_closed:
                return
            if (number := self._training.steps.number) != self._begin[0]:
                self._begin = (number, id(module))
            if self._names_again and torch.is_grad_enabled():
                self._names_again = False
                self._layers.name_first(module)
            self._memory.model_begins(module)
            position.root_forward(generates=generates, evaluates=self._training.evaluates)
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
        else:
            self._memory.module_ended(module, layer)
        position.module_ended(layer)
        self._recorded_step.moved()

    def _backward_begins(self, creates_graph: bool, roots: Sequence[object]) -> bool:
        if is_tracing():
            return False
        if not self._position.in_backward():
            self._training.backward()
            if self._is_closed:
                return False
        self._position.backward_begins(creates_graph, roots)
        self._memory.backward_begins()
        return True

    def _backward_ended(self) -> None:
        self._position.backward_ended()
        self._memory.backward_ended()

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_closed:
            self._training.optimizer_begins(optimizer)
        if self._is_closed:
            return
        self._memory.optimizer_begins(optimizer)
        self._position.optimizer_begins()

    def _optimizer_ended(self, optimizer: torch.optim.Optimizer) -> None:
        if self.host_clock.is_on and self.host_clock.optimizer_ended():
            self._training.steps.stop()
        if self._is_closed:
            return
        self._training.optimizer_ended(optimizer)
        self.host_clock.optimizer_recorded(optimizer)
        self._recorded_step.optimizer_ended()
        self._memory.optimizer_ended(optimizer)
        self._position.optimizer_ended()

    # ---- called by the training and the position

    def step_ended(self, step: int, start_us: int, end_us: int) -> None:
        """Write a step's records, and stop recording memory if a later step is to be timed."""
        steps, later = self._training.steps, self._later_step
        for record in self._recorded_step.step_ended(step, is_cut_short=steps.is_cut_short):
            self._append(record)
        self._lengths_s.append((end_us - start_us) / 1e6)
        if self._memory.is_on:
            self._memory.step_ended()
            samples, elements = self._training.samples_of(step), self._training.size_of(step).elements
            name = self._training.name_of(step)
            self._append(StepRecord(step, start_us, end_us, samples.number, samples.shape, name, elements))
            if step == steps.done and later.begins_after(step) and not self._is_closed:
                self._memory.stop()
        if not self._memory.is_on:
            self.ledger.is_on = later.step_ended(step, self._position.location, is_cut_short=steps.is_cut_short)
            self.ledger.on_call = later.call if later.is_on else None

    def step_went_on(self, step: int) -> None:
        """Reopen a step that was reported as ended, because another optimizer stepped in it; 0 is ``init``."""
        self._recorded_step.step_went_on(step)
        if self._memory.is_on:
            self._memory.drain.names()
            self._append(StepWentOnRecord(step))
        self._position.step_went_on(step)
        self._memory.host.moved()
        self._names_again |= step == 0

    def step_may_have_changed(self) -> None:
        """Time the step that begins, if it is to be timed."""
        self._memory.host.moved()
        if not self._is_closed:
            self._recorded_step.follow()

    def _phase_changed(self, phase: str) -> None:
        if self._later_step.is_on:
            self._later_step.location(self._position.location)
        self._recorded_step.moved()  # an extension may launch kernels here without any torch operation
        self._memory.host.moved()
        self._memory.tick()
