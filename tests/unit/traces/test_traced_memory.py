"""Memory of torch.profiler's traces, recorded with profile_memory=True.

The events are written by hand in the form of torch 2.15's export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakedist.report.content.memory import held_lines
from fakedist.results.building import open_imported
from fakedist.results.run import Run
from fakedist.traces.one_step import StepChoice
from tests.unit.traces.test_chrome_trace import event
from tests.unit.traces.test_kineto import Written

_MAIN, _AUTOGRAD = 7, 8
_RESERVED = 64 << 20


class Allocating(Written):
    """A trace whose operations allocate and free. ``before`` bytes were allocated before it began."""

    def __init__(self, before: int = 0) -> None:
        super().__init__()
        self.held, self.allocated, self._next = dict[int, int](), before, 1 << 20

    def change(self, at: int, bytes_: int, thread: int, **more: Any) -> None:
        self.allocated += bytes_
        facts = {"Device Type": 1, "Device Id": 0, "Addr": at, "Bytes": bytes_, "Total Allocated": self.allocated}
        facts["Total Reserved"] = _RESERVED
        self.events.append({**event("cpu_instant_event", "[memory]", self.now + 3, 0, **facts | more), "ph": "i"})
        self.events[-1]["tid"] = thread

    def alloc(self, size: int, operation: str = "aten::mm", thread: int = _MAIN, sequence: int = -1) -> int:
        """An operation that makes a block in aten::empty, which counts for it."""
        at, self._next = self._next, self._next + (1 << 20)
        self.held[at] = size
        for name, inside in ((operation, {"Sequence number": sequence} if sequence >= 0 else {}), ("aten::empty", {})):
            self.kernel(name, inside=inside)
            self.events[-3]["tid"], self.events[-2]["tid"] = thread, thread
            self.now -= 10
        self.change(at, size, thread)
        self.now += 10
        return at

    def free(self, at: int, thread: int = _MAIN) -> None:
        self.change(at, -self.held.pop(at), thread)
        self.now += 10

    def inside(self, category: str, name: str, begin: float, thread: int = _MAIN, **more: Any) -> None:
        self.events.append(event(category, name, begin - 0.5, self.now - begin, **more) | {"tid": thread})

    def step(self, number: int, *, zeroes: bool = True) -> None:
        """A linear layer's forward, its backward in a thread of its own, and an optimizer that makes states once."""
        begin = at = self.now
        saved = self.alloc(4096, "aten::addmm", sequence=number)
        self.inside("python_function", "nn.Module: Linear_0", at)
        self.inside("python_function", "model.py(12): forward", at - 0.2)
        self.inside("python_function", "train.py(3): main", begin - 0.4)
        at = self.now
        gradient = self.alloc(1024, "aten::mm", _AUTOGRAD)
        self.free(self.alloc(8192, "aten::mm", _AUTOGRAD), _AUTOGRAD)
        self.free(saved, _AUTOGRAD)
        name = "autograd::engine::evaluate_function: AddmmBackward0"
        self.inside("cpu_op", name, at, _AUTOGRAD, **{"Sequence number": number, "Fwd thread id": 1})
        at = self.now
        if number == 1:
            self.alloc(2048, "aten::zeros_like")
        self.free(self.alloc(512 * number, "aten::_foreach_sqrt"))
        self.inside("user_annotation", "Optimizer.step#AdamW.step", at)
        if zeroes:
            at = self.now
            self.free(gradient)
            self.inside("user_annotation", "Optimizer.zero_grad#AdamW.zero_grad", at)
        self.inside("user_annotation", f"ProfilerStep#{number}", begin)
        self.now += 5

    def open(self, folder: Path, step: int | None = None) -> Run:
        return open_imported(self.write(folder), StepChoice(step=step))


def at_peak(run: Run) -> dict[str, int]:
    return {name: bytes_ for name, bytes_ in run.summary.by_category.items() if bytes_}


