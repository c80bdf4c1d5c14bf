"""The timed step: the later one that a tracer sees, and the script's ranges."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from fakedist.record.timed_step import LaterStep, RecordedStep, script_ranges
from fakedist.record.tracer import NsysTracer
from fakedist.rundir.encoding import Record
from fakedist.rundir.notes import Note
from fakedist.rundir.records import NoteRecord
from fakedist.rundir.rows import Location
from fakedist.rundir.trace_records import TimedStepRecord

AFTER = Location(3, "other", 0, recompute=False)
TRACED = Note("traced", "traced")


class Written:
    def __init__(self, refuses: str = "") -> None:
        self.calls: list[str] = []
        self._refuses = refuses

    def begin(self, step: int) -> None:
        if self._refuses:
            raise RuntimeError(self._refuses)
        self.calls.append(f"begin {step}")

    def location(self, location: Location) -> None:
        self.calls.append(location.phase)

    def end(self) -> None:
        self.calls.append("end")

    def records(self) -> list[Record]:
        return [NoteRecord(TRACED)]


def timed(tracer: Written) -> LaterStep:
    """After two recorded steps."""
    step = LaterStep(lambda layer: f"layer{layer}", tracer)
    assert step.num_steps == 2
    assert step.begins_after(2)
    return step


def test_a_step_that_ends_with_the_script_says_what_is_in_its_times() -> None:
    step = timed(Written())
    step.step_ended(3, AFTER)
    step.step_ended(4, AFTER, is_cut_short=True)
    (*_, note) = step.close()
    assert isinstance(note, NoteRecord)
    assert note.note.code == "timed_to_the_end"


def test_one_step_warms_up_and_the_next_is_traced() -> None:
    tracer = Written()
    step = timed(tracer)
    assert [step.step_ended(2, AFTER), step.is_on, tracer.calls] == [False, False, []]
    assert step.step_ended(3, AFTER)
    step.location(Location(4, "forward", 0, recompute=False))
    assert not step.step_ended(4, AFTER)
    assert tracer.calls == ["begin 4", "other", "forward", "end"]
    assert step.close() == [TimedStepRecord(4), NoteRecord(TRACED)]


def test_without_a_tracer_nothing_is_timed() -> None:
    step, push = LaterStep(str), torch._C._nvtx.rangePushA
    with step.watching():
        assert torch._C._nvtx.rangePushA is push
    assert not step.begins_after(2)
    assert step.close() == []


def note_of(step: LaterStep) -> str:
    (record,) = step.close()
    assert isinstance(record, NoteRecord)
    return record.note.text


def test_a_script_that_ends_early_has_a_note_that_says_which_step_was_missing() -> None:
    step = timed(Written())
    assert note_of(step) == "no kernel times: the script ended before step 4, which would have been timed"
    tracer = Written()
    step = timed(tracer)
    step.step_ended(3, AFTER)
    assert note_of(step) == "no kernel times: step 4, which was timed, did not end"
    assert tracer.calls[-1] == "end"


def test_a_step_that_cannot_be_traced_says_why() -> None:
    step = timed(Written(refuses="CUPTI is taken\nby a tool"))
    assert not step.step_ended(3, AFTER)
    assert note_of(step) == "no kernel times: CUPTI is taken"
    step = timed(Written())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert not step.step_ended(3, AFTER)
    assert "its own profiler" in note_of(step)
    step = LaterStep(str, Written())
    with TorchDispatchMode():
        assert not step.begins_after(2)
    assert "in a TorchDispatchMode" in note_of(step)


def test_the_scripts_ranges_are_marked_also_those_that_began_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step = timed(Written())
    before = step.range_begins("train")
    step.range_ended(step.range_begins("over"))
    step.step_ended(2, AFTER)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        monkeypatch.setattr(torch._C._autograd, "_profiler_enabled", lambda: False)  # as before the tracer begins
        step.step_ended(3, AFTER)
        inside = step.range_begins("micro-batch: 1")
        step.range_ended(before)
        step.range_ended(inside)
        step.step_ended(4, AFTER)
        step.range_begins("later")
    marks = [event.name for event in profile.events() if event.name.startswith("fakedist.range")]
    assert marks == [
        "fakedist.range:0:train", "fakedist.range:2:micro-batch: 1", "fakedist.range_end:0", "fakedist.range_end:2",
    ]  # fmt: skip


def test_layers_that_an_error_cut_short_are_closed_with_the_one_around_them() -> None:
    step = timed(Written())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        step.layer_begins(1)
        step.layer_begins(2)
        step.layer_begins(3)
        step.layer_ended(1)
        step.layer_ended(7)  # began before the step
        step.layer_begins(4)
        step.layer_ended(4)
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    spans = {event.name().removeprefix("fakedist.layer:layer"): (event.start_ns(), event.end_ns()) for event in events}
    assert set(spans) == {"1", "2", "3", "4"}
    assert spans["1"][1] >= spans["2"][1] >= spans["3"][1]
    assert spans["4"][0] >= spans["1"][1]


class RangeLog:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def range_begins(self, name: str) -> int:
        self.seen.append(f"+{name}")
        return len(self.seen)

    def range_ended(self, number: int) -> None:
        self.seen.append(f"-{self.seen[number - 1][1:]}")


@pytest.fixture
def seen() -> Iterator[list[str]]:
    tracer = RangeLog()
    with script_ranges(tracer):
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
    with script_ranges(RangeLog()):
        assert torch._C._nvtx.rangePushA is not before[0]
    assert before == (torch._C._nvtx.rangePushA, torch.autograd.profiler.record_function.__enter__)


def test_nsys_is_told_the_step_and_one_phase_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    names = iter(range(100))
    opened: dict[int, str] = {}

    def start(name: str) -> int:
        told.append(f"+{name}")
        opened[number := next(names)] = name
        return number

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_start", start)
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", lambda number: told.append(f"-{opened[number]}"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", contextlib.nullcontext)
    tracer = NsysTracer()
    tracer.begin(4)
    for phase in ("forward", "backward"):
        tracer.location(Location(4, phase, 0, recompute=False))
    tracer.end()
    step = ["wait", "+fakedist.timed", "+fakedist.step:4", "wait"]
    forward, backward = "fakedist.phase:forward", "fakedist.phase:backward"
    phases = [f"+{forward}", f"-{forward}", f"+{backward}", "wait", f"-{backward}"]
    assert told == [*step, *phases, "-fakedist.step:4", "-fakedist.timed"]
    assert tracer.records() == ()


class Steps:
    """A recorder's steps, of which some are wanted; what counts as timed at the end."""

    def __init__(self, wanted: Sequence[int], sizes: Mapping[int, int] | None = None) -> None:
        self.written: list[int] = []
        self.traced: list[int] = []
        self.made: list[int] = []
        self._begun = 0
        position = cast(Any, SimpleNamespace(step=0, op=-1))
        operations = cast(Any, SimpleNamespace(trace=lambda tracer: None, tracer=None))
        self._position = position
        self._timed = RecordedStep(
            cast(Any, self),
            wanted.__contains__,
            lambda step: (sizes or {}).get(step, 1),
            position,
            operations=operations,
            ledger=cast(Any, SimpleNamespace(around=None)),
        )

    def begin(self, step: int) -> None:
        self._begun = step
        self.traced.append(step)

    def end(self) -> None: ...

    def cut_short(self) -> None:
        self._begun = -self._begun

    def taken(self) -> Callable[[], list[Record]]:
        return partial(self._records, self._begun)

    def _records(self, step: int) -> list[Record]:
        self.made.append(step)
        return [TimedStepRecord(step)]

    def at(self, step: int) -> Steps:
        self._position.step = step
        self._timed.follow()
        return self

    def ended(self, step: int, *, is_cut_short: bool = False) -> Steps:
        for record in self._timed.step_ended(step, is_cut_short=is_cut_short):
            assert isinstance(record, TimedStepRecord)
            self.written.append(record.step)
        return self

    def whole(self, *steps: int) -> Steps:
        for step in steps:
            self.at(step).ended(step)
        return self

    def went_on(self, step: int) -> Steps:
        self._timed.step_went_on(step)
        return self.at(step)

    def close(self, last: int) -> tuple[list[int], list[str]]:
        """The steps whose records were written, negative for a step cut short, and the notes' codes."""
        codes = []
        for record in self._timed.close(last):
            if isinstance(record, TimedStepRecord):
                self.written.append(record.step)
            elif isinstance(record, NoteRecord):
                codes.append(record.note.code)
        return self.written, codes


