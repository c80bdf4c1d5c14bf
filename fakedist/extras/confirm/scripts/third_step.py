"""One job of the accuracy set without fakedist: how long the kernels of its third step take, by torch.profiler.

The times of the same step by ``fakedist profile`` are next to it in docs/accuracy/results.md. On the virtual GPU, which
stands in in a rehearsal, kernels take the simulated time that its CUPTI tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.optim.optimizer import register_optimizer_step_post_hook

from fakedist.extras.confirm.scripts.one_job import compute_what_is_read
from fakedist.extras.confirm.scripts.start import Measuring
from fakedist.record.cupti import _NO_WORK

#: The step that is looked at: the first warms up, the second too.
STEP = 3


class ThirdStep:
    """Sees optimizers step; has torch.profiler watch from the end of the second step to that of the third.

    Args:
        profiler: torch.profiler's, not begun.

    Attributes:
        is_over: Whether the step was there.
    """

    def __init__(self, profiler: Any) -> None:
        self.is_over = False
        self._profiler = profiler
        self._optimizer: Any = None
        self._ended = 0

    def __call__(self, optimizer: Any, args: object, kwargs: object) -> None:
        """An optimizer has stepped."""
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        self._ended += 1
        if self._ended == STEP - 1:
            torch.cuda.synchronize()
            self._profiler.start()
        elif self._ended == STEP:
            torch.cuda.synchronize()
            self._profiler.stop()
            self.is_over = True


def kernels_us(events: Iterable[Any]) -> float:
    """Durations of everything that ran on the device, added up; what ``fakedist profile`` leaves out is left out here.

    Args:
        events: ``_KinetoEvent``s of torch, or what has their methods.
    """
    return sum(
        float(event.duration_ns()) / 1e3
        for event in events
        if event.device_type() != DeviceType.CPU and not event.is_user_annotation() and not _NO_WORK.match(event.name())
    )


def measure(measuring: Measuring) -> None:
    """Run the job until its third step."""
    assert measuring.job is not None
    if measuring.gpu is not None:
        compute_what_is_read()
    profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
    third = ThirdStep(profiler)
    register_optimizer_step_post_hook(third)
    measuring.job.run()
    if not third.is_over:
        raise SystemExit(f"{measuring.job.name} has no step {STEP}")
    measuring.write({"kernels_us": kernels_us(profiler.profiler.kineto_results.events())})
