"""CUDA graphs: what ran during a capture runs again in each replay."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from fakedist.graph_captures import GraphObserver


@dataclass
class Captured:
    """The contents of a CUDA graph.

    ``works``: a forward, a backward or nothing known. ``optimizers`` are in the order in which they step.
    """

    works: bool = False
    optimizers: list[weakref.ref[torch.optim.Optimizer]] = field(default_factory=list)

    def replayed(self) -> list[torch.optim.Optimizer]:
        """The optimizers that step in a replay and are still alive."""
        return [optimizer for reference in self.optimizers if (optimizer := reference()) is not None]


class Graphs(GraphObserver):
    """Tracks the contents of each CUDA graph; ``capturing`` is the one being captured, None outside a capture."""

    def __init__(self) -> None:
        self.capturing: Captured | None = None
        self._captured: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, Captured] = weakref.WeakKeyDictionary()

    def capture_begins(self) -> None:
        """Collect the contents from now on."""
        self.capturing = Captured()

    def capture_ended(self, graph: torch.cuda.CUDAGraph) -> None:
        """Keep the contents."""
        captured, self.capturing = self.capturing, None
        if captured is not None:
            captured.works |= not captured.optimizers
            self._captured[graph] = captured

    def contents(self, graph: torch.cuda.CUDAGraph) -> Captured:
        """The contents of a graph; work, if they are not known."""
        return self._captured.get(graph) or Captured(works=True)
