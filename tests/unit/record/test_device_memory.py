"""Memory of a real GPU outside the caching allocator. Without a GPU: CUDA's two answers are given by hand."""

from __future__ import annotations

import pytest
import torch

from fakedist.record.device_memory import nccl_record, outside_record
from fakedist.rundir.records import OutsideRecord


def test_used_and_reserved_bytes_of_the_device_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 100) if device == 1 else (0, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 if device == 1 else 0)
    assert outside_record(1) == OutsideRecord(1, used_bytes=30, reserved_bytes=10)


def test_a_device_that_answers_nothing_any_more_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(device: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", failed)
    assert outside_record(0) is None


def test_the_environment_is_the_one_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "8")
    record = nccl_record()
    assert record.environment["NCCL_MAX_NCHANNELS"] == "8"
    assert record.version.split(".")[0] == "2"
