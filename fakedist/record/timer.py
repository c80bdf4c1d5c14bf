"""Timing one step: who wants it, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from fakedist.patch import patched

Place = tuple[int, str, int, bool]


class Timer(Protocol):
    """Who times a step's kernels.

    Attributes:
        inside: Gives the place of what a compiled graph launches now in this thread; None outside of one.
    """

    inside: Callable[[], Place | None]

    def begin(self) -> None:
        """The step begins."""

    def end(self, step: int) -> dict[str, Any]:
        """The step is over: the journal's record of its kernels."""

    def capture_begins(self) -> None:
        """The capture of a CUDA graph begins."""

    def capture_ended(self) -> None:
        """That capture is over."""

    def operation(self, op: int, operation: str, place: Place) -> int:
        """An operation begins in this thread, at a place: (step, phase, layer, recompute); gives a tag for it."""

    def done(self, tag: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """The operation with that tag is over."""

    def moved(self, place: Place, graph: tuple[int, str] | None = None) -> None:
        """This thread is elsewhere now; with a graph: a compiled one begins, or -1 and nothing if it ended."""

    def collective(self, sequence: int, op: int, operation: str, place: Place) -> AbstractContextManager[None]:
        """Around a collective, on its stream."""


@contextmanager
def captures(begins: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """Call ``begins`` before a CUDA graph is captured and ``ended`` after it, also where that fails.

    Raises:
        RecordingError: This torch captures otherwise.
    """

    def begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        begins()
        try:
            return original_begin(graph, *args, **kwargs)
        except BaseException:
            ended()
            raise

    def end(graph: Any, *args: Any, **kwargs: Any) -> Any:
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
