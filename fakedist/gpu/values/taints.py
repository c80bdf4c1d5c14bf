"""Tracks which small tensors hold made-up values, or values computed from them.

A value is made up when an operation first needs it. It stays in the tensor's memory from then on, so comparisons,
reductions and reads all see the same value. It is counted when the script reads it, or reads a value computed from it.
"""

from __future__ import annotations

import torch
from torch import ones, zeros

from fakedist.gpu.values.contents import covers, elements
from fakedist.gpu.values.known import Storages, Taint, TaintedBytes
from fakedist.gpu.values.scans import any_true
from fakedist.gpu.values.storage import storage_address, storage_of, tell_taint


class Taints:
    """Remembers taints by storage. It is false as long as there has been none.

    Args:
        storages: What is known about storages.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._were_any = False

    def __bool__(self) -> bool:
        return self._were_any

    def of(self, tensor: torch.Tensor) -> Taint | None:
        """The taint of a tensor's values; None if all of them were really computed."""
        tainted = self._tainted(tensor)
        return None if tainted is None else tainted.taint

    def _tainted(self, tensor: torch.Tensor) -> TaintedBytes | None:
        known = self._storages.get(tensor) if self._were_any else None
        tainted = None if known is None else known.tainted
        if tainted is None or (tainted.flags is not None and not any_true(elements(tainted.flags, tensor))):
            return None
        return tainted

    def mark(self, tensor: torch.Tensor, taint: Taint, where: torch.Tensor | None = None) -> None:
        """Give this taint to a tensor's values, or to those where a mask is true."""
        self._were_any = True
        tell_taint(tensor)
        num_bytes = storage_of(tensor)[1]
        known = self._storages.make(tensor)
        if where is None and covers(tensor, num_bytes):
            known.tainted = TaintedBytes(taint, None)
            return
        tainted = known.tainted
        if tainted is None:
            tainted = known.tainted = TaintedBytes(taint, zeros(num_bytes, dtype=torch.uint8))
        elif tainted.taint is not taint:
            tainted.taint = Taint((tainted.taint, taint))
        if tainted.counted is True:
            tainted.counted = ones(num_bytes, dtype=torch.uint8)
        for flags, value in ((tainted.flags, 1), (tainted.counted, 0)):
            if isinstance(flags, torch.Tensor):
                places = elements(flags, tensor)
                places[... if where is None else where] = value

    def clear(self, tensor: torch.Tensor) -> None:
        """Remove the taint: a tensor's memory now holds really computed values, or none at all."""
        known = self._storages.get_moved(tensor) if self._were_any else None
        if known is None or known.tainted is None:
            return
        num_bytes = storage_of(tensor)[1]
        if covers(tensor, num_bytes) or known.address != storage_address(tensor):
            known.tainted = None
            self._storages.tidy(known)
            return
        if known.tainted.flags is None:
            known.tainted.flags = ones(num_bytes, dtype=torch.uint8)
        elements(known.tainted.flags, tensor).zero_()

    def read(self, tensor: torch.Tensor) -> int:
        """The script reads a tensor. Return how many of its values are made up and were not counted before."""
        tainted = self._tainted(tensor)
        if tainted is None:
            return 0
        key, num_bytes = storage_of(tensor)
        if tainted.taint.teller not in (0, key) or tainted.counted is True:
            return 0
        if tainted.counted is False and tainted.flags is None and covers(tensor, num_bytes):
            tainted.counted = True
            tainted.taint.tell(key)
            return tensor.numel()
        if tainted.counted is False:
            tainted.counted = zeros(num_bytes, dtype=torch.uint8)
        counted = elements(tainted.counted, tensor)
        fresh = counted[..., 0] == 0
        if tainted.flags is not None:
            fresh &= elements(tainted.flags, tensor)[..., 0] != 0
        counted.fill_(1)
        tainted.taint.tell(key)
        return int(fresh.count_nonzero())
