"""Where the rank is: step, phase and layer. Hooks update it and every operation reads it."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fakedist.record.marker import Cells
from fakedist.record.module_names import OUTSIDE
from fakedist.record.numbering import Whereabouts
from fakedist.rundir.rows import Location, RegionRow, ScopeRow, merged

#: Numbers of autograd nodes are lower, except AccumulateGrad's: the largest possible, so that it runs first.
_LAST_NODE = 1 << 62
_next_node = torch._C._autograd._get_sequence_nr
_task = torch._C._current_graph_task_id
#: In place of autograd's number of a backward, which is not negative.
_ANY, _UNKNOWN = -1, -2


@dataclass
class _Thread:
    """A thread's stack of running modules, and which layer created which autograd nodes, by sequence number.

    Autograd numbers a thread's nodes in order of creation. ``bounds[i]`` is the first number created while
    ``layers[i]`` was the innermost layer. ``with_grad[i]`` is whether grad was enabled when ``stack[i]`` began.
    ``caller`` called the backward in which modules of this thread, one of autograd's, run again.
    """

    phase: str
    optimizer_depth: int = 0
    steps_in_backward: bool = False
    evaluates: bool = False
    caller: _Thread | None = None
    stack: list[int] = field(default_factory=list)
    with_grad: list[bool] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)

    def entered(self, layer: int) -> None:
        sequence = _next_node()
        if self.bounds and self.bounds[-1] == sequence:
            self.layers[-1] = layer
        else:
            self.bounds.append(sequence)
            self.layers.append(layer)


@dataclass(eq=False)
class _Engine:
    """A running backward: the thread that called it, its module depth then, and whether it builds a graph itself.

    ``task`` is autograd's number of it. The only backward at its beginning has ``_ANY``: what is not another's is its.
    """

    thread: int
    tape: _Thread
    depth: int
    creates_graph: bool
    is_inner: bool
    task: int

    def runs(self, *_: object) -> None:
        """Note that this thread, one of autograd's, works on it."""
        self.task = _task()


class GraphPart(NamedTuple):
    """The part of a compiled graph that runs: its layer, and whether a backward computes a forward's result again."""

    layer: int
    recomputes: bool


class _Again(NamedTuple):
    """A module that runs again in a thread: the thread, and the module's index on its stack."""

    thread: _Thread
    first: int


def _node(again: _Again | None) -> torch.autograd.graph.Node | None:
    """The autograd node that runs in this thread, unless a module runs again."""
    return torch._C._current_autograd_node() if again is None else None


