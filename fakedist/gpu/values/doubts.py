"""Tracks which small tensors hold made-up values, or values computed from them.

A value is made up when an operation first needs it. It stays in the tensor's memory from then on, so comparisons,
reductions and reads all see the same value. It is counted when the script reads it, or reads a value computed from it.
"""

from __future__ import annotations

import torch
from torch import ones, zeros

from fakedist.gpu.values.contents import Storages, Watch, covers, elements
from fakedist.gpu.values.scans import any_true
from fakedist.gpu.values.storage import storage_of


class Doubt:
    """One origin of made-up values.

    Args:
        parents: The doubts of the values that an operation read.
    """

    __slots__ = ("_parents", "teller")

    def __init__(self, parents: tuple[Doubt, ...] = ()) -> None:
        told = bool(parents) and all(parent.teller for parent in parents)
        #: The storage that the script read first; 0 if it has read none, -1 if the parents' values were read before.
        self.teller: int = -1 if told else 0
        self._parents: tuple[Doubt, ...] = () if told else parents

    def tell(self, teller: int) -> None:
        """Record that the script has read values of this origin from a storage."""
        waiting = [self]
        while waiting:
            doubt = waiting.pop()
            if not doubt.teller:
                doubt.teller = teller
                waiting.extend(doubt._parents)
                doubt._parents = ()


class _DoubtedBytes:
    """One storage: its doubt, and one flag per byte. ``flags`` None: all doubtful. ``counted``: of all, or of none."""

    __slots__ = ("counted", "doubt", "flags")

    def __init__(self, doubt: Doubt, flags: torch.Tensor | None) -> None:
        self.doubt = doubt
        self.flags = flags
        self.counted: torch.Tensor | bool = False


class Doubts:
    """Remembers doubts by storage.

    Args:
        watch: Follows those storages.
    """

    def __init__(self, watch: Watch) -> None:
        self._records: Storages[_DoubtedBytes] = Storages(watch)

    def __len__(self) -> int:
        return len(self._records)

    def of(self, tensor: torch.Tensor) -> Doubt | None:
        """The doubt of a tensor's values; None if all of them were really computed."""
        if not len(self._records):
            return None
        record = self._records.get(tensor)
        if record is None or (record.flags is not None and not any_true(elements(record.flags, tensor))):
            return None
        return record.doubt

    def mark(self, tensor: torch.Tensor, doubt: Doubt, where: torch.Tensor | None = None) -> None:
        """Give this doubt to a tensor's values, or to those where a mask is true."""
        num_bytes = storage_of(tensor)[1]
        if where is None and covers(tensor, num_bytes):
            self._records.put(tensor, _DoubtedBytes(doubt, None))
            return
        record = self._records.get(tensor)
        if record is None:
            record = _DoubtedBytes(doubt, zeros(num_bytes, dtype=torch.uint8))
            self._records.put(tensor, record)
        elif record.doubt is not doubt:
            record.doubt = Doubt((record.doubt, doubt))
        if record.counted is True:
            record.counted = ones(num_bytes, dtype=torch.uint8)
        for flags, value in ((record.flags, 1), (record.counted, 0)):
            if isinstance(flags, torch.Tensor):
                places = elements(flags, tensor)
                places[... if where is None else where] = value

    def clear(self, tensor: torch.Tensor) -> None:
        """Remove the doubt: a tensor's memory now holds really computed values, or none at all."""
        if not len(self._records):
            return
        record = self._records.get(tensor)
        if record is None:
            return
        num_bytes = storage_of(tensor)[1]
        if covers(tensor, num_bytes):
            self._records.drop(tensor)
            return
        if record.flags is None:
            record.flags = ones(num_bytes, dtype=torch.uint8)
        elements(record.flags, tensor).zero_()

    def read(self, tensor: torch.Tensor) -> int:
        """The script reads a tensor. Return how many of its values are made up and were not counted before."""
        if self.of(tensor) is None:
            return 0
        record = self._records.get(tensor)
        assert record is not None
        key, num_bytes = storage_of(tensor)
        if record.doubt.teller not in (0, key) or record.counted is True:
            return 0
        if record.counted is False and record.flags is None and covers(tensor, num_bytes):
            record.counted = True
            record.doubt.tell(key)
            return tensor.numel()
        if record.counted is False:
            record.counted = zeros(num_bytes, dtype=torch.uint8)
        counted = elements(record.counted, tensor)
        fresh = counted[..., 0] == 0
        if record.flags is not None:
            fresh &= elements(record.flags, tensor)[..., 0] != 0
        counted.fill_(1)
        record.doubt.tell(key)
        return int(fresh.count_nonzero())
