"""Tracks which small tensors hold made-up values, or values computed from them.

A value is made up when an operation first needs it. It stays in the tensor's memory from then on, so comparisons,
reductions and reads all see the same value. It is counted when the script reads it, or reads a value computed from it.
"""

from __future__ import annotations

import torch
from torch import ones, zeros

from fakedist.gpu.values.contents import covers, elements
from fakedist.gpu.values.known import Doubt, DoubtedBytes, Storages
from fakedist.gpu.values.scans import any_true
from fakedist.gpu.values.storage import storage_address, storage_of, tell_doubt


class Doubts:
    """Remembers doubts by storage. It is false as long as there has been none.

    Args:
        storages: What is known about storages.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._were_any = False

    def __bool__(self) -> bool:
        return self._were_any

    def of(self, tensor: torch.Tensor) -> Doubt | None:
        """The doubt of a tensor's values; None if all of them were really computed."""
        doubted = self._doubted(tensor)
        return None if doubted is None else doubted.doubt

    def _doubted(self, tensor: torch.Tensor) -> DoubtedBytes | None:
        known = self._storages.get(tensor) if self._were_any else None
        doubted = None if known is None else known.doubted
        if doubted is None or (doubted.flags is not None and not any_true(elements(doubted.flags, tensor))):
            return None
        return doubted

    def mark(self, tensor: torch.Tensor, doubt: Doubt, where: torch.Tensor | None = None) -> None:
        """Give this doubt to a tensor's values, or to those where a mask is true."""
        self._were_any = True
        tell_doubt(tensor)
        num_bytes = storage_of(tensor)[1]
        known = self._storages.make(tensor)
        if where is None and covers(tensor, num_bytes):
            known.doubted = DoubtedBytes(doubt, None)
            return
        doubted = known.doubted
        if doubted is None:
            doubted = known.doubted = DoubtedBytes(doubt, zeros(num_bytes, dtype=torch.uint8))
        elif doubted.doubt is not doubt:
            doubted.doubt = Doubt((doubted.doubt, doubt))
        if doubted.counted is True:
            doubted.counted = ones(num_bytes, dtype=torch.uint8)
        for flags, value in ((doubted.flags, 1), (doubted.counted, 0)):
            if isinstance(flags, torch.Tensor):
                places = elements(flags, tensor)
                places[... if where is None else where] = value

    def clear(self, tensor: torch.Tensor) -> None:
        """Remove the doubt: a tensor's memory now holds really computed values, or none at all."""
        known = self._storages.get_moved(tensor) if self._were_any else None
        if known is None or known.doubted is None:
            return
        num_bytes = storage_of(tensor)[1]
        if covers(tensor, num_bytes) or known.address != storage_address(tensor):
            known.doubted = None
            self._storages.tidy(known)
            return
        if known.doubted.flags is None:
            known.doubted.flags = ones(num_bytes, dtype=torch.uint8)
        elements(known.doubted.flags, tensor).zero_()

    def read(self, tensor: torch.Tensor) -> int:
        """The script reads a tensor. Return how many of its values are made up and were not counted before."""
        doubted = self._doubted(tensor)
        if doubted is None:
            return 0
        key, num_bytes = storage_of(tensor)
        if doubted.doubt.teller not in (0, key) or doubted.counted is True:
            return 0
        if doubted.counted is False and doubted.flags is None and covers(tensor, num_bytes):
            doubted.counted = True
            doubted.doubt.tell(key)
            return tensor.numel()
        if doubted.counted is False:
            doubted.counted = zeros(num_bytes, dtype=torch.uint8)
        counted = elements(doubted.counted, tensor)
        fresh = counted[..., 0] == 0
        if doubted.flags is not None:
            fresh &= elements(doubted.flags, tensor)[..., 0] != 0
        counted.fill_(1)
        doubted.doubt.tell(key)
        return int(fresh.count_nonzero())
