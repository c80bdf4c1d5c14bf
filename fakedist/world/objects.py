"""Object collectives: Python objects from ranks that do not exist.

They are Python in ``torch.distributed``, built on sizes that another rank would have sent, so they are answered here as
a whole. Where this rank is the source, or everybody's object is asked for, the answer follows from "every rank is like
me". From another rank alone, an object that this rank passed itself stands in for it; where there is none, nothing can.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fakedist.errors import WorldError
from fakedist.patch import patched

_NAMES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)


@contextmanager
def faked_objects(write: Callable[[str, Any, int], None]) -> Iterator[None]:
    """Answer the object collectives of ``torch.distributed``.

    Args:
        write: Told (operation, group, pickled bytes) of each call.

    Raises:
        RecordingError: This torch lacks one of them.
    """
    answers = _Answers(write)
    with ExitStack() as stack:
        for name in _NAMES:
            for owner in (c10d, dist):
                stack.enter_context(patched(owner, name, getattr(answers, name)))
        yield


class _Answers:
    """One method for each object collective, with torch's own signature."""

    def __init__(self, write: Callable[[str, Any, int], None]) -> None:
        self._write = write

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None, **_: Any) -> None:
        """Mine in every slot."""
        if c10d._rank_not_in_group(group):
            return
        pickled = pickle.dumps(obj)
        self._write("all_gather_object", group, len(pickled))
        object_list[:] = [pickle.loads(pickled) for _ in range(dist.get_world_size(group))]

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
        **_: Any,
    ) -> None:
        """Mine in every slot, where this rank is the destination."""
        if c10d._rank_not_in_group(group):
            return
        pickled = pickle.dumps(obj)
        self._write("gather_object", group, len(pickled))
        if object_gather_list is not None and _is_me(dst, group, group_dst):
            object_gather_list[:] = [pickle.loads(pickled) for _ in range(dist.get_world_size(group))]

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        **_: Any,
    ) -> None:
        """The list as it is: mine, or one that this rank filled itself."""
        if c10d._rank_not_in_group(group):
            return
        self._write("broadcast_object_list", group, 0)
        if not _is_me(src, group, group_src) and all(item is None for item in object_list):
            raise _nobody("broadcast_object_list", _source(src, group, group_src))

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
        **_: Any,
    ) -> None:
        """My part of my list, or of one that this rank passed though it is not the source."""
        if c10d._rank_not_in_group(group):
            return
        self._write("scatter_object_list", group, 0)
        if scatter_object_input_list:
            scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank(group)]
        elif scatter_object_output_list[0] is None:
            raise _nobody("scatter_object_list", _source(src, group, group_src))

    def send_object_list(self, object_list: list[Any], *args: Any, group: Any = None, **_: Any) -> None:
        """Nobody listens."""
        self._write("send_object_list", group, len(pickle.dumps(object_list)))

    def recv_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        **_: Any,
    ) -> int:
        """The list as it is, if this rank filled it itself; the source's rank."""
        self._write("recv_object_list", group, 0)
        source = None if src is group_src is None else _source(src, group, group_src)
        if all(item is None for item in object_list):
            raise _nobody("recv_object_list", source)
        return source if source is not None else 0


def _source(rank: int | None, group: Any, group_rank: int | None) -> int:
    """The rank in the job; torch's default is rank 0."""
    if group_rank is not None:
        return dist.get_global_rank(group or c10d._get_default_group(), group_rank)
    return rank or 0


def _is_me(rank: int | None, group: Any, group_rank: int | None) -> bool:
    return _source(rank, group, group_rank) == dist.get_rank()


def _nobody(call: str, source: int | None) -> WorldError:
    whom = "any rank" if source is None else f"rank {source}"
    return WorldError(
        f"{call} waits for an object from {whom}, which does not run",
        f"profile that rank instead (--rank {source or 0}), or pass an object of this rank's own to {call}",
    )
