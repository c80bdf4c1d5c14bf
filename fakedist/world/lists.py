"""Lists of tensors as callers pass them to a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch

Tensors = Sequence[torch.Tensor]
#: A list of tensors, or lists of tensors with one list for each input.
Lists = Sequence[torch.Tensor] | Sequence[Tensors]


def listed(tensors: torch.Tensor | Tensors) -> list[torch.Tensor]:
    """A tensor or several as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def only_list(given: Lists) -> list[torch.Tensor]:
    """A call's list of tensors, which C++ callers pass as the only one of a list of lists."""
    return list(given if not given or _are_tensors(given) else given[0])


def _are_tensors(given: Lists) -> TypeGuard[Tensors]:
    return isinstance(given[0], torch.Tensor)


def is_even(tensors: Tensors) -> bool:
    """Whether ProcessGroupNCCL allocates a flat buffer for a list of device tensors (check_same_size, newLikeFlat)."""
    shape = tensors[0].shape
    return tensors[0].is_cuda and all(tensor.shape == shape for tensor in tensors)


def flat_like(tensors: Tensors) -> torch.Tensor:
    """An uninitialised flat buffer for tensors of equal shapes."""
    return tensors[0].new_empty((len(tensors), *tensors[0].shape))


class Exchanged(NamedTuple):
    """Bytes of an all_to_all to other ranks or from them, whichever direction has more.

    Attributes:
        largest_part: The largest part.
        total: All parts.
    """

    largest_part: int = 0
    total: int = 0

    def most(self, other: Exchanged) -> Exchanged:
        """The larger of each of two directions."""
        return Exchanged(max(self.largest_part, other.largest_part), max(self.total, other.total))


def exchanged(parts: Sequence[int], place: int, unit: int = 1) -> Exchanged:
    """The parts of an all_to_all in one direction, without the one that this rank keeps.

    Args:
        parts: A size for each rank.
        place: This rank's place.
        unit: Bytes of one of what the sizes count.
    """
    sizes = [int(size) * unit for other, size in enumerate(parts) if other != place]
    return Exchanged(max(sizes, default=0), sum(sizes))
