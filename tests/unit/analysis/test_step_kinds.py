"""Steps as kinds: what they carry, which sizes follow lengths, and what the player makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.analysis.blocks import build_blocks
from fakedist.analysis.step_kinds import NUM_COUNTS, StepKinds, recorded_sizes, step_kinds
from fakedist.errors import JobError
from fakedist.launcher.playing import play_steps
from tests.unit.analysis.recorded import MIB, HandMade

LENGTHS = {1: 100, 2: 50, 3: 130, 4: 77, 5: 90}
SAMPLES = 4
_AT = {"weights": 0, "state": 100 * MIB, "saved": 200 * MIB, "loss": 500 * MIB, "batch": 600 * MIB, "odd": 700 * MIB}


def _steps(made: HandMade, lengths: dict[int, int], *, odd_step: int = 0) -> pd.DataFrame:
    """A weight, a state that the first step makes, a block that follows the length, one that the next step frees (two
    addresses in turn), and the next step's batch.
    """
    made.op("init", 0)
    made.alloc(_AT["weights"], 8 * MIB)
    made.alloc(_AT["batch"], 8 * SAMPLES * lengths[1])
    for step, length in lengths.items():
        made.op("forward", step)
        saved = 12 * MIB + 1024 * SAMPLES * length
        made.alloc(_AT["saved"], saved)
        if step == odd_step:
            made.alloc(_AT["odd"], MIB)
        made.op("forward", step, name="aten.mse_loss.default")
        made.alloc(_AT["loss"] + step % 2 * MIB, 4)
        if step > 1:
            made.free(_AT["loss"] + (1 - step % 2) * MIB, 4)
        made.op("backward", step)
        made.free(_AT["saved"], saved)
        made.op("optimizer", step)
        if step == 1:
            made.alloc(_AT["state"], 16 * MIB)
        made.op("other", step, name="aten.randint.low")
        made.free(_AT["batch"], 8 * SAMPLES * length)
        made.alloc(_AT["batch"], 8 * SAMPLES * lengths.get(step + 1, 64))
        made.step(step)
    rows = [(step, SAMPLES, str(length)) for step, length in lengths.items()]
    return pd.DataFrame(rows, columns=["step", "samples", "sample_shape"])


def kinds_of(made: HandMade, lengths: dict[int, int] = LENGTHS, *, odd_step: int = 0) -> StepKinds:
    table = _steps(made, lengths, odd_step=odd_step)
    recording = made.read()
    return step_kinds(recording, build_blocks(recording), table)


def test_the_first_step_is_not_repeated_and_others_follow_their_lengths(made: HandMade) -> None:
    kinds = kinds_of(made)
    assert ([kind.number for kind in kinds.steps], kinds.left_out, kinds.is_whole) == ([2, 3, 4, 5], [], True)
    assert kinds.age.tolist() == [1, 1]  # the loss and the batch
    for kind in kinds.steps[:-1]:
        assert kind.is_fitted.all()
        counts = np.array([*kind.counts, 0])
        saved, loss, batch = (kind.base + kind.per * counts[kind.follows]).tolist()
        assert (saved, loss) == (12 * MIB + 1024 * SAMPLES * kind.length, 4)
        assert batch == 8 * SAMPLES * kind.next_input.length
    assert kinds.steps[-1].is_fitted.tolist() == [True, True, False]  # no one knows the length of its batch
    assert recorded_sizes(kinds.steps[-1]).tolist() == [12 * MIB + 1024 * SAMPLES * 90, 4, 8 * SAMPLES * 64]
    assert (kinds.nearest(1), kinds.nearest(80), kinds.nearest(1000)) == (1, 3, 2)


def test_a_step_that_was_left_out_of_the_fit_is_predicted_to_the_byte(made: HandMade) -> None:
    kinds = kinds_of(made)
    left_out = kinds.steps[1]
    others = kinds.fitted_without([left_out.number])
    assert [kind.number for kind in others.steps] == [2, 4, 5]
    counts = np.array([*left_out.counts, 0])
    saved, loss, _ = (others.steps[0].base + others.steps[0].per * counts[others.steps[0].follows]).tolist()
    assert [saved, loss] == recorded_sizes(left_out)[:2].tolist()


def test_lengths_that_are_all_the_same_tell_nothing_of_others(made: HandMade) -> None:
    kinds = kinds_of(made, dict.fromkeys(LENGTHS, 64))
    assert kinds.fitted_part() == 0.0
    assert all((kind.follows < 0).all() for kind in kinds.steps)


def test_a_step_that_leaves_something_else_is_left_out(made: HandMade) -> None:
    kinds = kinds_of(made, odd_step=4)
    assert ([kind.number for kind in kinds.steps], kinds.left_out, kinds.is_whole) == ([2, 3, 5], [4], False)
    assert kinds_of(HandMade(directory=made.directory / "again"), odd_step=5).left_out == [5]


def test_a_single_step_cannot_be_played(made: HandMade) -> None:
    with pytest.raises(JobError, match="no recorded step can follow any other"):
        kinds_of(made, {1: 10})


def _program(kinds: StepKinds, path: Path, num_steps: int, room_bytes: int) -> None:
    sizes = [num_steps, NUM_COUNTS, len(kinds.age), 1 + int(kinds.age.max()), 0, room_bytes]
    arrays: dict[str, Any] = kinds.arrays()
    np.savez(path, sizes=np.array(sizes), gpu=np.array("h100-80g"), **arrays)


def test_played_steps_take_what_their_lengths_need(made: HandMade, tmp_path: Path) -> None:
    """And those that repeat are as if each were played."""
    kinds = kinds_of(made)
    _program(kinds, tmp_path / "kinds.npz", 40, 60 * MIB)
    rows = np.array([[n, 0, *kinds.steps[n - 1].counts] for n in (1, 2, 3, 2) * 10])
    repeats = np.array([rows[0]] * 40)
    emptied = repeats.copy()
    emptied[:, 1] = 1
    longer = repeats.copy()
    longer[20, 2] = 4_000 * SAMPLES
    ends_otherwise = [np.array([*some[:-1], rows[2]]) for some in (repeats, emptied)]  # so that each step is played
    plays = list(play_steps(tmp_path / "kinds.npz", [rows, repeats, emptied, longer, *ends_otherwise], ""))
    (outcome, steps), (_, alike), (_, empty), (failed, _), (_, each), (_, each_emptied) = plays

    def allocated(length: int) -> int:
        return 24 * MIB + 12 * MIB + 1024 * SAMPLES * length

    assert outcome["failed_event"] == -1
    for row, step in zip(rows.tolist(), steps.tolist(), strict=True):
        assert 0 <= step[0] - allocated(kinds.steps[row[0] - 1].length) < MIB // 64
    assert (alike[:-1] == each[:-1]).all()
    assert (empty[:-1] == each_emptied[:-1]).all()
    assert empty[-1, 3] > alike[-1, 3] == alike[0, 3]
    assert (failed["failed_step"], failed["requested_bytes"]) == (20, 12 * MIB + 1024 * 4_000 * SAMPLES)
    assert failed["allocated_bytes"] >= 24 * MIB
