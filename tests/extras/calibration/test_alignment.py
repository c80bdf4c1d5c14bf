"""Alignment: repeated steps, lost and extra launches; a band gives what the whole gives."""

import itertools
import random

import numpy as np
import pytest

from fakedist.extras.calibration.matching import MOST_CELLS, Sequence, Signature, align, score


def sequence(text: str) -> Sequence:
    """A launch for each letter; capitals are products."""
    return Sequence.of(
        [
            Signature(
                "kernel", f"void {each}{each}()", "gemm" if each.isupper() else "elementwise", grid=f"{ord(each)},1,1"
            )
            for each in text
        ]
    )


def positions(recorded: str, traced: str, most_cells: int = MOST_CELLS) -> list[int]:
    one, other = sequence(recorded), sequence(traced)
    return align(one, other, score(one.signatures, other.signatures), most_cells).tolist()


@pytest.mark.parametrize(
    ("recorded", "traced", "expected"),
    [
        ("abcd", "abcdabcd", [0, 1, 2, 3, 4, 5, 6, 7]),  # each repetition counts on
        ("abcd", "cdabcd", [2, 3, 4, 5, 6, 7]),  # a trace may begin inside a step
        ("abcd", "abxcyyd", [0, 1, -1, 2, -1, -1, 3]),  # an extra launch has no position
        ("abcdefgh", "abcfgh", [0, 1, 2, 5, 6, 7]),  # a missing launch is passed
        ("abc", "xyz", [-1, -1, -1]),
        ("abc", "", []),
        ("", "abc", [-1, -1, -1]),
    ],
)
def test_launches_have_their_positions_in_the_recorded_step(recorded: str, traced: str, expected: list[int]) -> None:
    assert positions(recorded, traced) == expected


def test_a_lost_layer_does_not_shift_the_others() -> None:
    layers = "abCd" * 5
    assert positions(f"x{layers}y", f"x{layers[4:]}y")[-1] == 21


def test_order_counts_not_only_what_there_is() -> None:
    """Passing almost a whole step for each launch costs more than leaving launches out."""
    step = "abcdefghijklmnopqrstuvwxyz" * 4
    found = positions(step, step[::-1])
    assert sum(each >= 0 for each in found) < len(step) / 2


@pytest.mark.parametrize("seed", range(5))
def test_a_band_gives_what_the_whole_gives(seed: int) -> None:
    chosen = random.Random(seed)
    recorded = "".join(chosen.choices("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLM", k=900))
    traced = "".join(chosen.choice(("", each, each + "z")) if chosen.random() < 0.1 else each for each in recorded * 2)
    whole = positions(recorded, traced)
    assert np.mean(np.array(whole) >= 0) > 0.9
    assert np.mean(np.array(positions(recorded, traced, 600_000)) == np.array(whole)) > 0.99


def worth(gains: np.ndarray, found: list[int]) -> int:
    """The score of an alignment: its pairs, less 3 for each launch passed between two, and 1 for each traced one left.

    ``gains`` has a row for each traced launch.
    """
    taken = [(number, at) for number, at in enumerate(found) if at >= 0]
    passed = sum(after - before - 1 for (_, before), (_, after) in itertools.pairwise(taken))
    assert all(after > before for (_, before), (_, after) in itertools.pairwise(taken))
    return sum(int(gains[number, at % gains.shape[1]]) for number, at in taken) - 3 * passed - len(found) + len(taken)


def most_worth(gains: np.ndarray) -> int:
    """The score of the best of all alignments, found by trying each."""
    count = gains.shape[1]
    best = dict.fromkeys(range(-1, count), 0)  # by the launch passed last
    for row in gains.tolist():
        after = {at: value - 1 for at, value in best.items()}
        for at, value in best.items():
            for skipped in range(count):
                to = at + 1 + skipped
                if row[to % count] > 0:
                    after[to] = max(after.get(to, -1000), value + row[to % count] - 3 * skipped)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(6))
def test_no_alignment_is_worth_more(seed: int) -> None:
    chosen = random.Random(seed)
    recorded, traced = ("".join(chosen.choices("abABC", k=number)) for number in (chosen.randint(5, 9), 14))
    one, other = sequence(recorded + "AB"), sequence(traced + "BA")
    scores = np.array([[chosen.choice((-5, 1, 2, 4, 9, 30)) for _ in other.signatures] for _ in one.signatures], "i4")
    gains = scores[one.signature][:, other.signature].T
    for most_cells in (MOST_CELLS, len(one) * len(other) - 1):
        assert worth(gains, align(one, other, scores, most_cells).tolist()) == most_worth(gains)
