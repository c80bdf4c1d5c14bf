"""Steps as kinds: what they carry, which sizes follow lengths, and what the player makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fakedist.analysis.blocks import build_blocks
from fakedist.errors import JobError
from fakedist.extras.play.player import play_steps
from fakedist.extras.play.step_kinds import NUM_COUNTS, StepKinds, recorded_sizes, step_kinds
from tests.unit.analysis.recorded import MIB, HandMade

LENGTHS = {1: 100, 2: 50, 3: 130, 4: 77, 5: 90, 6: 61}
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
    rows = [(step, SAMPLES, str(length), "") for step, length in lengths.items()]
    return pd.DataFrame(rows, columns=["step", "samples", "sample_shape", "name"])


def kinds_of(made: HandMade, lengths: dict[int, int] = LENGTHS, *, odd_step: int = 0) -> StepKinds:
    table = _steps(made, lengths, odd_step=odd_step)
    recording = made.read()
    return step_kinds(recording, build_blocks(recording), table)


def test_the_first_steps_are_not_repeated_and_others_follow_their_lengths(made: HandMade) -> None:
    """The batch that is made after a step's optimizer is the next step's."""
    kinds = kinds_of(made)
    assert ([kind.number for kind in kinds.steps], kinds.left_out, kinds.is_whole) == ([3, 4, 5, 6], [], True)
    assert kinds.age.tolist() == [1, 1]  # the loss and the batch
    for kind in kinds.steps:
        assert kind.is_fitted.all()
        counts = np.array([*kind.counts, 0])
        batch, saved, loss = (kind.base + kind.per * counts[kind.follows]).tolist()
        assert (saved, loss) == (12 * MIB + 1024 * SAMPLES * kind.length, 4)
        assert batch == 8 * SAMPLES * kind.length
    assert (kinds.nearest(1), kinds.nearest(80), kinds.nearest(1000)) == (4, 2, 1)


def test_a_step_that_was_left_out_of_the_fit_is_predicted_to_the_byte(made: HandMade) -> None:
    kinds = kinds_of(made)
    left_out = kinds.steps[1]
    others = kinds.fitted_without([left_out.number])
    assert [kind.number for kind in others.steps] == [3, 5, 6]
    counts = np.array([*left_out.counts, 0])
    sizes = (others.steps[0].base + others.steps[0].per * counts[others.steps[0].follows]).tolist()
    assert sizes == recorded_sizes(left_out).tolist()


def test_lengths_that_are_all_the_same_tell_nothing_of_others(made: HandMade) -> None:
    kinds = kinds_of(made, dict.fromkeys(LENGTHS, 64))
    assert kinds.fitted_part() == 0.0
    assert all((kind.follows < 0).all() for kind in kinds.steps)


def test_a_step_that_leaves_something_else_is_left_out(made: HandMade) -> None:
    kinds = kinds_of(made, odd_step=4)
    assert ([kind.number for kind in kinds.steps], kinds.left_out, kinds.is_whole) == ([3, 5, 6], [4], False)
    assert kinds_of(HandMade(directory=made.directory / "again"), odd_step=5).left_out == [5]


def _cycle(made: HandMade, num_steps: int) -> pd.DataFrame:
    """Rollouts and training in turns. A rollout makes a batch, which training frees, and scores, which the next rollout
    frees; training makes a loss, which the next training frees.
    """
    made.op("init", 0)
    made.alloc(0, 8 * MIB)
    for step in range(1, num_steps + 1):
        again, turn = step > 2, (step + 1) // 2 % 2 * MIB
        if step % 2:
            made.op("forward", step, name="aten.argmax.default")
            made.alloc(100 * MIB, 4 * MIB)
            made.op("forward", step, name="aten.topk.default")
            made.alloc(200 * MIB + 4 * turn, 2 * MIB)
            if again:
                made.free(200 * MIB + 4 * (MIB - turn), 2 * MIB)
        else:
            made.op("forward", step, name="aten.mse_loss.default")
            made.alloc(300 * MIB + 4 * turn, MIB)
            if again:
                made.free(300 * MIB + 4 * (MIB - turn), MIB)
            made.op("backward", step)
            made.free(100 * MIB, 4 * MIB)
        made.step(step)
    rows = [(step, 1, "8", "rollout" if step % 2 else "") for step in range(1, num_steps + 1)]
    return pd.DataFrame(rows, columns=["step", "samples", "sample_shape", "name"])


def test_steps_of_other_names_keep_blocks_until_the_next_of_their_name(made: HandMade, tmp_path: Path) -> None:
    table = _cycle(made, 8)
    recording = made.read()
    kinds = step_kinds(recording, build_blocks(recording), table)
    assert kinds.sequence == ["rollout", ""] * 3 == [kind.name for kind in kinds.steps]
    assert (kinds.left_out, sorted(kinds.age.tolist())) == ([], [0, 1, 1])
    rollout, train = kinds.nearest(8, "rollout"), kinds.nearest(8)
    assert [kinds.steps[n - 1].name for n in (rollout, train)] == ["rollout", ""]
    _program(kinds, tmp_path / "kinds.npz", 12, 60 * MIB)
    rows = np.array([[n, 0, *kinds.steps[n - 1].counts] for n in [rollout, train] * 2 + [train] * 6 + [rollout, train]])
    ((outcome, steps),) = play_steps(tmp_path / "kinds.npz", [rows], "")
    assert outcome["failed_event"] == -1
    # 8 of weights, and: a batch, both scores and a loss; a batch, scores and both losses; the same without a batch
    assert steps[:, 0].tolist() == [size * MIB for size in [17, 16] * 2 + [12] * 6 + [17, 16]]


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
    order = (1, 2, 3, 2) * 10
    rows = np.array([[n, 0, *kinds.steps[n - 1].counts] for n in order])
    repeats = np.array([rows[0]] * 40)
    emptied = repeats.copy()
    emptied[:, 1] = 1
    longer = repeats.copy()
    longer[20, 2] = 4_000 * SAMPLES
    plays = list(play_steps(tmp_path / "kinds.npz", [rows, repeats, emptied, longer], ""))
    (outcome, steps), (_, alike), (_, empty), (failed, _) = plays

    def allocated(length: int) -> int:
        return 24 * MIB + 12 * MIB + 1024 * SAMPLES * length

    assert outcome["failed_event"] == -1
    for row, step in zip(rows.tolist(), steps.tolist(), strict=True):
        assert 0 <= step[0] - allocated(kinds.steps[row[0] - 1].length) < MIB // 64
    for of, found in ((order, steps), ((1,) * 40, alike)):
        each = replace(kinds, steps=[kinds.steps[n - 1] for n in of])  # no kind comes again, so that each is played
        _program(each, tmp_path / "each.npz", 40, 60 * MIB)
        ((_, played),) = play_steps(
            tmp_path / "each.npz", [np.array([[n, 0, *kind.counts] for n, kind in enumerate(each.steps, 1)])], ""
        )
        assert (played == found).all()
    assert empty[-1, 3] > alike[-1, 3] == alike[0, 3]
    assert (failed["failed_step"], failed["requested_bytes"]) == (20, 12 * MIB + 1024 * 4_000 * SAMPLES)
    assert failed["allocated_bytes"] >= 24 * MIB
