"""When CUDA begins: the script, or torch for it, initialises CUDA for the first time.

Nothing of ours may do so, because scripts and torch look whether it is initialised (``init_device_mesh`` chooses the
rank's device only if it is not). Before it, the allocator has no history that could be switched on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fakedist.patch import present

_QUEUE = "_queued_calls"


class Beginning:
    """Tells of it, once.

    Attributes:
        is_past: Whether CUDA is initialised.
    """

    def __init__(self) -> None:
        self.is_past = False
        self._told: list[Callable[[], None]] = []
        self._pid = os.getpid()

    def then(self, told: Callable[[], None]) -> None:
        """Call ``told`` when CUDA is initialised, before anything is allocated; now if it is already.

        torch turns an ``Exception`` of it into one of its own.
        """
        if self.is_past:
            told()
        else:
            self._told.append(told)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for it.

        Every way to CUDA through Python leads to ``torch.cuda._lazy_init``, which calls what was queued until then.

        Raises:
            RecordingError: This torch has no such queue.
        """
        present(torch.cuda, _QUEUE)
        present(torch.cuda, "_lazy_call")(self._begin)  # at once, if it is initialised
        try:
            yield
        finally:
            self._told.clear()
            queue = present(torch.cuda, _QUEUE)
            queue[:] = [call for call in queue if call[0] != self._begin]

    def before(self, kwargs: dict[str, Any]) -> None:
        """An operation with these keywords is about to run.

        Where C++ or ``torch.ops`` asks for a tensor on a device, torch initialises CUDA without telling ``torch.cuda``,
        whose ``is_initialized()`` stays False; so it does here.
        """
        device = kwargs.get("device")
        if not self.is_past and device is not None and torch.device(device).type == "cuda":
            torch.ops.aten.empty.memory_format([0], device=device)
            self._begin()

    def _begin(self) -> None:
        if self.is_past or os.getpid() != self._pid:  # a forked process must not touch CUDA
            return
        self.is_past = True
        told, self._told = self._told, []
        for each in told:
            each()
