"""The moment at which CUDA begins; what torch does at that moment is imitated, because no test process has a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from fakedist.record.device_memory import Beginning
from fakedist.rundir.encoding import Record
from fakedist.rundir.outcome import Ending, Outcome


def initialise() -> None:
    """As ``torch.cuda._lazy_init`` does, of what was queued in these tests."""
    for call, _ in list(torch.cuda._queued_calls)[-1:]:
        call()


def test_what_is_wanted_happens_once_when_torch_initialises_cuda() -> None:
    cuda, called = Beginning(), []
    queued = len(torch.cuda._queued_calls)
    with cuda.watching():
        cuda.then(lambda: called.append("first"))
        assert (called, cuda.is_past) == ([], False)
        initialise()
        initialise()  # an initialisation that failed is tried again
        assert (called, cuda.is_past) == (["first"], True)
        cuda.then(lambda: called.append("later"))
    assert called == ["first", "later"]
    assert len(torch.cuda._queued_calls) == queued
    assert not torch.cuda.is_initialized()


def test_nothing_happens_after_the_watch_is_over() -> None:
    cuda, called = Beginning(), []
    with cuda.watching():
        cuda.then(lambda: called.append("never"))
        (begin,) = [call for call, _ in torch.cuda._queued_calls[-1:]]
    begin()
    assert called == []


def test_a_forked_process_does_not_touch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, called = Beginning(), []
    with cuda.watching():
        cuda.then(lambda: called.append("never"))
        monkeypatch.setattr(os, "getpid", lambda: -1)
        initialise()
        monkeypatch.undo()
    assert called == []


@pytest.mark.parametrize("device", [None, "cpu", torch.device("meta")])
def test_an_operation_elsewhere_does_not_initialise_it(device: object) -> None:
    cuda = Beginning()
    cuda.before({"device": device})
    assert not cuda.is_past


def test_the_recorders_own_look_ups_do_not_initialise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fakedist.record.recorder import Recorder

    def fail(*args: object) -> None:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", fail)
    monkeypatch.setattr(torch._C, "_cuda_init", fail, raising=False)

    records: list[Record] = []
    recorder = Recorder(records.append, 2, None)
    with recorder:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        recorder.close(Ending(Outcome.FINISHED, 0))
    kinds = {record.kind for record in records}
    assert "outcome" in kinds
    assert "events" not in kinds
