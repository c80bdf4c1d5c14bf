"""Reports when the script, or torch on its behalf, first initialises CUDA.

fakedist must not initialise CUDA itself, because scripts and torch check whether it is initialised
(``init_device_mesh`` chooses the rank's device only if it is not). Until then the allocator's history cannot be
switched on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fakedist.patch import present

_QUEUE = "_queued_calls"


class Beginning:
    """Reports CUDA's initialisation, once.

    Attributes:
        is_past: Whether CUDA is initialised.
    """

    def __init__(self) -> None:
        self.is_past = False
        self._told: list[Callable[[], None]] = []
        self._pid = os.getpid()

    def then(self, told: Callable[[], None]) -> None:
        """Call ``told`` when CUDA is initialised, before anything is allocated, or now if it already is.

        Torch turns an ``Exception`` that ``told`` raises into one of its own.
        """
        if self.is_past:
            told()
        else:
            self._told.append(told)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the initialisation.

        Every path to CUDA through Python leads to ``torch.cuda._lazy_init``, which makes the calls queued until then.

        Raises:
            RecordingError: This version of torch has no such queue.
        """
        present(torch.cuda, _QUEUE)
        present(torch.cuda, "_lazy_call")(self._begin)  # immediately, if CUDA is initialised
        try:
            yield
        finally:
            self._told.clear()
            queue = present(torch.cuda, _QUEUE)
            queue[:] = [call for call in queue if call[0] != self._begin]

    def before(self, kwargs: dict[str, object]) -> None:
        """Initialise CUDA if the operation that is about to run, with these keywords, needs it.

        If C++ or ``torch.ops`` asks for a tensor on a device, torch initialises CUDA without ``torch.cuda``, whose
        ``is_initialized()`` stays False. The same happens here.
        """
        device = kwargs.get("device")
        if self.is_past or not isinstance(device, (torch.device, str, int)):
            return
        if torch.device(device).type == "cuda":
            torch.ops.aten.empty.memory_format([0], device=device)
            self._begin()

    def _begin(self) -> None:
        if self.is_past or os.getpid() != self._pid:  # a forked process must not touch CUDA
            return
        self.is_past = True
        told, self._told = self._told, []
        for each in told:
            each()