def test_the_first_complete_step_after_step_1_stands_in_for_a_wanted_one_that_did_not_end() -> None:
    assert Steps([2, 3]).whole(1, 2, 3).close(3) == ([2, 3], [])
    assert Steps([2, 3]).whole(1).at(2).close(2) == ([1], ["timed_early"])
    assert Steps([9]).whole(1, 2, 3).at(4).close(4) == ([2], ["timed_early"])
    assert Steps([9]).at(1).close(1) == ([], ["not_timed"])
    assert Steps([9]).whole(1).close(0) == ([], ["not_timed"])  # nothing counts steps


def test_steps_that_neither_stand_in_nor_are_wanted_are_not_traced_and_records_are_made_of_one_step_alone() -> None:
    steps = Steps([6]).whole(1, 2, 3, 4, 5, 6)
    assert (steps.close(6), steps.traced, steps.made) == (([6], []), [1, 2, 6], [6])
    early = Steps([6]).whole(1, 2, 3).at(4)
    assert (early.close(4), early.traced, early.made) == (([2], ["timed_early"]), [1, 2], [2])


def test_a_step_that_ends_with_the_run_stands_in_only_for_want_of_a_whole_one_after_the_first() -> None:
    cut_short = ["timed_early", "timed_to_its_optimizer"]
    assert Steps([9]).at(1).ended(1, is_cut_short=True).close(1) == ([-1], cut_short)
    assert Steps([9]).whole(1).at(2).ended(2, is_cut_short=True).close(2) == ([-2], cut_short)
    assert Steps([9]).whole(1, 2).at(3).ended(3, is_cut_short=True).close(3) == ([2], ["timed_early"])
    assert Steps([2]).whole(1).at(2).ended(2, is_cut_short=True).close(2) == ([-2], ["timed_to_its_optimizer"])


