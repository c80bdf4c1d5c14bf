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
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import empty, nn
from torch.nn.functional import linear as apply_linear

from fakedist.patch import patched
from fakedist.rundir.launch_records import MachineScoreRecord

_Measured = TypeVar("_Measured")
#: How long this thread's core takes for a fixed piece of work now, in us (driver/pace.c).
PaceUs = Callable[[], float]
#: Repeats of each operation, and how often a repeat runs it: 250 us of Python and torch, between two looks at the pace.
_REPEATS, _SHORT_REPEATS = 40, 20
_FORWARDS, _ADDITIONS, _CALLS = 25, 100, 2000
_ROWS, _WIDTH = 8, 64
#: Free memory from which on the script has room for what a score takes: a small segment, and cuBLAS's workspace, which
#: stays.
ROOM_BYTES = 1 << 30


def machine_score(pace_us: PaceUs) -> MachineScoreRecord:
    """Measure this machine in a calm moment: CPU time of this thread, as if the core's pace had been the best one.

    Call it when nothing is recorded any more, and no hook of fakedist's is left in torch. It draws no random number.
    """
    return _in_own_segment(lambda: _score(pace_us))


def linear_over_pace(pace_us: PaceUs) -> float:
    """``linear_us`` of :func:`machine_score` alone, over the pace meanwhile, in 10 ms."""
    return _in_own_segment(lambda: statistics.median(_forwards(pace_us, _SHORT_REPEATS)))


def _score(pace_us: PaceUs) -> MachineScoreRecord:
    paces_us = list[float]()

    def kept_us() -> float:
        paces_us.append(pace_us())
        return paces_us[-1]

    _, x = _linear()
    forward = _forwards(kept_us, _REPEATS)
    addition = statistics.median(_over_pace(lambda: x + x, _ADDITIONS, _REPEATS, kept_us))
    call = statistics.median(_over_pace(_through_another, _CALLS, _REPEATS, kept_us))
    least_us, usual = min(paces_us), statistics.median(forward)
    spread = usual / min(forward) - 1
    return MachineScoreRecord(usual * least_us, addition * least_us, call * least_us, spread, least_us)


def _forwards(pace_us: PaceUs, repeats: int) -> list[float]:
    linear, x = _linear()
    return _over_pace(lambda: linear(x), _FORWARDS, repeats, pace_us)


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


#: Hooks for all modules, which the published forward did not have.
_GLOBAL_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


@contextmanager
def _as_in_training() -> Iterator[None]:
    """Switch on what a training step has, whatever the script left: autograd without autocast, no collections."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with (
            torch.enable_grad(),
            torch.autocast("cuda", enabled=False),
            torch._C.DisableTorchFunction(),
            ExitStack() as stack,
        ):
            for name in _GLOBAL_HOOKS:
                stack.enter_context(patched(nn.modules.module, f"_global_{name}", {}))
            yield
    finally:
        if was_enabled:
            gc.enable()


def _over_pace(operation: Callable[[], object], number: int, repeats: int, pace_us: PaceUs) -> list[float]:
    """The time of one operation in each of the repeats, over the mean of the paces before and after it."""
    operation()
    times = []
    before_us = pace_us()
    for _ in range(repeats):
        begin = time.thread_time_ns()
        for _ in range(number):
            operation()
        took_us = (time.thread_time_ns() - begin) / number / 1e3
        after_us = pace_us()
        times.append(2 * took_us / (before_us + after_us))
        before_us = after_us
    return times


def _ten(*_: object) -> None:
    """Take ten arguments."""


def _through_another(*arguments: object) -> None:
    _ten(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, *arguments)
