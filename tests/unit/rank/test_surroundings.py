"""The surroundings of a script: what they write of the GPU, and which notes its end has. There is no GPU here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from fakedist.gpu.models.catalogue import GPUS
from fakedist.gpu.virtual import VirtualGpu
from fakedist.options import Job
from fakedist.rank.reporter import Message, Progress, Reporter
from fakedist.rank.surroundings import Process, Surroundings
from fakedist.rundir.encoding import Record
from fakedist.rundir.notes import Note
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.records import GpuRecord, NcclRecord, NoteRecord, OutcomeRecord, UnansweredRecord
from fakedist.rundir.rows import DeviceUseRow, UnansweredRow
from fakedist.world.spawned import OwnRanks

JOB = Job(world_size=8, rank=3, target="train.py", kernels=False, values="off", gpu="h200", gpus_per_node=4)
R = TypeVar("R")


class Gpu(VirtualGpu):
    """A driver that refused two functions and has a note."""

    def __init__(self, visible: list[int], traced: int = 0) -> None:
        self._visible, self._traced = visible, traced

    def visible(self) -> list[int]:
        return self._visible

    def go_beyond(self, decide: Callable[[int, int, int, int], bool] | None) -> None:
        pass

    def tell_peer_copies(self, told: Callable[[int, int, int, int], None]) -> None:
        pass

    def outside_peak(self, device: int) -> int:
        return 0

    def backed_peak(self, device: int) -> int:
        return 0

    def most_of_engine(self, device: int) -> tuple[int, int]:
        return 0, 0

    def timeline(self, device: int) -> tuple[list[str], list[DeviceUseRow]]:
        return [], []

    def refused(self) -> list[tuple[str, int]]:
        return [("cuFoo", 2), ("cuBar", 1)]

    def notes(self) -> list[Note]:
        return [Note("of the driver", "text")]

    def traced(self) -> int:
        return self._traced


class Journal:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def append(self, record: Record) -> None:
        self.records.append(record)

    def of(self, kind: type[R]) -> list[R]:
        return [record for record in self.records if isinstance(record, kind)]

    def codes(self) -> set[str]:
        return {record.note.code for record in self.of(NoteRecord)}


class MessageLog(Reporter):
    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Recorded steps run without compiled code, and leave nothing in the user's cache."""
    monkeypatch.setenv("FAKEDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


def ran(
    job: Job, gpu: VirtualGpu | None, outcome: Outcome = Outcome.FINISHED, steps: int = 0
) -> tuple[Journal, MessageLog]:
    """The journal of a script that trains for so many steps."""
    journal, told = Journal(), MessageLog()
    process = Process(job, journal, Journal(), told, gpu, OwnRanks(job), lambda: None)
    surroundings = Surroundings(process, lambda call: call())
    surroundings.enter()
    try:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        surroundings.close(Ending(outcome, 0), "train.py:1")
    finally:
        surroundings.leave()
    return journal, told


@pytest.mark.parametrize(
    ("visible", "index"),
    [([], 3), ([0, 1, 2, 3], 3), ([5], 0), ([2, 3], 1)],
    ids=["all", "as many", "another", "not the first"],
)
def test_a_virtual_gpu_is_that_of_the_job_under_its_number_among_the_visible(visible: list[int], index: int) -> None:
    job = dataclasses.replace(JOB, gpu_memory_bytes=10 << 30)
    journal, _ = ran(job, Gpu(visible))
    (gpu,) = journal.of(GpuRecord)
    spec = GPUS["h200"]
    assert (gpu.device_index, gpu.gpu_name, gpu.compute_capability) == (index, spec.product, "9.0")
    assert (gpu.capacity_bytes, gpu.spec_memory_bytes) == (10 << 30, spec.memory_bytes)
    assert gpu.model == spec
    assert gpu.peaks is not None
    assert gpu.peaks.flops == spec.peak_flops


def test_facts_of_the_driver_are_written_once_at_the_end() -> None:
    journal, told = ran(JOB, Gpu([], traced=7), steps=2)
    (refused,) = journal.of(UnansweredRecord)
    assert refused.rows == [UnansweredRow("cuFoo", 2), UnansweredRow("cuBar", 1)]
    assert {"of the driver", "profiler_saw_virtual_gpu"} <= journal.codes()
    assert len(journal.of(NcclRecord)) == 2  # before the script, and after it may have set variables
    (outcome,) = journal.of(OutcomeRecord)
    assert (outcome.line, outcome.last_step) == ("train.py:1", 2)
    assert all(isinstance(message, Progress) and message.steps == JOB.steps for message in told.messages)


@pytest.mark.parametrize(
    ("outcome", "values", "is_likely"),
    [(Outcome.EXCEPTION, "off", True), (Outcome.FINISHED, "off", False), (Outcome.EXCEPTION, "small", False)],
)
def test_values_that_were_off_may_be_why_a_script_failed(outcome: Outcome, values: Any, is_likely: bool) -> None:
    journal, _ = ran(dataclasses.replace(JOB, values=values), Gpu([]), outcome)
    assert ("values_off" in journal.codes()) is is_likely


def test_of_a_real_gpu_nothing_is_known_until_cuda_begins() -> None:
    journal, _ = ran(dataclasses.replace(JOB, device="cuda", kernels=True), None)
    (gpu,) = journal.of(GpuRecord)
    assert (gpu.gpu_name, gpu.capacity_bytes, gpu.device_index) == ("", 0, 0)
    assert journal.of(UnansweredRecord) == []
