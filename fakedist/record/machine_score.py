"""A score of the machine that records: what it takes for what a host does, measured in the rank's run.

The job ran elsewhere: its hosts' times are scaled by the published time of the same operation there
(:mod:`fakedist.cost_model.hosts`). So the operation is one that was published, a forward of torch's ``Linear``, in the
rank's own process, with its Python and torch. CUDA's own calls take nothing on the virtual GPU.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import empty, nn
from torch.nn.functional import linear as apply_linear

from fakedist.rundir.launch_records import MachineScoreRecord

_Measured = TypeVar("_Measured")
#: Repeats of each operation, and how often a repeat runs it: 20 us of Python and torch at most, so some 30 ms in all.
_REPEATS = 15
#: Repeats around a bare step, and how often each runs the operation: 5 to 10 ms. Short ones find a moment in which
#: nothing disturbs the core.
_SHORT_REPEATS, _FEW_FORWARDS = 20, 25
_FORWARDS, _ADDITIONS, _CALLS = 100, 100, 2000
_ROWS, _WIDTH = 8, 64
#: Free memory from which on the script has room for what a score takes: a small segment, and cuBLAS's workspace, which
#: stays.
ROOM_BYTES = 1 << 30


def machine_score() -> MachineScoreRecord:
    """Measure this machine: CPU time of this thread, the least of the repeats, so that a busy machine seems no slower.

    Call it when nothing is recorded any more, and no hook of fakedist's is left in torch. It draws no random number.
    """
    return _in_own_segment(_score)


def linear_us() -> float:
    """``linear_us`` of :func:`machine_score` alone, in a third of the time."""
    return _in_own_segment(lambda: min(_forward_times_us(*_linear(), _FEW_FORWARDS, _SHORT_REPEATS)))


def _score() -> MachineScoreRecord:
    linear, x = _linear()
    forward = _forward_times_us(linear, x, _FORWARDS, _REPEATS)
    addition = _times_us(lambda: x + x, _ADDITIONS, _REPEATS)
    call = _times_us(_through_another, _CALLS, _REPEATS)
    least = min(forward)
    return MachineScoreRecord(least, min(addition), min(call), statistics.median(forward) / least - 1)


def _forward_times_us(linear: nn.Module, x: torch.Tensor, number: int, repeats: int) -> list[float]:
    return _times_us(lambda: linear(x), number, repeats)


class _Linear(nn.Module):
    """Torch's ``Linear`` as it was before the script ran, which may replace its function: DeepSpeed ZeRO-3 does."""

    __call__ = nn.Module.__call__

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(empty(_WIDTH, _WIDTH, device=device, dtype=torch.float32))
        self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return apply_linear(x, self.weight, self.bias)


def _linear() -> tuple[nn.Module, torch.Tensor]:
    return _Linear("cuda"), empty(_ROWS, _WIDTH, device="cuda", dtype=torch.float32)


def _in_own_segment(measure: Callable[[], _Measured]) -> _Measured:
    """Call ``measure`` with a segment of its own for its tensors.

    In one that holds known values, the virtual GPU takes up to 30 us for a launch, to find out what that makes unknown.
    The segment goes with the pool, after the tensors.
    """
    pool = torch.cuda.MemPool()
    with _as_in_training(), torch.cuda.use_mem_pool(pool):
        return measure()


@contextmanager
def _as_in_training() -> Iterator[None]:
    """Switch on what a training step has, whatever the script left: autograd without autocast, no collections."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.enable_grad(), torch.autocast("cuda", enabled=False), torch._C.DisableTorchFunction():
            yield
    finally:
        if was_enabled:
            gc.enable()


def _times_us(operation: Callable[[], object], number: int, repeats: int) -> list[float]:
    """The time of one operation in each of the repeats."""
    operation()
    times = []
    for _ in range(repeats):
        begin = time.thread_time_ns()
        for _ in range(number):
            operation()
        times.append((time.thread_time_ns() - begin) / number / 1e3)
    return times


def _ten(*_: object) -> None:
    """Take ten arguments."""


def _through_another(*arguments: object) -> None:
    _ten(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, *arguments)
