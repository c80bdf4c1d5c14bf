"""What the faked world asks of a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Tensors = Sequence[torch.Tensor]


class LedgerLike(Protocol):
    """Where calls are written down."""

    def add_group(self, name: str, description: str, ranks: Sequence[int], group_rank: int, backend: str) -> int:
        """Write down a group; returns its number."""

    def write(
        self, operation: str, group: int, inputs: Tensors, outputs: Tensors, call: tuple[bool, int] = (False, -1)
    ) -> None:
        """Write down a call."""


class NullLedger:
    """Writes nothing: for a faked world without a recorder."""

    def add_group(self, name: str, description: str, ranks: Sequence[int], group_rank: int, backend: str) -> int:
        """Nothing to write."""
        return 0

    def write(
        self, operation: str, group: int, inputs: Tensors, outputs: Tensors, call: tuple[bool, int] = (False, -1)
    ) -> None:
        """Nothing to write."""
