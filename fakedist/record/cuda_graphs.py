"""CUDA graphs: what ran during a capture runs again in each replay."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fakedist.patch import patched


@dataclass
class Captured:
    """The contents of a CUDA graph.

    Attributes:
        works: Whether it holds a forward or a backward, or nothing known.
        optimizers: The optimizers whose ``step()`` it holds, in order.
    """

    works: bool = False
    optimizers: list[weakref.ref[torch.optim.Optimizer]] = field(default_factory=list)

    def replayed(self) -> list[torch.optim.Optimizer]:
        """The optimizers that step in a replay and are still alive."""
        return [optimizer for reference in self.optimizers if (optimizer := reference()) is not None]


class Graphs:
    """Tracks the contents of each CUDA graph.

    Attributes:
        capturing: The contents of the graph that is being captured. None outside a capture.
    """

    def __init__(self) -> None:
        self.capturing: Captured | None = None
        self._captured: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, Captured] = weakref.WeakKeyDictionary()

    @contextmanager
    def watching(
        self,
        replay_begins: Callable[[Captured], None],
        capture_begins: Callable[[], None],
        capture_ended: Callable[[], None],
    ) -> Iterator[None]:
        """Follow captures and replays. ``capture_ended`` is called even if the capture fails.

        Raises:
            RecordingError: This version of torch captures in another way.
        """

        def begin(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> object:
            capture_begins()
            try:
                result = original_begin(graph, *args, **kwargs)
            except BaseException:
                capture_ended()
                raise
            self.capturing = Captured()
            return result

        def end(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> object:
            captured, self.capturing = self.capturing, None
            try:
                result = original_end(graph, *args, **kwargs)
            finally:
                capture_ended()
            if captured is not None:
                captured.works |= not captured.optimizers
                self._captured[graph] = captured
            return result

        def replay(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> object:
            replay_begins(self._captured.get(graph) or Captured(works=True))
            return original_replay(graph, *args, **kwargs)

        graph = torch.cuda.CUDAGraph
        with (
            patched(graph, "capture_begin", begin) as original_begin,
            patched(graph, "capture_end", end) as original_end,
            patched(graph, "replay", replay) as original_replay,
        ):
            yield
