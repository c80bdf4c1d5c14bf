"""Tensors on the host that say they are on a device, and torch's CUDA side where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fakedist.frames import OURS

_POOLS = ("all", "large_pool", "small_pool")


class OnDevice(torch.Tensor):
    """A tensor on the host that says it is on a device."""

    is_cuda = True


def on_device(*shape: int) -> torch.Tensor:
    """Zeros, 4 bytes each."""
    return torch.zeros(*shape).as_subclass(OnDevice)


def all_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, every tensor says that it is on a device."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))


class MadeUpCuda:
    """CUDA is initialised; every tensor says that it is on device 0.

    ``trace`` is the allocator's history, which the recording reads and begins anew; ``numbers`` are those given to its
    events, ``stats`` the allocator's statistics, ``fail`` what torch calls when a request fails.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trace: list[dict[str, object]] = []
        self.numbers: list[int] = []
        self.stats: dict[str, Any] = {
            f"{name}_bytes": {
                pool: {"current": 1 << 20, "peak": 2 << 20} for pool in ("all", "large_pool", "small_pool")
            }
            for name in ("allocated", "requested", "reserved")
        }
        self.stats["num_ooms"] = 3
        self.fail: Callable[[int, int, int, int], None] = lambda *numbers: None
        all_on_device(monkeypatch)
        functions: dict[str, Callable[..., object]] = {
            "_cuda_memorySnapshot": lambda mempool: {"device_traces": [self.trace], "segments": []},
            "_cuda_setMemoryMetadata": lambda number: self.numbers.append(int(number)),
            "_cuda_attach_out_of_memory_observer": lambda observer: setattr(self, "fail", observer),
            "_cuda_memoryStats": lambda device: self.stats,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch._C, name, function, raising=False)
        for name, answer in (("is_initialized", True), ("current_device", 0), ("device_count", 1)):
            monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
        monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._history)

    def _history(self, **options: Any) -> None:
        self.trace = []

    def alloc(self, action: str, address: int, size: int, op: int) -> None:
        """Add an event to the history."""
        frames = [{"filename": f"{OURS}record/dispatch.py", "line": 1, "name": "run"}]
        frames.append({"filename": "train.py", "line": 7, "name": "main"})
        event = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 5, "user_metadata": str(op)}
        self.trace.append(event | {"frames": frames})
