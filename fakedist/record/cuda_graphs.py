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
    """What a CUDA graph runs.

    Attributes:
        works: Whether it holds a forward or a backward, or nothing known.
        optimizers: The optimizers whose ``step()`` it holds, in order.
    """

    works: bool = False
    optimizers: list[weakref.ref[torch.optim.Optimizer]] = field(default_factory=list)

    def replayed(self) -> list[torch.optim.Optimizer]:
        """The optimizers that step in a replay and are still alive."""
        return [optimizer for each in self.optimizers if (optimizer := each()) is not None]


class Graphs:
    """Tracks what each CUDA graph runs.

    Args:
        begins: Called before a graph is replayed.

    Attributes:
        capturing: What the graph that is being captured runs. None outside a capture.
    """

    def __init__(self, begins: Callable[[Captured], None]) -> None:
        self.capturing: Captured | None = None
        self._begins = begins
        self._captured: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, Captured] = weakref.WeakKeyDictionary()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow captures and replays.

        Raises:
            RecordingError: This version of torch captures in another way.
        """

        def begin(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> object:
            result = original_begin(graph, *args, **kwargs)
            self.capturing = Captured()
            return result

        def end(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> object:
            captured, self.capturing = self.capturing, None
            result = original_end(graph, *args, **kwargs)
            if captured is not None:
                captured.works |= not captured.optimizers
                self._captured[graph] = captured
            return result

        def replay(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> object:
            captured = self._captured.get(graph) or Captured(works=True)
            self._begins(captured)
            return original_replay(graph, *args, **kwargs)

        graph = torch.cuda.CUDAGraph
        with (
            patched(graph, "capture_begin", begin) as original_begin,
            patched(graph, "capture_end", end) as original_end,
            patched(graph, "replay", replay) as original_replay,
        ):
            yield


@contextmanager
def captures(begins: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """Call ``begins`` before a CUDA graph is captured and ``ended`` after it, even if the capture fails.

    Raises:
        RecordingError: This version of torch captures in another way.
    """

    def begin(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> object:
        begins()
        try:
            return original_begin(graph, *args, **kwargs)
        except BaseException:
            ended()
            raise

    def end(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> object:
        try:
            return original_end(graph, *args, **kwargs)
        finally:
            ended()

    graph = torch.cuda.CUDAGraph
    with (
        patched(graph, "capture_begin", begin) as original_begin,
        patched(graph, "capture_end", end) as original_end,
    ):
        yield