class Position:
    """Step, phase and layer of the operation that runs now. Each thread that trains has its own phase and layers.

    ``owner_of_node`` returns the layer of the parameter to which an AccumulateGrad node adds. ``cells`` has the next
    operation's number, and a version that changes whenever the position does. ``new_scopes``, and ``regions`` of
    operations that saved activations, have those since they were last taken. ``lock`` is held by whoever changes
    anything here, or what is recorded next to it.
    """

    def __init__(
        self,
        phase_changed: Callable[[str], None] = lambda phase: None,
        owner_of_node: Callable[[object], int] = lambda node: OUTSIDE,
    ) -> None:
        self.cells = Cells()
        self._step = 0
        self.places: list[Location] = []
        self.regions: list[RegionRow] = []
        self.new_scopes: list[ScopeRow] = []
        self._owner_of_node = owner_of_node
        self._scopes: dict[tuple[int, str, int, bool, bool], int] = {}
        self.lock = threading.RLock()
        self._engines: list[_Engine] = []
        self._last = _Thread("init")  # the thread that was the last to begin a phase
        self._threads: dict[int, _Thread] = {threading.get_ident(): self._last}
        self._forward_from = self._forward_until = self._recompute_from = -1
        self._recompute_layer = OUTSIDE
        self._phase_changed = phase_changed

    @property
    def op(self) -> int:
        """Number of the next operation."""
        return self.cells.op

    @property
    def step(self) -> int:
        """Current step. 0 is ``init``."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        """Begin another step."""
        self._step = step
        self._changed()

    # ---- read by every operation

    def scope(self, inside: GraphPart | None = None) -> int:
        """Number of the scope of the running operation; ``inside`` is a compiled graph's part, None outside one."""
        if (engine := self._engine()) is not None:
            again = self._running_again(engine)
            if inside is None:
                return self._scope_in_backward(engine, again, self._layer_in_backward(engine, again, _node(again)))
            return self._scope_in_backward(engine, again, inside.layer, recomputes=inside.recomputes)
        thread = self._thread()
        layer = inside.layer if inside is not None else thread.stack[-1] if thread.stack else OUTSIDE
        phase = self._phase_of(thread)
        evaluates = (thread if thread.phase else self._last).evaluates
        return self._scope_of((self._step, phase, layer, False, evaluates and phase == "forward"))

    def whereabouts(self) -> Whereabouts:
        """The scope of the operation that runs now in this thread, and how long it stays that scope."""
        version = self.cells.version
        if (engine := self._engine()) is None:
            return Whereabouts(self.scope(), version)
        again = self._running_again(engine)
        node = _node(again)
        scope = self._scope_in_backward(engine, again, self._layer_in_backward(engine, again, node))
        if self.cells.version != version or sum(not other.is_inner for other in self._engines) > 1:
            return Whereabouts(scope, -1)
        grad = torch.is_grad_enabled()
        if again is not None:
            return Whereabouts(scope, version, 1, grad)
        if node is None or (sequence := node._sequence_nr()) >= _LAST_NODE:
            return Whereabouts(scope, -1)
        bounds = engine.tape.bounds
        after = bisect_right(bounds, sequence)
        low, high = bounds[after - 1] if after else 0, bounds[after] if after < len(bounds) else _LAST_NODE
        return Whereabouts(scope, version, 2, grad, low, high)

    @property
    def phase(self) -> str:
        """One of ``rundir.schema.PHASES``."""
        engine = self._engine()
        if engine is not None and not engine.tape.steps_in_backward:
            return "backward"
        return self._phase_of(self._thread() if engine is None else engine.tape)

    @property
    def layer(self) -> int:
        """The innermost layer in this thread."""
        calling = self.calling()
        return OUTSIDE if calling is None else calling

    def calling(self) -> int | None:
        """The layer that calls a module which starts now. None if no module does, outside any backward."""
        if (engine := self._engine()) is not None:
            again = self._running_again(engine)
            return self._layer_in_backward(engine, again, _node(again))
        thread = self._threads.get(threading.get_ident())
        return thread.stack[-1] if thread and thread.stack else None

    @property
    def location(self) -> Location:
        """Step, phase and layer in this thread. A scope says the same of an operation, more cheaply."""
        return Location(self.step, self.phase, self.layer, recompute=self._recompute_from >= 0)

    @property
    def calls_backward(self) -> int | None:
        """The thread that called the innermost running backward; None outside of any."""
        engine = self._engine()
        return None if engine is None else engine.thread

    def in_backward(self) -> bool:
        """Return whether a backward is running."""
        return self._engine() is not None

    # ---- called by hooks

    def module_begins(self, layer: int) -> None:
        """Enter a module: its forward starts in this thread."""
        thread, engine = self._thread(), self._engine()
        thread.caller = None if engine is None or engine.tape is thread else engine.tape
        thread.stack.append(layer)
        thread.with_grad.append(torch.is_grad_enabled())
        thread.entered(layer)
        self._changed()

    def module_ended(self, layer: int) -> None:
        """Leave a module, and any modules above it on the stack that an exception cut short."""
        thread = self._thread()
        stack = thread.stack
        if layer in stack:
            while stack.pop() != layer:
                pass
            del thread.with_grad[len(stack) :]
        thread.entered(stack[-1] if stack else OUTSIDE)
        self._changed()
        if stack or self.in_backward():
            return
        self._forward_until = self.op - 1
        # After an evaluation nothing was saved for a backward.
        self._set_phase("forward" if self._forward_from >= 0 else self._resting)

    def is_root_call(self) -> bool:
        """Return whether a module that starts now is called by no other module and outside any backward."""
        return self.calling() is None

    def root_forward(self, *, generates: bool = False, evaluates: bool = False) -> None:
        """Begin a root module's forward. With grad enabled, what it leaves alive is saved for backward."""
        thread = self._thread()
        if evaluates != thread.evaluates:
            thread.evaluates = evaluates
            self._changed()
        if torch.is_grad_enabled() and self._forward_from < 0:
            self._forward_from = self.op
        self._set_phase("generation" if generates else "forward")

    def backward_begins(self, creates_graph: bool, roots: Sequence[object] = ()) -> None:
        """Begin ``backward()`` or ``autograd.grad()``, possibly inside another backward (reentrant checkpointing).

        While another runs, the nodes of ``roots`` say which one autograd's threads work on.
        """
        thread, outer = self._thread(), self._engine()
        if outer is None and self._forward_from >= 0:
            self.regions.append(RegionRow(self._forward_from, self.op - 1, OUTSIDE))
            # Another thread's forward may go on.
            self._forward_from = self.op if any(t.stack for t in [*self._threads.values()] if t is not thread) else -1
        if self._recompute_from >= 0:
            self._recompute_switched(False, OUTSIDE)
        task = _UNKNOWN if self._engines else _ANY
        engine = _Engine(threading.get_ident(), thread, len(thread.stack), creates_graph, outer is not None, task)
        for root in roots if self._engines else ():
            if (node := getattr(root, "grad_fn", None) or getattr(root, "node", None)) is not None:
                node.register_prehook(engine.runs)
        self._engines.append(engine)
        self._changed()
        if outer is None:
            self._phase_changed("backward")

    def backward_ended(self) -> None:
        """End the innermost backward that this thread called."""
        if self._recompute_from >= 0:
            self._recompute_switched(False, OUTSIDE)
        engine = self._engine()
        assert engine is not None
        self._engines.remove(engine)
        self._changed()
        if not engine.is_inner:
            for thread in [*self._threads.values()]:
                if thread.caller is engine.tape:  # an exception may have cut it short
                    thread.stack.clear()
                    thread.with_grad.clear()
            self._rest()

    def optimizer_begins(self) -> None:
        """Begin ``optimizer.step()``. A closure that it calls runs forward and backward like any other code."""
        thread = self._trains()
        thread.optimizer_depth += 1
        thread.steps_in_backward = self.in_backward()
        thread.phase = "optimizer"
        self._changed()
        self._phase_changed("optimizer")

    def optimizer_ended(self) -> None:
        """End ``optimizer.step()``."""
        thread = self._trains()
        thread.optimizer_depth = max(0, thread.optimizer_depth - 1)
        if not thread.optimizer_depth:
            thread.steps_in_backward = False
            self._changed()
            self._rest()

    @property
    def has_loss(self) -> bool:
        """Return whether a forward with grad has run that no backward has used yet."""
        return self._forward_from >= 0

    def step_went_on(self, step: int) -> None:
        """Merge the step that had begun after this one back into this one, with everything that happened in it."""
        self._step = step
        self.places = [merged(known, step) for known in self.places]
        self._scopes = {key: scope for key, scope in self._scopes.items() if key[0] <= step}
        self._changed()
        if step == 0:
            self._init_again()

    def _init_again(self) -> None:
        """Rest in ``init``: nothing will use what a forward with grad has left."""
        if self._forward_from >= 0:
            self.regions.append(RegionRow(self._forward_from, self._forward_until, OUTSIDE))
            self._forward_from = -1
        if not self._trains().optimizer_depth:
            self._set_phase("init")

    def close(self) -> None:
        """End the open regions. A backward would have used what they allocated and is still alive."""
        if self._recompute_from >= 0:
            self._recompute_switched(False, OUTSIDE)
        if self._forward_from >= 0:
            self.regions.append(RegionRow(self._forward_from, self.op - 1, OUTSIDE))
            self._forward_from = -1

    # ---- inside

    def _thread(self) -> _Thread:
        ident = threading.get_ident()
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads[ident] = _Thread("")
        return thread

    def _phase_of(self, thread: _Thread) -> str:
        return thread.phase or ("backward" if self._engines else self._last.phase)  # a thread that only helps

    def _trains(self) -> _Thread:
        """The thread that trains here: this one, or the one whose backward it runs. From now on, others follow it."""
        engine = self._engine()
        self._last = self._thread() if engine is None else engine.tape
        return self._last

    def _engine(self) -> _Engine | None:
        """The innermost backward that runs in this thread."""
        if not (engines := self._engines[:]):  # other threads' backwards may end meanwhile
            return None
        ident, task = threading.get_ident(), _task()
        engine = max(
            reversed(engines), key=lambda e: 3 if e.thread == ident else 2 if e.task == task else e.task == _ANY
        )
        return engine if task >= 0 or engine.thread == ident else None

    def _changed(self) -> None:
        self.cells.version += 1

    def _set_phase(self, phase: str) -> None:
        thread = self._trains()
        if phase != thread.phase:
            thread.phase = phase
            self._changed()
            self._phase_changed(phase)

    def _rest(self) -> None:
        """Return to the resting phase, even if it does not change, after a backward or an optimizer's step."""
        self._trains().phase = self._resting
        self._changed()
        self._phase_changed(self.phase)

    @property
    def _resting(self) -> str:
        return "optimizer" if self._trains().optimizer_depth else "other"

    def _recompute_switched(self, on: bool, layer: int) -> None:
        with self.lock:
            self._changed()
            if self._recompute_from >= 0:
                self.regions.append(RegionRow(self._recompute_from, self.op - 1, self._recompute_layer))
            self._recompute_from, self._recompute_layer = self.op if on else -1, layer

    def _running_again(self, engine: _Engine) -> _Again | None:
        """This thread, and the first of the modules on its stack that began inside the innermost backward.

        None if no module runs again there, but an autograd node.
        """
        ident = threading.get_ident()
        thread = self._threads.get(ident)
        first = engine.depth if ident == engine.thread else 0
        return _Again(thread, first) if thread and len(thread.stack) > first else None

    def _scope_in_backward(self, engine: _Engine, again: _Again | None, layer: int, *, recomputes: bool = False) -> int:
        # A module that runs again does so with grad. Its own autograd function computes without, in its forward.
        with_grad = torch.is_grad_enabled() or (again is not None and again.thread.with_grad[again.first])
        recompute = with_grad and not engine.creates_graph
        if recompute != (self._recompute_from >= 0):
            self._recompute_switched(recompute, layer)
        is_beside_training = engine.tape.steps_in_backward
        return self._scope_of((self._step, "backward", layer, recompute or recomputes, is_beside_training))

    def _layer_in_backward(self, engine: _Engine, again: _Again | None, node: torch.autograd.graph.Node | None) -> int:
        if again is not None:
            return again.thread.stack[-1]
        if node is None:
            return OUTSIDE
        tape, sequence = engine.tape, node._sequence_nr()
        if sequence >= _LAST_NODE:
            return self._owner_of_node(node)
        at = bisect_right(tape.bounds, sequence) - 1
        return tape.layers[at] if at >= 0 else OUTSIDE

    def _scope_of(self, key: tuple[int, str, int, bool, bool]) -> int:
        """``key``: step, phase, layer, whether it is computed again, and whether an evaluation's forward or, inside a
        backward, an optimizer runs.
        """
        scope = self._scopes.get(key)
        if scope is not None:
            return scope
        with self.lock:  # another thread may have met it meanwhile
            return self._scopes[key] if key in self._scopes else self._new_scope(key)

    def _new_scope(self, key: tuple[int, str, int, bool, bool]) -> int:
        step, phase, layer, recompute, is_beside = key
        scope = len(self.places)
        # What is launched there is no part of the model's forward or backward. Memory has the phase around it.
        launching = phase if not is_beside else "optimizer" if phase == "backward" else "other"
        self.places.append(Location(step, launching, layer, recompute))
        self.new_scopes.append(ScopeRow(scope, step, phase, layer, recompute))
        self._scopes[key] = scope
        return scope
