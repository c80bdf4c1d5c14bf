"""Follows captures and replays of CUDA graphs: the one patch of ``torch.cuda.CUDAGraph``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from fakedist.patch import patched


class GraphObserver:
    """Follows CUDA graphs while it is in :func:`watched_graphs`. By itself it does nothing."""

    def capture_begins(self) -> None:
        """A capture is about to begin."""

    def capture_ended(self, graph: torch.cuda.CUDAGraph) -> None:
        """A capture has ended, or failed."""

    def replay_begins(self, graph: torch.cuda.CUDAGraph) -> None:
        """A graph is about to be replayed."""

    def replayed(self, graph: torch.cuda.CUDAGraph) -> None:
        """A graph was replayed."""


_observers: list[GraphObserver] = []
_patches = ExitStack()


@contextmanager
def watched_graphs(*observers: GraphObserver) -> Iterator[None]:
    """Have observers follow captures and replays. A later observer sees a beginning first and an end last.

    Raises:
        RecordingError: This version of torch captures in another way.
    """
    if not _observers:
        _patches.enter_context(_patched_graphs())
    _observers.extend(observers)
    try:
        yield
    finally:
        for observer in observers:
            _observers.remove(observer)
        if not _observers:
            _patches.close()


@contextmanager
def _patched_graphs() -> Iterator[None]:
    def begin(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> object:
        for observer in reversed(_observers):
            observer.capture_begins()
        try:
            return original_begin(graph, *args, **kwargs)
        except BaseException:
            _ended(graph)
            raise

    def end(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> object:
        try:
            return original_end(graph, *args, **kwargs)
        finally:
            _ended(graph)

    def replay(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> object:
        for observer in reversed(_observers):
            observer.replay_begins(graph)
        result = original_replay(graph, *args, **kwargs)
        for observer in _observers:
            observer.replayed(graph)
        return result

    graphs = torch.cuda.CUDAGraph
    with (
        patched(graphs, "capture_begin", begin) as original_begin,
        patched(graphs, "capture_end", end) as original_end,
        patched(graphs, "replay", replay) as original_replay,
    ):
        yield


def _ended(graph: torch.cuda.CUDAGraph) -> None:
    for observer in _observers:
        observer.capture_ended(graph)
