"""The length of the recording."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fakedist.record.loading import StepSize
from fakedist.record.steps import After, Live, LiveBytes, Steady, make_goal

MIB = 1 << 20


class Ends:
    """Steps that end with so much live on device 0: requests for large and small blocks, and the large blocks."""

    def __init__(
        self, *live: tuple[int, ...], waits: bool = False, stops: bool = True, rows: Sequence[int] = (8,) * 8
    ) -> None:
        self.live = [{0: LiveBytes(large, small, *blocks or (large,))} for large, small, *blocks in live]
        self.goal = Steady(
            self._now, lambda: waits, lambda step: StepSize(rows[step - 1], 0, rows[step - 1]), stops=stops
        )
        self.number = 0

    def _now(self) -> Live:
        return self.live[self.number - 1]

    def run(self) -> int:
        """The last step, of those there are."""
        for _ in self.live:
            self.number += 1
            self.goal.may_end()
            if self.goal.is_last(self.number):
                break
        return self.number


def test_a_step_that_ends_with_more_is_followed_by_another() -> None:
    ends = Ends((MIB, 5), (MIB, 5), (MIB, 5))
    assert ends.run() == 2
    assert ends.goal.notes() == []
    assert not ends.goal.is_timed(3)
    more = Ends((MIB, 5), (3 * MIB, 5), (3 * MIB, 5))
    assert more.goal.is_timed(2)
    assert more.run() == 3
    # Losses kept for a log are steady enough.
    assert Ends((MIB, 512), (MIB, 1024), (MIB, 1536)).run() == 2
    assert Ends((MIB, 512), (MIB, 512 + MIB), (MIB, 512 + MIB)).run() == 3


def test_other_blocks_for_the_same_requests_take_one_more_step() -> None:
    assert Ends((MIB, 5, MIB), (MIB, 5, 2 * MIB), (MIB, 5, 2 * MIB), (MIB, 5, 2 * MIB)).run() == 3
    assert Ends((MIB, 5, MIB), (MIB, 5, 2 * MIB), (MIB, 5, MIB), (MIB, 5, 2 * MIB)).run() == 3  # rounding alone
    assert (
        Ends((MIB, 5, MIB), (MIB, 5, 2 * MIB), (3 * MIB, 5, MIB), (3 * MIB, 5, 2 * MIB), (3 * MIB, 5, 2 * MIB)).run()
        == 5
    )


def test_after_six_steps_it_says_that_it_was_not_steady() -> None:
    ends = Ends(*((step * MIB, step * MIB) for step in range(1, 9)))
    assert ends.run() == 6
    (note,) = ends.goal.notes()
    assert note.text == (
        "not steady: 10.00 MiB of requests were live at the end of step 5, 12.00 MiB at the end of step 6 "
        "(+2,097,152 bytes): --steps 10"
    )


def test_a_partial_batch_is_not_the_step_to_stop_at() -> None:
    assert Ends(*[(MIB, 0)] * 8, rows=[8, 3, 8, 3, 8, 3]).run() == 3
    ends = Ends(*[(MIB, 0)] * 8, rows=[80, 70, 60, 50, 40, 30])
    assert ends.run() == 6
    assert "not steady: step 6 had a smaller batch than a step before" in ends.goal.notes()[0].text
    assert Ends(*[(MIB, 0)] * 8, rows=[3, 8, 8]).run() == 2
    probed = Ends(*[(MIB, 0)] * 8)
    probed.goal = Steady(probed._now, lambda: False, lambda step: StepSize(9 if step == 1 else 8, 0, 1))
    assert probed.run() == 2  # a pipeline probes its shapes with one more forward
    assert Ends(*[(MIB, 0)] * 8, rows=[100, 90, 100]).run() == 2  # graphs, which are never alike


@pytest.mark.parametrize(
    ("evaluating", "last"),
    [((2,), 3), ((2, 4, 6), 3), ((2, 3), 3), ((2, 3, 4), 3), ((), 2), ((3,), 2)],
)
def test_a_step_that_alone_has_an_evaluation_is_not_the_one_to_stop_at(evaluating: tuple[int, ...], last: int) -> None:
    ends = Ends(*[(MIB, 0)] * 8)
    ends.goal = Steady(ends._now, lambda: False, evaluates=lambda step: step in evaluating)
    assert ends.run() == last


def test_an_optimizer_that_waits_may_still_make_its_state_and_until_something_else_no_step_is_the_last() -> None:
    ends = Ends(*[(MIB, 0)] * 8, waits=True)
    assert ends.run() == 6
    assert "an optimizer has not stepped" in ends.goal.notes()[0].text
    ends = Ends(*[(MIB, 0)] * 4, stops=False)
    assert ends.run() == 4
    assert not ends.goal.is_timed(3)


@pytest.mark.parametrize(
    ("steps", "until", "last", "timed"),
    [(3, None, 3, 3), ("auto", 4, 4, 4), (3, "end", None, 3), (3, "validation", None, 3)],
)
def test_until_wins_over_steps(steps: int, until: int, last: int | None, timed: int) -> None:
    goal = make_goal(
        steps, until, dict, lambda: False, lambda step: StepSize(0, 0), has_static_graph=lambda: False, vary=bool
    )
    assert isinstance(goal, After)
    assert [step for step in range(1, 9) if goal.is_last(step)][:1] == ([] if last is None else [last])
    assert [step for step in range(1, 9) if goal.is_timed(step)] == [timed]


def test_inputs_that_vary_by_a_tenth_are_followed_by_more_and_with_a_number_of_steps_all_are_timed() -> None:
    ends = Ends(*[(MIB, 0)] * 8)
    widest = [100, 70, 100, 92, 100]
    ends.goal = Steady(ends._now, lambda: False, lambda step: StepSize(8, 0, 8, widest[step - 1]))
    assert ends.run() == 4
    fixed = After(4, vary=lambda: True)
    assert [step for step in range(1, 9) if fixed.is_timed(step)] == [2, 3, 4]


def test_a_static_graph_is_not_steady_before_its_last_buckets() -> None:
    goal = Steady(lambda: {0: LiveBytes(MIB, 5, MIB)}, lambda: False, has_static_graph=lambda: True)
    goal.may_end()
    assert [goal.is_last(step) for step in (1, 2)] == [False, False]
    assert "static graph in step 3" in goal.notes()[0].text
    assert goal.is_last(3)
    assert goal.notes() == []