def test_categories_layers_and_lines_at_the_peak_follow_from_the_ranges_around_each_request(tmp_path: Path) -> None:
    trace = Allocating(before=1 << 20)
    trace.step(1)
    trace.step(2)
    run = trace.open(tmp_path, 2)
    assert run.summary.peak_allocated_bytes == (1 << 20) + 2048 + 4096 + 1024 + 8192
    assert (run.summary.peak_step, run.summary.peak_phase) == (2, "backward")
    assert run.summary.peak_reserved_bytes == _RESERVED
    assert at_peak(run) == {
        "activation": 4096, "gradient": 1024, "temporary": 8192, "optimizer_state": 2048, "other": 1 << 20
    }  # fmt: skip
    assert run.memory is not None
    peak = run.memory.peak().sort_values("bytes").set_index("bytes")
    assert peak["operation"].to_dict() == {
        1024: "aten.mm", 2048: "aten.zeros_like", 4096: "aten.addmm", 8192: "aten.mm",
        1 << 20: "from before the history",
    }  # fmt: skip
    assert set(peak.loc[[1024, 4096, 8192], "layer"]) == {"Linear"}
    assert peak["line"].to_dict() == {
        1024: "model.py:12 (forward, backward)", 2048: "", 4096: "model.py:12 (forward)",
        8192: "model.py:12 (forward, backward)", 1 << 20: "",
    }  # fmt: skip
    assert next(line for line in held_lines(run) if line.label == "model.py:12 (forward)").bytes == 4096 + 1024 + 8192


def test_the_peak_is_that_of_the_step_that_is_shown(tmp_path: Path) -> None:
    """Step 1 makes the states, step 3 has the largest temporary."""
    trace = Allocating()
    for number in (1, 2, 3):
        if number == 2:
            trace.free(trace.alloc(1 << 22))  # between steps
        trace.step(number)
    peaks = {}
    for step in (1, 2, 3):
        run = trace.open(tmp_path, step)
        assert run.summary.timed is not None
        (said,) = [note.text for note in run.summary.timed[1].notes if note.code == "memory_traced"]
        assert f"13.00 KiB allocated and 64.00 MiB reserved in step {step};" in said or step > 1
        peaks[step] = run.summary.peak_allocated_bytes
        assert [row.step for row in run.summary.steps] == [step]
    held = 4096 + 1024 + 8192
    assert peaks == {1: held, 2: held + 2048, 3: held + 2048}


def test_blocks_from_before_the_trace_are_those_that_it_frees_and_a_rest(tmp_path: Path) -> None:
    trace = Allocating(before=10_240)
    trace.held[77 << 20] = 1024
    trace.step(1)
    trace.free(77 << 20)
    blocks = trace.open(tmp_path).table("blocks")
    assert blocks["bytes"].tolist()[:2] == [1024, 10_240 - 1024]
    assert blocks["operation"].tolist()[:2] == ["from before the history"] * 2


def test_without_steps_memory_counts_over_the_whole_file_and_its_phases_are_told(tmp_path: Path) -> None:
    trace = Allocating()
    trace.step(1)
    trace.events = [each for each in trace.events if not each["name"].startswith("ProfilerStep")]
    run = trace.open(tmp_path)
    phases = run.table("phases")
    assert list(zip(phases["step"], phases["phase"].astype(str), strict=True)) == [
        (1, "forward"), (1, "backward"), (1, "optimizer"), (1, "other")
    ]  # fmt: skip
    assert run.summary.peak_allocated_bytes == 4096 + 1024 + 8192


@pytest.mark.parametrize("facts", [{"Bytes": 1 << 60}, {"Total Allocated": -(1 << 61)}, {"Addr": "?"}])
def test_requests_of_impossible_sizes_are_left_out_and_counted(tmp_path: Path, facts: dict[str, Any]) -> None:
    trace = Allocating()
    trace.step(1)
    trace.change(1 << 30, 512, _MAIN, **facts)
    run = trace.open(tmp_path)
    assert run.summary.timed is not None
    is_counted = any(note.code == "events_not_read" for note in run.summary.timed[1].notes)
    assert is_counted == ("Addr" not in facts)
    assert run.summary.peak_allocated_bytes < 1 << 20


def test_a_trace_without_requests_has_no_memory(tmp_path: Path) -> None:
    trace = Written()
    trace.kernel("aten::mm")
    assert open_imported(trace.write(tmp_path)).memory is None
