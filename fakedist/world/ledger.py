"""What the faked world asks of a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

Tensors = Sequence[torch.Tensor]


class LedgerLike(Protocol):
    """Where calls are written down."""

    def add_group(self, name: str, description: str, ranks: Sequence[int], group_rank: int, backend: str) -> int:
        """Write down a group; returns its number."""

    def bind(self, group: int) -> None:
        """Write down that a group is bound to its device: NCCL's communicator is made with it, not by a first call."""

    def write(
        self, operation: str, group: int, inputs: Tensors, outputs: Tensors, call: tuple[bool, int] = (False, -1)
    ) -> None:
        """Write down a call."""

    def timed(self, operation: str) -> AbstractContextManager[None] | None:
        """What the call that was just written runs in on its device; None while no step is timed."""


class NullLedger:
    """Writes nothing: for a faked world without a recorder."""

    def add_group(self, name: str, description: str, ranks: Sequence[int], group_rank: int, backend: str) -> int:
        """Nothing to write."""
        return 0

    def bind(self, group: int) -> None:
        """Nothing to write."""

    def write(
        self, operation: str, group: int, inputs: Tensors, outputs: Tensors, call: tuple[bool, int] = (False, -1)
    ) -> None:
        """Nothing to write."""

    def timed(self, operation: str) -> None:
        """No step is timed."""
