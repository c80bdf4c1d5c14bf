"""A job without fakedist: which step is watched, and which of the profiler's events are work of the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch.autograd import DeviceType

from fakedist.extras.confirm.scripts.measures import ThirdStep, kernels_us


@dataclass
class Event:
    """Has the methods of torch's events that are called."""

    text: str
    ns: int
    device: Any = DeviceType.CUDA
    annotation: bool = False

    def name(self) -> str:
        return self.text

    def duration_ns(self) -> int:
        return self.ns

    def device_type(self) -> Any:
        return self.device

    def is_user_annotation(self) -> bool:
        return self.annotation


def test_only_what_the_device_did_is_added_up() -> None:
    events = [
        Event("gemm", 2_000),
        Event("Memcpy HtoD", 500),
        Event("Optimizer.step#AdamW.step", 9_000, annotation=True),
        Event("Stream Wait Event", 7_000),
        Event("cudaLaunchKernel", 3_000, DeviceType.CPU),
    ]
    assert kernels_us(events) == 2.5


def test_the_third_step_of_the_first_optimizer_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Profiler:
        calls: list[str]

        def __init__(self) -> None:
            self.calls = []

        def start(self) -> None:
            self.calls.append("start")

        def stop(self) -> None:
            self.calls.append("stop")

    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    profiler = Profiler()
    third, first, other = ThirdStep(profiler), object(), object()
    for optimizer, expected in ((first, []), (other, []), (first, ["start"]), (other, ["start"])):
        third(optimizer, (), {})
        assert profiler.calls == expected
        assert not third.is_over
    third(first, (), {})
    assert profiler.calls == ["start", "stop"]
    assert third.is_over
