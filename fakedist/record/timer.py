"""The interface of a timer for one step's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from fakedist.patch import patched
from fakedist.run.rows import Place
from fakedist.run.trace_records import KernelsRecord


class Timer(Protocol):
    """Times a step's kernels.

    Attributes:
        inside: Returns the place of what a compiled graph launches now in this thread. None outside one.
    """

    inside: Callable[[], Place | None]

    def begin(self) -> None:
        """Begin the step."""

    def end(self, step: int) -> KernelsRecord:
        """End the step, and return the journal's record of its kernels."""

    def capture_begins(self) -> None:
        """Begin the capture of a CUDA graph."""

    def capture_ended(self) -> None:
        """End the capture."""

    def operation(self, op: int, operation: str, place: Place) -> int:
        """Begin an operation in this thread at a place. Returns a tag for it."""

    def done(self, tag: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """End the operation with that tag."""

    def moved(self, place: Place, graph: tuple[int, str] | None = None) -> None:
        """Move this thread to another place. ``graph`` is a compiled graph that begins, or (-1, "") if one ended."""

    def collective(self, sequence: int, op: int, operation: str, place: Place) -> AbstractContextManager[None]:
        """The context for a collective, on its stream."""


@contextmanager
def captures(begins: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """Call ``begins`` before a CUDA graph is captured and ``ended`` after it, even if the capture fails.

    Raises:
        RecordingError: This version of torch captures in another way.
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
