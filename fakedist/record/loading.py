"""Watches the feed of training steps: samples, sizes of inputs, and waits for DataLoaders, timed on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fakedist.frames import script_line
from fakedist.patch import patched, present, when_imported
from fakedist.rundir import notes
from fakedist.rundir.notes import Note

#: The iterators of torch's DataLoader, and of torchdata's, which is a subclass with a ``__next__`` of its own.
_ITERATORS = {
    "torch.utils.data.dataloader": "_BaseDataLoaderIter",
    "torchdata.stateful_dataloader.stateful_dataloader": "_StatefulBaseDataLoaderIter",
}
#: Waits kept of each DataLoader: enough for a median.
_MOST_WAITS = 1000


@dataclass
class _DataLoader:
    line: str
    dataset: str
    num_workers: int
    num_ahead: int = 0  # batches that the workers make before they are taken
    batch_bytes: int = 0  # the most
    waits_us: list[float] = field(default_factory=list)
    feeds: bool = False


class Loading:
    """The DataLoaders that the script takes batches from.

    One feeds the steps if a forward with gradients or a backward follows its batch before any forward without.

    ``clock(load)`` calls ``load`` instead, if it is not None; once ``is_over``, nothing is recorded.
    """

    def __init__(self) -> None:
        self._loaders: dict[tuple[str, str, int], _DataLoader] = {}
        self._waiting: list[_DataLoader] = []
        self._depth = 0
        self.is_over = False
        self.clock: Callable[[Callable[[], object]], object] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time every batch that a DataLoader gives.

        Raises:
            RecordingError: This version's DataLoader works in another way.
        """
        with ExitStack() as stack:

            def watch(module: ModuleType) -> None:
                owner = present(module, _ITERATORS[module.__name__])
                stack.enter_context(patched(owner, "__next__", self._timed(present(owner, "__next__"))))

            for name in _ITERATORS.keys() & sys.modules.keys():
                watch(sys.modules[name])
            with when_imported(_ITERATORS.__contains__, watch):
                yield

    def used(self, *, in_training: bool) -> None:
        """A root module runs, or a backward: the batches that were taken before are its input."""
        for loader in self._waiting:
            loader.feeds |= in_training
        self._waiting.clear()

    def prefetched_bytes(self) -> int:
        """The most bytes of tensors that workers have ready in /dev/shm."""
        return sum(loader.num_ahead * loader.batch_bytes for loader in self._loaders.values())

    def notes(self) -> list[Note]:
        """A note on each DataLoader that feeds the steps. Its first batch, which starts the workers, does not count."""
        made = []
        for loader in self._loaders.values():
            if loader.feeds:
                several = loader.waits_us[1:] or loader.waits_us
                made.append(
                    notes.data_loader(loader.line, loader.dataset, loader.num_workers, median(several), len(several))
                )
        return made

    def _timed(self, original: Callable[[Any], object]) -> Callable[[Any], object]:
        def __next__(iterator: Any) -> object:  # noqa: N807 (the name that a traceback shows)
            if self._depth:  # torchdata's calls torch's
                return original(iterator)
            begin = time.perf_counter()
            load = partial(self._nested, original, iterator)
            batch = load() if self.clock is None else self.clock(load)
            if not self.is_over:
                self._took(iterator, batch, (time.perf_counter() - begin) * 1e6)
            return batch

        return __next__

    def _nested(self, original: Callable[[Any], object], iterator: Any) -> object:
        self._depth += 1
        try:
            return original(iterator)
        finally:
            self._depth -= 1

    def _took(self, iterator: Any, batch: object, wait_us: float) -> None:
        dataset = type(getattr(iterator, "_dataset", None)).__name__
        key = (script_line(), dataset, int(getattr(iterator, "_num_workers", 0)))
        loader = self._loaders.setdefault(key, _DataLoader(*key))
        if loader.num_workers:
            loader.num_ahead = loader.num_workers * int(getattr(iterator, "_prefetch_factor", None) or 0)
            tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
            loader.batch_bytes = max(loader.batch_bytes, sum(tensor.nbytes for tensor in tensors))
        if len(loader.waits_us) < _MOST_WAITS:
            loader.waits_us.append(wait_us)
        self._waiting.append(loader)


class Samples(NamedTuple):
    """Samples of a step: how many, and the shape of one, such as "3x224x224". 0 and empty if they are not known."""

    number: int
    shape: str


class StepSize(NamedTuple):
    """A step's inputs: rows of the first (the batch), elements of all, and the most rows and elements of a forward."""

    rows: int
    elements: int
    most: int = 0
    widest: int = 0


class SampleCount:
    """Counts a step's samples, by position: first dimensions of inputs of the first model that runs with gradients."""

    def __init__(self, model: int) -> None:
        self.samples = Samples(0, "")
        self.size = StepSize(0, 0)
        self._model = model

    def take(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Take note of a forward that is about to run. Those of other models count nothing."""
        if id(module) != self._model:
            return
        inputs, others = _tensors(args), _tensors(kwargs)
        num_images = _num_images(args)
        if inputs:
            shape = "" if inputs[0].is_nested else "x".join(map(str, inputs[0].shape[0 if num_images else 1 :]))
            self.samples = Samples(self.samples.number + (num_images or inputs[0].size(0)), shape)
        if every := [*inputs, *others]:
            rows, own = num_images or every[0].size(0), sum(map(_elements, every))
            before, elements, most, widest = self.size
            self.size = StepSize(before + rows, elements + own, max(most, rows), max(widest, own))


def _num_images(arguments: tuple[object, ...]) -> int:
    """How many images a list has, as detectors take them: a tensor of three dimensions each; 0 for another input."""
    images = arguments[0] if arguments else None
    if not isinstance(images, list):
        return 0
    return len(images) if all(tensors and tensors[0].dim() == 3 for tensors in map(_tensors, images)) else 0


def _tensors(arguments: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.dim()]


def _elements(tensor: torch.Tensor) -> int:
    return int((getattr(tensor, "_values", tensor) if tensor.layout is torch.jagged else tensor).numel())
