"""The script's ranges are followed, and no others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch.profiler import record_function

from fakedist.record import timed_step as followed


class Told:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def range_begins(self, name: str) -> int:
        self.seen.append(f"+{name}")
        return len(self.seen)

    def range_ended(self, number: int) -> None:
        self.seen.append(f"-{self.seen[number - 1][1:]}")


@pytest.fixture
def seen() -> Iterator[list[str]]:
    tracer = Told()
    with followed.script_ranges(tracer):
        yield tracer.seen


def test_pushed_ranges_nest(seen: list[str]) -> None:
    torch.cuda.nvtx.range_push("outer")
    with torch.cuda.nvtx.range("inner {}", 3):
        torch.cuda.nvtx.mark("now")
    torch.cuda.nvtx.range_pop()
    assert seen == ["+outer", "+inner 3", "+now", "-now", "-inner 3", "-outer"]


def test_started_ranges_overlap(seen: list[str]) -> None:
    first, second = torch.cuda.nvtx.range_start("a"), torch.cuda.nvtx.range_start("b")
    torch.cuda.nvtx.range_end(first)
    torch.cuda.nvtx.range_end(second)
    assert seen[:2] == ["+a", "+b"]
    assert sorted(seen[2:]) == ["-a", "-b"]


def test_record_function_is_a_range_also_as_a_decorator(seen: list[str]) -> None:
    @record_function("decorated")
    def work() -> None:
        with record_function("inside"):
            pass

    work()
    assert seen == ["+decorated", "+inside", "-inside", "-decorated"]


def test_ranges_of_torch_and_ours_are_left_out(seen: list[str]) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.sum().backward()
    torch.optim.SGD([weight]).step()  # opens Optimizer.step#SGD.step
    with record_function("fakedist.layer:x"), torch.cuda.nvtx.range("fakedist.phase:y"):
        pass
    assert seen == []


def test_a_pop_too_many_is_torchs_business(seen: list[str]) -> None:
    torch.cuda.nvtx.range_pop()
    assert seen == []


def test_an_error_inside_closes_the_range(seen: list[str]) -> None:
    with contextlib.suppress(KeyError), torch.cuda.nvtx.range("fails"):
        raise KeyError
    assert seen == ["+fails", "-fails"]


def test_nothing_stays_replaced() -> None:
    before = (torch._C._nvtx.rangePushA, torch.autograd.profiler.record_function.__enter__)
    with followed.script_ranges(Told()):
        assert torch._C._nvtx.rangePushA is not before[0]
    assert before == (torch._C._nvtx.rangePushA, torch.autograd.profiler.record_function.__enter__)
