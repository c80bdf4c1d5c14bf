"""Replays of CUDA graphs: each writes the values that its capture computed again.

Graphs of one pool share memory: one graph's temporaries overlap another's results, and each replay writes its own
again. No kernel does that here, so the bytes of a capture are kept when it ends and restored when it is replayed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fakedist.gpu.values.contents import Defined, host_bytes
from fakedist.patch import patched

#: A graph's memory as the host sees it, and the bytes to write there.
_Writes = list[tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def replays(defined: Defined) -> Iterator[None]:
    """Keep the values that captures define, and restore them when their graphs are replayed.

    Raises:
        RecordingError: This torch captures graphs in another way.
    """
    kept: weakref.WeakKeyDictionary[Any, _Writes] = weakref.WeakKeyDictionary()

    def begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        defined.written = {}
        return original_begin(graph, *args, **kwargs)

    def end(graph: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original_end(graph, *args, **kwargs)
        finally:
            written, defined.written = defined.written or {}, None
            places = [host_bytes(address, num_bytes) for address, num_bytes in written.items()]
            kept[graph] = [(place, place.clone()) for place in places]
            weakref.finalize(graph, _forget, defined.replayed, list(written))

    def replay(graph: Any) -> Any:
        result = original_replay(graph)
        for place, values in kept.get(graph, ()):
            place.copy_(values)
            defined.replayed[place.data_ptr()] = place.numel()
        return result

    graphs = torch.cuda.CUDAGraph
    with ExitStack() as stack:
        original_begin = stack.enter_context(patched(graphs, "capture_begin", begin))
        original_end = stack.enter_context(patched(graphs, "capture_end", end))
        original_replay = stack.enter_context(patched(graphs, "replay", replay))
        yield


def _forget(replayed: dict[int, int], addresses: list[int]) -> None:
    """A graph is gone, and its memory may be reused for anything."""
    for address in addresses:
        replayed.pop(address, None)
