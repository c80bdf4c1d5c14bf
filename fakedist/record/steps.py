"""Training steps: where each begins and ends, which one is timed, and how many are recorded."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import nn

from fakedist.errors import RecordingError, StopRun
from fakedist.graph_captures import GraphObserver
from fakedist.options import Until
from fakedist.patch import patched, present
from fakedist.record.alive import alive
from fakedist.record.cuda_graphs import Graphs
from fakedist.record.ddp_buckets import FIRST_WITH_LAST_BUCKETS, StaticGraphs
from fakedist.record.generation import Generation
from fakedist.record.hooks import keyword_arguments
from fakedist.record.loading import Loading, SampleCount, Samples, StepSize
from fakedist.record.position import Position
from fakedist.record.stopping import Stopping
from fakedist.rundir import notes
from fakedist.rundir.notes import Note
from fakedist.rundir.records import TrainingFacts
from fakedist.units import format_bytes

#: ``--steps auto`` runs at least and at most this many steps.
LEAST_STEPS, MOST_STEPS = 2, 6
#: Bytes by which small blocks may differ at a step's end and still count as steady, such as losses kept for a log.
SLACK_BYTES = 1 << 20
#: A step whose batch is smaller than this fraction of the largest before has a partial one. Batches of graphs and of
#: packed sequences differ by less from step to step.
WHOLE_BATCH = 0.9


class LiveBytes(NamedTuple):
    """Live bytes of a device: requested in large (over 1 MiB) and small blocks, and the sizes of the large blocks."""

    large: int
    small: int
    large_blocks: int


#: The live bytes of each device that has any.
Live = Mapping[int, LiveBytes]
_NOTHING = LiveBytes(0, 0, 0)


class After:
    """A fixed number of steps, of which the last is timed; ``stops``: recording stops after them.

    Where inputs ``vary``, the others after the first are timed, too, so that a typical one counts.
    """

    def __init__(self, limit: int, *, stops: bool = True, vary: Callable[[], bool] = lambda: False) -> None:
        self._limit, self._stops, self._vary = limit, stops, vary

    def may_end(self) -> None:
        """Note that a step may have ended here. A later event decides."""

    def is_last(self, step: int) -> bool:
        """Return whether the step, which ended where :meth:`may_end` was last called, is the last one to record."""
        return self._stops and step >= self._limit

    def is_timed(self, step: int) -> bool:
        """Return whether to time the step that begins. See :class:`~fakedist.record.timed_step.RecordedStep`."""
        return step == self._limit or (1 < step < self._limit and self._vary())

    def notes(self) -> list[Note]:
        """Notes for the report when the run is over."""
        return []


class Steady:
    """Steps until one ends with as much live memory as the step before, so that the next one would be the same.

    Live memory is what the caching allocator holds for requests. On each device, requests for large blocks must match
    to the byte; those for small ones (up to 1 MiB) may differ by less than 1 MiB in total. If only the large blocks
    themselves differ, one more step must request the same: the allocator may still reserve more. No optimizer may wait
    for its first step, the batch must be whole, the largest inputs of a forward those of the step before within a
    tenth, and no static graph may still get new buckets (``has_static_graph``).
    If an evaluation ran in it, one must have run in the step before, too. Each step from step 2 on is timed until then.
    """

    def __init__(
        self,
        live: Callable[[], Live],
        waits: Callable[[], bool],
        size: Callable[[int], StepSize] = lambda step: StepSize(0, 0),
        *,
        evaluates: Callable[[int], bool] = lambda step: False,
        has_static_graph: Callable[[], bool] = lambda: False,
        stops: bool = True,
    ) -> None:
        self.is_steady = False
        self._live, self._waits, self._size, self._stops = live, waits, size, stops
        self._evaluates, self._has_static_graph = evaluates, has_static_graph
        self._most_rows = self._most = 0
        self._now: Live = {}
        self._before: Live | None = None
        self._why = ""
        self._num_alike = 0

    def may_end(self) -> None:
        """Read the live bytes."""
        if not self.is_steady:
            self._now = self._live()

    def is_last(self, step: int) -> bool:
        """Return whether the step is steady, or the last to try."""
        if not self.is_steady:
            before, self._before = self._before, self._now
            self._most = max(self._most, self._size(step).most)
            if step > 1:  # a pipeline's first step probes shapes, too
                self._most_rows = max(self._most_rows, self._size(step).rows)
            if before is not None and step >= LEAST_STEPS:
                self._why = self._difference(before, self._now, step)
                self.is_steady = not self._why
        return self._stops and (self.is_steady or step >= MOST_STEPS)

    def is_timed(self, step: int) -> bool:
        """Return whether the step may be the steady one."""
        return LEAST_STEPS <= step <= MOST_STEPS and not self.is_steady

    def notes(self) -> list[Note]:
        """Why the run was not steady, if it was not."""
        return [notes.not_steady(self._why)] if self._why else []

    def _difference(self, before: Live, now: Live, step: int) -> str:
        devices = [(before.get(device, _NOTHING), now.get(device, _NOTHING)) for device in sorted({*before, *now})]
        for old, new in devices:
            if old.large != new.large or abs(old.small - new.small) >= SLACK_BYTES:
                self._num_alike = 0
                return _grew("requests", old.large + old.small, new.large + new.small, step)
        self._num_alike += 1
        for old, new in devices:
            if old.large_blocks != new.large_blocks and self._num_alike == 1:
                return _grew("large blocks", old.large_blocks, new.large_blocks, step)
        size = self._size(step)
        if size.rows < WHOLE_BATCH * self._most_rows or size.most < WHOLE_BATCH * self._most:
            return f"step {step} had a smaller batch than a step before"
        narrow, wide = sorted((size.widest, self._size(step - 1).widest))
        if narrow < WHOLE_BATCH * wide:
            return f"inputs vary: {narrow:,} and {wide:,} elements in steps {step - 1} and {step}"
        if self._evaluates(step) and not self._evaluates(step - 1):
            return f"step {step} has an evaluation, and the step before has none"
        if step < FIRST_WITH_LAST_BUCKETS and self._has_static_graph():
            return f"DistributedDataParallel builds the buckets of a static graph in step {FIRST_WITH_LAST_BUCKETS}"
        return f"an optimizer has not stepped in {step} steps" if self._waits() else ""


def _grew(kind: str, bytes_: int, now_bytes: int, step: int) -> str:
    live = f"{format_bytes(bytes_)} of {kind} were live at the end of step {step - 1}"
    return f"{live}, {format_bytes(now_bytes)} at the end of step {step} ({now_bytes - bytes_:+,} bytes)"


#: Decides which step is the last to record, and which are timed.
Goal = After | Steady


def make_goal(
    steps: int | Literal["auto"],
    until: int | Until | None,
    live: Callable[[], Live],
    waits: Callable[[], bool],
    size: Callable[[int], StepSize],
    *,
    evaluates: Callable[[int], bool] = lambda step: False,
    has_static_graph: Callable[[], bool],
    vary: Callable[[], bool],
) -> Goal:
    """Make the goal that ``--steps`` and ``--until`` describe. The others are those of :class:`Steady`."""
    if isinstance(until, int):
        return After(until, vary=vary)
    stops = until is None
    if steps == "auto":
        return Steady(live, waits, size, evaluates=evaluates, has_static_graph=has_static_graph, stops=stops)
    return After(steps, stops=stops, vary=vary)


#: The name of a step in which one ran.
_EVALUATION = "evaluation"
#: One key for all optimizers that step inside a backward, one per parameter. They step in any order.
_IN_BACKWARD = -1
#: If an optimizer steps this many times more than in the step before, its steps are taken as training steps.
_MOST_REPEATS = 16
#: How far the real time was ahead of the steady clock when this process began.
_AHEAD_NS = time.time_ns() - time.monotonic_ns()


def _now_us() -> int:
    """Microseconds since the epoch; a clock that is set meanwhile changes no step's length."""
    return (_AHEAD_NS + time.monotonic_ns()) // 1000


