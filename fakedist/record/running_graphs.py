"""The compiled graphs that run now, and the values of their integers (:mod:`fakedist.record.compiled_graphs`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import torch

from fakedist.record.compiled_graphs import IntegerPart
from fakedist.record.graph_layers import PlacedGraph, Placing
from fakedist.record.operations import Operations
from fakedist.record.position import Position


class IntegerRun(Protocol):
    """One run of the part of a graph that computes integers."""

    def known(self, name: str) -> torch.Tensor | None:
        """The values of a node; None if they are made up or not known."""

    def computed(self, results: Mapping[str, torch.Tensor]) -> None:
        """Operations that the graph called have these results, by the names of their nodes."""

    def settle(self, named: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Give buffers their values, by the names of their nodes."""

    def returned(self, results: object) -> None:
        """The graph returned its results. Give them their values."""


class GraphIntegers(Protocol):
    """Runs that part of compiled graphs."""

    def begin(self, part: IntegerPart, inputs: Sequence[object]) -> IntegerRun:
        """A graph with this part begins with these inputs."""


class RunningGraphs:
    """Gives a graph's integers to what it calls and returns."""

    def __init__(
        self, operations: Operations, position: Position, placing: Placing, integers: GraphIntegers | None
    ) -> None:
        self._operations = operations
        self._position = position
        self._placing = placing
        self._integers = integers

    @contextmanager
    def graph(self, compiled: object, inputs: Sequence[object]) -> Iterator[Callable[[object], None]]:
        """Follow the run of a compiled graph. Call what this gives with the results."""

        def begins(op: int) -> PlacedGraph | None:
            return self._placing.begins(compiled, inputs, op, self._position.layer)

        with self._operations.graph(begins, self._settle) as known:
            part = None if known is None else known.generated.integers
            if known is None or part is None or self._integers is None:
                yield lambda results: None
                return
            before = self._operations.here.integers
            with self._operations.unseen():
                run = self._integers.begin(part, inputs)

            def returned(results: object) -> None:
                with self._operations.unseen():
                    run.returned(results)

            self._operations.here.integers = (known, run)
            try:
                yield returned
            finally:
                self._operations.here.integers = before

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a buffer of the graph that runs now in this thread; None if they are not known."""
        if (integers := self._operations.here.integers) is None:
            return None
        placed, run = integers
        with self._operations.unseen():
            for buffer, node in placed.buffers_here((tensor,)):
                cast(IntegerRun, run).computed(placed.results_here())
                return cast(IntegerRun, run).known(node) if buffer.data_ptr() == tensor.data_ptr() else None
        return None

    def _settle(self, args: tuple[object, ...]) -> None:
        if (integers := self._operations.here.integers) is None:
            return
        placed, run = integers
        lists = (value for value in args if isinstance(value, (list, tuple)))
        tensors = [value for value in itertools.chain(args, *lists) if isinstance(value, torch.Tensor)]
        tensors = [tensor for tensor in tensors if tensor.is_cuda and not tensor.is_floating_point()]
        if named := list(placed.buffers_here(tensors)) if tensors else []:
            run.computed(placed.results_here())
            run.settle(named)
