"""The rows and records of the journal: what the rank writes, and the reader gets back."""

from __future__ import annotations

from typing import NamedTuple


class CallRow(NamedTuple):
    """One call on a process group.

    Attributes:
        sequence: Number of the call, from 0.
        operation: all_reduce, all_gather_into_tensor, ...
        group: Number of its group.
        bytes_in: Bytes that this rank sends.
        bytes_out: Bytes that this rank receives.
        dtype: Type of the first tensor; empty without tensors.
        is_async: Whether the call returns before it is done.
        stream: The stream that calls it; 0 on the host.
        op: Number of the next operation.
        scope: Number of its scope.
        peer: The peer's group rank; -1 for collectives.
    """

    sequence: int
    operation: str
    group: int
    bytes_in: int
    bytes_out: int
    dtype: str
    is_async: bool
    stream: int
    op: int
    scope: int
    peer: int
