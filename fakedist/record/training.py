"""Turns what torch's hooks report of forwards, backwards and optimizers into training steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fakedist.job import Until
from fakedist.record.cuda_graphs import Captured, Graphs
from fakedist.record.evaluations import Evaluations
from fakedist.record.generation import Generation
from fakedist.record.goal import Live, StepSize, make_goal
from fakedist.record.hooks import keyword_arguments
from fakedist.record.loading import Loading
from fakedist.record.position import Position
from fakedist.record.saving import saves
from fakedist.record.steps import Steps
from fakedist.record.stopping import Stopping
from fakedist.record.waiting import any_waits
from fakedist.run import notes
from fakedist.run.notes import Note
from fakedist.run.records import TrainingFacts


class Samples(NamedTuple):
    """Samples of a step: how many, and the shape of one, such as "3x224x224". 0 and empty if they are not known."""

    number: int
    shape: str


class _Samples:
    """Counts the samples of a step: first dimensions of the inputs of the first model that runs with gradients.

    Attributes:
        samples: The samples, as positional arguments tell them.
        size: The rows of the first tensor among all arguments, and the elements of all of them.
    """

    def __init__(self, model: int) -> None:
        self.samples = Samples(0, "")
        self.size = StepSize(0, 0)
        self._model = model

    def take(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Count the input of one forward."""
        if id(module) != self._model:
            return
        shapes, others = _shapes(args), _shapes(kwargs)
        if shapes:
            self.samples = Samples(self.samples.number + shapes[0][0], "x".join(map(str, shapes[0][1:])))
        rows, elements = self.size
        if every := [*shapes, *others]:
            self.size = StepSize(rows + every[0][0], elements + sum(map(prod, every)))


def _shapes(arguments: object) -> list[tuple[int, ...]]:
    leaves = tree_leaves(arguments)
    return [tuple(map(int, leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]


class Training:
    """Follows the steps, updates the position's step, and ends the run when enough is recorded.

    Args:
        position: Where the rank is.
        steps: Steps to record, or "auto".
        until: What ends the recording instead: a step, "validation", "save" or "end" (the script's own end).

    Attributes:
        steps: The steps.
        goal: Decides which of them is the last.
        ended: Called when a step ends. See :class:`~fakedist.record.steps.Steps`.
        went_on: Called with a step that had not ended after all; with 0 if what was step 1 is ``init``.
        moved: Called when the step may have changed.
    """

    def __init__(self, position: Position, steps: int | Literal["auto"], until: int | Until | None) -> None:
        self.ended: Callable[[int, int, int], None] = lambda step, start_us, end_us: None
        self.went_on: Callable[[int], None] = lambda step: None
        self.moved: Callable[[], None] = lambda: None
        self._position = position
        self._until = until
        self._evaluations, self._loading = Evaluations(), Loading()
        self._generation = Generation()
        self._samples: dict[int, _Samples] = {}
        self._graphs = Graphs(self._replay_begins)
        self.goal = make_goal(steps, until, live_bytes, lambda: self.steps.waits(), self.size_of)
        self._stopping = Stopping()
        self.steps = Steps(
            self.goal,
            lambda *step: self.ended(*step),
            self._step_went_on,
            any_waits,
            stop_error=self._stopping.error,
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow CUDA graphs, DataLoaders and, if saving one ends the run, checkpoints."""
        with ExitStack() as stack:
            stack.enter_context(self._graphs.watching())
            stack.enter_context(self._loading.watching())
            stack.enter_context(self._stopping)
            if self._until == "save":
                stack.enter_context(saves(self._saved))
            yield

    def root_forward(self, module: nn.Module, args: tuple[object, ...]) -> bool:
        """Take note of a forward that is about to run, of a module that no other module called.

        Returns whether it generates tokens.
        """
        self._evaluations.root_forward(module, self.steps.optimizer_steps > 0)
        self._work()
        self._loading.used(in_training=torch.is_grad_enabled())
        kwargs = keyword_arguments(module)
        if torch.is_grad_enabled():
            self._samples.setdefault(self.steps.number, _Samples(id(module))).take(module, args, kwargs)
        return self._generation.generates(module, args, kwargs)

    def samples_of(self, step: int) -> Samples:
        """The samples that the model was trained on in a step."""
        counted = self._samples.get(step)
        return counted.samples if counted is not None else Samples(0, "")

    def size_of(self, step: int) -> StepSize:
        """How much the model was trained on in a step."""
        counted = self._samples.get(step)
        return counted.size if counted is not None else StepSize(0, 0)

    def backward(self) -> None:
        """Take note of an outermost ``backward()`` that is about to run."""
        self._evaluations.training()
        self._work(continues=self._position.has_loss)
        self._loading.used(in_training=True)

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made."""
        self.steps.optimizer_made(optimizer)

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()`` was called. During the capture of a graph it does not run yet."""
        if self._graphs.capturing is None:
            self._follow(partial(self.steps.optimizer_begins, optimizer, self._position.in_backward()))

    def optimizer_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()`` returned."""
        if self._graphs.capturing is None:
            self.steps.optimizer_ended(optimizer, self._position.in_backward())
        else:
            self._graphs.capturing.optimizers.append(weakref.ref(optimizer))

    def step(self) -> None:
        """End a step here, at the script's request."""
        self._follow(self.steps.manual)

    def notes(self) -> list[Note]:
        """Notes on what feeds the steps, and on a stop that the script caught."""
        swallowed = [notes.stop_swallowed(self._stopping.num_swallowed)] if self._stopping.num_swallowed else []
        return [*swallowed, *self._loading.notes()]

    @property
    def is_counted(self) -> bool:
        """Whether anything ends steps: an optimizer or the script."""
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

    def _replay_begins(self, captured: Captured) -> None:
        if captured.works and self._position.is_root_call():
            self._work()
        for optimizer in captured.replayed():
            self._follow(partial(self.steps.optimizer_begins, optimizer))
            self.steps.optimizer_ended(optimizer)

    def _step_went_on(self, step: int) -> None:
        self._samples.pop(step + 1, None)  # what the first model was trained on is in the step already
        if step == 0:
            self._evaluations = Evaluations()  # a probe without grad is not how the model trains
        self.went_on(step)

    def _saved(self) -> None:
        if self.steps.number > 0:
            self.steps.stop()

    def _follow(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        finally:
            self._position.step = self.steps.number
            self.moved()


def live_bytes() -> Live:
    """The bytes that live blocks of the caching allocator were requested with, on each device that has any."""
    if not torch.cuda.is_initialized():
        return {}
    found = {}
    for device in range(torch.cuda.device_count()):
        requested = torch._C._cuda_memoryStats(device)["requested_bytes"]
        if requested["all"]["current"]:
            found[device] = (requested["large_pool"]["current"], requested["small_pool"]["current"])
    return found
