"""The ledger's interface, as the faked world uses it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from fakedist.world.checks import Tensors


class LedgerLike(Protocol):
    """Records groups and calls."""

    def add_group(self, name: str, description: str, ranks: Sequence[int], group_rank: int, backend: str) -> int:
        """Record a group; returns its number."""

    def bind(self, group: int) -> None:
        """Record that a group is bound to its device: NCCL creates the communicator with it, not at the first call."""

    def write(
        self,
        operation: str,
        group: int,
        inputs: Tensors,
        outputs: Tensors,
        *,
        is_async: bool = False,
        peer: int = -1,
        exchanged: tuple[int, int] = (0, 0),
    ) -> None:
        """Record a call.

        Args:
            operation: all_reduce, all_gather_into_tensor, ...
            group: Number of its group.
            inputs: Tensors that this rank sends.
            outputs: Tensors that this rank receives.
            is_async: Whether the call returns before it is done.
            peer: The peer's group rank; -1 for collectives.
            exchanged: Bytes of an all_to_all to other ranks or from them: the largest part, and all parts.
        """

    def timed(self, operation: str) -> AbstractContextManager[None] | None:
        """A context that times the call just recorded, on its device; None unless a step is being timed."""


class NullLedger:
    """Records nothing: for a faked world without a recorder."""

    def add_group(self, name: str, description: str, ranks: Sequence[int], group_rank: int, backend: str) -> int:
        """Do nothing."""
        return 0

    def bind(self, group: int) -> None:
        """Do nothing."""

    def write(
        self,
        operation: str,
        group: int,
        inputs: Tensors,
        outputs: Tensors,
        *,
        is_async: bool = False,
        peer: int = -1,
        exchanged: tuple[int, int] = (0, 0),
    ) -> None:
        """Do nothing."""

    def timed(self, operation: str) -> None:
        """Return None: no step is timed."""
