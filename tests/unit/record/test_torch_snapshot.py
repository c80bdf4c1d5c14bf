"""The allocator's snapshot is taken without importing what the script has not imported."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch

from fakedist.record.device_memory import take_snapshot


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._inductor", raising=False)
    monkeypatch.delitem(torch.__dict__, "_inductor", raising=False)


@pytest.mark.usefixtures("without_inductor")
def test_inductor_is_not_imported_for_the_names_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def take(mempool: None) -> dict[str, Any]:  # as py_symbolize does
        asked.append(hasattr(torch, "_inductor") and hasattr(torch._inductor, "codecache"))
        return {"segments": []}

    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", take, raising=False)
    assert take_snapshot() == {"segments": []}
    assert asked == [False]
    assert "torch._inductor" not in sys.modules
    assert "_inductor" not in torch.__dict__


@pytest.mark.usefixtures("without_inductor")
def test_another_thread_has_inductor_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    inductor = ModuleType("torch._inductor")
    inductor.codecache = "the code cache"  # type: ignore[attr-defined]
    imported: list[object] = []

    def ask() -> None:
        imported.append(torch._inductor.codecache)

    def take(mempool: None) -> dict[str, Any]:
        monkeypatch.setitem(sys.modules, "torch._inductor", inductor)
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return {}

    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", take, raising=False)
    take_snapshot()
    assert imported == ["the code cache"]


def test_inductor_names_the_frames_of_its_code_once_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    inductor = ModuleType("torch._inductor")
    inductor.codecache = "the code cache"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._inductor", inductor)
    monkeypatch.setattr(torch, "_inductor", inductor, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda mempool: {"codecache": torch._inductor.codecache})
    assert take_snapshot() == {"codecache": "the code cache"}
