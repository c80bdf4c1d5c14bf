"""DistributedDataParallel's buckets of gradients, which its C++ builds anew once it has seen the gradients' order.

It does so at the beginning of the second step, but with a static graph at that of the third (``Reducer::
should_rebuild_buckets``). Until then all gradients are in one bucket, so no all-reduce overlaps the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch._C._distributed_c10d import Reducer
from torch.nn.parallel import DistributedDataParallel

from fakedist.patch import patched

#: The step in which a model with a static graph has its last buckets.
FIRST_WITH_LAST_BUCKETS = 3


class StaticGraphs:
    """Knows whether any living model was given a static graph."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[DistributedDataParallel]] = []

    def __bool__(self) -> bool:
        """Return whether there is one."""
        return any(model() is not None for model in self._models)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take note of the models. RecordingError if this torch sets static graphs in another way."""

        def set_static_graph(model: DistributedDataParallel) -> None:
            self._models.append(weakref.ref(model))
            original(model)

        with patched(DistributedDataParallel, "_set_static_graph", set_static_graph) as original:
            yield


@contextmanager
def new_buckets_within(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Have DDP ask for new buckets, in each forward, within a context. RecordingError if this torch does not ask."""

    def rebuild_buckets(reducer: Reducer) -> object:
        with context():
            return original(reducer)

    with patched(Reducer, "_rebuild_buckets", rebuild_buckets) as original:
        yield