@dataclass
class _Step:
    start_us: int = field(default_factory=_now_us)
    end_us: int = 0
    stepped: Counter[int] = field(default_factory=Counter)
    first: int = 0
    is_reported: bool = False


class Steps:
    """Counts training steps.

    A sign of work is a root module's forward, a backward or a CUDA graph's replay. Step 0 (``init``) is everything
    before the first one, and before any optimizer is made (a probe of shapes, a count of FLOPs): step 1 begins again
    with the next sign of work once the first optimizer is made. It goes on if the optimizer was made amid its work: for
    gradients that the work left (the optimizer's parameters still have them at the next sign of work or when it steps),
    or between a forward and its backward. A job without any optimizer is in step 1 from its first work on.

    A step ends at the first sign of work after an ``optimizer.step()``, so gradient accumulation does not count.
    Without signs of work, or with work only in closures inside ``optimizer.step()``, a step ends when its first
    optimizer steps again. Jobs without an optimizer call ``fakedist.step()``, which switches the search off. An
    optimizer that steps before any work only creates its state (torch's distributed checkpoints, Megatron-FSDP):
    ``init``.

    With several optimizers (a GAN's), a step ends at the last sign of work before its first optimizer steps again. This
    is known only afterwards, so each sign of work after an optimizer's step begins a new step until the next optimizer
    steps. If that is not the first one, ``merged`` is called: the new step is still the old one. A step ends at once
    when every optimizer has stepped as often as in the step before, or in the first step has stepped at all
    (``waits``). One that steps every k-th time (a generator after each fifth critic) belongs to the step in which it
    steps. A step of ``updates`` has so many steps of its first optimizer: an iteration of PPO, with its rollout.

    Args:
        goal: Decides which step is the last. :class:`StopRun` is raised where the next one would begin.
        ended: Called with (step, start_us, end_us) when a step ends. Unix time in microseconds.
        merged: Called with a step that went on, even if ``ended`` was called for it; with 0 where step 1 begins again.
        waits: Whether an optimizer exists that has never stepped, given the ``id`` of those that have.
        num_more: Steps to run after the last recorded one. ``ended`` is called for them too.
        goes_on: Whether the script goes on where it would be stopped: others stop it.
        updates: Steps of the first optimizer in each step.

    Attributes:
        done: The last recorded step. None until it has ended.
        is_cut_short: Whether the step that ends now ends with the run, so that what follows its last optimizer step may
            be the script's own end: a checkpoint, an evaluation by hand.
    """

    def __init__(
        self,
        goal: Goal,
        ended: Callable[[int, int, int], None],
        merged: Callable[[int], None] = lambda step: None,
        waits: Callable[[Container[int]], bool] = lambda stepped: False,
        *,
        stop_error: Callable[[], StopRun] = StopRun,
        num_more: int = 0,
        goes_on: Callable[[], bool] = lambda: False,
        updates: int = 1,
    ) -> None:
        self.number = self.optimizer_steps = 0
        self._updates = updates
        self._goes_on = goes_on
        self._num_more = num_more
        self.done: int | None = None
        self.stopped = self.is_cut_short = False
        self._goal, self._ended, self._merged, self._waits = goal, ended, merged, waits
        self._stop_error = stop_error
        self._step = _Step()
        self._before: _Step | None = None  # a step that may have ended, before the current one
        self._usual: Counter[int] | None = None  # how often each optimizer stepped in the step before
        self._references: dict[int, weakref.ref[object]] = {}
        self._inside_optimizer = 0
        self._works = self._works_inside = False
        self._manual = False
        self._num_made = 0
        self._may_be_init = False  # step 1 began before any optimizer was made, and none has stepped
        self._with_gradients: list[weakref.ref[torch.optim.Optimizer]] = []

    @property
    def last(self) -> int:
        """The last recorded step that has begun."""
        return self.number if self.done is None else min(self.number, self.done)

    @property
    def is_manual(self) -> bool:
        """Return whether the script itself marks where steps end."""
        return self._manual

    def waits(self) -> bool:
        """Return whether an optimizer exists that has never stepped."""
        return self._waits(self._references)

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer that was made, for the parameters that it has."""
        self._num_made += 1
        if self._may_be_init and _has_gradients(optimizer):
            self._with_gradients.append(weakref.ref(optimizer))

    def work(self, *, continues: bool = False) -> None:
        """Take a sign of work that is about to run; ``continues`` is the backward of the forward taken last."""
        if continues and self._num_made:
            self._may_be_init = False
        self.decide_on_init()
        if self._inside_optimizer:  # a closure: its forwards and backwards belong to the optimizer's one step
            self._works_inside = True
            if self.number == 0:
                self._begin()
            return
        self._works = True
        if self._before is None or self._before.is_reported:
            self._stop_if_done()  # raises again if a bare `except:` swallowed the first StopRun
        if self.number == 0:
            self._begin()
        elif self._is_updated and not self._manual:
            self._may_end()

    def optimizer_begins(self, optimizer: object, in_backward: bool = False) -> None:
        """Take an ``optimizer.step()`` that was called."""
        self.decide_on_init()
        self._may_be_init = False
        if not self._inside_optimizer and not self._manual:
            self._optimizer_again(_IN_BACKWARD if in_backward else id(optimizer))
            self._works_inside = False
        self._inside_optimizer += 1

    def optimizer_ended(self, optimizer: object, in_backward: bool = False) -> None:
        """Take an ``optimizer.step()`` that returned."""
        self._inside_optimizer = max(0, self._inside_optimizer - 1)
        if not self._inside_optimizer:
            self._refer_to(optimizer)
            key, stepped = (_IN_BACKWARD if in_backward else id(optimizer)), self._step.stepped
            self._step.first = self._step.first or key
            if in_backward and self._updates > 1:
                raise RecordingError(
                    f"{self._updates} updates cannot be one step: their optimizer steps within backward",
                    "leave out --updates-per-step",
                )
            stepped[key] = 1 if in_backward else stepped[key] + 1
            self.optimizer_steps += 1

    def manual(self) -> None:
        """End a step here, at ``fakedist.step()``. The first one began with the first forward or the recording."""
        self._manual, self._before, self._may_be_init = True, None, False
        if self.number == 0:
            self.number = 1
        self._stop_if_done()
        self._goal.may_end()
        self._end(self._step, self.number)
        self._begin()
        self._stop_if_done()

    def close(self) -> None:
        """End the run. The last step has ended if its optimizer stepped, and a step that may have ended has."""
        if self._manual:
            return
        if self._before is not None and not self._before.is_reported:
            self._end(self._before, self.number - 1)
        if self._is_updated and self.number > 0 and not self._is_over():
            self._goal.may_end()
            self.is_cut_short = True
            self._end(self._step, self.number)

    def stop(self) -> None:
        """End the run here, in the middle of a step."""
        if self.done is None:
            self.done = self.number
        self.stopped = True
        raise self._stop_error()

    def decide_on_init(self) -> None:
        """Once an optimizer was made, decide whether the work before it was ``init``, and begin step 1 again if so."""
        if not self._may_be_init or not self._num_made:
            return
        made = [optimizer for reference in self._with_gradients if (optimizer := reference()) is not None]
        self._may_be_init, self._with_gradients = False, []
        if not any(map(_has_gradients, made)):
            self.number, self._works, self._step, self._before = 0, False, _Step(), None
            self._merged(0)

    # ---- inside

    @property
    def _is_updated(self) -> bool:
        return self._step.stepped[self._step.first] >= self._updates

    def _optimizer_again(self, key: int) -> None:
        """Decide whether a step ended, before this optimizer steps."""
        before = self._before
        if before is not None:
            self._before = None
            repeats = before.stepped[key] - (self._usual or Counter())[key]
            if key == before.first or not self._is_alive(before.first) or repeats >= _MOST_REPEATS:
                if not before.is_reported:
                    self._end(before, self.number - 1)
                self._usual = before.stepped
                self._stop_if_done()
            elif self.done is None:
                self.number -= 1
                self._step = _Step(before.start_us, 0, before.stepped, before.first)
                self._merged(self.number)
        elif key == self._step.first and self._is_updated and (self._works_inside or not self._works):
            self._may_end()
            self._before, before = None, self._before
            if before is not None:
                if not before.is_reported and self.number > 1:
                    self._end(before, self.number - 1)
                self._usual = before.stepped
            self._stop_if_done()

    def _may_end(self) -> None:
        self._goal.may_end()
        before, number = self._step, self.number
        before.end_us = _now_us()
        if number > 0 and self._is_whole(before):
            self._end(before, number)
        self._begin()
        self._before = before
        if before.is_reported:
            self._stop_if_done()

    def _is_whole(self, step: _Step) -> bool:
        """Return whether every optimizer that belongs to the step has stepped, as far as is known."""
        if self._usual is None:
            return not self.waits()
        return all(step.stepped[key] >= times for key, times in self._usual.items() if self._is_alive(key))

    def _begin(self) -> None:
        self._before = None
        self._step = _Step()
        self._may_be_init = not self.number and not self._num_made
        self.number += 1

    def _end(self, step: _Step, number: int) -> None:
        step.is_reported = True
        if self.done is None and self._goal.is_last(number):
            self.done = number
        self._ended(number, step.start_us, step.end_us or _now_us())

    def _is_over(self) -> bool:
        return self.done is not None and self.number > self.done + self._num_more

    def _stop_if_done(self) -> None:
        if self._is_over() and not self._goes_on():
            self.stop()

    def _refer_to(self, optimizer: object) -> None:
        """Track the life of an optimizer. Once it is gone, another optimizer may get the same ``id``."""
        key = id(optimizer)
        if key not in self._references:
            self._references[key] = weakref.ref(optimizer, lambda _: self._references.pop(key, None))

    def _is_alive(self, key: int) -> bool:
        return key == _IN_BACKWARD or key in self._references


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


class Evaluations:
    """Distinguishes evaluation from training by the forwards of root modules, after an optimizer has stepped.

    In an evaluation, a trainable model runs without grad, or in ``eval()`` although it trained in ``train()``. A model
    that ran without grad in ``train()`` before then does so in training too (a GAN's generator, a rollout).
    """

    def __init__(self) -> None:
        self.num_ended = 0
        self.running = False
        self._in_training: set[int] = set()  # ran without grad as part of training
        self._trained: set[int] = set()  # ran with grad in train()

    @property
    def seen(self) -> bool:
        """Return whether any evaluation has run or is running."""
        return self.running or self.num_ended > 0

    def root_forward(self, module: nn.Module, has_stepped: bool) -> None:
        """Take note of a root module that is about to run forward; ``has_stepped``: an optimizer has stepped."""
        grad = torch.is_grad_enabled()
        if not has_stepped:
            if module.training:
                (self._trained if grad else self._in_training).add(id(module))
        elif self._is_evaluation(module, grad):
            self.running = True
        elif grad:
            self.training()

    def training(self) -> None:
        """End a running evaluation: a forward or a backward of training runs."""
        if self.running:
            self.running = False
            self.num_ended += 1

    def _is_evaluation(self, module: nn.Module, grad: bool) -> bool:
        if grad:
            return not module.training and id(module) in self._trained
        known = module.training and id(module) in self._in_training
        return not known and any(parameter.requires_grad for parameter in nn.Module.parameters(module))


def any_waits(stepped: Container[int]) -> bool:
    """Return whether an optimizer that has not stepped has parameters that none with an ``id`` in ``stepped`` has.

    One that shares its parameters with another wraps it, or is wrapped by it. This searches all Python objects, once or
    twice a run, because no torch hook reports the creation of every class of optimizer.
    """
    living = alive(lambda kind: issubclass(kind, torch.optim.Optimizer))
    optimizers = [known for known in living if isinstance(known, torch.optim.Optimizer)]
    trained = {id(p) for optimizer in optimizers if id(optimizer) in stepped for p in _parameters(optimizer)}
    waiting = [optimizer for optimizer in optimizers if id(optimizer) not in stepped]
    return any(id(parameter) not in trained for optimizer in waiting for parameter in _parameters(optimizer))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups = getattr(optimizer, "param_groups", None) or []
    return [parameter for group in groups for parameter in group.get("params", ()) if parameter.requires_grad]


#: Modules and their functions that write a checkpoint. A nested call among them is part of the same checkpoint.
SAVES = (
    ("torch", ("save",)),
    ("torch.distributed.checkpoint", ("save", "async_save", "save_state_dict")),
    ("torch.distributed.checkpoint.state_dict_saver", ("save", "async_save", "save_state_dict")),
    ("safetensors.torch", ("save_file", "save_model")),
)


@contextmanager
def saves(saved: Callable[[], None]) -> Iterator[None]:
    """Call ``saved``, which may raise, whenever a checkpoint has been written.

    The modules to patch are imported now, so that a script that imports a function from one gets the patched function.

    Raises:
        RecordingError: This version of torch saves in another way.
    """
    depth = 0

    def watch(original: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(original)
        def save(*args: object, **kwargs: object) -> object:
            nonlocal depth
            depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                depth -= 1
            if not depth:
                saved()
            return result

        return save

    with ExitStack() as stack:
        for name, functions in SAVES:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                continue
            module = importlib.import_module(name)
            for function in functions:
                stack.enter_context(patched(module, function, watch(present(module, function))))
        yield


class StepListener:
    """The other side of :class:`Training`, which needs it and which it needs. By itself it does nothing."""

    def step_ended(self, step: int, start_us: int, end_us: int) -> None:
        """A step ended. See :class:`Steps`."""

    def step_went_on(self, step: int) -> None:
        """A step had not ended after all. 0: what was step 1 is ``init``."""

    def step_may_have_changed(self) -> None:
        """The position may be in another step."""


class Training(GraphObserver):
    """Follows the steps, updates the position's step, and ends the run when enough is recorded.

    ``until`` ends it instead of ``steps`` or "auto": a step, "validation", "save" or "end" (the script's own end).
    """

    def __init__(
        self,
        position: Position,
        steps: int | Literal["auto"],
        until: int | Until | None,
        graphs: Graphs,
        listener: StepListener,
        *,
        num_more: int = 0,
        goes_on: Callable[[], bool] = lambda: False,
        updates: int = 1,
    ) -> None:
        self._position = position
        self._until = until
        self._graphs = graphs
        self._listener = listener
        self._evaluations, self.loading = Evaluations(), Loading()
        self._generation = Generation()
        self._static_graphs = StaticGraphs()
        self._samples: dict[int, SampleCount] = {}
        self._without_gradients: Counter[bool] = Counter()  # forwards of models in train(): after the first step, in it
        self._names: dict[int, str] = {}
        self.goal = make_goal(
            steps,
            until,
            live_bytes,
            lambda: self.steps.waits(),
            self.size_of,
            evaluates=self._evaluates_in,
            has_static_graph=lambda: bool(self._static_graphs),
            vary=self._vary,
        )
        self._stopping = Stopping()
        self.steps = Steps(
            self.goal,
            listener.step_ended,
            self._step_went_on,
            any_waits,
            stop_error=self._stopping.error,
            num_more=num_more,
            goes_on=goes_on,
            updates=updates,
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow DataLoaders, static graphs and, if saving one ends the run, checkpoints."""
        with ExitStack() as stack:
            stack.enter_context(self.loading.watching())
            stack.enter_context(self._static_graphs.watching())
            stack.enter_context(self._stopping)
            if self._until == "save":
                stack.enter_context(saves(self._saved))
            yield

    def root_forward(self, module: nn.Module, args: tuple[object, ...]) -> bool:
        """Take note of a forward of an uncalled module that is about to run. Return whether it generates tokens."""
        self._evaluations.root_forward(module, self.steps.optimizer_steps > 0)
        self._work()
        if self._evaluations.running:
            self._names.setdefault(self.steps.number, _EVALUATION)
        self.loading.used(in_training=torch.is_grad_enabled())
        kwargs = keyword_arguments(module)
        if not torch.is_grad_enabled():
            self._without_gradients[self.steps.number > 1] += module.training
        else:
            self._samples.setdefault(self.steps.number, SampleCount(id(module))).take(module, args, kwargs)
        return self._generation.generates(module, args, kwargs)

    def samples_of(self, step: int) -> Samples:
        """The samples that the model was trained on in a step."""
        return self._samples[step].samples if step in self._samples else Samples(0, "")

    def name_of(self, step: int) -> str:
        """The name that the script gave a step; "evaluation" if one ran in it; else empty."""
        return self._names.get(step, "")

    def _evaluates_in(self, step: int) -> bool:
        return self._names.get(step) == _EVALUATION

    def size_of(self, step: int) -> StepSize:
        """The inputs that the model was trained on in a step."""
        return self._samples[step].size if step in self._samples else StepSize(0, 0)

    def _vary(self) -> bool:
        """Return whether the inputs of steps after the first differ, those of one that runs left out."""
        return len({known.size.elements for step, known in self._samples.items() if 1 < step < self.steps.number}) > 1

    def backward(self) -> None:
        """Take note of an outermost ``backward()`` that is about to run."""
        self._evaluations.training()
        self._work(continues=self._position.has_loss)
        self.loading.used(in_training=True)

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of an ``optimizer.step()`` that was called. During the capture of a graph it does not run yet."""
        if self._graphs.capturing is None:
            self._follow(partial(self.steps.optimizer_begins, optimizer, self._position.in_backward()))

    def optimizer_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of an ``optimizer.step()`` that returned."""
        if self._graphs.capturing is None:
            self.steps.optimizer_ended(optimizer, self._position.in_backward())
        else:
            self._graphs.capturing.optimizers.append(weakref.ref(optimizer))

    def step(self, shape: Sequence[int] = (), name: str = "") -> None:
        """End a step here, at the script's request, which may tell the shape of a sample and the step's name."""
        if name:
            self._names[self.steps.number] = name
        if shape:
            step = self._samples.setdefault(self.steps.number, SampleCount(0))
            step.samples = Samples(max(step.samples.number, 1), "x".join(map(str, shape)))
        self._follow(self.steps.manual)

    def notes(self) -> list[Note]:
        """Notes on what feeds the steps, and on a stop that the script caught."""
        swallowed = [notes.stop_swallowed(self._stopping.num_swallowed)] if self._stopping.num_swallowed else []
        first, later = self._without_gradients[False], self._without_gradients[True]
        rollout = [notes.rollout_in_first_step(first)] if first > 1 and not later and self.steps.last > 1 else []
        return [*swallowed, *rollout, *self.loading.notes()]

    @property
    def evaluates(self) -> bool:
        """Return whether an evaluation is running."""
        return self._evaluations.running

    @property
    def is_counted(self) -> bool:
        """Return whether anything ends steps: an optimizer or the script."""
        return self.steps.optimizer_steps > 0 or self.steps.is_manual

    def facts(self) -> TrainingFacts:
        """The facts about training for the outcome's record."""
        return TrainingFacts(self._evaluations.seen, self.steps.optimizer_steps, counts_itself=self.steps.is_manual)

    def _work(self, *, continues: bool = False) -> None:
        if self._graphs.capturing is not None:
            self._graphs.capturing.works = True
        if self._until == "validation" and self._evaluations.num_ended:
            self.steps.stop()
        self._follow(partial(self.steps.work, continues=continues))

    def replay_begins(self, graph: torch.cuda.CUDAGraph) -> None:
        """Take note of a CUDA graph that is about to be replayed."""
        captured = self._graphs.contents(graph)
        if captured.works and self._position.is_root_call():
            self._work()
        for optimizer in captured.replayed():
            self._follow(partial(self.steps.optimizer_begins, optimizer))
            self.steps.optimizer_ended(optimizer)

    def _step_went_on(self, step: int) -> None:
        if (name := self._names.pop(step + 1, "")) and step:
            self._names.setdefault(step, name)
        self._samples.pop(step + 1, None)  # what the first model was trained on is in the step already
        if step == 0:
            self._evaluations = Evaluations()  # a probe without grad is not how the model trains
        self._listener.step_went_on(step)

    def _saved(self) -> None:
        if self.steps.number > 0:
            self.steps.stop()

    def _follow(self, count: Callable[[], None]) -> None:
        try:
            count()
        finally:
            self._position.step = self.steps.number
            self._listener.step_may_have_changed()


def live_bytes() -> Live:
    """The bytes that live blocks of the caching allocator were requested with, on each device that has any."""
    if not torch.cuda.is_initialized():
        return {}
    live = {}
    for device in range(torch.cuda.device_count()):
        stats = torch._C._cuda_memoryStats(device)
        requested = stats["requested_bytes"]
        if requested["all"]["current"]:
            live[device] = LiveBytes(
                requested["large_pool"]["current"],
                requested["small_pool"]["current"],
                stats["allocated_bytes"]["large_pool"]["current"],
            )
    return live