def test_a_step_whose_end_is_known_late_does_not_stand_in_and_does_not_keep_the_wanted_one_from_being_timed() -> None:
    assert Steps([2]).at(1).at(2).ended(1).ended(2).close(2) == ([2], [])
    assert Steps([9]).whole(1, 2).at(3).went_on(2).close(2) == ([], ["not_timed"])
    assert Steps([9]).at(1).at(2).ended(1).at(3).close(3) == ([], ["not_timed"])
    again = Steps([9]).whole(1, 2).at(3).went_on(2).whole(2, 3, 4)
    assert (again.close(4), again.traced) == (([3], ["timed_early"]), [1, 2, 3])


@pytest.mark.parametrize(
    ("sizes", "written"),
    [
        ({1: 900, 2: 40, 3: 90, 4: 60, 5: 61, 6: 10}, [2, 3, 4, 5]),  # of two as near, the larger
        ({2: 80, 3: 80, 4: 30}, [2, 3]),  # an odd last batch
        ({2: 30, 3: 80, 4: 80}, [2, 3, 4]),
    ],
)
def test_the_step_with_the_most_typical_input_counts(sizes: dict[int, int], written: list[int]) -> None:
    steps = Steps(range(2, 9), sizes).whole(*range(1, max(sizes) + 1))
    assert steps.close(max(sizes))[0] == written


def test_a_step_that_went_on_counts_once_in_the_median() -> None:
    steps = Steps(range(2, 9), {2: 20, 3: 60, 4: 50}).whole(1, 2, 3).at(4).went_on(3).whole(3, 4)
    assert steps.close(4)[0][-1] == 4
