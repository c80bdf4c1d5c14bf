"""The ledger of calls on process groups: one row for each call that the rank makes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from fakedist.frames import running_script
from fakedist.rundir.encoding import Record
from fakedist.rundir.records import (
    BoundRecord,
    CallLinesRecord,
    CallsRecord,
    CallTermsRecord,
    CallWaitsRecord,
    GroupsRecord,
    OtherGroupsRecord,
)
from fakedist.rundir.rows import NO_TERMS, CallRow, CallTerms, CallWait, GroupRow, OtherGroupRow

_BATCH = 4096
_names: dict[torch.dtype, str] = {}


class Ledger:
    """Records each call cheaply: as a tuple at once, in the journal in batches.

    Args:
        where: Returns the number of the next operation and the scope.
        mark: Called with (address, bytes) of each block of device memory that a call uses.
        gathered: Called with (this rank's part, the whole, this rank's position) for each all_gather of device memory
            into one tensor.

    Attributes:
        on_call: Called with the number of each recorded call, before it runs.
        around: While a step is timed, returns the context for a call on a device, given (sequence number, operation).
    """

    def __init__(
        self,
        append: Callable[[Record], None],
        where: Callable[[], tuple[int, int]],
        mark: Callable[[int, int], None],
        gathered: Callable[[torch.Tensor, torch.Tensor, int], None],
    ) -> None:
        self._append = append
        self._where = where
        self._mark = mark
        self._gathered = gathered
        self._lock = threading.RLock()
        self._group_ranks: list[int] = []
        self._rows: list[CallRow] = []
        self._terms: list[CallTerms] = []
        self._waits: list[CallWait] = []
        self._others: list[OtherGroupRow] = []
        self._lines: dict[tuple[tuple[str, int, str], ...], int] = {}
        self.is_on = True
        self.on_call: Callable[[int], None] | None = None
        self.around: Callable[[int, str], AbstractContextManager[None]] | None = None
        self._sequence = 0

    def add_group(self, name: str, description: str, ranks: Sequence[int], group_rank: int, backend: str) -> int:
        """Record a process group and return its number.

        ``description`` comes from the code that made the group, ``backend`` from the script. ``ranks`` are global;
        ``group_rank`` is this rank's position.
        """
        number = len(self._group_ranks)
        self._group_ranks.append(group_rank)
        listed, step = _compact(ranks)
        row = GroupRow(number, name, description, listed, step, group_rank, backend)
        self._append(GroupsRecord([row]))
        return number

    def add_other_group(self, description: str, ranks: Sequence[int]) -> None:
        """Record a process group that this rank is not in. Large jobs have tens of thousands."""
        self._others.append(OtherGroupRow(len(self._group_ranks), description, *_compact(ranks)))

    def bind(self, group: int) -> None:
        """Record that a group is bound to its device: its NCCL communicator is created at once, not by a first call."""
        self._append(BoundRecord(group))

    def write(
        self,
        operation: str,
        group: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        is_async: bool = False,
        peer: int = -1,
        exchanged: tuple[int, int] = (0, 0),
        moved: tuple[int, int] | None = None,
        terms: CallTerms = NO_TERMS,
    ) -> int:
        """Record one call, such as all_reduce, with the tensors that this rank sends and receives.

        ``peer`` is a group rank, -1 for collectives; ``exchanged`` the bytes of an all_to_all to or from other ranks:
        the largest part, and all parts; ``moved`` the bytes in and out of a call on device memory without tensors;
        ``terms`` what its ranks have to agree on. Returns its number; -1 if it is not recorded.
        """
        if not self.is_on:
            return -1
        op, scope = self._where()
        some = inputs or outputs
        dtype, stream = "", 0
        if some:
            first = some[0]
            dtype = _names.get(first.dtype) or _names.setdefault(first.dtype, str(first.dtype)[6:])
            if first.is_cuda:
                stream = torch._C._cuda_getCurrentRawStream(first.device.index)
                self._mark_all(inputs)
                if outputs is not inputs:
                    self._mark_all(outputs)
                if operation.startswith("all_gather_into_tensor"):
                    for mine, whole in zip(inputs, outputs, strict=True):
                        self._gathered(mine, whole, self._group_ranks[group])
        bytes_in = inputs[0].nbytes if len(inputs) == 1 else _bytes(inputs)
        bytes_out = bytes_in if outputs is inputs else _bytes(outputs)
        sizes = (bytes_in, bytes_out, dtype)
        if moved is not None:
            sizes, stream = (*moved, dtype), torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        on_host = bool(some) and not some[0].is_cuda
        with self._lock:
            sequence, self._sequence = self._sequence, self._sequence + 1
            self._rows.append(
                CallRow(sequence, operation, group, *sizes, is_async, stream, op, scope, peer, *exchanged)
            )
            self._terms.append(CallTerms(*terms[:6], on_host, self._script_lines(), *terms[8:]))
            if self.on_call is not None:
                self.on_call(sequence)
            if len(self._rows) >= _BATCH:
                self.flush()
        return sequence

    def awaited(self, calls: Sequence[int], device: torch.device | None) -> None:
        """Record that the current stream of a device waits for calls, or the host without a device."""
        if self.is_on:
            stream = 0 if device is None else torch._C._cuda_getCurrentRawStream(device.index)
            self._waits += [CallWait(call, self._sequence, stream) for call in calls]

    def _script_lines(self) -> int:
        """The number of the script's running lines, which are recorded when they are new; -1 without one."""
        running = tuple(running_script(sys._getframe(2)))
        if running and running not in self._lines:
            self._lines[running] = len(self._lines)
            self._append(CallLinesRecord([f"{filename}:{line} ({name})" for filename, line, name in running]))
        return self._lines.get(running, -1)

    def timed(self, operation: str) -> AbstractContextManager[None] | None:
        """The context in which the call that was just recorded runs on its device. None while no step is timed."""
        return None if self.around is None else self.around(self._sequence - 1, operation)

    def _mark_all(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._mark(tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size(), tensor.nbytes)

    def flush(self) -> None:
        """Move the recorded calls to the journal."""
        with self._lock:
            rows, self._rows = self._rows, []
            terms, self._terms = self._terms, []
            if rows:
                self._append(CallsRecord(rows))
                self._append(CallTermsRecord(terms))
        if self._waits:
            waits, self._waits = self._waits, []
            self._append(CallWaitsRecord(waits))
        if self._others:
            others, self._others = self._others, []
            self._append(OtherGroupsRecord(others))


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors])


def _compact(ranks: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Ranks as a tuple and 0; (start, stop) and their step if they are many and evenly spaced."""
    if len(ranks) > 8 and (step := ranks[1] - ranks[0]):
        spaced = range(ranks[0], ranks[0] + step * len(ranks), step)
        if spaced == ranks or list(spaced) == list(ranks):
            return (spaced.start, spaced.stop), step
    return tuple(ranks), 0
